"""After training: what a step really took, part by part and rank by rank, beside what the plan's prices promised.

The parts are those of `RankEstimate`. A rank that waits for others is not slow, so what it waited longer than the least waiting rank (whose
wait is the transfer itself) is shown apart. Where a part is far off, a finding names the constant to look at. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.estimates import RankEstimate
from rayrec.layout.rates import PARTS
from rayrec.layout.units import format_ms

FAR = 1.5  # times the prediction, either way
COUNTS = 0.1  # of the step: less is no finding
MAX_RANKS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Mean seconds of a step on one rank.

    Attributes:
        seconds: of every part, in the order of `PARTS`, waits included. waited: of them, spent waiting in collectives.
        step_s: of the whole step with dense layers and data.
        ahead: the input was exchanged beside the step before, so that it is no part of the step.
    """

    seconds: tuple[float, ...]
    waited: tuple[float, ...]
    step_s: float
    ahead: bool = False

    @property
    def rest_s(self) -> float:
        """Seconds of the step outside of all parts."""
        return self.step_s - sum(self.seconds[self.ahead :])


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Predicted and measured seconds of a step, by rank.

    Attributes:
        predicted: by the prices. measured: of the steps after the first.
    """

    predicted: tuple[RankEstimate, ...]
    measured: tuple[RankTimes, ...]

    @property
    def worked(self) -> tuple[tuple[float, ...], ...]:
        """Per rank, seconds of every part without waiting for slower ranks."""
        least = [min(rank.waited[i] for rank in self.measured) for i in range(len(PARTS))]
        return tuple(tuple(s - w + low for s, w, low in zip(r.seconds, r.waited, least, strict=True)) for r in self.measured)

    @property
    def waits(self) -> tuple[float, ...]:
        """Per rank, seconds of a step spent waiting for slower ranks."""
        each = zip(self.measured, self.worked, strict=True)
        return tuple(sum(r.seconds[r.ahead :]) - sum(work[r.ahead :]) for r, work in each)

    def findings(self) -> list[str]:
        """Parts and ranks that were far from the prediction, and what may be wrong; empty when all was near."""
        found = []
        step_s = max(rank.step_s for rank in self.measured)
        for i, part in enumerate(PARTS):
            if i == 0 and any(rank.ahead for rank in self.measured):
                continue  # beside the step its time says as much about the step as about itself
            took = _mean([work[i] for work in self.worked])
            wanted = _mean([getattr(rank, f"{part}_s") for rank in self.predicted])
            if abs(took - wanted) > COUNTS * step_s and not wanted / FAR <= took <= wanted * FAR:
                moved = _mean([rank.waited[i] for rank in self.measured]) > took / 2
                constant = "latency_s or the bandwidth between ranks" if moved else f"rates.{part}"
                found.append(
                    f"{part} took {format_ms(took)} ms instead of {format_ms(wanted)}: {constant} of the topology is off, or a pooling "
                    "factor is; calibrate, or measure the data with --profile"
                )
        ratios = [sum(work) / max(_embedding_s(rank), 1e-9) for work, rank in zip(self.worked, self.predicted, strict=True)]
        middle = sorted(ratios)[(len(ratios) - 1) // 2]
        for rank, ratio in enumerate(ratios):
            if ratio > FAR * middle:
                found.append(
                    f"rank {rank} took {ratio / middle:.1f} times as long as the others for what it was given: its machine is slower"
                )
        return found

    def report(self) -> str:
        """A table of milliseconds, "measured/predicted" by rank and part, and the findings."""
        head = f"{'rank':>5}" + "".join(f"{part:>13}" for part in PARTS) + f"{'waiting':>9}{'rest':>9}{'step':>9}"
        lines = ["Milliseconds of a step, measured/predicted:", head]
        for rank, (work, wait, times, told) in enumerate(zip(self.worked, self.waits, self.measured, self.predicted, strict=True)):
            if rank == MAX_RANKS:
                lines.append(f"... and {len(self.measured) - MAX_RANKS} more ranks")
                break
            cells = [f"{format_ms(s)}/{format_ms(getattr(told, f'{part}_s'))}" for part, s in zip(PARTS, work, strict=True)]
            others = (wait, times.rest_s, times.step_s)
            lines.append(f"{rank:>5}" + "".join(f"{cell:>13}" for cell in cells) + "".join(f"{format_ms(s):>9}" for s in others))
        if any(times.ahead for times in self.measured):
            lines.append("The input is exchanged beside the step before and is no part of a step.")
        return "\n".join(lines + [f"! {finding}" for finding in self.findings()])


def _embedding_s(rank: RankEstimate) -> float:
    return rank.total_s - rank.overhead_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
