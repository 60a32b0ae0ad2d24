"""The model of a server, at the path that a user names: its version, and its predictor."""

from __future__ import annotations

from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve.artifact import local_folder
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.manifest import Manifest
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.settings import ServerSettings, check_installed
from rayrec.serve.signing import SigningKey


def served_model(path: str, settings: ServerSettings, follow: bool) -> str:
    """Return the version of the artifact at a path, or the run of the chain there.

    It reads the manifest or a record alone.

    Raises:
        ArtifactError: this host has no artifact or no chain there.
        ConfigError: the artifact has no schema, or a key or a package is missing on this host.
    """
    check_installed()
    if follow:
        folder = ChainFolder.of_run(path, SigningKey.read(settings.signing_key))
        return folder.newest(folder.read).run
    manifest = Manifest.read_file(local_folder("the artifact", path))
    _check_schema(path, manifest.schema)
    return manifest.version


def served_predictor(
    path: str, settings: ServerSettings, *, follow: bool = False, version: str = ""
) -> Predictor:
    """Return the predictor of a server.

    Args:
        path: path of the artifact; with `follow` of a run that publishes, or of its publications.
        version: name of the weights that it has to have; "" takes any.
    Raises:
        ConfigError, ArtifactError: the errors of `Predictor.load` or `follow`; or the artifact has
            no schema, or is of another version.
    """
    trusted, key = settings.trusted, settings.signing_key
    predictor: Predictor
    if follow:
        predictor = Predictor.follow(path, strict=settings.strict, trusted=trusted, signing_key=key)
    else:
        predictor = Predictor.load(path, trusted=trusted, signing_key=key)
    _check_schema(path, predictor.schema)
    own = predictor.weights.name
    if version not in ("", own):
        raise ArtifactError(
            f"{path} is version {own}, and the other hosts serve {version}. Put that back, or "
            "start the server anew."
        )
    return predictor


def _check_schema(path: str, schema: object) -> None:
    if schema is None:
        raise ConfigError(
            f"{path} has no schema, so a server cannot read columns; export the checkpoint with "
            "schema=."
        )
