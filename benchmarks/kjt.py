"""Operations on KeyedJaggedTensor and KeyedTensor: rayrec, the raw tensor operation, and TorchRec
where it is importable, interleaved.

    python -m benchmarks.kjt [--rounds 60]

Every call gets a fresh batch of which nothing is cached, as a training step does, unless the line
says "known": then the lengths per key are on the host. "raw" is what the bytes cost when nobody
keeps keys: slices, one cat, one strided copy. One thread, malloc as in rayrec's ranks for all.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.workload import quartiles
from rayrec.machine.memory import tune_malloc
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor


class Shape(NamedTuple):
    """A batch: rows, keys, and the columns of each key's pooled rows."""

    rows: int
    keys: int
    width: int


class Case(NamedTuple):
    """One operation: how to make its argument anew, what to time, and what the raw operation is."""

    make: Callable[[Any], Any]
    run: Callable[[Any], Any]
    raw: Callable[[], Any]


def cases(shape: Shape) -> dict[str, Case]:
    """The operations on one batch of ragged bags of 0 to 3 ids."""
    rng = np.random.default_rng(0)
    names = [f"f{i}" for i in range(shape.keys)]
    lengths = torch.from_numpy(rng.integers(0, 4, shape.keys * shape.rows).astype(np.int32))
    sizes = lengths.view(shape.keys, -1).sum(1).tolist()
    ids = torch.from_numpy(rng.integers(0, 100_000, sum(sizes)))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
    order = rng.permutation(shape.keys).tolist()
    rows = torch.randn(shape.rows, shape.keys * shape.width)
    learned = rows.clone().requires_grad_()
    every_other = [names[::2], names[1::2]]
    grads = [torch.ones(shape.rows, len(group) * shape.width) for group in every_other]

    def permute_raw() -> tuple[Tensor, Tensor]:
        parts, bags = ids.split(sizes), lengths.view(shape.keys, -1)
        return torch.cat([parts[i] for i in order]), torch.cat([bags[i] for i in order])

    def regroup_raw() -> tuple[Tensor, ...]:
        by_key = rows.view(shape.rows, shape.keys, shape.width)
        return tuple(by_key[:, first::2].reshape(shape.rows, -1) for first in (0, 1))

    def fresh(kjt: Any) -> Any:
        return kjt(keys=names, values=ids, lengths=lengths)

    def with_offsets(kjt: Any) -> Any:
        return kjt(keys=names, values=ids, lengths=lengths, offsets=offsets)

    def known(kjt: Any) -> Any:
        return kjt(keys=names, values=ids, lengths=lengths, offsets=offsets).sync()

    def keyed(kjt: Any, values: Tensor) -> Any:
        kind = KeyedTensor if kjt is KeyedJaggedTensor else _peer("KeyedTensor")
        return kind(keys=names, length_per_key=[shape.width] * shape.keys, values=values)

    def regroup_backward(kt: Any) -> None:
        torch.autograd.grad(type(kt).regroup([kt], every_other), learned, grads)

    def regroup_backward_raw() -> tuple[Tensor, ...]:
        grad = torch.empty(shape.rows, shape.keys, shape.width)
        for first in (0, 1):
            grad[:, first::2] = grads[first].view(shape.rows, -1, shape.width)
        return (*regroup_raw(), grad)

    half = shape.keys // 2
    return {
        "offsets": Case(
            fresh,
            lambda k: k.offsets(),
            lambda: torch.ops.fbgemm.asynchronous_complete_cumsum(lengths),
        ),
        "length_per_key": Case(
            fresh,
            lambda k: k.length_per_key(),
            lambda: lengths.view(shape.keys, -1).sum(1).tolist(),
        ),
        "length_per_key, offsets given": Case(
            with_offsets, lambda k: k.length_per_key(), lambda: offsets[:: shape.rows].tolist()
        ),
        "permute, known": Case(known, lambda k: k.permute(order), permute_raw),
        "split in two, known": Case(
            known,
            lambda k: k.split([half, shape.keys - half]),
            lambda: (ids.split(sizes), lengths.split(shape.rows)),
        ),
        "to_dict, known": Case(
            known, lambda k: k.to_dict(), lambda: (ids.split(sizes), lengths.split(shape.rows))
        ),
        "one key, known": Case(
            known, lambda k: k[names[3]].values(), lambda: ids[sizes[0] : sizes[0] + sizes[1]]
        ),
        "regroup": Case(
            lambda kjt: keyed(kjt, rows),
            lambda kt: type(kt).regroup([kt], every_other),
            regroup_raw,
        ),
        "regroup and backward": Case(
            lambda kjt: keyed(kjt, learned), regroup_backward, regroup_backward_raw
        ),
    }


def _peer(name: str) -> Any:
    from torchrec.sparse import jagged_tensor

    return getattr(jagged_tensor, name)


def main() -> None:
    """Time, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(1)
    systems = {"rayrec": KeyedJaggedTensor}
    if importlib.util.find_spec("torchrec") is not None:
        systems["torchrec"] = _peer("KeyedJaggedTensor")
    lines = [
        "| rows x keys | operation | raw, us | rayrec, us | rayrec / raw | torchrec, us | "
        "torchrec / rayrec |",
        "|---|---|---|---|---|---|---|",
    ]
    results: dict[str, Any] = {}
    for shape in (Shape(2048, 26, 64), Shape(8192, 200, 16)):
        for name, case in cases(shape).items():
            micros: dict[str, list[float]] = {"raw": [], **{system: [] for system in systems}}
            for i in range(args.rounds + 3):
                for system, found in micros.items():
                    argument = None if system == "raw" else case.make(systems[system])
                    start = time.perf_counter()
                    _ = case.raw() if system == "raw" else case.run(argument)
                    if i >= 3:
                        found.append((time.perf_counter() - start) * 1e6)
            q = {system: quartiles(found) for system, found in micros.items()}
            results[f"{shape.rows} x {shape.keys}, {name}"] = q
            raw, ours = q["raw"]["median"], q["rayrec"]["median"]
            peer = (
                f"{q['torchrec']['median']:.0f} | {q['torchrec']['median'] / ours:.1f}x"
                if "torchrec" in q
                else "| "
            )
            lines.append(
                f"| {shape.rows} x {shape.keys} | {name} | {raw:.0f} | {ours:.0f} | "
                f"{ours / raw:.2f}x | {peer} |"
            )
    lines.append(f"\nMedians of {args.rounds} interleaved rounds, one thread.")
    report.show("kjt", results, lines)


if __name__ == "__main__":
    main()
