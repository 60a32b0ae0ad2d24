"""`rayrec plan`: a sharding plan on a laptop, for clusters of any size; the same JSON trains.

    rayrec plan --schema schema.json --topology h100 --hosts 16 --batch 4096 --out plan.json --html
    plan.html

Needs neither torch nor Ray nor a cluster.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from rayrec import arguments
from rayrec.checks import separate_files
from rayrec.command import Parser
from rayrec.errors import ConfigError
from rayrec.layout import KINDS, ShardingPlan, Topology
from rayrec.layout.presets import CPU, MAX_RANKS, PRESETS, RESERVE, preset_topology
from rayrec.layout.schema import FeatureSchema
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.constraints import constraints_from_json
from rayrec.planner.optimizers import SPARSE_STATES
from rayrec.planner.wire import CODINGS
from rayrec.report.plan_page import render_page
from rayrec.storage import probe_output, write_whole


def add_parser(subcommands: argparse._SubParsersAction[Parser]) -> None:
    """Register the subcommand."""
    parser = subcommands.add_parser(
        "plan",
        help="plan where every table lies, without a cluster",
        description=__doc__.splitlines()[0],
    )
    parser.add_argument(
        "--schema",
        type=arguments.path,
        required=True,
        metavar="FILE",
        help="schema.json with the tables and features",
    )
    names = ", ".join([*PRESETS, CPU])
    parser.add_argument(
        "--topology",
        type=arguments.path,
        required=True,
        metavar="FILE|PRESET",
        help=f"a topology's JSON file, or one of {names}",
    )
    count = arguments.whole(1, MAX_RANKS)
    ranks = "ranks of a preset, all hosts together (8 per host)"
    parser.add_argument("--ranks", type=count, metavar="N", help=ranks)
    hosts = "hosts of a preset (as few as the ranks need)"
    parser.add_argument("--hosts", type=count, metavar="H", help=hosts)
    kept = f"memory of a preset kept free ({RESERVE})"
    parser.add_argument("--reserve", type=arguments.fraction, metavar="FRACTION", help=kept)
    hidden = "share of the input exchange that a pipelined trainer hides, 0 to 1 (the topology's)"
    parser.add_argument("--input-hidden", type=arguments.share, metavar="SHARE", help=hidden)
    parser.add_argument(
        "--batch",
        type=arguments.whole(),
        default=2048,
        metavar="B",
        help="rows per rank and step (%(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        default="rowwise_adagrad",
        choices=list(SPARSE_STATES),
        help="fused optimizer (%(default)s)",
    )
    parser.add_argument(
        "--kinds", metavar="KIND,...", help=f"sharding kinds to use, of {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--qcomms-forward",
        choices=list(CODINGS),
        default="fp32",
        help="what rows travel as between ranks (%(default)s)",
    )
    parser.add_argument(
        "--qcomms-backward",
        choices=list(CODINGS),
        default="fp32",
        help="what their gradients travel as (%(default)s)",
    )
    parser.add_argument(
        "--share-tables",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="CPU ranks of one host read each other's rows in place where they can (default)",
    )
    parser.add_argument(
        "--constraints",
        type=arguments.path,
        metavar="FILE",
        help="JSON: table name -> fields of ParameterConstraints",
    )
    parser.add_argument(
        "--profile",
        type=arguments.path,
        metavar="PATH",
        help="Parquet or Arrow data: measure pooling factors and skew (needs pyarrow)",
    )
    parser.add_argument(
        "--out", type=arguments.path, metavar="FILE", help="where to write the plan as JSON"
    )
    parser.add_argument(
        "--html",
        type=arguments.path,
        metavar="FILE",
        help="where to write the plan as one self-contained page",
    )
    parser.add_argument(
        "--diff", type=arguments.path, metavar="FILE", help="an earlier plan: print what would move"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Make the plan, print its report and write the files asked for. Raises RayrecError."""
    _check_files(options)
    schema = FeatureSchema.load(options.schema)
    topology = _topology(options)
    if options.input_hidden is not None:
        topology = replace(topology, input_hidden=options.input_hidden)
    measured = {}
    if options.profile is not None:
        from rayrec.cli.profile import measure  # pyarrow, which planning alone does not need

        measured = {
            name: found._asdict()
            for name, found in measure(
                schema, options.profile, options.batch * topology.world_size
            ).items()
        }
    given = _read(options.constraints) if options.constraints is not None else "{}"
    constraints = constraints_from_json(given, options.constraints or "constraints", measured)
    if schema.is_weighted:
        for table in schema.tables:
            constraints[table.name] = replace(
                constraints.get(table.name, ParameterConstraints()), weighted=True
            )
    earlier = ShardingPlan.load(options.diff) if options.diff is not None else None
    kinds = (
        [kind.strip() for kind in options.kinds.split(",")] if options.kinds is not None else None
    )
    coded = options.qcomms_forward, options.qcomms_backward, options.share_tables
    plan = EmbeddingShardingPlanner(
        topology, options.batch, constraints, options.optimizer, kinds, *coded
    ).plan(schema.tables)
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


def _check_files(options: argparse.Namespace) -> None:
    """Check before planning that the files asked for can be written, and over no file that is read.

    Raises:
        ConfigError: names the option and the file.
    """
    outputs = {"--out": options.out, "--html": options.html}
    inputs = {"--schema": options.schema, "--constraints": options.constraints}
    separate_files(outputs, {**inputs, "--topology": options.topology})
    for option, path in outputs.items():
        probe_output(option, path)


def _topology(options: argparse.Namespace) -> Topology:
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
