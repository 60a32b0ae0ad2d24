"""Small drivers for the tests of this folder, and a model that can be told to misbehave on one
rank.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from actors.rank import RankActor
from rayrec.data import TimeWindows, WindowedDataset
from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import Driver, OptimizerConfig, RunConfig, ScalingConfig
from rayrec.driver.scaling import GROW_AFTER_S
from rayrec.recipe import ModelRecipe
from rayrec.runs.inputs import open_data
from rayrec.streams import StreamDataset
from rayrec.train.own_loop import TrainLoop

CPUS_PER_RANK = 1
CLUSTER_CPUS = 6  # of the cluster of tests/ray/conftest.py


def some(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Cases of a test, of which the default tier takes some: every rank costs four seconds of a
    core.
    """
    cases = list(cases)
    assert all(case in cases for case in default)
    return [
        case if case in default else pytest.param(*_tuple(case), marks=pytest.mark.slow)
        for case in cases
    ]


def _tuple(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def recipe(clicks: SyntheticPaths, model: str = "dlrm") -> ModelRecipe:
    """A tiny model for the data."""
    return ModelRecipe(
        model=model, schema=clicks.schema.read_text(), dense_layers=(16,), over_layers=(16,)
    )


def driver(
    clicks: SyntheticPaths,
    ranks: int | tuple[int, int],
    *,
    model: Callable[[], nn.Module] | None = None,
    plan: Any = "auto",
    cpus_per_worker: float = CPUS_PER_RANK,
    batch: int = 512,
    topology: Any = None,
    placement_timeout_s: float | None = None,
    spares: int = 0,
    grow_after_s: float = GROW_AFTER_S,
    memory_per_worker: int | None = None,
    windows: TimeWindows | None = None,
    stream: StreamDataset | None = None,
    train_loop: TrainLoop | None = None,
    **run: Any,
) -> Driver:
    """A driver on `ranks` ranks; `run` overrides fields of the RunConfig."""
    options: dict[str, Any] = {
        "global_batch_size": batch,
        "sparse_optimizer": OptimizerConfig(name="rowwise_adagrad", lr=0.05),
        "dense_optimizer": OptimizerConfig(name="adagrad", lr=0.01),
        "progress": "off",
        "timeout_s": 30.0,
        "report_every_s": 0.5,
    }
    options |= run if "steps" in run or "epochs" in run else {"epochs": 1, **run}
    schema = clicks.schema.read_text()
    data: Any = stream or open_data(str(clicks.train), schema)
    return Driver(
        model or recipe(clicks),
        data if windows is None else WindowedDataset(data, windows),
        ScalingConfig(
            num_workers=ranks,
            cpus_per_worker=cpus_per_worker,
            placement_timeout_s=placement_timeout_s,
            spares=spares,
            grow_after_s=grow_after_s,
            memory_per_worker=memory_per_worker,
        ),
        RunConfig(**options),
        eval_data=open_data(str(clicks.eval), schema),
        plan=plan,
        topology=topology,
        train_loop=train_loop,
    )


def misbehaving(
    clicks: SyntheticPaths, folder: Path, on_step: Callable[[int, int], None]
) -> Callable[[], nn.Module]:
    """The tiny model, which calls on_step(rank, step) before each forward and leaves its process id
    in `folder` in step 3.

    Made of closures only, so that it travels to the ranks by value.
    """
    build, where = recipe(clicks), str(folder)

    def model() -> nn.Module:
        import torch.distributed as dist

        module = build()
        steps = [0]

        def before(_module: nn.Module, _inputs: Any) -> None:
            steps[0] += 1
            rank = dist.get_rank() if dist.is_initialized() else 0
            if steps[0] == 3:
                with open(f"{where}/{rank}.tmp", "w") as file:
                    file.write(str(os.getpid()))
                os.replace(f"{where}/{rank}.tmp", f"{where}/{rank}.pid")
            on_step(rank, steps[0])

        module.register_forward_pre_hook(before)
        return module

    return model


def wait_for_pid(folder: Path, rank: int, timeout_s: float = 60.0) -> int:
    """Process id of a rank that has reached step 3."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = folder / f"{rank}.pid"
        if path.exists():
            return int(path.read_text())
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank} did not reach step 3 in {timeout_s} s")


def compare(checkpoint: str, other: str) -> None:
    """Compare all tables, their state and the dense layers of runs on other numbers of ranks."""
    import numpy as np

    from rayrec.checkpoint import load_table, read_manifest, restore_checkpoint

    close = {"rtol": 1e-4, "atol": 2e-5}
    for table in read_manifest(checkpoint).tables:
        ours, theirs = load_table(checkpoint, table.name), load_table(other, table.name)
        assert ours.column_names == theirs.column_names
        for name in ours.column_names:
            one, two = (np.array(t[name].to_pylist()) for t in (ours, theirs))
            np.testing.assert_allclose(two, one, **close)
    ours, theirs = (restore_checkpoint(path, []).dense for path in (checkpoint, other))
    assert set(ours) == set(theirs) and ours
    for name, tensor in ours.items():
        np.testing.assert_allclose(theirs[name], tensor, **close)


def digests(checkpoint: str) -> dict[str, str]:
    """A digest of every file of a checkpoint but for its manifest, which tells of times."""
    told = {}
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.is_file() and path.name != "manifest.json":
            told[str(path.relative_to(checkpoint))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return told


def held() -> list[str]:
    """What runs use of the cluster that this process is connected to, one line each.

    Ray Data keeps actors without a CPU on a cluster; they are not told.
    """
    import ray
    from ray._private.state import actors, available_resources_per_node
    from ray.util.placement_group import placement_group_table

    free = sum(node.get("CPU", 0.0) for node in available_resources_per_node().values())
    total = ray.cluster_resources().get("CPU", 0.0)
    lines = [] if free == total else [f"{total - free:g} of {total:g} CPU"]
    for number, group in placement_group_table().items():
        if group["state"] != "REMOVED":
            lines.append(f"group {number} {group['name']}, {group['state']}")
    for number, actor in actors().items():
        if actor["ActorClassName"] == RankActor.__name__ and actor["State"] != "DEAD":
            lines.append(f"actor {number}, {actor['State']}")
    return lines
