"""Watching a run: the log of its events, its page, and the trackers that people use.

Everything here is told of a run by the driver through `rayrec.train.callbacks.Callback`, or reads
what such a callback wrote. Heavy names load on first use. `rayrec.driver.RayMetrics`, which needs
Ray, lives in the driver.
"""

from __future__ import annotations

from rayrec.lazy import lazy_names

_HOME = {
    "EventLog": "rayrec.watch.event_log",
    "MLflowCallback": "rayrec.watch.trackers",
    "RunEvent": "rayrec.watch.events",
    "RunEvents": "rayrec.watch.events",
    "TensorBoardCallback": "rayrec.watch.trackers",
    "WandbCallback": "rayrec.watch.trackers",
    "read_events": "rayrec.watch.events",
    "write_run_page": "rayrec.watch.run_page",
}
__all__ = sorted(_HOME)
__getattr__ = lazy_names(__name__, _HOME)
