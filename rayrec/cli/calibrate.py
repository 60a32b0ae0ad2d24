"""`rayrec calibrate`: measure the cluster that Ray joins, or this machine, for plans."""

from __future__ import annotations

import click

from rayrec.cli.base import Command, default_option, file_option
from rayrec.cli.values import POSITIVE, count


@click.command(
    cls=Command,
    needs="rayrec.driver.calibration",
    examples="""
rayrec calibrate --ranks 2 --out topology.json
rayrec plan --schema schema.json --topology topology.json
""",
)
@click.option("--ranks", type=count(), required=True, metavar="N", help="as they will train")
@click.option("--gpu", is_flag=True, help="one GPU per rank; otherwise CPU")
@default_option("--cpus", type=POSITIVE, default=1, metavar="C", help="CPUs of a rank")
@click.option(
    "--memory",
    type=POSITIVE,
    metavar="GB",
    help="10^9 bytes that a rank's tables may take; by default from the nodes",
)
@file_option("--out", required=True, help="where to write the topology as JSON")
def command(ranks: int, gpu: bool, cpus: float, memory: float | None, out: str) -> None:
    """Measure the cluster that Ray joins, or this machine, for plans."""
    from rayrec.driver import ScalingConfig, calibrate  # Ray, which planning does not need
    from rayrec.storage import probe_output, write_whole

    # The file is tried first: the result of a calibration must not be lost at its end.
    probe_output("the topology (--out)", out)
    scaling = ScalingConfig(
        num_workers=ranks,
        use_gpu=gpu,
        cpus_per_worker=cpus,
        memory_per_worker=None if memory is None else int(memory * 1e9),
    )
    topology = calibrate(scaling, lambda line: print(line, flush=True))
    write_whole("the topology (--out)", out, topology.to_json() + "\n")
    print(
        f"{topology.world_size} ranks on {len(topology.hosts)} hosts: random rows "
        f"{topology.memory_bw / 1e9:.1f} GB/s, a collective takes {topology.latency_s * 1e6:.0f} "
        f"us\ntopology: {out}"
    )
