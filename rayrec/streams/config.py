"""`StreamConfig`: the section `data.stream` of a run file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayrec.checks import absolute_path, seconds, whole_number
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields

if TYPE_CHECKING:
    from rayrec.streams.source import StreamSource

SOURCES = ("folder", "delta", "iceberg", "kafka")  # keys, of which one is given
# in the names of properties that are no matter of a run file
SECRETS = {
    "account-key",
    "connection-string",
    "credential",
    "key.pem",
    "password",
    "secret",
    "token",
}
# properties by which a client of Kafka reads one partition by offsets
KAFKA_READER = {
    "group.id": "rayrec",  # the client wants one; nothing is committed to it
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 100,  # for an answer while it has no more; another one waits for it
    "queued.max.messages.kbytes": 4096,  # that are received of a partition before its turn
    "fetch.queue.backoff.ms": 10,  # until it asks for more, once it had as much
}
# which a source sets itself, as others
KAFKA_OWN = (*KAFKA_READER, "bootstrap.servers", "log_level", "metadata.broker.list")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaConfig:
    """Delta Lake table that a stream reads.

    Attributes:
        table: folder or URI of the table.
        first_version: a run that begins reads what this version and later ones add.
    Raises:
        ConfigError: a path is empty, or a number is out of range.
    """

    table: str
    first_version: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "table", absolute_path("table", self.table))
        whole_number("DeltaConfig has first_version", self.first_version, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class IcebergConfig:
    """Table of Apache Iceberg that a stream reads.

    Attributes:
        table: namespace and name of the table, with dots between them.
        catalog: name of the catalog in the configuration of pyiceberg; None takes its default.
        properties: properties of the catalog, such as type, uri and warehouse, beside those of the
            configuration.
        after_snapshot: a run that begins reads what is appended behind this snapshot; None reads
            the whole history of the branch main.
    Raises:
        ConfigError: the table has no namespace, a property is a secret, or a number is out of
            range.
    """

    table: str
    catalog: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    after_snapshot: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(self.table.split(".")) or "." not in self.table:
            raise ConfigError(f"IcebergConfig has table={self.table!r}; give 'namespace.name'.")
        by = "by pyiceberg's configuration, ~/.pyiceberg.yaml or the environment"
        _check_secrets("IcebergConfig", self.properties, by)
        if self.after_snapshot is not None:
            whole_number("IcebergConfig has after_snapshot", self.after_snapshot)


_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # of Kafka's Topic.validate


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaConfig:
    """Topic of Kafka that a stream reads.

    Attributes:
        servers: brokers to begin with, as host:port and commas.
        topic: name of the topic.
        format: "json" for one object a message, "arrow" for streams of Arrow IPC.
        starting_offsets: "earliest", or "latest" for a run that begins behind the messages that it
            finds; partitions that are added later are read from their earliest message.
        properties: properties of the client beside those that the source sets, by librdkafka's
            names, such as security.protocol.
        properties_file: file of further ones, such as passwords, with a line of name=value each;
            rank 0 reads it on its host. None reads none.
    Raises:
        ConfigError: the format or starting_offsets is another one, no broker is named, no topic
            can have the name, or a property is a secret or the source's own.
    """

    servers: str
    topic: str
    format: str = "json"
    starting_offsets: str = "earliest"
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)
    properties_file: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in (("servers", self.servers), ("topic", self.topic)):
            if not value.strip():
                raise ConfigError(f"KafkaConfig has {name}={value!r}; name one.")
        if not _TOPIC.fullmatch(self.topic) or self.topic in (".", ".."):
            raise ConfigError(
                f"KafkaConfig has topic={self.topic!r}; the name of a topic has at most 249 "
                "letters, digits, '.', '_' and '-'."
            )
        for name, either in (
            ("format", ("arrow", "json")),
            ("starting_offsets", ("earliest", "latest")),
        ):
            if getattr(self, name) not in either:
                raise ConfigError(
                    f"KafkaConfig has {name}={getattr(self, name)!r}; give {either[0]!r} or "
                    f"{either[1]!r}."
                )
        for name in self.properties:
            check_kafka_property(f"KafkaConfig has properties[{name!r}], which", name)
        _check_secrets("KafkaConfig", self.properties, "in properties_file")
        if self.properties_file is not None:
            path = absolute_path("properties_file", self.properties_file)
            object.__setattr__(self, "properties_file", path)


def _check_secrets(kind: str, properties: Mapping[str, str], place: str) -> None:
    """Check that no property is a secret, since run files are copied into the folders of runs."""
    for name, value in properties.items():
        user = value.partition("://")[2].partition("/")[0].rpartition("@")[0]
        if any(word in name for word in SECRETS) or ":" in user:
            raise ConfigError(
                f"{kind} has a secret in properties[{name!r}]; take it out, and give it {place}."
            )


def check_kafka_property(where: str, name: str) -> None:
    """Check that a property of the client is not one of the source's own.

    Raises:
        ConfigError: it is.
    """
    if name in KAFKA_OWN:
        raise ConfigError(f"{where} sets {name}, as the source does itself; leave it out.")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """Options of a stream: its source, where its windows end, and when the run ends.

    A window ends with `rows` rows, or `seconds` after the first of its rows was seen, or before the
    first row whose event time is past its `event_seconds`.

    Attributes:
        folder: folder or URI that Parquet files are put into, read in the order of their names.
        delta: table of Delta Lake that is read in place of a folder.
        iceberg: table of Apache Iceberg that is read in place of a folder.
        kafka: topic that is read in place of a folder.
        rows: most rows of a window.
        seconds: wait for more rows for at most so long.
        time: column of the time of an event, for late events and staleness: whole seconds since
            1970, or timestamps; None takes the schema's, if it has one.
        patience_s: a file that is no whole Parquet file and has not grown for so long is refused.
        event_seconds: seconds of event time of a window, which ends at a multiple of them; None
            ends none by its events.
        truth: column of the true logits of planted rows; each window then tells the best AUC that
            there is on it.
        stop_after_rows: the run ends after so many rows; None goes on.
        stop_after_windows: the run ends after so many windows; None goes on.
        stop_when_idle_s: it ends when no row has come for so long; None waits for ever.
    Raises:
        ConfigError: no source or more than one is given, or a number is out of range.
    """

    folder: str | None = None
    delta: DeltaConfig | None = None
    iceberg: IcebergConfig | None = None
    kafka: KafkaConfig | None = None
    rows: int = 100_000
    seconds: float = 60.0
    time: str | None = None
    patience_s: float = 30.0
    event_seconds: int | None = None
    truth: str | None = None
    stop_after_rows: int | None = None
    stop_after_windows: int | None = None
    stop_when_idle_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        given = sum(getattr(self, name) is not None for name in SOURCES)
        if given != 1:
            many = ("no source", "", "two sources", "three sources", "four sources")[given]
            names = ", ".join(f"{name}=..." for name in SOURCES)
            raise ConfigError(f"StreamConfig has {many}; give one of {names} .")
        if self.folder is not None:
            object.__setattr__(self, "folder", absolute_path("folder", self.folder))
        whole_number("StreamConfig has rows", self.rows)
        seconds("StreamConfig has seconds", self.seconds)
        seconds("StreamConfig has patience_s", self.patience_s)
        for what in ("event_seconds", "stop_after_rows", "stop_after_windows"):
            if getattr(self, what) is not None:
                whole_number(f"StreamConfig has {what}", getattr(self, what))
        if self.stop_when_idle_s is not None:
            seconds("StreamConfig has stop_when_idle_s", self.stop_when_idle_s)

    def open(self, whole: Collection[str] = ()) -> StreamSource:
        """Return the source, opened in this process.

        Args:
            whole: columns of whole numbers.
        Raises:
            InputError: it cannot be reached.
        """
        if self.delta is not None:
            from rayrec.streams.delta import DeltaSource

            return DeltaSource(self.delta.table, self.delta.first_version)
        if self.iceberg is not None:
            from rayrec.streams.iceberg import IcebergSource

            iceberg = self.iceberg
            where = iceberg.catalog, iceberg.properties
            return IcebergSource(iceberg.table, *where, iceberg.after_snapshot)
        if self.kafka is not None:
            from rayrec.streams.kafka import KafkaSource

            return KafkaSource(self.kafka, whole)
        from rayrec.streams.folder import FolderSource

        assert self.folder is not None
        return FolderSource(self.folder, self.patience_s)

    @property
    def source_name(self) -> str:
        """What messages and fingerprints call the source."""
        if self.delta is not None:
            return f"Delta table {self.delta.table}"
        if self.iceberg is not None:
            # the catalog may move during a run
            return f"Iceberg table {self.iceberg.table}"
        if self.kafka is not None:
            # the servers may change during a run
            return f"topic {self.kafka.topic}"
        return f"folder {self.folder}"
