"""`RunState`: the state of a run beside the rows of its tables, as one value.

Checkpoints write it, sync points keep it in memory, and a hand-over takes it to the next world of
ranks. `LiveRun` is the run of one rank while it trains: it returns its state between two steps, and
goes to a state whose rows are in place. Learning rates are functions of the step, and early
stopping follows from the best evaluation, so neither has a field of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rayrec.checkpoint import dense_tensors, load_dense
from rayrec.comm import plain
from rayrec.distributed import DistributedModelParallel
from rayrec.dynamic.clock import Instant
from rayrec.layout import BaseEmbeddingConfig
from rayrec.train.callbacks import Hooks
from rayrec.train.config import TrainSpec
from rayrec.train.data_cursor import DataCursor
from rayrec.train.evaluation_schedule import EvaluationSchedule
from rayrec.train.events import Event
from rayrec.train.random_state import go_on, random_state
from rayrec.train.shaping import Best
from rayrec.train.window import gather_objects


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """State of a run beside the rows of its tables, after a step.

    Attributes:
        step: global steps done.
        epoch, batch: place in the data; see `DataCursor`.
        rows, seconds: rows of training and its duration in this run, over all ranks.
        best: best evaluation, and the number of evaluations since.
        updates: number of updates of the tables.
        id_clocks: training steps of each dynamic table, and the time of its data.
        dense: dense parameters and buffers by name.
        dense_optimizer: state of their optimizer, or None.
        world_size: number of ranks of the run.
        random: states of the random generators by rank; a sync point has those of its own rank.
    """

    step: int
    epoch: int
    batch: int
    rows: int
    seconds: float
    best: Best
    updates: int
    dense: Mapping[str, Tensor]
    dense_optimizer: Mapping[str, Any] | None
    world_size: int
    random: Mapping[int, Mapping[str, Any]]
    id_clocks: Mapping[str, Instant] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the state as bytes, tensors included."""
        return bytes(plain.encode(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> RunState:
        """Return the state that `to_bytes` was called on."""
        state = plain.decode(data)
        assert isinstance(state, cls)
        return state


class LiveRun:
    """Run of one rank while it trains.

    Args:
        on_phase: receives the current phase, in words that complete "while ...".
    Attributes:
        rank, world_size: index of this rank, and number of ranks.
        part: rank, number of ranks and rows of a global batch, as a loader takes them.
        writers: number of ranks that hold every table together; the others are their replicas.
        autocast: dtype of the dense layers' products, or None for the parameters' own.
        model: the sharded model.
        tables: configs of all tables of the model, with the rows that they begin with.
        dense: optimizer of the dense parameters, or None where there are none.
        cursor: place in the data.
        schedule: evaluations, with the best one.
        step: global steps done.
        rows, seconds: rows of training and its duration in this run, over all ranks.
        newest_events: where the last step ended a window of a stream, the newest event time of all
            windows before it, and with it, seconds since 1970.
        hooks: callbacks of this rank.
        tell: receives each event.
        note: receives a line for the user.
    """

    model: DistributedModelParallel
    tables: Sequence[BaseEmbeddingConfig]
    hooks: Hooks

    def __init__(
        self, spec: TrainSpec, device: torch.device, on_phase: Callable[[str], None]
    ) -> None:
        self.spec, self.device, self.on_phase = spec, device, on_phase
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.part = self.rank, self.world_size, spec.global_batch_size
        self.writers = spec.sharding_group_size or self.world_size
        self.autocast = torch.bfloat16 if spec.dense_dtype == "bfloat16" else None
        self.dense: torch.optim.Optimizer | None = None
        self.cursor = DataCursor(spec, self.rank, self.world_size, pin_memory=device.type == "cuda")
        self.schedule = EvaluationSchedule(spec)
        self.step, self.rows, self.seconds = 0, 0, 0.0
        self.newest_events: tuple[int, int] | None = None
        self.tell: Callable[[Event], None] = lambda event: None
        self.note: Callable[[str], None] = lambda line: None

    def announce(self, event: Event) -> None:
        """Tell the run and this rank's callbacks of an event."""
        self.tell(event)
        self.hooks.event(event)

    def state(self, *, own_generators: bool = False) -> RunState:
        """Return the state after the last step, with the live tensors of the dense part.

        All ranks call it together, unless it is to hold the random generators of this rank alone.
        """
        own = random_state(self.model.device)
        everyone = {self.rank: own} if own_generators else dict(enumerate(gather_objects(own)))
        return RunState(
            step=self.step,
            epoch=self.cursor.epoch,
            batch=self.cursor.batch,
            rows=self.rows,
            seconds=self.seconds,
            best=self.schedule.best,
            updates=self.model.iteration,
            id_clocks=self.model.id_clocks,
            dense=dense_tensors(self.model.dense_parameters(), self.model.module),
            dense_optimizer=None if self.dense is None else self.dense.state_dict(),
            world_size=self.world_size,
            random=everyone,
        )

    def go_to(self, state: RunState, source: str) -> None:
        """Go to a state, whose rows and counters of updates are in place already.

        Args:
            source: where the state comes from, for messages.
        """
        self.load_dense(state.dense, source)
        self.load_dense_optimizer(state.dense_optimizer)
        self.cursor.go_to(state.epoch, state.batch)
        self.model.go_on_from(state.step)
        self.schedule.resume(state.best)
        self.step, self.rows, self.seconds = state.step, state.rows, state.seconds
        seeds = f"seed {self.spec.seed} step {state.step}"
        go_on(state.random, state.world_size, self.rank, self.world_size, self.model.device, seeds)

    def load_dense(self, dense: Mapping[str, Tensor], source: str) -> None:
        """Fill the dense parameters and buffers."""
        live = dense_tensors(self.model.dense_parameters(), self.model.module)
        load_dense(live, dense, source)

    def load_dense_optimizer(self, state: Mapping[str, Any] | None) -> None:
        """Fill the dense optimizer, which keeps the learning rate and options of this run."""
        if self.dense is None or state is None:
            return
        # they come first, since torch keeps the state as they ask for
        groups = [
            {**own, "params": saved["params"]}
            for own, saved in zip(self.dense.param_groups, state["param_groups"], strict=True)
        ]
        self.dense.load_state_dict({**state, "param_groups": groups})
