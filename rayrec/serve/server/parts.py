"""`Parts`: the objects that the two services of a replica share."""

from __future__ import annotations

from typing import NamedTuple

from rayrec.serve.server.health import Health
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.reading_thread import ReadingThread
from rayrec.serve.server.scoring_queue import ScoringQueue
from rayrec.serve.server.settings import ServerSettings


class Parts(NamedTuple):
    """Objects that the gRPC and the HTTP service of a replica share."""

    queue: ScoringQueue
    reading: ReadingThread
    health: Health
    settings: ServerSettings
    metrics: Metrics
