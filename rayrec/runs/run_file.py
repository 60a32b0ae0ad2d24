"""Run files: one training run as TOML, with the sections model, data, scaling, run and plan.

    [model]
    model = "dcn"
    [data]
    train = "data/clicks/train"
    schema = "data/clicks/schema.json"
    [run]
    global_batch_size = 8192
    steps = 500
    [run.checkpoint]
    every_n_steps = 100

The sections are dataclasses, and their fields the keys: `ModelRecipe` without its schema and tasks,
`TwoTowerModel` or `NextItemModel`, `DataSection`, `ScalingConfig`, `RunConfig` and `PlanSection`.
Relative paths are taken from the working directory of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import tomli_w

from rayrec.driver import Driver, RunConfig, ScalingConfig
from rayrec.errors import ConfigError
from rayrec.fields.kinds import NONE
from rayrec.fields.misfit import meant, wrong
from rayrec.fields.reading import read_table
from rayrec.fields.writing import table_of
from rayrec.next_item_recipe import NEXT_ITEM, NextItemModel
from rayrec.recipe import MODELS, OPTIONS_OF, ModelRecipe
from rayrec.runs.inputs import read_text
from rayrec.runs.next_item import run_options
from rayrec.runs.retrieval import TWO_TOWER, TwoTowerModel
from rayrec.runs.scaling import default_ranks
from rayrec.runs.sections import DataSection, PlanSection, data_below
from rayrec.runs.toml_tree import Option, read_settings
from rayrec.train.optimizer_config import DEFAULT_BATCH

if TYPE_CHECKING:
    from torch import nn

    from rayrec.data import FileDataset
    from rayrec.train.config import TrainData
    from rayrec.train.tasks import Scorer

DEFAULT_MODEL = ModelRecipe(model="dlrm", schema="")
_WHERE = (
    "[data] where and eval_where are for click models; {model!r} takes all rows. Leave them out."
)
_ON_THE_WAY = (
    "is for click models, which are scored on the way; {model!r} ranks items after training alone. "
    "Leave it out."
)
# keys of [data] that not all models take -> those that do, and why others do not
_OF_MODELS: dict[str, tuple[tuple[type, ...], str]] = {
    "work_dir": (
        (TwoTowerModel,),
        f"[data] work_dir is for {TWO_TOWER!r}, which writes rows of its own; leave it out.",
    ),
    "where": ((ModelRecipe, NextItemModel), _WHERE),
    "eval_where": ((ModelRecipe, NextItemModel), _WHERE),
    "num_streams": (
        (ModelRecipe, NextItemModel),
        "[data] num_streams is for click models; {model!r} writes rows of its own. Leave it out.",
    ),
    "windows": ((ModelRecipe,), f"[data.windows] {_ON_THE_WAY}"),
    "stream": ((ModelRecipe,), f"[data.stream] {_ON_THE_WAY}"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """Sections of a run file, with the options beside it; `source` names it in messages.

    The schema of a click model's recipe is read later, from `data.schema`.
    """

    model: ModelRecipe | TwoTowerModel | NextItemModel
    data: DataSection
    scaling: ScalingConfig
    run: RunConfig
    plan: PlanSection
    source: str

    @classmethod
    def read(
        cls,
        path: str | None,
        changes: Sequence[str] = (),
        data: str | None = None,
        options: Sequence[Option] = (),
    ) -> RunFile:
        """Read a run file.

        Args:
            path: the file; None takes the defaults.
            changes: values of `--set`.
            data: a folder that `rayrec make-data` wrote, instead of the section data.
        Raises:
            ConfigError: the file is no TOML, or something in it does not fit; names the place.
        """
        settings = read_settings(path, changes, options)
        tables = settings.tables
        sections = ("model", "data", "scaling", "run", "plan")
        for name, table in tables.items():
            if name not in sections:
                near = meant(name, sections)
                raise ConfigError(
                    f"{settings.source_of((name,))}: there is no section {name}{near}"
                )
            if not isinstance(table, dict):
                odd = wrong(table, f"a section, [{name}]").at(name)
                raise odd.in_run_file(settings.source_of)
        if data is not None:
            said = tables.setdefault("data", {})
            made = any(changed[:2] == ("data", "planted") for changed in settings.changes)
            if made or {"train", "eval", "schema"} & set(said):
                raise ConfigError(
                    f"{settings.source_of(('data',))}: [data] says where the data lie, and so does "
                    "--data. Leave one of them out."
                )
            said.pop("planted", None)
            said.update(data_below(data))
        run, model = tables.get("run", {}), tables.get("model", {})

        def read(name: str, kind: type, base: Any = None, **fixed: Any) -> Any:
            return read_table(kind, tables.get(name, {}), name, settings.source_of, base, **fixed)

        word = model.get("model", DEFAULT_MODEL.model)
        names = (*MODELS, TWO_TOWER, *NEXT_ITEM)
        if isinstance(word, str) and word not in names:
            raise ConfigError(
                f"{settings.source_of(('model', 'model'))}: [model] model {word!r} is not known; "
                f"choose one of {', '.join(names)}."
            )
        if word == TWO_TOWER:
            section = read("model", TwoTowerModel)
        elif word in NEXT_ITEM:
            section = read("model", NextItemModel)
        else:
            section = read("model", ModelRecipe, DEFAULT_MODEL, schema="", tasks=())
        whole = cls(
            model=section,
            data=read("data", DataSection),
            scaling=read("scaling", ScalingConfig, _default_scaling()),
            run=read("run", RunConfig, _default_run("steps" in run, section)),
            plan=read("plan", PlanSection),
            source=settings.file or "the command line",
        )
        whole._check_used(settings.source_of, run)
        planted = whole.data.planted
        if planted is None or "seed" in tables["data"]["planted"]:
            return whole
        planted = replace(planted, seed=whole.run.seed)
        return replace(whole, data=replace(whole.data, planted=planted))

    def _check_used(
        self, source_of: Callable[[tuple[str, ...]], str], run: Mapping[str, Any]
    ) -> None:
        """Check that the run uses what is said of it, in `run` as the user wrote it."""
        ignored = []
        # who says storage_path = "none" has switched off what else is said of it
        if "name" in run and "storage_path" not in run:
            ignored.append(("run", "name", "it is the folder below run.storage_path; give that"))
        if not isinstance(self.model, ModelRecipe):
            if self.run.tasks:
                why = f"click models have tasks, and {self.model.model} has none"
                ignored.append(("run", "tasks", why))
            if self.run.drop_last and isinstance(self.model, TwoTowerModel):
                why = "two_tower leaves a last partial batch out in any case"
                ignored.append(("run", "drop_last", why))
        else:
            for key, owners in OPTIONS_OF.items():
                changed = getattr(self.model, key) != getattr(DEFAULT_MODEL, key)
                if changed and self.model.model not in owners:
                    owner = " or ".join(map(repr, owners))
                    why = f"it is of model {owner}, and the run's is {self.model.model!r}"
                    ignored.append(("model", key, why))
        for section, key, why in ignored:
            where = source_of((section, key))
            raise ConfigError(f"{where}: [{section}] {key} would have no effect: {why}.")

    def to_toml(self) -> str:
        """Return the complete effective run as TOML; reading it gives the same run.

        Raises:
            ConfigError: a field holds code.
        """
        in_steps = self.run.steps is not None
        return tomli_w.dumps(
            {
                "model": table_of(self.model, leave_out=("schema", "tasks")),
                "data": table_of(self.data),
                "scaling": table_of(self.scaling, _default_scaling()),
                # a name without the key would be a mistake
                "run": {
                    "storage_path": NONE,
                    **table_of(self.run, _default_run(in_steps, self.model)),
                },
                "plan": table_of(self.plan),
            }
        )

    def schema_text(self) -> str:
        """Return the text of the schema, if the model takes what is said of the data.

        Raises:
            ConfigError: the data are not said, or not as the model takes them, or the schema cannot
                be read.
        """
        for name, (models, why) in _OF_MODELS.items():
            if getattr(self.data, name) is not None and not isinstance(self.model, models):
                raise ConfigError(f"{self.source}: {why.format(model=self.model.model)}")
        if self.data.stream is None:
            self.needed("train")
        text = read_text("[data] schema", self.needed("schema"))
        if not isinstance(self.model, ModelRecipe):
            self.needed("eval")
        return text

    def needed(self, name: str) -> str:
        """Return what the section data says of a path, which it must say."""
        path: str | None = getattr(self.data, name)
        if path is None:
            maker = "python -m jobs.convert_movielens SOURCE DIR"
            if isinstance(self.model, ModelRecipe):
                maker = "rayrec make-data DIR"
            raise ConfigError(
                f"{self.source}: [data] needs {name}; say --set data.{name}=..., or --data DIR of "
                f"a folder with train, eval and schema.json, such as `{maker}` writes."
            )
        return path

    def driver(
        self,
        model: Callable[[], nn.Module],
        data: TrainData,
        run: RunConfig,
        eval_data: FileDataset | None = None,
        scorer: Scorer | None = None,
    ) -> Driver:
        """Return the driver; `run` is that of the file with what follows from the data."""
        return Driver(
            model,
            data,
            self.scaling,
            run,
            eval_data=eval_data,
            plan=self.plan.plan,
            constraints=self.plan.by_table(),
            topology=self.plan.topology,
            scorer=scorer,
        )


def _default_scaling() -> ScalingConfig:
    return ScalingConfig(num_workers=default_ranks())


def _default_run(in_steps: bool, model: object) -> RunConfig:
    """Return the run options of a file without the section: one epoch, unless it gives steps."""
    run = RunConfig(
        global_batch_size=DEFAULT_BATCH,
        steps=1 if in_steps else None,
        epochs=None if in_steps else 1,
    )
    return replace(run, **run_options(model)) if isinstance(model, NextItemModel) else run
