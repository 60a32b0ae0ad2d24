"""What ranks tell each other comes out as it went in, and nothing that a peer sends is run."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import signal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import rayrec
from rayrec.checkpoint import ShardState
from rayrec.comm import plain
from rayrec.errors import CommError
from rayrec.layout import Shard, ShardingPlan, TableLayout, TablePlacement
from rayrec.observe.times import PartTimes, RankTimes
from rayrec.serve.manifest import Manifest
from rayrec.shards.undo import Point
from rayrec.train.random_state import random_state, set_random_state

HALVES = TableLayout((0, 4, 10), (0, 4), ((0,), (1,)))


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -(2**62), True, 0.1, "a\udc80\n", b"\0", (), (1, [2]), range(3, 9, 2)],
        {"a": {1: (2, None)}, (0, "b"): [], 3: {}},
        [Point(7, 12), ((Point(1, 2),), 2**61)],
        ShardingPlan(world_size=2, tables={"t": TablePlacement(layout=HALVES)}),
        RankTimes(parts={"input": PartTimes(0.1, 1e-9)}, step_s=3.5),
        [math.inf, torch.bfloat16],
        pa.table({"a": [[1, 2], None], "b": ["x", "y"]}),
    ],
)
def test_a_value_comes_out_as_it_went_in(value: Any) -> None:
    found = plain.decode(plain.encode(value))
    assert found == value and type(found) is type(value)


def test_a_file_of_an_optimizer_s_state_has_the_bytes_that_it_had_before() -> None:
    """Runs that went on in memory are compared with others by the files that they end in."""
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(layers.parameters())
    layers(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(optimizer.state_dict(), files[0])
    optimizer.load_state_dict(plain.decode(plain.encode(optimizer.state_dict())))
    torch.save(optimizer.state_dict(), files[1])
    assert files[0].getvalue() == files[1].getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    for tensor in (torch.tensor(3).to(dtype), torch.zeros(0, 4, dtype=dtype)):
        found = plain.decode(plain.encode([tensor]))[0]
        assert found.dtype == dtype and found.shape == tensor.shape and torch.equal(found, tensor)
    strided = torch.arange(12).reshape(3, 4).to(dtype).t()
    shard = Shard(table="t", rows=range(4), cols=range(3), rank=0)
    found = plain.decode(plain.encode(ShardState(shard, strided)))
    assert found.shard == shard and torch.equal(found.weight, strided)
    found.weight.fill_(1)


def test_what_an_artifact_says_of_itself_is_told() -> None:
    """Ranks that publish tell each other of it: enums, files, a schema, a recipe."""
    folder = Path(__file__).parent / "artifact_v1" / "artifact"
    manifest = Manifest.from_bytes((folder / "manifest.json").read_bytes(), str(folder))
    assert plain.decode(plain.encode([manifest])) == [manifest]


class Name(StrEnum):
    """As a user may name tables."""

    USER = "user"


# the same in older code, where str() gives another text
Code = Enum("Code", {"USER": "user"}, type=str)


@pytest.mark.parametrize(
    ("value", "plainly"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(7), 7),
        (np.bool_(True), True),
        (np.str_("user"), "user"),
        (Name.USER, "user"),
        (Code.USER, "user"),
        (torch.Size([2, 3]), (2, 3)),
    ],
)
def test_what_is_almost_plain_becomes_plain(value: Any, plainly: Any) -> None:
    (told,) = plain.decode(plain.encode([value]))
    assert told == plainly and type(told) is type(plainly)


@pytest.mark.parametrize("name", [np.str_("user"), Name.USER, Code.USER])
def test_a_table_has_a_name_of_the_users_kind(name: str) -> None:
    plan = ShardingPlan(world_size=2, tables={name: TablePlacement(layout=HALVES)})
    assert plain.decode(plain.encode(plan.shards(1))) == plan.shards(1)


def test_generators_go_on_from_what_was_told() -> None:
    state = random_state(torch.device("cpu"))
    told = plain.decode(plain.encode([state, state]))[1]
    first = torch.rand(3)
    set_random_state(told, torch.device("cpu"))
    assert torch.equal(torch.rand(3), first)


def test_what_is_not_plain_is_refused_where_it_is_told() -> None:
    for value in (
        object(),
        {1},
        np.arange(2),
        signal.SIGINT,
        Path("a"),
        print,
        ValueError("x"),
        pickle.Pickler,
    ):
        with pytest.raises(TypeError, match="plain values"):
            plain.encode([value])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("named", "os:system"),
        ("fields", "subprocess:Popen"),
        ("named", "rayrec.comm.plain:importlib.import_module"),
        ("fields", "rayrec.comm.plain:decode"),
        ("fields", "rayrec.storage:resolve"),
        ("named", "rayrec.errors:RayrecError"),
    ],
)
def test_a_peer_names_no_code(kind: str, name: str) -> None:
    text = json.dumps({kind: [name, {} if kind == "fields" else ["true"]]}).encode()
    sizes = json.dumps([len(text)]).encode()
    with pytest.raises(CommError, match="no data of rayrec"):
        plain.decode(len(sizes).to_bytes(8, "little") + sizes + text)


def test_no_collective_of_the_package_unpickles() -> None:
    """torch's object collectives unpickle what a peer sends."""
    pickling = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?\(")
    files = Path(rayrec.__file__).parent.rglob("*.py")
    assert not [str(file) for file in files if pickling.search(file.read_text())]
