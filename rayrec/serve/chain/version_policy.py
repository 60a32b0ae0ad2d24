"""Verdicts on publications: the state machine of a follower, without files and tables.

Publications hold values and not differences, and each names the one before by its sha256. So a
follower that takes only what `judge` calls NEXT has a version that training has published, whatever
is lost, repeated, swapped or damaged on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rayrec.serve.chain.publication import BASE, Publication
from rayrec.serve.manifest import Manifest

_MOST_REMEMBERED = 1024


class Verdict(Enum):
    """Relation of a publication to a follower's position.

    NEXT: to apply now. SEEN: applied before. GAP: one before it is missing. FORK: it has another
    history. DAMAGED: it cannot be read, or is not what was written. OTHER: a base of other tables,
    types or features. CURRENT: there is nothing new.
    """

    NEXT = "next"
    SEEN = "seen"
    GAP = "gap"
    FORK = "fork"
    DAMAGED = "damaged"
    OTHER = "other"
    CURRENT = "current"


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a follower in the chain: the publication that it has applied last.

    Attributes:
        run, seq, sha256: run, number and hash of that publication.
        artifact: sha256 of the manifest of the base below it.
        past: sha256 of publications that were applied, by number; the oldest are forgotten.
    """

    run: str
    seq: int
    sha256: str
    artifact: str
    past: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def at(cls, publication: Publication, before: Position | None) -> Position:
        """Return the position after a publication was applied."""
        past = {} if before is None else dict(before.past)
        past[publication.seq] = publication.sha256
        while len(past) > _MOST_REMEMBERED:
            del past[min(past)]
        return cls(publication.run, publication.seq, publication.sha256, publication.artifact, past)


def judge(position: Position, publication: Publication) -> Verdict:
    """Return the verdict on a publication for a follower at a position.

    A base stands by itself, so it may be taken where publications before it are missing.
    """
    is_base = publication.kind == BASE
    if publication.run != position.run:
        return Verdict.FORK
    if publication.seq <= position.seq:
        known = position.past.get(publication.seq, publication.sha256)
        return Verdict.SEEN if known == publication.sha256 else Verdict.FORK
    if publication.seq == position.seq + 1:
        follows = publication.parent == position.sha256
        if follows and not is_base:
            follows = publication.artifact == position.artifact
        return Verdict.NEXT if follows else Verdict.FORK
    return Verdict.NEXT if is_base else Verdict.GAP


def alike(one: Manifest, other: Manifest) -> bool:
    """Return True if a predictor of one artifact can score with the tables of the other."""

    def shape(manifest: Manifest) -> tuple[object, ...]:
        return (
            [(table.name, table.rows, table.width, table.type) for table in manifest.tables],
            manifest.collections,
            manifest.outputs,
            None if manifest.schema is None else manifest.schema.sha256,
            manifest.recipe,
        )

    return shape(one) == shape(other)
