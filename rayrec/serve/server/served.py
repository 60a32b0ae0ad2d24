"""Facts of a predictor for a server: its columns, its version, and its memory."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from rayrec.errors import ArtifactError, ConfigError
from rayrec.layout.schema import FeatureSchema
from rayrec.serve.chain.following import FollowingPredictor
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.settings import ServerSettings


class _Trust(TypedDict):
    trusted: bool
    signing_key: str | None


def served_predictor(
    path: str, settings: ServerSettings, *, follow: bool = False, version: str = ""
) -> Predictor:
    """Return the predictor of a server.

    Args:
        path: path of the artifact; with `follow` of a run that publishes, or of its publications.
        version: name of the weights that it has to have; "" takes any.
    Raises:
        ConfigError: the artifact has no schema, or a key cannot be had.
        ArtifactError: there is no artifact, or a file of it is missing or damaged; or it is not
            signed, or not trusted and cannot be served without code; or it is of another version.
    """
    trust = _Trust(trusted=settings.trusted, signing_key=settings.signing_key)
    predictor: Predictor
    if follow:
        predictor = Predictor.follow(path, strict=settings.strict, **trust)
    else:
        predictor = Predictor.load(path, **trust)
    served_schema(predictor, path)
    own = predictor.weights.name
    if version not in ("", own):
        raise ArtifactError(
            f"{path} is version {own}, and the other hosts serve {version}. Put that back, or "
            "start the server anew."
        )
    return predictor


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
