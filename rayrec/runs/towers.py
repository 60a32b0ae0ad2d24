"""Training of two towers for retrieval, and their recall beside that of popularity.

The model trains on rows with label 1 by softmax over the batch: the negatives of a row are the
candidates of the other rows. Then, for every user with such rows in the held-out part, all items
that the user has no training row for are ranked by brute force, by the model and by popularity. The
first query feature says who asks, the first candidate feature what is found; each has one id per
row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from rayrec.checks import MAX_SIZE, positive, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.runs.reporting import Reporting, ResultReport, fit_and_report
from rayrec.runs.retrieval import RetrievalPaths, TwoTowerRecipe, write_positives
from rayrec.runs.retrieval_scores import RetrievalScorer
from rayrec.storage import probe_output

if TYPE_CHECKING:
    from rayrec.driver import Result
    from rayrec.runs.run_file import RunFile

TWO_TOWER: Literal["two_tower"] = "two_tower"


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoTowerModel:
    """Section `model` of a run that trains two towers.

    Attributes:
        model: "two_tower".
        query, candidate: features of either tower; the first of each are the ids of those who ask
            and of what is found.
        layers: sizes of either tower's layers; the last is the width of the vectors.
        temperature: divisor of the scores in training.
        log_q: correct scores for the popularity of the batch's candidates.
        all_ranks: the negatives of a row are the candidates of the global batch, so that any
            number of ranks trains as one; else those of the rank's part.
        ks: lengths of the lists whose recall is told.
    Raises:
        ConfigError: a name or a length is given twice, or a size is out of range.
    """

    model: Literal["two_tower"] = TWO_TOWER
    query: tuple[str, ...]
    candidate: tuple[str, ...]
    layers: tuple[int, ...] = (64, 32)
    temperature: float = 0.1
    log_q: bool = True
    all_ranks: bool = False
    ks: tuple[int, ...] = (10, 50)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("query", "candidate", "ks", "layers"):
            values = getattr(self, name)
            if not values:
                raise ConfigError(f"{name}=(); give at least one.")
            twice = [one for one in values if values.count(one) > 1]
            if twice and name != "layers":
                raise ConfigError(f"{name} has {twice[0]!r} twice; give it once.")
        for name in ("layers", "ks"):
            for size in getattr(self, name):
                whole_number(f"{name} has the number", size, 1, MAX_SIZE)
        positive("temperature", self.temperature)


def train_towers(settings: RunFile, reporting: Reporting) -> None:
    """Train, rank the items of the held-out rows by model and popularity, and report.

    Raises:
        RayrecError, RunInterrupted: the errors of `Driver.fit`.
        ConfigError: the data are not said, a feature is not in the schema, a list is longer than
            all candidates, or a rank's part of a batch has no negatives.
    """
    from rayrec.data import FeatureSchema

    schema, model, run = settings.schema_text(), settings.model, settings.run
    assert isinstance(model, TwoTowerModel)
    ranks = max(1, settings.scaling.most)
    if run.global_batch_size < 2 * ranks and not model.all_ranks:
        raise ConfigError(
            f"global_batch_size={run.global_batch_size} on {ranks} ranks: the other rows "
            f"of a rank's batch are the negatives, so it must be at least {2 * ranks}; or say "
            "[model] all_ranks = true."
        )
    if run.publish is not None:
        raise ConfigError(
            "run.publish is for models that are served, and two towers are not; leave it out."
        )
    # All that can be wrong is found before the positives are written.
    source = settings.needed("schema")
    FeatureSchema.from_json(schema, source).one_label(f"retrieval ({source})")
    recipe = TwoTowerRecipe(
        schema=schema,
        query=model.query,
        candidate=model.candidate,
        layers=model.layers,
        temperature=model.temperature,
        log_q=None,
        all_ranks=model.all_ranks,
    )
    recipe.sides()  # checks
    with ExitStack() as stack:
        work = settings.data.work_dir
        if work is None:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-two-tower-"))
        probe_output("positive rows ([data] work_dir)", f"{work}/probe")
        train, held_out = settings.needed("train"), settings.needed("eval")
        positives = f"{work}/positives"
        paths = write_positives(train, held_out, schema, model.candidate[0], positives)
        if model.log_q:
            recipe = replace(recipe, log_q=paths.log_q)
        _fit(settings, model, recipe, paths, reporting)


def _fit(
    settings: RunFile,
    model: TwoTowerModel,
    recipe: TwoTowerRecipe,
    paths: RetrievalPaths,
    reporting: Reporting,
) -> None:
    from rayrec.data import FeatureSchema, ParquetDataset

    # Held-out rows are read once before, so that a damaged file costs no run.
    scorer = RetrievalScorer(paths=paths, query=model.query, candidate=model.candidate, ks=model.ks)
    candidates = len(scorer.truth().item_ids)
    if max(model.ks) > candidates:
        raise ConfigError(
            f"ks has {max(model.ks)}, which is longer than a list of all {candidates} candidates."
        )
    extras = {**settings.run.extras, "two_tower": {**asdict(recipe), "log_q": model.log_q}}
    rows = ParquetDataset(paths.positives, FeatureSchema.from_json(paths.schema, "the schema"))
    # a short batch has too few negatives
    run = replace(settings.run, extras=extras, drop_last=True)
    fit_and_report(settings.driver(recipe, rows, run, scorer=scorer), reporting, _outcome)


def _outcome(result: Result) -> ResultReport:
    scores: dict[str, dict[str, float]] = {"model": {}, "popularity": {}}
    for name, value in result.metrics.items():
        # Names are "model recall@10" and the like; "queries" and "candidates" have no second word.
        who, _, score = name.partition(" ")
        if score:
            scores[who][score] = value
    lines = []
    for title, who in (("two towers", "model"), ("popularity", "popularity")):
        if scores[who]:
            shown = [f"{score} {value:.4f}" for score, value in scores[who].items()]
            lines.append(f"{title}: {'  '.join(shown)}")
    queries = int(result.metrics.get("queries", 0))
    candidates = int(result.metrics.get("candidates", 0))
    if result.metrics:
        lines.append(f"{queries} queries, {candidates} candidates")
        lines += _warning(scores["model"], scores["popularity"])
    loss = "" if result.train_loss is None else f", train loss {result.train_loss:.4f}"
    return ResultReport(
        done=f"{result.rows} rows in {result.seconds:.1f} s{loss}",
        lines=lines,
        fields={**scores, "queries": queries, "candidates": candidates},
    )


def _warning(model: Mapping[str, float], popularity: Mapping[str, float]) -> list[str]:
    """Return a one-line warning if popularity alone ranks better than the model, else no line."""
    name = next(iter(model))  # recall of the shortest lists
    if model[name] >= popularity[name]:
        return []
    return [
        f"warning: the model is below popularity ({name} {model[name]:.4f} against "
        f"{popularity[name]:.4f}): a list of the most popular items, the same for all, serves "
        "better. Train longer, try other learning rates, or keep log_q where it is left out."
    ]
