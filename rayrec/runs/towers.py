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
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from rayrec.errors import ConfigError
from rayrec.runs.reporting import Reporting, ResultReport, fit_and_report
from rayrec.runs.retrieval import TwoTowerModel, TwoTowerRecipe, write_positives
from rayrec.runs.retrieval_scores import RetrievalScorer, by_ranker
from rayrec.storage import probe_output

if TYPE_CHECKING:
    from rayrec.driver import Result
    from rayrec.runs.run_file import RunFile


def train_towers(settings: RunFile, reporting: Reporting) -> None:
    """Train, rank the items of the held-out rows by model and popularity, and report."""
    from rayrec.data import FeatureSchema, ParquetDataset

    text, model, run = settings.schema_text(), settings.model, settings.run
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
    schema = FeatureSchema.from_json(text, source)
    schema.one_label(f"retrieval ({source})")
    recipe = TwoTowerRecipe(schema=text, model=model)
    recipe.sides()  # checks
    with ExitStack() as stack:
        work = settings.data.work_dir
        if work is None:
            work = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-two-tower-"))
        probe_output("positive rows ([data] work_dir)", f"{work}/probe")
        train, positives = settings.needed("train"), f"{work}/positives"
        shares = write_positives(train, text, model.candidate[0], positives)
        if model.log_q:
            recipe = replace(recipe, log_q=shares)
        scorer = RetrievalScorer(
            train=train,
            held_out=settings.needed("eval"),
            schema=text,
            user=model.query[0],
            item=model.candidate[0],
            ks=model.ks,
        )
        # Held-out rows are read once before, so that a damaged file costs no run.
        candidates = len(scorer.truth().item_ids)
        if max(model.ks) > candidates:
            raise ConfigError(
                f"ks has {max(model.ks)}, which is longer than a list of all {candidates} "
                "candidates."
            )
        said = asdict(model)
        del said["model"], said["ks"]
        run = replace(
            run,
            extras={**run.extras, "two_tower": {"schema": text, **said}},
            drop_last=True,  # a short batch has too few negatives
        )
        driver = settings.driver(recipe, ParquetDataset(positives, schema), run, scorer=scorer)
        fit_and_report(driver, reporting, _outcome)


def _outcome(result: Result) -> ResultReport:
    scores = {"model": {}, "popularity": {}, **by_ranker(result.metrics)}
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
