"""`KafkaSource`: messages of a topic of Kafka, read by offsets that the run's folder holds.

A partition is assigned, not subscribed to, and no offset is committed: the cursor is the truth.
Rows are read in rounds. A round takes what each partition holds when the round begins, at most
`ROUND` messages, partition after partition by their numbers. The cursor has where the round ends,
so that it goes on alike in another process. A round costs one question to a broker per partition.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Collection

from rayrec.errors import InputError
from rayrec.storage import one_line
from rayrec.streams.messages import Decoded, decode
from rayrec.streams.objects import KafkaMessage, ObjectReader
from rayrec.streams.source import Cursor, SourceLag, StreamRows, StreamSource, library

ROUND = 10_000  # messages of a partition at most
READ = {"json": 2_000, "arrow": 32}  # messages at a time; one of Arrow has many rows
REPLY_S = 3.0  # for a broker's answer
POLL_S = 0.1
FETCH_MS = 50  # for an answer while a partition has no more
Bounds = dict[int, tuple[int, int]]  # first offset of each partition, and one past its last


class KafkaSource(StreamSource):
    """Topic of Kafka.

    A cursor has the next offset of each partition, the offsets at which the round ends, and the
    rows that are done of the first message of the partition whose turn it is.

    Args:
        servers: brokers to begin with, as host:port and commas.
        form: "arrow" for streams of Arrow IPC, "json" for one object a message.
        whole: columns of whole numbers.
    Raises:
        ConfigError: confluent-kafka is not installed.
    """

    def __init__(self, servers: str, topic: str, form: str, whole: Collection[str] = ()) -> None:
        kafka = library("confluent_kafka", "kafka")
        admin = library("confluent_kafka.admin", "kafka")
        self._kafka, self._servers, self._topic, self._form = kafka, servers, topic, form
        self._objects = ObjectReader(whole) if form == "json" else None
        common = {"bootstrap.servers": servers, "log_level": 0}
        # its questions do not wait behind a fetch, as those of the consumer do
        self._admin, self._spec = admin.AdminClient(common), admin.OffsetSpec
        self._client = kafka.Consumer(
            {
                **common,
                "group.id": "rayrec",  # the client wants one; nothing is committed to it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": FETCH_MS,  # the next partition waits for it
                "queued.max.messages.kbytes": 4096,  # is read again where a turn ends
            }
        )
        self._queue: deque[KafkaMessage] = deque()  # of the partition that is assigned
        self._place: tuple[int, int] | None = None  # that partition, and its offset of the cursor
        self._past = 0  # the offset up to which the partition was received
        self._first: dict[int, int] = {}  # offsets of partitions when they were first seen
        self._begun: tuple[Cursor, Cursor] | None = None  # a cursor, and the round begun at it
        self._is_away = False

    @property
    def name(self) -> str:
        """What messages call the source."""
        return f"topic {self._topic} of {self._servers}"

    def start(self) -> Cursor:
        """Return the cursor of a run that begins: partitions begin where they are first seen."""
        return {"offsets": {}, "ends": {}, "done": 0}

    def read(self, cursor: Cursor, most: int) -> StreamRows | None:
        """Return rows of one partition; see `StreamSource.read`."""
        begun = self._in_round(cursor)
        partition = None if begun is None else _turn(begun)
        if begun is None or partition is None:
            return None
        key = str(partition)
        first, end = begun["offsets"][key], begun["ends"][key]
        # of any number of rows, so that a reading of fewer refuses the same
        count, place = READ[self._form], f"{self._topic}[{partition}]"
        self._assign(partition, first)
        self._fetch(end, count)
        held = [one for one in self._queue if one.offset < end]
        if not held and self._past < end:
            return None
        found = Decoded(None, end, 0, ())
        if held:
            found = decode(self._objects, held[:count], begun["done"], most, place)
            if found.offset > held[-1].offset and self._past >= end:
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
        self._client.close()

    def _in_round(self, cursor: Cursor) -> Cursor | None:
        """Return the cursor in a round that has rows; None where none has, or no broker answers.

        Raises:
            InputError: rows behind the cursor are gone.
        """
        inside = _turn(cursor) is not None
        if inside and self._place is not None:
            return cursor
        if self._begun is not None and self._begun[0] == cursor:
            return self._begun[1]
        bounds = self._bounds()
        if bounds is None:
            return None
        offsets = {int(one): int(offset) for one, offset in cursor["offsets"].items()}
        for one, offset in offsets.items():
            low, high = bounds.get(one, (0, 0))
            if not low <= offset <= high:
                raise self._gone(one, offset, low, high)
        if inside:
            return cursor
        for one, (low, _) in bounds.items():
            offsets.setdefault(one, self._first.setdefault(one, low))
        begun = {
            "offsets": {str(one): offset for one, offset in sorted(offsets.items())},
            "ends": {str(one): min(bounds[one][1], offsets[one] + ROUND) for one in offsets},
            "done": 0,
        }
        if _turn(begun) is None:
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
        try:
            found = self._client.list_topics(self._topic, timeout=REPLY_S).topics[self._topic]
            if found.error is not None:
                if found.error.code() == self._kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise InputError(f"there is no {self.name}; make it, or give another.")
                raise self._kafka.KafkaException(found.error)
            places = [self._kafka.TopicPartition(self._topic, one) for one in found.partitions]
            low, high = (
                self._admin.list_offsets(dict.fromkeys(places, end), request_timeout=REPLY_S)
                for end in (self._spec.earliest(), self._spec.latest())
            )
            bounds = {
                place.partition: (low[place].result().offset, high[place].result().offset)
                for place in sorted(places, key=lambda place: int(place.partition))
            }
        except self._kafka.KafkaException as error:
            self._wait(one_line(error))
            return None
        self._is_away = False
        return bounds

    def _wait(self, why: str) -> None:
        """Tell once that the run waits for the brokers."""
        if not self._is_away:
            warnings.warn(f"{self.name} does not answer, and is waited for: {why}", stacklevel=2)
        self._is_away = True

    def _assign(self, partition: int, offset: int) -> None:
        """Read a partition from an offset on, unless that is under way."""
        if self._place is None or self._place[0] != partition or offset < self._place[1]:
            place = self._kafka.TopicPartition(self._topic, partition, offset)
            self._client.assign([place])
            self._queue.clear()
            self._past = offset
        while self._queue and self._queue[0].offset < offset:
            self._queue.popleft()
        self._place = partition, offset

    def _fetch(self, end: int, count: int) -> None:
        """Receive messages up to an offset until so many are held, or no more come in time.

        Raises:
            InputError: they are gone.
        """
        since = time.monotonic()
        while (missing := min(count - len(self._queue), end - self._past)) > 0:
            for message in self._client.consume(missing, timeout=POLL_S):
                error, codes = message.error(), self._kafka.KafkaError
                if error is None:
                    self._queue.append(KafkaMessage(message.offset(), message.value()))
                    self._past, since = message.offset() + 1, time.monotonic()
                elif error.code() == codes._PARTITION_EOF:
                    self._past = max(self._past, message.offset())
                elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                    assert self._place is not None
                    one = self._place[0]
                    raise self._gone(one, self._past, *(self._bounds() or {}).get(one, (-1, -1)))
                else:
                    self._wait(error.str())
            if time.monotonic() - since > REPLY_S:
                self._wait(f"no message behind offset {self._past} has come")
                break


def _turn(cursor: Cursor) -> int | None:
    """Return the partition whose turn it is, or None where the round is over."""
    offsets = cursor["offsets"]
    return min(
        (int(one) for one, end in cursor["ends"].items() if offsets[one] < end), default=None
    )
