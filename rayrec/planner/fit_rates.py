"""Constants of a topology from measured steps: the non-negative ones that fit best.

A sample is a step of some plan on one rank: what the cost model counts of each part, and the
seconds that the part really took there. The model is linear in its constants, so each part is a
small least-squares problem, with residuals relative to the whole step. What can be measured
anywhere can be fitted anywhere: no torch here. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from rayrec.errors import ConfigError
from rayrec.layout.rates import PARTS, PartRates
from rayrec.layout.topology import Topology
from rayrec.planner.amounts import Amounts, StepAmounts
from rayrec.planner.costs import CostModel

SWEEPS = 20_000  # of the coordinate descent; a few hundred suffice


@dataclass(frozen=True, slots=True)
class StepSample:
    """One kind of step on one rank.

    Attributes:
        amounts: work of the whole plan on this rank, as owner and as home.
        seconds: seconds of every part in the order of `PARTS`, without waiting for other ranks.
        step_s: seconds of the whole step, without such waits either.
    """

    amounts: StepAmounts
    seconds: tuple[float, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class Links:
    """Measured speeds of the exchange and the memory.

    Attributes:
        memory_bw: bytes/s of random rows. latency_s: seconds of a collective without bytes.
        near_byte_s, far_byte_s: seconds per byte from ranks of the host, and of other hosts; None
            where there are none.
    """

    memory_bw: float
    latency_s: float
    near_byte_s: float | None
    far_byte_s: float | None


NO_WIRE = 1e30  # bytes/s of links that take no time
# in shared memory nothing but the latency is left: peers read where it was written
LEAST_BYTE_S = 1e-12


def fit_topology(topology: Topology, links: Links, samples: Sequence[StepSample]) -> Topology:
    """The topology with its constants replaced by those that explain the samples.

    Args:
        topology: hosts, memory and the share of the input that is hidden are kept: steps are
            measured one by one.
        samples: steps of some plans, on all ranks.
    Raises:
        ConfigError: nothing was measured.
    """
    if not samples:
        raise ConfigError("a calibration needs at least one measured step.")
    parts = {part: _fit_part(i, samples, links.memory_bw) for i, part in enumerate(PARTS)}
    fitted = replace(
        topology,
        memory_bw=links.memory_bw,
        latency_s=max(links.latency_s, 0.0),
        rates=replace(topology.rates, **parts, step_s=0.0),
    )
    if links.near_byte_s is not None:
        fitted = replace(fitted, intra_host_bw=1 / max(links.near_byte_s, LEAST_BYTE_S))
    if links.far_byte_s is not None:
        fitted = replace(fitted, inter_host_bw=1 / max(links.far_byte_s, LEAST_BYTE_S))
    # What no part explains is a constant, and a share of the rest: step_s and share solve
    # step = step_s + (1 + share) * (the parts' seconds, without waits), divided by the step.
    at_once = replace(fitted, latency_s=0.0, intra_host_bw=NO_WIRE, inter_host_bw=NO_WIRE)
    alone = CostModel(replace(at_once, input_hidden=0.0))
    known = [(alone.seconds(s.amounts) + alone.fixed_cost()).total_s / s.step_s for s in samples]
    terms = [[1 / s.step_s, part] for s, part in zip(samples, known, strict=True)]
    step_s, share = non_negative(terms, [1 - part for part in known])
    return replace(fitted, rates=replace(fitted.rates.times(1 + share), step_s=step_s))


def _fit_part(index: int, samples: Sequence[StepSample], memory_bw: float) -> PartRates:
    rows, wanted = [], []
    for sample in samples:
        terms = _terms(sample.amounts[index], memory_bw)
        rows.append([value / sample.step_s for value in terms])
        wanted.append(sample.seconds[index] / sample.step_s)
    names = [f.name for f in fields(PartRates)]
    return PartRates(**dict(zip(names, non_negative(rows, wanted), strict=True)))


def _terms(a: Amounts, memory_bw: float) -> list[float]:
    """Return the factors of the fields of `PartRates`, in their order."""
    return [1.0, a.slots, a.home_slots, a.items, a.stream / memory_bw, a.rows / memory_bw]


def non_negative(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """The x >= 0 that minimizes |rows x - wanted|^2; 0 for columns of zeros.

    It is found by coordinate descent on the normal equations of the scaled columns.
    """
    width = len(rows[0])
    scale = [sum(row[j] ** 2 for row in rows) ** 0.5 for j in range(width)]
    used = [j for j in range(width) if scale[j] > 0]
    gram: dict[int, dict[int, float]] = {j: {} for j in used}
    for j, k in product(used, used):
        gram[j][k] = sum(r[j] * r[k] for r in rows) / (scale[j] * scale[k])
    aim = {j: sum(r[j] * w for r, w in zip(rows, wanted, strict=True)) / scale[j] for j in used}
    # Columns of length 1 make the steps of the descent comparable; x is scaled back at the end.
    x = dict.fromkeys(used, 0.0)
    for _ in range(SWEEPS):
        moved = 0.0
        for j in used:
            new = max(0.0, x[j] + aim[j] - sum(gram[j][k] * x[k] for k in used))
            moved, x[j] = max(moved, abs(new - x[j])), new
        if moved < 1e-12:
            break
    return [x[j] / scale[j] if j in x else 0.0 for j in range(width)]
