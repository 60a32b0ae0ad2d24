"""TorchRec's words for what is called otherwise here: taken over where they mean the same, else
answered by an error that names ours.

Keywords go through `also_takes`, names of a package through `foreign_names`. `docs/torchrec.md`
compares the two libraries. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, TypeVar

from rayrec.errors import ConfigError

T = TypeVar("T")

_SEARCH = "there is one search; ParameterConstraints and EmbeddingShardingPlanner(kinds=) limit it"
_STORAGE = "say where rows live by ParameterConstraints(storage=): device, host, cached or auto"
_PACK = "quantize(model, types) of rayrec.quant packs tables, in one type or by table"
_RESULTS = "results are there when forward returns, and their wait() gives them"

# names of TorchRec's packages -> what to take
NAMES = {
    "get_qcomm_codecs_registry": "give DistributedModelParallel(qcomms=QCommsConfig(...)), which "
    "is in rayrec.comm.codec",
    "DMPCollection": "give DistributedModelParallel(sharding_group_size=, sync_every=)",
    "DefaultDataParallelWrapper": "give DistributedModelParallel(ddp_options={...})",
    "EmbeddingComputeKernel": _STORAGE,
    "ParameterSharding": "a plan holds a TablePlacement of rayrec.layout for each table",
    "construct_module_sharding_plan": "write a plan with manual_plan of rayrec.planner, or the "
    "kinds of rayrec.layout",
    "Awaitable": _RESULTS,
    "LazyAwaitable": _RESULTS,
    "EmbeddingEnumerator": _SEARCH,
    "GreedyProposer": _SEARCH,
    "GreedyPerfPartitioner": _SEARCH,
    "QuantConfig": _PACK,
    "quantize_embeddings": _PACK,
    "HeuristicalStorageReservation": "memory_bytes of the Topology is what tables may take",
}
# keywords of TorchRec's classes -> what to give
KEYWORDS = {
    "compute_kernels": _STORAGE,
    "cache_params": "give ParameterConstraints(storage='cached', cache_load_factor=)",
    "num_poolings": "give pooling_factor=, the mean number of ids per bag",
    "batch_sizes": "give EmbeddingShardingPlanner(batch_size=)",
    "device_group": "give ParameterConstraints(ranks=) or (hosts=)",
    "hbm_mem_bw": "give Topology(hosts=, memory_bytes=, memory_bw=), in bytes per second",
    "ddr_mem_bw": "give Topology(hosts=, memory_bytes=, memory_bw=), in bytes per second",
    "custom_topology_data": "give Topology(hosts=, memory_bytes=), with a figure for every rank",
    "enumerator": _SEARCH,
    "proposer": _SEARCH,
    "partitioner": _SEARCH,
    "performance_model": "give the Topology measured constants: `rayrec calibrate`",
    "storage_reservation": "memory_bytes of the Topology is what tables may take",
    "stats": "print plan.report()",
    "debug": "print plan.report()",
    "init_parameters": "give initialize=False, and write all rows yourself",
    "data_parallel_wrapper": "give ddp_options={...}, the arguments of DistributedDataParallel",
    "model_tracker_configs": "give track_rows=True, and read model.touched",
    "qcomm_codecs_registry": "give DistributedModelParallel(qcomms=QCommsConfig(...))",
}


def also_takes(
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Callable[[type[T]], type[T]]:
    """Let a class be made with TorchRec's keywords.

    Args:
        translate: turns keywords that mean the same into those of the class.
    """

    def wrap(cls: type[T]) -> type[T]:
        init = cls.__init__

        @wraps(init)
        def __init__(self: T, *args: Any, **words: Any) -> None:
            for word in words.keys() & KEYWORDS.keys():
                raise ConfigError(f"{type(self).__name__} takes no {word}=: {KEYWORDS[word]}.")
            init(self, *args, **translate(words))

        cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        return cls

    return wrap


def foreign_names(package: str) -> Callable[[str], NoReturn]:
    """Return the `__getattr__` of a package, for names that it does not have.

    Raises:
        ConfigError: from that function, when the name is TorchRec's; `from package import name`
            would hide the message of an AttributeError.
    """

    def missing(name: str) -> NoReturn:
        if name in NAMES:
            raise ConfigError(f"{package} has no {name}: {NAMES[name]}.")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return missing
