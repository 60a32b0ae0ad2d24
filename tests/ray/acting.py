"""A tiny model that acts before every forward, and knows in which life of its rank it is; and runs
of it, to be compared bit for bit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrec.data.synthetic import SyntheticPaths
from rayrec.driver import FailureConfig, Result
from rayrec.train.checkpoint_config import CheckpointConfig
from tests.ray import worlds

Act = Callable[[int, int, int], None]
STEPS, BATCH = 24, 256


def acting(
    clicks: SyntheticPaths, scratch: Path, act: Act, model: str = "dlrm"
) -> Callable[[], Any]:
    """The tiny model, which calls act(rank, life, step); made of closures, so that it travels."""
    build, where = worlds.recipe(clicks, model), str(scratch)

    def build_and_watch() -> Any:
        import torch.distributed as dist

        module = build()
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not dist.is_initialized():
            return module
        life = 0
        while True:
            try:
                with open(f"{where}/{rank}-{life}", "x") as file:
                    file.write(str(os.getpid()))
                break
            except FileExistsError:
                life += 1
        steps = [0]

        def before(_module: Any, _inputs: Any) -> None:
            if module.training:
                steps[0] += 1
            act(rank, life, steps[0])

        module.register_forward_pre_hook(before)
        return module

    return build_and_watch


def run(
    clicks: SyntheticPaths, folder: Path, act: Act | None = None, ranks: int = 2, **options: Any
) -> tuple[Result, dict[str, str]]:
    """Train a tiny model; `act(rank, life, step)` is called before every forward.

    The lives of a rank are counted by files in `folder`, since a killed process forgets.
    """
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    chosen: dict[str, Any] = {
        "steps": STEPS,
        "batch": BATCH,
        "storage_path": str(folder),
        "checkpoint": CheckpointConfig(every_n_steps=5),
        "failure": FailureConfig(max_failures=3),
        "plan": "row_wise",
        "timeout_s": 120.0,
    }
    if act is not None:
        chosen["model"] = acting(clicks, scratch, act)
    result = worlds.driver(clicks, ranks, **{**chosen, **options}).fit()
    assert result.checkpoint is not None
    return result, worlds.digests(result.checkpoint)


def at(rank: int, moments: dict[int, int], number: int = signal.SIGKILL) -> Act:
    """Sends a signal to a rank before the forward of a step, by life: {life: step}."""

    def act(own: int, life: int, now: int) -> None:
        if own == rank and moments.get(life) == now:
            os.kill(os.getpid(), number)

    return act


def pids(folder: Path, rank: int) -> list[int]:
    """The processes of a rank by life."""
    paths = sorted((folder / "scratch").glob(f"{rank}-*"), key=lambda path: int(path.name[2:]))
    return [int(path.read_text()) for path in paths]
