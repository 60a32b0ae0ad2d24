"""`rayrec plan`: a sharding plan on a laptop, for clusters of any size; the same JSON trains.

    rayrec plan --schema schema.json --topology h100 --hosts 16 --batch 4096 --out plan.json --html plan.html

Needs neither torch nor Ray nor a cluster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rayrec.cli.tables import load_tables
from rayrec.command import Parser
from rayrec.errors import ConfigError
from rayrec.layout import KINDS, ShardingPlan, Topology
from rayrec.layout.html import render_page
from rayrec.layout.presets import CPU, PRESETS, RESERVE, preset_topology
from rayrec.planner import EmbeddingShardingPlanner, ParameterConstraints
from rayrec.planner.constraints import constraints_from_json
from rayrec.planner.optimizers import SPARSE_STATES
from rayrec.planner.wire import CODINGS


def add_parser(subcommands: argparse._SubParsersAction[Parser]) -> None:
    """Register the subcommand."""
    parser = subcommands.add_parser("plan", help="plan where every table lies, without a cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--schema", required=True, metavar="FILE", help="schema.json with the tables and features")
    names = ", ".join([*PRESETS, CPU])
    parser.add_argument("--topology", required=True, metavar="FILE|PRESET", help=f"a topology's JSON file, or one of {names}")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of a preset, all hosts together (8 per host)")
    parser.add_argument("--hosts", type=int, metavar="H", help="hosts of a preset (as few as the ranks need)")
    parser.add_argument("--reserve", type=float, default=RESERVE, metavar="FRACTION", help="memory of a preset kept free (%(default)s)")
    hidden = "share of the input exchange that a pipelined trainer hides, 0 to 1 (the topology's)"
    parser.add_argument("--input-hidden", type=float, metavar="SHARE", help=hidden)
    parser.add_argument("--batch", type=int, default=2048, metavar="B", help="rows per rank and step (%(default)s)")
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=list(SPARSE_STATES), help="fused optimizer (%(default)s)")
    parser.add_argument("--kinds", metavar="KIND,...", help=f"sharding kinds to use, of {', '.join(KINDS)}")
    parser.add_argument("--qcomms-forward", choices=list(CODINGS), default="fp32", help="what rows travel as between ranks (%(default)s)")
    parser.add_argument("--qcomms-backward", choices=list(CODINGS), default="fp32", help="what their gradients travel as (%(default)s)")
    parser.add_argument(
        "--share-tables",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="CPU ranks of one host read each other's rows in place where they can (default)",
    )
    parser.add_argument("--constraints", metavar="FILE", help="JSON: table name -> fields of ParameterConstraints")
    parser.add_argument("--profile", metavar="PATH", help="Parquet or Arrow data: measure pooling factors and skew (needs pyarrow)")
    parser.add_argument("--out", metavar="FILE", help="where to write the plan as JSON")
    parser.add_argument("--html", metavar="FILE", help="where to write the plan as one self-contained page")
    parser.add_argument("--diff", metavar="FILE", help="an earlier plan: print what would move")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Make the plan, print its report and write the files asked for. Raises RayrecError."""
    schema = load_tables(options.schema)
    topology = _topology(options)
    if options.input_hidden is not None:
        topology = replace(topology, input_hidden=options.input_hidden)
    measured = {}
    if options.profile is not None:
        from rayrec.cli.profile import measure  # pyarrow, which planning alone does not need

        measured = {name: found._asdict() for name, found in measure(schema, options.profile, options.batch * topology.world_size).items()}
    given = _read(options.constraints) if options.constraints is not None else "{}"
    constraints = constraints_from_json(given, options.constraints or "constraints", measured)
    if schema.weighted:
        for table in schema.tables:
            constraints[table.name] = replace(constraints.get(table.name, ParameterConstraints()), weighted=True)
    earlier = ShardingPlan.load(options.diff) if options.diff is not None else None
    kinds = [kind.strip() for kind in options.kinds.split(",")] if options.kinds is not None else None
    coded = options.qcomms_forward, options.qcomms_backward, options.share_tables
    plan = EmbeddingShardingPlanner(topology, options.batch, constraints, options.optimizer, kinds, *coded).plan(schema.tables)
    written = []
    if options.out is not None:
        _write("--out", options.out, lambda: plan.save(options.out))
        written.append(f"plan: {options.out}")
    if options.html is not None:
        page = render_page(plan, title=Path(options.schema).stem)
        _write("--html", options.html, lambda: Path(options.html).write_text(page, encoding="utf-8"))
        written.append(f"page: {options.html}")
    print(plan.report())  # after the files: a reader such as `head` may not want all of it
    if earlier is not None:
        print("\n" + earlier.diff(plan, schema.tables))
    if written:
        print("\n" + "\n".join(written))


def _topology(options: argparse.Namespace) -> Topology:
    if not Path(options.topology).is_file():
        return preset_topology(options.topology, options.ranks, options.hosts, options.reserve)
    topology = Topology.from_json(_read(options.topology), options.topology)
    for name, asked, have in (("ranks", options.ranks, topology.world_size), ("hosts", options.hosts, len(topology.hosts))):
        if asked not in (None, have):
            raise ConfigError(f"--{name} {asked} contradicts {options.topology}, which has {have} {name}; leave it out.")
    return topology


def _write(option: str, path: str, write: Callable[[], object]) -> None:
    """Write the file of an option.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write()
    except OSError as error:
        raise ConfigError(
            f"cannot write {option} {path!r}: {error.strerror}. Name a file in a folder that exists and can be written to."
        ) from None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}.") from None
