"""`Weights`: what one version of a model scores with, which are packed tables and a dense part.

A predictor that follows a chain goes from one `Weights` to the next; nothing in one is ever
changed, except for the rows of a chain that is not followed strictly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.checkpoint import dense_tensors, load_dense
from rayrec.errors import ArtifactError, InputError, RayrecError
from rayrec.quant import Packed, PackedTables, exchanged, reference_collections
from rayrec.quant.ids import PackedIds
from rayrec.serve.artifact import Artifact
from rayrec.serve.compiled import MOST_ROWS, load_compiled
from rayrec.serve.program import MODEL, Program, dropped_sources, load_program
from rayrec.serve.recipes import Recipe, recipe_of
from rayrec.serve.requests import Request
from rayrec.serve.scorer import Scorer
from rayrec.storage import one_line

Collections = Mapping[str, Packed]


class Weights:
    """Weights of one version of a model, ready to score.

    Args:
        artifact, model: the arguments of `Predictor`.
    Attributes:
        collections: packed tables, by the collections' names in the model.
        name: name of the version: the step, and the first digits of the manifest's sha256.
        step: global training step.
        event_time, ingest_time: of the newest rows of a stream, as a publication tells; or None.
        scorer: scorer of the model; None where the exported program is used.
        not_compiled: reason why requests of few rows are not scored by compiled code, or "".
    Raises:
        ArtifactError: the error of `Predictor`; or it is not trusted and has a program alone.
    """

    def __init__(self, artifact: Artifact, model: Callable[[], nn.Module] | None = None) -> None:
        manifest, where = artifact.manifest, artifact.folder
        self._artifact = artifact
        self.collections: Collections = artifact.collections()
        self.name, self.step = manifest.version, manifest.step
        self.event_time: int | None = None
        self.ingest_time: float | None = None
        self._compiled: Program | None = None
        self.not_compiled = "the artifact was exported without"
        if manifest.compiled is not None:
            file, target = manifest.compiled.file, manifest.compiled.target
            self.not_compiled = target.misfit() if artifact.trusted else "it is not trusted"
            if not self.not_compiled:
                self._compiled = load_compiled(artifact.content[file.path], where / file.path)
        self.scorer: Scorer | None = None
        self._program: Program | None = None
        if model is None and manifest.recipe is not None:
            model = recipe_of(manifest.recipe, str(where))
            if not artifact.trusted:
                self._check_sizes(model)
        if model is not None:
            self.scorer = self._build(model)
        elif manifest.program is not None and not artifact.trusted:
            raise ArtifactError(
                f"{where / manifest.program.path} can run code of whoever exported it when it is "
                "loaded, and the artifact is not trusted; it has no recipe, from which its model "
                "could be built. Give model=, or trust the artifact."
            )
        elif manifest.program is not None:
            self._program = load_program(
                artifact.content[manifest.program.path], where / manifest.program.path
            )
        else:
            raise ArtifactError(
                f"{artifact.folder} has no program ({manifest.no_program}) and no recipe; "
                "load it with model=, the function that builds its module."
            )

    def _check_sizes(self, recipe: Recipe) -> None:
        """Check that a recipe is that of the tensors, before any memory is taken for its layers."""
        layers, most = recipe.layers(), max(2, len(self._artifact.dense()))
        if layers > most:
            raise ArtifactError(
                f"{self._artifact.folder} has a recipe of {layers} layers beside {most} tensors; "
                "they are of two models. Export the checkpoint again."
            )
        with torch.device("meta"):
            self._build(recipe)

    def _build(self, model: Callable[[], nn.Module]) -> Scorer:
        artifact = self._artifact
        # initial values, which are overwritten, shall not move the caller's random numbers
        with torch.random.fork_rng(devices=[]):
            module = model()
        found = set(reference_collections(module))
        if found != set(self.collections):
            raise ArtifactError(
                f"the model has the collections {sorted(found)} and {artifact.folder} was exported "
                f"with {sorted(self.collections)}. Give the model that was exported."
            )
        whole = exchanged(module, self.collections).eval()
        load_dense(dense_tensors(trained(whole), whole), artifact.dense(), str(artifact.folder))
        labels = 1 if artifact.schema is None else len(artifact.schema.labels)
        return Scorer(whole, labels, artifact.manifest.outputs).eval()

    def renewed(
        self, packed: PackedTables, dense: Mapping[str, Tensor], name: str, step: int
    ) -> Weights:
        """Return the same model with other rows and another dense part; this one stays as it is.

        Args:
            packed: tables of the same names, sizes and types.
            dense: parameters and buffers by their names in the model.
        Raises:
            CheckpointError: the dense part is of another model.
        """
        twin = copy.copy(self)
        twin._artifact = replace(self._artifact, packed=packed)
        twin.collections = twin._artifact.collections()
        twin.name, twin.step = name, step
        # compiled code has the dense parameters of its export inside
        twin._compiled = None
        twin.not_compiled = "the version is none that was exported"
        if self.scorer is not None:
            # deepcopy takes what the memo has for a collection in place of a copy of it
            memo: dict[int, Any] = {
                id(old): twin.collections[key] for key, old in self.collections.items()
            }
            twin.scorer = copy.deepcopy(self.scorer, memo)
            module = twin.scorer.model
            load_dense(dense_tensors(trained(module), module), dense, name)
        else:
            twin._program = _with_dense(self._program, dense, name)
        return twin

    def ids(self) -> dict[str, PackedIds]:
        """Return the ids of the dynamic tables, by table."""
        return {name: ids for one in self.collections.values() for name, ids in one.ids().items()}

    def outputs(self, request: Request) -> tuple[Tensor, ...]:
        """Return the logits of every output of the manifest, in order; or ids and scores of the
        best items, where these are asked for.

        Raises:
            InputError: the artifact has no schema, and the model does not take the tensors.
        """
        try:
            return self._run(request)
        # with a schema all shapes were checked, so it is a defect
        except Exception as error:
            if isinstance(error, RayrecError) or self._artifact.schema is not None:
                raise
            raise InputError(
                f"the model does not take dense {tuple(request.dense.shape)} beside the keys "
                f"{request.ids.keys()} ({type(error).__name__}: {one_line(error)}). Give what it "
                "was trained with, or export with schema=, by which rows are checked."
            ) from error

    def _run(self, request: Request) -> tuple[Tensor, ...]:
        rows, columns = request.dense.shape
        # Compiled code checks no shapes. What was exported without a schema has no dense columns.
        is_known = self._artifact.schema is not None or columns == 0
        with torch.inference_mode():
            compiled = self._compiled if 0 < rows <= MOST_ROWS and is_known else None
            if self.scorer is not None and compiled is None:
                given = request.dense, request.ids, request.sequences
                return self.scorer.top(*given, request.top) if request.top else self.scorer(*given)
            pooled = [one(request.ids).values() for one in self.collections.values()]
            if compiled is not None:
                return compiled(request.dense, *pooled)
            assert self._program is not None
            if not rows:
                # a program is for at least one row
                ran = self._program(
                    *(torch.zeros(1, part.shape[1]) for part in [request.dense, *pooled])
                )
                return tuple(output[:0] for output in ran)
            return tuple(self._program(request.dense, *pooled))


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and dense parameters of a module without tables, as checkpoints hold them."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def _with_dense(program: Program | None, dense: Mapping[str, Tensor], name: str) -> Program:
    """Return a copy of an exported dense part with other parameters."""
    assert isinstance(program, nn.Module)
    with dropped_sources():  # torch keeps the source of every copy
        twin: nn.Module = copy.deepcopy(program)
    live = {
        key.removeprefix(MODEL): tensor.detach()
        for key, tensor in twin.state_dict(keep_vars=True).items()
        if key.startswith(MODEL)
    }
    # a program keeps what it uses; the rest of the dense part is not read
    load_dense(live, {key: dense[key] for key in live if key in dense}, name)
    return twin
