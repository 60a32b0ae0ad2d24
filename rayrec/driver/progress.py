"""Progress of the ranks in words, for the watch on stalls, and lines about silent ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayrec.driver.blame import Observation
from rayrec.driver.stall import StallWatch
from rayrec.train.events import Event

SILENT_S = 10.0


class RunProgress:
    """Tracks the progress of the ranks of one run.

    Args:
        watch: stall watch, which hears of every sign of progress.
        on_event: receives a line about a rank that does not answer.
        on_step: receives the newest finished step whenever it changes.
    Attributes:
        step: newest finished step of this attempt.
        trains: a step was finished in this attempt.
    """

    def __init__(
        self, watch: StallWatch, on_event: Callable[[Event], None], on_step: Callable[[int], None]
    ) -> None:
        self._watch, self._on_event, self._on_step = watch, on_event, on_step
        self._progress: object = None
        self._told_silent: set[int] = set()
        self.step = 0
        self.trains = False

    def go_back(self, step: int) -> None:
        """Reset to an earlier step, from which the run goes on."""
        self.step = step
        self.trains = False
        self._told_silent.clear()

    def see(self, ranks: Sequence[Observation]) -> None:
        """Record progress since the last look, and the current phase of each rank."""
        self._tell_silent(ranks)
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
            self._on_step(step)
        self._watch.at(f"{where}, after step {step}" if step else where)

    def _tell_silent(self, ranks: Sequence[Observation]) -> None:
        for rank in ranks:
            if rank.silent_s > SILENT_S and rank.rank not in self._told_silent:
                self._told_silent.add(rank.rank)
                self._on_event(
                    f"rank {rank.rank} on {rank.host} has not answered for {rank.silent_s:.0f} s"
                )
            elif rank.silent_s < SILENT_S:
                self._told_silent.discard(rank.rank)
