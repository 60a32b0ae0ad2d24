"""`FitOutcome`: the outcome of a training on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayrec.observe.profile_summary import Profile
from rayrec.observe.times import RankTimes
from rayrec.train.rank_run import RankRun
from rayrec.train.shaping import Best


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOutcome:
    """Outcome of a training; the same on every rank.

    Attributes:
        steps: global steps done.
        rows, seconds: rows of training and its duration in this run, over all ranks.
        train_loss: mean loss over the rows of the last window.
        metrics: scores of the evaluation data; empty without such data.
        checkpoint: newest checkpoint, or None.
        stopped: the run was asked to stop.
        handed_over: the ranks keep their tables for the next world.
        early: reason of early stopping, or "".
        best: best evaluation of the run.
        times: seconds of the mean step by part, by rank; empty where they were not measured.
        profile: profile of some steps, or None.
    """

    steps: int
    rows: int
    seconds: float
    train_loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: str | None = None
    stopped: bool = False
    handed_over: bool = False
    early: str = ""
    best: Best = field(default_factory=Best)
    times: tuple[RankTimes, ...] = ()
    profile: Profile | None = None

    @classmethod
    def of(
        cls,
        run: RankRun,
        metrics: dict[str, float],
        *,
        stopped: bool,
        times: tuple[RankTimes, ...] = (),
        profile: Profile | None = None,
    ) -> FitOutcome:
        """Return the outcome of a rank's run."""
        return cls(
            steps=run.step,
            rows=run.rows,
            seconds=run.seconds,
            train_loss=run.loss,
            metrics=metrics,
            checkpoint=run.newest,
            stopped=stopped,
            handed_over=run.handed_over,
            early=run.early,
            best=run.best,
            times=times,
            profile=profile,
        )
