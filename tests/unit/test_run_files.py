"""Run files: what is written is read back as the same run, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from rayrec.driver import CheckpointConfig, OptimizerConfig, ProfileConfig, RunConfig
from rayrec.errors import ConfigError
from rayrec.fields.reading import read_table
from rayrec.fields.writing import table_of
from rayrec.optim import Adam
from rayrec.runs.run_file import RunFile
from rayrec.spec.schedule import WarmupPolicy, WarmupStage
from rayrec.train.callbacks import Callback
from rayrec.train.shaping import EarlyStopping, EvaluationConfig

RUN = """
[model]
model = "dcn"
dense_layers = [32, 16]

[data]
train = "clicks/train"
schema = "clicks/schema.json"

[scaling]
num_workers = 4
resources_per_worker = {disk = 2}

[run]
global_batch_size = 512
steps = 40
name = "a"
storage_path = "runs"
dense_dtype = "bfloat16"

[[run.sparse_schedule]]
policy = "linear"
max_iters = 10
[[run.sparse_schedule]]
policy = "poly"
max_iters = 40

[run.sparse_optimizer]
type = "Adam"
lr = 0.02
weight_decay = 0.1

[run.dense_optimizer]
lr = 1

[run.table_optimizers.t_cat_0]
name = "sgd"
lr = 0.5

[run.checkpoint]
every_n_steps = 10

[run.evaluation]
every_n_steps = 10
score = "auc"
early_stopping = {patience = 2}

[run.profile]
path = "profile"

[plan]
plan = "auto"
[plan.constraints.t_cat_0]
kinds = ["row_wise"]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """RUN in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def test_every_section_becomes_its_config(file: Path, tmp_path: Path) -> None:
    read = RunFile.read("run.toml")
    assert (read.model.model, read.model.dense_layers) == ("dcn", (32, 16))
    assert read.model.over_layers == (64, 32)
    assert (read.data.train, read.data.eval) == (f"{tmp_path}/clicks/train", None)
    assert (read.scaling.num_workers, read.scaling.resources_per_worker) == (4, {"disk": 2.0})
    assert read.run == RunConfig(
        global_batch_size=512,
        steps=40,
        name="a",
        storage_path=f"{tmp_path}/runs",
        dense_dtype="bfloat16",
        sparse_schedule=(WarmupStage(WarmupPolicy.LINEAR, 10), WarmupStage(WarmupPolicy.POLY, 40)),
        sparse_optimizer=Adam(lr=0.02, weight_decay=0.1),
        dense_optimizer=OptimizerConfig(name="adam", lr=1.0),
        table_optimizers={"t_cat_0": OptimizerConfig(name="sgd", lr=0.5)},
        checkpoint=CheckpointConfig(every_n_steps=10),
        evaluation=EvaluationConfig(
            every_n_steps=10, score="auc", early_stopping=EarlyStopping(patience=2)
        ),
        profile=ProfileConfig(path=f"{tmp_path}/profile"),
    )
    constraints = read.plan.by_table()
    assert constraints is not None and constraints["t_cat_0"].kinds == ["row_wise"]


@pytest.mark.parametrize(
    "changes",
    [
        (),
        ("run.epochs=3",),
        (
            "run.profile=none",
            "run.evaluation=none",
            "run.storage_path=none",
            "run.checkpoint.every_n_steps=none",
        ),
        ('run.extras={who = "me", at = [1, {b = 2.5}]}', "run.drop_last=true"),
        ("run.sparse_optimizer={lr = 0.3}", "run.sparse_optimizer.type=RowWiseAdagrad"),
        ('run.dense_optimizer={name = "adagrad", lr = 0.3, options = {eps = 1e-4}}',),
        ("run.sparse_optimizer={name = 'adam', lr = 0.3}", "run.dense_optimizer=sgd"),
        ('run.sparse_schedule={decay = "linear"}', "run.dense_schedule={warmup = 3}"),
        ("run.sparse_schedule=[]", "scaling.resources_per_worker=none", "scaling.pin_cores=true"),
        ("plan.plan=row_wise", "plan.constraints=none", "data.eval=s3://bucket/eval"),
        ("scaling.cpus_per_worker=0.5", "run.timeout_s=1e3"),
        ("scaling.spares=2", "run.failure.max_failures=3"),
    ],
)
@pytest.mark.parametrize("with_file", [True, False])
def test_what_is_printed_is_read_as_the_same_run(
    file: Path, tmp_path: Path, changes: tuple[str, ...], with_file: bool
) -> None:
    read = RunFile.read(str(file) if with_file else None, changes)
    printed = tmp_path / "printed.toml"
    printed.write_text(read.to_toml())
    again = RunFile.read(str(printed))
    assert replace(again, source="") == replace(read, source="")
    assert again.to_toml() == read.to_toml()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["run.stepz=5"], r"^--set run.stepz=5: \[run\] has stepz; did you mean steps\?$"),
        (["modle.model=dlrm"], r"there is no section modle; did you mean model\?"),
        (["run.steps=many"], r"^--set run.steps=many: \[run\] steps is 'many'; .* whole number"),
        (["run.steps=true"], r"steps is true; it must be a whole number"),
        (["run.steps=5.0"], r"steps is 5\.0; it must be a whole number"),
        (["run.shuffle=1"], r"\[run\] shuffle is 1; it must be true or false"),
        (["run.name=5"], r"\[run\] name is 5; it must be a text"),
        (["run.progress=loud"], r"progress is 'loud'; it must be one of 'auto', 'plain', 'off'"),
        (["run.checkpoint.keep=3"], r"\[run\.checkpoint\] has keep; there are every_n_steps"),
        (["run.checkpoint=5"], r"\[run\] checkpoint is 5; it must be a table"),
        (["run.profile={steps = 3}"], r"\[run\.profile\] needs path: a text"),
        (["run.callbacks=[1]"], r"\[run\] has callbacks, which holds code .*Python API"),
        (["run.rank_callbacks=[]"], r"\[run\] has rank_callbacks, which holds code"),
        (['model.over_layers=[8, "x"]'], r"\[model\.over_layers\] item 2 is 'x'"),
        (["model.over_layers=[0]"], r"\[model\] over_layers has the size=0; .* at least 1|between"),
        (["model.schema=x"], r"\[model\] has schema;"),
        (
            ["model.model=dlrm", "model.cross_rank=3"],
            r"^--set model\.cross_rank=3: \[model\] cross_rank would have no effect: .* 'dcn'",
        ),
        (['run.sparse_schedule=[{policy = "lin"}]'], r"item 1\] policy is 'lin'; .*'linear'"),
        (['run.sparse_schedule={decay = "poly"}'], r"\[run\.sparse_schedule\] decay is 'poly'"),
        (["run.sparse_schedule=[{max_iters = 0}]"], r"item 1\] WarmupStage\(max_iters=0\)"),
        (["run.sparse_optimizer={lr = 0.1, eps = 0.1}"], r"needs type, .* one of SGD, Adagrad"),
        (["run.sparse_optimizer.type=Adagard"], r"type is 'Adagard'; it must be one of SGD"),
        (["run.global_batch_size=0"], r"run\.toml with --set .*: \[run\] .*at least 1"),
        (["run.steps.x=1"], r"^--set run.steps.x=1: run.steps is 40 and no table"),
        (["scaling.num_workers=-1"], r"\[scaling\] ScalingConfig has num_workers=-1"),
        (["plan.constraints.t_cat_0.kind=1"], r"\[plan\] constraints: t_cat_0 has .* 'kind'"),
        (["plan.constraints=nowhere.json"], r"cannot read constraints .*nowhere\.json"),
        (["data.train="], r"\[data\] train=''; it must be a path"),
        (["steps=5"], r"--set steps=5 must be SECTION\.KEY=VALUE"),
        (["run.steps"], r"--set run.steps must be SECTION\.KEY=VALUE"),
        (["run.a b=1"], r"'run\.a b' is no key of TOML"),
        (["# run.steps=1"], r"'# run\.steps' is no key of TOML"),
        (['run.name="a'], r'^--set run.name="a has " without a second one'),
        (["run.name=a'"], r"has ' without a second one"),
        (["run.storage_path=s3:/b"], r"='s3:/b', a folder called 's3:'\. Write s3://b for a URI"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_wanted(
    file: Path, changes: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        RunFile.read("run.toml", changes)


def test_tasks_that_towers_do_not_have_are_refused(tmp_path: Path) -> None:
    towers = '[model]\nmodel = "two_tower"\nquery = ["user"]\ncandidate = ["item"]\n'
    path = tmp_path / "towers.toml"
    path.write_text(towers + '[[run.tasks]]\nname = "click"\n')
    with pytest.raises(ConfigError, match=r"towers\.toml: \[run\] tasks would have no effect"):
        RunFile.read(str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[run]\nsteps = 3\nsteps =\n", r"^bad\.toml, line 3 is no TOML"),
        ("[run]\nsteps = [1,\n2", r"^bad\.toml, line 3 is no TOML"),
        pytest.param(
            f"[run]\nsteps = {'9' * 5000}",
            r"^bad\.toml, line 2 is no TOML: .* \(4300 digits\)",
            id="digits",
        ),
        ("[run]\nsteps = 3\nsteps = 4\n", r"^bad\.toml, line 3 is no TOML"),
        ("run = 5\n", r"^bad\.toml: run is 5; it must be a section, \[run\]"),
        ("[run]\nsteps = 5\nepochs = 2\n", r"^bad\.toml: \[run\] .*steps=5 and epochs=2"),
        ("[runn]\n", r"^bad\.toml: there is no section runn; did you mean run\?"),
        (b"\xff\xfe", r"cannot read the run file bad\.toml as text"),
    ],
)
def test_a_broken_file_is_named_with_the_line(file: Path, text: str | bytes, says: str) -> None:
    Path("bad.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=says):
        RunFile.read("bad.toml")
    with pytest.raises(ConfigError, match=r"cannot read the run file nowhere\.toml: No such file"):
        RunFile.read("nowhere.toml")


def test_a_change_of_steps_takes_the_place_of_epochs(file: Path) -> None:
    assert RunFile.read("run.toml", ["run.epochs=2"]).run.epochs == 2
    assert RunFile.read("run.toml", ["run.epochs=2"]).run.steps is None
    with pytest.raises(ConfigError, match="exactly one"):
        RunFile.read("run.toml", ["run.epochs=2", "run.steps=2"])


def test_words_that_are_no_toml_are_texts(file: Path) -> None:
    changes = ["data.train=days/2026-11-01", "data.eval=2026-11-01", "run.name=a-b"]
    read = RunFile.read("run.toml", changes)
    assert str(read.data.train).endswith("/days/2026-11-01")
    assert str(read.data.eval).endswith("/2026-11-01") and read.run.name == "a-b"


def test_code_is_not_printed_but_refused(file: Path) -> None:
    read = RunFile.read("run.toml")
    with_code = replace(read, run=replace(read.run, callbacks=(Callback(),)))
    with pytest.raises(ConfigError, match=r"RunConfig\.callbacks=.* cannot be said in a run file"):
        with_code.to_toml()


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Shape:
    size: int = 1


@dataclass(frozen=True)
class Square(Shape):
    corners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Circle(Shape):
    radius: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Everything:
    """A field of every type that a run file can say."""

    colour: Colour = Colour.RED
    place: Path = Path("here")
    pair: tuple[int, str] = (1, "a")
    names: Sequence[str] = ()
    numbers: list[float] = field(default_factory=list)
    either: int | str = 0
    maybe: Circle | None = Circle(radius=1.0)
    shape: Shape = field(default_factory=Shape)
    shapes: tuple[Shape, ...] = ()
    by_name: Mapping[str, Circle] = field(default_factory=dict)
    word: Literal["a", "b"] | None = None
    anything: Any = 0
    function: Callable[[], int] | None = None


def _read(table: dict[str, Any]) -> Everything:
    return read_table(Everything, table, "t", lambda _: "the test")  # type: ignore[no-any-return]


def test_fields_of_every_type_are_read_and_written_back() -> None:
    table = {
        "colour": "blue",
        "place": "there",
        "pair": [2, "b"],
        "names": ["x", "y"],
        "numbers": [1, 2.5],
        "either": "seven",
        "maybe": "none",
        "shape": {"type": "Square", "corners": [1, 2]},
        "shapes": [{"radius": 2.0}, {"type": "Shape", "size": 3}, {"type": "Square"}],
        "by_name": {"one": {"radius": 1.0, "size": 4}},
        "word": "b",
        "anything": {"deep": [1, "2"]},
    }
    value = _read(table)
    assert value == Everything(
        colour=Colour.BLUE,
        place=Path("there"),
        pair=(2, "b"),
        names=("x", "y"),
        numbers=[1.0, 2.5],
        either="seven",
        maybe=None,
        shape=Square(corners=(1, 2)),
        shapes=(Circle(radius=2.0), Shape(3), Square()),
        by_name={"one": Circle(4, radius=1.0)},
        word="b",
        anything={"deep": [1, "2"]},
    )
    assert _read(table_of(value)) == value
    assert _read({"maybe": {"size": 2}}).maybe == Circle(2, radius=1.0)  # over the default


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"colour": "green"}, r"\[t\] colour is 'green'; it must be one of 'red', 'blue'"),
        ({"pair": [1]}, r"pair is \[1\]; it must be a list of 2: a whole number, a text"),
        ({"numbers": ["a"]}, r"\[t\.numbers\] item 1 is 'a'; it must be a number"),
        ({"either": 1.5}, r"either is 1\.5; it must be a whole number or a text"),
        ({"by_name": {"one": {"radios": 1.0}}}, r"\[t\.by_name\.one\] has radios; .* radius\?"),
        ({"by_name": {"one": 3}}, r"\[t\.by_name\] one is 3; it must be a table"),
        ({"shapes": [{"size": 3}]}, r"item 1\] needs type, .* Shape, Square, Circle"),
        ({"function": "f"}, r"\[t\] has function, which holds code"),
        ({"word": "c"}, r"word is 'c'; it must be one of 'a', 'b' or \"none\""),
    ],
)
def test_a_value_of_another_type_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^the test: .*{says}"):
        _read(table)
