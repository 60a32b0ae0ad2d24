"""`rayrec calibrate`: measure the cluster that Ray joins, or this machine, for plans.

rayrec calibrate --ranks 2 --out topology.json
rayrec plan --schema schema.json --topology topology.json
"""

from __future__ import annotations

import argparse

from rayrec import arguments
from rayrec.command import Parser


def add_parser(subcommands: argparse._SubParsersAction[Parser]) -> None:
    """Register the subcommand."""
    parser = subcommands.add_parser(
        "calibrate",
        help="measure the ranks of a cluster, for plans",
        description=__doc__.splitlines()[0],
    )
    add = parser.add_argument
    text = "ranks, as they will train"
    add("--ranks", type=arguments.whole(), required=True, metavar="N", help=text)
    add("--gpu", action="store_true", help="one GPU per rank; otherwise CPU")
    text = "CPUs of a rank (%(default)s)"
    add("--cpus", type=arguments.positive, default=1, metavar="C", help=text)
    text = "10^9 bytes that a rank's tables may take; by default from the nodes"
    add("--memory", type=arguments.positive, metavar="GB", help=text)
    text = "where to write the topology as JSON"
    add("--out", type=arguments.path, required=True, metavar="FILE", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, write, and say what was found. Raises RayrecError."""
    from rayrec.driver import ScalingConfig, calibrate  # Ray, which planning does not need
    from rayrec.storage import probe_output, write_whole

    # The file is tried first: the result of a calibration must not be lost at its end.
    probe_output("the topology (--out)", options.out)
    scaling = ScalingConfig(
        num_workers=options.ranks,
        use_gpu=options.gpu,
        cpus_per_worker=options.cpus,
        memory_per_worker=None if options.memory is None else int(options.memory * 1e9),
    )
    topology = calibrate(scaling, lambda line: print(line, flush=True))
    write_whole("the topology (--out)", options.out, topology.to_json() + "\n")
    print(
        f"{topology.world_size} ranks on {len(topology.hosts)} hosts: random rows "
        f"{topology.memory_bw / 1e9:.1f} GB/s, a collective takes {topology.latency_s * 1e6:.0f} "
        f"us\ntopology: {options.out}"
    )
