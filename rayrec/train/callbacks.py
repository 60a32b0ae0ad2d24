"""`Callback`: what a user wants done at the moments of a run, in the driver or on every rank.

In the driver (`RunConfig(callbacks=...)`) a callback sees what the run says of itself: windows,
evaluations, checkpoints and the end. It may write files, draw, or talk to a tracking service; the
ranks do not wait for it. On the ranks (`RunConfig(rank_callbacks=...)`) every rank calls its own
copy inside its training thread, with the trainer, after every step; all ranks wait for the slowest.
A callback that raises ends the run: the ranks finish their window, save what the run keeps, and the
error names the callback, the rank and the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayrec.errors import CallbackError, RayrecError
from rayrec.train.events import (
    Evaluation,
    Failure,
    Noticed,
    ProgressReport,
    Recovered,
    Resized,
    Saved,
)

if TYPE_CHECKING:
    from rayrec.layout import ShardingPlan
    from rayrec.layout.estimates import RankEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What is known when the training of a run begins.

    Attributes:
        name: of the run.
        run_path: absolute folder or URI of the run, or None where it keeps nothing.
        steps: global steps at which it ends.
        first_step: steps that were done before, in an earlier life of the run.
        world_size: ranks.
        hosts: by rank, the name or address of its host.
        plan: where the tables lie.
        settings: the run's options as plain data, by name.
        predicted: by rank, seconds and bytes of a step by the planner's prices; empty without.
    """

    name: str
    run_path: str | None
    steps: int
    first_step: int
    world_size: int
    hosts: tuple[str, ...]
    plan: ShardingPlan
    settings: Mapping[str, Any] = field(default_factory=dict)
    predicted: tuple[RankEstimate, ...] = ()


class Callback:
    """Base of callbacks; override the moments that you want.

    `trainer` is this rank's `rayrec.train.RankTrainer` on the ranks, and None in the driver.
    """

    def on_start(self, info: RunInfo) -> None:
        """In the driver alone: the ranks and the plan are there, and training begins."""

    def on_step(self, step: int, trainer: Any = None) -> None:
        """On the ranks after every step; in the driver up to five times a second, with the newest
        finished step.
        """

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        """A window of training is over: loss, scores, rates, merged over the ranks."""

    def on_evaluation(self, evaluation: Evaluation, trainer: Any = None) -> None:
        """The evaluation data were scored, on the way or at the end."""

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        """A checkpoint is complete."""

    def on_failure(self, failure: Failure) -> None:
        """In the driver alone: a rank failed, and the run recovers; see `FailureConfig`."""

    def on_recovery(self, recovered: Recovered) -> None:
        """In the driver alone: the run goes on after a failure. What it told of later steps than
        `recovered.step` is told again.
        """

    def on_resize(self, resized: Resized) -> None:
        """In the driver alone: the run goes on with another number of ranks; see `ScalingConfig`.

        Every change of the ranks gives the ranks new copies of their callbacks.
        """

    def on_notice(self, noticed: Noticed) -> None:
        """In the driver alone: a node of the run will go, and the ranks leave it or save."""

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """Training is over; `error` is what ended it early, or None. It is called once."""


_MOMENTS: Mapping[type, str] = {
    ProgressReport: "on_window",
    Evaluation: "on_evaluation",
    Saved: "on_checkpoint",
    Failure: "on_failure",
    Recovered: "on_recovery",
    Resized: "on_resize",
    Noticed: "on_notice",
}


class Hooks:
    """Calls the callbacks of one process, until one of them raises.

    Args:
        callbacks: in the order in which they are called.
        where: the process, for messages: "rank 1", "the driver".
        trainer: given to every callback, on the ranks.
    Attributes:
        error: what the first callback that raised is to blame for, or None.
    """

    def __init__(self, callbacks: Sequence[Callback], where: str, trainer: Any = None) -> None:
        self._callbacks, self._where = tuple(callbacks), where
        self._more = {} if trainer is None else {"trainer": trainer}
        self.error: CallbackError | None = None
        self._started = self._ended = False
        # most callbacks look at no step, and steps are many
        self._of_steps = [c for c in callbacks if type(c).on_step is not Callback.on_step]

    def start(self, info: RunInfo) -> None:
        """Training begins; a callback that raises here ends the run before a step is done.

        Only the first call counts: a run that recovers may be planned once more.
        """
        if self._started:
            return
        self._started = True
        for callback in self._callbacks:
            try:
                callback.on_start(info)
            except RayrecError:
                raise
            except Exception as error:
                raise self._blamed(callback, "on_start", info.first_step, error) from error

    def step(self, step: int) -> None:
        """A step is done."""
        for callback in self._of_steps:
            self._call(callback, "on_step", step, step)

    def event(self, event: object) -> None:
        """A window, an evaluation, a checkpoint or a change of ranks is done, or a failure."""
        moment = _MOMENTS.get(type(event))
        if moment is None:
            return
        assert isinstance(
            event, ProgressReport | Evaluation | Saved | Failure | Recovered | Resized | Noticed
        )
        for callback in self._callbacks:
            self._call(callback, moment, event.step, event)

    def end(self, error: BaseException | None, step: int) -> None:
        """Training is over; every callback hears of it once, also one that raised before."""
        if self._ended:
            return
        self._ended = True
        first, self.error = self.error, None
        for callback in self._callbacks:
            self._call(callback, "on_end", step, error or first)
        self.error = first or self.error

    def _call(self, callback: Callback, moment: str, step: int, value: object) -> None:
        if self.error is not None and moment != "on_end":
            return
        try:
            getattr(callback, moment)(value, **self._more)
        except Exception as error:
            blamed = self._blamed(callback, moment, step, error)
            blamed.__cause__ = error
            self.error = self.error or blamed

    def _blamed(
        self, callback: Callback, moment: str, step: int, error: Exception
    ) -> CallbackError:
        words = str(error).strip().splitlines()
        said = f": {words[0]}" if words else ""
        return CallbackError(
            f"the callback {type(callback).__name__}.{moment} raised {type(error).__name__}{said} "
            f"in {self._where} after step {step}; the run was ended there"
        )
