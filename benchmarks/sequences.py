"""Attention over jagged sequences against the padded one, forward and backward, by fill.

    python -m benchmarks.sequences [--only din causal hstu] [--rounds 15] [--grid 256x50 64x400]

The fill is the mean length over the longest, of lengths with a lognormal tail. Both ways start from
jagged values and give jagged values back; the padded one pads with FBGEMM's operators and does the
rest in plain torch, causal attention by torch's fused kernel. The two take turns in each round, on
one thread, and their outputs are compared first. A row says the median over rounds of the time of
either and of their ratio; CPU time of the thread, since a busy machine stretches the wall. At a
quarter of fill the mark is three times as fast, and a line below the table names those that miss
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import report
from benchmarks.workload import quartiles
from rayrec.modules import TargetAttention, causal_attention, hstu_attention
from rayrec.modules.attention_groups import CALL_PAIRS, JaggedGroups
from rayrec.modules.attention_tiles import HSTU_CALL_PAIRS, time_buckets
from rayrec.sparse.ops import jagged_to_padded_dense

DIM, HEADS, BUCKETS = 64, 2, 40
GRID = ("32x50", "64x50", "256x50", "64x100", "64x200", "128x200", "64x400", "16x1000")
QUARTER = 0.25
FILLS = (QUARTER, 0.5, 0.75, 1.0)
AT_QUARTER, AT_ANY = 3.0, 0.9  # marks: times as fast as padded


class World(NamedTuple):
    """A batch of jagged values, with everything that an attention reads."""

    offsets: Tensor
    longest: int
    values: list[Tensor]
    query: Tensor
    times: Tensor
    biases: list[Tensor]
    max_length: int | None = None  # what attention is told of the longest

    def pad(self, values: Tensor) -> Tensor:
        """(T, D) -> (B, L, D)."""
        if values.dtype is torch.float64:  # which FBGEMM does not pad
            shape = (*self.is_value().shape, *values.shape[1:])
            places = self.is_value().view(*shape[:2], *[1] * (values.dim() - 1)).expand(shape)
            return values.new_zeros(shape).masked_scatter(places, values)
        return jagged_to_padded_dense(values, self.offsets, self.longest, 0.0)

    def unpad(self, padded: Tensor) -> Tensor:
        """(B, L, D) -> (T, D)."""
        if padded.dtype is torch.float64:
            return padded[self.is_value()]
        return torch.ops.fbgemm.dense_to_jagged(padded, [self.offsets], len(self.values[0]))[0]

    def heads(self, values: Tensor) -> Tensor:
        """(T, D) -> (B, H, L, D / H)."""
        return self.pad(values).unflatten(2, (HEADS, DIM // HEADS)).transpose(1, 2)

    def is_value(self) -> Tensor:
        """(B, L): whether a place is one of a value."""
        places = torch.arange(self.longest, device=self.offsets.device)
        return places < self.offsets.diff().unsqueeze(1)

    def to(self, device: str, dtype: torch.dtype | None = None) -> World:
        """Bring it to a device; numbers with a fraction to a type as well."""

        def moved(one: Tensor) -> Tensor:
            return one.detach().to(device, dtype).requires_grad_()

        return self._replace(
            offsets=self.offsets.to(device),
            values=[moved(one) for one in self.values],
            query=moved(self.query),
            times=self.times.to(device),
            biases=[moved(one) for one in self.biases],
        )


def lengths_of(count: int, longest: int, fill: float) -> Tensor:
    """Lengths from 1 to `longest` whose mean is that share of it."""
    generator = torch.Generator().manual_seed(0)
    if fill == 1:
        return torch.full((count,), longest)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        lengths = (0.9 * normal + middle).exp().clamp(1, longest)
        low, high = (middle, high) if lengths.mean() < fill * longest else (low, middle)
    lengths = lengths.long()
    lengths[0] = longest
    return lengths


def world_of(count: int, longest: int, fill: float) -> World:
    """Draw a world of B = count sequences."""
    offsets = functional.pad(lengths_of(count, longest, fill).cumsum(0), (1, 0))
    total = int(offsets[-1])
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).requires_grad_()

    times = torch.randint(0, 100_000, (total,), generator=generator).cumsum(0) + 1_700_000_000
    values = [drawn(total, DIM) for _ in range(3)]
    biases = [drawn(longest, scale=0.1), drawn(BUCKETS, scale=0.1)]
    return World(offsets, longest, values, drawn(count, DIM), times, biases)


Pair = tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]


def causal(world: World) -> Pair:
    """Causal attention with softmax: padded, ours, and what is differentiated."""

    def padded() -> Tensor:
        query, key, value = map(world.heads, world.values)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return world.unpad(out.transpose(1, 2).flatten(2))

    given = (*world.values, world.offsets, HEADS, world.max_length)
    return padded, lambda: causal_attention(*given), world.values


def hstu(world: World) -> Pair:
    """HSTU's attention with both biases: padded, ours, and what is differentiated."""
    position, time_bias = world.biases

    def padded() -> Tensor:
        query, key, value = map(world.heads, world.values)
        times = jagged_to_padded_dense(world.times, world.offsets, world.longest, 0.0)
        places = torch.arange(world.longest, device=times.device)
        bias = position[(places.unsqueeze(1) - places).clamp(min=0)]
        buckets = time_buckets(times.unsqueeze(2) - times.unsqueeze(1), BUCKETS)
        # the gradient of an index into few rows is slow: on CUDA they are added up one by one
        if times.is_cuda:
            bias = bias + functional.embedding(buckets, time_bias.unsqueeze(1)).squeeze(-1)
        else:
            bias = bias + time_bias.index_select(0, buckets.flatten()).view_as(buckets)
        scores = query @ key.mT * (DIM // HEADS) ** -0.5 + bias.unsqueeze(1)
        weights = functional.silu(scores).tril() / (places + 1).unsqueeze(1)
        return world.unpad((weights @ value).transpose(1, 2).flatten(2))

    given = (*world.values, world.offsets, position, time_bias, world.times, HEADS)
    ours = lambda: hstu_attention(*given, max_length=world.max_length)  # noqa: E731
    return padded, ours, [*world.values, *world.biases]


def target(world: World, hidden: Sequence[int]) -> Pair:
    """Target attention: padded, ours, and what is differentiated."""
    torch.manual_seed(2)
    values = world.values[0]
    module = TargetAttention(DIM, hidden, softmax=not hidden).to(values.device, values.dtype)

    def padded() -> Tensor:
        keys, is_value = world.pad(values), world.is_value()
        if not hidden:
            scores = torch.einsum("bld,bd->bl", keys, world.query) * DIM**-0.5
            weights = scores.masked_fill(~is_value, -torch.inf).softmax(1)
        else:
            queries = world.query.unsqueeze(1).expand_as(keys)
            states = torch.cat([queries, keys, queries - keys, queries * keys], dim=2)
            for number, layer in enumerate(module.layers):
                states = layer(states.sigmoid() if number else states)
            weights = states.squeeze(2).masked_fill(~is_value, 0.0)
        return torch.einsum("bl,bld->bd", weights, keys)

    parameters: list[nn.Parameter] = list(module.parameters())
    ours = lambda: module(world.query, values, world.offsets)  # noqa: E731
    return padded, ours, [world.query, values, *parameters]


CASES: dict[str, Callable[[World], Pair]] = {
    "din": lambda world: target(world, (80, 40)),
    "dot": lambda world: target(world, ()),
    "causal": causal,
    "hstu": hstu,
}


def measure(pair: Pair, rounds: int) -> dict[str, Any]:
    """CPU milliseconds of padded and ours, and their ratio, by quartiles over the rounds."""
    *ways, inputs = pair
    difference = float((ways[0]() - ways[1]()).detach().abs().max())
    assert difference < 1e-4, f"the ways differ by {difference}"

    def step(way: Callable[[], Tensor]) -> float:
        start = time.thread_time()
        out = way()
        torch.autograd.grad((out * out).sum(), inputs)
        return 1e3 * (time.thread_time() - start)

    for way in ways:
        step(way)
    padded, ours = [], []
    for number in range(rounds):
        # who comes second finds the inputs in the cache
        for way, times in ((ways[0], padded), (ways[1], ours))[:: 1 if number % 2 else -1]:
            times.append(step(way))
    ratios = [first / second for first, second in zip(padded, ours, strict=True)]
    return {
        "padded_ms": quartiles(padded),
        "ours_ms": quartiles(ours),
        "ratio": quartiles(ratios),
        "difference": difference,
    }


def misses(results: dict[str, Any]) -> str:
    """Return a sentence that names the cases that miss the mark at a quarter of fill."""
    ratios = {
        key.removesuffix(f", {QUARTER}").replace(",", ""): found["ratio"]["median"]
        for key, found in results.items()
        if key.endswith(f", {QUARTER}")
    }
    missed = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio < AT_QUARTER]
    what = f"the mark of {AT_QUARTER:g} times at a fill of {QUARTER}"
    if not missed:
        return f"No case misses {what}."
    return (
        f"{len(missed)} of {len(ratios)} cases miss {what}: {', '.join(missed)}; in a small batch "
        "the call of an operator costs as much as its work, whichever way is taken."
    )


def main() -> None:
    """Run the cases, print and write."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--grid", nargs="+", default=list(GRID), metavar="BxL")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    lines = [
        "| attention | B x L | fill | groups | padded, ms | ours, ms | times as fast | mark |",
        "|---" * 8 + "|",
    ]
    before = os.getloadavg()[0]
    for case in args.only:
        for size in args.grid:
            count, longest = map(int, size.split("x"))
            for fill in FILLS:
                world = world_of(count, longest, fill)
                found = measure(CASES[case](world), args.rounds)
                pairs = HSTU_CALL_PAIRS if case == "hstu" else CALL_PAIRS
                groups = JaggedGroups(world.offsets, len(world.times), call_pairs=pairs).groups
                results[f"{case}, {size}, {fill}"] = found | {"groups": len(groups)}
                ratio = found["ratio"]
                mark = AT_QUARTER if fill == QUARTER else AT_ANY
                lines.append(
                    f"| {case} | {size} | {fill} | "
                    f"{len(groups) if case in ('causal', 'hstu') else ''} | "
                    f"{found['padded_ms']['median']:.2f} | {found['ours_ms']['median']:.2f} | "
                    f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f}) | {mark} |"
                )
    lines.append(f"\n{misses(results)}")
    lines.append(
        f"\n{DIM} columns, {HEADS} heads, float32, forward and backward, CPU time of one thread, "
        f"medians (quartiles) of {args.rounds} rounds in which both take turns. The load average "
        f"was {before:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores."
    )
    report.show("sequences", results, lines)


if __name__ == "__main__":
    main()
