"""State of a rank's random generators: torch's, numpy's and Python's own.

A model that draws numbers, as dropout does, goes on with the same numbers only where these go on.
Generators of the user's own are not among them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seed all random generators with one number, those of the GPUs included."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random generators, as a checkpoint can hold it.

    Args:
        device: device of the rank; the generator of a GPU is included.
    Returns:
        tensors, numbers and tuples, which load without unpickling.
    """
    kept = np.random.get_state(legacy=True)
    assert isinstance(kept, tuple)
    kind, key, place, has_gauss, gauss = kept
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {
            "kind": kind,
            "key": torch.from_numpy(key.astype(np.int64)),
            "place": int(place),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the generators from a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kept = state["numpy"]
    key = kept["key"].numpy().astype(np.uint32)
    np.random.set_state((kept["kind"], key, kept["place"], kept["has_gauss"], kept["gauss"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def go_on(
    saved: Mapping[int, Mapping[str, Any]],
    saved_ranks: int,
    rank: int,
    world_size: int,
    device: torch.device,
    place: str,
) -> None:
    """Restore a rank's generators from those of `saved_ranks` ranks.

    Args:
        saved: states by rank. If they are of another number of ranks, all ranks are seeded anew.
            An older checkpoint has none, and nothing is changed.
        place: text that new seeds are derived from, such as the run's seed and its step.
    """
    if saved_ranks == world_size:
        set_random_state(saved[rank], device)
    elif saved:
        # Python's own generator makes one number of any text, the same in every process.
        seed_all(random.Random(f"{place} rank {rank} of {world_size}").getrandbits(63))
