"""`RunLoop`: the loop of a run over its windows of steps, and the acts between two windows.

A window is merged over the ranks and reported; then the run evaluates, saves, publishes and
profiles, as far as that is due, and goes on or stops. Every rank decides alike: all hold the same
spec and see the same sums, and what only one of them was asked (to stop, to save) travels with the
sums. The parts are values of the loop; who takes the steps is its caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rayrec.errors import ConfigError
from rayrec.observe.profile import Profiler
from rayrec.streams import StreamDataset
from rayrec.train import hand_over
from rayrec.train.checkpoints import Checkpoints
from rayrec.train.evaluation import evaluate
from rayrec.train.events import Evaluation
from rayrec.train.growth import Growth
from rayrec.train.publisher import Publisher
from rayrec.train.reports import Reports
from rayrec.train.run_state import LiveRun
from rayrec.train.stream_windows import StreamWindows
from rayrec.train.sync_points import RankPoints
from rayrec.train.window import Window


class RunLoop:
    """Loop of one rank of a run; all ranks call the same methods together.

    Args:
        points: sync points of the rank, or None.
    Attributes:
        saves: checkpoints; None until the loop has said what they hold.
        publisher: publications; None where the run publishes nothing.
        reports: reports of the merged windows.
        growth: growth of dynamic tables.
        stream: windows of the run's stream; None where other data are trained on.
        stopped: the run was stopped before its end.
        handed_over: the ranks keep their tables for the next world, and have not saved them.
    """

    def __init__(self, live: LiveRun, points: RankPoints | None) -> None:
        self._live, self._spec, self.points = live, live.spec, points
        self.reports, self.growth = Reports(live), Growth(live)
        data = live.spec.data
        self.stream = StreamWindows(live, data) if isinstance(data, StreamDataset) else None
        self.saves: Checkpoints | None = None
        self.publisher: Publisher | None = None
        self.stopped = self.handed_over = False
        self._waited_s = 0.0  # for rows, since the last window

    def windows(
        self,
        should_stop: Callable[[], bool],
        save_asked: Callable[[], bool],
        profiler: Profiler | None = None,
    ) -> Iterator[Window]:
        """Yield each window for its steps, and act at its end, until the run ends or is stopped.

        Windows end where an act is due, so none is missed, and no step has a test for it.

        Args:
            should_stop, save_asked: read at the end of each window; one rank's True counts for all.
        """
        live, schedule = self._live, self._live.schedule
        # an evaluation that a stop at this step had left out
        self.stopped = schedule.missed(live.step) and not self._score(should_stop)
        while live.step < self._spec.steps and not self.stopped and not schedule.early:
            # after a checkpoint: who resumes it scores the window before it trains on it
            began, self._waited_s = time.perf_counter(), 0.0
            if not self._begin_rows(should_stop):
                break
            before_s = time.perf_counter() - began - self._waited_s
            window = Window(live.device, live.world_size, self._spec.tasks, live.model.module)
            window.end = self._next_end(profiler)
            window.before_s = max(0.0, before_s)
            self.growth.begin()
            yield window  # the caller takes its steps
            merged = window.merge(
                lambda: should_stop() or live.hooks.error is not None,
                self.saves is not None and self.saves.written,
                save_asked(),
            )
            self.reports.add(window, merged)
            self.stopped = merged.stop
            if self.stream is not None:
                self.stream.after_window()
            # before a checkpoint, so that who resumes it has the rows of who goes on
            self.grow()
            if self.saves is not None:
                self.saves.before_evaluation(merged)
            if schedule.due(live.step, merged.seconds) and not self.stopped:
                self.stopped = not self._score(should_stop)
            if self.saves is not None:
                self.saves.after_window(merged)
                self._prune_stream(self.saves.newest)
            if self.points is not None:
                self.points.after_window(live)
            if self.publisher is not None:
                self.publisher.after_window(merged.passed_s, merged.rows)
            if profiler is not None:
                profiler.turn(live.step, self.stopped)

    def grow(self) -> None:
        """Double the tables that are due and filled; what follows begins with all rows."""
        grown = self.growth.after_step()
        if not grown:
            return
        anew = ""
        if self.publisher is not None:
            self.publisher.rebase()
            anew = "; servers that follow the run have to be started anew"
        if self.saves is not None:
            self.saves.rebase()
        for table, rows in grown.items():
            line = f"table {table!r} has {rows:,} rows after step {self._live.step}"
            self._live.note(line + anew)

    def end(self, going_to: Callable[[], int]) -> None:
        """Hand the tables over or save them, publish, and raise the error of a callback, if any.

        Args:
            going_to: returns the number of ranks that the run goes on with; 0 if it ends.
        """
        error = self._live.hooks.error
        if self.saves is not None:
            self.saves.ending = True
            may = self.stopped and hand_over.may_keep(
                None if error else going_to(),
                self._live.model.shard_states(),
                self._spec.sharding_group_size,
            )
            if may:
                self.saves.finish()
                hand_over.hold(self._live)
            self.handed_over = may
            self.saves.at_end(handed_over=may)
            self._prune_stream(self.saves.newest)
        if self.publisher is not None:
            self.publisher.at_end()
        self.finish()
        if self._live.hooks.error is not None:
            raise self._live.hooks.error

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of the run.

        Raises:
            ConfigError: the loop has not said what they hold.
        """
        if self.saves is None:
            raise ConfigError(
                "the loop did not say what checkpoints hold: call context.track(optimizer) after "
                "context.shard(module)."
            )
        return self.saves

    def finish(self) -> None:
        """Wait for the checkpoint and the publication that are being written, if any are."""
        if self.saves is not None:
            self.saves.finish()
        if self.publisher is not None:
            self.publisher.finish()

    def give_up(self) -> None:
        """Abandon a checkpoint or publication under way, since this rank leaves its world."""
        if self.saves is not None:
            self.saves.give_up()
        if self.publisher is not None:
            self.publisher.give_up()

    def _score(self, should_stop: Callable[[], bool]) -> bool:
        """Score the evaluation data during training; return False if stopped in between."""
        assert self._spec.eval_data is not None
        live, started = self._live, time.perf_counter()
        live.on_phase("evaluating")
        rows = live.schedule.rows
        scores = evaluate(live, self._spec.eval_data, None, should_stop, sample=rows)
        live.on_phase("training")
        if scores is None:
            return False
        judged = live.schedule.judge(live.step, scores, time.perf_counter() - started)
        live.announce(judged)
        if self.saves is not None:
            self.saves.after_evaluation(judged)
        return True

    def _begin_rows(self, should_stop: Callable[[], bool]) -> bool:
        """Wait for rows, and score the window in time that begins with the next step, if one does;
        return False if the run is to end before.
        """
        live, stream = self._live, self.stream
        if stream is not None and not stream.ready(should_stop, self._wait):
            self.stopped = not stream.ended
            return False
        window = live.cursor.window()
        if window is None:
            return True
        started = time.perf_counter()
        live.on_phase("scoring the next window")
        scores = evaluate(live, window.data, None, should_stop)
        live.on_phase("training")
        if scores is None:
            self.stopped = True
            return False
        seconds, rows = time.perf_counter() - started, window.data.num_rows
        live.announce(
            Evaluation(
                step=live.step, scores=scores, rows=rows, seconds=seconds, window=window.start
            )
        )
        return True

    def _prune_stream(self, newest: str | None) -> None:
        if self.stream is not None:
            self.stream.after_save(newest)

    def _wait(self, seconds: float) -> None:
        """Save and publish what is due by time while the stream gives no rows."""
        self._waited_s += seconds
        if self.saves is not None:
            self.saves.after_wait(seconds)
        if self.publisher is not None and self._live.step:
            self.publisher.after_wait(seconds)

    def _next_end(self, profiler: Profiler | None) -> int:
        """Return the last step of the next window, where an act or a report is due."""
        parts = (
            self._live.schedule,
            self.saves,
            self.points,
            self.publisher,
            self.growth,
            self._live.cursor,
        )
        ends = [part.next_step(self._live.step) for part in parts if part is not None]
        due = min([self._spec.steps, *(end for end in ends if end is not None)])
        end = due
        if profiler is not None and profiler.due is not None:
            end = min(end, profiler.due)
        # a report amid the profile would show in its trace
        if profiler is None or profiler.times is None:
            end = min(end, self.reports.next_step(due))
        return end
