"""`KafkaSource`: messages of a topic of Kafka, read by offsets that the run's folder holds.

Partitions are assigned, not subscribed to, and no offset is committed: the cursor is the truth.
Partitions take turns in the order of their numbers; one that has no message is passed over.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Any

import pyarrow as pa

from rayrec.errors import ConfigError, InputError
from rayrec.storage import one_line
from rayrec.streams.source import Cursor, Refusal, SourceLag, SourceRows

FETCH = 1_000  # messages at a time
REPLY_S = 10.0  # for a broker's answer
POLL_S = 0.2
LOOK_S = 30.0  # between two looks for partitions that were added


class KafkaSource:
    """Topic of Kafka.

    A cursor has the next offset of each partition, the rows of its first message that are done, and
    the partition that was read last.

    Args:
        servers: brokers to begin with, as host:port and commas.
        form: "arrow" for streams of Arrow IPC, "json" for one object a message.
    Raises:
        ConfigError: confluent-kafka is not installed.
    """

    def __init__(self, servers: str, topic: str, form: str) -> None:
        try:
            import confluent_kafka
        except ImportError as error:
            raise ConfigError(
                "[data.stream.kafka] needs confluent-kafka: install 'rayrec[kafka]'."
            ) from error
        self._kafka: Any = confluent_kafka
        self._servers, self._topic, self._form = servers, topic, form
        self._client = confluent_kafka.Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "rayrec",  # the client wants one; nothing is committed to it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "log_level": 0,
            }
        )
        self._queues: dict[int, deque[Any]] = {}
        self._looked: float | None = None
        self._at: dict[int, int] = {}  # offsets of the cursor that was read last

    @property
    def name(self) -> str:
        """What messages call the source."""
        return f"topic {self._topic} of {self._servers}"

    def start(self) -> Cursor:
        """Return the cursor before the oldest message of each partition."""
        return {
            "offsets": {str(one): self._bounds(one)[0] for one in self._partitions()},
            "last": -1,
            "done": 0,
        }

    def read(self, cursor: Cursor, most: int) -> SourceRows | None:
        """Return rows of one partition; see `StreamSource.read`."""
        cursor = self._assigned(cursor)
        if not any(self._queues.values()):
            self._fetch(cursor)
        inside = cursor["last"] if cursor["done"] else None
        order = sorted(self._queues, key=lambda one: (one <= cursor["last"], one))
        for partition in order if inside is None else [inside]:
            if self._queues[partition]:
                return self._rows(cursor, partition, most)
        return None

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return the messages behind the cursor, and the age of the first that was fetched."""
        try:
            ends = {one: self._bounds(int(one))[1] for one in cursor["offsets"]}
        except InputError:
            return SourceLag(None, None)
        waiting = sum(max(0, ends[one] - offset) for one, offset in cursor["offsets"].items())
        return SourceLag(waiting if self._form == "json" else None, None if waiting else 0.0)

    def _bounds(self, partition: int) -> tuple[int, int]:
        place = self._kafka.TopicPartition(self._topic, partition)
        try:
            low, high = self._client.get_watermark_offsets(place, timeout=REPLY_S)
        except self._kafka.KafkaException as error:
            raise InputError(f"stream {self.name} does not answer: {one_line(error)}.") from error
        return low, high

    def _partitions(self) -> list[int]:
        try:
            topics = self._client.list_topics(self._topic, timeout=REPLY_S).topics
        except self._kafka.KafkaException as error:
            raise InputError(f"stream {self.name} does not answer: {one_line(error)}.") from error
        if not topics[self._topic].partitions:
            raise InputError(f"stream {self.name} has no partition; make the topic.")
        return sorted(topics[self._topic].partitions)

    def _assigned(self, cursor: Cursor) -> Cursor:
        """Return the cursor with partitions that were added, and read behind it from now on."""
        offsets = {int(one): int(offset) for one, offset in cursor["offsets"].items()}
        now = time.monotonic()
        if self._looked is None or now - self._looked > LOOK_S:
            self._looked = now
            try:
                added = set(self._partitions()) - set(offsets)
                offsets |= {one: self._bounds(one)[0] for one in sorted(added)}
            except InputError:
                pass  # the broker is away, and those that are known are waited for
        went_back = any(offset < self._at.get(one, 0) for one, offset in offsets.items())
        if went_back or set(offsets) != set(self._queues):
            places = [self._kafka.TopicPartition(self._topic, *one) for one in offsets.items()]
            self._client.assign(places)
            self._queues = {one: deque() for one in sorted(offsets)}
        for one, queue in self._queues.items():
            while queue and queue[0].offset() < offsets[one]:
                queue.popleft()
        self._at = offsets
        return {**cursor, "offsets": {str(one): offset for one, offset in offsets.items()}}

    def _fetch(self, cursor: Cursor) -> None:
        for message in self._client.consume(FETCH, timeout=POLL_S):
            error = message.error()
            if error is None:
                self._queues[message.partition()].append(message)
            elif error.code() in (
                self._kafka.KafkaError._AUTO_OFFSET_RESET,
                self._kafka.KafkaError.OFFSET_OUT_OF_RANGE,
            ):
                one = message.partition()
                offset, (low, high) = cursor["offsets"][str(one)], self._bounds(one)
                raise InputError(
                    f"topic {self._topic}, partition {one} has offsets {low} to {high}, and the run "
                    f"goes on from {offset}: what lay there is gone. Keep messages for longer than "
                    "a run stands still, and begin a new run."
                )

    def _rows(self, cursor: Cursor, partition: int, most: int) -> SourceRows:
        """Return rows of messages of one partition that have one schema."""
        parts: list[pa.Table] = []
        refused: list[Refusal] = []
        left, done = most, int(cursor["done"])
        first = offset = int(cursor["offsets"][str(partition)])
        for message in self._queues[partition]:
            if not left:
                break
            at = message.offset()
            try:
                table = self._table(message.value())
            except (ValueError, TypeError, OSError, pa.ArrowException) as error:
                place = f"{self._topic}[{partition}] offset {at}"
                refused.append(Refusal(place, f"no {self._form} message: {one_line(error)}"))
                offset, done = at + 1, 0
                continue
            if parts and table.schema != parts[0].schema:
                break
            part = table.slice(done, left)
            parts.append(part)
            left -= len(part)
            done += len(part)
            offset = at
            if done == len(table):
                offset, done = at + 1, 0
        offsets = {**cursor["offsets"], str(partition): offset}
        past = {"offsets": offsets, "last": partition, "done": done}
        place = f"{self._topic}[{partition}] from offset {first}"
        return SourceRows(pa.concat_tables(parts) if parts else None, past, place, tuple(refused))

    def _table(self, value: bytes | None) -> pa.Table:
        if not value:
            raise ValueError("its value is empty")
        if self._form == "arrow":
            return pa.ipc.open_stream(value).read_all()
        row = json.loads(value)
        if not isinstance(row, dict):
            raise ValueError("it is no object")
        return pa.Table.from_pylist([row])
