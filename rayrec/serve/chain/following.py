"""`FollowingPredictor`: a predictor that goes on to what training has published since.

predictor = Predictor.follow("runs/clicks")
predictor.predict(rows)
predictor.refresh()  # now and then, in any thread
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from rayrec.serve.chain.follower import Follower, Version
from rayrec.serve.chain.version_policy import Verdict
from rayrec.serve.predictor import Predictor
from rayrec.serve.weights import Weights


class FollowingPredictor(Predictor):
    """Scores rows by the newest version of a chain; make one with `Predictor.follow`.

    Calls may come from several threads, `refresh` among them.

    Args:
        follower: reads the folder and holds the tables.
        model: the argument of `Predictor`.
    """

    def __init__(self, follower: Follower, model: Callable[[], nn.Module] | None = None) -> None:
        self.follower = follower
        version = self.follower.version
        packed = self.follower.copies.tables(version.copy, version.powers)
        super().__init__(replace(self.follower.artifact, packed=packed), model)
        self.weights.name, self.weights.step = version.name, version.step
        _tell_times(self.weights, version)
        self._copy = version.copy
        self._readers = [0, 0]
        self._changed = threading.Condition()
        self._refreshing = threading.Lock()
        if len(follower.copies.data) > 1:
            # a single copy is written while calls read it
            follower.free = self.wait_unread
        self.refresh()

    @property
    def verdict(self) -> Verdict:
        """Verdict on the newest publication: CURRENT, or why it is not served, such as FORK."""
        return self.follower.verdict

    @property
    def trouble(self) -> str:
        """Explanation of the verdict in a line; "" while current."""
        return self.follower.trouble

    def refresh(self) -> int:
        """Apply all new publications, and return their number.

        What cannot be applied changes nothing: `verdict` and `trouble` say why.
        """
        applied = 0
        with self._refreshing:
            while (version := self.follower.look()) is not None:
                self.take(version)
                applied += 1
        return applied

    def take(self, version: Version) -> None:
        """Change over to a version, whose tables are in the copy that it names."""
        packed = self.follower.copies.tables(version.copy, version.powers)
        weights = self.weights.renewed(packed, version.dense_tensors(), version.name, version.step)
        _tell_times(weights, version)
        with self._changed:
            self.weights, self._copy = weights, version.copy

    @contextmanager
    def _held(self) -> Iterator[Weights]:
        """Yield the weights of the current version; their copy is not written inside the block."""
        with self._changed:
            weights, copy = self.weights, self._copy
            self._readers[copy] += 1
        try:
            yield weights
        finally:
            with self._changed:
                self._readers[copy] -= 1
                self._changed.notify_all()

    def wait_unread(self, copy: int) -> None:
        """Wait until no call reads a copy; new calls read the other one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[copy])


def _tell_times(weights: Weights, version: Version) -> None:
    weights.event_time, weights.ingest_time = version.event_time, version.ingest_time
