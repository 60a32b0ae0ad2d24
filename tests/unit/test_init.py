"""Initial values are a pure function of (seed, table, row, column): any rectangle equals that
rectangle of the whole.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import init as torch_init

from rayrec.errors import ConfigError, InputError
from rayrec.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    init,
    table_values,
    trunc_normal_,
)


def config(rows: int = 1000, dim: int = 20, name: str = "t", **more) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=dim, name=name, feature_names=["f"], **more
    )


def random_range(rng: random.Random, size: int) -> range:
    start, stop = sorted((rng.randint(0, size), rng.randint(0, size)))
    return range(start, stop)


def value_of(seed: int, table: EmbeddingBagConfig, row: int, col: int) -> np.float32:
    """One initial value by itself: 24 of the bits of its own counter, between the bounds."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{table.name}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=key, counter=row + (col // 8 << 64)).random_raw(4)
    bits = words.view("<u4")[col % 8] >> 8
    low, high = table.init_bounds()
    value = np.float32(bits) * np.float32((high - low) / 2**24) + np.float32(low)
    return min(max(value, np.float32(low)), np.float32(high))


# the largest numbers between the second pair would be rounded beyond the bound
@pytest.mark.parametrize(("low", "high"), [(-0.5, 0.5), (100.2533, 100.2538)])
def test_every_value_is_that_of_its_own_counter(low, high):
    table = config(400, 20, weight_init_min=low, weight_init_max=high)
    got = table_values(3, table, range(5, 305), range(3, 17))
    for row, col in itertools.product(range(5, 305), range(3, 17)):
        assert got[row - 5, col - 3] == value_of(3, table, row, col)
    assert float(got.max()) <= np.float32(high)


@pytest.mark.parametrize("init_fn", [None, partial(torch_init.normal_, std=1.0)])
def test_the_tasks_of_a_weight_give_the_same_in_any_order(init_fn, monkeypatch):
    table = config(210, 12, init_fn=init_fn)
    whole = table_values(2, table, range(210), range(12))
    monkeypatch.setattr(init, "_TASK_VALUES", 12 * 100)
    monkeypatch.setattr(init, "_CHUNK_VALUES", 12 * 30)
    weight = torch.zeros(210, 12)
    tasks = init.fills(weight, 2, table)
    assert len(tasks) == 3
    for task in reversed(tasks):
        task()
    assert torch.equal(weight, whole)


@pytest.mark.seeds(range(30))
def test_any_rectangle_equals_that_of_the_whole(seed):
    rng = random.Random(seed)
    table = config(rng.choice([1, 7, 1000]), 4 * rng.randint(1, 9))
    whole = table_values(seed, table, range(table.num_embeddings), range(table.embedding_dim))
    rows, cols = random_range(rng, table.num_embeddings), random_range(rng, table.embedding_dim)
    part = table_values(seed, table, rows, cols)
    assert part.shape == (len(rows), len(cols)) and part.dtype == torch.float32
    assert torch.equal(part, whole[rows.start : rows.stop, cols.start : cols.stop])


def test_rectangles_that_cross_a_chunk_equal_the_whole():
    size = init._CHUNK_VALUES // 12
    table = config(2 * size + 5, 12)
    whole = table_values(0, table, range(table.num_embeddings), range(12))
    for rows in (range(size - 3, size + 3), range(1, 2 * size + 4)):
        assert torch.equal(
            table_values(0, table, rows, range(4, 12)), whole[rows.start : rows.stop, 4:]
        )
    assert torch.unique(whole).numel() > 0.9 * whole.numel()  # chunks do not repeat each other
    assert not torch.equal(whole[:5], whole[size : size + 5])


def test_values_stay_the_same_between_versions():
    got = table_values(17, config(10, 8, "cat_3"), range(2, 4), range(1, 4))
    want = torch.tensor(
        [
            [0.03341096639633179, 0.15269619226455688, -0.28219515085220337],
            [0.2193833291530609, 0.1463550329208374, 0.21903488039970398],
        ]
    )
    assert torch.equal(got, want)


def test_values_are_uniform_within_the_bounds():
    table = config(100_000, 8, weight_init_min=-3.0, weight_init_max=5.0)
    values = table_values(1, table, range(100_000), range(8))
    assert values.min() >= -3 and values.max() <= 5
    counts = torch.histc(values, bins=16, min=-3, max=5) / values.numel()
    assert (counts - 1 / 16).abs().max() < 0.002  # 800 k draws: 7 standard deviations of a bin
    assert abs(torch.corrcoef(values.T)[0, 1:]).max() < 0.02  # columns are independent


def test_seed_and_name_pick_the_stream():
    rows, cols = range(50), range(8)
    base = table_values(1, config(), rows, cols)
    assert not torch.equal(base, table_values(2, config(), rows, cols))
    assert not torch.equal(base, table_values(1, config(name="u"), rows, cols))
    bounds = {"weight_init_min": -1.0, "weight_init_max": 1.0}
    assert torch.equal(
        table_values(1, config(50, **bounds), rows, cols),
        table_values(1, config(90, 64, **bounds), rows, cols),
    )


def test_equal_bounds_give_a_constant():
    assert (
        table_values(1, config(weight_init_min=0.5, weight_init_max=0.5), range(10), range(20))
        == 0.5
    ).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fill_converts_a_rectangle_in_place(dtype):
    table = config(100, 8, data_type=DataType.FP16)
    weight = torch.zeros(30, 4, dtype=dtype)
    init.fill(weight, 5, table, range(10, 40), range(4, 8))
    assert torch.equal(weight, table_values(5, table, range(10, 40), range(4, 8)).to(dtype))
    init.fill(torch.empty(100, 8, device="meta"), 5, table)
    # a shard of no rows is not the whole table
    init.fill(torch.empty(0, 8), 5, table, range(0), range(8))
    with pytest.raises(InputError, match="cannot hold"):
        init.fill(weight, 5, table)


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        (range(1001), range(4)),
        (range(5), range(24)),
        (range(0, 10, 2), range(4)),
        (range(-1, 3), range(4)),
    ],
)
def test_rectangles_outside_the_table_are_refused(rows, cols):
    with pytest.raises(InputError, match="'t'"):
        table_values(0, config(), rows, cols)


# a table's own initial values

ROWS, DIM = 1000, 24
SAVED = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(3))
INIT_FNS = {
    "uniform": partial(torch_init.uniform_, a=-2.0, b=3.0),
    "normal": partial(torch_init.normal_, mean=1.0, std=0.5),
    "constant": partial(torch_init.constant_, val=3.0),
    "ones": torch_init.ones_,
    "zeros": torch_init.zeros_,
    "xavier_uniform": torch_init.xavier_uniform_,
    "xavier_normal": torch_init.xavier_normal_,
    "kaiming_uniform": torch_init.kaiming_uniform_,
    "kaiming_normal": torch_init.kaiming_normal_,
    "truncated": partial(trunc_normal_, mean=0.1, std=2.0, a=-1.0, b=1.5),
    "of its data": lambda t: t.data.normal_(0.0, 0.1),
    "rand_like": lambda t: t.copy_(torch.rand_like(t) * 2 - 1),
    "sparse": lambda t: t.copy_(
        torch.where(torch.rand_like(t) < 0.5, torch.zeros_like(t), torch.randn_like(t))
    ),
    "saved": lambda t: t.copy_(SAVED),
    "one row and a column": lambda t: (
        t.copy_(SAVED[:1]).mul_(torch.arange(ROWS)[:, None]).add_(torch.linspace(0, 1, DIM))
    ),
}


@pytest.mark.parametrize("name", INIT_FNS)
def test_an_init_fn_gives_any_rectangle_of_the_table_it_would_fill(name):
    table, rng = config(ROWS, DIM, init_fn=INIT_FNS[name]), random.Random(name)
    whole = table_values(7, table, range(ROWS), range(DIM))
    for _ in range(5):
        rows, cols = random_range(rng, ROWS), random_range(rng, DIM)
        part = table_values(7, table, rows, cols)
        assert part.shape == (len(rows), len(cols))
        assert torch.equal(part, whole[rows.start : rows.stop, cols.start : cols.stop])
    plain = torch.empty(ROWS, DIM)
    INIT_FNS[name](plain)
    spread = float(plain.std())
    # 24,000 draws each: 0.05 is five standard errors of a difference
    assert abs(float(whole.mean() - plain.mean())) <= 0.05 * spread
    assert float(whole.std()) == pytest.approx(spread, rel=0.05, abs=1e-12)
    # the tails of 24,000 normal draws differ by so much
    for mine, theirs in ((whole.min(), plain.min()), (whole.max(), plain.max())):
        assert abs(float(mine - theirs)) <= 2 * spread
    if name in ("constant", "ones", "zeros", "saved", "one row and a column"):
        assert torch.equal(whole, plain)


def test_draws_of_an_init_fn_are_independent_and_follow_seed_and_name():
    table = config(100_000, 8, init_fn=lambda t: t.copy_(torch.randn_like(t) * torch.randn_like(t)))
    values = table_values(1, table, range(100_000), range(8))
    assert abs(float(values.mean())) < 0.01  # a square, were both draws the same, has mean 1
    assert abs(torch.corrcoef(values.T)[0, 1:]).max() < 0.02
    normal = partial(torch_init.normal_, std=1.0)
    rows, cols = range(50), range(8)
    base = table_values(1, config(init_fn=normal), rows, cols)
    assert not torch.equal(base, table_values(2, config(init_fn=normal), rows, cols))
    assert not torch.equal(base, table_values(1, config(name="u", init_fn=normal), rows, cols))
    size = init._CHUNK_VALUES // 4
    tall = config(size + 9, 4, init_fn=normal)
    whole = table_values(0, tall, range(tall.num_embeddings), range(4))
    assert torch.equal(whole[-11:-7], table_values(0, tall, range(size - 2, size + 2), range(4)))


@pytest.mark.parametrize(
    ("init_fn", "match"),
    [
        (torch_init.eye_, "aten.eye"),
        (torch_init.orthogonal_, "wrote nothing"),
        (torch_init.trunc_normal_, r"rayrec\.modules\.trunc_normal_"),
        (lambda t: t.normal_()[0].zero_(), "aten.select"),
        (lambda t: t.normal_().t().mul_(2), "aten.t.default"),
        (
            lambda t: t.copy_(torch.rand(ROWS, DIM)),
            r"aten\.rand\.default: it draws numbers for a tensor of its own",
        ),
        (lambda t: t.normal_(generator=torch.Generator()), "has a generator"),
        (lambda t: t.bernoulli_(0.5), "aten.bernoulli_"),
        (lambda t: t.copy_(torch.randn_like(t).sort(1)[0]), "aten.sort"),
        (lambda t: t.numpy().fill(1), "failed on a tensor without values"),
        (lambda t: torch.zeros(ROWS, DIM), "wrote nothing"),
    ],
)
def test_an_init_fn_that_needs_more_than_an_element_at_a_time_is_refused_when_the_module_is_made(
    init_fn, match
):
    table = config(ROWS, DIM, name="user", init_fn=init_fn)
    with pytest.raises(ConfigError, match=match) as caught:
        EmbeddingBagCollection([table], device="meta")
    assert "'user'" in str(caught.value)


def test_collections_begin_with_the_values_of_their_init_fns():
    torch.manual_seed(4)
    pooled = config(10, 8, init_fn=torch_init.xavier_normal_)
    sequence = EmbeddingConfig(
        10, 8, name="s", feature_names=["f"], data_type=DataType.FP16, init_fn=torch_init.ones_
    )
    assert torch.equal(
        EmbeddingBagCollection([pooled]).embedding_bags["t"].weight,
        table_values(4, pooled, range(10), range(8)),
    )
    assert (EmbeddingCollection([sequence]).embeddings["s"].weight == 1).all()
    with pytest.raises(ConfigError, match="both init_fn and weight_init_min"):
        config(init_fn=torch_init.ones_, weight_init_max=1.0)
    with pytest.raises(ConfigError, match="std must be above zero"):
        trunc_normal_(torch.zeros(2), std=0.0)
