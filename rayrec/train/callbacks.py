"""`Callback`: what a user wants done at the moments of a run, in the driver or on every rank.

In the driver (`RunConfig(callbacks=...)`) a callback sees what the run says of itself: windows,
evaluations, checkpoints and the end. It may write files, draw, or talk to a tracking service; the
ranks do not wait for it. On the ranks (`RunConfig(rank_callbacks=...)`) every rank calls its own
copy inside its training thread, with the trainer, after every step; all ranks wait for the slowest.
A callback that raises ends the run: the ranks finish their window, save what the run keeps, and the
error names the callback, the rank and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayrec.train.progress import Evaluation, ProgressReport, Saved

if TYPE_CHECKING:
    from rayrec.layout import ShardingPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What is known when the training of a run begins.

    Attributes:
        name: of the run.
        run_path: absolute folder or URI of the run, or None where it keeps nothing.
        steps: global steps at which it ends.
        first_step: steps that were done before, in an earlier life of the run.
        world_size: ranks.
        hosts: the host of every rank; empty where they are not known.
        plan: where the tables lie.
        settings: the run's options as plain data, by name.
    """

    name: str
    run_path: str | None
    steps: int
    first_step: int
    world_size: int
    hosts: tuple[str, ...]
    plan: ShardingPlan
    settings: Mapping[str, Any] = field(default_factory=dict)


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

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """Training is over; `error` is what ended it early, or None. It is called once."""


def of_rank(
    callbacks: tuple[Callback, ...], trainer: Any
) -> tuple[tuple[Callback, Callable[..., None]], ...]:
    """The callbacks of a rank that look at every step, with their bound method."""
    overriding = (c for c in callbacks if type(c).on_step is not Callback.on_step)
    return tuple((c, c.on_step) for c in overriding)
