"""The pages in docs/ tell the truth: pictures are drawn from the layouts beside them, byte counts
are measured.

A `text` block whose first line is an expression is a picture of that layout. The formulas of the
table of bytes are read from the page and compared with what ranks really send each other.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod

import pytest
import torch

import rayrec.layout
from rayrec.comm import SimulatedWorld
from rayrec.comm.exchange import Exchange
from rayrec.layout import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    Layout,
    Replicated,
    column_wise,
    data_parallel,
    grid_shard,
    kind_of,
    row_wise,
    table_row_wise,
    table_wise,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.sparse import KeyedJaggedTensor
from tests.simulation import sharded
from tests.unit.documents import BLOCKS, ROOT
from tests.worlds import plan_for

DOCS = ROOT / "docs"
SHARDING = (DOCS / "sharding.md").read_text()
HOSTS = ((0, 1), (2, 3))
PICTURES = re.findall(r"```text\n(.*\n)\n((?:.*\n)*?)```", SHARDING)

ROWS_PER_LINE, COLS_PER_CELL, CELL = 2, 4, 6  # scale of a picture


def draw(layout: Layout) -> str:
    """A layout as a picture: cuts at the margins, owners in the cells."""
    if isinstance(layout, Replicated):
        rows, cols = (0, layout.num_embeddings), (0, layout.embedding_dim)
        cells = [[", ".join(map(str, layout.ranks))]]
    else:
        rows, cols, cells = (
            layout.row_cuts,
            layout.col_cuts,
            [[str(rank) for rank in row] for row in layout.owners],
        )
    widths = [(b - a) // COLS_PER_CELL * CELL - 1 for a, b in pairwise(cols)]
    edge = "+" + "+".join("-" * w for w in widths) + "+"
    head = [" "] * (len(edge) + 2)
    for at, cut in zip((0, *(sum(widths[:i]) + i for i in range(1, len(cols)))), cols, strict=True):
        head[at : at + len(str(cut))] = str(cut)
    lines = ["      " + "".join(head).rstrip()]
    for (start, stop), owners in zip(pairwise(rows), cells, strict=True):
        lines.append(f"{start:>4}  {edge}")
        height = (stop - start) // ROWS_PER_LINE
        for i in range(height):
            inside = "|".join(
                (text if i == (height - 1) // 2 else "").center(w)
                for text, w in zip(owners, widths, strict=True)
            )
            lines.append(f"      |{inside}|")
    return "\n".join([*lines, f"{rows[-1]:>4}  {edge}"]) + "\n"


def test_there_is_a_picture_of_every_kind():
    assert {expression.split("#")[1].strip() for expression, _ in PICTURES} == {
        *rayrec.layout.KINDS,
        "product_grid",
    }


@pytest.mark.parametrize(
    "expression, picture", PICTURES, ids=[e.split("(")[0] for e, _ in PICTURES]
)
def test_pictures_show_what_their_expressions_make(expression, picture):
    table = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=16, feature_names=["f"])
    layout = eval(
        expression, {**vars(rayrec.layout), "table": table, "hosts": HOSTS, "ranks": (0, 1, 2, 3)}
    )
    assert picture == draw(layout), f"should be\n{draw(layout)}"
    assert expression.split("#")[1].strip() == kind_of(layout, HOSTS)


class Recording(Exchange):
    """An exchange that writes down, per call, the bytes that leave for other ranks."""

    def __init__(self, exchange: Exchange, parts: dict[str, Recording]) -> None:
        self.exchange, self.parts, self.calls = exchange, parts, []
        self.rank, self.world_size = exchange.rank, exchange.world_size

    def all_to_all(self, send, send_splits, recv_splits):
        self.calls.append((sum(send_splits) - send_splits[self.rank]) * send.element_size())
        return self.exchange.all_to_all(send, send_splits, recv_splits)

    def split(self, groups):
        part = Recording(self.exchange.split(groups), {})
        self.parts["hosts" if tuple(groups) == HOSTS else "peers"] = part
        return part


B, P, D, W = 8, 2, 32, 4  # bags of a rank, ids of a bag, width, ranks


def sent_bytes(
    layout: Layout, hosts=(), sequence: bool = False, weighted: bool = False
) -> tuple[list[int], dict[str, list[int]]]:
    """Bytes between ranks of one step, summed over ranks: of each collective of all ranks, and of
    each of the two hops.
    """
    ids = torch.arange(B * P) * 4  # as many in every quarter of the 64 rows
    weights = torch.ones(B * P) if weighted else None
    kjt = KeyedJaggedTensor(["f"], ids, weights, lengths=torch.full((B,), P))
    plan = plan_for(W, {"t": layout}, hosts)

    def rank_main(exchange):
        recording = Recording(exchange, {})
        if sequence:
            collection = EmbeddingCollection(
                [EmbeddingConfig(64, D, name="t", feature_names=["f"])], device="meta"
            )
        else:
            table = EmbeddingBagConfig(64, D, name="t", feature_names=["f"])
            collection = EmbeddingBagCollection([table], is_weighted=weighted, device="meta")
        model, _ = sharded(collection, plan, recording)
        output = model(kjt)
        (output["f"] if sequence else output).values().sum().backward()
        return recording.calls, {name: part.calls for name, part in recording.parts.items()}

    ranks = SimulatedWorld(W).run(rank_main)
    hops = {
        name: [sum(call) for call in zip(*(r[1][name] for r in ranks), strict=True)]
        for name in ranks[0][1]
    }
    return [sum(call) for call in zip(*(r[0] for r in ranks), strict=True)], hops


def product(formula: str, **values: int) -> int:
    """ "4 B D n" -> 4 * B * D * n."""
    return prod(values[factor] if factor in values else int(factor) for factor in formula.split())


ROWS = (
    tuple(c.strip(" `") for c in line.split("|")[1:-1])
    for line in SHARDING.splitlines()
    if " B D" in line or " F D" in line
)
FORMULAS = {row[0]: row[1:] for row in ROWS}
TABLE = EmbeddingBagConfig(64, D, name="t", feature_names=["f"])
CASES = {
    "table_wise": [table_wise(TABLE, 0)],
    "row_wise": [row_wise(TABLE, range(4)), table_row_wise(TABLE, HOSTS[0])],
    "column_wise": [column_wise(TABLE, range(4)), column_wise(TABLE, (2, 3))],
    "n x c grid": [grid_shard(TABLE, HOSTS)],
    "data_parallel": [data_parallel(TABLE, range(4))],
}


def blocks(layout: Layout) -> dict[str, int]:
    n, c = (
        (1, 1) if isinstance(layout, Replicated) else (layout.num_row_blocks, layout.num_col_blocks)
    )
    filled = {(i // P, 4 * i // (64 // n)) for i in range(B * P)}  # bag and row block of every id
    return {"B": B, "N": B * P, "D": D, "W": W, "n": n, "c": c, "F": len(filled)}


@pytest.mark.parametrize("kind, layout", [(k, layout) for k in CASES for layout in CASES[k]])
def test_bytes_of_the_flat_route_are_those_of_the_page(kind, layout):
    values = blocks(layout)
    ids, lengths, rows, grads = (0 if f == "0" else product(f, **values) for f in FORMULAS[kind])
    calls, hops = sent_bytes(layout)
    others = W - 1  # of W equal parts, summed over ranks, one in W stays at home
    assert not hops
    pieces = W if isinstance(layout, Replicated) else values["n"] * values["c"]
    assert calls[0] == others * 16 * pieces
    assert calls[1:] == [others * (ids + lengths), others * rows, others * grads]


@pytest.mark.parametrize("kind, layout", [(k, CASES[k][0]) for k in CASES])
def test_sequences_send_rows_of_ids_and_no_lengths(kind, layout):
    values = blocks(layout)
    calls, _ = sent_bytes(layout, sequence=True)
    ids = product(FORMULAS[kind][0], **values)
    back = 4 * values["N"] * D
    grads = back * W if isinstance(layout, Replicated) else back
    assert calls[1:] == [
        (W - 1) * ids,
        0 if isinstance(layout, Replicated) else (W - 1) * back,
        (W - 1) * grads,
    ]


def test_weights_travel_beside_their_ids():
    layout = CASES["row_wise"][0]
    plain, weighted = sent_bytes(layout)[0], sent_bytes(layout, weighted=True)[0]
    assert weighted[1] - plain[1] == (W - 1) * 4 * B * P


@pytest.mark.parametrize(
    "layout, hosts_per_column", [(row_wise(TABLE, range(4)), 2), (grid_shard(TABLE, HOSTS), 1)]
)
def test_bytes_of_two_hops_are_those_of_the_page(layout, hosts_per_column):
    inside, between = (
        product(f, **blocks(layout), L=2, h=hosts_per_column) for f in FORMULAS["two hops"][1:]
    )
    calls, hops = sent_bytes(layout, hosts=HOSTS)
    assert calls[2:] == [0, 0]
    # in hosts of two ranks half stays on its rank, forward and back
    assert hops["hosts"] == [inside * W // 2] * 2
    assert hops["peers"] == [between * W // 2] * 2  # so does half between two hosts


def test_the_model_of_the_walkthrough_is_imported_in_any_working_directory(tmp_path, monkeypatch):
    """As ranks of a cluster import it, which have no file of the driver's folder at hand."""
    (code,) = (b.code for b in BLOCKS if (b.page.stem, b.what) == ("walkthrough", "file model.py"))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "model.py", "exec"), {"__name__": "model"})
