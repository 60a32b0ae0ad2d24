"""`Driver`: from a model function and a dataset to a trained model on the ranks of a Ray cluster.

It checks what can be checked without a cluster, then lets a `Controller` connect, place, plan, run
and clean up. Each of `plan`, `fit` and `evaluate` leaves nothing behind; `with driver.cluster():`
keeps one cluster for all. A Ray that is up is joined.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from rayrec.driver.calibration import calibrate
from rayrec.driver.cluster import connected
from rayrec.driver.config import RunConfig
from rayrec.driver.display import Display
from rayrec.driver.fitting import Result, fit
from rayrec.driver.planning import RunPlanner, check_plan_word, check_same_features, read_topology
from rayrec.driver.rank_group import Prepared
from rayrec.driver.ranks import Ranks
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.scaling_checks import check_sizes
from rayrec.driver.serving import ScoreRequest, evaluation, export_checkpoint, prediction
from rayrec.driver.specs import train_spec
from rayrec.errors import ConfigError, RunInterrupted
from rayrec.layout import BaseEmbeddingConfig, ShardingPlan, Topology
from rayrec.train.config import Dataset, TrainData

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FileDataset
    from rayrec.data.scored import Predicted
    from rayrec.planner import ParameterConstraints
    from rayrec.quant.types import Types
    from rayrec.serve import Manifest, ParityBounds
    from rayrec.train.own_loop import TrainLoop
    from rayrec.train.tasks import RowScorer, Scorer


class Driver:
    """Trains a model on a Ray cluster.

    Args:
        model: () -> module whose forward(batch) gives (loss, (loss, logits, labels)); called on
            every rank, and once here on the meta device. Its tables should lie on the meta device,
            so that no rank ever holds a whole table.
        data: rows to train on.
        scaling: number and resources of the ranks.
        run: length of the run, batch size, checkpoints and further options.
        eval_data: scored after training.
        plan: "auto", a sharding kind, a JSON file, or a plan.
        constraints: limits on the planner's choice, by table.
        tables: the model's tables, if it cannot be built on the meta device.
        topology: a calibrated topology, or its JSON file, whose constants the planner shall use;
            ranks and memory are those that exist.
        train_loop: (context) -> scores or None, a loop of your own that every rank calls in place
            of the ready-made one; `context` is a `rayrec.train.LoopContext`.
        scorer: (trainer) -> name -> score, called on every rank after training, and by `evaluate`,
            in place of scoring eval_data; every rank must return the same. `trainer` is a
            `rayrec.train.RankTrainer`.
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
        data: TrainData | None,
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
        check_plan_word(plan)
        check_sizes(plan, run, scaling)
        check_same_features(data, eval_data)
        self._data, self._eval_data = data, eval_data
        measured = read_topology(topology) if isinstance(topology, str) else topology
        self._planning = RunPlanner(model, run, plan, constraints, tables, measured)
        self._scorer, self._loop = scorer, train_loop
        self._ranks = Ranks(scaling, run)

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

        def prepare(topology: Topology, hosts: Sequence[str]) -> Prepared:
            return Prepared(None, self._planning.plan(topology))

        self._ranks.begin()
        plan = self._ranks.do(Display("off"), prepare).prepared.plan
        assert plan is not None
        return plan

    def calibrate(self) -> Topology:
        """Measure the ranks that this driver gets; later plans of this driver use what was found.

        It takes some ten seconds.

        Returns:
            the topology; other drivers and `rayrec plan --topology` take its `to_json()`.
        Raises:
            ConfigError: the ranks do not fit the cluster.
            TrainingFailed: a rank failed.
        """
        run = self._planning.run
        topology = calibrate(
            self._ranks.scaling, timeout_s=run.timeout_s, setup_timeout_s=run.setup_timeout_s
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
                the result. Where nothing catches it, the process ends with 130 or 143. Without a
                result where no rank has one, also when `request_stop` ended the wait for room.
        """
        if self._data is None:
            raise ConfigError(
                "Driver.fit needs data to train on; this driver was made with data=None."
            )
        data = self._data, self._eval_data
        return fit(self._planning, self._ranks, *data, self._scorer, self._loop)

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
            data: rows to score; by default the driver's eval_data.
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
        scored = data if data is not None else self._eval_data
        own = None if data is not None else self._scorer
        wanted = evaluation(self._planning, checkpoint, scored, predictions, keys, own)
        return cast("Mapping[str, float]", self._score(wanted))

    def predict(
        self,
        checkpoint: str,
        out: str,
        data: Dataset | None = None,
        columns: Sequence[str] = (),
        scorer: RowScorer | None = None,
    ) -> Predicted:
        """Write the scores of rows by a checkpoint, of any number of ranks and any plan.

        Args:
            checkpoint: its directory.
            out: local folder of rank 0, new or empty, which appears when it is complete. Its
                files, part-00000.parquet and so on, are in the order of the rows; they have a
                column of scores for each task ("score" where there is one), and `columns`.
            data: files whose labels are not read; by default the driver's eval_data. A data set
                made with `with_labels=False` needs no labels.
            columns: columns of the data that are copied beside the scores.
            scorer: gives the scores of rows, of a model whose forward gives no logits.
        Raises:
            RayrecError, RunInterrupted: the errors of `evaluate`; nothing is left of the files.
        """
        scored = data or self._eval_data
        wanted = prediction(self._planning, checkpoint, scored, out, columns, scorer)
        return cast("Predicted", self._score(wanted))

    def export(
        self,
        checkpoint: str,
        out: str,
        types: Types = "int8",
        data: FileDataset | None = None,
        bounds: ParityBounds | None = None,
        compiled: bool = False,
    ) -> Manifest:
        """Pack a checkpoint into an artifact that `rayrec.serve.Predictor` loads; starts no ranks.

        Args:
            checkpoint: its directory, such as `Result.checkpoint`.
            out: local folder, new or empty.
            types, bounds, compiled: the arguments of these names of `rayrec.serve.export`.
            data: rows that are scored by the model and by the artifact; by default the driver's
                eval_data where they lie in files, and else random rows.
        Raises:
            RayrecError: the errors of `rayrec.serve.export`.
        """
        known = (data, self._eval_data, self._data)
        return export_checkpoint(self._planning, checkpoint, out, types, known, bounds, compiled)

    def request_stop(self) -> None:
        """End a running `fit` early, after a last checkpoint; any thread may call it."""
        self._ranks.request_stop()

    def resize(self, num_workers: int) -> None:
        """Have a running `fit` go on with another number of ranks.

        A callback or any other thread may call it. The ranks finish their window, and the run goes
        on from there. A smaller number takes effect at once; a larger one as soon as the cluster,
        which is asked for it, has the room. The run keeps to this number until the next call: it
        does not grow above it by itself. Where the tables do not fit so few ranks, or a new host
        lacks the run's folder or data, the run says so and keeps the ranks that it has.

        Args:
            num_workers: number of ranks, within the range of `ScalingConfig`.
        Raises:
            ConfigError: the number is outside of them, the run has one number of ranks or no
                storage path, or no `fit` runs.
        """
        self._ranks.resize(num_workers)

    def _score(self, wanted: ScoreRequest) -> Any:
        """Run a task that changes no model, and return the result of rank 0."""

        def prepare(topology: Topology, hosts: Sequence[str]) -> Prepared:
            plan = self._planning.plan(topology)
            spec = train_spec(self._planning, plan, eval_data=wanted.data)
            return Prepared(wanted.task(spec=spec), plan)

        display = Display(self._planning.run.progress)
        self._ranks.begin()
        ran = self._ranks.do(display, prepare, files=wanted.files)
        # A rank that was stopped amid the data has no result of all rows.
        if ran.results[0] is None:
            raise RunInterrupted(ran.signal_number or signal.SIGTERM)
        display.scored(ran.results[0])
        return ran.results[0]
