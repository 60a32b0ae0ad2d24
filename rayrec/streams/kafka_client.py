"""Clients of Kafka: their properties, and `PartitionReader`, which receives ahead of its turn.

Properties come from a run file and from a file beside it, by librdkafka's names, such as
`security.protocol`. What is secret stands in the file, which rank 0 reads on its host, since run
files are copied into the folders of runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError
from rayrec.streams.config import KAFKA_READER, KafkaConfig, check_kafka_property
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


def client_properties(config: KafkaConfig) -> dict[str, Any]:
    """Return the properties that all clients of a topic have.

    Raises:
        ConfigError: the file of properties cannot be read, or has a property that is the source's.
    """
    read = {} if config.properties_file is None else _read(config.properties_file)
    twice = sorted(read.keys() & config.properties.keys())
    if twice:
        raise ConfigError(
            f"KafkaConfig has {twice[0]} in properties and in {config.properties_file}; leave one "
            "of them out."
        )
    return {**config.properties, **read, "bootstrap.servers": config.servers, "log_level": 0}


def _read(path: str) -> dict[str, str]:
    """Read lines of name=value; empty ones, and those that begin with #, say nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"KafkaConfig has properties_file={path!r}, which cannot be read: {why}. Put it on "
            "every host that a rank may run on."
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        name, sign, value = (part.strip() for part in line.partition("="))
        if name.startswith("#") or not (name or sign):
            continue
        where = f"line {number} of properties_file {path}"
        # no message has the line itself, which may be a secret
        if not name or not sign:
            raise ConfigError(f"{where} is no name=value.")
        if name in found:
            raise ConfigError(f"{where} says {name} once more; leave one of them out.")
        check_kafka_property(where, name)
        found[name] = value
    return found
