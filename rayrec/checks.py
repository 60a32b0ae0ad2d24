"""Checks of plain options, and paths made absolute: what configs and command lines share.

Every function returns the value that it was given, or raises a `ConfigError` that names the option,
the value and what is allowed. Needs the standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from rayrec.errors import ConfigError

# the folder below a Ray session that holds copies of working directories
_RAYS_COPIES = "working_dir_files"
MAX_SIZE = 2**31 - 1  # of a layer
MAX_LAYERS = 1000  # of one kind, or experts of a layer: each has tensors of its own
MAX_SEED = 2**63 - 1  # seeds are mixed as signed 64-bit integers
MAX_SECONDS = 10_000_000.0  # about four months; a longer timeout overflows inside gloo


def whole_number(what: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Check that `value` is an integer in [least, most].

    Raises:
        ConfigError: it is not; booleans and floats are no integers.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{what}={value!r}; it must be a whole number.")
    if value < least or (most is not None and value > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{what}={value}; it must be {bound}.")
    return value


def seed_number(what: str, value: Any) -> int:
    """Check that `value` is a seed: an integer in [0, 2**63)."""
    return whole_number(what, value, 0, MAX_SEED)


def seconds(what: str, value: Any) -> float:
    """Check that `value` is a time span in seconds: finite, above 0 and at most `MAX_SECONDS`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what}={value!r}; it must be a number of seconds.")
    if not 0 < value <= MAX_SECONDS:  # a nan fails this comparison, too
        raise ConfigError(f"{what}={value}; it must be above 0 and at most {MAX_SECONDS:.0f} s.")
    return float(value)


def positive(what: str, value: Any, most: float = sys.float_info.max) -> float:
    """Check that `value` is a finite number above 0 and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{what}={value!r}; it must be a number.")
    # a whole number may be larger than any float; a nan fails this comparison, too
    if not 0 < value <= most:
        bound = "" if most == sys.float_info.max else f" and at most {most:.4g}"
        raise ConfigError(f"{what}={value}; it must be a finite number above 0{bound}.")
    return float(value)


def check_once(words: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no word of a list is given twice."""
    for word in words:
        if words.count(word) > 1:
            raise ConfigError(f"{word!r} is given twice; give it once.")
    return words


def is_uri(path: str) -> bool:
    """Return whether `path` names a file system, as s3://bucket/run does."""
    return "://" in path


def absolute_path(what: str, path: str | os.PathLike[str]) -> str:
    """Make a local path absolute where it is said; URIs stay as they are.

    A relative path means the working directory of the process that says it. Ranks run in other
    directories, so they must never see one.

    Raises:
        ConfigError: the path is empty, holds a null character, or is a URI with one slash.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{what}={path!r}; it must be a path or a URI such as s3://bucket/run.")
    if is_uri(text):
        return text if text.endswith("://") else text.rstrip("/")
    scheme, _, rest = text.partition(":/")
    if len(scheme) > 1 and scheme.isalnum() and rest:
        raise ConfigError(
            f"{what}={path!r}, a folder called {scheme + ':'!r}. Write {scheme}://{rest} "
            f"for a URI, or ./{text} for that folder."
        )
    return os.path.abspath(os.path.expanduser(text))


def separate_files(outputs: Mapping[str, str | None], inputs: Mapping[str, str | None]) -> None:
    """Check that no output would be written over an input, among its files, or over another output.

    Args:
        outputs, inputs: paths by the options that name them; None and URIs are left out.
    Raises:
        ConfigError: names both options and the file.
    """
    taken: dict[str, str] = {}
    for is_output, paths in ((False, inputs), (True, outputs)):
        for option, path in paths.items():
            if path is None or is_uri(path):
                continue
            real = os.path.realpath(absolute_path(option, path))
            if is_output and real in taken:
                raise ConfigError(
                    f"{option} {path} would be written over the file of {taken[real]}; name "
                    "another file."
                )
            folder = next((at for at in taken if real.startswith(f"{at}{os.sep}")), None)
            if is_output and folder is not None and os.path.isdir(folder):
                raise ConfigError(
                    f"{option} {path} lies in the folder of {taken[folder]}, and would be read as "
                    "one of its files; name a file elsewhere."
                )
            taken.setdefault(real, option)


def lasting_path(what: str, path: str | os.PathLike[str]) -> str:
    """Return `path` as `absolute_path` does, but refuse one whose files would not stay.

    A job that was submitted to Ray runs in a temporary copy of its working directory, which Ray
    deletes some time after the job. A relative path would lead there.

    Raises:
        ConfigError: `absolute_path` refuses it, or it leads into Ray's temporary copy.
    """
    text = absolute_path(what, path)
    if not is_uri(text) and _RAYS_COPIES in text.split(os.sep):
        raise ConfigError(
            f"{what}={os.fspath(path)!r} leads to {text}, into Ray's temporary copy of the working "
            "directory, which is deleted after the job. Give an absolute path outside of it, on a "
            "disk that all hosts see, or a URI such as s3://bucket/run."
        )
    return text
