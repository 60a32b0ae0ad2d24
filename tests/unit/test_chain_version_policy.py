"""The state machine of a follower, without files: what comes next, and what never does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rayrec.errors import ArtifactError
from rayrec.serve.chain.publication import BASE, DELTA, ChangedTable, Publication, place_of
from rayrec.serve.chain.version_policy import Position, Verdict, judge
from rayrec.serve.files import StoredFile


def chain(rng: random.Random, run: str, length: int) -> list[Publication]:
    """A chain with a base at its beginning and now and then."""
    links: list[Publication] = []
    for seq in range(1, length + 1):
        kind = BASE if seq == 1 or rng.random() < 0.2 else DELTA
        artifact = f"{run}-{seq}" if kind == BASE else links[-1].artifact
        link = Publication(
            kind=kind,
            run=run,
            seq=seq,
            parent=links[-1].sha256 if links else "",
            artifact=artifact,
            from_step=10 * (seq - 1),
            to_step=10 * seq,
            time=float(rng.random()),
            dense=StoredFile("dense.pt", 3, "x") if kind == DELTA else None,
        )
        links.append(link.sealed())
    return links


@pytest.mark.seeds(range(200))
def test_only_what_comes_next_is_applied_whatever_arrives(seed):
    """Publications arrive in any order, some never, some twice, some of another run."""
    rng = random.Random(seed)
    own, other = chain(rng, "own", 12), chain(rng, "other", 12)
    # another history of the same run, as of a second process that goes on from a checkpoint
    fork = own[: rng.randint(1, 11)]
    for seq in range(len(fork) + 1, 13):
        last = fork[-1]
        link = replace(own[seq - 1], parent=last.sha256, to_step=10 * seq + 1)
        fork.append(link.sealed())
    arrivals = [*own, *own[:6], *rng.sample(other, 3), *rng.sample(fork, 4)]
    rng.shuffle(arrivals)
    position, applied = Position.at(own[0], None), [own[0]]
    for link in [*arrivals, *own]:
        verdict = judge(position, link)
        if verdict is Verdict.NEXT:
            before = applied[-1]
            applied.append(link)
            position = Position.at(link, position)
            if link.kind == DELTA:
                assert link.parent == before.sha256 and link.artifact == before.artifact
            assert link.run == before.run and link.seq > before.seq
        elif verdict is Verdict.SEEN:
            assert link.seq <= position.seq
        elif verdict is Verdict.GAP:
            assert link.kind == DELTA and link.seq > position.seq + 1
    is_own = {link.sha256 for link in applied} <= {link.sha256 for link in own}
    # who has taken a base of the other history once stays there
    assert position.run == "own" and (position.seq == 12 or not is_own)


def test_words_of_the_machine():
    own, other = chain(random.Random(3), "own", 4), chain(random.Random(3), "other", 4)
    own = [replace(link, kind=DELTA, artifact="a", dense=DENSE) for link in own]
    own[0] = replace(own[0], kind=BASE, dense=None)
    links: list[Publication] = []
    for link in own:
        links.append(replace(link, parent=links[-1].sha256 if links else "").sealed())
    at = Position.at(links[1], Position.at(links[0], None))
    assert judge(at, links[2]) is Verdict.NEXT
    assert judge(at, links[3]) is Verdict.GAP
    assert judge(at, links[0]) is judge(at, links[1]) is Verdict.SEEN
    assert judge(at, other[1]) is Verdict.FORK
    assert judge(at, replace(links[1], to_step=99).sealed()) is Verdict.FORK
    assert judge(at, replace(links[2], parent="else").sealed()) is Verdict.FORK
    assert judge(at, replace(links[2], artifact="else").sealed()) is Verdict.FORK


DENSE = StoredFile("dense.pt", 3, "x")


@pytest.mark.seeds(range(100))
def test_a_damaged_publication_is_refused(seed):
    rng = random.Random(seed)
    file = StoredFile("tables/0000-a-0.arrow", 7, "y")
    whole = replace(
        chain(rng, "own", 2)[1], kind=DELTA, dense=DENSE, tables=(ChangedTable("a", 3, 5, (file,)),)
    ).sealed()
    text = bytearray(whole.to_bytes())
    assert Publication.from_bytes(bytes(text), "here") == whole
    if rng.random() < 0.3:
        text = text[: rng.randrange(len(text) - 2)]
    else:
        text[rng.randrange(len(text) - 1)] ^= 1 << rng.randrange(7)
    try:
        assert Publication.from_bytes(bytes(text), "here") == whole  # blank space, or a digit alike
    except ArtifactError as error:
        assert str(error).startswith("here") and "\n" not in str(error)


@pytest.mark.parametrize("path", ["/etc/passwd", "../else", "tables/../../else"])
def test_files_outside_of_a_publication_are_refused(path):
    bad = replace(chain(random.Random(0), "own", 2)[1], kind=DELTA, dense=StoredFile(path, 1, "x"))
    with pytest.raises(ArtifactError, match="lies outside of the publication"):
        Publication.from_bytes(bad.sealed().to_bytes(), "here")


def test_names_of_folders():
    assert place_of("delta-00000012") == (12, "delta")
    assert place_of("base-00000001") == (1, "base")
    for name in ("delta-12", ".rayrec-delta-00000012", "delta-00000012.old", "step-00000012"):
        assert place_of(name) is None
