"""`rayrec plan`: a sharding plan on a laptop, for clusters of any size; the same JSON trains.

Needs neither torch nor Ray nor a cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from rayrec.checks import separate_files
from rayrec.cli.base import Command, F, default_option, file_option
from rayrec.cli.values import FRACTION, PATH, SHARE, count
from rayrec.errors import ConfigError
from rayrec.layout import KINDS, ShardingPlan, Topology
from rayrec.layout.presets import CPU, MAX_RANKS, PRESETS, RESERVE, preset_topology
from rayrec.layout.schema import FeatureSchema
from rayrec.planner import EmbeddingShardingPlanner
from rayrec.planner.constraints import NO_CONSTRAINTS, constraints_from_json
from rayrec.report.plan_page import render_page
from rayrec.spec.optimizers import SPARSE_OPTIMIZERS
from rayrec.spec.wire import WIRE_PRECISIONS
from rayrec.storage import probe_output, write_whole

RANKS = count(1, MAX_RANKS)


def _wire_option(name: str, text: str) -> Callable[[F], F]:
    choices = click.Choice(WIRE_PRECISIONS)
    return default_option(name, type=choices, default="fp32", help=text)


@click.command(
    cls=Command,
    examples=r"""
rayrec plan --schema schema.json --topology h100 --hosts 16 --batch 4096 \
    --out plan.json --html plan.html
rayrec plan --schema schema.json --topology topology.json --diff plan.json
""",
)
@file_option("--schema", required=True, help="schema.json with the tables and features")
@click.option(
    "--topology",
    type=PATH,
    required=True,
    metavar="FILE|PRESET",
    help=f"a topology's JSON file, or one of {', '.join([*PRESETS, CPU])}",
)
@click.option(
    "--ranks", type=RANKS, metavar="N", help="ranks of a preset, all hosts together (8 per host)"
)
@click.option(
    "--hosts", type=RANKS, metavar="H", help="hosts of a preset (as few as the ranks need)"
)
@click.option(
    "--reserve", type=FRACTION, metavar="FRACTION", help=f"memory of a preset kept free ({RESERVE})"
)
@click.option(
    "--input-hidden",
    type=SHARE,
    metavar="SHARE",
    help="share of the input exchange that a pipelined trainer hides, 0 to 1 (the topology's)",
)
@default_option("--batch", type=count(), default=2048, metavar="B", help="rows per rank and step")
@default_option(
    "--optimizer",
    type=click.Choice(list(SPARSE_OPTIMIZERS)),
    default="rowwise_adagrad",
    help="fused optimizer",
)
@click.option("--kinds", metavar="KIND,...", help=f"sharding kinds to use, of {', '.join(KINDS)}")
@_wire_option("--qcomms-forward", "what rows travel as between ranks")
@_wire_option("--qcomms-backward", "what their gradients travel as")
@click.option(
    "--share-tables/--no-share-tables",
    default=True,
    help="CPU ranks of one host read each other's rows in place where they can (default)",
)
@file_option("--constraints", help="JSON: table name -> fields of ParameterConstraints")
@click.option(
    "--profile",
    type=PATH,
    metavar="PATH",
    help="Parquet or Arrow data: measure pooling factors and skew (needs pyarrow)",
)
@file_option("--out", help="where to write the plan as JSON")
@file_option("--html", help="where to write the plan as one self-contained page")
@file_option("--diff", help="an earlier plan: print what would move")
def command(**given: Any) -> None:
    """Plan where every table lies, without a cluster.

    The plan that --out gets is the one that `rayrec train` and rayrec.Driver take.
    """
    options = SimpleNamespace(**given)
    _check_files(options)
    schema = FeatureSchema.load(options.schema)
    topology = _topology(options)
    if options.input_hidden is not None:
        topology = replace(topology, input_hidden=options.input_hidden)
    measured = {}
    if options.profile is not None:
        from rayrec.cli.profile import measure  # pyarrow, which planning alone does not need

        # The skew is fitted to the ids of a global step, since all of them meet in the rows of a
        # table.
        measured = measure(schema, options.profile, options.batch * topology.world_size)
    limits = _read(options.constraints) if options.constraints is not None else "{}"
    constraints = constraints_from_json(limits, options.constraints or "constraints", measured)
    if schema.is_weighted:
        for table in schema.tables:
            known = constraints.get(table.name, NO_CONSTRAINTS)
            # A batch either has weights or not, so every table pays for them where one feature has
            # any.
            constraints[table.name] = replace(known, weighted=True)
    # The earlier plan is read before --out is written, which may be the same file.
    earlier = ShardingPlan.load(options.diff) if options.diff is not None else None
    kinds = None
    if options.kinds is not None:
        kinds = [kind.strip() for kind in options.kinds.split(",")]
    planner = EmbeddingShardingPlanner(
        topology,
        options.batch,
        constraints,
        options.optimizer,
        kinds,
        qcomms_forward=options.qcomms_forward,
        qcomms_backward=options.qcomms_backward,
        share_tables=options.share_tables,
    )
    plan = planner.plan(schema.tables)
    written = []
    if options.out is not None:
        write_whole("--out", options.out, plan.to_json())
        written.append(f"plan: {options.out}")
    if options.html is not None:
        write_whole("--html", options.html, render_page(plan, title=Path(options.schema).stem))
        written.append(f"page: {options.html}")
    print(plan.report())  # after the files: a reader such as `head` may not want all of it
    if earlier is not None:
        print("\n" + earlier.diff(plan, schema.tables))
    if written:
        print("\n" + "\n".join(written))


def _check_files(options: SimpleNamespace) -> None:
    """Check before planning that the files asked for can be written, and over no file that is
    read.
    """
    outputs = {"--out": options.out, "--html": options.html}
    inputs = {"--schema": options.schema, "--constraints": options.constraints}
    separate_files(outputs, {**inputs, "--topology": options.topology})
    for option, path in outputs.items():
        probe_output(option, path)


def _topology(options: SimpleNamespace) -> Topology:
    # A word that is no file is taken for a preset; its message names all presets.
    if not os.path.isfile(options.topology):
        reserve = RESERVE if options.reserve is None else options.reserve
        return preset_topology(options.topology, options.ranks, options.hosts, reserve)
    if options.reserve is not None:
        raise ConfigError(
            f"--reserve is of presets; {options.topology} says how much memory each rank has."
        )
    topology = Topology.from_json(_read(options.topology), options.topology)
    for name, asked, have in (
        ("ranks", options.ranks, topology.world_size),
        ("hosts", options.hosts, len(topology.hosts)),
    ):
        if asked not in (None, have):
            raise ConfigError(
                f"--{name} {asked} contradicts {options.topology}, which has {have} {name}; leave "
                "it out."
            )
    return topology


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}.") from None
