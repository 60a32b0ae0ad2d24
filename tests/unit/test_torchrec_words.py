"""TorchRec's spellings: each works, or is answered by an error that names ours."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import rayrec.distributed
import rayrec.modules
import rayrec.planner
import rayrec.quant
from rayrec import EmbeddingShardingPlanner, KeyedJaggedTensor, ParameterConstraints, Topology
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ShardingEnv,
    get_default_sharders,
    table_configs,
)
from rayrec.errors import ConfigError, RayrecError
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig, ShardingPlan, ShardingType
from rayrec.layout.words import KEYWORDS, NAMES
from rayrec.modules import EmbeddingBagCollection, EmbeddingCollection
from rayrec.modules.feature_processor import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from rayrec.optim import (
    SGD,
    Adam,
    LarsSGD,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)

IDS = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
ONE = Topology.local(1)


class Both(torch.nn.Module):
    """A collection of each kind, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(8, 4, name="t", feature_names=["f"])], device="meta"
        )
        self.rows = EmbeddingCollection(
            [EmbeddingConfig(8, 4, name="u", feature_names=["g"])], device="meta"
        )
        self.over = torch.nn.Linear(4, 1)

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.bags(ids), self.rows(ids)


def sharded(*args: Any, **words: Any) -> DistributedModelParallel:
    return DistributedModelParallel(Both(), *args, **words)


def planner(**words: Any) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(ONE, **words)


def plan() -> ShardingPlan:
    return planner().plan(Both())


def optimizers(*sharders: Any, **words: Any) -> dict[str, Any]:
    return dict(sharded(sharders=sharders, **words).sparse_optimizers)


def bags(**params: Any) -> EmbeddingBagCollectionSharder:
    return EmbeddingBagCollectionSharder(fused_params=params)


def rows(**params: Any) -> EmbeddingCollectionSharder:
    return EmbeddingCollectionSharder(fused_params=params)


def marked() -> Both:
    model = Both()
    apply_optimizer_in_backward(SGD, model.rows, {"lr": 0.5})
    return model


def processed() -> FeatureProcessedEmbeddingBagCollection:
    tables = [EmbeddingBagConfig(8, 4, name="t", feature_names=["f"])]
    return FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables, device="meta", is_weighted=True),
        PositionWeightedModuleCollection({"f": 3}),
    )


WORKS: dict[str, Callable[[], bool]] = {
    "sharders=": lambda: sharded(sharders=get_default_sharders()).plan == sharded().plan,
    "positional env, device, plan and sharders": lambda: (
        sharded(ShardingEnv(), torch.device("cpu"), plan(), get_default_sharders()).plan == plan()
    ),
    "an env without a group": lambda: (ShardingEnv().world_size, ShardingEnv().rank) == (1, 0),
    "fused_params": lambda: (
        optimizers(
            bags(optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.02, eps=0.002),
            rows(optimizer="LARS_SGD", learning_rate=0.1, eta=0.01),
        )
        == {"t": RowWiseAdagrad(0.02, eps=0.002), "u": LarsSGD(0.1, eta=0.01)}
    ),
    "fused_params beside marks": lambda: (
        dict(
            DistributedModelParallel(
                marked(), sharders=[bags(optimizer=EmbOptimType.ADAM), rows(optimizer="ADAM")]
            ).sparse_optimizers
        )
        == {"t": Adam(), "u": SGD(0.5)}
    ),
    "sharder.shard": lambda: (
        bags(optimizer="EXACT_SGD", learning_rate=0.5)
        .shard(Both().bags, planner().plan(Both().bags))
        .fused_optimizer.param_groups[0]["lr"]
        == 0.5
    ),
    "planner.plan(module)": lambda: plan() == planner().plan(table_configs(Both())),
    "planner.plan(module of a wrapped collection)": lambda: (
        list(planner().plan(processed()).tables) == ["t"]
    ),
    "planner.plan(module, sharders)": lambda: (
        planner().plan(Both(), [bags(optimizer="ADAM")]).estimates
        == planner(sparse_optimizer="adam").plan(Both()).estimates
    ),
    "collective_plan": lambda: (
        planner().collective_plan(Both(), get_default_sharders(), None) == plan()
    ),
    "planner.plan(module, None)": lambda: planner().plan(Both(), None) == plan(),
    "collective_plan(module)": lambda: planner().collective_plan(Both()) == plan(),
    "a planner without batch_size": lambda: planner().asked.batch_size == 512,
    "ParameterConstraints(sharding_types=)": lambda: (
        ParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value], pooling_factors=[1, 4], is_weighted=True
        )
        == ParameterConstraints(kinds=["row_wise"], pooling_factor=2.5, weighted=True)
    ),
    "Topology(world_size=, compute_device='cpu')": lambda: (
        Topology(world_size=2, compute_device="cpu") == Topology.local(2)
    ),
    "Topology(world_size=, compute_device='cuda')": lambda: (
        Topology(world_size=2, compute_device="cuda") == Topology.local(2, 32 << 30, "cuda")
    ),
    "Topology(local_world_size=, hbm_cap=)": lambda: (
        Topology(world_size=4, compute_device="cuda", local_world_size=2, hbm_cap=7)
        == Topology.uniform(2, 2, 7, "cuda")
    ),
    "Topology(intra_host_bw=) beside world_size": lambda: (
        Topology(world_size=2, compute_device="cpu", ddr_cap=7, intra_host_bw=1e6).intra_host_bw
        == 1e9
    ),
    "init_data_parallel": lambda: sharded(init_data_parallel=False).init_data_parallel() is None,
    "model.fused_optimizer": lambda: (
        len(sharded().fused_optimizer.params) == len(sharded().fused_optimizer().params) == 2
    ),
    "in_backward_optimizer_filter": lambda: (
        [name for name, _ in in_backward_optimizer_filter(sharded().named_parameters())]
        == ["over.weight", "over.bias"]
    ),
    "in_backward_optimizer_filter(include=)": lambda: (
        [name for name, _ in in_backward_optimizer_filter(marked().named_parameters(), True)]
        == ["rows.embeddings.u.weight"]
    ),
    ".wait() of pooled rows": lambda: sharded()(IDS)[0].wait().keys() == ["f"],
    ".wait() of sequences": lambda: list(sharded()(IDS)[1].wait()) == ["g"],
}


@pytest.mark.parametrize("spelling", WORKS)
def test_a_spelling_of_torchrec_means_the_same(spelling: str) -> None:
    assert WORKS[spelling]()


ANSWERED: dict[str, tuple[Callable[[], Any], str]] = {
    "plan.plan": (lambda: plan().plan, r"tables\[name\]"),
    "get_qcomm_codecs_registry": (
        lambda: rayrec.distributed.get_qcomm_codecs_registry,
        r"qcomms=QCommsConfig",
    ),
    "qcomm_codecs_registry=": (
        lambda: EmbeddingBagCollectionSharder(qcomm_codecs_registry={}),
        r"^EmbeddingBagCollectionSharder takes no .*qcomms=QCommsConfig",
    ),
    "QuantConfig": (
        lambda: rayrec.modules.QuantConfig,
        r"quantize\(model, types\) of rayrec\.quant",
    ),
    "quantize_embeddings": (
        lambda: rayrec.quant.quantize_embeddings,
        r"quantize\(model, types\) of rayrec\.quant",
    ),
    "DMPCollection": (lambda: rayrec.distributed.DMPCollection, "sharding_group_size="),
    "EmbeddingComputeKernel": (
        lambda: rayrec.distributed.EmbeddingComputeKernel,
        r"ParameterConstraints\(storage=\)",
    ),
    "EmbeddingEnumerator": (lambda: rayrec.planner.EmbeddingEnumerator, "kinds="),
    "compute_kernels=": (lambda: ParameterConstraints(compute_kernels=["fused"]), "storage="),
    "storage_reservation=": (lambda: planner(storage_reservation=None), "memory_bytes"),
    "stats=": (lambda: planner(stats=[]), r"plan\.report\(\)"),
    "hbm_mem_bw=": (
        lambda: Topology(world_size=1, compute_device="cuda", hbm_mem_bw=1),
        "memory_bw=",
    ),
    "data_parallel_wrapper=": (lambda: sharded(data_parallel_wrapper=None), "ddp_options="),
    "init_parameters=": (lambda: sharded(init_parameters=False), "initialize=False"),
    "an optimizer that no kernel has": (
        lambda: bags(optimizer=EmbOptimType.PARTIAL_ROWWISE_LAMB),
        "PARTIAL_ROWWISE_LAMB.*EXACT_SGD",
    ),
    "an unknown word of fused_params": (
        lambda: bags(optimizer=EmbOptimType.EXACT_SGD, cache_load_factor=0.1),
        "cache_load_factor",
    ),
    "fused_params without an optimizer": (lambda: bags(learning_rate=0.1), "EXACT_SGD"),
    "optimizers in two words": (
        lambda: optimizers(bags(optimizer="ADAM"), rows(optimizer="ADAM"), sparse_optimizer=SGD()),
        "give one of them",
    ),
    "a collection that no sharder takes": (
        lambda: optimizers(bags(optimizer="ADAM")),
        r"none for 'rows'.*get_default_sharders\(\)",
    ),
    "sharders that are none": (
        lambda: sharded(sharders=["row_wise"]),
        r"sharders=\['row_wise'\]; it must be a list",
    ),
    "one sharder without a list": (
        lambda: sharded(sharders=EmbeddingBagCollectionSharder()),
        "it must be a list, each item an instance of ModuleSharder",
    ),
    "world_size= of a text": (lambda: Topology(world_size="2"), "world_size='2'; it must be"),
    "local_world_size= of a fraction": (
        lambda: Topology(world_size=2, local_world_size=0.5),
        "local_world_size=0.5; it must be",
    ),
    "an env that is none": (lambda: sharded(plan()), "ShardingEnv of rayrec.distributed"),
    "an env beside another group": (
        lambda: sharded(ShardingEnv(), process_group=object()),
        "give one of them",
    ),
    "a plan that is none": (lambda: sharded(plan={}), r"plan={}; it must be ShardingPlan"),
    "an optimizer by name": (
        lambda: sharded(sparse_optimizer="adam"),
        "sparse_optimizer='adam'; it must be an instance of SparseOptimizer",
    ),
    "an optimizer by class": (lambda: sharded(sparse_optimizer={"t": SGD}), "it must be"),
    "sharding_types= beside kinds=": (
        lambda: ParameterConstraints(sharding_types=["row_wise"], kinds=["table_wise"]),
        "sharding_types= and kinds=; give one of them",
    ),
    "pooling_factors= of one number": (
        lambda: ParameterConstraints(pooling_factors=3.0),
        "pooling_factors=3.0; it must be a list",
    ),
    "planner.plan of neither": (lambda: planner().plan(3), "tables or a model"),
    "planner.plan of a module without tables": (
        lambda: planner().plan(torch.nn.Linear(1, 1)),
        "no embedding collection",
    ),
}


@pytest.mark.parametrize("spelling", ANSWERED)
def test_a_spelling_of_torchrec_is_answered_with_ours(spelling: str) -> None:
    ask, answer = ANSWERED[spelling]
    with pytest.raises(ConfigError, match=answer):
        ask()


def test_an_import_of_a_foreign_name_tells_ours_and_other_names_are_missing_as_ever() -> None:
    with pytest.raises(RayrecError, match="ddp_options="):
        from rayrec.distributed import DefaultDataParallelWrapper  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        from rayrec.distributed import Nonsense  # noqa: F401
    assert not hasattr(rayrec.distributed, "Nonsense") and not hasattr(rayrec, "nonsense")


def test_an_environment_is_its_process_group() -> None:
    assert ShardingEnv.from_process_group(dist.GroupMember.WORLD) == ShardingEnv()


def test_every_word_is_one_of_torchrec() -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    packages = ("embedding_types", "fbgemm_qcomm_codec", "model_parallel", "sharding_plan", "types")
    parts = ("enumerators", "partitioners", "proposers", "storage_reservations", "types")
    found = [importlib.import_module(f"torchrec.distributed.{name}") for name in packages]
    found += [importlib.import_module(f"torchrec.distributed.planner.{name}") for name in parts]
    planning = found[-1]
    found += map(
        importlib.import_module,
        ("torchrec.inference.modules", "torchrec.modules.embedding_configs"),
    )
    for name in NAMES:
        assert any(hasattr(module, name) for module in found), name
    classes = [
        importlib.import_module("torchrec.distributed").DistributedModelParallel,
        importlib.import_module("torchrec.distributed.planner").EmbeddingShardingPlanner,
        importlib.import_module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder,
        planning.Topology,
        planning.ParameterConstraints,
    ]
    taken = {word for kind in classes for word in inspect.signature(kind.__init__).parameters}
    assert taken >= KEYWORDS.keys()
