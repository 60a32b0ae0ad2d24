"""Facts of a predictor for a server: its columns, its version, and its memory."""

from __future__ import annotations

from torch import Tensor

from rayrec.errors import ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.serve.chain.following import FollowingPredictor
from rayrec.serve.predictor import Predictor


def served_schema(predictor: Predictor, path: str = "the artifact") -> FeatureSchema:
    """Return the schema by which a server reads columns.

    Args:
        path: path of the artifact, for the message.
    Raises:
        ConfigError: the artifact has no schema.
    """
    if predictor.schema is None:
        raise ConfigError(
            f"{path} has no schema, so a server cannot read columns; export the checkpoint "
            "with schema=."
        )
    return predictor.schema


def request_columns(schema: FeatureSchema) -> list[str]:
    """Return the columns of a request: those of the schema without labels and row weights."""
    left_out = {*schema.labels, schema.weight}
    return [name for name in schema.columns() if name not in left_out]


def version_of(predictor: Predictor) -> tuple[str, int]:
    """Return name and step of the weights; the name is the step and digits of the sha256."""
    return predictor.weights.name, predictor.weights.step


def tables_of(predictor: Predictor) -> list[Tensor]:
    """Return the memory that lookups read: (bytes,) uint8 each."""
    if isinstance(predictor, FollowingPredictor):
        return predictor.follower.copies.data
    return [collection.packed.data for collection in predictor.collections.values()]
