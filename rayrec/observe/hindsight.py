"""After training: what a step really took beside what the plan's prices promised.

The parts are those of `RankEstimate`; data and dense layers have no price and are only shown. A
rank that waits for others is not slow, so what it waited longer than the least waiting rank (whose
wait is the transfer itself) is shown apart. Where a part is far off, a finding names the constant
to look at. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayrec.layout.estimates import RankEstimate
from rayrec.layout.rates import PARTS
from rayrec.layout.units import format_ms
from rayrec.observe.times import STEP_PARTS, PartTimes, RankTimes

# a part is far off by this factor, either way
FAR = 1.5
# a smaller share of the step is no finding
COUNTS = 0.1
MAX_RANKS = 32
# columns without a price
OTHERS = ("data", "dense", "waiting", "rest", "step")


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Predicted and measured seconds of a step, by rank.

    Attributes:
        predicted: times by the cost model. measured: times of the steps after the first.
    """

    predicted: tuple[RankEstimate, ...]
    measured: tuple[RankTimes, ...]

    @property
    def worked(self) -> tuple[dict[str, float], ...]:
        """Seconds of every part without waiting for slower ranks, by rank.

        Parts that ran ahead count with their seconds beside the step.
        """
        # the rank that waits least waits for the transfer itself
        least = {}
        for part in STEP_PARTS:
            least[part] = min(_waited(rank.parts[part]) for rank in self.measured)
        worked = []
        for rank in self.measured:
            parts = rank.parts.items()
            worked.append({name: _seconds(t) - _waited(t) + least[name] for name, t in parts})
        return tuple(worked)

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds of a step spent waiting for slower ranks, by rank."""
        least = 0.0
        for part in STEP_PARTS:
            least += min(rank.parts[part].waited for rank in self.measured)
        return tuple(rank.waited_s - least for rank in self.measured)

    def findings(self) -> list[str]:
        """Return lines about parts and ranks far from the prediction, with likely causes."""
        findings = []
        step_s = max(rank.step_s for rank in self.measured)
        # the time of a part beside the step before depends on that step as much as on the part, and
        # prices may have left it out
        ahead = {part for rank in self.measured for part in PARTS if rank.parts[part].ahead}
        priced = [part for part in PARTS if part not in ahead]
        worked = self.worked
        for part in priced:
            took = _mean([work[part] for work in worked])
            wanted = _mean([getattr(rank, f"{part}_s") for rank in self.predicted])
            if abs(took - wanted) > COUNTS * step_s and not wanted / FAR <= took <= wanted * FAR:
                moved = _mean([rank.parts[part].waited for rank in self.measured]) > took / 2
                constant = "latency_s or the bandwidth between ranks" if moved else f"rates.{part}"
                findings.append(
                    f"{part} took {format_ms(took)} ms instead of {format_ms(wanted)}: {constant} "
                    "of the topology is off, or a pooling factor or skew is; calibrate, or measure "
                    "the data with rayrec plan --profile"
                )
        return findings + self._slow_ranks(priced, step_s)

    def _slow_ranks(self, priced: Sequence[str], step_s: float) -> list[str]:
        """Return lines about stragglers: ranks that took much longer for the same predicted work.

        A rank without shards is predicted to do nothing, and what little it does is no sign of a
        slow machine. So only ranks count whose excess is a noticeable part of a step.
        """
        took: list[float] = []
        told: list[float] = []
        for work, estimate in zip(self.worked, self.predicted, strict=True):
            took.append(sum(work[part] for part in priced))
            told.append(sum(getattr(estimate, f"{part}_s") for part in priced))
        most = max(told)
        busy = [rank for rank, wanted in enumerate(told) if wanted > COUNTS * most]
        if not busy:
            return []
        ratios = {rank: took[rank] / told[rank] for rank in busy}
        middle = sorted(ratios.values())[(len(busy) - 1) // 2]
        findings = []
        for rank, ratio in ratios.items():
            if ratio > FAR * middle and took[rank] - middle * told[rank] > COUNTS * step_s:
                findings.append(
                    f"rank {rank} took {ratio / middle:.1f} times as long as the others for what "
                    "it was given: its machine is slower"
                )
        return findings

    def report(self) -> str:
        """Return a table of ms, "measured/predicted" by rank and part, and the findings."""
        heads = "".join(f"{part:>12}" for part in PARTS)
        others = "".join(f"{name:>{_width(name)}}" for name in OTHERS)
        lines = [
            "Milliseconds of a step, measured/predicted; dense with its backward and optimizer:",
            f"{'rank':>4}{heads}{others}",
        ]
        ranks = zip(self.worked, self.waits, self.measured, self.predicted, strict=True)
        for rank, (work, wait, times, told) in enumerate(ranks):
            if rank == MAX_RANKS:
                lines.append(f"... and {len(self.measured) - MAX_RANKS} more ranks")
                break
            line = f"{rank:>4}"
            for part in PARTS:
                cell = f"{format_ms(work[part])}/{format_ms(getattr(told, f'{part}_s'))}"
                line += f"{cell:>12}"
            dense = work["dense"] + work["backward"] + work["optimizer"]
            seconds = (work["data"], dense, wait, times.rest_s, times.step_s)
            for name, value in zip(OTHERS, seconds, strict=True):
                line += f"{format_ms(value):>{_width(name)}}"
            lines.append(line)
        if any(times.ahead for times in self.measured):
            lines.append(
                "Batches are read and their input exchanged beside the step before; the input is "
                "no part of a step."
            )
        return "\n".join([*lines, *(f"! {finding}" for finding in self.findings())])


def _seconds(times: PartTimes) -> float:
    return times.ahead or times.seconds


def _waited(times: PartTimes) -> float:
    return times.ahead_waited if times.ahead else times.waited


def _width(name: str) -> int:
    return max(6, len(name)) + 1


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
