"""Remedies when nothing fits: the smallest change of each kind, tried before it is named.

A change is a request like the one that failed, with one thing different; only changes whose request
has a plan are told. Tried in order of how little they cost: another sharding kind, a lifted
constraint, a lighter optimizer, half-precision rows, rows in the host's memory, smaller batches,
more memory, more hosts. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from rayrec.errors import PlanError, RayrecError
from rayrec.layout.kinds import KINDS
from rayrec.layout.tables import DataType
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.planner.constraints import ParameterConstraints
from rayrec.planner.items import kinds_of
from rayrec.planner.request import PlanRequest
from rayrec.planner.search import has_room
from rayrec.spec.optimizers import optimizer_class

Edit = Callable[[ParameterConstraints], ParameterConstraints]

ENOUGH = 3  # changes that are told
MEMORY_STEPS = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
HOST_STEPS = (2, 3, 4, 6, 8, 16, 32, 64)
MOST_RANKS = 4096
ADDED_KINDS = (
    "row_wise",
    "column_wise",
    "table_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One change that makes a plan exist.

    Attributes:
        text: advice, as the middle of a sentence.
        request: the changed request.
    """

    text: str
    request: PlanRequest


class NoPlan(PlanError):
    """No plan exists within the memory and the constraints.

    Attributes:
        changes: changes of the request that each make a plan exist; the smallest first.
    """

    def __init__(self, message: str, changes: tuple[Change, ...] = ()) -> None:
        super().__init__(message)
        self.changes = changes

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (*self.args, self.changes)


def find_changes(request: PlanRequest, failed: Sequence[int]) -> tuple[Change, ...]:
    """Up to three changes that help, of different kinds.

    Args:
        failed: indices of the tables that found no place.
    """
    changes: list[Change] = []
    for attempts in (_kinds, _lift, _optimizer, _half, _storage, _batch, _memory, _hosts):
        helpful = (change for change in attempts(request, failed) if _helps(change.request))
        changes += islice(helpful, 1)
        if len(changes) == ENOUGH:
            break
    if not changes:  # one change is not enough
        helpful = (change for change in _everything(request) if _helps(change.request))
        changes += islice(helpful, 1)
    return tuple(changes)


def _helps(request: PlanRequest) -> bool:
    try:
        # much cheaper than planning
        return has_room(request.items(), request.topology)
    except RayrecError:
        return False


def _scopes(request: PlanRequest, failed: Sequence[int]) -> tuple[tuple[str, Sequence[int]], ...]:
    """Return the tables that failed, then all of them, each with their name in a sentence."""
    names = " and ".join(repr(request.tables[i].name) for i in failed)
    return (names, failed), ("all tables", range(len(request.tables)))


def _with_limits(request: PlanRequest, tables: Sequence[int], change: Edit) -> PlanRequest:
    constraints = dict(request.constraints)
    for index in tables:
        constraints[request.tables[index].name] = change(request.limits(index))
    return replace(request, constraints=constraints)


def _kinds(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """Yield one more kind for the tables that failed at a time, then all kinds for all tables."""
    (names, _), (everyone, _) = _scopes(request, failed)
    have = set(kinds_of(request.limits(failed[0]), request.kinds))
    # The planner's own kinds go into the constraints of all other tables, so that one may use more.
    others = [i for i in range(len(request.tables)) if i not in failed]
    kept = _with_limits(
        request,
        others,
        lambda limits: replace(limits, kinds=kinds_of(limits, request.kinds) or limits.kinds),
    )
    for kind in ADDED_KINDS:
        if kind not in have:
            wider = [k for k in KINDS if k in have or k == kind]
            wide = _with_limits(replace(kept, kinds=KINDS), failed, partial(replace, kinds=wider))
            yield Change(f"allow {kind} for {names}", wide)
    limited = any(limits.kinds for limits in request.constraints.values())
    if limited or set(request.kinds) != set(KINDS):
        free = {name: replace(limits, kinds=None) for name, limits in request.constraints.items()}
        wide = replace(request, kinds=KINDS, constraints=free)
        yield Change(f"allow all sharding kinds for {everyone}", wide)


def _lift(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """Yield changes that lift constraints on place, of the tables that failed, then of all."""
    lifts: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("pins", ("ranks", "hosts")),
        ("'apart'", ("apart",)),
        ("'together'", ("together",)),
        ("min_partition", ("min_partition",)),
    )
    for whose, tables in _scopes(request, failed):
        for word, names in lifts:
            lift: Edit = partial(replace, **dict.fromkeys(names))
            if any(lift(request.limits(i)) != request.limits(i) for i in tables):
                yield Change(f"drop the {word} of {whose}", _with_limits(request, tables, lift))


def _optimizer(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    if optimizer_class(request.sparse_optimizer).has_element_state():
        yield Change(
            f"use rowwise_adagrad instead of {request.sparse_optimizer}",
            replace(request, sparse_optimizer="rowwise_adagrad"),
        )


def _half(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    # Few tables are changed before many: first those that failed, then all of them.
    for whose, which in _scopes(request, failed):
        tables = list(request.tables)
        for i in which:
            if tables[i].data_type is DataType.FP32:
                tables[i] = replace(tables[i], data_type=DataType.FP16)
        if tables != list(request.tables):
            yield Change(f"store {whose} as FP16", replace(request, tables=tables))


def _storage(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    def ease(limits: ParameterConstraints) -> ParameterConstraints:
        return replace(limits, storage="auto") if limits.storage == "device" else limits

    if request.topology.device == "cuda":
        for whose, which in _scopes(request, failed):
            eased = _with_limits(request, which, ease)
            if eased.constraints != request.constraints:
                yield Change(f"let {whose} lie in the host's memory (storage='auto')", eased)


def _batch(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    size = request.batch_size // 2
    while size >= 1:
        text = f"lower batch_size from {request.batch_size} to {size} rows per rank"
        yield Change(text, replace(request, batch_size=size))
        # Large batches fall faster: each attempt packs everything once.
        size = size // 2 if size < 16 else size // 4


def _memory(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    limits = request.topology.memory_bytes
    for factor in (*MEMORY_STEPS, *(4.0 * 2**i for i in range(40))):
        more = tuple(max(int(limit * factor), 1000) for limit in limits)
        largest = format_bytes(max(more))
        text = f"give every rank {factor:g} times its memory ({largest} on the largest)"
        yield Change(text, replace(request, topology=replace(request.topology, memory_bytes=more)))


def _everything(request: PlanRequest) -> Iterator[Change]:
    """Yield the lifting of all kinds and places for all tables, then with more memory as well."""
    placing = ("kinds", "ranks", "hosts", "apart", "together", "min_partition")
    free = {
        name: replace(limits, **dict.fromkeys(placing))  # type: ignore[arg-type]
        for name, limits in request.constraints.items()
    }
    lifted = replace(request, constraints=free, kinds=KINDS)
    yield Change("lift all constraints on kinds and places", lifted)
    for change in _memory(lifted, ()):
        yield Change(f"lift all constraints on kinds and places and {change.text}", change.request)


def _hosts(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """Yield changes to more hosts like the last one."""
    topology = request.topology
    last = topology.hosts[-1]
    for times in HOST_STEPS:
        hosts, memory = list(topology.hosts), list(topology.memory_bytes)
        for _ in range((times - 1) * len(topology.hosts)):
            hosts.append(tuple(range(len(memory), len(memory) + len(last))))
            memory += [topology.memory_bytes[rank] for rank in last]
        if len(memory) <= MOST_RANKS:
            more: Topology = replace(topology, hosts=tuple(hosts), memory_bytes=tuple(memory))
            yield Change(
                f"use {len(hosts)} hosts with {len(memory)} ranks instead of {topology.world_size}",
                replace(request, topology=more),
            )
