"""Topics of Kafka that were changed or cannot be there, and properties that no client takes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from rayrec.errors import ConfigError, InputError
from rayrec.streams import KafkaConfig, StreamConfig
from rayrec.streams.kafka import KafkaSource
from tests.data.kafka_cluster import awaited, cluster, kafka, send
from tests.data.stream_files import rows_of

ROW = json.dumps(rows_of(7, 1).to_pylist()[0]).encode()


def source_of(servers: str, **properties: str) -> KafkaSource:
    topic = KafkaConfig(servers=servers, topic="clicks", properties=properties)
    source = StreamConfig(kafka=topic).open()
    assert isinstance(source, KafkaSource)
    return source


def test_what_retention_removes_before_the_first_round_is_not_missed() -> None:
    with cluster() as (producer, servers):
        send(producer, "clicks", [(0, ROW)])
        source = source_of(servers)
        past = awaited(source, source.start()).cursor
        known = {**past, "offsets": {"0": 1}, "ends": {}}
        assert source.read(known, 1) is None  # the others are seen, and have no messages
        # the mock keeps 5 MB of a partition
        send(producer, "clicks", [*[(1, bytes(50_000))] * 200, (1, ROW)])
        rows = None
        while rows is None:
            found = awaited(source, known, 1)
            rows, known = found.rows, dict(found.cursor)
        assert rows["amount"].to_pylist() == [7]
        source.close()


def test_a_topic_that_was_made_anew_with_fewer_partitions_is_an_error() -> None:
    with cluster() as (producer, servers):
        send(producer, "clicks", [(0, ROW)] * 3)
        source = source_of(servers)
        past = {"offsets": {"0": 2, "9": 0}, "ends": {"0": 2, "9": 0}, "done": 0}
        with pytest.raises(InputError, match=r"partition 9 of topic clicks of .* goes on from 0"):
            source.read(past, 1)
        source.close()


def test_a_topic_that_was_there_may_be_unknown_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {"offsets": {"0": 0}, "ends": {}, "done": 0}
    with cluster() as (producer, servers):
        source = source_of(servers)
        with pytest.warns(UserWarning, match="is waited for: .*Unknown topic"):
            assert source.read(begun, 1) is None
        send(producer, "clicks", [(0, ROW)])
        found = awaited(source, begun).rows
        assert found is not None and found["amount"].to_pylist() == [7]
        source.close()
    with cluster() as (_, servers):
        source = source_of(servers)
        monkeypatch.setattr("rayrec.streams.kafka.MISSING_S", 0.0)
        with pytest.raises(InputError, match="there is no topic clicks"):
            source.read(begun, 1)
        source.close()


def test_a_name_that_no_topic_can_have_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster() as (_, servers):
        source = source_of(servers)
        # the mock takes any name
        error = kafka.KafkaError(kafka.KafkaError.TOPIC_EXCEPTION)
        answer = SimpleNamespace(topics={"clicks": SimpleNamespace(error=error)})
        client = SimpleNamespace(list_topics=lambda *_, **__: answer, poll=lambda _: None)
        mine = source._client
        monkeypatch.setattr(source, "_client", client)
        with pytest.raises(InputError, match="there is no topic clicks"):
            source.read(source.start(), 1)
        monkeypatch.setattr(source, "_client", mine)
        source.close()


@pytest.mark.parametrize("name", ["error_cb", "throttle_cb"])
def test_a_property_that_is_no_text_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"refuses its properties.*{name}"):
        source_of("localhost:9092", **{name: "x"})
