"""Metrics of a server for Prometheus.

All replicas listen at one port, so a scrape reaches any of them. Where the variable
PROMETHEUS_MULTIPROC_DIR is set, as the supervisor does, every replica keeps its numbers in files
there, and whichever is asked gives the sums over all. One that is started again goes on with the
numbers of the one before, so that there are no more files, however often that happens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from rayrec.serve.chain.follower import Version
from rayrec.serve.chain.version_policy import Verdict
from rayrec.serve.server.faults import OUTCOMES
from rayrec.serve.server.settings import METRICS_FOLDER

CONTENT_TYPE = CONTENT_TYPE_LATEST
PROTOCOLS = "grpc", "http"
FOLLOWED = "followed"
STATES = tuple(v.value for v in Verdict if v not in (Verdict.NEXT, Verdict.SEEN))
# since when, by the field of the version that is served
_AGES = {
    "time": (
        "rayrec_serve_staleness_seconds",
        "seconds since training had the weights that are served",
    ),
    "event_time": (
        "rayrec_serve_event_staleness_seconds",
        "seconds since the newest event of a stream that the weights have learned from",
    ),
    "ingest_time": (
        "rayrec_serve_ingest_staleness_seconds",
        "seconds since the newest rows that the weights have learned from left their stream",
    ),
}
_SECONDS = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.016, 0.025),
    *(0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics(Collector):
    """Metrics of one replica.

    Args:
        version: name of the weights that it serves; None where it follows a chain, whose versions
            would be too many series.
    """

    def __init__(self, version: str | None) -> None:
        own = self._registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=own), partial(Histogram, registry=own)
        self._gauge = partial(Gauge, registry=own)
        self._is_joined = METRICS_FOLDER in os.environ
        names = ["protocol"]
        requests = counter(
            "rayrec_serve_requests", "requests that were answered", [*names, "outcome"]
        )
        # every series is there from the start, so that a rate over it is never undefined
        self._requests = {
            (protocol, outcome): requests.labels(protocol, outcome)
            for protocol in PROTOCOLS
            for outcome in OUTCOMES
        }
        latency = histogram(
            "rayrec_serve_latency_seconds",
            "seconds from a whole request to its answer, of requests that were scored",
            names,
            buckets=_SECONDS,
        )
        self._latency = {protocol: latency.labels(protocol) for protocol in PROTOCOLS}
        self._batch_requests = histogram(
            "rayrec_serve_batch_requests", "requests that were scored in one call", buckets=_COUNTS
        )
        self._batch_rows = histogram(
            "rayrec_serve_batch_rows", "rows scored in one call", buckets=_COUNTS
        )
        self._unknown = counter(
            "rayrec_serve_unknown_ids", "features of rows that had no id: a null, or an empty list"
        )
        self._missed = counter(
            "rayrec_serve_missed_ids",
            "ids of a dynamic table that have no row, and were scored as zeros",
            ["table"],
        )
        self._ids = self._gauge(
            "rayrec_serve_ids",
            "ids of a dynamic table that have a row",
            ["table"],
            multiprocess_mode="livemax",
        )
        self.queue_rows = self._gauge(
            "rayrec_serve_queue_rows",
            "rows that wait or are being scored",
            multiprocess_mode="livesum",
        )
        self._gauge(
            "rayrec_serve_replicas",
            "replicas that serve these weights",
            ["version"],
            multiprocess_mode="livesum",
        ).labels(version or FOLLOWED).set(1)
        self._version: Version | None = None
        if version is None:
            self._add_chain()
        counter("rayrec_serve_starts", "replicas that were started").inc()

    def _add_chain(self) -> None:
        """Make the metrics of a server that follows a chain."""
        self._step = self._gauge(
            "rayrec_serve_step",
            "training step of the weights, the least of all replicas",
            multiprocess_mode="livemin",
        )
        chain = self._gauge(
            "rayrec_serve_chain",
            "1 at what the newest publication is: current where it is served",
            ["state"],
            multiprocess_mode="livemax",
        )
        self._chain = {state: chain.labels(state) for state in STATES}

    def at_version(self, version: Version) -> None:
        """Record step and times of the weights that are served."""
        self._version = version
        self._step.set(version.step)

    def chain_is(self, state: str) -> None:
        """Record the verdict on the newest publication."""
        for name, gauge in self._chain.items():
            gauge.set(name == state)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics that are computed at each scrape: ages of what is served."""
        for field, (name, text) in _AGES.items():
            at: float | None = getattr(self._version, field, None)
            if at is not None:
                yield GaugeMetricFamily(name, text, value=max(0.0, time.time() - at))

    def answered(self, protocol: str, outcome: str, seconds: float) -> None:
        """Count an answer."""
        self._requests[protocol, outcome].inc()
        if outcome == OUTCOMES[0]:
            self._latency[protocol].observe(seconds)

    def scored(self, requests: int, rows: int, unknown: int) -> None:
        """Count a call of the predictor; from its thread."""
        self._batch_requests.observe(requests)
        self._batch_rows.observe(rows)
        self._unknown.inc(unknown)

    def missed(self, table: str, ids: int) -> None:
        """Count ids that have no row."""
        self._missed.labels(table).inc(ids)

    def has_ids(self, ids: Mapping[str, int]) -> None:
        """Record how many ids of dynamic tables have a row."""
        for table, number in ids.items():
            self._ids.labels(table).set(number)

    def text(self) -> bytes:
        """Return all metrics in the format of Prometheus."""
        counted = _ReplicaFiles() if self._is_joined else self._registry
        return generate_latest(counted) + generate_latest(self)


class _ReplicaFiles(Collector):
    """Sums over the files of all replicas."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all files that hold any."""
        files = []
        for file in Path(os.environ[METRICS_FOLDER]).glob("*.db"):
            with suppress(FileNotFoundError):  # of a replica that is gone
                # empty for an instant while a replica starts; of one that is killed then, for ever
                if file.stat().st_size:
                    files.append(str(file))
        yield from MultiProcessCollector.merge(files)
