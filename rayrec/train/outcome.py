"""`FitOutcome`: what a rank has to show at the end of a training."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayrec.observe.profile_summary import Profile
from rayrec.observe.times import RankTimes
from rayrec.train.rank_run import RankRun
from rayrec.train.shaping import Best


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOutcome:
    """What a rank has to show at the end; the same on every rank.

    Attributes:
        steps: global steps done.
        rows, seconds: of this run's training over all ranks.
        train_loss: mean over the rows of the last window.
        metrics: scores on the evaluation data; empty without any.
        checkpoint: newest checkpoint, or None.
        stopped: it was asked to stop.
        handed_over: the ranks keep the tables for those that follow.
        early: why early stopping ended it, or "".
        best: the best evaluation until its end.
        times: of the mean step, by rank; empty where parts were not measured.
        profile: when the spec wanted one and the run was not stopped before it.
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
        """What a rank's run came to."""
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
