"""Names of Python options in a message, as the keys of a run file that stand for them.

The options of a run are dataclasses, whose errors name them as a Python program writes them:
`RunConfig(storage_path=...)`. Who wrote a run file knows that as `run.storage_path`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from rayrec.driver import RunConfig, ScalingConfig
from rayrec.errors import ConfigError
from rayrec.fields import kinds

# RunConfig(storage_path=...), ScalingConfig(num_workers=(2, 4)), FailureConfig has max_failures
_CALL = re.compile(r"\b([A-Z]\w+)\(((?:[^()]|\([^()]*\))+)\)")
_HAS = re.compile(r"\b(?:this |the )?([A-Z]\w+) has (\w+)\b")
_OPTION = re.compile(r"(\w+)=((?:[^(),]|\([^()]*\))*)")


@contextmanager
def in_key_words() -> Iterator[None]:
    """Have the errors of a block about options of a run name the keys of a run file."""
    try:
        yield
    except ConfigError as error:
        words = key_words(str(error))
        if words == str(error):
            raise
        raise type(error)(words) from error


def key_words(text: str) -> str:
    """Return a message with keys of a run file in place of options of Python."""
    said = _CALL.sub(_of_call, text)
    return _HAS.sub(lambda found: _key(found[1], found[2]) or found[0], said)


def _of_call(found: re.Match[str]) -> str:
    options = list(_OPTION.finditer(found[2]))
    keys = [_key(found[1], option[1]) for option in options]
    if not keys or None in keys:
        return found[0]
    values = ["" if option[2] == "..." else f"={option[2]}" for option in options]
    return " and ".join(f"{key}{value}" for key, value in zip(keys, values, strict=True))


def _key(name: str, field: str) -> str | None:
    """Return the key for a field of a dataclass, or None where there is none."""
    section, fields = _sections().get(name, ("", frozenset()))
    return f"{section}.{field}" if field in fields else None


@cache
def _sections() -> dict[str, tuple[str, frozenset[str]]]:
    """Section and fields of each dataclass of a run's options, by its name."""
    sections: dict[str, type] = {"run": RunConfig, "scaling": ScalingConfig}
    for name, kind in kinds.field_types(RunConfig).items():
        for one in kinds.alternatives(kind):
            if dataclasses.is_dataclass(one) and isinstance(one, type):
                sections[f"run.{name}"] = one
    return {
        kind.__name__: (section, frozenset(field.name for field in dataclasses.fields(kind)))
        for section, kind in sections.items()
    }
