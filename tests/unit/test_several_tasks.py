"""MMoE and PLE: equal to their papers' formulas, built by a recipe, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rayrec.data import DenseColumn, Feature, FeatureSchema
from rayrec.errors import ConfigError
from rayrec.hstu_config import HSTUConfig
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.models import PLE, MMoE, MultiTaskTrain
from rayrec.next_item_recipe import NextItemModel
from rayrec.recipe import ModelRecipe
from rayrec.spec.task import Task
from tests.unit.task_twins import KEYS, SIZES, WIDTHS, Twin, batch, collection, drawn

EXPERT = r"experts\.\d+\._mlp$"  # the module of one
NUMBERS_OF_LAYERS = "cross_layers", "extraction_layers", "shared_experts", "task_experts"
TASKS = (Task(name="click"), Task(name="genre", kind="multiclass", classes=3, weight=0.5))


def assert_equal_with_gradients(model: nn.Module, ours: Tensor, wanted: Tensor) -> None:
    """Compare outputs, and the gradients of a random sum of them; float32 against float64."""
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(ours.double(), wanted, **close)
    factors = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    parameters = list(model.parameters())
    # no gradient at all: the formulas use every parameter, and so does the model
    got = torch.autograd.grad((ours * factors).sum(), parameters)
    truth = torch.autograd.grad((wanted * factors).sum(), parameters)
    for one, want in zip(got, truth, strict=True):
        torch.testing.assert_close(one, want, check_dtype=False, **close)


@pytest.mark.seeds(range(100))
def test_mmoe_equals_the_formulas_of_its_paper(seed):
    model, outputs, columns = drawn(MMoE, seed)
    dense, ids = batch(seed, columns)
    twin = Twin(model)
    ours = model(dense, ids)
    assert ours.shape == (len(dense), sum(outputs))
    wanted = twin.mmoe(twin.input(dense, ids), len(outputs))
    assert_equal_with_gradients(model, ours, wanted)


@pytest.mark.seeds(range(100))
def test_ple_equals_the_formulas_of_its_paper(seed):
    model, outputs, columns = drawn(PLE, seed)
    dense, ids = batch(seed, columns)
    twin = Twin(model)
    ours = model(dense, ids)
    assert ours.shape == (len(dense), sum(outputs))
    wanted = twin.ple(twin.input(dense, ids), len(outputs))
    assert_equal_with_gradients(model, ours, wanted)


@pytest.mark.parametrize("kind", [MMoE, PLE])
def test_what_has_no_tasks_experts_or_layers_is_refused(kind):
    with pytest.raises(ConfigError, match="task_outputs is empty"):
        kind(collection(), [])
    with pytest.raises(ConfigError, match="expert_layer_sizes is empty"):
        kind(collection(), [1, 1], expert_layer_sizes=[])
    option = "num_experts" if kind is MMoE else "task_experts"
    with pytest.raises(ConfigError, match="number of experts=0"):
        kind(collection(), [1, 1], **{option: 0})
    if kind is PLE:
        with pytest.raises(ConfigError, match="extraction_layers=0"):
            PLE(collection(), [1, 1], extraction_layers=0)


def a_recipe(model: str = "mmoe", **changes: object) -> ModelRecipe:
    sizes = zip(KEYS, SIZES, WIDTHS, strict=True)
    schema = FeatureSchema(
        label=("click", "genre"),
        dense=(DenseColumn(column="price"),),
        features=tuple(Feature(name=key, column=key) for key in KEYS),
        tables=tuple(EmbeddingBagConfig(n, w, key, feature_names=[key]) for key, n, w in sizes),
    )
    return ModelRecipe(**{"model": model, "schema": schema.to_json(), "tasks": TASKS, **changes})


def test_a_recipe_builds_what_it_says():
    sizes = {"over_layers": (5,), "dense_layers": (6,), "expert_layers": (4, 2)}
    model = a_recipe(shared_experts=3, **sizes)()
    assert isinstance(model, MultiTaskTrain) and model.tasks == TASKS
    shapes = {name: tuple(p.shape) for name, p in model.model.named_parameters()}
    assert shapes["experts.experts.2._mlp.1._linear.weight"] == (2, 4)
    assert shapes["experts.experts.0._mlp.0._linear.weight"] == (4, 6 + sum(WIDTHS))
    assert shapes["gates.1.linear.weight"] == (3, 6 + sum(WIDTHS))
    assert shapes["towers.towers.1.model.1.weight"] == (3, 5)
    ple = a_recipe("ple", shared_experts=3, task_experts=2, extraction_layers=3, **sizes)()
    shapes = {name: tuple(p.shape) for name, p in ple.model.named_parameters()}
    assert shapes["layers.0.gates.1.linear.weight"] == (2 + 3, 6 + sum(WIDTHS))
    assert shapes["layers.1.gates.2.linear.weight"] == (2 + 2 + 3, 2)
    assert "layers.2.gates.2.linear.weight" not in shapes and len(ple.model.layers) == 3


@pytest.mark.parametrize("model", ["mmoe", "ple"])
def test_a_recipe_is_read_as_it_was_written(model):
    recipe = a_recipe(model)
    assert ModelRecipe.from_extras(recipe.to_extras(), "x") == recipe
    assert ModelRecipe.from_extras(json.loads(json.dumps(recipe.to_extras())), "x") == recipe
    # the checkpoints of before have no tasks
    old = {"model": "dlrm", "schema": recipe.schema}
    assert ModelRecipe.from_extras({"recipe": old}, "x").tasks == ()
    for tasks in (5, [5], [{"title": "click"}]):
        with pytest.raises(ConfigError, match="does not say how to build its model"):
            ModelRecipe.from_extras({"recipe": {**old, "model": model, "tasks": tasks}}, "x")


@pytest.mark.parametrize("bound", [1e39, 2e38, math.nan, -1.0])
def test_first_values_beyond_float32_are_refused_with_the_option(bound):
    for make in (a_recipe, partial(NextItemModel, model="sasrec")):
        with pytest.raises(ConfigError, match=r"^init_bound=.* above 0 and at most 1.701e\+38"):
            make(init_bound=bound)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        *((a_recipe, option) for option in NUMBERS_OF_LAYERS),
        (HSTUConfig, "layers"),
        (partial(NextItemModel, model="sasrec"), "layers"),
    ],
)
def test_a_model_has_no_more_layers_than_memory_holds(make, option):
    make(**{option: 1000})
    with pytest.raises(ConfigError, match=f"^{option}=100000; it must be between 1 and 1000"):
        make(**{option: 100_000})


@pytest.mark.parametrize("model", ["mmoe", "ple"])
def test_recipes_that_contradict_themselves_are_refused(model):
    with pytest.raises(ConfigError, match=r"'dcn' has tasks=\['click', 'genre'\].*mmoe and ple"):
        a_recipe("dcn")
    with pytest.raises(ConfigError, match=f"'{model}' predicts several tasks and has 1"):
        a_recipe(model, tasks=TASKS[:1])()
    with pytest.raises(ConfigError, match="expert_layers is empty"):
        a_recipe(model, expert_layers=())
    with pytest.raises(ConfigError, match="expert_layers has the size=0"):
        a_recipe(model, expert_layers=(0,))
    with pytest.raises(ConfigError, match="task_experts=0"):
        a_recipe(model, task_experts=0)
    schema = FeatureSchema.from_json(a_recipe().schema)
    sequences = EmbeddingConfig(9, 4, "user", feature_names=["user"])
    schema = replace(schema, tables=(sequences, schema.tables[1]))
    with pytest.raises(ConfigError, match=f"pooling none, and {model}"):
        a_recipe(model, schema=schema.to_json())()


@pytest.mark.parametrize("model", ["mmoe", "ple"])
@pytest.mark.seeds(range(20))
def test_the_bound_of_layers_holds(model, seed):
    """A reader of recipes of others refuses what has more layers than there are tensors."""
    rng = random.Random(seed)
    recipe = a_recipe(
        model,
        dense_layers=(2,) * rng.randint(0, 4),
        over_layers=(2,) * rng.randint(0, 4),
        expert_layers=(2,) * rng.randint(1, 4),
        shared_experts=rng.randint(1, 4),
        task_experts=rng.randint(1, 4),
        extraction_layers=rng.randint(1, 4),
    )
    module = recipe()
    of_experts = [name for name, _ in module.named_modules() if re.search(EXPERT, name)]
    dense = [p for p in module.parameters() if not p.is_meta]
    assert len(of_experts) * len(recipe.expert_layers) <= recipe.layers() <= len(dense)
