"""A tiny model that acts before every forward, and knows in which life of its rank it is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrec.data.synthetic import SyntheticPaths
from tests.ray import worlds

Act = Callable[[int, int, int], None]


def acting(clicks: SyntheticPaths, scratch: Path, act: Act) -> Callable[[], Any]:
    """The tiny model, which calls act(rank, life, step); made of closures, so that it travels."""
    build, where = worlds.recipe(clicks), str(scratch)

    def model() -> Any:
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

    return model


def pids(folder: Path, rank: int) -> list[int]:
    """The processes of a rank by life."""
    paths = sorted((folder / "scratch").glob(f"{rank}-*"), key=lambda path: int(path.name[2:]))
    return [int(path.read_text()) for path in paths]
