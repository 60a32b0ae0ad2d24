"""Words of command lines."""

from __future__ import annotations


def sets(*changes: str) -> list[str]:
    """Options that set keys of a run file, such as "run.steps=5"."""
    return [word for change in changes for word in ("--set", change)]
