"""The systems of the drifting benchmark hold what their names say."""

from __future__ import annotations

from benchmarks.dynamic_drift import CHOICE_SEED, SEEDS, WORLD, systems
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
