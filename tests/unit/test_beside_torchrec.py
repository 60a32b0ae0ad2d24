"""Numbers beside TorchRec's own, where it is installed; the other tests compare with formulas."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import rayrec.models
import rayrec.modules
import rayrec.optim
from rayrec.metrics import BinaryMetrics
from rayrec.optim import DenseRowWiseAdagrad, WarmupPolicy
from rayrec.sparse import KeyedJaggedTensor

pytest.importorskip("torchrec", reason="TorchRec is not installed")

import torchrec.metrics.ne
import torchrec.models.dlrm
import torchrec.modules.activation
import torchrec.modules.crossnet
import torchrec.modules.fused_embedding_modules
import torchrec.modules.regroup
import torchrec.optim

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
    ],
)
def test_modules_are_those_of_torchrec(make):
    theirs = torchrec.modules
    mine, theirs = like(
        make(rayrec.modules, rayrec.modules), make(theirs.crossnet, theirs.activation)
    )
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
        tables = [
            configs.EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=9, embedding_dim=8, feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
        collection = configs.EmbeddingBagCollection(tables=tables)
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
        tables = [
            configs.EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=9, embedding_dim=8, feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
        return collection(tables, optimizer, kwargs, device=torch.device("cpu"))

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


def test_regrouping_as_a_module_is_that_of_torchrec():
    values = torch.rand(3, 6)
    groups, names = [["a", "c"], ["b"]], ["x", "y"]

    def run(package, module):
        return module.KTRegroupAsDict(groups, names)(
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
