"""TorchRec's arguments of sharding beside a module: an environment and sharders.

Here a group of ranks and an optimizer say the same, so these two only carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed.sharding import choose_optimizers, find_collections, is_sequence
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_argument
from rayrec.layout import ShardingPlan
from rayrec.layout.words import also_takes
from rayrec.optim import SPARSE_OPTIMIZERS, RowWiseAdagrad, SparseOptimizer, as_sparse_optimizer

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ShardingEnv:
    """The ranks that share tables: TorchRec's word for a process group."""

    process_group: dist.ProcessGroup | None = None

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup | None) -> ShardingEnv:
        """Return the ranks of a group; of the default group when None."""
        return cls(pg)

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 without any group."""
        return dist.get_world_size(self.process_group) if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This rank in the group; 0 without any."""
        return dist.get_rank(self.process_group) if dist.is_initialized() else 0


@also_takes()
class ModuleSharder(Generic[M]):
    """The optimizer of all collections of one kind; make one of its subclasses.

    Args:
        fused_params: "optimizer", one of FBGEMM's `EmbOptimType` or its name, "learning_rate" and
            that optimizer's other options; None leaves the optimizer to `sparse_optimizer`.
    Attributes:
        optimizer: the optimizer that `fused_params` name, or None.
    Raises:
        ConfigError: no optimizer, or an option, that the lookup kernels have.
    """

    sequences: ClassVar[bool]

    def __init__(self, fused_params: Mapping[str, Any] | None = None) -> None:
        self.fused_params = dict(fused_params or {})
        self.optimizer = _optimizer(self.fused_params) if fused_params else None

    def shard(
        self,
        module: M,
        plan: ShardingPlan,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> nn.Module:
        """Return `DistributedModelParallel` of a collection, by a plan for all of its tables."""
        # that class takes sharders, so it comes above this module
        from rayrec.distributed.model_parallel import DistributedModelParallel

        return DistributedModelParallel(module, env, device, plan, [self])


class EmbeddingBagCollectionSharder(ModuleSharder[M]):
    """The optimizer of pooled collections."""

    sequences = False


class EmbeddingCollectionSharder(ModuleSharder[M]):
    """The optimizer of sequence collections."""

    sequences = True


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """Return one sharder for each kind of collection, which leave the optimizer open."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def group_of(
    env: ShardingEnv | None, process_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """The process group that is given, in either word."""
    if env is None:
        return process_group
    if not isinstance(env, ShardingEnv):
        raise ConfigError(
            f"env is a {type(env).__name__}; give a ShardingEnv of rayrec.distributed, or "
            "process_group=."
        )
    if process_group not in (None, env.process_group):
        raise ConfigError("env and process_group= name two groups of ranks; give one of them.")
    return env.process_group


def optimizers_for(
    module: nn.Module,
    given: SparseOptimizer | Mapping[str, SparseOptimizer] | None,
    sharders: Sequence[ModuleSharder[Any]] | None,
) -> SparseOptimizer | Mapping[str, SparseOptimizer]:
    """Return the tables' optimizers: those given, else by table as marked and as sharders say.

    Raises:
        ConfigError: both say something, or a collection has no sharder, so that TorchRec would not
            shard it; or something else is among the optimizers or the sharders.
    """
    either = SparseOptimizer | Mapping[str, SparseOptimizer] | None
    check_argument("DistributedModelParallel", "sparse_optimizer", given, either)
    if sharders is None:
        return RowWiseAdagrad() if given is None else given
    check_argument("DistributedModelParallel", "sharders", sharders, list[ModuleSharder])
    if given is not None and any(sharder.optimizer for sharder in sharders):
        raise ConfigError("sparse_optimizer= and fused_params name optimizers; give one of them.")
    chosen: dict[str, SparseOptimizer] = {}
    for path, child in find_collections(module).items():
        kinds = [sharder for sharder in sharders if sharder.sequences == is_sequence(child)]
        if not kinds:
            raise ConfigError(
                f"sharders= has none for {path or 'the module'!r}, a {type(child).__name__}. All "
                "collections are sharded here: leave sharders out, or give get_default_sharders()."
            )
        chosen |= choose_optimizers(child, kinds[0].optimizer or RowWiseAdagrad())
    return chosen if given is None else given


def _optimizer(params: Mapping[str, Any]) -> SparseOptimizer:
    of_fbgemm = {cls.fbgemm.name: cls for cls in SPARSE_OPTIMIZERS.values() if cls.fbgemm}
    kind = params.get("optimizer")
    name = getattr(kind, "name", kind)
    if name not in of_fbgemm:
        raise ConfigError(
            f"fused_params name the optimizer {name!r}; the lookup kernels have "
            f"{', '.join(of_fbgemm)}."
        )
    own = {"learning_rate": "lr"}
    return as_sparse_optimizer(
        of_fbgemm[name], {own.get(w, w): value for w, value in params.items() if w != "optimizer"}
    )
