"""Rows with planted truth for a run that brings no data, made while Ray starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rayrec.train.events import Milestone

if TYPE_CHECKING:
    from rayrec.data.planted import SyntheticConfig
    from rayrec.data.synthetic import SyntheticPaths


@contextmanager
def planted_rows(
    config: SyntheticConfig, on_cluster: bool, timing: list[Milestone]
) -> Iterator[SyntheticPaths]:
    """Make the rows in a temporary folder, which is removed at the end.

    Args:
        on_cluster: Ray is started beside it, and stays connected.
        timing: gets the milestones of both.
    Raises:
        ConfigError: there is no room for the rows.
        ClusterError: Ray does not start.
    """
    from rayrec.data.synthetic import check_room, write_synthetic
    from rayrec.driver.cluster import connected
    from rayrec.machine.signals import hold_signals

    def write() -> tuple[SyntheticPaths, Milestone]:
        return write_synthetic(folder, config), Milestone("data")

    print(f"making {config.rows_train} + {config.rows_eval} rows with planted truth", flush=True)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rayrec-data-"))
        check_room(folder, config)
        signals = stack.enter_context(hold_signals())
        with ThreadPoolExecutor(1) as pool:
            made = pool.submit(write)
            if on_cluster:
                stack.enter_context(connected())
                timing.append(Milestone("Ray cluster"))
        signals.check()
        paths, ready = made.result()
        timing.append(ready)
        yield paths
