"""`Driver`: from a model function and a dataset to a trained model on the ranks of a Ray cluster.

It checks what can be checked without a cluster, then lets a `Controller` connect, place, plan, run
and clean up. Each of `plan`, `fit` and `evaluate` leaves nothing behind; `with driver.cluster():`
keeps one cluster for all. A Ray that is up is joined.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rayrec.checks import absolute_path
from rayrec.driver.calibration import calibrate
from rayrec.driver.cluster import connected
from rayrec.driver.config import RunConfig, ScalingConfig
from rayrec.driver.controller import Controller
from rayrec.driver.display import Display
from rayrec.driver.local import run_here
from rayrec.driver.planning import Planning, check_plan_word, check_same_features
from rayrec.driver.prepared import Prepared, Ran
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.result import Result, called, checked_predictions, result_of
from rayrec.driver.run_folder import RunFolder, held
from rayrec.driver.run_log import RunLog
from rayrec.driver.topology import discover, read_topology
from rayrec.errors import ConfigError, RunInterrupted
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, Topology
from rayrec.report.profile_page import check_folder
from rayrec.train.callbacks import Hooks
from rayrec.train.config import Dataset
from rayrec.train.progress import Event
from rayrec.watch.event_log import with_event_log

if TYPE_CHECKING:
    from torch import nn

    from rayrec.driver.lives import Lives
    from rayrec.planner import ParameterConstraints
    from rayrec.train.own_loop import TrainLoop
    from rayrec.train.tasks import Scorer


class Driver:
    """Trains a model on a Ray cluster.

    Args:
        model: () -> module whose forward(batch) gives (loss, (loss, logits, labels)); called on
            every rank, and once here on the meta device. Its tables should lie on the meta device,
            so that no rank ever holds a whole table.
        data: what to train on.
        scaling: how many ranks, and what each gets.
        run: how long, how large the steps, what is saved.
        eval_data: scored after training.
        plan: "auto", a sharding kind, a JSON file, or a plan.
        constraints: by table, for the planner.
        tables: the model's tables, if it cannot be built on the meta device.
        topology: a calibrated topology, or its JSON file, whose constants the planner shall use;
            ranks and memory are those that exist.
        train_loop: (context) -> scores or None, a loop of your own that every rank calls in place
            of the ready-made one; `context` is a `rayrec.train.LoopContext`.
        scorer: (trainer) -> name -> score, called on every rank after training in place of scoring
            eval_data; every rank must return the same. `trainer` is a `rayrec.train.RankTrainer`.
    Raises:
        ConfigError: the options contradict each other.

    Example:
        run = RunConfig(global_batch_size=4096, epochs=1)
        driver = Driver(build_model, data, ScalingConfig(num_workers=2), run)
        print(driver.fit().metrics)
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        data: Dataset | None,
        scaling: ScalingConfig,
        run: RunConfig,
        eval_data: Dataset | None = None,
        plan: str | ShardingPlan = "auto",
        constraints: Mapping[str, ParameterConstraints] | None = None,
        tables: Sequence[BaseEmbeddingConfig] | None = None,
        topology: Topology | str | None = None,
        scorer: Scorer | None = None,
        train_loop: TrainLoop | None = None,
    ) -> None:
        if not callable(model):
            raise ConfigError(
                f"model is a {type(model).__name__}; pass a function that builds the module on "
                "each rank."
            )
        from rayrec.driver.shape import check_sizes

        check_plan_word(plan)
        check_sizes(plan, run, scaling)
        check_same_features(data, eval_data)
        self._model, self._data, self._eval_data = model, data, eval_data
        self._scaling, self._run = scaling, run
        measured = read_topology(topology) if isinstance(topology, str) else topology
        self._planning = Planning(model, run, plan, constraints, tables, measured)
        self._scorer, self._loop = scorer, train_loop
        self._stop = threading.Event()
        self._controller: Controller | None = None

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Keep one connection to Ray, or one private cluster, for all calls inside the block."""
        with connected():
            yield

    def plan(self) -> ShardingPlan:
        """Place the ranks, look at what they got, and plan for it; nothing is trained.

        Raises:
            ConfigError: the ranks do not fit the cluster.
            PlanError: the tables do not fit the ranks.
        """

        def prepare(topology: Topology) -> Prepared:
            return Prepared(None, self._planning.plan(topology))

        plan = self._control(Display("off"), prepare, RunLog(None)).prepared.plan
        assert plan is not None
        return plan

    def calibrate(self) -> Topology:
        """Measure the ranks that this driver gets; later plans of this driver use what was found.

        It takes some ten seconds.

        Returns:
            the topology, to be saved with `to_json()` and given to other drivers or to `rayrec plan
            --topology`.
        Raises:
            ConfigError: the ranks do not fit the cluster.
            TrainingFailed: a rank failed.
        """
        run = self._run
        topology = calibrate(
            self._scaling, timeout_s=run.timeout_s, setup_timeout_s=run.setup_timeout_s
        )
        self._planning.measured = topology
        return topology

    def fit(self) -> Result:
        """Train, save, and score the evaluation data.

        Returns:
            the result; `stopped` tells that `request_stop` ended it early, after a last checkpoint.
        Raises:
            ConfigError, PlanError, InputError, CheckpointError: the user's mistakes, found before
                training or by a rank.
            TrainingFailed: names the first rank that failed, its host and its cause; all ranks have
                been ended.
            RunInterrupted: Ctrl-C or SIGTERM ended the run early, after a last checkpoint; it has
                the result. Where nothing catches it, the process ends with 130 or 143.
        """
        if self._data is None:
            raise ConfigError(
                "Driver.fit needs data to train on; this driver was made with data=None."
            )
        from rayrec.driver.lives import Lives, fit_task
        from rayrec.driver.shape import check_pauses, check_recovery, check_shape, run_info
        from rayrec.driver.specs import check_values, local_files, total_steps, train_spec
        from rayrec.driver.start import find_start

        data, run = self._data, self._run
        check_values(data)
        check_values(self._eval_data)
        check_recovery(run, self._scaling)
        check_pauses(run, self._scaling)
        display = Display(run.progress)
        log = RunLog(run.run_path, run.name)
        # The folder is taken before its checkpoints are looked at, so that no other driver changes
        # them in between.
        check_shape(run, self._eval_data, self._scorer, self._loop)
        with (
            held(run.run_path, display.line) as folder,
            called(with_event_log(run.callbacks, run.run_path), display) as hooks,
        ):
            start = find_start(run, data, self._planning.tables, display.line)
            steps = total_steps(run, data, start)
            display.total_steps = steps
            if run.profile is not None:
                run.profile.check_steps(steps - start.step)
                check_folder(run.profile.path)
            lives = Lives(run.run_path, start, display.line)

            def prepare(topology: Topology) -> Prepared:
                plan = self._planning.plan(topology)
                predicted = self._planning.predict(plan, topology)
                display.line(plan.report())
                info = run_info(run, plan, predicted, topology, start, steps)
                spec = train_spec(
                    run,
                    self._model,
                    plan,
                    data=data,
                    eval_data=self._eval_data,
                    steps=steps,
                    start=start,
                    profile=run.profile,
                )
                return Prepared(fit_task(spec, self._scorer, self._loop), plan, predicted, info)

            files = [*local_files(data), *local_files(self._eval_data)]
            ran = self._control(display, prepare, log, folder, {"data": files}, hooks, lives)
            result = result_of(ran, display)
            if result.hindsight is not None:
                display.line(result.hindsight.report())
        if hooks.error is not None:
            raise hooks.error
        if result.stopped and ran.signal_number is not None:
            raise RunInterrupted(ran.signal_number, result)
        return result

    def evaluate(
        self,
        checkpoint: str | None,
        data: Dataset | None = None,
        predictions: str | None = None,
        keys: Sequence[str] = (),
    ) -> Mapping[str, float]:
        """Score a checkpoint, of any number of ranks and any plan, on this driver's ranks.

        Args:
            checkpoint: its directory; None scores the untrained model.
            data: what to score on; by default the driver's eval_data.
            predictions: path or URI of a Parquet file that gets the score of every row, in the
                order of the files: columns score (the predicted probability of label 1), label,
                file, row (its number in the file) and `keys`.
            keys: columns of the data that are copied into `predictions`.
        Raises:
            ConfigError, PlanError, InputError, CheckpointError: the user's mistakes, found before
                the ranks start or by a rank.
            TrainingFailed: a rank failed.
            RunInterrupted: Ctrl-C or SIGTERM ended the evaluation.
        """
        from rayrec.driver.specs import check_values, local_files, manifest_file, train_spec
        from rayrec.driver.start import check_scored

        scored = data if data is not None else self._eval_data
        if scored is None:
            raise ConfigError(
                "Driver.evaluate needs data: pass it, or make the driver with eval_data."
            )
        wanted = checked_predictions(predictions, keys, scored)
        check_values(scored)
        files = {"data": local_files(scored)}
        if checkpoint is not None:
            checkpoint = absolute_path("checkpoint", checkpoint)
            check_scored(checkpoint, self._planning.tables())
            files["checkpoint"] = manifest_file(checkpoint)
        display = Display(self._run.progress)

        def prepare(topology: Topology) -> Prepared:
            from rayrec.train.tasks import EvaluateTask

            plan = self._planning.plan(topology)
            spec = train_spec(self._run, self._model, plan, eval_data=scored)
            task = EvaluateTask(spec=spec, checkpoint=checkpoint, predictions=wanted)
            return Prepared(task, plan)

        ran = self._control(display, prepare, RunLog(None), None, files)
        metrics: Mapping[str, float] | None = ran.results[0]
        # A rank that was stopped amid the data has no scores of all rows.
        if metrics is None:
            raise RunInterrupted(ran.signal_number or signal.SIGTERM)
        return metrics

    def request_stop(self) -> None:
        """End a running `fit` early, after a last checkpoint; any thread may call it."""
        self._stop.set()
        if self._controller is not None:
            self._controller.request_stop()

    def resize(self, num_workers: int) -> None:
        """Have a running `fit` go on with another number of ranks.

        A callback or any other thread may call it. The ranks finish their window and save, and the
        run goes on from there. A smaller number takes effect at once; a larger one as soon as the
        cluster, which is asked for it, has the room. The run keeps to this number until the next
        call: it does not grow above it by itself.

        Args:
            num_workers: within those of `ScalingConfig`.
        Raises:
            ConfigError: the number is outside of them, the run has one number of ranks or no
                storage path, or no `fit` runs.
        """
        from rayrec.driver.shape import check_resize

        check_resize(num_workers, self._run, self._scaling)
        controller = self._controller
        if controller is None or not controller.resizes:
            raise ConfigError(
                f"Driver.resize({num_workers}): no fit is running; call it from a callback or "
                "another thread while Driver.fit runs."
            )
        controller.resize(num_workers)

    def _control(
        self,
        display: Display,
        prepare: Callable[[Topology], Prepared],
        log: RunLog,
        folder: RunFolder | None = None,
        files: Mapping[str, Sequence[tuple[str, int]]] | None = None,
        hooks: Hooks | None = None,
        lives: Lives | None = None,
    ) -> Ran:
        """Do on the ranks what `prepare` says.

        Args:
            folder: the run's folder, which every rank must share.
            files: by what they are, local files that every host must see.
            hooks: the callbacks that hear of the run.
            lives: says how the run goes on after a failure; without it, the first one ends it.
        """
        calls = hooks or Hooks((), "the driver")
        run, scaling = self._run, self._scaling
        # A stop that was asked for belongs to the run of that time.
        self._stop.clear()

        def told(prepared: Prepared) -> Prepared:
            # nothing is written before every host is known to share the folder
            if prepared.info is not None:
                calls.start(prepared.info)
            return prepared

        def here(topology: Topology) -> Prepared:
            return told(prepare(topology))

        def look(group: RankGroup) -> Prepared:
            prepared = prepare(discover(group, scaling, run.setup_timeout_s))
            if folder is not None:
                group.see_folder(folder.path, folder.token, run.setup_timeout_s)
            for what, paths in (files or {}).items():
                group.see_files(paths, what, run.setup_timeout_s)
            return told(prepared)

        def on_event(event: Event) -> None:
            display.event(event)
            if lives is not None:
                lives.see(event)
            calls.event(event)
            if calls.error is not None:
                self.request_stop()

        def on_step(step: int) -> None:
            calls.step(step)
            if calls.error is not None:
                self.request_stop()

        try:
            if scaling.most == 0:
                return run_here(scaling, here, on_event, self._stop.is_set, run.timeout_s, on_step)
            self._controller = Controller(
                scaling,
                look if lives is None else lives.with_each(look),
                on_event,
                timeout_s=run.timeout_s,
                heartbeat_timeout_s=run.heartbeat_timeout_s,
                setup_timeout_s=run.setup_timeout_s,
                stop_timeout_s=run.stop_timeout_s,
                max_failures=run.failure.max_failures if lives is not None else 0,
                resizes=lives is not None,
                log=log,
                on_poll=folder.check if folder is not None else lambda: None,
                on_step=on_step,
            )
            return self._controller.run()
        finally:
            self._controller = None
            display.close()
