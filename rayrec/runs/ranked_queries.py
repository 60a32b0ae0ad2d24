"""The places of a run's queries, kept in its folder, and what is compared by them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rayrec.errors import InputError
from rayrec.storage import one_line, resolve, write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rayrec.train.loop import RankTrainer

FILE = "places.json"
PROTOCOLS = ("kept", "masked")
WANTED = "wanted"  # the number of wanted items of each query, where it is not one
ITEMS = "items"  # the wanted items, of which a number stands in the file
K = 10


def keep_places(
    trainer: RankTrainer, calls: Mapping[str, Sequence[Tensor]]
) -> dict[str, list[int]]:
    """Join the places of the queries of all ranks, and write them into the run's folder, if it has
    one; a collective.

    Args:
        calls: by protocol, places of this rank's queries, call by call; the ranks' parts of a call
            stand in the order of the queries. Those of a baseline have its name before the
            protocol, such as "markov masked". The wanted items (`ITEMS`) are kept as one number
            that follows from all of them.
    """
    import numpy as np

    from rayrec.train.window import gather_objects

    ranks = gather_objects(
        {name: [part.tolist() for part in parts] for name, parts in calls.items()}
    )
    joined: dict[str, list[int]] = {}
    for name in calls:
        ordered = zip(*(one[name] for one in ranks), strict=True)
        joined[name] = [place for call in ordered for part in call for place in part]
    digest = hashlib.sha256(np.array(joined.pop(ITEMS), dtype="<i8").tobytes()).digest()
    joined[ITEMS] = [int.from_bytes(digest[:7])]
    if trainer.rank == 0 and trainer.spec.run_path is not None:
        path = f"{trainer.spec.run_path}/{FILE}"
        write_whole("the places of the queries", path, json.dumps(joined))
    return joined


def read_places(run_path: str) -> dict[str, NDArray[np.int64]] | None:
    """Return the places that a run has kept, by name; None where it has none.

    Raises:
        InputError: the file is damaged.
    """
    import numpy as np
    from pyarrow import fs

    path = f"{run_path}/{FILE}"
    files, where = resolve(path)
    if files.get_file_info(where).type is not fs.FileType.File:
        return None
    try:
        with files.open_input_stream(where) as stream:
            told = json.loads(stream.read())
        needed = PROTOCOLS[1:] if WANTED in told else PROTOCOLS
        found = {name: np.array(told[name], dtype=np.int64) for name in (*needed, *told)}
        wanted = found.get(WANTED)
        for name, of_name in found.items():
            if wanted is None or name in (WANTED, ITEMS):
                continue
            if wanted.sum() != len(of_name) or wanted.min(initial=0) < 0:
                raise ValueError(f"{wanted.sum()} wanted items, {len(of_name)} places")
        return found
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"{path} does not hold the places of queries: {one_line(error)}."
        ) from error


def comparison(runs: Sequence[str]) -> Iterator[str]:
    """Yield lines that compare the ranking of each run with that of its Markov chain, or, of two
    towers, with popularity, and the rankings of runs with those of the first that has any.

    Raises:
        InputError: a file is damaged, or the runs have ranked other rows.
    """
    kept = [(run, read_places(run)) for run in runs]
    ranked = [(run, places) for run, places in kept if places is not None]
    for run, places in ranked:
        baseline = "popularity" if WANTED in places else "markov"
        chosen = {p: places[f"{baseline} {p}"] for p in PROTOCOLS if f"{baseline} {p}" in places}
        if chosen:
            title = "popularity" if WANTED in places else "its Markov chain"
            yield f"{run} less {title}, with the middle 95% of a paired bootstrap:"
            yield from _differences({**places, **chosen}, places)
    for is_towers in (False, True):
        alike = [one for one in ranked if (WANTED in one[1]) == is_towers]
        for run, places in alike[1:]:
            base, others = alike[0]
            yield f"{run} less {base}, with the middle 95% of a paired bootstrap:"
            yield from _differences(others, places)


def _differences(
    base: Mapping[str, NDArray[np.int64]], places: Mapping[str, NDArray[np.int64]]
) -> Iterator[str]:
    import numpy as np

    from rayrec.metrics.bootstrap import gains, paired_bootstrap

    recall = "recall" if WANTED in places else "hr"
    for name in (WANTED, ITEMS):
        # runs of earlier versions have kept no number of their items
        known = name in base and name in places
        if known and not np.array_equal(base[name], places[name]):
            raise InputError("the wanted items of the runs' queries differ; rank the same rows.")
    for protocol in PROTOCOLS:
        if protocol not in base or protocol not in places:
            continue
        shown = []
        sides = (gains(side[protocol], K, side.get(WANTED)) for side in (base, places))
        both = zip(*sides, strict=True)
        for name, (first, second) in zip((f"{recall}@{K}", f"ndcg@{K}"), both, strict=True):
            mean, low, high = paired_bootstrap(first, second)
            shown.append(f"{name} {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
        yield f"  seen {protocol}: {'  '.join(shown)}"
