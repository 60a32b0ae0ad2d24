"""The systems of the drifting benchmark hold what their names say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dynamic_drift import (
    CHOICE_SEED,
    MCH_ROW_BYTES,
    SEEDS,
    WORLD,
    systems,
    torchrec_systems,
)
from rayrec import EmbeddingBagConfig, KeyedJaggedTensor
from rayrec.data.planted import Planted
from rayrec.layout.schema import FeatureSchema


def table_bytes(schema: FeatureSchema) -> int:
    """Bytes of the tables with row-wise Adagrad, and of the ids of dynamic ones."""
    found = 0
    for table in schema.tables:
        ids = 0 if table.dynamic is None else table.dynamic.row_bytes(table.num_embeddings)
        found += table.num_embeddings * (4 * table.embedding_dim + 4 + ids)
    return found


def test_systems_have_the_rows_and_bytes_that_their_names_say() -> None:
    made = Planted(WORLD).schema()
    whole, dynamic, rows, same_bytes = (one.schema(made) for one in systems().values())
    for large, own, small in zip(whole.tables, dynamic.tables, rows.tables, strict=True):
        assert own.num_embeddings == small.num_embeddings == large.num_embeddings / 5
        assert own.dynamic is not None and large.dynamic is small.dynamic is None
    assert 0.999 < table_bytes(same_bytes) / table_bytes(dynamic) <= 1
    for hashed in (whole, rows, same_bytes):
        sizes = {name: t.num_embeddings for t in hashed.tables for name in t.feature_names}
        assert {f.name: f.hash_buckets for f in hashed.features} == sizes
    assert not any(feature.hash_buckets for feature in dynamic.features)
    assert CHOICE_SEED not in SEEDS


def test_systems_of_torchrec_have_the_rows_and_bytes_that_their_names_say() -> None:
    made = Planted(WORLD).schema()
    own = systems()["dynamic, 20% of the rows"].schema(made)
    rows = [table.num_embeddings for table in own.tables]
    for name, system in torchrec_systems().items():
        tables = system.schema(made).tables
        if "bytes" in name:
            sizes = [t.num_embeddings * (4 * t.embedding_dim + 4 + MCH_ROW_BYTES) for t in tables]
            assert 0.999 < sum(sizes) / table_bytes(own) <= 1
        else:
            assert [table.num_embeddings for table in tables] == rows


@pytest.mark.parametrize("anew", [False, True])
def test_a_row_of_mch_that_goes_to_another_id_stays_or_starts_anew(anew: bool) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    from benchmarks.dynamic_mch import MCH_BUFFERS, Tables
    from benchmarks.quality_twin import RowWise

    config = EmbeddingBagConfig(4, 8, "t", feature_names=["f"])
    tables = Tables([config], 0.5)
    optimizer = RowWise(tables.bags.parameters(), lr=0.1)
    if anew:
        tables.start_rows_anew(optimizer)

    def look_up(ids: list[int]) -> torch.Tensor:
        lengths = torch.ones(len(ids), dtype=torch.int32)
        return tables(KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=lengths)).values()

    look_up([-5, 2**40, 3]).sum().backward()
    optimizer.step()
    (weight,) = tables.bags.parameters()
    with torch.no_grad():
        weight.fill_(7.0)
        optimizer.state[weight]["sum"].fill_(1.0)
        kept, new, other = look_up([3, 8, 9])
    assert kept.eq(7).all()
    assert (torch.stack([new, other]).abs().le(0.5) if anew else new.eq(7)).all()
    assert optimizer.state[weight]["sum"].sum() == (2 if anew else 4)
    tables.eval()
    with torch.no_grad():
        assert torch.equal(look_up([3, 8, 9]), torch.stack([kept, new, other]))
        assert torch.equal(look_up([77])[0], weight[3]), "unknown ids share the last row"
    (module,) = tables.ids.children()
    buffers = dict(module["t"].named_buffers())
    assert sum(buffers[name].nbytes for name in MCH_BUFFERS) == 4 * MCH_ROW_BYTES
