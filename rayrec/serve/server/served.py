"""The predictor of a server."""

from __future__ import annotations

from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.settings import ServerSettings


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
    trusted, key = settings.trusted, settings.signing_key
    predictor: Predictor
    if follow:
        predictor = Predictor.follow(path, strict=settings.strict, trusted=trusted, signing_key=key)
    else:
        predictor = Predictor.load(path, trusted=trusted, signing_key=key)
    if predictor.schema is None:
        raise ConfigError(
            f"{path} has no schema, so a server cannot read columns; export the checkpoint with "
            "schema=."
        )
    own = predictor.weights.name
    if version not in ("", own):
        raise ArtifactError(
            f"{path} is version {own}, and the other hosts serve {version}. Put that back, or "
            "start the server anew."
        )
    return predictor
