"""Progress of the ranks in words, for the watch on stalls, and lines about silent ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayrec.driver.commands import At, Command, ReportStep, Tell
from rayrec.driver.views import Observation

SILENT_S = 10.0


class RunProgress:
    """Progress of the ranks of one run.

    Attributes:
        step: newest finished step of this attempt.
        trains: a step was finished in this attempt.
    """

    def __init__(self) -> None:
        self._progress: object = None
        self._told_silent: set[int] = set()
        self.step = 0
        self.trains = False

    def go_back(self, step: int) -> None:
        """Reset to an earlier step, from which the run goes on."""
        self.step = step
        self.trains = False
        self._told_silent.clear()

    def see(self, ranks: Sequence[Observation]) -> Iterator[Command]:
        """Record progress since the last look; yield the phase of the ranks, and lines."""
        yield from self._tell_silent(ranks)
        polls = [rank.poll for rank in ranks]
        progress = [(p.state, p.phase, p.step, p.beats) if p is not None else None for p in polls]
        # Answers without news are no progress, or a run that hangs would look alive.
        if progress == self._progress:
            return
        self._progress = progress
        doing: dict[str, list[str]] = {}
        for rank, poll in enumerate(polls):
            what = "starting" if poll is None else poll.phase or poll.state
            doing.setdefault(what, []).append(str(rank))
        if len(doing) == 1:
            where = f"all ranks are {next(iter(doing))}"
        else:
            where = "; ".join(f"rank {', '.join(who)} is {what}" for what, who in doing.items())
        step = max((poll.step for poll in polls if poll is not None), default=0)
        if step > self.step:
            self.step = step
            self.trains = True
            yield ReportStep(step=step)
        yield At(where=f"{where}, after step {step}" if step else where)

    def _tell_silent(self, ranks: Sequence[Observation]) -> Iterator[Command]:
        for rank in ranks:
            if rank.silent_s > SILENT_S and rank.rank not in self._told_silent:
                self._told_silent.add(rank.rank)
                silent_s = f"{rank.silent_s:.0f} s"
                yield Tell(event=f"rank {rank.rank} on {rank.host} has not answered for {silent_s}")
            elif rank.silent_s < SILENT_S:
                self._told_silent.discard(rank.rank)
