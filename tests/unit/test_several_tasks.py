"""MMoE and PLE: equal to their papers' formulas, built by a recipe, and what is refused."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from rayrec.data import DenseColumn, Feature, FeatureSchema
from rayrec.errors import ConfigError
from rayrec.hstu_config import HSTUConfig
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.models import PLE, MMoE, MultiTaskTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.next_item_recipe import NextItemModel
from rayrec.recipe import ModelRecipe
from rayrec.sparse import KeyedJaggedTensor
from rayrec.spec.task import Task

KEYS, SIZES, WIDTHS, DENSE = ("user", "item"), (9, 7), (4, 3), 3
EXPERT = r"experts\.\d+\._mlp$"  # the module of one
NUMBERS_OF_LAYERS = "cross_layers", "extraction_layers", "shared_experts", "task_experts"
TASKS = (Task(name="click"), Task(name="genre", kind="multiclass", classes=3, weight=0.5))


def collection() -> EmbeddingBagCollection:
    sizes = zip(KEYS, SIZES, WIDTHS, strict=True)
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(n, width, key, feature_names=[key]) for key, n, width in sizes]
    )


Model = TypeVar("Model", MMoE, PLE)


def drawn(kind: type[Model], seed: int) -> tuple[Model, list[int], int]:
    """A model of random sizes, the outputs of its tasks, and its dense columns.

    PLE has one layer (CGC) to three.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outputs = [rng.choice([1, 1, 4]) for _ in range(rng.randint(1, 4))]
    columns = DENSE * rng.randint(0, 1)
    layers = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    tower = [rng.randint(1, 6) for _ in range(rng.randint(0, 2))]
    dense = [5, 2][: rng.randint(0, 2)]
    experts = [rng.randint(1, 4)]
    if kind is PLE:
        experts += [rng.randint(1, 3), 1 + seed % 3]
    model = kind(collection(), outputs, columns, dense, *experts, layers, tower)
    return model, outputs, columns


def batch(seed: int, columns: int) -> tuple[Tensor, KeyedJaggedTensor]:
    """Up to twelve rows, of bags of up to three ids."""
    rng = random.Random(seed)
    rows = rng.randint(0, 12)
    lengths = [rng.randint(0, 3) for _ in range(2 * rows)]
    ids = [
        rng.randrange(SIZES[n // rows]) for n, length in enumerate(lengths) for _ in range(length)
    ]
    kjt = KeyedJaggedTensor(
        list(KEYS),
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        stride=rows,
    )
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)), kjt


class Twin:
    """Both models in float64, expert by expert and task by task, from the parameters' names."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: p.double() for name, p in model.named_parameters()}

    def number(self, prefix: str) -> int:
        """Modules that are numbered below a name."""
        depth = prefix.count(".") + 1
        return len({n.split(".")[depth] for n in self.values if n.startswith(f"{prefix}.")})

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.values[f"{name}.weight"].T + self.values[f"{name}.bias"]

    def mlp(self, x: Tensor, name: str) -> Tensor:
        for layer in range(self.number(f"{name}._mlp")):
            x = self.linear(x, f"{name}._mlp.{layer}._linear").relu()
        return x

    def gate(self, x: Tensor, name: str, experts: list[Tensor]) -> Tensor:
        """f(x) = sum over experts of softmax(W x)_i f_i(x)."""
        exponents = (x @ self.values[f"{name}.linear.weight"].T).exp()
        shares = exponents / exponents.sum(1, keepdim=True)
        assert shares.shape[1] == len(experts)
        return sum((shares[:, i, None] * one for i, one in enumerate(experts)), x.new_zeros(()))

    def experts(self, x: Tensor, name: str) -> list[Tensor]:
        return [self.mlp(x, f"{name}.experts.{i}") for i in range(self.number(f"{name}.experts"))]

    def towers(self, inputs: list[Tensor]) -> Tensor:
        names = [f"towers.towers.{k}.model" for k in range(len(inputs))]
        pairs = zip(names, inputs, strict=True)
        return torch.cat([self.linear(self.mlp(x, f"{n}.0"), f"{n}.1") for n, x in pairs], 1)

    def input(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        parts = [self.mlp(dense.double(), "input_arch.dense_arch.model")]
        for key in KEYS:
            table = self.values[f"input_arch.embedding_bag_collection.embedding_bags.{key}.weight"]
            bags = table[ids[key].values()].split(ids[key].lengths().tolist())
            parts.append(torch.stack([bag.sum(0) for bag in bags]) if bags else table[:0])
        return torch.cat(parts, 1)

    def mmoe(self, x: Tensor, tasks: int) -> Tensor:
        experts = self.experts(x, "experts")
        return self.towers([self.gate(x, f"gates.{k}", experts) for k in range(tasks)])

    def ple(self, x: Tensor, tasks: int) -> Tensor:
        own, shared = [x] * tasks, x
        layers = self.number("layers")
        for layer in range(layers):
            name = f"layers.{layer}"
            of_tasks = [self.experts(own[k], f"{name}.experts.{k}") for k in range(tasks)]
            of_all = self.experts(shared, f"{name}.experts.{tasks}")
            mixed = [
                self.gate(own[k], f"{name}.gates.{k}", of_tasks[k] + of_all) for k in range(tasks)
            ]
            if layer < layers - 1:
                everything = [one for experts in of_tasks for one in experts] + of_all
                shared = self.gate(shared, f"{name}.gates.{tasks}", everything)
            own = mixed
        return self.towers(own)


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
