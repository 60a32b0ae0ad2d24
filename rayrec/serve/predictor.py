"""`Predictor`: scores rows by an artifact, in one process, without Ray and without a trainer.

    predictor = Predictor.load("served/clicks")
    predictor.predict([{"user": 7, "item": 12, "age": 0.3}])

The artifact is read into memory once, and its folder is not looked at again. Processes that are
forked share the memory of the tables. The calls may come from several threads.

    # B rows, I dense columns, N candidates
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from rayrec.data import Batch
from rayrec.errors import ArtifactError, InputError, RayrecError
from rayrec.layout.schema import FeatureSchema
from rayrec.next_item_recipe import NextItemRecipe
from rayrec.quant import QuantEmbeddingBagCollection, configs_of
from rayrec.serve.artifact import Artifact, open_artifact
from rayrec.serve.manifest import Manifest
from rayrec.serve.readers import NextItemReader, RowReader, UserOnce
from rayrec.serve.recipes import recipe_of
from rayrec.serve.requests import Request, Rows, nothing
from rayrec.serve.scorer import probabilities
from rayrec.serve.trained_model import schema_trouble
from rayrec.serve.weights import Collections, Weights
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage import one_line

if TYPE_CHECKING:
    from rayrec.serve.chain.following import FollowingPredictor

Scores = Tensor | dict[str, Tensor]
ITEM, SCORE = "item", "score"  # what the lists of the best items hold


class Predictor:
    """Scores rows; make one with `Predictor.load`.

    Args:
        artifact: opened artifact.
        model: builds the training module; None takes the artifact's recipe or program.
    Raises:
        ArtifactError: the artifact has neither a recipe nor a program, or not of this model.

    Attributes:
        manifest: manifest of the artifact.
        schema: schema of the columns; None if the model was exported without one.
        weights: current version of the weights.
        requests: reader of the requests that `score` takes.
    """

    def __init__(self, artifact: Artifact, model: Callable[[], nn.Module] | None = None) -> None:
        self.manifest: Manifest = artifact.manifest
        self.schema: FeatureSchema | None = artifact.schema
        try:
            self.weights = Weights(artifact, model)
            self.requests = self._reader()
            if not artifact.trusted:
                self.warm()
        # a whole manifest of somebody else's may contradict itself in any way
        except Exception as error:
            if isinstance(error, RayrecError) or artifact.trusted or model is not None:
                raise
            raise ArtifactError(
                f"{artifact.folder} contradicts itself ({type(error).__name__}: {one_line(error)}"
                "), and no model can be built of it. Export the checkpoint again."
            ) from error

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: bool = True,
        trusted: bool = True,
        signing_key: str | None = None,
        model: Callable[[], nn.Module] | None = None,
    ) -> Predictor:
        """Open an artifact; the predictor is ready when this returns.

        Args:
            path: local folder that `rayrec export` wrote.
            verify: compare the sha256 of every file with that of the manifest.
            trusted: allow the artifact to run code of whoever exported it. False reads its
                recipe and its tensors alone: neither a torch.export program nor compiled code is
                loaded, and nothing is unpickled.
            signing_key: place of the key that the artifact has to be signed with: a file, or
                "env:NAME", an environment variable. None asks for no signature.
            model: builds the training module of a model of the user's code; without it such a model
                is served by its exported program.
        Raises:
            ConfigError: the path is no local one, or there is no key.
            ArtifactError: there is no artifact of this version; or a file is missing or damaged; or
                the artifact is not signed; or it is not trusted and cannot be served without code.
        """
        opened = open_artifact(path, verify=verify, trusted=trusted, signing_key=signing_key)
        return cls(opened, model)

    @staticmethod
    def follow(
        path: str | os.PathLike[str],
        *,
        strict: bool = True,
        trusted: bool = True,
        signing_key: str | None = None,
        model: Callable[[], nn.Module] | None = None,
    ) -> FollowingPredictor:
        """Score by the publications of a training; the predictor has the newest version on return.

        Its `refresh` applies later publications.

        Args:
            path: local folder of a run that publishes, or of its publications.
            strict: keep two copies of the tables, so that every call is scored under one version;
                False keeps one, and calls during a refresh may meet rows of two versions.
            trusted, signing_key, model: the arguments of `load`; each publication has to be signed.
        Raises:
            ConfigError: the path is no local one, or there is no key.
            ArtifactError: nothing was published there yet, or no base is whole.
        """
        from rayrec.serve.chain.follower import Follower
        from rayrec.serve.chain.following import FollowingPredictor

        follower = Follower(path, strict=strict, trusted=trusted, signing_key=signing_key)
        return FollowingPredictor(follower, model)

    @property
    def step(self) -> int:
        """Training step of the weights."""
        return self.weights.step

    @property
    def collections(self) -> Collections:
        """Packed tables, by the collections' names in the model."""
        return self.weights.collections

    def predict(self, rows: Rows | KeyedJaggedTensor, dense: Tensor | None = None) -> Scores:
        """Return the probability of label 1 of every row; of a next-item model the score of the
        row's item, or where rows have no item what `predict_top` returns.

        Args:
            rows: an Arrow record batch or table, or a list of dicts from column to value, by the
                schema; other columns are ignored, and labels are not read. Or ids as a
                KeyedJaggedTensor of B bags per key.
            dense: (B, I) beside a KeyedJaggedTensor.
        Returns:
            (B,) float32. Of a model of several tasks a dict by their names: probabilities of a
            binary task, (B, classes) of a multiclass one, values of a regression.
        Raises:
            InputError: a column is missing or of a wrong type, an id lies outside its table, a
                number is not finite; names column, row and value.
            ConfigError: rows of columns are given, and the artifact has no schema.
        """
        return self.score(self.read(rows, dense))

    def read(self, rows: Rows | KeyedJaggedTensor, dense: Tensor | None = None) -> Request:
        """Check the rows of a `predict` call, and return them as a request for `score`.

        Raises:
            InputError, ConfigError: the errors of `predict`.
        """
        if isinstance(rows, KeyedJaggedTensor):
            return self.requests.of_tensors(rows, dense)
        if dense is not None:
            raise InputError(
                "dense belongs to a KeyedJaggedTensor; rows have columns of their own."
            )
        return self.requests.read(rows)

    def predict_top(
        self, rows: Rows, k: int | None = None, masked: bool = False
    ) -> dict[str, Tensor]:
        """Return the best items after the histories of some rows, by a next-item model.

        Args:
            rows: as of `predict`, without the column of the item.
            k: length of the lists; None takes the longest of `ks` in training.
            masked: leave out the items of the row's history and of the model's sequence `seen`.
        Returns:
            "item" (B, k) int64 and "score" (B, k) float32, best first and of equal scores the lower
            id first. Where fewer items are left, the rest are -1 with a score of -inf.
        Raises:
            InputError: the errors of `predict`; or k is larger than the number of the items.
            ConfigError: k is below 1, or the model is none that ranks items.
        """
        found = self.score(self.requests.best(rows, k, masked))
        assert isinstance(found, dict), "lists of the best items"
        return found

    def score(self, request: Request) -> Scores:
        """Return the scores of a request that `read` made."""
        return self.score_and_weights(request)[0]

    def score_and_weights(self, request: Request) -> tuple[Scores, Weights]:
        """Return the scores of a request, and the weights that gave them, for their name."""
        with self._held() as weights:
            outputs = weights.outputs(request)
        if request.top is not None:
            return dict(zip((ITEM, SCORE), outputs, strict=True)), weights
        return self._named(outputs, probabilities), weights

    def logits(self, rows: Rows | KeyedJaggedTensor, dense: Tensor | None = None) -> Scores:
        """Return the logits of every row, for the arguments of `predict`."""
        return self._named(self.outputs(self.read(rows, dense)), lambda kind, logits: logits)

    def predict_batch(self, batch: Batch) -> Scores:
        """Return the scores of a batch that a loader of `rayrec.data` made, by the same schema."""
        return self.score(self.requests.of_batch(batch))

    def predict_candidates(self, user: Mapping[str, Any] | Rows, candidates: Rows) -> Scores:
        """Return the probability of label 1 of each candidate for one user.

        The user's features are looked up once, and its history is encoded once, by rayrec's own
        models. HSTU for ranking does so where the candidates have nothing but their own features.

        Args:
            user: the columns that are the same for all candidates, as one row.
            candidates: N rows of all other columns of the schema.
        Returns:
            (N,) float32, as `predict`.
        Raises:
            InputError, ConfigError: the errors of `predict`; or a column is on both sides.
        """
        one: Rows = [user] if isinstance(user, Mapping) else user
        return self.score(self.requests.of_user(one, candidates))

    def warm(self) -> None:
        """Warm up: score a row of empty lists, so that no caller waits for the first call."""
        if self.schema is not None:
            request = Request.of_batch(nothing(self.schema, 1))
            self._named(self.weights.outputs(request), probabilities)

    def _reader(self) -> RowReader | NextItemReader:
        """Return the reader of the requests to the model."""
        schema, fields, scorer = self.schema, self.manifest.recipe, self.weights.scorer
        tables = [table for one in self.collections.values() for table in configs_of(one)]
        is_checked = schema is not None and not schema_trouble(schema, tables)
        recipe = None if fields is None else recipe_of(fields, "the artifact")
        if schema is not None and isinstance(recipe, NextItemRecipe):
            return NextItemReader(schema, recipe.model, is_checked)
        bags = all(isinstance(c, QuantEmbeddingBagCollection) for c in self.collections.values())
        if scorer is None:
            return RowReader(schema, is_checked, UserOnce() if bags else None)
        return RowReader(schema, is_checked, scorer.user_once(bags))

    def _held(self) -> AbstractContextManager[Weights]:
        """Yield the weights for one request, which stay valid inside the block."""
        return nullcontext(self.weights)

    def outputs(self, request: Request) -> tuple[Tensor, ...]:
        """Return the logits of every output of the manifest, in order; checks the ids."""
        with self._held() as weights:
            return weights.outputs(request)

    def _named(
        self, outputs: tuple[Tensor, ...], finish: Callable[[str, Tensor], Tensor]
    ) -> Scores:
        """Return outputs by their names, each finished by its kind; one without a name as it is."""
        pairs = zip(self.manifest.outputs, outputs, strict=True)
        named = {name: finish(kind, logits) for (name, kind), logits in pairs}
        return named[""] if list(named) == [""] else named
