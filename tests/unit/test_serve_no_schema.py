"""An artifact without a feature schema takes tensors, and says what is missing where it is given
columns.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from rayrec.cli.main import main
from rayrec.data import ParquetDataset
from rayrec.errors import ConfigError, InputError
from rayrec.layout import EmbeddingBagConfig
from rayrec.modules import EmbeddingBagCollection
from rayrec.serve import Predictor, export
from rayrec.sparse import KeyedJaggedTensor, UnknownKeyError
from tests.unit.checkpoint_worlds import make_truth, random_plan, save_world
from tests.unit.serve_worlds import WIDTH, a_model, a_schema, a_world, rows


class IdsAlone(nn.Module):
    """A training module of the user's: bags of two tables, and no dense columns."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(40, WIDTH, name, feature_names=[name]) for name in ("user", "item")
        ]
        self.bags = EmbeddingBagCollection(tables, device="meta")
        self.top = nn.Linear(2 * WIDTH, 1)

    def forward(self, batch):
        dense = batch.dense_features
        logits = self.top(torch.cat([self.bags(batch.sparse_features).values(), dense], 1))[:, 0]
        return logits.sum(), (logits.sum(), logits, batch.labels)


@pytest.fixture(scope="module")
def truths():
    rng = random.Random(3)
    return [make_truth(rng, name, 40, WIDTH, "row") for name in ("user", "item")]


@pytest.fixture(scope="module")
def module() -> IdsAlone:
    torch.manual_seed(1)
    return IdsAlone()


@pytest.fixture(scope="module")
def artifact(truths, module, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    dense = {name: p.detach() for name, p in module.top.named_parameters(prefix="top")}
    save_world(str(folder / "ck"), truths, random_plan(random.Random(2), truths, 2), dense=dense)
    manifest = export(folder / "ck", folder / "out", types="fp32", model=IdsAlone)
    assert manifest.schema is None and manifest.recipe is None and not manifest.no_program
    return folder / "out"


def ids_of(*bags: list[int], keys: tuple[str, ...] = ("user", "item")) -> KeyedJaggedTensor:
    """One row; a bag for each key."""
    values = torch.tensor([one for bag in bags for one in bag], dtype=torch.int64)
    return KeyedJaggedTensor(list(keys), values, lengths=torch.tensor([len(bag) for bag in bags]))


@pytest.mark.parametrize("model", [None, IdsAlone])
def test_it_takes_tensors(artifact, truths, module, model):
    predictor = Predictor.load(artifact, model=model)
    assert predictor.schema is None
    user, item = (truth.weight for truth in truths)
    wanted = module.top(torch.cat([user[[3, 7]].sum(0), item[39]])).sigmoid().detach()
    torch.testing.assert_close(predictor.predict(ids_of([3, 7], [39])), wanted)
    torch.testing.assert_close(
        predictor.predict(ids_of([39], [3, 7], keys=("item", "user"))), wanted
    )
    assert predictor.predict(ids_of([], [])).shape == (1,)


@pytest.mark.parametrize("model", [None, IdsAlone])
def test_tensors_of_another_model_are_refused(artifact, model):
    predictor = Predictor.load(artifact, model=model)
    with pytest.raises(InputError, match=r"does not take dense \(1, 3\) beside the keys \['user'"):
        predictor.predict(ids_of([3], [9]), torch.zeros(1, 3))
    with pytest.raises(InputError, match=r"dense is \(2, 3\) torch.float32; these ids have 1 rows"):
        predictor.predict(ids_of([3], [9]), torch.zeros(2, 3))
    with pytest.raises(UnknownKeyError, match=r"no key 'item' .* it has \['user', 'word'\]"):
        predictor.predict(ids_of([3], [9], keys=("user", "word")))
    with pytest.raises(InputError, match="id 40 of key 'item'"):
        predictor.predict(ids_of([3], [40]))


def test_it_takes_no_columns(artifact):
    predictor = Predictor.load(artifact)
    for ask in (
        lambda: predictor.predict([{"user": 3, "item": 9}]),
        lambda: predictor.predict([]),
        lambda: predictor.predict(rows(3)),
        lambda: predictor.logits(rows(3)),
        lambda: predictor.read(rows(3)),
        lambda: predictor.predict_candidates({"user": 3}, [{"item": 9}]),
    ):
        with pytest.raises(ConfigError) as caught:
            ask()
        assert str(caught.value) == (
            "the artifact has no schema, so rows of columns cannot be read; give a "
            "KeyedJaggedTensor and dense, or export with schema=."
        )


def told(capsys, *words: str) -> str:
    """The one line of a command that fails by a mistake of its user."""
    code = main(list(words))
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1, said
    return said.err


def test_commands_say_what_is_missing(artifact, tmp_path, capsys):
    line = told(capsys, "serve", str(artifact), "--port", "0")
    assert line == (
        f"error: {artifact} has no schema, so a server cannot read columns; export the checkpoint "
        "with schema=.\n"
    )
    (tmp_path / "rows").mkdir()
    table = rows(20)
    small = pa.array(table["item"].to_numpy() % 40)  # the tables of this model have 40 rows
    table = table.set_column(table.schema.get_field_index("item"), "item", small)
    pq.write_table(table, tmp_path / "rows" / "a.parquet")
    words = ("predict", str(artifact), "--data", str(tmp_path / "rows"))
    line = told(capsys, *words, "--out", str(tmp_path / "scores"))
    assert line == (
        f"error: {artifact} has no schema.json; give --schema, which says what columns are.\n"
    )
    (tmp_path / "schema.json").write_text(a_schema().to_json())
    more = ("--out", str(tmp_path / "scores"), "--schema", str(tmp_path / "schema.json"))
    line = told(capsys, *words, *more)
    assert line.startswith("error: the model does not take dense (20, 2) beside the keys ['user', ")
    assert not (tmp_path / "scores").exists()


def test_a_model_with_dense_columns_is_exported_by_the_schema_of_the_data(tmp_path, capsys):
    world = a_world(tmp_path, 4, with_recipe=False)
    model = lambda: a_model(world.schema, "meta")  # noqa: E731
    with pytest.raises(
        ConfigError, match=r"DLRMTrain does not take rows of ids alone .* schema=, "
    ):
        export(world.checkpoint, tmp_path / "out", model=model)
    assert not (tmp_path / "out").exists()
    data = ParquetDataset(str(tmp_path / "eval"), world.schema)
    export(world.checkpoint, tmp_path / "out", types="fp32", model=model, data=data)
    predictor = Predictor.load(tmp_path / "out")
    assert predictor.schema == world.schema
    table = rows(40, 9)
    torch.testing.assert_close(predictor.logits(table), world.logits(table), rtol=1e-4, atol=1e-5)
