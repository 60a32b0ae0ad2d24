"""A signature beside a manifest: an HMAC-SHA256 of its bytes, by a key that both sides hold.

    manifest.json       manifest.json.hmac
    publication.json    publication.json.hmac

A manifest has the sha256 of every file, and a delta that of the publication before it, so one
signature vouches for all bytes below it. Whoever holds the key can sign, so servers must be as
trustworthy as what trains. An older model that was signed stays signed: the signature says who made
it, and not when.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from rayrec.checks import absolute_path
from rayrec.errors import ArtifactError, ConfigError
from rayrec.serve.files import open_plain
from rayrec.storage import one_line

SUFFIX = ".hmac"
_ALGORITHM = "hmac-sha256"
_LEAST_BYTES = 32
_ENVIRONMENT = "env:"


def key_place(what: str, place: str | None) -> str | None:
    """Return the place of a key, with a file's path made absolute for other processes.

    Raises:
        ConfigError: it is empty.
    """
    if place is None or place.startswith(_ENVIRONMENT):
        return place
    return absolute_path(what, place)


class SigningKey:
    """A key to sign with, and to check signatures by.

    Args:
        secret: 32 bytes at least.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def read(cls, place: str | None) -> SigningKey | None:
        """Read the key at a place; None where no place is given.

        Args:
            place: a file, or "env:NAME", an environment variable. Spaces and line ends around the
                key are no part of it.
        Raises:
            ConfigError: there is no key, or it is too short; the key itself is never told.
        """
        if place is None:
            return None
        if place.startswith(_ENVIRONMENT):
            name = place.removeprefix(_ENVIRONMENT)
            secret = os.environb.get(name.encode()) if name else None
            if secret is None:
                raise ConfigError(
                    f"the signing key is {place}, and there is no environment variable {name!r}. "
                    "Set it, or name a file."
                )
        else:
            try:
                secret = Path(place).expanduser().read_bytes()
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"the signing key cannot be read: {one_line(error)}. Name a file that holds "
                    "it, or env:NAME, an environment variable."
                ) from None
        secret = secret.strip()
        if len(secret) < _LEAST_BYTES:
            raise ConfigError(
                f"the signing key in {place} has {len(secret)} bytes, and {_LEAST_BYTES} are "
                "needed. Make one by: python -c 'import secrets; print(secrets.token_hex(32))'."
            )
        return cls(secret)

    def sign(self, path: Path, text: bytes) -> Path:
        """Write the signature of a file that is about to be written; returns its place.

        Raises:
            OSError: the file system refuses.
        """
        beside = path.with_name(path.name + SUFFIX)
        beside.write_text(f"{_ALGORITHM} {self._signature(text)}\n")
        return beside

    def check(self, path: Path, text: bytes) -> None:
        """Compare the signature beside a file with the bytes that were read of it.

        Raises:
            ArtifactError: there is none, or none of these bytes by this key.
        """
        beside = path.with_name(path.name + SUFFIX)
        try:
            with open_plain(beside) as file:
                said = file.read(256).split()
        except OSError as error:
            raise ArtifactError(
                f"{path} is not signed: {beside.name} cannot be read ({one_line(error)}). Export "
                "or publish with the signing key, or do not ask for a signature."
            ) from None
        wanted = [_ALGORITHM.encode(), self._signature(text).encode()]
        # in constant time, so that nobody finds a signature digit by digit
        if not hmac.compare_digest(b" ".join(said), b" ".join(wanted)):
            raise ArtifactError(
                f"{beside} is no signature of {path.name} by this key: the file was changed, or "
                "signed by another key. Copy it again, or name the key that it was signed with."
            )

    def _signature(self, text: bytes) -> str:
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
