"""`DistributedModelParallel`: the user's module with sharded tables, and DDP around the rest.

The forward signature and the names in the state_dict are those of the user's module. Tables are
updated inside the backward pass and are not among `parameters()`.

Costs per step: one input, one output and one backward exchange for all collections, and DDP's
all-reduce of dense gradients, which overlaps the backward pass. The exchange has connections of its
own, so the two need no common order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rayrec.comm.choose import Transport, device_of, exchange_for, usable_device
from rayrec.comm.codec import Codecs, QCommsConfig
from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.comm.process_group import broadcast_seed
from rayrec.distributed.dense import DenseReplicas, materialize, need_averages
from rayrec.distributed.front import EngineFront
from rayrec.distributed.planning import check_same_plan, plan_model, topology_of
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.replicas import ReplicaGroups
from rayrec.distributed.sharders import ModuleSharder, ShardingEnv, group_of, optimizers_for
from rayrec.distributed.sharding import choose_optimizers, shard_embeddings
from rayrec.errors import ConfigError
from rayrec.fields.typed import check_argument
from rayrec.layout import ShardingPlan
from rayrec.layout.words import also_takes
from rayrec.optim import SparseOptimizer
from rayrec.shards.named_memory import Memory


@also_takes()
class DistributedModelParallel(EngineFront):
    """A module trained by all ranks of a process group.

    Args:
        module: holds at least one embedding collection; any part may lie on the meta device.
        env: TorchRec's word for `process_group`.
        device: holds dense parameters and shards; by default this rank's GPU under NCCL, else CPU.
        plan: layout of every table, made for exactly this many ranks; None makes one for the ranks
            of the group, the same on all of them, see `planning`.
        sharders: optimizers by kind of collection, in TorchRec's words; see `sharders`.
        init_data_parallel: put DDP around the dense parameters at once; else at the first training
            step, or by `init_data_parallel()`.
        process_group: all ranks; the default group when None, this one rank without any group.
        sparse_optimizer: for all tables, or by table name; RowWiseAdagrad by default. A mark by
            `apply_optimizer_in_backward` goes before one for all.
        seed: seed of initial values on the meta device; rank 0's torch seed when None, so that
            `torch.manual_seed(s)` before the model gives the tables of the unsharded module.
        check_ids: check every id before it is sent, in one pass over the ids.
        qcomms: precision of pooled rows and their gradients on the wire; float32 when None.
        prefetch: open connections of their own for `prefetch`.
        dedup_sequences: send every id of a sequence feature once per batch.
        sharding_group_size: shard inside groups of so many ranks, which are replicas of each other
            (2D parallelism); the plan is then for one group.
        sync_every: with sharding_group_size: 1 trains exactly as one world; more is the number of
            steps between two averages of the replicas.
        transport: "auto" takes shared memory between CPU ranks of one host and the process group
            otherwise; "process_group" and "shared_memory" insist.
        share_tables: CPU ranks that share memory read each other's rows where they lie; not with
            qcomms, sharding groups, or tables that take two hops.
        track_rows: keep which rows training touches, see `touched`; 4 bytes per row.
        memory: holds this rank's rows and their state, and lets it put them back to a sync
            point, see `undo`; on the CPU only.
        adopt: go on with the rows that an earlier model left in `memory`, of the same plan.
        initialize: give rows their initial values; False is for who writes all of them at once, as
            a restore does.
        ddp_options: arguments of DistributedDataParallel; also `comm_hook`, a pair (state, hook),
            and `params_to_ignore`. Parameters that a step does not use are right by default; with
            `find_unused_parameters` or `static_graph` DDP sees to them.
    Raises:
        PlanError: the plan does not fit the tables or the number of ranks, or is another one on
            another rank; or none is given and the tables fit nowhere.
        ConfigError: nothing to shard, a dense module that cannot initialize itself, a device that
            is not there, or a wrong option of DDP.

    Example:
        collection = EmbeddingBagCollection(tables, device="meta")
        model = DistributedModelParallel(DLRM(collection, ...), plan=plan)
        dense = torch.optim.Adam(model.parameters(), 1e-3)
        loss(model(dense_features, sparse_features)).backward()
        dense.step()
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        *,
        process_group: dist.ProcessGroup | None = None,
        sparse_optimizer: SparseOptimizer | Mapping[str, SparseOptimizer] | None = None,
        seed: int | None = None,
        check_ids: bool = True,
        qcomms: QCommsConfig | None = None,
        prefetch: bool = False,
        dedup_sequences: bool = False,
        sharding_group_size: int | None = None,
        sync_every: int = 1,
        transport: Transport | str = Transport.AUTO,
        share_tables: bool = True,
        track_rows: bool = False,
        memory: Memory | None = None,
        adopt: bool = False,
        initialize: bool = True,
        ddp_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        process_group = group_of(env, process_group)
        check_argument("DistributedModelParallel", "plan", plan, ShardingPlan | None)
        grouped = process_group is not None or dist.is_initialized()
        transport = Transport(transport)
        self._stepped = False
        self.device = usable_device(device or device_of(process_group, grouped))
        size = sharding_group_size if grouped else None
        self._replicas = None if size is None else ReplicaGroups(size, sync_every)
        sharing = self._replicas.group if self._replicas else process_group, self.device, transport
        optimizer = optimizers_for(module, sparse_optimizer, sharders)
        # collectives of all ranks: their order here is the same everywhere
        if plan is None:
            topology = topology_of(process_group, self.device, grouped)
            if size is not None:
                topology = topology.group(size)
            optimizers = choose_optimizers(module, optimizer)
            in_place = share_tables and transport is not Transport.PROCESS_GROUP
            plan = plan_model(module, topology, optimizers, qcomms, in_place)
        elif grouped:
            check_same_plan(plan, process_group, self.device)
        if seed is None:
            seed = torch.initial_seed()
            seed = broadcast_seed(seed, process_group, self.device) if grouped else seed
        exchange = exchange_for(*sharing) if grouped else LocalExchange()
        ahead: Exchange | None = None
        if prefetch:
            ahead = exchange_for(*sharing, own=True) if grouped else LocalExchange()
        peers = None if self._replicas is None else self._replicas.peers(self.device, transport)
        choices = EngineOptions(
            check_ids=check_ids,
            codecs=Codecs.from_config(qcomms),
            dedup_sequences=dedup_sequences,
            share_tables=share_tables,
            track_rows=track_rows,
            memory=memory,
            adopt=adopt,
            initialize=initialize,
            averaged=self._replicas is not None and peers is None,
        )
        self.module, self._engine = shard_embeddings(
            module, plan, exchange, optimizer, self.device, seed, choices, ahead, peers
        )
        materialize(self.module, self.device, seed)
        self.module.to(self.device)
        # in a list, so that nn.Module does not register it and names keep no prefix
        self._dense: list[DenseReplicas] = []
        self._put_off: tuple[Any, ...] | None = None
        ranks, ddp = dist.get_world_size(process_group) if grouped else 1, dict(ddp_options or {})
        if need_averages(self.module, ddp, ranks):
            around = self.device, process_group, transport
            self._put_off = *around, self._engine.runner.watched, ddp
        if init_data_parallel:
            self.init_data_parallel()

    def __getstate__(self) -> Any:
        # what both copy.deepcopy and pickle ask for
        if self._engine.exchange.world_size > 1:
            raise ConfigError(
                "a model on several ranks can be neither copied nor pickled: its connections are "
                "its own. Save its state_dict() or a checkpoint, or make another model and load "
                "model.state_dict() into it."
            )
        return super().__getstate__()

    def init_data_parallel(self) -> None:
        """Put DDP around the dense parameters, if that was put off; every rank calls it.

        The first training step does it, too.
        """
        if self._put_off is not None:
            around, self._put_off = self._put_off, None
            self._dense.append(DenseReplicas(self.module, *around))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the user's module.

        Under 2D parallelism, replicas are averaged before a training step when that is due.
        """
        if self._replicas is not None and torch.is_grad_enabled():
            if self._stepped and self._replicas.due():
                self.sync()
            self._stepped = True
        if torch.is_grad_enabled():
            self.init_data_parallel()
        # DDP's forward is for steps alone: it expects a backward pass of every rank
        module = self._dense[0] if self._dense and torch.is_grad_enabled() else self.module
        return module(*args, **kwargs)

    def sync(self) -> None:
        """Average the tables of the replicas now, as before a checkpoint; every rank calls it.

        It does nothing without 2D parallelism, and where replicas are equal (sync_every=1).
        """
        if self._replicas is not None and self._replicas.sync_every > 1:
            if self.undo is not None:
                self.undo.log_all()
            self._replicas.average(self._engine.shard_states())
            if self._engine.touched is not None:
                self._replicas.average_touches(self._engine.touched)

    def go_on_from(self, steps: int) -> None:
        """Say how many steps were done before, so that replicas are averaged at the same steps."""
        if self._replicas is not None and steps:
            self._replicas.go_on_from(steps)
            self._stepped = True

    @property
    def plan(self) -> ShardingPlan:
        """The plan at work, for the rows that tables have now."""
        return self._engine.plan

    def reshard(self, plan: ShardingPlan) -> int:
        """Go over to another plan between two steps; training goes on as if it had begun under it.
        Every rank must call it.

        Only rectangles whose owner changes travel, optimizer state included. Row-wise state is
        exact as long as column blocks are kept or merged; where a block is split, its parts start
        from the value of the whole.

        Returns:
            Bytes that this rank sent.
        Raises:
            ConfigError: it is no plan.
            PlanError: the plan does not fit the tables or the number of ranks.
            CommError: a peer is gone.
        """
        check_argument("reshard", "plan", plan, ShardingPlan)
        return self._engine.reshard(plan)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, dense gradients are kept for a later step instead of averaged.

        Tables update in every backward pass all the same.
        """
        self.init_data_parallel()
        with ExitStack() as stack:
            for dense in self._dense:
                stack.enter_context(dense.no_sync())
            yield
