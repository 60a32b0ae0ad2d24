"""`DistributedModelParallel`: the user's module with its collections sharded and DDP around the
dense rest.

The forward signature and the names in the state_dict are those of the user's module; the module's
code does not change. Dense parameters are those of `parameters()`: tables are updated inside the
backward pass and are not among them.

Costs per step: one input and one output exchange for all collections, one backward exchange, and
DDP's all-reduce of dense gradients, which overlaps the backward pass; between CPU ranks of one host
all of it goes through shared memory. The exchange has connections of its own, so the two need no
common order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.checkpoint import ShardState
from rayrec.comm.choose import Transport, exchange_for
from rayrec.comm.codec import Codecs, QCommsConfig
from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.comm.process_group import broadcast_seed
from rayrec.distributed.dense import DenseReplicas, check_ddp_options
from rayrec.distributed.program.options import EngineOptions
from rayrec.distributed.replicas import Replicas
from rayrec.distributed.sharding import shard_embeddings
from rayrec.distributed.state import TableShards
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.observe.timer import StepTimer
from rayrec.optim import FusedOptimizer, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor


class DistributedModelParallel(nn.Module):
    """A module trained by all ranks of a process group.

    Args:
        module: holds at least one embedding collection; its tables, or all of it, may lie on the
            meta device.
        plan: where every table lies, made for exactly this many ranks.
        process_group: all ranks; the default group when None. Without any group the world is this
            one rank.
        sparse_optimizer: of all tables that `apply_optimizer_in_backward` did not mark, or by table
            name; fused into the backward.
        device: of dense parameters and shards; by default this rank's GPU under NCCL, else the CPU.
        seed: of initial values on the meta device; rank 0's torch seed when None, so that
            `torch.manual_seed(s)` before the model gives the tables of the unsharded module.
        check_ids: check every id before it is sent, in one pass over the ids.
        qcomms: precision of pooled rows and their gradients on the wire; float32 when None.
        prefetch: open connections of their own for `prefetch`.
        dedup_sequences: send every id of a sequence feature once per batch, for data with many
            repeats.
        sharding_group_size: shard inside groups of so many ranks, which are replicas of each other
            (2D parallelism); the plan is then for one group. All ranks in one group when None.
        sync_every: with sharding_group_size: 1 trains exactly as one world, since replicas exchange
            ids and gradients; more is the number of steps between two averages of the replicas.
        transport: "auto" exchanges through shared memory between CPU ranks of one host and through
            the process group otherwise; "process_group" and "shared_memory" insist.
        share_tables: CPU ranks that share memory read each other's rows where they lie, instead of
            exchanging them; not with qcomms, sharding groups, or tables that take two hops.
        ddp_options: arguments of DistributedDataParallel, which averages dense gradients, such as
            `bucket_cap_mb` or `static_graph`; also `comm_hook`, a pair (state, hook), and
            `params_to_ignore`. By default parameters that a step does not use, on all ranks or on
            some, are right; with `find_unused_parameters` or `static_graph` DDP sees to them.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks.
        ConfigError: nothing to shard, a dense module on the meta device cannot initialize itself,
            or an option of DDP is wrong.

    Example:
        model = DistributedModelParallel(DLRM(EmbeddingBagCollection(tables, device="meta"), ...),
        plan=plan) dense = torch.optim.Adam(model.parameters(), 1e-3) model(dense_features,
        sparse_features).backward(); dense.step()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        plan: ShardingPlan,
        process_group: dist.ProcessGroup | None = None,
        sparse_optimizer: SparseOptimizer | Mapping[str, SparseOptimizer] | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
        check_ids: bool = True,
        qcomms: QCommsConfig | None = None,
        prefetch: bool = False,
        dedup_sequences: bool = False,
        sharding_group_size: int | None = None,
        sync_every: int = 1,
        transport: Transport | str = Transport.AUTO,
        share_tables: bool = True,
        ddp_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        grouped = process_group is not None or dist.is_initialized()
        self.plan, self._stepped = plan, False
        self.device = (
            torch.device(device)
            if device is not None
            else _default_device(process_group if grouped else None)
        )
        self._replicas = (
            Replicas(sharding_group_size, sync_every)
            if sharding_group_size is not None and grouped
            else None
        )
        sharding_group = process_group if self._replicas is None else self._replicas.group
        transport = Transport(transport)
        exchange: Exchange = (
            exchange_for(sharding_group, self.device, transport) if grouped else LocalExchange()
        )
        if seed is None:
            seed = (
                broadcast_seed(torch.initial_seed(), process_group, self.device)
                if grouped
                else torch.initial_seed()
            )
        ahead: Exchange | None = None
        if prefetch:
            ahead = (
                exchange_for(sharding_group, self.device, transport, own=True)
                if grouped
                else LocalExchange()
            )
        peers = None if self._replicas is None else self._replicas.peers(self.device, transport)
        exchange_options = EngineOptions(
            check_ids=check_ids,
            codecs=Codecs.of(qcomms),
            dedup_sequences=dedup_sequences,
            share_tables=share_tables,
        )
        optimizer = sparse_optimizer if sparse_optimizer is not None else RowWiseAdagrad()
        self.module, self._engine = shard_embeddings(
            module, plan, exchange, optimizer, self.device, seed, exchange_options, ahead, peers
        )
        _materialize(self.module, self.device, seed)
        self.module.to(self.device)
        options = dict(ddp_options or {})
        check_ddp_options(options, self.module)
        averaged = any(
            name not in options.get("params_to_ignore", ()) for name, _ in self.dense_parameters()
        )
        # in a list, so that nn.Module does not register it and names keep no prefix
        self._dense: list[DenseReplicas] = []
        if averaged and grouped and dist.get_world_size(process_group) > 1:
            self._dense = [
                DenseReplicas(
                    self.module,
                    self.device,
                    process_group,
                    transport,
                    self._engine.watched,
                    options,
                )
            ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the user's module. Under 2D parallelism, replicas are averaged before a training step
        when that is due.
        """
        if self._replicas is not None and torch.is_grad_enabled():
            if self._stepped and self._replicas.due():
                self.sync()
            self._stepped = True
        return (self._dense[0] if self._dense and torch.is_grad_enabled() else self.module)(
            *args, **kwargs
        )

    def sync(self) -> None:
        """Average the tables of the replicas now, as before a checkpoint; does nothing without 2D
        parallelism. Every rank calls it.
        """
        if self._replicas is not None:
            self._replicas.average(self._engine.shard_states())

    def dense_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that an outer optimizer must update: all but the tables."""
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As the user's module, without the tables."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As the user's module."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Names as in the unsharded module; tables that are spread over ranks are `ShardedTensor`s."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
        *,
        prefix: str = "",
    ) -> Any:
        """Load an unsharded module's state_dict, or one of the same plan; every rank takes its own
        rectangles.

        Args:
            strict: names must match.
            prefix: before all names of this model, as `state_dict(prefix=)` writes them; other
                names are not looked at.
        Returns:
            missing_keys and unexpected_keys, by their names in `state_dict`.
        Raises:
            ConfigError: `assign`, which tables do not support; or a prefix given by position.
            RuntimeError: names and shapes do not match, as in torch.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) is not supported: the rows live in the "
                "lookup kernels."
            )
        if isinstance(strict, str):
            raise ConfigError(
                f"load_state_dict(state_dict, {strict!r}): the second argument is "
                f"`strict`; name it, prefix={strict!r}."
            )
        if not prefix:
            return self.module.load_state_dict(state_dict, strict)
        own = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix)
        }
        result = self.module.load_state_dict(own, strict)
        return type(result)(*([prefix + key for key in keys] for keys in result))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # a module that holds this one wrote its names without ".module", and torch looks for them
        # with it
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def shard_states(self) -> list[ShardState]:
        """Live rows and optimizer state of this rank's shards; what checkpoints save and restore."""
        return self._engine.shard_states()

    def reshard(self, plan: ShardingPlan) -> int:
        """Go over to another plan between two steps; training goes on as if it had begun under it.
        Every rank must call it.

        Only rectangles whose owner changes travel, optimizer state included. Row-wise state is
        exact as long as column blocks are kept or merged; where a block is split, its parts start
        from the value of the whole.

        Returns:
            Float32 values that this rank sent.
        Raises:
            PlanError: the plan does not fit the tables or the number of ranks.
            CommError: a peer is gone.
        """
        sent = self._engine.reshard(plan)
        self.plan = plan
        return sent

    def prefetch(self, kjt: KeyedJaggedTensor) -> bool:
        """Start the input exchange of a KJT that a later forward will be given; all ranks must do
        so in the same order.

        Returns:
            Whether it was started; a first forward with the same keys teaches the model who reads
            them.
        Raises:
            ConfigError: the model was built without prefetch=True, or was closed.
        """
        return self._engine.prefetch(kjt)

    def forget_prefetched(self) -> None:
        """Expect no forward of what was prefetched until now."""
        self._engine.forget_prefetched()

    def close(self, wait: bool = True) -> None:
        """End the thread that prefetches, before the process groups are left; the model still
        works, without `prefetch`. Idempotent.

        Args:
            wait: for exchanges under way; False after a failure, when other ranks may be gone.
        """
        self._engine.close(wait)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, dense gradients are not averaged over ranks but kept for a later step; tables
        update in every backward all the same.
        """
        with ExitStack() as stack:
            for dense in self._dense:
                stack.enter_context(dense.no_sync())
            yield

    def fused_optimizer(self) -> FusedOptimizer:
        """The tables' optimizers as a torch optimizer, for schedules; make it anew after `reshard`.

        Its state is this rank's, keyed by the parameter names of the unsharded module.
        """
        names = {
            name.rsplit(".", 1)[-1]: name
            for name, m in self.module.named_modules()
            if isinstance(m, TableShards)
        }
        return FusedOptimizer(
            list(self._engine.lookups.values()), lambda table: f"{names[table]}.weight"
        )

    @property
    def sparse_optimizers(self) -> Mapping[str, SparseOptimizer]:
        """The optimizer of every table."""
        return self._engine.optimizers

    @property
    def iteration(self) -> int:
        """Table updates so far, where an optimizer corrects its bias by it; a checkpoint carries
        it.
        """
        return self._engine.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._engine.iteration = value

    @property
    def timer(self) -> StepTimer | None:
        """Set one to count the seconds of the steps to come by part, on this rank."""
        return self._engine.timer

    @timer.setter
    def timer(self, timer: StepTimer | None) -> None:
        self._engine.timer = timer

    def set_learning_rate(self, lr: float) -> None:
        """Learning rate of the tables' updates to come."""
        self._engine.set_learning_rate(lr)


def _default_device(group: dist.ProcessGroup | None) -> torch.device:
    if group is not None or dist.is_initialized():
        return (
            torch.device("cuda", torch.cuda.current_device())
            if "nccl" in dist.get_backend(group)
            else torch.device("cpu")
        )
    return torch.device("cpu")


def _materialize(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give dense modules on the meta device real, initial parameters, the same on every rank."""
    owners = [
        m
        for m in module.modules()
        if any(t.is_meta for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
    ]
    if not owners:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for owner in owners:
            reset = getattr(owner, "reset_parameters", None)
            if reset is None:
                raise ConfigError(
                    f"{type(owner).__name__} lies on the meta device and has no "
                    "reset_parameters(); build it on a real device."
                )
            owner.to_empty(device=device, recurse=False)
            reset()
