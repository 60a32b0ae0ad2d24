"""Runs whose node is drained amid training, and taken away when its time is over.

`python -m tests.ray.preempted_nodes FOLDER` prints what the runs said, and "equal tables" for each
that ends as one that nothing happened to. It needs a process and a cluster of its own, as
`lost_node`. Nodes are drained as a cloud does it: by `ray drain-node`, and by SIGTERM to
`ray start --block`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rayrec.data.synthetic import SyntheticPaths
from rayrec.machine.spot_notice import drain_command
from rayrec.train.callbacks import Callback
from rayrec.train.events import Noticed, Recovered, Resized, Saved
from tests.clicks import write_clicks
from tests.ray.heads import BIN
from tests.ray.lost_node import HEALTH, Moment

STEPS, EVERY = 600, 100


def paced(clicks: SyntheticPaths, folder: Path) -> Any:
    """The tiny model, which takes its time for a step while the folder has a file "slow"."""
    from tests.ray import worlds

    build, slow = worlds.recipe(clicks), str(folder / "slow")

    def model() -> Any:
        module = build()
        module.register_forward_pre_hook(
            lambda _module, _inputs: time.sleep(0.1) if os.path.exists(slow) else None
        )
        return module

    return model


class Heard(Moment):
    """Keeps what the driver hears of notices, and what follows them."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.noticed: list[Noticed] = []
        self.changes: list[Resized] = []
        self.saved: list[int] = []
        self.recovered: list[Recovered] = []
        self.saw_save = threading.Event()

    def on_notice(self, noticed: Noticed) -> None:
        """A node will go."""
        self.noticed.append(noticed)

    def on_resize(self, resized: Resized) -> None:
        """The run goes on with other ranks."""
        self.changes.append(resized)

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        """A checkpoint is complete."""
        self.saved.append(saved.step)
        if saved.step % EVERY:
            self.saw_save.set()

    def on_recovery(self, recovered: Recovered) -> None:
        """The run goes on after a failure."""
        self.recovered.append(recovered)


def train(
    clicks: SyntheticPaths,
    folder: Path,
    callback: Callback,
    ranks: Any,
    failures: int = 0,
    every: int = EVERY,
    wait_s: float | None = 90.0,
) -> Any:
    """One run; a range of ranks looks for room every second."""
    from rayrec.driver import Driver, FailureConfig, OptimizerConfig, RunConfig, ScalingConfig
    from rayrec.runs.inputs import open_data
    from rayrec.train.checkpoint_config import CheckpointConfig

    more = {} if isinstance(ranks, int) else {"grow_after_s": 1.0}
    return Driver(
        paced(clicks, folder.parent),
        open_data(str(clicks.train), clicks.schema.read_text()),
        ScalingConfig(num_workers=ranks, placement_timeout_s=wait_s, **more),
        RunConfig(
            global_batch_size=128,
            steps=STEPS,
            storage_path=str(folder),
            checkpoint=CheckpointConfig(every_n_steps=every),
            failure=FailureConfig(max_failures=failures),
            sparse_optimizer=OptimizerConfig(name="rowwise_adagrad", lr=0.05),
            dense_optimizer=OptimizerConfig(name="adagrad", lr=0.01),
            callbacks=(callback,),
            progress="plain",
            report_every_s=0.5,
            timeout_s=120.0,
        ),
        plan="row_wise",
    ).fit()


def drain(address: str, node_id: str, seconds: int) -> None:
    """Say that a node will be gone after so many seconds, as the watcher of a cloud does."""
    words = [*drain_command(seconds), "--address", address, "--node-id", node_id]
    words[0] = str(BIN / words[0])
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def started_node(address: str, folder: Path) -> subprocess.Popen[bytes]:
    """A node of one CPU by `ray start --block`, whose end takes a notice of 30 seconds."""
    words = [str(BIN / "ray"), "start", "--block", f"--address={address}", "--num-cpus=1"]
    words += ["--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"]
    env = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "30"}
    with open(folder / "node.log", "w") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def others(head: str) -> list[str]:
    """The nodes that are alive, but the head."""
    import ray

    return [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != head]


def wait_for(what: Callable[[], Any], seconds: float = 100.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


def changes(heard: Heard, result: Any) -> tuple[str, str]:
    """What a run heard of nodes and did about it, in two lines."""
    answers = [told.answer for told in heard.noticed]
    return (
        f"{answers} {[told.ranks for told in heard.changes]}",
        f"{result.failures} failures, {result.resizes} resizes",
    )


def say(*lines: str) -> None:
    """Print lines in one piece.

    A thread of Ray prints, too, what became of a node that was taken away.
    """
    print("\n".join(lines), flush=True)


def main(folder: Path) -> None:
    """Train undisturbed, leave a drained node, move to a new one, and be told in a fixed run."""
    import ray
    from ray.cluster_utils import Cluster

    from tests.ray import worlds

    clicks = write_clicks(
        folder, rows_train=8000, rows_eval=500, num_features=6, num_dense=3, dim=8, cap=200, seed=3
    )
    head_args = {"num_cpus": 1, "_system_config": dict(HEALTH)}
    cluster = Cluster(initialize_head=True, head_node_args=head_args)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    head = ray.get_runtime_context().get_node_id()
    node = started_node(cluster.address, folder)
    wait_for(lambda: others(head))
    calm = train(clicks, folder / "calm", Callback(), 2)
    slow = folder / "slow"
    # Ray adds a node in the main thread alone, so training takes another one.
    with ThreadPoolExecutor(1) as pool:
        print("-- SIGTERM to a node, an elastic run, no room elsewhere", flush=True)
        heard = Heard(8)
        slow.touch()
        run = pool.submit(train, clicks, folder / "left", heard, (1, 2))
        assert heard.reached.wait(150)
        node.send_signal(signal.SIGTERM)
        wait_for(lambda: heard.changes)
        node.wait(60)
        added = cluster.add_node(num_cpus=1)
        wait_for(lambda: len(heard.changes) == 2)
        slow.unlink()
        result = run.result(200)
        worlds.compare(calm.checkpoint, result.checkpoint)
        say(*changes(heard, result), "equal tables")

        print("-- a notice of 100 s, an elastic run, and another node comes", flush=True)
        heard = Heard(8)
        slow.touch()
        run = pool.submit(train, clicks, folder / "moved", heard, (1, 2))
        assert heard.reached.wait(150)
        (old,) = others(head)
        drain(cluster.address, old, 100)
        wait_for(lambda: heard.noticed)
        second = cluster.add_node(num_cpus=1)
        wait_for(lambda: heard.noticed[-1].answer == "leave")
        slow.unlink()
        result = run.result(200)
        worlds.compare(calm.checkpoint, result.checkpoint)
        say(*changes(heard, result), "equal tables")
        cluster.remove_node(added, allow_graceful=False)

        print("-- a notice of 15 s, a run of two ranks", flush=True)
        heard = Heard(8)
        slow.touch()
        run = pool.submit(train, clicks, folder / "saved", heard, 2, 1)
        assert heard.reached.wait(150)
        wait_for(lambda: len(others(head)) == 1)
        drain(cluster.address, others(head)[0], 15)
        assert heard.saw_save.wait(60), "no save outside of the interval"
        cluster.remove_node(second, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        wait_for(lambda: heard.recovered)
        slow.unlink()
        result = run.result(200)
        extra = min(step for step in heard.saved if step % EVERY)
        (back,) = heard.recovered
        worlds.compare(calm.checkpoint, result.checkpoint)
        say(
            f"{[told.answer for told in heard.noticed]} {result.failures} failure",
            "went on from what was saved" if back.step >= extra else "LOST STEPS",
            "equal tables",
        )
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
