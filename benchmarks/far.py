"""Ranks of one machine that exchange as if they were on hosts far apart: every message takes at
least `FAR_S` seconds.

The rank sleeps for the rest of the time, so its core is free meanwhile, as it is while a network
card works. Bandwidth is not limited.
"""

from __future__ import annotations

import time
from typing import Any

from rayrec.comm.exchange import Pending
from rayrec.distributed import DistributedModelParallel

# a few times the round trip of TCP between two machines of one zone, or one between zones
FAR_S = 1e-3


class FarExchange:
    """An exchange as `inner`, with a delay on each collective."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return (
            self._delayed(found)
            if name in ("all_to_all", "views", "headed", "all_gather")
            else found
        )

    def _delayed(self, collective: Any) -> Any:
        def call(*args: Any) -> Pending[Any]:
            due = time.perf_counter() + FAR_S
            pending = collective(*args)

            def finish() -> Any:
                result = pending.wait()
                time.sleep(max(0.0, due - time.perf_counter()))
                return result

            return Pending(finish)

        return call


def put_far(model: DistributedModelParallel) -> None:
    """Let the model's ranks exchange ids, rows and gradients over a far wire; dense gradients are
    not delayed.
    """
    engine = model._engine
    engine.exchange = FarExchange(engine.exchange)  # type: ignore[assignment]
    engine.runner.exchange = engine.exchange
    if engine._ahead is not None:
        engine._ahead._exchange = FarExchange(engine._ahead._exchange)  # type: ignore[assignment]
