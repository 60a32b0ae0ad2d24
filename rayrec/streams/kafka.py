"""`KafkaSource`: messages of a topic of Kafka, read by offsets that the run's folder holds.

A partition is assigned, not subscribed to, and no offset is committed: the cursor is the truth.
Rows are read in rounds. A round takes what each partition holds when the round begins, at most
`ROUND` messages, partition after partition by their numbers. The cursor has where the round ends,
so that it goes on alike in another process. A round costs one question to a broker per partition.
The partitions whose turn is next are received meanwhile, by a client each.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection
from typing import Any

from rayrec.errors import ConfigError, InputError
from rayrec.storage import one_line
from rayrec.streams.config import KafkaConfig
from rayrec.streams.kafka_client import REPLY_S, MessagesGone, PartitionReader, client_properties
from rayrec.streams.messages import Decoded, decode
from rayrec.streams.objects import ObjectReader
from rayrec.streams.source import Cursor, SourceLag, StreamRows, StreamSource, library

ROUND = 10_000  # messages of a partition at most
READ = {"json": 2_000, "arrow": 32}  # messages at a time; one of Arrow has many rows
MOST_READERS = 8  # partitions that are received at a time
MISSING_S = 60.0  # a broker that has just come may not yet know a topic for so long
Bounds = dict[int, tuple[int, int]]  # first offset of each partition, and one past its last


class KafkaSource(StreamSource):
    """Topic of Kafka.

    A cursor has the next offset of each partition, the offsets at which the round ends, and the
    rows that are done of the first message of the partition whose turn it is.

    Args:
        whole: columns of whole numbers.
    Raises:
        ConfigError: confluent-kafka is not installed, or refuses a property.
    """

    def __init__(self, config: KafkaConfig, whole: Collection[str] = ()) -> None:
        kafka = library("confluent_kafka", "kafka")
        admin = library("confluent_kafka.admin", "kafka")
        self._kafka, self.name = kafka, f"topic {config.topic} of {config.servers}"
        self._topic, self._form = config.topic, config.format
        self._from_latest = config.starting_offsets == "latest"
        self._objects = ObjectReader(whole) if self._form == "json" else None
        self._common, self._spec = client_properties(config), admin.OffsetSpec
        sees_all = self._common.get("isolation.level") == "read_uncommitted"
        levels = kafka.IsolationLevel
        self._level = levels.READ_UNCOMMITTED if sees_all else levels.READ_COMMITTED
        self._heard: list[Any] = []  # errors that the client has told since it was asked last
        try:
            self._admin = admin.AdminClient(self._common)
            # another client's question would make the topic
            asking = {**self._common, "group.id": "rayrec", "error_cb": self._heard.append}
            self._client = kafka.Consumer(asking)
        # the last three of names that are no text's, such as callbacks
        except (kafka.KafkaException, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the client of {self.name} refuses its properties: {one_line(error)}."
            ) from error
        self._readers = dict[int, PartitionReader]()  # by partition, the one read last at the end
        self._first: dict[int, int] = {}  # offsets of partitions when they were first seen
        self._begun: tuple[Cursor, Cursor] | None = None  # a cursor, and the round begun at it
        self._is_away = False
        self._was_there, self._missing_since = False, 0.0

    def start(self) -> Cursor:
        """Return the cursor of a run that begins: partitions begin where they are first seen."""
        return {"offsets": {}, "ends": {}, "done": 0}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows of one partition; see `StreamSource.read`."""
        begun = self._in_round(cursor)
        if begun is None:
            return None
        partition = _turns(begun)[0]
        key = str(partition)
        first, end = begun["offsets"][key], begun["ends"][key]
        # of any number of rows, so that a reading of fewer refuses the same
        count, place = READ[self._form], f"{self._topic}[{partition}]"
        reader = self._reader(begun)
        try:
            why = reader.fetch(end, count)
        except MessagesGone as gone:
            bounds = (self._bounds() or {}).get(partition, (-1, -1))
            raise self._gone(partition, gone.offset, *bounds) from None
        if why:
            self._wait(why)
        held = [one for one in reader.queue if one.offset < end]
        if not held and reader.past < end:
            return None
        found = Decoded(None, end, 0, ())
        if held:
            found = decode(self._objects, held[:count], begun["done"], most, place)
            if found.offset > held[-1].offset and reader.past >= end:
                # the last offsets of a partition may be no messages
                found = found._replace(offset=end)
        offsets = {**begun["offsets"], key: found.offset}
        past = {**begun, "offsets": offsets, "done": found.done}
        return StreamRows(found.rows, past, f"{place} from offset {first}", found.refused)

    def lag(self, cursor: Cursor) -> SourceLag:
        """Return the messages behind the cursor, which are rows in JSON; no ages are told."""
        bounds = self._bounds()
        if bounds is None:
            return SourceLag(None, None)
        waiting = sum(
            high - max(low, int(cursor["offsets"].get(str(one), low)))
            for one, (low, high) in bounds.items()
        )
        return SourceLag(waiting if self._form == "json" else None, None if waiting else 0.0)

    def close(self) -> None:
        """Leave the brokers."""
        for one in (self._client, *self._readers.values()):
            one.close()

    def _reader(self, cursor: Cursor) -> PartitionReader:
        """Return the reader of the partition whose turn it is; the next ones receive, too."""
        turns = _turns(cursor)[:MOST_READERS]
        for one in turns:
            reader = self._readers.pop(one, None)
            if reader is None and len(self._readers) >= MOST_READERS:
                reader = self._readers.pop(next(k for k in self._readers if k not in turns))
            if reader is None:
                reader = PartitionReader(self._kafka, self._common)
            reader.go_to(self._topic, one, cursor["offsets"][str(one)])
            self._readers[one] = reader
        return self._readers[turns[0]]

    def _in_round(self, cursor: Cursor) -> Cursor | None:
        """Return the cursor in a round that has rows; None where none has, or no broker answers.

        Raises:
            InputError: rows behind the cursor are gone.
        """
        inside = bool(_turns(cursor))
        if inside and self._readers:
            return cursor
        if self._begun is not None and self._begun[0] == cursor:
            return self._begun[1]
        self._was_there |= bool(cursor["offsets"])
        bounds = self._bounds()
        if bounds is None:
            return None
        offsets = {int(one): int(offset) for one, offset in cursor["offsets"].items()}
        for one, offset in offsets.items():
            low, high = bounds.get(one, (-1, -1))  # where it was made anew with fewer partitions
            if not low <= offset <= high:
                raise self._gone(one, offset, low, high)
        if inside:
            return cursor
        # partitions that come later may have messages that no look has seen
        from_latest = self._from_latest and not offsets and not self._first
        for one, (low, high) in bounds.items():
            first = self._first.setdefault(one, high if from_latest else low)
            # retention may have gone on since a partition was seen
            offsets.setdefault(one, max(first, low))
        begun = {
            "offsets": {str(one): offset for one, offset in sorted(offsets.items())},
            "ends": {str(one): min(bounds[one][1], offsets[one] + ROUND) for one in offsets},
            "done": 0,
        }
        if not _turns(begun):
            return None
        self._begun = cursor, begun
        return begun

    def _gone(self, partition: int, offset: int, low: int, high: int) -> InputError:
        return InputError(
            f"partition {partition} of {self.name} has offsets {low} to {high}, and the run goes "
            f"on from {offset}: its messages are gone. Let the topic keep messages for longer than "
            "a run stands still, and begin a new run."
        )

    def _bounds(self) -> Bounds | None:
        """Return the offsets of all partitions, or None while no broker answers.

        Raises:
            InputError: there is no such topic.
        """
        bounds, why = None, ""
        try:
            bounds = self._ask()
        except self._kafka.KafkaException as error:
            why = one_line(error)
        # fills the list; the client keeps what is not asked for, also of one broker among others
        self._client.poll(0)
        if bounds is None:
            down = self._kafka.KafkaError._ALL_BROKERS_DOWN  # which says nothing of the cause
            causes = [one.str() for one in self._heard if one.code() != down]
            self._wait(causes[0] if causes else why)
        self._is_away = bounds is None
        self._heard.clear()
        return bounds

    def _ask(self) -> Bounds:
        found = self._client.list_topics(self._topic, timeout=REPLY_S).topics[self._topic]
        if found.error is not None:
            codes = self._kafka.KafkaError  # a name that no topic can have is an exception of it
            unknown = found.error.code() == codes.UNKNOWN_TOPIC_OR_PART
            if found.error.code() == codes.TOPIC_EXCEPTION or (unknown and not self._may_come()):
                raise InputError(f"there is no {self.name}; make it, or give another.")
            raise self._kafka.KafkaException(found.error)
        self._was_there, self._missing_since = True, 0.0
        places = [self._kafka.TopicPartition(self._topic, one) for one in found.partitions]
        # a round ends before a transaction that is open, and waits for none
        asking = {"isolation_level": self._level, "request_timeout": REPLY_S}
        low, high = (
            self._admin.list_offsets(dict.fromkeys(places, end), **asking)
            for end in (self._spec.earliest(), self._spec.latest())
        )
        return {
            place.partition: (low[place].result().offset, high[place].result().offset)
            for place in sorted(places, key=lambda place: int(place.partition))
        }

    def _may_come(self) -> bool:
        """Return True where a topic that was there is unknown for the first time, or not for long.

        A broker that has just started answers before it knows all topics.
        """
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        return self._was_there and now - self._missing_since < MISSING_S

    def _wait(self, why: str) -> None:
        """Tell once that the run waits for the brokers."""
        if not self._is_away:
            warnings.warn(f"{self.name} does not answer, and is waited for: {why}", stacklevel=2)
        self._is_away = True


def _turns(cursor: Cursor) -> list[int]:
    """Return the partitions that have messages left in the round, in its order."""
    offsets = cursor["offsets"]
    return sorted(int(one) for one, end in cursor["ends"].items() if offsets[one] < end)
