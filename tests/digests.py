"""A digest of tables, optimizer state and outputs after 20 steps of each of 50 random worlds.

`python -m tests.digests` prints one line per world and one for all of them. A change that moves
code and changes no result prints the same lines before and after. The numbers depend on the
machine's vector units, so compare lines of one machine only.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable

import torch

from rayrec.distributed.program.engine_options import EngineOptions
from tests.draws import draw
from tests.simulation import batches_of, run_sharded, targets_of

STEPS, WORLDS = 20, 50
# a new optimizer must not change what is drawn
OPTIMIZERS = (
    "adagrad",
    "adam",
    "lamb",
    "lars_sgd",
    "partial_rowwise_adam",
    "rowwise_adagrad",
    "sgd",
)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A short hash of the bits of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(str(tuple(tensor.shape)).encode())
        found.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def digest_of_world(seed: int) -> str:
    """Train one world on simulated ranks; the digest of all that it leaves."""
    world, optimizers = draw(seed, optimizers=OPTIMIZERS)
    world.optimizer = optimizers  # type: ignore[assignment]  # one for each table
    batches = batches_of(world, STEPS)
    targets = targets_of(world, batches)
    # worlds take turns: rows read in place, rows exchanged
    options = EngineOptions(share_tables=seed % 2 == 0)
    outputs, states, _ = run_sharded(world, batches, targets, meta=True, options=options)
    tensors = [output for step in outputs for rank in step for output in rank]
    for _, weight, state in sorted(
        states, key=lambda s: (s[0].table, s[0].rank, s[0].rows.start, s[0].cols.start)
    ):
        tensors += [weight, *(state[name] for name in sorted(state))]
    return digest(tensor.reshape(-1) for tensor in tensors)


def main() -> None:
    """Print the digests."""
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("--worlds", type=int, default=WORLDS)
    args = parser.parse_args()
    lines = []
    for seed in range(args.worlds):
        lines.append(f"world {seed:3} {digest_of_world(seed)}")
        print(lines[-1], flush=True)
    print(f"all {args.worlds} {hashlib.sha256('|'.join(lines).encode()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
