"""`rayrec export`: a checkpoint as an artifact that is served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rayrec.cli.base import Command, default_option
from rayrec.cli.values import PATH, POSITIVE, count, named_choice

if TYPE_CHECKING:
    from rayrec.serve import Manifest

TYPES = ("fp32", "fp16", "int8", "int4")


@click.command(
    cls=Command,
    needs="rayrec.serve.exporting",
    examples="""
rayrec export runs/clicks/step-00000020 served/clicks --data data/clicks
rayrec export runs/clicks/step-00000020 served/small --dtype int4 --table t_cat_0=fp16
""",
)
@click.argument("checkpoint", type=PATH, metavar="CHECKPOINT")
@click.argument("out", type=PATH, metavar="OUT")
@default_option("--dtype", type=click.Choice(TYPES), default="int8", help="type of served rows")
@click.option(
    "--table",
    "tables",
    type=named_choice(TYPES),
    multiple=True,
    metavar="NAME=TYPE",
    help="the type of one table in place of --dtype; may be repeated",
)
@click.option(
    "--data",
    type=PATH,
    metavar="PATH",
    help="rows to compare the scores on: Parquet or Arrow files, or a folder that `rayrec "
    "make-data` wrote, whose eval/ is taken; by default random rows, which tell no AUC",
)
@default_option("--sample-rows", type=count(), default=8192, help="rows compared at most")
@default_option(
    "--max-logit-error",
    type=POSITIVE,
    default=0.5,
    metavar="X",
    help="largest distance of a logit from the trained model's that is accepted",
)
@default_option(
    "--max-auc-change",
    type=POSITIVE,
    default=0.003,
    metavar="X",
    help="largest change of the AUC, and of the normalized entropy",
)
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="compile the dense part for this machine, too: half a minute, a C++ compiler is needed, "
    "and requests of up to 64 rows are scored faster",
)
@click.option(
    "--signing-key",
    metavar="FILE|env:NAME",
    help="sign the manifest with the key in a file or an environment variable; servers that have "
    "the key can ask for the signature",
)
def command(
    checkpoint: str,
    out: str,
    dtype: str,
    tables: tuple[tuple[str, str], ...],
    data: str | None,
    max_logit_error: float,
    max_auc_change: float,
    **more: Any,
) -> None:
    """Export a checkpoint to a folder that a predictor loads.

    The tables are packed; their scores are compared with those of the trained model, and an
    artifact that is too far from it is refused.
    """
    from rayrec.checkpoint import checkpoint_path, read_manifest
    from rayrec.errors import ConfigError
    from rayrec.next_item_recipe import NextItemRecipe
    from rayrec.runs.inputs import open_data, rows_to_score
    from rayrec.serve import ParityBounds, export
    from rayrec.serve.recipes import recipe_in

    named = [name for name, _ in tables]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--table names {twice!r} twice; give it one type.")
    path = checkpoint_path("CHECKPOINT", checkpoint)
    rows = None
    if data is not None:
        recipe = recipe_in(read_manifest(path).extras, path)
        # the labels of a log's events are not those of its next items
        labels = not isinstance(recipe, NextItemRecipe)
        source = f"the schema of {path}"
        rows = open_data(rows_to_score(data), recipe.schema, source, with_labels=labels)
    manifest = export(
        path,
        out,
        types={**dict(tables), "*": dtype},
        data=rows,
        bounds=ParityBounds(logit=max_logit_error, auc=max_auc_change, ne=max_auc_change),
        **more,
    )
    print(summary(out, manifest))


def summary(out: str, manifest: Manifest) -> str:
    """Return lines about the size of an artifact, and its distance from the model."""
    packed = [table.packed for table in manifest.tables]
    stored = sum(table.num_bytes for table in packed)
    plain = sum(4 * table.rows * table.width for table in packed)
    told = manifest.parity
    lines = [
        f"{out}: step {manifest.step}, {len(packed)} tables, {stored / 1e6:.1f} MB of rows, "
        f"{plain / max(1, stored):.1f}x smaller than float32"
    ]
    parity = (
        f"parity on {told['rows']} of {told['rows_of']}: logits off by at most "
        f"{told['max_logit_error']:.2g}, {told['mean_logit_error']:.2g} on average"
    )
    if "auc_difference" in told:
        parity += f"; auc {told['auc']:.5f} ({told['auc_difference']:+.5f})"
        parity += f", ne {told['ne']:.5f} ({told['ne_difference']:+.5f})"
    lines.append(parity)
    if manifest.compiled is not None:
        lines.append(f"compiled for torch {manifest.compiled.target.torch} and this processor")
    if manifest.no_program:
        lines.append(f"no torch.export program: {manifest.no_program}")
    return "\n".join(lines)
