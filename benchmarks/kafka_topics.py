"""Topics of Kafka with the rows of Parquet files, on librdkafka's mock broker in its own process.

    python -m benchmarks.kafka_topics FOLDER

It makes the topics `json` and `arrow` of the rows of a folder, prints their servers, and lives
until its input ends. The mock keeps 5 MB of each of a topic's four partitions, compressed as
producers are told to, so a topic of more is left out.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.streams import KafkaConfig

PARTITIONS, ARROW_ROWS = 4, 500  # of the mock's topics; rows of a message of Arrow


@contextmanager
def topics(folder: Path) -> Iterator[dict[str, KafkaConfig]]:
    """Start the broker, and give what chooses each topic that holds all rows; none without it."""
    if importlib.util.find_spec("confluent_kafka") is None:
        yield {}
        return
    words = [sys.executable, "-m", "benchmarks.kafka_topics", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as broker:  # type: ignore[call-overload]
        try:
            told = json.loads(broker.stdout.readline())
            yield {
                f"kafka, {form}": KafkaConfig(servers=told["servers"], topic=form, format=form)
                for form in told["topics"]
            }
        finally:
            broker.kill()


def messages(rows: pa.Table, form: str) -> Iterator[bytes]:
    """Give the rows as messages."""
    if form == "json":
        yield from (json.dumps(row).encode() for row in rows.to_pylist())
        return
    for batch in rows.combine_chunks().to_batches(ARROW_ROWS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield bytes(sink.getvalue().to_pybytes())


def main() -> None:
    """Fill the topics, tell them, and wait for the end of the input."""
    import confluent_kafka as kafka

    mock = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    brokers = mock.list_topics(timeout=10).brokers.values()
    servers = ",".join(f"{one.host}:{one.port}" for one in brokers)
    # one queue, so that what `flush` has waited for is with the broker
    options = {"bootstrap.servers": servers, "queue.buffering.max.messages": 2_000_000}
    options |= {"compression.type": "lz4", "linger.ms": 50}
    producer = kafka.Producer(options | {"queue.buffering.max.kbytes": 1_000_000})
    rows, whole = pq.read_table(sys.argv[1]), list[str]()
    for form in ("arrow", "json"):
        for number, message in enumerate(messages(rows, form)):
            producer.produce(form, message, partition=number % PARTITIONS)
        assert producer.flush(120) == 0
        reader = kafka.Consumer({"bootstrap.servers": servers, "group.id": "none"})
        places = [kafka.TopicPartition(form, one) for one in range(PARTITIONS)]
        first = [reader.get_watermark_offsets(place)[0] for place in places]
        reader.close()
        if any(first):
            print(f"topic {form!r} is left out: the mock broker keeps less", file=sys.stderr)
        else:
            whole.append(form)
    print(json.dumps({"servers": servers, "topics": whole}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
