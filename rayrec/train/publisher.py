"""`Publisher`: publishes a rank's part of a run for servers that follow it.

A delta is copied while training stands still and packed and written by a thread. A base holds all
rows, so training waits until it is there. It comes first in every life of a run: after a restore
the rows are those of an earlier step than was published, and only a base undoes what was rolled
back. All ranks call the same methods together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from rayrec.checkpoint import ShardState, TouchedState, copy_touched, dense_tensors
from rayrec.data import FileDataset
from rayrec.dynamic.clock import Instant, clock_extras
from rayrec.dynamic.known import copy_known
from rayrec.errors import CheckpointError
from rayrec.serve import Manifest, ParityBounds, export
from rayrec.serve.chain.folder import PUBLISHED, ChainFolder
from rayrec.serve.chain.writer import ChainWriter, Moment
from rayrec.serve.recipes import has_recipe
from rayrec.serve.signing import SigningKey
from rayrec.streams import schema_of
from rayrec.train.run_state import LiveRun
from rayrec.train.save_thread import SaveThread
from rayrec.train.saver import copied
from rayrec.train.window import gather_objects

Times = tuple[int | None, float | None]


class Publisher:
    """Publishes one rank of a run.

    Args:
        live: its model tracks touched rows.
    Attributes:
        step: step of the last publication, or None.
        newest: returns the event time and the ingest time of the newest row of a stream that was
            trained on; rank 0 asks for them.
    Raises:
        ConfigError: a table with a type of its own, or the signing key, does not exist.
    """

    def __init__(self, live: LiveRun) -> None:
        config, tables, rank = live.spec.publish, live.tables, live.rank
        assert config is not None, "publications are asked for"
        self._live, self._config, self._model = live, config, live.model
        self._types = {**config.tables, "*": config.dtype}
        mark = live.spec.mark
        self._folder = ChainFolder(
            config.path or f"{live.spec.run_path}/{PUBLISHED}",
            check=None if mark is None else mark.check,
        )
        key = SigningKey.read(config.signing_key) if rank == 0 else None
        self._writer = ChainWriter(self._folder, tables, self._types, rank, live.writers, key)
        self._thread = SaveThread()
        self._needs_base, self._since_base = True, 0
        self._mark, self._seconds = 0, 0.0
        self._tables = {table.name: table for table in tables}
        # of dynamic tables at the last publication
        self._id_clocks: dict[str, Instant] = {}
        self.step: int | None = None
        self.newest: Callable[[], Times] = lambda: (None, None)

    def next_step(self, step: int) -> int | None:
        """Return the next step at which to publish; None where seconds decide."""
        batch = self._live.spec.global_batch_size
        return self._config.every.next_step(step, self._live.rows, batch)

    def after_window(self, seconds: float, added: int = 0) -> None:
        """Publish if that is due at the end of a window of `seconds`, with so many rows.

        Raises:
            CheckpointError: on every rank, when a row cannot be packed or the model not exported.
            SaveError: on every rank, when the storage refused; also of the publication before.
        """
        self._seconds += seconds
        live, every = self._live, self._config.every
        if every.due(live.step, self._seconds, live.rows, added, live.newest_events):
            self._publish()

    def after_wait(self, seconds: float) -> None:
        """Publish what is due by time while no step is taken; raises as `after_window` does.

        What was trained on is published already, unless a delta had to give way to a base.
        """
        if self.step != self._live.step:
            self.after_window(seconds)
            return
        self._seconds += seconds
        every_s = self._config.every.s
        if every_s is None or self._seconds < every_s:
            return
        self._seconds = 0.0
        self.finish()
        if self._needs_base:
            self._publish()

    def at_end(self) -> None:
        """Publish the end of a run, and wait until it is written; raises as `after_window` does."""
        if not self._live.step:
            return
        if self.step != self._live.step:
            self._publish()
        self._live.on_phase("publishing")
        self.finish()
        if self._needs_base:
            self._publish()

    def rebase(self) -> None:
        """Make the next publication a base, since the model was restored or replaced."""
        self.finish()
        self._needs_base = True

    def _publish(self) -> None:
        """Publish the model after the last step; a delta is written behind the training."""
        self._live.on_phase("publishing")
        self.finish()
        self._seconds, self.step = 0.0, self._live.step
        self._model.sync()  # replicas have drifted apart, and one of each is published
        full_every = self._config.full_every
        if self._needs_base or (full_every is not None and self._since_base + 1 >= full_every):
            self._publish_base()
        else:
            self._publish_delta()
        self._live.on_phase("training")

    def finish(self) -> None:
        """Wait for the publication that is being written, if there is one.

        Raises:
            CheckpointError, SaveError: the publication failed, as in `after_window`.
        """
        self._thread.finish()

    def give_up(self) -> None:
        """Leave a publication under way, since this rank leaves its world."""
        self._thread.give_up()

    def _moment(self) -> Moment:
        is_first = self._live.rank == 0
        event_time, ingest_time = self.newest() if is_first else (None, None)
        dense = dense_tensors(self._model.dense_parameters(), self._model.module)
        return Moment(
            step=self._live.step,
            plan=self._model.plan,
            dense=copied(dense) if is_first else {},
            time=round(time.time(), 3),
            event_time=event_time,
            ingest_time=ingest_time,
        )

    def _publish_base(self) -> None:
        touched = self._model.touched
        assert touched is not None, "touched rows are tracked"
        self._mark = touched.mark()
        self._tables = {table.name: table for table in self._model.tables}
        self._writer.tables = self._model.tables
        self._id_clocks = self._model.id_clocks
        extras = {**self._live.spec.extras, **clock_extras(self._id_clocks)}
        with self._making_room():
            self._writer.publish_base(
                self._states(), self._moment(), self._export, gather_objects, extras
            )
        self._needs_base, self._since_base = False, 0
        if self._live.rank == 0 and self._config.num_to_keep is not None:
            self._folder.prune(self._config.num_to_keep)

    def _publish_delta(self) -> None:
        touched, since = self._model.touched, self._mark
        assert touched is not None, "touched rows are tracked"
        self._mark = touched.mark()
        states = self._states()
        rows = touched.since(since) if states else {}
        shards = [self._copied(state, rows[state.shard]) for state in states]
        self._id_clocks = self._model.id_clocks
        moment = self._moment()

        def write() -> None:
            with self._making_room():
                published = self._writer.publish_delta(shards, moment, self._thread.gather)
            if published:
                self._since_base += 1
            else:
                self._needs_base = True

        self._thread.start(write)

    @contextmanager
    def _making_room(self) -> Iterator[None]:
        """Remove what a publication has written that failed, which it does on all ranks."""
        try:
            yield
        except CheckpointError:
            # why it failed says more than what hinders this
            with suppress(CheckpointError, OSError, ValueError):
                if self._live.rank == 0:
                    self._folder.clear()
            raise

    def _states(self) -> list[ShardState]:
        """Return the shards that this rank writes; replicas of the writers write none."""
        return self._model.shard_states() if self._live.rank < self._live.writers else []

    def _copied(self, state: ShardState, rows: Tensor) -> TouchedState:
        """Copy what has changed of a shard since the last publication: `rows`, by training."""
        name = state.shard.table
        if name not in self._id_clocks:
            return copy_touched(ShardState(state.shard, state.weight), rows)
        since, now = self._id_clocks[name], self._model.id_clocks[name]
        return copy_known(self._tables[name], state, rows, since, now)

    def _export(self, checkpoint: str, out: Path) -> Manifest:
        """Export a base; the run's random numbers stay where they are."""
        spec = self._live.spec
        schemas = [schema_of(data) for data in (spec.data, spec.eval_data)]
        state = random.getstate()
        try:
            with torch.random.fork_rng(devices=[]):
                return export(
                    checkpoint,
                    out,
                    types=self._types,
                    data=spec.eval_data if isinstance(spec.eval_data, FileDataset) else None,
                    model=None if has_recipe(spec.model, spec.extras) else spec.model,
                    schema=next((schema for schema in schemas if schema is not None), None),
                    tasks=spec.tasks,
                    bounds=ParityBounds(logit=self._config.max_logit_error),
                    signing_key=self._config.signing_key,
                )
        finally:
            random.setstate(state)
