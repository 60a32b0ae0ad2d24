"""When nothing fits: the smallest changes of each kind that would help, each tried before it is
named.

A change is a request like the one that failed, with one thing different; only changes whose request
has a plan are told. Tried in order of how little they cost: another sharding kind, a lifted
constraint, a lighter optimizer, half-precision rows, rows in the host's memory, smaller batches,
more memory, more hosts. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rayrec.errors import PlanError, RayrecError
from rayrec.layout.kinds import KINDS
from rayrec.layout.tables import DataType
from rayrec.layout.topology import Topology
from rayrec.layout.units import format_bytes
from rayrec.planner.constraints import NO_CONSTRAINTS, ParameterConstraints
from rayrec.planner.items import kinds_of
from rayrec.planner.request import PlanRequest

Edit = Callable[[ParameterConstraints], ParameterConstraints]

ENOUGH = 3  # changes that are told
MEMORY_STEPS = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0)
HOST_STEPS = (2, 3, 4, 6, 8, 16, 32, 64)
MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """One change that makes a plan exist.

    Attributes:
        text: what to do, as the middle of a sentence.
        request: the changed request.
    """

    text: str
    request: PlanRequest


class NoPlan(PlanError):
    """No plan exists within the memory and the constraints.

    Attributes:
        changes: of the request, each of which makes a plan exist; the smallest first.
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
    found: list[Change] = []
    for attempts in (_kinds, _lift, _optimizer, _half, _storage, _batch, _memory, _hosts):
        helped = next(
            (change for change in attempts(request, failed) if _helps(change.request)), None
        )
        found += [helped] if helped else []
        if len(found) == ENOUGH:
            break
    if not found:  # one change is not enough
        found = list(
            islice((change for change in _everything(request) if _helps(change.request)), 1)
        )
    return tuple(found)


def _helps(request: PlanRequest) -> bool:
    try:
        return request.has_plan()
    except RayrecError:
        return False


def _with_limits(request: PlanRequest, tables: Sequence[int], change: Edit) -> PlanRequest:
    constraints = dict(request.constraints)
    for index in tables:
        name = request.tables[index].name
        constraints[name] = change(constraints.get(name, NO_CONSTRAINTS))
    return replace(request, constraints=constraints)


def _kinds(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """One more kind for the tables that failed; then all kinds for all."""
    names = " and ".join(repr(request.tables[i].name) for i in failed)
    have = set(
        kinds_of(
            request.constraints.get(request.tables[failed[0]].name, NO_CONSTRAINTS), request.kinds
        )
    )
    every = tuple(KINDS)
    for kind in (
        "row_wise",
        "column_wise",
        "table_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ):
        if kind not in have:
            wider = [k for k in every if k in have or k == kind]

            def add(limits: ParameterConstraints, wider: list[str] = wider) -> ParameterConstraints:
                return replace(limits, kinds=wider)

            others = _keep_kinds(request, failed)
            yield Change(
                f"allow {kind} for {names}", _with_limits(replace(others, kinds=every), failed, add)
            )
    if set(request.kinds) != set(every) or any(
        limits.kinds for limits in request.constraints.values()
    ):
        free = {name: replace(limits, kinds=None) for name, limits in request.constraints.items()}
        yield Change(
            "allow all sharding kinds for all tables",
            replace(request, kinds=every, constraints=free),
        )


def _keep_kinds(request: PlanRequest, failed: Sequence[int]) -> PlanRequest:
    """The planner's own kinds written into the constraints of all other tables, so that one table
    may use more.
    """
    others = [i for i in range(len(request.tables)) if i not in failed]
    return _with_limits(
        request,
        others,
        lambda limits: replace(limits, kinds=kinds_of(limits, request.kinds) or limits.kinds),
    )


def _lift(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """Constraints on place, of the tables that failed, then of all."""
    lifts: tuple[tuple[str, str, Edit], ...] = (
        ("ranks", "pins", lambda limits: replace(limits, ranks=None, hosts=None)),
        ("apart", "'apart'", lambda limits: replace(limits, apart=None)),
        ("together", "'together'", lambda limits: replace(limits, together=None)),
        ("min_partition", "min_partition", lambda limits: replace(limits, min_partition=None)),
    )
    names = " and ".join(repr(request.tables[i].name) for i in failed)
    everyone = range(len(request.tables))
    for whose, tables in ((names, failed), ("all tables", everyone)):
        for attribute, word, lift in lifts:
            limits = [
                request.constraints.get(request.tables[i].name, NO_CONSTRAINTS) for i in tables
            ]
            if any(
                getattr(own, attribute) is not None
                or (attribute == "ranks" and own.hosts is not None)
                for own in limits
            ):
                yield Change(f"drop the {word} of {whose}", _with_limits(request, tables, lift))


def _optimizer(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    if request.sparse_optimizer not in ("sgd", "rowwise_adagrad"):
        yield Change(
            f"use rowwise_adagrad instead of {request.sparse_optimizer}",
            replace(request, sparse_optimizer="rowwise_adagrad"),
        )


def _half(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    names = " and ".join(repr(request.tables[i].name) for i in failed)
    wide = {i for i, table in enumerate(request.tables) if table.data_type is DataType.FP32}
    for whose, which in ((names, wide & set(failed)), ("all tables", wide)):
        tables = [
            replace(t, data_type=DataType.FP16) if i in which else t
            for i, t in enumerate(request.tables)
        ]
        if which:
            yield Change(f"store {whose} as FP16", replace(request, tables=tables))


def _storage(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    if request.topology.device == "cuda":
        names = " and ".join(repr(request.tables[i].name) for i in failed)
        for whose, which in ((names, failed), ("all tables", range(len(request.tables)))):
            eased = _with_limits(
                request,
                which,
                lambda limits: (
                    replace(limits, storage="auto") if limits.storage == "device" else limits
                ),
            )
            if eased.constraints != request.constraints:
                yield Change(f"let {whose} lie in the host's memory (storage='auto')", eased)


def _batch(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    size = request.batch_size // 2
    while size >= 1:
        yield Change(
            f"lower batch_size from {request.batch_size} to {size} rows per rank",
            replace(request, batch_size=size),
        )
        size = size // 2 if size < 16 else size // 4


def _memory(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    limits = request.topology.memory_bytes
    factors = [*MEMORY_STEPS, *(4.0 * 2**i for i in range(40))]
    for factor in factors:
        more = tuple(max(int(limit * factor), 1000) for limit in limits)
        text = f"give every rank {factor:g} times its memory ({format_bytes(max(more))} on the largest)"
        yield Change(text, replace(request, topology=replace(request.topology, memory_bytes=more)))


def _everything(request: PlanRequest) -> Iterator[Change]:
    """All kinds and places for all tables, and more memory."""
    free = {
        name: replace(
            limits,
            kinds=None,
            ranks=None,
            hosts=None,
            apart=None,
            together=None,
            min_partition=None,
        )
        for name, limits in request.constraints.items()
    }
    lifted = replace(request, constraints=free, kinds=tuple(KINDS))
    yield Change("lift all constraints on kinds and places", lifted)
    for change in _memory(lifted, ()):
        yield Change(f"lift all constraints on kinds and places and {change.text}", change.request)


def _hosts(request: PlanRequest, failed: Sequence[int]) -> Iterator[Change]:
    """More hosts like the last one."""
    topology = request.topology
    for times in HOST_STEPS:
        hosts, memory = list(topology.hosts), list(topology.memory_bytes)
        for _ in range((times - 1) * len(topology.hosts)):
            hosts.append(tuple(range(len(memory), len(memory) + len(topology.hosts[-1]))))
            memory += [topology.memory_bytes[rank] for rank in topology.hosts[-1]]
        if len(memory) <= MOST_RANKS:
            more: Topology = replace(topology, hosts=tuple(hosts), memory_bytes=tuple(memory))
            yield Change(
                f"use {len(hosts)} hosts with {len(memory)} ranks instead of {topology.world_size}",
                replace(request, topology=more),
            )
