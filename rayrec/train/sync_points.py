"""Sync points of one rank of a run: their schedule, and the point that the run resumes.

A process of the host keeps the rows of its ranks and what undoes their updates
(`rayrec.comm.kept_memory`). When ranks meet after a failure they compare the points that each still
has, before any of them makes its model. The newest that all have is where the run goes on.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch

from rayrec.comm.kept_memory import KeptMemory
from rayrec.errors import ConfigError
from rayrec.shards.undo import Point, Slots, common_point
from rayrec.train.config import SyncPoints
from rayrec.train.every import Every
from rayrec.train.run_state import LiveRun, RunState
from rayrec.train.window import gather_objects


class RankPoints:
    """Memory and schedule of a rank's sync points.

    Attributes:
        memory: memory of the rows and of their undo logs, which outlives the process.
        chosen: sync point that the run resumes, or None.
    """

    def __init__(self, config: SyncPoints, rank: int) -> None:
        self._every, self._given = Every(config.every_n_steps), False
        self.memory = KeptMemory(config.name, rank)
        own = tuple(Slots(self.memory).points())
        told = gather_objects((own, secrets.randbits(62)))
        self.chosen = common_point([points for points, _ in told], config.not_before)
        # Points of two pasts may have one step, and be different.
        self._line = told[0][1] if self.chosen is None else self.chosen.line
        if self.chosen is None:
            self.memory.clear()

    def next_step(self, step: int) -> int | None:
        """Return the next step at which a point is due."""
        return self._every.next_step(step)

    def options(self) -> dict[str, Any]:
        """Return options for `DistributedModelParallel`; of several models the first is kept."""
        given, self._given = self._given, True
        return {} if given else {"memory": self.memory, "adopt": self.chosen is not None}

    def after_window(self, live: LiveRun) -> None:
        """Set a sync point at the end of a window, if one is due."""
        if self._every.due(live.step):
            self.set(live)

    def set(self, live: LiveRun) -> None:
        """Set a sync point at this step: rows stay in place, and the state beside them is kept."""
        if live.model.undo is not None:
            state = live.state(own_generators=True)
            live.model.undo.sync(Point(self._line, live.step), state.to_bytes())

    def go_back(self, live: LiveRun) -> RunState | None:
        """Put the rows back to the chosen point, and return the state there; None without one."""
        if self.chosen is None or live.model.undo is None:
            return None
        live.on_phase("undoing steps")
        return RunState.from_bytes(live.model.undo.go_back(self.chosen))


def open_points(config: SyncPoints | None, rank: int, device: torch.device) -> RankPoints | None:
    """Open the sync points of a run, or return None if it has none; all ranks call it together.

    Raises:
        ConfigError: the rows do not lie on the CPU, or this machine cannot keep memory.
        CommError: the process that keeps the memory cannot be started, or is gone.
    """
    if config is None:
        return None
    if device.type != "cpu":
        raise ConfigError(
            f"FailureConfig(sync_every_n_steps={config.every_n_steps}) keeps rows that lie in the "
            f"memory of a host, and those of rank {rank} lie on {device}; leave it out."
        )
    return RankPoints(config, rank)
