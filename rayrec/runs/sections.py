"""`DataSection` and `PlanSection`: the sections of a run file that are no configs of a driver."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayrec.checks import absolute_path
from rayrec.data.planted import SyntheticConfig
from rayrec.data.windows import TimeWindows
from rayrec.errors import ConfigError
from rayrec.planner.constraints import ParameterConstraints, constraints_from_json
from rayrec.runs.inputs import read_text
from rayrec.streams import StreamConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Section `data`: the rows and their schema.

    Attributes:
        train: folder, file or URI of the rows to train on.
        eval: rows to score after training, likewise, or None.
        schema: JSON file of the schema.
        where, eval_where: filters of the rows of `train` and of `eval`, such as "day < 10"; None
            takes all.
        num_streams: parts of `train` of which every batch takes rows in turn; None takes 8. With 1,
            and `shuffle = false` of the run, rows come in the order of the files.
        planted: rows to make for this run instead; without a seed of their own they have the run's.
        windows: windows in time, which a click model walks in order, each scored before training on
            it; None trains on all rows as one.
        stream: source of rows that never end, in place of `train`.
        work_dir: folder for the rows that a retrieval model trains on, seen by all hosts; None
            takes a temporary one.
    """

    train: str | None = None
    eval: str | None = None
    schema: str | None = None
    where: str | None = None
    eval_where: str | None = None
    num_streams: int | None = None
    planted: SyntheticConfig | None = None
    windows: TimeWindows | None = None
    stream: StreamConfig | None = None
    work_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("train", "eval", "schema", "work_dir"):
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, absolute_path(name, path))
        if self.planted is not None and (self.train or self.eval or self.schema):
            raise ConfigError(
                "planted makes rows of its own, and train, eval and schema say where rows lie; "
                "leave one of both out."
            )
        if self.stream is not None:
            self._check_stream()
        if self.eval_where is not None and self.eval is None and self.planted is None:
            raise ConfigError("eval_where is about the rows of eval; give eval, or leave it out.")

    def _check_stream(self) -> None:
        """Refuse what says where rows lie beside a stream."""
        for name in ("train", "where", "planted", "windows", "work_dir"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"stream gives the rows to train on, and does not go with {name}; leave one of "
                    "the two out."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSection:
    """Section `plan`: the placement of the tables.

    Attributes:
        plan: "auto", a sharding kind for all tables, or a plan's JSON file.
        topology: JSON file that `rayrec calibrate` wrote, or None.
        constraints: table -> fields of `ParameterConstraints`, or a JSON file of the same.
    """

    plan: str = "auto"
    topology: str | None = None
    constraints: str | Mapping[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if os.path.isfile(self.plan):
            object.__setattr__(self, "plan", absolute_path("plan", self.plan))
        if self.topology is not None:
            object.__setattr__(self, "topology", absolute_path("topology", self.topology))
        if isinstance(self.constraints, str):
            path = absolute_path("constraints", self.constraints)
            object.__setattr__(self, "constraints", path)
        self.by_table()  # checks

    def by_table(self) -> dict[str, ParameterConstraints] | None:
        """Return the constraints in the form that the planner takes.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or makes no sense.
        """
        if self.constraints is None:
            return None
        if isinstance(self.constraints, str):
            text = read_text("constraints", self.constraints)
            return constraints_from_json(text, self.constraints)
        return constraints_from_json(json.dumps(self.constraints), "constraints")


def data_below(folder: str) -> dict[str, str]:
    """Return the section data for a folder that `rayrec make-data` wrote."""
    whole = absolute_path("--data", folder)
    parts = {"train": f"{whole}/train", "eval": f"{whole}/eval", "schema": f"{whole}/schema.json"}
    for name in ("train", "schema"):
        if not os.path.exists(parts[name]):
            raise ConfigError(
                f"--data {folder} holds no {os.path.basename(parts[name])}; name a folder that "
                "`rayrec make-data DIR` wrote, or say in a run file where [data] train, eval and "
                "schema are."
            )
    return {name: path for name, path in parts.items() if os.path.exists(path)}
