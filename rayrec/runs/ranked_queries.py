"""The places of a run's queries, kept in its folder, and what is compared by them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rayrec.errors import InputError
from rayrec.storage import one_line, resolve, write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FILE = "places.json"
PROTOCOLS = ("kept", "masked")
K = 10


def write_places(run_path: str, places: dict[str, list[int]]) -> None:
    """Keep the places of all queries in the order of the rows, by protocol.

    Those of a baseline have its name before the protocol, such as "markov masked".
    """
    write_whole("the places of the queries", f"{run_path}/{FILE}", json.dumps(places))


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
        return {name: np.array(told[name], dtype=np.int64) for name in (*PROTOCOLS, *told)}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputError(
            f"{path} does not hold the places of queries: {one_line(error)}."
        ) from error


def comparison(runs: Sequence[str]) -> Iterator[str]:
    """Yield lines that compare the ranking of each run with that of its Markov chain, and the
    rankings of runs with those of the first that has any.

    Raises:
        InputError: a file is damaged, or the runs have ranked other rows.
    """
    kept = [(run, read_places(run)) for run in runs]
    ranked = [(run, places) for run, places in kept if places is not None]
    for run, places in ranked:
        chain = {p: places[f"markov {p}"] for p in PROTOCOLS if f"markov {p}" in places}
        if chain.keys() == {*PROTOCOLS}:
            yield f"{run} less its Markov chain, with the middle 95% of a paired bootstrap:"
            yield from _differences(chain, places)
    for run, places in ranked[1:]:
        base, others = ranked[0]
        yield f"{run} less {base}, with the middle 95% of a paired bootstrap:"
        yield from _differences(others, places)


def _differences(
    base: Mapping[str, NDArray[np.int64]], places: Mapping[str, NDArray[np.int64]]
) -> Iterator[str]:
    from rayrec.metrics.bootstrap import gains, paired_bootstrap

    for protocol in PROTOCOLS:
        shown = []
        both = zip(gains(base[protocol], K), gains(places[protocol], K), strict=True)
        for name, (first, second) in zip((f"hr@{K}", f"ndcg@{K}"), both, strict=True):
            mean, low, high = paired_bootstrap(first, second)
            shown.append(f"{name} {mean:+.4f} [{low:+.4f}, {high:+.4f}]")
        yield f"  seen {protocol}: {'  '.join(shown)}"
