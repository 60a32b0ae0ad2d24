"""The order of samples against the definition, spelled out row by row."""

from __future__ import annotations

import random

import pytest

from rayrec.data.order import SampleOrder
from rayrec.errors import ConfigError

WORLDS = (1, 2, 3, 4, 5, 7)


def random_order(rng: random.Random, **kwargs) -> SampleOrder:
    return SampleOrder(
        chunk_rows=tuple(
            rng.choice((0, 1, 7, rng.randrange(200))) for _ in range(rng.randint(1, 8))
        ),
        num_streams=rng.choice((1, 2, 3, 8, 11)),
        shuffle_rows=rng.choice((1, 5, 16, 64)),
        seed=rng.randrange(1000),
        epoch=rng.randrange(5),
        **kwargs,
    )


def stream_as_list(order: SampleOrder, s: int) -> list[int]:
    """Absolute rows (in file order) of stream s, by definition: concatenate, cut, shuffle block by
    block.
    """
    first = [sum(order.chunk_rows[:c]) for c in range(len(order.chunk_rows))]
    rows = [first[c] + i for c in order.chunk_order for i in range(order.chunk_rows[c])]
    sizes = [
        (len(rows) + order.num_streams - 1 - j) // order.num_streams
        for j in range(order.num_streams)
    ]
    mine = rows[sum(sizes[:s]) : sum(sizes[: s + 1])]
    out: list[int] = []
    for b in range(0, len(mine), order.shuffle_rows):
        block = mine[b : b + order.shuffle_rows]
        perm = order.block_permutation(s, b // order.shuffle_rows)
        out += block if perm is None else [block[i] for i in perm]
    return out


@pytest.mark.seeds(range(40))
def test_global_batches_are_the_defined_positions_and_ranks_cut_them_evenly(seed):
    rng = random.Random(seed)
    order = random_order(rng, shuffle=rng.random() < 0.8)
    streams = [stream_as_list(order, s) for s in range(order.num_streams)]
    n = sum(order.chunk_rows)
    assert order.num_rows == n
    batch_size = rng.choice((1, 3, 16, 50, 1000))
    seen = []
    for t in range(order.num_batches(batch_size)):
        positions = range(t * batch_size, min((t + 1) * batch_size, n))
        want = sorted((k % order.num_streams, k // order.num_streams) for k in positions)
        assert order.batch_rows(t, batch_size) == len(want)
        seen += [streams[s][i] for s, i in want]
        for w in WORLDS:
            parts = [
                [
                    (g.stream, i)
                    for g in order.rank_ranges(t, batch_size, r, w)
                    for i in range(g.start, g.stop)
                ]
                for r in range(w)
            ]
            assert parts == [want[r * len(want) // w : (r + 1) * len(want) // w] for r in range(w)]
    assert sorted(seen) == list(range(n)), "an epoch holds every row once"


@pytest.mark.seeds(range(40))
def test_block_chunks_find_the_rows_of_every_block(seed):
    order = random_order(random.Random(seed))
    first = [sum(order.chunk_rows[:c]) for c in range(len(order.chunk_rows))]
    for s in range(order.num_streams):
        got = []
        for b in range(order.num_blocks(s)):
            rows = [
                first[c] + i
                for c, start, stop in order.block_chunks(s, b)
                for i in range(start, stop)
            ]
            perm = order.block_permutation(s, b)
            assert perm is not None and sorted(perm.tolist()) == list(range(len(rows)))
            got += [rows[i] for i in perm]
        assert got == stream_as_list(order, s)


def test_a_rank_reads_only_its_own_streams_when_ranks_divide_streams():
    order = SampleOrder(chunk_rows=(1000,) * 8)
    for r in range(4):
        streams = {
            g.stream for t in range(order.num_batches(512)) for g in order.rank_ranges(t, 512, r, 4)
        }
        assert len(streams) == 2


def test_epochs_and_seeds_differ_and_repeat():
    def rows(**kwargs):
        order = SampleOrder(chunk_rows=(100,) * 10, num_streams=2, shuffle_rows=64, **kwargs)
        return [stream_as_list(order, s) for s in range(2)]

    assert rows(seed=1, epoch=0) == rows(seed=1, epoch=0)
    assert rows(seed=1, epoch=0) != rows(seed=1, epoch=1)
    assert rows(seed=1, epoch=0) != rows(seed=2, epoch=0)
    assert rows(shuffle=False)[0] == list(range(500))


def test_the_permutation_is_pinned_for_ever():
    """A change of these numbers breaks every checkpointed cursor."""
    order = SampleOrder(chunk_rows=(4, 4, 4, 4, 4), num_streams=2, shuffle_rows=6, seed=7, epoch=3)
    assert order.chunk_order == (2, 1, 4, 0, 3)
    assert order.block_permutation(1, 0).tolist() == [0, 3, 4, 1, 2, 5]


def test_drop_last_drops_only_a_short_batch():
    order = SampleOrder(chunk_rows=(10,))
    assert [order.num_batches(g, drop_last=True) for g in (3, 5, 11)] == [3, 2, 0]
    assert [order.num_batches(g) for g in (3, 5, 11)] == [4, 2, 1]


@pytest.mark.parametrize("kwargs", [{"num_streams": 0}, {"shuffle_rows": 0}, {"epoch": -1}])
def test_bad_sizes_are_refused(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        SampleOrder(chunk_rows=(1,), **kwargs)


def test_bad_batch_size_is_refused():
    with pytest.raises(ConfigError, match="global_batch_size=0"):
        SampleOrder(chunk_rows=(1,)).num_batches(0)
