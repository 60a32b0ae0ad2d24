"""Events of a run, as plain data: reports, evaluations, checkpoints, failures, changes of ranks.

Ranks and the driver put these into one stream. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """Report of one window of training, merged over all ranks.

    Attributes:
        step: global steps done.
        rows: rows trained on since the run began (this run, not those before a resume).
        rows_per_s: rows of the window by its wall clock seconds.
        loss: mean over the rows of the window.
        auc, ne: scores of the window's rows, predicted before each step's update; None when the
            window has one class only.
        data_wait: share of the window's time, by rank, in which training waited for the next
            batch to be read.
        scores: scores of the window's rows by name, those of every task and the user's own.
        learning_rates: "sparse" and "dense", of the window's last step.
        memory_bytes: resident memory of the process, by rank.
        step_s: mean seconds of a step of the window by part, of rank 0; empty on GPUs.
        ids: of every dynamic table, how many of its "rows" are "held" by ids and how many ids are
            "candidates" now; and of the window the ids that were "looked_up" and were "unknown",
            and how many were "admitted", "evicted" and "refused".
    """

    step: int
    rows: int
    rows_per_s: float
    loss: float
    auc: float | None = None
    ne: float | None = None
    data_wait: tuple[float, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: tuple[int, ...] = ()
    step_s: Mapping[str, float] = field(default_factory=dict)
    ids: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Scores of the evaluation data, or of a window before training on it; the same on every rank.

    Attributes:
        step: global steps done.
        scores: scores by name, such as "auc", or "click/auc" where there are several tasks.
        rows: number of scored rows. seconds: duration.
        best: the score that the run compares by is the best so far.
        final: the evaluation after training, of all rows.
        window: first value of the scored window in time; None where evaluation data were scored.
    """

    step: int
    scores: Mapping[str, float]
    rows: int
    seconds: float
    best: bool = False
    final: bool = False
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamProgress:
    """A window of a stream is open.

    Attributes:
        step: global steps done.
        window: its number. rows: its rows.
        cut_s: wall clock when it was cut, seconds since 1970.
        newest_event: greatest event time so far, seconds since 1970, or None.
        late: its rows with an event time before the newest of earlier windows.
        refused: rows, messages and files that were left out of it.
        lag_rows, lag_s: rows that waited in the source when it was cut, and the age of the oldest.
        best_auc: AUC of the true logits of its rows, where the stream has them.
    """

    step: int
    window: int
    rows: int
    cut_s: float
    newest_event: int | None = None
    late: int = 0
    refused: int = 0
    lag_rows: int | None = None
    lag_s: float | None = None
    best_auc: float | None = None

    def __str__(self) -> str:
        """Return the event as one line for the user."""
        parts = [f"window {self.window} of the stream: {self.rows:,} rows"]
        if self.lag_rows is not None:
            age = "" if not self.lag_s else f", the oldest {self.lag_s:.0f} s old"
            parts.append(f"{self.lag_rows:,} more wait{age}")
        odd = (self.late, "late"), (self.refused, "refused")
        parts += [f"{count:,} {what}" for count, what in odd if count]
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is complete.

    Attributes:
        step: global steps done.
        path: folder or URI of the checkpoint.
        seconds: time that training stood still for it.
        best: it holds the weights of the best evaluation so far.
    """

    step: int
    path: str
    seconds: float
    best: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rank failed, and the run goes on without having ended.

    Attributes:
        step: global steps done until then.
        rank, host: who failed first.
        cause: the error in one line.
        pause_s: seconds that the run waits until ranks start again, after repeated failures.
    """

    step: int
    rank: int
    host: str
    cause: str
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """A run goes on after a failure; what it told of later steps is taken back.

    Attributes:
        step: global steps done where it goes on.
        path: the checkpoint that it goes on from, or None where it began again.
        failed_step: global steps done at the failure.
        rank, host, cause: the failure.
        seconds: from the notice of the failure until all ranks had begun again.
        replaced: the process of the rank is a new one.
        dropped: the run goes on without the rank, with fewer ranks.
        in_memory: it goes on from a sync point that the ranks had in memory.
        spare: the process of the rank is that of a spare which stood by.
    """

    step: int
    path: str | None
    failed_step: int
    rank: int
    host: str
    cause: str
    seconds: float
    replaced: bool
    dropped: bool = False
    in_memory: bool = False
    spare: bool = False

    def __str__(self) -> str:
        """Return the event as one line for the user."""
        what = f"rank {self.rank} on {self.host or 'an unknown host'}"
        if self.replaced or self.dropped:
            # the likely reason follows in brackets
            cause = self.cause.partition(" (")[0]
            how = "replaced in" if self.replaced else "the others met again in"
            how = "a spare took its place in" if self.spare else how
            what += f" lost ({cause}) at step {self.failed_step}; {how}"
        else:
            what += f" failed ({self.cause}) at step {self.failed_step}; all ranks met again in"
        where = f"went on from step {self.step}"
        if self.in_memory:
            where += ", in memory"
        elif self.path is None:
            where = "began again, since there is no checkpoint of this run yet"
        return f"{what} {self.seconds:.1f} s; {where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resized:
    """A run goes on with another number of ranks; see `ScalingConfig.num_workers`.

    Attributes:
        step: global steps done where it goes on.
        ranks_before, ranks: number of ranks before and after.
        lost: ranks failed and got no other place; otherwise the run paused for the change.
        seconds: time that training stood still for a pause, from the request until all ranks had
            begun again; 0 where ranks failed, which `Recovered` reports.
    """

    step: int
    ranks_before: int
    ranks: int
    lost: bool
    seconds: float

    def __str__(self) -> str:
        """Return the event as one line for the user."""
        if self.lost:
            verb = "is" if self.ranks == 1 else "are"
            return (
                f"{self.ranks} of {self.ranks_before} ranks {verb} left; goes on with {self.ranks} "
                f"from step {self.step}"
            )
        how = "grown" if self.ranks > self.ranks_before else "shrunk"
        return f"{how} from {self.ranks_before} to {self.ranks} ranks at step {self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """A node of the run will go, as Ray says; see docs/resilience.md.

    Attributes:
        step: global steps done.
        host: address of the node; "" where the driver alone runs there.
        ranks: those on it.
        seconds: until it goes; None where nobody says when.
        answer: "leave": the ranks save and go on elsewhere; "move": they save, and leave later;
            "save": they save and stay; "none": the run keeps nothing.
    """

    step: int
    host: str
    ranks: tuple[int, ...]
    seconds: float | None
    answer: Literal["leave", "move", "save", "none"]

    def __str__(self) -> str:
        """Return the event as one line for the user."""
        what = "the driver's node"
        if self.ranks:
            plural = "" if len(self.ranks) == 1 else "s"
            what = f"{self.host} with rank{plural} {', '.join(map(str, self.ranks))}"
        when = "" if self.seconds is None else f" in {self.seconds:.0f} s"
        answers = {
            "leave": "the ranks save and go on without it",
            "move": "the ranks save, and leave it as soon as there is room elsewhere",
            "save": "the ranks save, so that nothing is lost with it",
            "none": "the run keeps no checkpoints, so its steps are lost with it",
        }
        return f"{what} will go{when}; {answers[self.answer]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """All ranks hold the model of the step where they begin to train.

    Attributes:
        step: global steps done there.
        path: the checkpoint that it was read from, or None.
        in_memory: it is a sync point that the ranks had in memory.
    """

    step: int
    path: str | None
    in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Milestone:
    """A part of the start-up is over.

    Attributes:
        name: part that is over.
        at: time, in seconds of the wall clock; clocks of other machines may differ.
    """

    name: str
    at: float = field(default_factory=time.time)


Event = (
    ProgressReport
    | Evaluation
    | StreamProgress
    | Saved
    | Failure
    | Recovered
    | Resized
    | Noticed
    | Began
    | Milestone
    | str
)
