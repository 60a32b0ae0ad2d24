"""Initial values are a pure function of (seed, table, row, column): any rectangle equals that rectangle of the whole."""

from __future__ import annotations

import random

import pytest
import torch

from rayrec.errors import InputError
from rayrec.modules import DataType, EmbeddingBagConfig, init, table_values


def config(rows: int = 1000, dim: int = 20, name: str = "t", **more) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=["f"], **more)


def random_range(rng: random.Random, size: int) -> range:
    start, stop = sorted((rng.randint(0, size), rng.randint(0, size)))
    return range(start, stop)


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
    size = init._CHUNK_ROWS
    table = config(2 * size + 5, 12)
    whole = table_values(0, table, range(table.num_embeddings), range(12))
    for rows in (range(size - 3, size + 3), range(1, 2 * size + 4)):
        assert torch.equal(table_values(0, table, rows, range(4, 12)), whole[rows.start : rows.stop, 4:])
    assert torch.unique(whole).numel() > 0.9 * whole.numel()  # chunks do not repeat each other
    assert not torch.equal(whole[:5], whole[size : size + 5])


def test_values_stay_the_same_between_versions():
    got = table_values(17, config(10, 8, "cat_3"), range(2, 4), range(1, 4))
    want = torch.tensor(
        [[0.03341096639633179, 0.15269619226455688, -0.28219515085220337], [0.2193833291530609, 0.1463550329208374, 0.21903488039970398]]
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
    assert torch.equal(table_values(1, config(50, **bounds), rows, cols), table_values(1, config(90, 64, **bounds), rows, cols))


def test_equal_bounds_give_a_constant():
    assert (table_values(1, config(weight_init_min=0.5, weight_init_max=0.5), range(10), range(20)) == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fill_converts_a_rectangle_in_place(dtype):
    table = config(100, 8, data_type=DataType.FP16)
    weight = torch.zeros(30, 4, dtype=dtype)
    init.fill(weight, 5, table, range(10, 40), range(4, 8))
    assert torch.equal(weight, table_values(5, table, range(10, 40), range(4, 8)).to(dtype))
    init.fill(torch.empty(100, 8, device="meta"), 5, table)
    init.fill(torch.empty(0, 8), 5, table, range(0), range(8))  # a shard of no rows is not the whole table
    with pytest.raises(InputError, match="cannot hold"):
        init.fill(weight, 5, table)


@pytest.mark.parametrize(
    ("rows", "cols"), [(range(1001), range(4)), (range(5), range(24)), (range(0, 10, 2), range(4)), (range(-1, 3), range(4))]
)
def test_rectangles_outside_the_table_are_refused(rows, cols):
    with pytest.raises(InputError, match="'t'"):
        table_values(0, config(), rows, cols)
