"""TensorBoard, MLflow and Weights & Biases: a run's curves in the tracker that a team uses.

Each is a few lines over `Tracker`, which hands out the numbers of events (`rayrec.watch.numbers`).
A tracker that cannot be reached when training starts ends the run at once. One that fails later is
a warning, since an outage of a service shall not end a training. The packages are extras.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rayrec.checks import is_uri, lasting_path
from rayrec.errors import ConfigError
from rayrec.fields.writing import json_data
from rayrec.storage import one_line, probe_output
from rayrec.train.callbacks import RunInfo
from rayrec.watch.event_callback import EventCallback, outcome_of
from rayrec.watch.numbers import numbers_of

# bounds of MLflow's interface for one call, and for the value of a parameter
BATCH, PARAMETER_BATCH, PARAMETER_LENGTH = 1000, 100, 500


class Tracker(EventCallback):
    """Base of trackers: `_begin`, `_log` and `_end` say how to talk to one."""

    _begun, _troubled = False, False

    def on_start(self, info: RunInfo) -> None:
        """Begin a run of the tracker.

        Raises:
            ConfigError: the tracker refuses it or cannot be reached.
        """
        try:
            self._begin(info)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self).__name__} cannot begin run {info.name!r}: {type(error).__name__}: "
                f"{one_line(error)}. Mend its options, or leave it out of callbacks."
            ) from error
        self._begun, self._troubled = True, False

    def event(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Log the numbers of an event."""
        numbers = numbers_of(kind, values)
        if numbers:
            self._try(self._log, numbers, step)

    def on_end(self, error: BaseException | None, trainer: Any = None) -> None:
        """End the run of the tracker as done, stopped or failed, where one had begun."""
        if not self._begun:
            return
        self._begun = False
        self._try(self._end, outcome_of(error))

    def _try(self, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
            self._troubled = False
        except Exception as error:
            if not self._troubled:
                words = f"{type(self).__name__} lost values: {type(error).__name__}: "
                warnings.warn(
                    f"{words}{one_line(error)}; training goes on.", RuntimeWarning, stacklevel=3
                )
            self._troubled = True

    @abstractmethod
    def _begin(self, info: RunInfo) -> None:
        """Open a run; what it raises ends the training before its first step."""

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Log values by name at a step."""

    @abstractmethod
    def _end(self, outcome: str) -> None:
        """Close the run; `outcome` is done, stopped or failed."""


class TensorBoardCallback(Tracker):
    """Writes a TensorBoard event file; `tensorboard --logdir FOLDER` shows it.

    A life that begins at an earlier step hides what an earlier life wrote behind it.

    Args:
        folder: local folder of this run, made if need be; runs side by side in one folder are shown
            together.
    Raises:
        ConfigError: the package tensorboard is missing, or the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if is_uri(os.fspath(folder)):
            raise ConfigError(
                f"TensorBoardCallback has folder={os.fspath(folder)!r}; name a local folder."
            )
        _needed("tensorboard", "tensorboard", type(self).__name__)
        self._tensorboard = _needed("torch.utils.tensorboard", "tensorboard", type(self).__name__)
        self.folder = lasting_path("TensorBoardCallback has folder", folder)
        probe_output("TensorBoard's events", f"{self.folder}/events.out")
        self._writer: Any = None

    def _begin(self, info: RunInfo) -> None:
        self._writer = self._tensorboard.SummaryWriter(self.folder, purge_step=info.first_step + 1)
        # Indented lines are a block of code in TensorBoard's Markdown.
        for name, text in (("plan", info.plan.report()), ("settings", _indented(info.settings))):
            block = "\n".join(f"    {line}" for line in text.splitlines())
            self._writer.add_text(name, block, info.first_step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _end(self, outcome: str) -> None:
        self._writer.close()


class MLflowCallback(Tracker):
    """Logs to an MLflow experiment: settings as parameters, curves as metrics.

    Args:
        experiment: its name; it is made if need be.
        tracking_uri: of the server; None takes MLFLOW_TRACKING_URI or MLflow's default.
        tags: of the run.
    Raises:
        ConfigError: the package mlflow is missing; when training starts, MLflow cannot be reached.
    """

    def __init__(
        self,
        experiment: str = "rayrec",
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._mlflow = _needed("mlflow", "mlflow", type(self).__name__)
        self._experiment, self._uri, self._tags = experiment, tracking_uri, dict(tags or {})
        self._client: Any = None
        self.run_id = ""

    def _begin(self, info: RunInfo) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            number = self._client.create_experiment(self._experiment)
        else:
            number = experiment.experiment_id
        run = self._client.create_run(number, run_name=info.name, tags=self._tags)
        self.run_id = run.info.run_id
        settings = {"world_size": info.world_size, "steps": info.steps, **info.settings}
        make = self._mlflow.entities.Param
        parameters = [
            make(_mlflow_name(name), _text(value)[:PARAMETER_LENGTH])
            for name, value in settings.items()
        ]
        for first in range(0, len(parameters), PARAMETER_BATCH):
            self._client.log_batch(self.run_id, params=parameters[first : first + PARAMETER_BATCH])

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now, make = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [make(_mlflow_name(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + BATCH])

    def _end(self, outcome: str) -> None:
        status = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[outcome]
        self._client.set_terminated(self.run_id, status)


class WandbCallback(Tracker):
    """Logs to a Weights & Biases project; every life of a run is a run there.

    Args:
        project: its name.
        options: further arguments of `wandb.init`, such as entity="team" or mode="offline".
    Raises:
        ConfigError: the package wandb is missing; when training starts, W&B refuses the run.
    """

    def __init__(self, project: str = "rayrec", **options: Any) -> None:
        self._wandb = _needed("wandb", "wandb", type(self).__name__)
        self._options = {"project": project, **options}
        self._run: Any = None

    def _begin(self, info: RunInfo) -> None:
        config = {"world_size": info.world_size, "steps": info.steps, **json_data(info.settings)}
        self._run = self._wandb.init(**{"name": info.name, "config": config, **self._options})

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def _end(self, outcome: str) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def _needed(module: str, extra: str, what: str) -> Any:
    """A module of a package that an extra of rayrec installs.

    Raises:
        ConfigError: it cannot be imported; names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package {extra}: {one_line(error)}. Install it with pip install "
            f"'rayrec[{extra}]'."
        ) from None


def _mlflow_name(name: str) -> str:
    """A name with the characters that MLflow allows; recall@10 becomes recall_at_10."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_"))


def _indented(settings: Mapping[str, Any]) -> str:
    return json.dumps(json_data(settings), indent=1)


def _text(value: Any) -> str:
    simple = json_data(value)
    return simple if isinstance(simple, str) else json.dumps(simple)
