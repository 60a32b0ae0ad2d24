"""Check of the packages of the extra `serve`; needs the standard library only."""

from __future__ import annotations

from importlib.util import find_spec

from rayrec.errors import ConfigError

_PACKAGES = {"grpc": "grpcio", "aiohttp": "aiohttp", "prometheus_client": "prometheus-client"}


def check_installed() -> None:
    """Check that the packages of a server are installed.

    Raises:
        ConfigError: names the packages that are missing, and the extra.
    """
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"a server needs {', '.join(missing)}. Install what is missing with pip install "
            "'rayrec[serve]'."
        )
