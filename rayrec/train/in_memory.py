"""`InMemoryKeeper`: also restores from memory: from sync points, or tables of other ranks.

A sync point stays on its rank, and its rows are never copied; see `rayrec.shards.undo`. What ranks
of another number and plan take over travels in `hand_over`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayrec.checkpoint import CheckpointManager, dense_tensors, load_dense
from rayrec.shards.overlap import fill
from rayrec.train.hand_over import Held, on_cpu
from rayrec.train.keeper import Keeper
from rayrec.train.random_state import random_state, set_random_state
from rayrec.train.shaping import Best
from rayrec.train.window import gather_objects


class InMemoryKeeper(Keeper):
    """Saves and restores one rank of a run, by checkpoints as `Keeper` does, and in memory."""

    def remember(self, step: int, best: Best, trained: tuple[int, float]) -> bytes:
        """Return this rank's state beside the table rows as bytes, for a sync point."""
        held = {
            "step": step,
            "dense": dense_tensors(self._model.dense_parameters(), self._model.module),
            "dense_optimizer": None if self._dense is None else self._dense.state_dict(),
            "place": (self._cursor.epoch, self._cursor.batch),
            "best": best.to_json(),
            "trained": trained,
            "random": random_state(self._model.device),
        }
        file = io.BytesIO()
        torch.save(held, file)
        return file.getvalue()

    def hold(self, step: int, best: Best, trained: tuple[int, float]) -> Held:
        """Return the state of this rank that the next world of ranks takes over."""
        # replicas have drifted apart, and each new rank takes a row from one of them
        self._model.sync()
        return Held(
            rank=self._rank % self._writers,
            world_rank=self._rank,
            world_size=self._world_size,
            plan=self._spec.plan,
            states=on_cpu(self._model.shard_states()),
            small=self.remember(step, best, trained),
            random=gather_objects(random_state(self._model.device)),
            iteration=self._model.iteration,
        )

    def take_over(self, held: Held, note: Callable[[str], None]) -> int:
        """Fill the model from the kept state of the world before, and return its global steps."""
        states = self._model.shard_states()
        fill(states, held.states)
        self._model.iteration = held.iteration
        return self.recall(held.small, note, held.random)

    def recall(
        self,
        remembered: bytes,
        note: Callable[[str], None],
        random: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        """Resume a sync point, whose rows are in place already, and return its global steps.

        Args:
            note: receives a line about the starting point.
            random: the generators of every rank of another world; None goes on with this rank's.
        """
        self._note = note
        held = torch.load(io.BytesIO(remembered), weights_only=True)
        step = int(held["step"])
        live = dense_tensors(self._model.dense_parameters(), self._model.module)
        load_dense(live, held["dense"], "the sync point")
        if self._dense is not None and held["dense_optimizer"] is not None:
            self._dense.load_state_dict(held["dense_optimizer"])
        self._cursor.go_to(*held["place"])
        self._model.go_on_from(step)
        self.best, self.trained = Best.from_json(held["best"]), tuple(held["trained"])
        if random is None:
            set_random_state(held["random"], self._model.device)
        else:
            self._seed(random, step)
        run_path = self._spec.run_path
        if run_path:
            path = CheckpointManager(run_path).path(step)
            if path in self._spec.resume_from:
                self.newest = path
            # Only damaged ones are later, since a whole one would have been gone on from.
            self._set_later_aside(path, step)
        return step
