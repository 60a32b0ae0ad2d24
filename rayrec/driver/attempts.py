"""`Attempts`: from where a run goes on after a failure or a pause, as the spec that its ranks get.

A run goes on from its newest whole checkpoint, with older ones to fall back on. Without any it
begins as its first life did. What stood in the run's folder before the run and is not of its past
is never taken. Ranks that lie as before look for a sync point in memory first; they find out by
themselves which one all have (`rayrec.train.sync_points`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa

from rayrec.checkpoint import CheckpointManager
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.run_folder import RunFolder
from rayrec.driver.start import Start, fitting
from rayrec.storage import one_line
from rayrec.train.config import SyncPoints, TrainSpec
from rayrec.train.events import Began
from rayrec.train.hand_over import HandOverTask
from rayrec.train.own_loop import LoopTask
from rayrec.train.tasks import FitTask


class Attempts:
    """Attempts of one run: each begins from the newest checkpoint after a failure or a change.

    Args:
        run_path: absolute folder or URI of the run, which this driver holds; None keeps nothing.
        start: starting point of the first attempt.
        say: receives lines for the user.
        sync_every_n_steps: global steps from one sync point to the next, or None.
        folder: the run's folder; no world of ranks saves in it once another one has followed.
    """

    def __init__(
        self,
        run_path: str | None,
        start: Start,
        say: Callable[[str], None],
        sync_every_n_steps: int | None,
        folder: RunFolder | None = None,
    ) -> None:
        self._manager = CheckpointManager(run_path) if run_path else None
        self._start, self._say, self._folder = start, say, folder
        self._begun = False
        self._sync_every = sync_every_n_steps
        self._names: list[str] = []
        self._prepared: Prepared | None = None
        self._nodes: set[str] = set()
        self._hosts: tuple[tuple[int, ...], ...] = ()
        # Rank 0 sets these aside when the first life begins, and not before.
        steps = self._manager.steps() if self._manager is not None else ()
        self._foreign = {step for step in steps if step > start.step}

    def see(self, event: object) -> None:
        """Hear what the ranks tell."""
        self._begun = self._begun or isinstance(event, Began)

    def prepare(self, look: Callable[[RankGroup], Prepared], group: RankGroup) -> Prepared:
        """Prepare the next attempt of the run.

        Args:
            look: prepares the first attempt, and each attempt whose ranks are on other nodes.
        """
        nodes = {address.node_id for address in group.addresses}
        before = self._prepared
        is_same = nodes <= self._nodes and group.hosts == self._hosts
        # rows that ranks pass on must not come into the memory where they lie
        if before is None or not is_same or group.handed_over:
            before = look(group)
            # rows of another plan, or of ranks on other hosts, are not those of this one
            self._names.append(uuid.uuid4().hex)
        self._nodes |= nodes
        first, self._hosts = self._prepared is None, group.hosts
        self._prepared = before
        task = before.task
        assert isinstance(task, FitTask | LoopTask)
        # no earlier world saves between the look at what is saved and the begin of this one
        mark = None if self._folder is None else self._folder.next_world()
        spec, step = (task.spec, 0) if first else self.again(task.spec)
        spec = replace(spec, mark=mark)
        if self._sync_every is not None:
            group.keep_memory()
            points = SyncPoints(
                every_n_steps=self._sync_every, name=self._names[-1], not_before=step
            )
            spec = replace(spec, sync_points=points)
        passes_on = None
        if group.handed_over:
            spec = replace(spec, handed_over=True)
            size = spec.sharding_group_size
            passes_on = HandOverTask(plan=spec.plan, ranks=group.world_size, group_size=size)
        return replace(before, task=replace(task, spec=spec), first=passes_on)

    def end(self) -> None:
        """Free the memory that this host keeps for the run, where it is not free already."""
        if self._sync_every is not None:
            from rayrec.comm.kept_memory import end_keeper

            for name in self._names:
                end_keeper(name)

    def again(self, spec: TrainSpec) -> tuple[TrainSpec, int]:
        """Return the spec of the next attempt, and the step of the checkpoint that it resumes.

        Args:
            spec: spec of the first or of any later attempt.
        Raises:
            CheckpointError: the run's folder cannot be listed.
        """
        paths, step = self._newest()
        if self._manager is not None and self._begun:
            try:
                self._manager.clear_unfinished(max(step, self._start.step))
            except (OSError, pa.ArrowException) as error:
                # a save empties its folder first
                self._say(f"the rest of an unfinished checkpoint stays: {one_line(error)}")
        own = bool(paths)
        if not own:
            paths, step = self._start.resume_from, self._start.step
        changes: dict[str, Any] = {"resume_from": paths, "run_began": self._start.step}
        if own:
            # the place of such a checkpoint lies in the data of this run
            changes["new_data"] = False
        profile = spec.profile
        if profile is not None and spec.steps - step < profile.skip_steps + 2 * profile.steps:
            self._say("no profile is made, since too few steps are left")
            changes["profile"] = None
        return replace(spec, **changes), step

    def _newest(self) -> tuple[tuple[str, ...], int]:
        """Return the complete checkpoints of this run, newest first, and the step of the newest."""
        if self._manager is None:
            return (), 0
        # An earlier life's checkpoints hold another place in the data; see `again`.
        foreign = frozenset() if self._begun else self._foreign
        own = [s for s in self._manager.steps() if s > self._start.step and s not in foreign]
        found = fitting(self._manager, own, self._start.fits, self._say)
        return tuple(path for path, _ in found), found[0][1].step if found else 0
