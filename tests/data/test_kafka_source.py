"""Topics of Kafka, over the mock cluster that librdkafka has inside: every row comes once."""

from __future__ import annotations

import json

import pytest

from rayrec.streams import StreamConfig
from rayrec.streams.config import KafkaConfig

kafka = pytest.importorskip("confluent_kafka")


@pytest.mark.parametrize("form", ["arrow", "json"])
def test_every_row_comes_once_over_restarts(form: str) -> None:
    import pyarrow as pa

    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = producer.list_topics(timeout=10).brokers.values()
    servers = ",".join(f"{one.host}:{one.port}" for one in brokers)
    sent = 0
    for size in (1, 3, 2, 4, 1):
        rows = [{"x": sent + k} for k in range(size)]
        sent += size
        if form == "json":
            for row in rows:
                producer.produce("clicks", json.dumps(row), partition=sent % 2)
        else:
            sink = pa.BufferOutputStream()
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            producer.produce("clicks", sink.getvalue().to_pybytes(), partition=sent % 2)
    producer.produce("clicks", b"none", partition=0)
    producer.produce("clicks", b"", partition=1)
    assert producer.flush(10) == 0
    config = StreamConfig(kafka=KafkaConfig(servers=servers, topic="clicks", format=form))
    source = config.open()
    cursor, got, refused = source.start(), [], 0
    for attempt in range(60):
        if attempt % 7 == 6:
            source = config.open()
        found = source.read(cursor, 2)
        if found is not None:
            again = source.read(cursor, 1)
            assert again is not None
            if found.rows is not None:
                assert again.rows is not None and again.rows["x"][0] == found.rows["x"][0]
                got += found.rows["x"].to_pylist()
            refused += len(found.refused)
            cursor = json.loads(json.dumps(found.cursor))
    assert sorted(got) == list(range(sent))
    assert refused == 2
