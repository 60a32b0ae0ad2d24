"""`rayrec predict`: the score of every row, by an artifact or a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from rayrec.cli.base import Command, is_said
from rayrec.cli.scored import score, scoring_of, scoring_options
from rayrec.cli.values import NAMES, PATH, count

if TYPE_CHECKING:
    from rayrec.data.scored import Predicted

FILES = (".parquet", ".pq", ".parq")  # an --out that ends so is one file
MOST_WORKERS = 16  # started unasked: each holds the libraries of its own, some 0.3 GB
FORMAT = b'"rayrec.artifact"'
HEAD_BYTES = 256  # the format is the first field of a manifest
OF_RANKS = (
    "ranks",
    "local",
    "gpu",
    "cpus_per_rank",
    "pin_cores",
    "placement_timeout",
    "plan",
    "global_batch_size",
    "timeout",
    "result",
    "k",
    "masked",
)


@click.command(
    cls=Command,
    needs="rayrec.checkpoint",
    short_help="write the score of every row",
    examples="""
rayrec predict served/clicks --data rows/ --out scores --columns user,item --workers 4
rayrec predict served/clicks --data rows/ --out scores --where "day >= '2026-11-01'"
rayrec predict runs/clicks/step-00000020 --data rows/ --out scores --local
rayrec predict runs/clicks@best --data data/clicks --out scores.parquet --keys user
rayrec predict runs/sasrec@latest --data data/films/log --out lists --k 10 --masked --columns user
""",
)
@scoring_options("ARTIFACT|CHECKPOINT")
@click.option(
    "--out",
    type=PATH,
    required=True,
    metavar="DIR",
    help="new or empty folder for Parquet files; or of a checkpoint one FILE.parquet, which gets "
    "labels, files and row numbers, too",
)
@click.option(
    "--columns",
    type=NAMES,
    default=(),
    metavar="COLUMN,...",
    help="columns of the data to copy beside the scores",
)
@click.option("--keys", type=NAMES, default=(), metavar="COLUMN,...", help="the same")
@click.option(
    "--workers",
    type=count(),
    metavar="N",
    help="processes that score: of an artifact local ones (one per processor, at most "
    f"{MOST_WORKERS}), of a checkpoint its ranks",
)
@click.option(
    "--batch-size",
    type=count(),
    metavar="B",
    help="rows scored at a time: by each worker of an artifact (4096), or over all ranks of a "
    "checkpoint",
)
@click.option(
    "--k",
    type=count(),
    metavar="K",
    help="of a checkpoint of a next-item model: the best K items after the history of each row, "
    "and their scores, in place of the score of the row's item",
)
@click.option("--masked", is_flag=True, help="leave out of these what the row has seen")
def command(
    out: str,
    columns: tuple[str, ...],
    keys: tuple[str, ...],
    workers: int | None,
    batch_size: int | None,
    **given: Any,
) -> None:
    """Write the score of every row, in the order of the rows.

    A folder gets files named part-00000.parquet and so on, with a column of scores for each task
    ("score" where there is one; "item" and "score" are lists with --k) and the columns of
    --columns. It appears when it is complete. Labels are not read, so the data need none.
    """
    from rayrec.errors import ConfigError

    if given["masked"] and given["k"] is None:
        raise ConfigError("--masked is about the lists of --k; give --k, too, or leave it out.")
    if columns and keys:
        raise ConfigError("--columns and --keys are the same; give one of them.")
    if _is_artifact(given["checkpoint"]):
        predicted = _by_artifact(given, out, columns or keys, workers, batch_size)
    else:
        _take("--workers", "ranks", workers, given)
        _take("--batch-size", "global_batch_size", batch_size, given)
        if out.endswith(FILES):
            if given["k"] is not None:
                raise ConfigError(f"--out {out} is one file, and lists go to a folder; name one.")
            score(given, out, columns or keys)
            return
        predicted = _by_checkpoint(given, out, columns or keys)
    print(f"predictions: {predicted.path} ({predicted.rows} rows, {predicted.parts} files)")


def _is_artifact(path: str) -> bool:
    """Return True if a local folder has the manifest of an artifact; that of a checkpoint names
    another format.
    """
    try:
        with open(os.path.join(os.path.expanduser(path), "manifest.json"), "rb") as file:
            return FORMAT in file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return False


def _by_artifact(
    given: dict[str, Any],
    out: str,
    columns: tuple[str, ...],
    workers: int | None,
    batch_size: int | None,
) -> Predicted:
    """Score by processes of this machine; no option may be about ranks, or name a file."""
    from rayrec.checks import absolute_path
    from rayrec.errors import ConfigError
    from rayrec.machine.cores import usable_processors
    from rayrec.runs.inputs import open_data, read_text, rows_to_score

    artifact = given["checkpoint"]
    for name in OF_RANKS:
        if is_said(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} is for a checkpoint, and {artifact} is an artifact; leave it out."
            )
    if out.endswith(FILES):
        raise ConfigError(
            f"--out {out} is one file, and the scores by an artifact go to a folder; name one."
        )
    from rayrec.serve import predict_files
    from rayrec.serve.artifact import SCHEMA
    from rayrec.serve.bulk import BATCH_ROWS

    folder, schema = absolute_path("ARTIFACT", artifact), given["schema"]
    if schema is None:
        schema = os.path.join(folder, SCHEMA)
        if not os.path.isfile(schema):
            raise ConfigError(
                f"{folder} has no {SCHEMA}; give --schema, which says what columns are."
            )
    text, data = read_text("--schema", schema), rows_to_score(given["data"])
    return predict_files(
        folder,
        open_data(data, text, schema, given["where"], with_labels=False),
        out,
        columns=columns,
        workers=workers or min(usable_processors(), MOST_WORKERS),
        batch_size=batch_size or BATCH_ROWS,
    )


def _by_checkpoint(given: dict[str, Any], out: str, columns: tuple[str, ...]) -> Predicted:
    """Score by ranks; no scores of the model are worked out, and --result may not ask for them."""
    from rayrec.errors import ConfigError
    from rayrec.runs.scoring import predict_checkpoint

    if given.pop("result") is not None:
        raise ConfigError(
            "--result is for the scores of the model, and a folder of predictions needs no labels; "
            "leave it out, or use rayrec evaluate."
        )
    return predict_checkpoint(scoring_of(given, keys=columns, predictions=out))


def _take(option: str, name: str, value: int | None, given: dict[str, Any]) -> None:
    """Use the value of an option for the one of ranks that means the same; not both are given."""
    from rayrec.errors import ConfigError

    if value is None:
        return
    if is_said(name):
        raise ConfigError(
            f"{option} and --{name.replace('_', '-')} are the same; give one of them."
        )
    given[name] = value
