"""`Driver`: from a model function and a dataset to a trained model on the ranks of a Ray cluster.

It checks what can be checked without a cluster, then lets a `Controller` connect, place, plan, run and clean up. Each of `plan`, `fit`
and `evaluate` leaves nothing behind; `with driver.cluster():` keeps one cluster for all. A Ray that is up is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayrec.driver.calibration import calibrate
from rayrec.driver.cluster import connected
from rayrec.driver.config import Result, RunConfig, ScalingConfig
from rayrec.driver.controller import Controller
from rayrec.driver.display import Display
from rayrec.driver.planning import check_plan_word, find_tables, resolve_plan
from rayrec.driver.rank_group import RankGroup
from rayrec.driver.topology import discover, read_topology
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, Topology
from rayrec.layout.estimates import RankEstimate
from rayrec.layout.hindsight import Hindsight
from rayrec.planner.estimate import estimate_ranks
from rayrec.planner.request import PlanRequest
from rayrec.train.config import Dataset, TrainSpec
from rayrec.train.profile_page import ready_profile
from rayrec.train.seat import RankTask

if TYPE_CHECKING:
    from torch import nn

    from rayrec.planner import ParameterConstraints


class Driver:
    """Trains a model on a Ray cluster.

    Args:
        model: () -> module whose forward(batch) gives (loss, (loss, logits, labels)); called on every rank, and once here on the meta
            device. Its tables should lie on the meta device, so that no rank ever holds a whole table.
        data: what to train on.
        scaling: how many ranks, and what each gets.
        run: how long, how large the steps, what is saved.
        eval_data: scored after training.
        plan: "auto", a sharding kind, a JSON file, or a plan.
        constraints: by table, for the planner.
        tables: the model's tables, if it cannot be built on the meta device.
        topology: a calibrated topology, or its JSON file, whose constants the planner shall use; ranks and memory are those that exist.
    Raises:
        ConfigError: the options contradict each other.

    Example:
        driver = Driver(build_model, data, ScalingConfig(num_workers=2), RunConfig(global_batch_size=4096, epochs=1))
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
    ) -> None:
        if not callable(model):
            raise ConfigError(f"model is a {type(model).__name__}; pass a function that builds the module on each rank.")
        check_plan_word(plan)
        self._model, self._data, self._eval_data = model, data, eval_data
        self._scaling, self._run, self._plan, self._constraints = scaling, run, plan, constraints
        self._tables = list(tables) if tables is not None else None
        self._topology = read_topology(topology) if isinstance(topology, str) else topology
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
        plans: list[ShardingPlan] = []
        self._control(Display("off"), lambda group: plans.append(self._plan_for(group)))
        return plans[0]

    def calibrate(self) -> Topology:
        """Measure the ranks that this driver gets, in seconds; later plans of this driver use what was found.

        Returns:
            the topology, to be saved with `to_json()` and given to other drivers or to `rayrec plan --topology`.
        Raises:
            ConfigError: the ranks do not fit the cluster.
            TrainingFailed: a rank failed.
        """
        run = self._run
        self._topology = calibrate(self._scaling, timeout_s=run.timeout_s, setup_timeout_s=run.setup_timeout_s)
        return self._topology

    def fit(self) -> Result:
        """Train, save, and score the evaluation data.

        Returns:
            the result; `stopped` tells that a SIGTERM or `request_stop` ended it early, after a last checkpoint.
        Raises:
            ConfigError, PlanError: the user's mistakes; nothing was trained.
            TrainingFailed: names the first rank that failed, its host and its cause; all ranks have been ended.
        """
        if self._data is None:
            raise ConfigError("Driver.fit needs data to train on; this driver was made with data=None.")
        _check_run_path(self._run)
        steps = self._steps(self._data)
        profile = ready_profile(self._run.profile, steps)
        display = Display(self._run.progress, steps)
        plans: list[ShardingPlan] = []
        predicted: list[tuple[RankEstimate, ...]] = []

        def prepare(group: RankGroup) -> RankTask:
            from rayrec.train.tasks import FitTask

            topology = self._topology_of(group)
            plans.append(self._plan_on(topology))
            predicted.append(self._predict(plans[0], topology))
            display.plan(plans[0])
            spec = self._spec(plans[0], data=self._data, eval_data=self._eval_data, steps=steps, path=self._run.resume_from)
            return FitTask(spec=replace(spec, profile=profile))

        outcome = self._control(display, prepare)[0]
        hindsight = Hindsight(predicted[0], outcome.times) if outcome.times else None
        if hindsight is not None:
            display.line(hindsight.report())
        return Result(
            steps=outcome.steps,
            rows=outcome.rows,
            seconds=outcome.seconds,
            rows_per_s=outcome.rows / outcome.seconds if outcome.seconds else 0.0,
            train_loss=outcome.train_loss,
            metrics=outcome.metrics,
            checkpoint=outcome.checkpoint,
            plan=plans[0],
            stopped=outcome.stopped,
            milestones=tuple(display.milestones),
            reports=tuple(display.reports),
            hindsight=hindsight,
            profile=outcome.profile,
        )

    def evaluate(self, checkpoint: str | None, data: Dataset | None = None) -> Mapping[str, float]:
        """Score a checkpoint, of any number of ranks and any plan, on this driver's ranks.

        Args:
            checkpoint: its directory; None scores the untrained model.
            data: what to score on; by default the driver's eval_data.
        Raises:
            ConfigError, PlanError: the user's mistakes.
            TrainingFailed: a rank failed, also when the checkpoint is missing or of another model.
        """
        scored = data if data is not None else self._eval_data
        if scored is None:
            raise ConfigError("Driver.evaluate needs data: pass it, or make the driver with eval_data.")
        display = Display(self._run.progress)

        def prepare(group: RankGroup) -> RankTask:
            from rayrec.train.tasks import EvaluateTask

            return EvaluateTask(spec=self._spec(self._plan_for(group), data=None, eval_data=scored, steps=0, path=checkpoint))

        metrics: Mapping[str, float] = self._control(display, prepare)[0]
        return metrics

    def request_stop(self) -> None:
        """End a running `fit` early, after a last checkpoint; from another thread or a signal handler."""
        if self._controller is not None:
            self._controller.request_stop()

    def _control(self, display: Display, prepare: Callable[[RankGroup], RankTask | None]) -> tuple[Any, ...]:
        run = self._run
        self._controller = Controller(
            self._scaling,
            prepare,
            display.event,
            timeout_s=run.timeout_s,
            setup_timeout_s=run.setup_timeout_s,
            stop_timeout_s=run.stop_timeout_s,
        )
        try:
            return self._controller.run()
        finally:
            self._controller = None
            display.close()

    def _plan_for(self, group: RankGroup) -> ShardingPlan:
        return self._plan_on(self._topology_of(group))

    def _topology_of(self, group: RankGroup) -> Topology:
        topology = discover(group, self._scaling, self._run.setup_timeout_s)
        return topology if self._topology is None else topology.with_speeds_of(self._topology)

    def _plan_on(self, topology: Topology) -> ShardingPlan:
        if self._tables is None:
            self._tables = find_tables(self._model)
        return resolve_plan(
            self._plan,
            self._tables,
            topology,
            global_batch_size=self._run.global_batch_size,
            sparse_optimizer=self._run.sparse_optimizer.name,
            constraints=self._constraints,
            qcomms_forward=self._run.qcomms_forward,
            qcomms_backward=self._run.qcomms_backward,
            share_tables=self._run.share_tables,
        )

    def _predict(self, plan: ShardingPlan, topology: Topology) -> tuple[RankEstimate, ...]:
        """What the prices say of any plan for this driver's tables."""
        request = PlanRequest(
            tables=tuple(self._tables or ()),
            topology=topology,
            batch_size=-(-self._run.global_batch_size // topology.world_size),
            constraints=dict(self._constraints or {}),
            sparse_optimizer=self._run.sparse_optimizer.name,
            qcomms_forward=self._run.qcomms_forward,
            qcomms_backward=self._run.qcomms_backward,
            share_tables=self._run.share_tables,
        )
        return estimate_ranks(request, plan)

    def _steps(self, data: Dataset) -> int:
        run = self._run
        per_epoch = data.num_batches(run.global_batch_size, drop_last=run.drop_last)
        if per_epoch < 1:
            raise ConfigError(
                f"the data has {data.num_rows} rows, which make no batch of {run.global_batch_size} with drop_last={run.drop_last}."
            )
        return run.steps if run.steps is not None else per_epoch * (run.epochs or 0)

    def _spec(self, plan: ShardingPlan, *, data: Dataset | None, eval_data: Dataset | None, steps: int, path: str | None) -> TrainSpec:
        run = self._run
        return TrainSpec(
            model=self._model,
            data=data,
            plan=plan,
            global_batch_size=run.global_batch_size,
            steps=steps,
            seed=run.seed,
            eval_data=eval_data,
            sparse_optimizer=run.sparse_optimizer,
            dense_optimizer=run.dense_optimizer,
            checkpoint=run.checkpoint,
            run_path=run.run_path,
            resume_from=path,
            report_every_s=run.report_every_s,
            shuffle=run.shuffle,
            drop_last=run.drop_last,
            qcomms_forward=run.qcomms_forward,
            qcomms_backward=run.qcomms_backward,
            share_tables=run.share_tables,
            extras=run.extras,
        )


def _check_run_path(run: RunConfig) -> None:
    """Refuse to write among another run's checkpoints: a step must mean one thing in a folder."""
    if run.run_path is None:
        return
    from rayrec.checkpoint import CheckpointManager

    manager = CheckpointManager(run.run_path)
    newest = manager.latest()
    if newest is not None and (run.resume_from or "").rstrip("/") != newest:
        raise ConfigError(
            f"{run.run_path} already holds checkpoints, the newest {newest}. Continue from it with resume_from={newest!r}, "
            "or give the run another name or storage_path."
        )
