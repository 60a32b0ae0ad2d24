"""Numbers beside TorchRec's own, where it is installed; the other tests compare with formulas."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import random
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rayrec.distributed
import rayrec.layout
import rayrec.models
import rayrec.modules
import rayrec.optim
from rayrec.data import RandomRecDataset
from rayrec.metrics import BinaryMetrics, Gauc
from rayrec.optim import DenseRowWiseAdagrad, WarmupPolicy
from rayrec.sparse import KeyedJaggedTensor

pytest.importorskip("torchrec", reason="TorchRec is not installed")

import torchrec.datasets.random
import torchrec.distributed.embeddingbag
import torchrec.metrics.accuracy
import torchrec.metrics.gauc
import torchrec.metrics.ne
import torchrec.models.deepfm
import torchrec.models.dlrm
import torchrec.modules.activation
import torchrec.modules.crossnet
import torchrec.modules.feature_processor_
import torchrec.modules.fp_embedding_modules
import torchrec.modules.fused_embedding_modules
import torchrec.modules.mlp
import torchrec.modules.regroup
import torchrec.optim
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed import planner

CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32 sums in another order


def random_stages(seed: int) -> list[tuple[str, dict]]:
    """Names of policies and options of up to four stages."""
    rng, specs = random.Random(seed), []
    for last in sorted(rng.sample(range(1, 25), rng.randint(0, 4))):
        options = {
            "max_iters": last,
            "value": rng.choice([0.1, 0.5, 1.0, 2.0]),
            "lr_scale": rng.choice([1.0, 0.5]),
        }
        name = rng.choice(
            [policy.name for policy in WarmupPolicy if specs or policy is not WarmupPolicy.INVSQRT]
        )
        if name == "STEP":
            options["decay_iters"] = rng.choice([-1, 2])
        elif name == "COSINE_ANNEALING_WARM_RESTARTS":
            options["sgdr_period"] = rng.randint(1, 4)
        elif name == "INTERPOLATE":
            options |= {
                "start_interpolating_iters": specs[-1][1]["max_iters"] if specs else 0,
                "end_value": rng.random(),
            }
        specs.append((name, options))
    return specs


def test_schedules_are_those_of_torchrec() -> None:
    def run(optim, specs) -> tuple[list[float], list[int]]:
        stages = [optim.WarmupStage(optim.WarmupPolicy[name], **options) for name, options in specs]
        model, rates = nn.Linear(3, 1), []
        keyed = optim.KeyedOptimizerWrapper(
            dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.3)
        )
        optimizer = optim.WarmupOptimizer(keyed, stages)
        for _ in range(30):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        return rates, optimizer.state_dict()["state"]["__warmup"]["warmup"].tolist()

    for seed in range(40):
        specs = random_stages(seed)
        assert run(rayrec.optim, specs) == run(torchrec.optim, specs), f"seed {seed}: {specs}"


def two_tables(package, width: int):
    """Two tables of 9 rows, t0 of feature f0 and t1 of f1, by the configs of a package."""
    return [
        package.EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=9, embedding_dim=width, feature_names=[f"f{i}"]
        )
        for i in range(2)
    ]


def like(mine: nn.Module, theirs: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Both with the same parameters, by name."""
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


@pytest.mark.parametrize(
    "make",
    [
        lambda m, _: m.CrossNet(6, 2),
        lambda m, _: m.LowRankCrossNet(6, 2, low_rank=3),
        lambda m, _: m.VectorCrossNet(6, 2),
        lambda m, _: m.LowRankMixtureCrossNet(6, 2, num_experts=1, low_rank=2),
        lambda m, _: m.LowRankMixtureCrossNet(
            6, 2, num_experts=3, low_rank=2, activation=torch.sigmoid
        ),
        lambda _, a: a.SwishLayerNorm(6),
        lambda m, _: m.MLP(6, [5, 4], activation="swish_layernorm"),
        lambda m, _: m.MLP(6, [5, 5], activation=partial(nn.PReLU, 5), activation_on_last=False),
        lambda m, _: m.MLP(6, [5], activation="sigmoid", bias=False),
    ],
)
def test_modules_are_those_of_torchrec(make):
    theirs = torchrec.modules
    parts = SimpleNamespace(**vars(theirs.crossnet) | vars(theirs.mlp))
    mine, theirs = like(make(rayrec.modules, rayrec.modules), make(parts, theirs.activation))
    for p in mine.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    like(mine, theirs)
    a, b = (
        torch.rand(5, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
        for _ in range(2)
    )
    torch.testing.assert_close(mine(a), theirs(b), **CLOSE)
    mine(a).square().sum().backward()
    theirs(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, **CLOSE)
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


def test_the_projection_model_is_that_of_torchrec():
    torch.manual_seed(0)

    def build(package, configs):
        collection = configs.EmbeddingBagCollection(tables=two_tables(configs, 8))
        return package.DLRM_Projection(collection, 3, [8], [5, 1], [10, 16], [24])

    mine, theirs = like(build(rayrec.models, rayrec.modules), build(torchrec.models.dlrm, torchrec))
    ids, lengths, dense = (
        torch.tensor([1, 2, 3, 4, 5]),
        torch.tensor([1, 2, 0, 2]),
        torch.rand(2, 3),
    )
    wanted = theirs(dense, torchrec.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths))
    torch.testing.assert_close(
        mine(dense, KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)), wanted, **CLOSE
    )


def deepfm_of(models, package):
    tables = package.EmbeddingBagCollection(tables=two_tables(package, 4))
    return models.SimpleDeepFMNN(3, tables, 6, 5)


def test_the_sigmoid_of_our_deepfm_is_torchrecs_output():
    mine, theirs = like(
        deepfm_of(rayrec.models, rayrec), deepfm_of(torchrec.models.deepfm, torchrec)
    )
    ids, lengths, dense = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1]), torch.rand(2, 3)
    wanted = theirs(dense, torchrec.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths))
    logits = mine(dense, KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths))
    torch.testing.assert_close(logits.sigmoid(), wanted, **CLOSE)


def test_the_interactions_of_keyed_tensors_are_those_of_torchrec():
    mine, theirs = like(
        rayrec.models.FMInteractionArch(12, ["a", "b"], 5),
        torchrec.models.deepfm.FMInteractionArch(12, ["a", "b"], 5),
    )
    dense, values = torch.rand(3, 4), torch.rand(3, 12)
    a, b = (
        arch(dense, package.KeyedTensor(["b", "c", "a"], [4, 4, 4], values))
        for arch, package in ((mine, rayrec), (theirs, torchrec))
    )
    torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("kind", ["one", "each"])
def test_processed_collections_and_their_parts_are_those_of_torchrec(kind):
    def build(package, processors, fp):
        table = package.EmbeddingBagConfig(
            name="t", num_embeddings=9, embedding_dim=4, feature_names=["a", "b"], need_pos=True
        )
        tables = package.EmbeddingBagCollection(tables=[table], is_weighted=True)
        each = {key: processors.PositionWeightedModule(3) for key in ("a", "b")}
        one = processors.PositionWeightedModuleCollection({"a": 3, "b": 3})
        return fp.FeatureProcessedEmbeddingBagCollection(tables, one if kind == "one" else each)

    theirs = torchrec.modules
    mine, theirs = like(
        build(rayrec, rayrec.modules, rayrec.modules),
        build(torchrec, theirs.feature_processor_, theirs.fp_embedding_modules),
    )
    for p in mine.parameters():
        nn.init.uniform_(p)
    like(mine, theirs)
    ids, lengths = torch.tensor([1, 2, 3, 4]), torch.tensor([2, 0, 1, 1])
    found = []
    for model, package in ((mine, rayrec), (theirs, torchrec)):
        batch = package.KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
        processors, tables = model.split()
        found.append((processors(batch).weights(), tables(processors(batch)), model(batch)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        for key in ("a", "b"):
            torch.testing.assert_close(a[key], b[key], **CLOSE)


def test_random_batches_are_those_of_torchrec():
    for options in (
        {"hash_size": 50, "ids_per_feature": 3},
        {"hash_sizes": [5, 900], "ids_per_features": [1, 4], "min_ids_per_feature": 1},
        {"num_generated_batches": -1},
    ):
        mine, theirs = (
            cls(["a", "b"], 6, manual_seed=3, num_batches=12, num_dense=2, **options)
            for cls in (RandomRecDataset, torchrec.datasets.random.RandomRecDataset)
        )
        assert len(mine) == len(theirs) == 12
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.dense_features, b.dense_features)
            assert a.labels.tolist() == b.labels.tolist()
            assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
            assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())


def test_bounds_of_initial_values_are_those_of_torchrec():
    for more in ({}, {"weight_init_min": -0.5, "weight_init_max": 0.25}):
        mine, theirs = (
            package.EmbeddingBagConfig(num_embeddings=77, embedding_dim=4, **more)
            for package in (rayrec, torchrec)
        )
        for name in ("get_weight_init_min", "get_weight_init_max"):
            assert getattr(mine, name)() == pytest.approx(getattr(theirs, name)(), rel=1e-15)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.5},
        {"maximize": True},
    ],
)
def test_dense_rowwise_adagrad_is_that_of_torchrec(options):
    weights = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    optimizers = [
        cls([w], lr=0.1, **options)
        for cls, w in zip(
            (DenseRowWiseAdagrad, torchrec.optim.RowWiseAdagrad), weights, strict=True
        )
    ]
    for step in range(4):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_fused_collections_are_those_of_torchrec(name):
    optimizer, kwargs = getattr(torch.optim, name), {"lr": 0.1}
    if name == "Adagrad":
        kwargs["eps"] = 1e-6

    def build(configs, collection):
        return collection(two_tables(configs, 8), optimizer, kwargs, device=torch.device("cpu"))

    mine = build(rayrec.modules, rayrec.FusedEmbeddingBagCollection)
    theirs = build(torchrec, torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection)
    theirs.load_state_dict(mine.state_dict())
    for step in range(3):
        ids = torch.randint(0, 9, (6,), generator=torch.Generator().manual_seed(step))
        lengths = torch.tensor([1, 2, 0, 3])
        outputs = [
            model(package.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)).values()
            for model, package in ((mine, rayrec), (theirs, torchrec))
        ]
        torch.testing.assert_close(*outputs, **CLOSE)
        for output in outputs:
            output.square().sum().backward()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[key], value, **CLOSE)
    # a new collection goes on from what TorchRec saved: a step without its state would be longer
    new = build(rayrec.modules, rayrec.FusedEmbeddingBagCollection)
    new.load_state_dict(theirs.state_dict())
    new.fused_optimizer().load_state_dict(theirs.fused_optimizer().state_dict())
    for model, package in ((new, rayrec), (theirs, torchrec)):
        batch = package.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)
        model(batch).values().square().sum().backward()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(new.state_dict()[key], value, **CLOSE)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_the_state_of_torchrecs_sharded_model_is_taken(kind, tmp_path):
    def module(package):
        tables = two_tables(package, 8)
        collection = package.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        return nn.ModuleDict({"ebc": collection})

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        sharder = torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder(
            {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6}
        )
        constraints = {
            f"t{i}": planner.types.ParameterConstraints(
                sharding_types=[kind], compute_kernels=["fused"]
            )
            for i in range(2)
        }
        topology = planner.Topology(world_size=1, compute_device="cpu")
        plan = planner.EmbeddingShardingPlanner(topology, constraints=constraints)
        theirs = torchrec.distributed.DistributedModelParallel(
            module(torchrec),
            device=torch.device("cpu"),
            plan=plan.plan(module(torchrec), [sharder]),
            sharders=[sharder],
        )
        placements = {
            table.name: rayrec.layout.TablePlacement(rayrec.layout.table_wise(table, 0))
            for table in rayrec.distributed.table_configs(module(rayrec))
        }
        mine = rayrec.DistributedModelParallel(
            module(rayrec),
            plan=rayrec.ShardingPlan(world_size=1, tables=placements),
            sparse_optimizer=rayrec.optim.Adagrad(0.1, eps=1e-6),
        )
        ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 2])

        def step(model, package):
            kjt = package.KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths)
            model.module["ebc"](kjt).values().square().sum().backward()

        for _ in range(2):
            step(theirs, torchrec)
        mine.load_state_dict(theirs.state_dict())
        mine.fused_optimizer().load_state_dict(theirs.fused_optimizer.state_dict())
        state = mine.fused_optimizer().state_dict()["state"]
        assert list(state["ebc.embedding_bags.t1.weight"]) == ["t1.momentum1"]
        step(theirs, torchrec)
        step(mine, rayrec)
        for state in mine.shard_states():
            name = f"ebc.embedding_bags.{state.shard.table}.weight"
            parts = theirs.state_dict()[name].local_shards()
            for part in parts:
                (row, col), (rows, cols) = part.metadata.shard_offsets, part.tensor.shape
                wanted = state.weight[row : row + rows, col : col + cols]
                torch.testing.assert_close(wanted, part.tensor, **CLOSE)
    finally:
        torch.distributed.destroy_process_group()


def test_cross_entropy_is_torchrecs_in_bits():
    generator = torch.Generator().manual_seed(0)
    logits, labels = (
        torch.randn(50, generator=generator),
        torch.randint(0, 2, (50,), generator=generator).float(),
    )
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    scores = metrics.compute()
    states = torchrec.metrics.ne.get_ne_states(labels, logits.sigmoid(), torch.ones(50), 1e-12)
    total = states.pop("cross_entropy_sum")
    assert scores.cross_entropy_sum_bits == pytest.approx(float(total), rel=1e-6)
    assert scores.logloss_bits == pytest.approx(
        float(
            torchrec.metrics.ne.compute_logloss(
                total, states["pos_labels"], states["neg_labels"], 1e-12
            )
        ),
        rel=1e-6,
    )
    ne = torchrec.metrics.ne.compute_ne(
        total, states["weighted_num_samples"], states["pos_labels"], states["neg_labels"], 1e-12
    )
    assert scores.ne == pytest.approx(float(ne), rel=1e-6)


def test_accuracy_is_torchrecs_at_one_half_too():
    logits = torch.tensor([0.0, 0.0, -1.0, 2.0, 0.0])
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    states = torchrec.metrics.accuracy.get_accuracy_states(labels, logits.sigmoid(), None)
    wanted = states["accuracy_sum"] / states["weighted_num_samples"]
    assert metrics.compute().accuracy == pytest.approx(float(wanted))


def test_losses_of_extreme_logits_are_true_here_and_cut_in_torchrec():
    """As docs/torchrec.md says: at most 39.9 bits a row there, up to 256 nats here."""
    logits, labels = torch.tensor([-60.0, 60.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    states = torchrec.metrics.ne.get_ne_states(labels, logits.sigmoid(), torch.ones(4), 1e-12)
    moderate = float(nn.functional.softplus(torch.tensor(-1.0))) / math.log(2)
    cut = -math.log2(1e-12)
    assert float(states["cross_entropy_sum"]) == pytest.approx(2 * cut + 2 * moderate, rel=1e-4)
    assert metrics.compute().cross_entropy_sum_bits == pytest.approx(
        2 * 60 / math.log(2) + 2 * moderate, rel=1e-6
    )


def test_gauc_of_sessions_of_one_length_without_ties_is_torchrecs():
    generator = torch.Generator().manual_seed(0)
    sessions = 40
    logits = torch.rand(sessions * 5, generator=generator)
    labels = torch.randint(0, 2, (sessions * 5,), generator=generator)
    users = torch.arange(sessions).repeat_interleave(5)
    theirs = torchrec.metrics.gauc.compute_gauc_3d(
        *(x.view(1, sessions, 5) for x in (logits, labels, torch.ones(sessions * 5)))
    )
    metric, order = Gauc("user"), torch.randperm(len(users), generator=generator)
    state = metric.start(torch.device("cpu"))
    metric.add(state, logits[order], labels[order], users[order])
    wanted = float(theirs["auc_sum"] / theirs["num_samples"])
    assert metric.scores(state)["gauc@user"] == pytest.approx(wanted, rel=1e-6)


def test_regrouping_as_a_module_is_that_of_torchrec():
    values = torch.rand(3, 6)
    groups, names = [["a", "c"], ["b"]], ["x", "y"]

    def run(package, module):
        return module.KTRegroupAsDict(groups, names, multi_device=True)(
            [package.KeyedTensor(["a", "b", "c"], [1, 2, 3], values)]
        )

    mine, theirs = run(rayrec, rayrec.modules), run(torchrec, torchrec.modules.regroup)
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[name], theirs[name]) for name in names
    )


PAGE = re.sub(
    r"```.*?```",
    "",
    (Path(__file__).parents[2] / "docs" / "torchrec.md").read_text(),
    flags=re.DOTALL,
)
TOLD = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PAGE)))) | {
    "PositionWeightedModuleCollection"
}
PACKAGES = (
    "torchrec.modules",
    "torchrec.models",
    "torchrec.optim",
    "torchrec.sparse",
    "torchrec.metrics",
)


def exported(package: str) -> set[str]:
    """Public classes of the modules of a package; of metrics those that a user names in a config or
    a loop.
    """
    found: set[str] = set()
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
        name = f"{package}.{info.name}"
        if info.ispkg or name.endswith(("cuda_graph_benchmark", "cuda_graph_utils")):
            continue
        module = importlib.import_module(name)
        found |= {
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and v.__module__ == name and not n.startswith("_")
        }
    if package == "torchrec.metrics":
        found = {
            name
            for name in found
            if name.endswith("Metric") and name not in ("RecMetric", "StateMetric")
        }
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_names_all_that_torchrec_exports(package):
    assert exported(package) - TOLD == set()


@pytest.mark.parametrize("package", ["torchrec", "torchrec.distributed"])
def test_the_page_names_all_that_its_main_packages_give(package):
    module = importlib.import_module(package)
    given = {n for n, v in vars(module).items() if inspect.isclass(v) or inspect.isfunction(v)}
    assert {name for name in given if "torchrec" in vars(module)[name].__module__} - TOLD - {
        "ShardedTensor"
    } == set()
