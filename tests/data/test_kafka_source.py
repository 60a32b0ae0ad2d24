"""Topics of Kafka, over librdkafka's mock cluster: every row comes once, in the stated order."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streams import StreamConfig, kafka_client
from rayrec.streams import kafka as reading
from rayrec.streams.config import KAFKA_READER, KafkaConfig
from rayrec.streams.messages import decode
from rayrec.streams.objects import KafkaMessage, ObjectReader
from tests.data.kafka_cluster import PARTITIONS, awaited, cluster, cluster_process, ipc, kafka, send
from tests.data.stream_files import amounts, cut, cutter_of, rows_of


def config_of(servers: str, form: str = "json", **options: object) -> StreamConfig:
    topic = KafkaConfig(servers=servers, topic="clicks", format=form)
    return StreamConfig(kafka=topic, **{"rows": 10, "seconds": 1e-6, **options})  # type: ignore[arg-type]


def messages_of(form: str, first: int, count: int) -> list[bytes]:
    rows = rows_of(first, count)
    if form == "arrow":
        return [ipc(rows)]
    return [json.dumps(row).encode() for row in rows.to_pylist()]


class Log:
    """The topic as plain lists, walked in the order that is stated."""

    def __init__(self) -> None:
        self.held: list[list[list[int]]] = [[] for _ in range(PARTITIONS)]
        self.at = [0] * PARTITIONS
        self.walked: list[int] = []

    def walk(self, most: int) -> None:
        """Walk rounds until nothing is left."""
        while any(at < len(held) for at, held in zip(self.at, self.held, strict=True)):
            ends = [min(len(held), at + most) for at, held in zip(self.at, self.held, strict=True)]
            for one, (at, end) in enumerate(zip(self.at, ends, strict=True)):
                for rows in self.held[one][at:end]:
                    self.walked += rows
            self.at = ends


@pytest.mark.parametrize("form", ["arrow", "json"])
@pytest.mark.seeds(range(20))
def test_rows_of_windows_are_those_of_a_plain_walk(
    tmp_path: Path, seed: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers that send at any time, messages that are none, restarts, and cuts anywhere."""
    rng = random.Random(seed)
    turn = rng.choice([1, 3, 50])
    monkeypatch.setattr(reading, "ROUND", turn)
    monkeypatch.setattr(reading, "MOST_READERS", rng.choice([1, 2, 3, 8]))
    monkeypatch.setitem(KAFKA_READER, "fetch.wait.max.ms", 1)
    monkeypatch.setattr(
        reading, "READ", {"json": rng.choice([1, 5, 100]), "arrow": rng.choice([1, 9])}
    )
    log, sent, bad, got = Log(), 0, 0, list[int]()
    with cluster() as (producer, servers):
        send(producer, "clicks", [(0, b"")])
        log.held[0].append([])
        config = config_of(servers, form, rows=rng.choice([1, 4, 7, 30]))
        run = tmp_path / "run"
        cutter, number, refused = cutter_of(run, config), 0, 0
        for _ in range(rng.randint(1, 4)):
            values = list[tuple[int, bytes]]()
            for _ in range(rng.randint(1, 8)):
                one, count = rng.randrange(PARTITIONS), rng.randint(1, 6)
                if rng.random() < 0.3:  # before rows, with which the window ends that tells of it
                    values.append((one, b"no message"))
                    log.held[one].append([])
                    bad += 1
                for value in messages_of(form, sent, count):
                    values.append((one, value))
                if form == "arrow":
                    log.held[one].append(list(range(sent, sent + count)))
                else:
                    log.held[one] += [[k] for k in range(sent, sent + count)]
                sent += count
            send(producer, "clicks", values)
            log.walk(turn)
            while len(got) < sent:
                window = cut(cutter, number)
                assert window is not None
                got += amounts(run, window)
                number, refused = number + 1, refused + window.refused
                if rng.random() < 0.3 and (len(got) == sent or turn == 50):
                    cutter.close()
                    cutter = cutter_of(run, config)
        cutter.close()
        assert got == log.walked
        told = [json.loads(one.read_text()) for one in (run / "stream" / "refused").glob("*")]
        assert refused <= bad + 1 and (refused or not told)


def numbers_behind(
    source: reading.KafkaSource, cursor: object, count: int = 0
) -> tuple[list[int], object]:
    """Read until nothing is left, and so many numbers at least, since a busy broker may be late."""
    got, deadline = list[int](), time.monotonic() + 60.0
    while (found := source.read(cursor, 100)) is not None or len(got) < count:  # type: ignore[arg-type]
        assert time.monotonic() < deadline
        if found is not None:
            got += [] if found.rows is None else map(int, found.rows["amount"].to_pylist())
            cursor = json.loads(json.dumps(found.cursor))
    return got, cursor


def source_of(servers: str, form: str = "json") -> reading.KafkaSource:
    source = config_of(servers, form).open()
    assert isinstance(source, reading.KafkaSource)
    return source


@pytest.mark.parametrize("form", ["arrow", "json"])
def test_windows_in_event_time_end_alike(tmp_path: Path, form: str) -> None:
    """A window that ends inside of what was read goes on behind it, also inside of a message."""
    rows = rows_of(0, 9).set_column(3, "at", pa.array([1, 2, 70, 71, 3, 130, 131, 190, 191]))
    values = [ipc(rows)] if form == "arrow" else [json.dumps(row) for row in rows.to_pylist()]
    with cluster() as (producer, servers):
        send(producer, "clicks", [(2, b"no message"), *((2, value) for value in values)])  # type: ignore[list-item]
        config = config_of(servers, form, rows=100, time="at", event_seconds=60)
        cutter = cutter_of(tmp_path, config)
        windows = [cut(cutter, number) for number in range(4)]
        cutter.close()
    assert [amounts(tmp_path, one) for one in windows if one] == [[0, 1], [2, 3, 4], [5, 6], [7, 8]]
    assert [one.refused for one in windows if one] == [1, 0, 0, 0]
    lags = [7, 4, 2, 0] if form == "json" else [None] * 4
    assert [one.lag_rows for one in windows if one] == lags


def test_messages_with_other_keys_or_types_are_rows_of_their_own(tmp_path: Path) -> None:
    rows = rows_of(0, 8).to_pylist()
    del rows[2]["item"]
    rows[3]["more"] = 1
    rows[5]["item"] = "five"
    values = [json.dumps(row).encode() for row in rows] + [b"[1]", b"{}", b"\xff", b""]
    with cluster() as (producer, servers):
        send(producer, "clicks", [(1, value) for value in [*values, values[6]]])
        cutter = cutter_of(tmp_path, config_of(servers, rows=7))
        window = cut(cutter, 0)
        cutter.close()
    assert window is not None and window.refused == 6
    assert amounts(tmp_path, window) == [0, 1, 3, 4, 6, 7, 6]
    (told,) = (tmp_path / "stream" / "refused").glob("*")
    for why in ("no column 'item'", "clicks[1] offset 8", "it is no object", "its value is empty"):
        assert why in told.read_text()


def test_a_topic_that_has_lost_messages_is_an_error() -> None:
    with cluster() as (producer, servers):
        send(producer, "clicks", [(0, value) for value in messages_of("json", 0, 3)])
        source = source_of(servers)
        first = awaited(source, source.start())
        second = awaited(source, first.cursor)
        awaited(source, second.cursor)
        # the mock keeps 5 MB of a partition
        send(producer, "clicks", [(0, bytes(50_000))] * 200)
        why = r"partition 0 of topic clicks of .* has offsets \d\d+ to 203"
        with pytest.raises(InputError, match=rf"{why}, and the run goes on from 1: its"):
            source.read(first.cursor, 1)
        source.close()
        # the round goes on in another process
        source = source_of(servers)
        with pytest.raises(InputError, match=rf"{why}, and the run goes on from 2: its"):
            source.read(second.cursor, 1)
        # a topic that was made anew
        past = {"offsets": {"0": 300}, "ends": {}, "done": 0}
        with pytest.raises(InputError, match="goes on from 300"):
            source.read(past, 1)
        source.close()


def test_a_partition_that_is_added_begins_at_its_beginning() -> None:
    with cluster() as (producer, servers):
        send(producer, "clicks", [(0, value) for value in messages_of("json", 0, 3)])
        source = source_of(servers)
        got, cursor = numbers_behind(source, source.start(), 3)
        known = {
            name: {one: value for one, value in cursor[name].items() if one != "3"}  # type: ignore[index]
            for name in ("offsets", "ends")
        }
        send(producer, "clicks", [(3, value) for value in messages_of("json", 3, 2)])
        more, cursor = numbers_behind(source, {**known, "done": 0}, 2)
        source.close()
    assert (got, more) == ([0, 1, 2], [3, 4])
    assert cursor["offsets"] == {"0": 3, "1": 0, "2": 0, "3": 2}  # type: ignore[index]


def test_a_cluster_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and inside of a round, with one warning and without a spin."""
    monkeypatch.setattr(reading, "REPLY_S", 0.4)
    monkeypatch.setattr(kafka_client, "REPLY_S", 0.4)
    with cluster_process() as (process, servers):
        producer = kafka.Producer({"bootstrap.servers": servers, "log_level": 0})
        send(producer, "clicks", [(0, value) for value in messages_of("json", 0, 3)])
        process.send_signal(signal.SIGSTOP)
        source = source_of(servers)
        with pytest.warns(UserWarning, match=rf"topic clicks of {servers} does not answer") as told:
            began, worked = time.monotonic(), time.process_time()
            assert [source.read(source.start(), 1) for _ in range(3)] == [None] * 3
        assert len(told) == 1
        assert time.monotonic() - began > 1 and time.process_time() - worked < 0.5
        assert source.lag(source.start()) == (None, None)
        process.send_signal(signal.SIGCONT)
        found = None
        while found is None:
            found = source.read(source.start(), 1)
        assert found.rows is not None and found.rows["amount"].to_pylist() == [0]
        process.send_signal(signal.SIGSTOP)
        away = source_of(servers)
        with pytest.warns(UserWarning, match="is waited for"):
            assert away.read(found.cursor, 1) is None
        process.send_signal(signal.SIGCONT)
        got = list[int]()
        while not got:
            got, _ = numbers_behind(away, found.cursor)
        assert got == [1, 2]
        source.close()
        away.close()


def test_a_run_may_begin_behind_the_messages_that_it_finds() -> None:
    with cluster() as (producer, servers):
        send(producer, "clicks", [(k % 3, one) for k, one in enumerate(messages_of("json", 0, 9))])
        topic = KafkaConfig(servers=servers, topic="clicks", starting_offsets="latest")
        source = reading.KafkaSource(topic, {"item"})
        assert numbers_behind(source, source.start())[0] == []
        # also of the partition that was empty, and of those that wait for a second look
        send(producer, "clicks", [(k, one) for k, one in enumerate(messages_of("json", 9, 4))])
        got, cursor = numbers_behind(source, source.start(), 4)
        assert got == [9, 10, 11, 12]
        source.close()
        # a run that goes on knows where; of a partition that is new to it no message is left out
        source = reading.KafkaSource(topic, {"item"})
        assert numbers_behind(source, cursor)[0] == []
        del cursor["offsets"]["0"], cursor["ends"]["0"]  # type: ignore[index]
        assert numbers_behind(source, cursor, 4)[0] == [0, 3, 6, 9]
        source.close()


def test_what_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    topic = KafkaConfig(servers="localhost:9092", topic="clicks")
    with pytest.raises(ConfigError, match="has two sources; give one of folder"):
        StreamConfig(kafka=topic, folder="in")
    with pytest.raises(ConfigError, match="has no source"):
        StreamConfig()
    with pytest.raises(ConfigError, match="KafkaConfig has servers=''; name one"):
        KafkaConfig(servers="", topic="clicks")
    with pytest.raises(ConfigError, match="KafkaConfig has topic=' '; name one"):
        KafkaConfig(servers="localhost:9092", topic=" ")
    for name in ("a b", "a\0b", "..", "ä", "a/b", "a" * 250):
        with pytest.raises(ConfigError, match="the name of a topic has at most 249 letters"):
            KafkaConfig(servers="localhost:9092", topic=name)
    with pytest.raises(ConfigError, match="format='avro'; give 'arrow' or 'json'"):
        KafkaConfig(servers="localhost:9092", topic="clicks", format="avro")
    with pytest.raises(ConfigError, match="starting_offsets='newest'; give 'earliest' or 'latest'"):
        KafkaConfig(servers="localhost:9092", topic="clicks", starting_offsets="newest")
    with cluster() as (_, servers):
        source = source_of(servers)
        with pytest.raises(InputError, match=rf"there is no topic clicks of {servers}; make it"):
            source.read(source.start(), 1)
        source.close()
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(ConfigError, match=r"needs confluent-kafka; pip install 'rayrec\[kafka\]'"):
        source_of(servers)


@pytest.mark.parametrize(("good", "odd"), [(3, "7.5"), (3, "NaN"), ([3], "[1, 2.5]")])
def test_an_id_with_a_fraction_costs_no_other_message(good: object, odd: str) -> None:
    whole = json.dumps({"item": good, "amount": 1}).encode()
    values = [whole, whole, f'{{"item": {odd}, "amount": 0.5}}'.encode(), whole]
    left = [KafkaMessage(offset, value) for offset, value in enumerate(values)]
    objects = ObjectReader({"item"})
    sizes = list[int]()
    while left:
        found = decode(objects, left, 0, 10, "clicks[0]")
        assert found.rows is not None
        sizes.append(len(found.rows))
        left = left[sizes[-1] :]
    assert sizes == [2, 1, 1]
    # amounts may be whole in some messages
    assert found.rows is not None and "int64" in str(found.rows["item"].type)
    mixed = [
        KafkaMessage(0, whole),
        KafkaMessage(1, whole.replace(b'"amount": 1', b'"amount": 0.5')),
    ]
    assert decode(objects, mixed, 0, 10, "clicks[0]").offset == 2
