"""A cluster of Kafka for tests: librdkafka's mock, here or in a process that can be stopped."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from rayrec.streams.source import Cursor, StreamRows, StreamSource

kafka = pytest.importorskip("confluent_kafka")
PARTITIONS = 4  # of every topic of the mock


@contextlib.contextmanager
def cluster() -> Iterator[tuple[Any, str]]:
    """Make a cluster of one broker; give a producer and the cluster's servers."""
    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0})
    yield producer, servers_of(producer)
    producer.flush(0)


def servers_of(client: Any) -> str:
    brokers = client.list_topics(timeout=10).brokers.values()
    return ",".join(f"{one.host}:{one.port}" for one in brokers)


@contextlib.contextmanager
def cluster_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a process that holds a cluster; give it and the cluster's servers."""
    code = "\n".join(
        (
            "import sys, confluent_kafka as kafka",
            "client = kafka.Producer({'test.mock.num.brokers': 1, 'log_level': 0})",
            "brokers = client.list_topics(timeout=10).brokers.values()",
            "print(','.join(f'{one.host}:{one.port}' for one in brokers), flush=True)",
            "sys.stdin.read()",
        )
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def awaited(source: StreamSource, cursor: Cursor, most: int = 1) -> StreamRows:
    """Return the next rows, which a broker on a busy machine may give after a while."""
    deadline = time.monotonic() + 60.0
    while (found := source.read(cursor, most)) is None:
        assert time.monotonic() < deadline
    return found


def send(producer: Any, topic: str, values: Sequence[tuple[int, bytes]]) -> None:
    """Put values into partitions, and wait until the cluster has them."""
    for partition, value in values:
        producer.produce(topic, value, partition=partition)
    assert producer.flush(10) == 0


def ipc(rows: pa.Table) -> bytes:
    """Return rows as a stream of Arrow IPC."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return bytes(sink.getvalue().to_pybytes())
