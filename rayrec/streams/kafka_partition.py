"""`PartitionReader`: messages of one partition of a topic, received ahead of their turn."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rayrec.streams.config import KAFKA_READER
from rayrec.streams.objects import KafkaMessage

REPLY_S = 3.0  # for a broker's answer
POLL_S = 0.1


class MessagesGone(Exception):
    """The messages behind an offset are gone."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class PartitionReader:
    """Reads one partition by offsets, with a client of its own, which receives in the background.

    Args:
        kafka: module of the client.
        common: properties that all clients of the topic have.
    """

    def __init__(self, kafka: Any, common: Mapping[str, Any]) -> None:
        self._kafka = kafka
        self._client = kafka.Consumer({**common, **KAFKA_READER})
        self.queue: deque[KafkaMessage] = deque()
        self._place: tuple[str, int, int] | None = None  # topic, partition, offset of the cursor
        self.past = 0  # the offset up to which messages were received

    def go_to(self, topic: str, partition: int, offset: int) -> None:
        """Read a partition from an offset on, unless that is under way."""
        place = self._place
        if place is None or place[:2] != (topic, partition) or offset < place[2]:
            self._client.assign([self._kafka.TopicPartition(topic, partition, offset)])
            self.queue.clear()
            self.past = offset
        while self.queue and self.queue[0].offset < offset:
            self.queue.popleft()
        self._place = topic, partition, offset

    def fetch(self, end: int, count: int) -> str:
        """Receive messages up to an offset until so many are held, or no more come in time.

        Returns:
            why no more came in time, else "".
        Raises:
            MessagesGone: the next ones are gone.
        """
        since, why = time.monotonic(), ""
        while (missing := min(count - len(self.queue), end - self.past)) > 0:
            for message in self._client.consume(missing, timeout=POLL_S):
                error, codes = message.error(), self._kafka.KafkaError
                if error is None:
                    self.queue.append(KafkaMessage(message.offset(), message.value()))
                    self.past, since, why = message.offset() + 1, time.monotonic(), ""
                elif error.code() == codes._PARTITION_EOF:
                    self.past = max(self.past, message.offset())
                elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
                    raise MessagesGone(self.past)
                else:
                    # it may be of a time before, when another partition had its turn
                    why = error.str()
            if time.monotonic() - since > REPLY_S:
                return why or f"no message behind offset {self.past} has come"
        return ""

    def close(self) -> None:
        """Leave the brokers."""
        self._client.close()
