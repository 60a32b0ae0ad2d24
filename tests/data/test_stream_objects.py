"""Messages that are JSON objects: read together they are the rows that they are one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from rayrec.streams import objects as reading
from rayrec.streams.messages import Decoded, decode
from rayrec.streams.objects import KafkaMessage, ObjectReader

TEXTS = ["", "x", "a:b", "2024-05-06", "2024-05-06 07:08:09", "5", "é😀", '"\\', "1,2", "\x01", "["]
KINDS: dict[str, Callable[[random.Random], Any]] = {
    "whole": lambda rng: rng.randrange(-9, 10**6),
    "large": lambda rng: rng.choice([2**53, -(2**60), 2**63 - 1, 7]),
    "fraction": lambda rng: rng.choice([rng.gauss(0, 1), rng.uniform(-1e300, 1e300), 5e-324]),
    "number": lambda rng: rng.choice([rng.randrange(9), rng.random(), 4.0]),
    "truth": lambda rng: rng.random() < 0.5,
    "text": lambda rng: rng.choice(TEXTS),
    "ids": lambda rng: [rng.randrange(99) for _ in range(rng.randrange(3))],
    "numbers": lambda rng: [rng.choice([rng.random(), 3]) for _ in range(rng.randrange(3))],
    "texts": lambda rng: [rng.choice(TEXTS) for _ in range(rng.randrange(3))],
    "holes": lambda rng: [rng.choice([None, 1, 0.5]) for _ in range(rng.randrange(3))],
    "null": lambda rng: None,
}
ODD = [
    *('{"a": -0}', '{"a": -0.0}', '{"a": 1e400}', '{"a": Infinity}', '{"a": Inf}', '{"a": NaN}'),
    *('{"a": 1}{"a": 2}', '{"a": 1} {"a": 2}', '{"a": 1}\n{"a": 2}', '{"a": {"a": 1}}', "{}"),
    *(
        " ",
        "",
        "\n",
        "[1]",
        "7",
        "null",
        '{"a": 01}',
        '{"a": 1,}',
        '{"a": "\\ud800"}',
        '{"a": "{"}',
    ),
    *('{"a": 1, "a": 2}', '{"a": 1, "\\u0061": 2}', '{"a": 9007199254740993}', '{"\\u0061": 3}'),
    *('{"a": 99999999999999999999}', '{"a": [[1]]}', '{"a": [null, 1]}', '{"a":', "1}", '{"a": "'),
    *('\ufeff{"a": 1}', '{"a": 1}\0', '{"a": 1}\0{', '{"a": 1}\v', '{"a": "x\ny"}', '{"a": 1e2}'),
    *('{"b": ":"}', '{"a": "2024-05-06"}', '{"a":\n1}', '{"a": null}', '{"a": {}}', '{"a": 1}\n'),
    *('{"a": "{"}', '{"a": [null]}', '{"a": []}'),
]

TRAPS = [
    ['{"a:b": 1, "c": 2}', '{"c": 3}'],
    ['{"a": "x", "b": null}', '{"a": ":"}'],
    ['{"a": 9007199254740993}', '{"a": 0.5}'],
    ['{"a": 0.5}', '{"a": -0}'],
    ['{"a": 1}{"a": 2}', '{"a":', '{"a": 1}}'],
    ['{"a": 1}', "\n", '{"a": 1}\n{"a": 2}'],
    ['{"a": 1', '"b": 2}'],
    ['{"a": [null]}', '{"a": [null, 2]}', '{"a": [0.5]}'],
]


def damaged(rng: random.Random, value: bytes) -> bytes:
    """Return a message that may be none, or one with other keys or types."""
    at = rng.randrange(len(value) + 1)
    how = rng.randrange(6)
    if how == 0:
        return value[:at]
    if how == 1:
        return value[:at] + bytes([rng.randrange(256)]) + value[at + 1 :]
    if how == 2:
        return value[:at] + rng.choice(b'{}[]":,\n\0\\\xff').to_bytes(1, "big") + value[at:]
    if how == 3:
        return value.decode().encode(rng.choice(["utf-16", "utf-16-le", "utf-8-sig", "utf-32"]))
    row = json.loads(value)
    name = rng.choice([*row, "more"])
    if how == 4 or name == "more":
        row[name] = rng.choice([*KINDS.values()])(rng)
    else:
        del row[name]
    return json.dumps(row).encode()


def world(rng: random.Random, harm: float, kinds: list[str]) -> list[KafkaMessage]:
    """Return messages with columns of these kinds, some damaged, some with offsets between."""
    names = [
        rng.choice(["a:b", ""]) if rng.random() < 0.1 else "abcdef"[k] for k in range(len(kinds))
    ]
    columns = dict(zip(names, kinds, strict=True))
    nulls = rng.choice([0, 0, 0.2])
    options = {"ensure_ascii": rng.random() < 0.5, "indent": rng.choice([None, None, 1])}
    messages, offset = list[KafkaMessage](), 0
    for _ in range(rng.randint(1, 12)):
        row = {name: KINDS[kind](rng) for name, kind in columns.items()}
        row = {name: None if rng.random() < nulls else value for name, value in row.items()}
        names = rng.sample([*row], len(row))
        value = json.dumps({name: row[name] for name in names}, **options).encode()  # type: ignore[arg-type]
        if rng.random() < harm:
            value = damaged(rng, value) if rng.random() < 0.6 else rng.choice(ODD).encode()
        offset += rng.choice([1, 1, 1, 3])
        messages.append(KafkaMessage(offset, value))
    return messages


def read_all(messages: list[KafkaMessage], whole: set[str]) -> list[Decoded]:
    found = list[Decoded]()
    while left := [one for one in messages if not found or one.offset >= found[-1].offset]:
        found.append(decode(ObjectReader(whole), left, 0, 10, "clicks[0]"))
    return found


def told(found: Decoded) -> tuple[object, ...]:
    """Return what must be equal, NaN and -0.0 too."""
    if found.rows is None:
        return None, found.offset, found.refused
    found.rows.validate(full=True)
    return found.rows.schema, str(found.rows.to_pylist()), found.offset, found.refused


@pytest.mark.seeds(range(300))
def test_messages_read_together_are_those_read_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random messages, damaged ones too: types, rows, places and what is refused."""
    rng = random.Random(seed)
    worlds = list[tuple[list[KafkaMessage], set[str]]]()
    for _ in range(100):
        kinds = rng.choices([*KINDS], k=rng.randint(1, 4))
        messages = world(rng, rng.choice([0, 0, 0.05, 0.3]), kinds)
        if rng.random() < 0.2:
            messages = [KafkaMessage(k, rng.choice(ODD).encode()) for k in range(rng.randint(1, 4))]
        worlds.append((messages, {*rng.sample("abcd", 2)}))
    for trap in TRAPS:
        messages = [KafkaMessage(k, one.encode()) for k, one in enumerate(trap)]
        worlds += [(messages, {"a"}), (messages, {"b"}), (messages[::-1], {"b"})]
    fast = [read_all(*one) for one in worlds]
    for (messages, whole), found in zip(worlds, fast, strict=True):
        if (rows := found[0].rows) is not None:
            # a reading of fewer rows gives them
            most = rng.randint(1, len(rows))
            fewer = decode(ObjectReader(whole), messages, 0, most, "clicks[0]")
            assert fewer.rows is not None and len(fewer.rows) == most
            assert fewer.refused == found[0].refused
    monkeypatch.setattr(ObjectReader, "_together", lambda *_: None)
    for (messages, whole), found in zip(worlds, fast, strict=True):
        plain = read_all(messages, whole)
        assert [*map(told, found)] == [*map(told, plain)], messages


@pytest.mark.seeds(range(50))
def test_usual_messages_are_read_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with nulls, texts with colons, and numbers with and without a fraction."""
    monkeypatch.delattr(ObjectReader, "_one_by_one")
    rng = random.Random(seed)
    row = {"item": [1], "at": 5, "amount": 1, "clicked": True, "text": "2024-05-06 07:08"}
    rows = [{**row, "amount": rng.choice([1, 0.5]), "at": k} for k in range(10)]
    for one in rows[1:]:
        name = rng.choice([*row])
        one[name] = rng.choice([None, one[name]])
    indent = rng.choice([None, 1])
    messages = [
        KafkaMessage(k, json.dumps(one, indent=indent).encode()) for k, one in enumerate(rows)
    ]
    found = ObjectReader({"item", "at"}).read(messages)
    assert found.to_pylist() == rows and found["text"].type == pa.string()


@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a": ', b"}")])
def test_messages_that_nest_deeply_are_refused_and_do_no_harm(begin: bytes, end: bytes) -> None:
    """Arrow's parser takes any depth, and the process would die."""
    good = KafkaMessage(0, b'{"a": null}')
    for offset, depth in enumerate((2, 255, 300, 5_000, 200_000), 1):
        deep = KafkaMessage(offset, b'{"a": ' + begin * depth + b"null" + end * depth + b"}")
        found = read_all([good, deep], {"a"})
        assert found[0].rows is not None
        if depth >= 5_000:
            assert found[0].rows.to_pylist() == [{"a": None}] and found[1].rows is None
            assert "maximum recursion depth exceeded" in found[1].refused[0].reason


def test_what_cannot_be_read_together_is_not_tried_with_each_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "PAUSE", 6)
    tried, together = list[int](), ObjectReader._together

    def counted(self: ObjectReader, messages: list[KafkaMessage], first: Any) -> pa.Table | None:
        tried.append(len(messages))
        return together(self, messages, first)

    monkeypatch.setattr(ObjectReader, "_together", counted)
    reader = ObjectReader()
    good = [KafkaMessage(k, b'{"a": 1}') for k in range(3)]
    odd = [*good, KafkaMessage(3, b'{"a": {}}')]
    assert [len(reader.read(one)) for one in (good, odd, good, good, good)] == [3, 2, 3, 3, 3]
    assert tried == [3, 4, 3]


@pytest.mark.seeds(range(50))
def test_a_message_that_is_no_row_costs_no_other(seed: int) -> None:
    rng = random.Random(seed)
    values = [f'{{"a": {1000 + k}}}' if rng.random() < 0.7 else rng.choice(ODD) for k in range(60)]
    found = read_all([KafkaMessage(k, one.encode("utf-8")) for k, one in enumerate(values)], {"b"})
    good = [1000 + k for k, one in enumerate(values) if one == f'{{"a": {1000 + k}}}']
    rows = [row.get("a") for one in found if one.rows is not None for row in one.rows.to_pylist()]
    assert [one for one in rows if isinstance(one, int | float) and 1000 <= one < 1100] == good


def test_a_damaged_message_of_arrow_is_refused_and_does_no_harm() -> None:
    words = pa.array(["aa", "bb", "cc"])
    rows = pa.table({"a": [1, 2, 3], "b": words, "c": words.dictionary_encode()})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    whole = out.getvalue().to_pybytes()
    offsets = b"".join(value.to_bytes(4, "little") for value in (0, 2, 4, 6))
    indices = b"".join(value.to_bytes(4, "little") for value in (0, 1, 2))
    for old, bad in (
        (offsets, offsets[:8] + b"\xff\xff\xff\x7f" + offsets[12:]),
        (offsets, b"\xff\xff\xff\xff" + offsets[4:]),
        (indices, indices[:8] + b"\xff\xff\xff\xff"),
        (b"aabbcc", b"aa\xff\xffcc"),
    ):
        damaged = whole.replace(old, bad)
        assert damaged != whole
        found = decode(None, [KafkaMessage(0, damaged), KafkaMessage(1, whole)], 0, 9, "p")
        assert found.rows is not None and found.rows.to_pylist() == rows.to_pylist()
        (refusal,) = found.refused
        assert (refusal.place, refusal.rows) == ("p offset 0", 1)
        # also behind rows of a reading
        found = decode(None, [KafkaMessage(0, whole), KafkaMessage(1, damaged)], 0, 9, "p")
        assert found.offset == 1 and not found.refused


@pytest.mark.parametrize("seed", range(60))
def test_damage_anywhere_in_a_message_of_arrow_ends_no_run(seed: int) -> None:
    rng, words = random.Random(seed), ["aa", "bb", "cc"]
    rows = pa.table({"a": [1, 2, 3], "b": words, "c": [words, [], words[1:]]})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as stream:
        stream.write_table(rows)
    for _ in range(20):
        damaged = bytearray(out.getvalue().to_pybytes())
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255])
        found = decode(None, [KafkaMessage(0, bytes(damaged))], 0, 9, "p")
        assert (found.rows is None) == bool(found.refused)
        if found.rows is not None:
            found.rows.validate(full=True)
