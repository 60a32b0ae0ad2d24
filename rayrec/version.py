"""The version of rayrec, in one place; `pyproject.toml` says the same, which a test holds."""

VERSION = "0.1.0"
