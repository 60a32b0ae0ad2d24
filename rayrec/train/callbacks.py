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
    StreamProgress,
)

if TYPE_CHECKING:
    from rayrec.layout import ShardingPlan
    from rayrec.layout.estimates import RankEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """Facts of a run at the beginning of its training.

    Attributes:
        name: name of the run.
        run_path: absolute folder or URI of the run, or None where it keeps nothing.
        steps: global steps at which it ends.
        first_step: global steps done before, by an earlier run.
        world_size: number of ranks.
        hosts: name or address of the host, by rank.
        plan: sharding plan of the tables.
        settings: the run's options as plain data, by name.
        predicted: seconds and bytes of a step by the cost model, by rank; may be empty.
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
        """Called when training begins, once ranks and plan are there; in the driver alone."""

    def on_step(self, step: int, trainer: Any = None) -> None:
        """Called on the ranks after every step, and in the driver with the newest finished step up
        to five times a second.
        """

    def on_window(self, report: ProgressReport, trainer: Any = None) -> None:
        """Called when a window is over, with its loss, scores and rates merged over the ranks."""

    def on_evaluation(self, evaluation: Evaluation, trainer: Any = None) -> None:
        """Called when the evaluation data were scored, during training or at its end."""

    def on_stream(self, progress: StreamProgress, trainer: Any = None) -> None:
        """Called when a window of a stream is open, before it is scored and trained on."""

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        """Called when a checkpoint is complete."""

    def on_failure(self, failure: Failure) -> None:
        """Called when a rank failed and the run recovers; in the driver alone."""

    def on_recovery(self, recovered: Recovered) -> None:
        """Called when the run goes on after a failure; in the driver alone. Events of later steps
        than `recovered.step` are told again.
        """

    def on_resize(self, resized: Resized) -> None:
        """Called when the run goes on with another number of ranks; in the driver alone.

        Every change of the ranks gives the ranks new copies of their callbacks.
        """

    def on_notice(self, noticed: Noticed) -> None:
        """Called when a node of the run will be drained; in the driver alone."""

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """Called once when training is over; `error` is the error that ended it early, or None."""


_MOMENTS: Mapping[type, str] = {
    ProgressReport: "on_window",
    Evaluation: "on_evaluation",
    StreamProgress: "on_stream",
    Saved: "on_checkpoint",
    Failure: "on_failure",
    Recovered: "on_recovery",
    Resized: "on_resize",
    Noticed: "on_notice",
}


class Hooks:
    """Calls the callbacks of one process, until one of them raises.

    Args:
        callbacks: callbacks of this process, in the order of the calls.
        where: the process, for messages: "rank 1", "the driver".
        trainer: given to every callback, on the ranks.
    Attributes:
        error: error of the first callback that raised, or None.
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
        """Call `on_step`."""
        for callback in self._of_steps:
            self._call(callback, "on_step", step, step)

    def event(self, event: object) -> None:
        """Call the method for an event: a window, evaluation, checkpoint, failure or change."""
        moment = _MOMENTS.get(type(event))
        if moment is None:
            return
        step: int = event.step  # type: ignore[attr-defined]
        for callback in self._callbacks:
            self._call(callback, moment, step, event)

    def end(self, error: BaseException | None, step: int) -> None:
        """Call `on_end` of every callback once, also of one that raised before."""
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
