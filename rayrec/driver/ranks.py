"""Ranks of a driver, as Ray actors or in this process, and the tasks that they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rayrec.driver.config import RunConfig
from rayrec.driver.controller import Controller
from rayrec.driver.display import Display
from rayrec.driver.local import LOCAL_HOST, run_here
from rayrec.driver.planning import discover
from rayrec.driver.rank_group import Prepared, Ran, RankGroup
from rayrec.driver.run import Rules
from rayrec.driver.run_folder import RunFolder
from rayrec.driver.run_log import RunLog
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.scaling_checks import check_resize
from rayrec.errors import ConfigError
from rayrec.layout import Topology
from rayrec.train.callbacks import Hooks
from rayrec.train.events import Event

if TYPE_CHECKING:
    from rayrec.driver.attempts import Attempts

# by what they are, local files that every host must see, with their sizes
Files = Mapping[str, Sequence[tuple[str, int]]]


class Ranks:
    """Ranks of a driver, which exist while they run a task.

    Args:
        scaling: number and resources of the ranks; 0 workers is one rank in this process.
        run: timeouts, and the number of failures that a run recovers from.
    """

    def __init__(self, scaling: ScalingConfig, run: RunConfig) -> None:
        self.scaling, self._run = scaling, run
        self._stop = threading.Event()
        self._controller: Controller | None = None

    def begin(self) -> None:
        """Forget a request to stop, which belongs to the run of its time."""
        self._stop.clear()

    def request_stop(self) -> None:
        """Have the ranks end early, after a last checkpoint; any thread may call it."""
        self._stop.set()

    def resize(self, ranks: int) -> None:
        """Change the number of ranks of the running training, for `Driver.resize`.

        Raises:
            ConfigError: none is running, or the number may not change, or not to this one.
        """
        check_resize(ranks, self._run, self.scaling)
        controller = self._controller
        if controller is None or not controller.rules.resizes:
            raise ConfigError(
                f"Driver.resize({ranks}): no fit is running; call it from a callback or another "
                "thread while Driver.fit runs."
            )
        controller.resize(ranks)

    def do(
        self,
        display: Display,
        prepare: Callable[[Topology, Sequence[str]], Prepared],
        *,
        log: RunLog | None = None,
        folder: RunFolder | None = None,
        files: Files | None = None,
        hooks: Hooks | None = None,
        attempts: Attempts | None = None,
    ) -> Ran:
        """Run the task that `prepare` returns on the ranks.

        Args:
            prepare: (topology, host of each rank) -> the task.
            folder: the run's folder, which every rank must share.
            files: local files that every host must see.
            hooks: callbacks of the run.
            attempts: prepares each attempt after a failure; without it the first one is the end.
        """
        calls = hooks or Hooks((), "the driver")
        run, scaling = self._run, self.scaling

        def told(prepared: Prepared) -> Prepared:
            # nothing is written before every host is known to share the folder
            if prepared.info is not None:
                calls.start(prepared.info)
            return prepared

        def here(topology: Topology) -> Prepared:
            return told(prepare(topology, [LOCAL_HOST]))

        def look(group: RankGroup) -> Prepared:
            topology = discover(group)
            prepared = prepare(topology, [address.host for address in group.addresses])
            if folder is not None:
                group.see_folder(folder.path, folder.token)
            for what, paths in (files or {}).items():
                group.see_files(paths, what)
            return told(prepared)

        def on_event(event: Event) -> None:
            display.event(event)
            if attempts is not None:
                attempts.see(event)
            calls.event(event)
            if calls.error is not None:
                self.request_stop()

        def on_step(step: int) -> None:
            if folder is not None:
                # one rank in this process polls nothing
                folder.check()
            calls.step(step)
            if calls.error is not None:
                self.request_stop()

        try:
            if scaling.most == 0:
                return run_here(scaling, here, on_event, self._stop.is_set, run.timeout_s, on_step)
            self._controller = Controller(
                self._rules(trains=attempts is not None),
                look if attempts is None else partial(attempts.prepare, look),
                on_event,
                stop=self._stop,
                log=log,
                on_poll=folder.check if folder is not None else lambda: None,
                on_step=on_step,
                record_in=run.run_path if run.failure.log_decisions else None,
            )
            return self._controller.run()
        finally:
            self._controller = None
            display.close()

    def _rules(self, *, trains: bool) -> Rules:
        """Return the rules of a run; what does not train has nothing to go on from."""
        run = self._run
        return Rules(
            scaling=self.scaling,
            timeout_s=run.timeout_s,
            heartbeat_s=run.heartbeat_timeout_s,
            setup_timeout_s=run.setup_timeout_s,
            stop_timeout_s=run.stop_timeout_s,
            max_failures=run.failure.max_failures if trains else 0,
            max_preemptions=run.failure.max_preemptions,
            resizes=trains,
            keeps=trains and run.run_path is not None,
        )
