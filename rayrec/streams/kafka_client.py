"""Properties of the clients of Kafka: those of a run file, and those of a file beside it.

The names are librdkafka's, such as `security.protocol`. What is secret stands in the file, which
rank 0 reads on its host, since run files are copied into the folders of runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayrec.errors import ConfigError
from rayrec.streams.config import KafkaConfig, check_kafka_property


def client_properties(config: KafkaConfig) -> dict[str, Any]:
    """Return the properties that all clients of a topic have.

    Raises:
        ConfigError: the file of properties cannot be read, or has a property that is the source's.
    """
    read = {} if config.properties_file is None else _read(config.properties_file)
    twice = sorted(read.keys() & config.properties.keys())
    if twice:
        raise ConfigError(
            f"KafkaConfig has {twice[0]} in properties and in {config.properties_file}; leave one "
            "of them out."
        )
    return {**config.properties, **read, "bootstrap.servers": config.servers, "log_level": 0}


def _read(path: str) -> dict[str, str]:
    """Read lines of name=value; empty ones, and those that begin with #, say nothing."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"KafkaConfig has properties_file={path!r}, which cannot be read: {why}. Put it on "
            "every host that a rank may run on."
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        name, sign, value = (part.strip() for part in line.partition("="))
        if name.startswith("#") or not (name or sign):
            continue
        where = f"line {number} of properties_file {path}"
        # no message has the line itself, which may be a secret
        if not name or not sign:
            raise ConfigError(f"{where} is no name=value.")
        if name in found:
            raise ConfigError(f"{where} says {name} once more; leave one of them out.")
        check_kafka_property(where, name)
        found[name] = value
    return found
