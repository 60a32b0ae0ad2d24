"""`ScoringQueue`: requests that wait, and the thread that scores whatever waits.

There is no timer. When the thread is free it takes the requests that wait, up to a bound of rows,
reads those with equal columns as one table and scores it in one call. So a lone request waits for
nobody, and under load the price of a call is shared. A user with candidates is a call of its own,
in which the user's features are looked up once. Where such a table cannot be read, its
requests are scored one by one, so that an error names the row of its own request and no other
request has it.

The queue has a bound in rows and in bytes. A request whose caller is gone, or whose time has
passed, leaves it at once, and makes room for others. Everything but the scoring runs in the event
loop's thread.

    # B rows of a request
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from torch import Tensor

from rayrec.errors import DeadlineError, OverloadedError, ServingError, UnavailableError
from rayrec.machine.stacks import thread_stacks
from rayrec.serve.predictor import Predictor
from rayrec.serve.server.body import Asked
from rayrec.serve.server.metrics import Metrics
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.telling import say
from rayrec.serve.weights import Weights
from rayrec.serve.wire import Answer, Scores

_HANGS_S = 60.0  # a call that has not returned by then never will
_TURN_S = 1.0  # between two looks at it


@dataclass(slots=True, eq=False)
class _Job:
    asked: Asked
    cost: int
    future: asyncio.Future[Answer]


Outcome = Answer | Exception


class ScoringQueue:
    """Queue of requests of one replica and its thread; made inside of a running event loop.

    Args:
        predictor: scores; called from the thread alone.
        failed: called in the event loop when the thread ends by a defect, or hangs in a call.
    """

    def __init__(
        self,
        predictor: Predictor,
        settings: ServerSettings,
        metrics: Metrics,
        failed: Callable[[], None],
    ) -> None:
        self._predictor, self._settings, self._metrics = predictor, settings, metrics
        self._loop, self._failed = asyncio.get_running_loop(), failed
        # in the order in which they came
        self._jobs: OrderedDict[_Job, None] = OrderedDict()
        self._rows = self._bytes = 0
        self._call: list[_Job] = []  # requests that are being scored
        self._changed = threading.Condition()
        self._is_closed = self._is_ended = False
        self._weights: Weights | None = None
        self._count_ids(predictor.weights)
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()
        self._watching = self._loop.create_task(self._watch())

    async def score(self, asked: Asked, waited_s: float = 0.0) -> Answer:
        """Wait for the scores of the B rows of a request.

        Args:
            waited_s: seconds of the request's time that have passed.
        Raises:
            OverloadedError: too much waits already.
            DeadlineError: the time passed first; a request that still waits is not scored then.
            UnavailableError: the replica is about to end.
            InputError: names column, row and value of the first bad entry.
        """
        job = self._add(asked)
        if asked.timeout_s is None:
            return await job.future
        left_s = max(0.0, asked.timeout_s - waited_s)
        late = DeadlineError(f"the request had {asked.timeout_s * 1000:.0f} ms, which have passed.")
        timer = self._loop.call_later(left_s, _refuse, job, late)
        try:
            return await job.future
        finally:
            timer.cancel()

    def _add(self, asked: Asked) -> _Job:
        if self._is_closed:
            raise UnavailableError("the replica is about to end; ask again for another one.")
        # an empty request waits as well
        cost, size = max(1, asked.rows.num_rows), asked.size
        most = self._settings
        is_full = self._rows + cost > most.queue_rows or self._bytes + size > most.queue_bytes
        # a request that is larger than the whole queue is taken when nothing else waits
        if is_full and self._rows:
            raise OverloadedError(
                f"{self._rows} rows of {self._bytes} bytes wait already, and {most.queue_rows} "
                f"rows or {most.queue_bytes} bytes may; ask again a little later."
            )
        job = _Job(asked, cost, self._loop.create_future())
        job.future.add_done_callback(partial(self._leave, job))
        with self._changed:
            self._jobs[job] = None
            self._rows += cost
            self._bytes += size
            self._changed.notify()
        self._metrics.queue_rows.set(self._rows)
        return job

    def _leave(self, job: _Job, _: object) -> None:
        """Take out a request that is done; most were taken by the thread before."""
        with self._changed:
            if job not in self._jobs:
                return
            del self._jobs[job]
        self._give_back([job])

    async def drain(self) -> None:
        """Take no more requests, and wait until all that wait have their answer."""
        with self._changed:
            self._is_closed = True
        while self._rows:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """End the thread, after the call that it is in."""
        self._watching.cancel()
        if self._is_ended:  # nobody waits for a call that hangs
            return
        with self._changed:
            self._is_closed = self._is_ended = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._is_ended)
                    if self._is_ended:
                        return
                    jobs = self._call = self._take()
                outcomes = self._outcomes([job for job in jobs if not job.future.done()])
                self._call = []
                self._loop.call_soon_threadsafe(self._finish, jobs, outcomes)
        except BaseException:
            self._loop.call_soon_threadsafe(self._fail)
            raise

    async def _watch(self) -> None:
        """Fail where a call hangs, by the turns it takes: time of a stopped process is none."""
        call, turns = self._call, 0
        while turns * _TURN_S < _HANGS_S:
            await asyncio.sleep(_TURN_S)
            turns = turns + 1 if call and call is self._call else 0
            call = self._call
        what = f"a call of the model has not returned for {_HANGS_S:g} s; the replica ends"
        say(f"{what}\n{thread_stacks()}")
        self._fail()

    def _fail(self) -> None:
        """Answer all requests, since nothing is scored any more."""
        with self._changed:
            self._is_closed = self._is_ended = True
            waiting = list(self._jobs)
        for job in self._call:  # not Unavailable: it shall not be the end of another replica
            _refuse(job, ServingError("the call of the model that scored the request failed."))
        for job in waiting:
            _refuse(job, UnavailableError("the replica ends; ask again for another one."))
        self._failed()

    def _take(self) -> list[_Job]:
        """Take the requests that wait longest, up to the bound of rows; at least one."""
        jobs, rows = list[_Job](), 0
        for job in self._jobs:
            rows += job.cost
            if jobs and rows > self._settings.max_batch_rows:
                break
            jobs.append(job)
        for job in jobs:
            del self._jobs[job]
        return jobs

    def _outcomes(self, jobs: list[_Job]) -> list[tuple[_Job, Outcome]]:
        """Score requests; those with equal columns and options together, and each user alone."""
        groups: list[list[_Job]] = []
        for job in jobs:
            for group in groups:
                if _go_together(group[0].asked, job.asked):
                    group.append(job)
                    break
            else:
                groups.append([job])
        return [pair for group in groups for pair in self._together(group)]

    def _together(self, jobs: list[_Job]) -> list[tuple[_Job, Outcome]]:
        try:
            scores, weights = self._score([job.asked for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                return [(jobs[0], error)]
            return [pair for job in jobs for pair in self._together([job])]
        told = weights.name, weights.step, weights.event_time, weights.ingest_time
        outcomes: list[tuple[_Job, Outcome]] = []
        start = 0
        for job in jobs:
            stop = start + job.asked.rows.num_rows
            outcomes.append((job, Answer(_cut(scores, start, stop), *told)))
            start = stop
        return outcomes

    def _score(self, parts: list[Asked]) -> tuple[Scores, Weights]:
        """(sum of B,) float32, or by name of the task; and the weights that gave them."""
        first = parts[0]
        rows, user = first.rows, first.user
        if len(parts) > 1:
            whole = pa.Table.from_batches([part.rows for part in parts]).combine_chunks()
            (rows,) = whole.to_batches() or [rows]
        if user is not None:
            request = self._predictor.requests.of_user(user, rows)
        elif first.ranks:
            request = self._predictor.requests.best(rows, first.k, first.masked)
        else:
            request = self._predictor.requests.read(rows)
        scores, weights = self._predictor.score_and_weights(request)
        lengths = request.ids.lengths()
        self._metrics.scored(len(parts), rows.num_rows, int((lengths == 0).sum()))
        self._count_ids(weights)
        if isinstance(scores, Tensor):
            return scores.numpy(), weights
        return {task: part.numpy() for task, part in scores.items()}, weights

    def _count_ids(self, weights: Weights) -> None:
        """Count the ids that had no row in a call, and those that have one in new weights."""
        for name, ids in weights.ids().items():
            self._metrics.missed(name, ids.unknown)
            ids.unknown = 0
        if weights is not self._weights:
            self._weights = weights
            self._metrics.has_ids({name: ids.known() for name, ids in weights.ids().items()})

    def _finish(self, jobs: list[_Job], outcomes: list[tuple[_Job, Outcome]]) -> None:
        for job, outcome in outcomes:
            if job.future.done():
                continue
            if isinstance(outcome, Exception):
                job.future.set_exception(outcome)
            else:
                job.future.set_result(outcome)
        self._give_back(jobs)

    def _give_back(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._rows -= job.cost
            self._bytes -= job.asked.size
        self._metrics.queue_rows.set(self._rows)


def _go_together(one: Asked, other: Asked) -> bool:
    """Return True if one call scores the rows of both."""
    if one.user is not None or other.user is not None:
        return False
    options = (one.k, one.masked) == (other.k, other.masked)
    return options and bool(one.rows.schema.equals(other.rows.schema))


def _cut(scores: Scores, start: int, stop: int) -> Scores:
    if isinstance(scores, np.ndarray):
        return scores[start:stop]
    return {name: part[start:stop] for name, part in scores.items()}


def _refuse(job: _Job, error: ServingError) -> None:
    if not job.future.done():
        job.future.set_exception(error)
