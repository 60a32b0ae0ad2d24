"""The tables' fused optimizers as a torch optimizer: its learning rates reach the lookup kernels,
its state is the kernels' own.

The backward pass makes the updates, so `step` and `zero_grad` only pass learning rates on. Writing
`param_groups[i]["lr"]`, as every learning-rate scheduler does, reaches the kernel at once, whatever
the order of scheduler and step; one group per kernel.

A kernel is anything with the attributes of `FusedUpdate`, so that this package knows nothing of the
sharded runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from rayrec.errors import CheckpointError
from rayrec.layout import Shard
from rayrec.optim.keyed import KeyedOptimizer
from rayrec.spec.optimizer import SparseOptimizer

# A kernel's name of its state -> that of a state_dict, where they differ, which is TorchRec's: the
# first state is "momentum1", the second as torch names it. Its fused collections count instead.
_NAMES = {
    "momentum2": "exp_avg_sq",
    "exp_avg": "momentum1",
    "momentum_1": "momentum1",
    "momentum_2": "exp_avg_sq",
}


class ShardTensors(Protocol):
    """A shard's live rows and optimizer state."""

    @property
    def shard(self) -> Shard: ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def optimizer(self) -> Any: ...


class FusedUpdate(Protocol):
    """A kernel that updates its rows in the backward pass."""

    @property
    def optimizer(self) -> SparseOptimizer: ...

    iteration: int
    base_rate: float | None  # that a schedule multiplies; None where there is none

    @property
    def learning_rate(self) -> float: ...

    def set_learning_rate(self, lr: float) -> None: ...

    def shard_states(self) -> Iterable[ShardTensors]: ...


class FusedOptimizer(KeyedOptimizer):
    """The optimizers of all tables of one rank.

    Args:
        kernels: this rank's lookups; none on a rank without shards.
        name_of: table -> name of its parameter in the model; by default "<table>.weight".
        on_load: called when `load_state_dict` has written the kernels' state.
        sizes: table -> its rows and columns, where state of whole tables may be loaded.

    State is keyed by parameter name where this rank holds one shard of the table, else by
    "name[r0-100,c0-64]": the rows and columns of each shard. Its own names are TorchRec's, such as
    "<table>.momentum1". It is that of this rank and plan; checkpoints, not state_dicts, carry it to
    another plan.
    """

    def __init__(
        self,
        kernels: Sequence[FusedUpdate],
        name_of: Callable[[str], str] | None = None,
        on_load: Callable[[], None] = lambda: None,
        sizes: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self._kernels, self._on_load, self._sizes = list(kernels), on_load, sizes or {}
        name_of = name_of or (lambda table: f"{table}.weight")
        shards = [state.shard for kernel in self._kernels for state in kernel.shard_states()]
        count = {
            table: sum(s.table == table for s in shards) for table in {s.table for s in shards}
        }
        params: dict[str, Tensor] = {}
        state: dict[Any, Any] = {}
        self._shards: dict[str, Shard] = {}
        groups: list[dict[str, Any]] = []
        for kernel in self._kernels:
            members = []
            for part in kernel.shard_states():
                shard, weight = part.shard, part.weight
                where = (
                    f"[r{shard.rows.start}-{shard.rows.stop},c{shard.cols.start}-{shard.cols.stop}]"
                )
                name = name_of(shard.table) + (where if count[shard.table] > 1 else "")
                params[name], self._shards[name] = weight, shard
                state[weight] = {
                    f"{shard.table}.{_NAMES.get(key, key)}": tensor
                    for key, tensor in part.optimizer.items()
                }
                members.append(weight)
            options = {
                name: value
                for name, value in kernel.optimizer.hyperparameters.items()
                if name != "lr"
            }
            if kernel.base_rate is not None:
                options["initial_lr"] = kernel.base_rate
            groups.append(
                _Group(
                    kernel,
                    {
                        "params": members,
                        "lr": kernel.learning_rate,
                        "name": kernel.optimizer.name,
                        **options,
                    },
                )
            )
        super().__init__(params, state, groups)

    def own_rates(self) -> list[float]:
        """The learning rate of each group's optimizer, where nobody has written another one."""
        return [kernel.optimizer.lr for kernel in self._kernels]

    def __call__(self) -> FusedOptimizer:
        """Return itself, so that `model.fused_optimizer()` is `model.fused_optimizer`."""
        return self

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Pass learning rates on; the backward pass has updated the rows already."""
        self._pass_on()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Tables have no gradients; passes learning rates on."""
        self._pass_on()

    def state_dict(self) -> dict[str, Any]:
        """Return state by parameter name; each group has its kernel's iteration."""
        found = super().state_dict()
        for group, kernel in zip(found["param_groups"], self._kernels, strict=True):
            group["iteration"] = kernel.iteration
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state, learning rates and iterations.

        Args:
            state_dict: one of this class, or TorchRec's of a sharded model or a fused collection,
                which has neither iterations nor always learning rates. A table's state may be
                whole; then each rank takes its part of it.
        Raises:
            CheckpointError: names, shapes or constants are not those of these kernels; constants
                but the learning rate are the model's.
        """
        state_dict = {**state_dict, "state": self._read(state_dict["state"])}
        own = {tuple(group["params"]): group for group in self.state_dict()["param_groups"]}
        for saved in state_dict.get("param_groups", ()):
            here = own.get(tuple(saved["params"]), saved)
            differ = [
                key
                for key in here
                if key not in ("params", "lr", "initial_lr", "iteration")
                and here[key] != saved.get(key, here[key])
            ]
            if differ:
                raise CheckpointError(
                    f"the optimizer of {saved['params'][0]!r} was saved with "
                    f"{differ[0]}={saved[differ[0]]!r}, here it is "
                    f"{here[differ[0]]!r}; build the model with the optimizer that it was trained "
                    "with."
                )
        super().load_state_dict(state_dict)

    def _read(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return saved state with the names and the parts of tables that this optimizer has."""
        found: dict[str, Any] = {}
        taken = set()
        for name, shard in self._shards.items():
            names = (name, name.partition("[")[0], f"{shard.table}.weight")
            source = next((key for key in names if key in saved), None)
            if source is not None:
                taken.add(source)
                size, own = self._sizes.get(shard.table), dict[str, Any]()
                for key, value in saved[source].items():
                    last = key.rpartition(".")[2]
                    part = _part_of(shard, key, value, size)
                    own[f"{shard.table}.{_NAMES.get(last, last)}"] = part
                found[name] = own
        return found | {name: saved[name] for name in saved if name not in taken}

    def post_load_state_dict(self) -> None:
        """Hand learning rates and iterations to the kernels."""
        for group, kernel in zip(self.param_groups, self._kernels, strict=True):
            kernel.iteration = int(group.pop("iteration", kernel.iteration))
        self._pass_on()
        self._on_load()

    def _pass_on(self) -> None:
        # a scheduler may write in place what `_Group` does not see: a tensor, or dict.update
        for group, kernel in zip(self.param_groups, self._kernels, strict=True):
            _hand_over(group, kernel)


class _Group(dict[str, Any]):
    """A param_group whose learning rate reaches its kernel when it is written."""

    def __init__(self, kernel: FusedUpdate, values: dict[str, Any]) -> None:
        super().__init__(values)
        self._kernel = kernel

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        # unpickling fills the dict first
        if key in ("lr", "initial_lr") and hasattr(self, "_kernel"):
            _hand_over(self, self._kernel)


def _hand_over(group: Mapping[str, Any], kernel: FusedUpdate) -> None:
    """Hand the rates of a group to its kernel; torch's schedules give the base by `setdefault`."""
    kernel.set_learning_rate(float(group["lr"]))
    if "initial_lr" in group:
        kernel.base_rate = float(group["initial_lr"])


def _part_of(shard: Shard, key: str, value: Any, table: tuple[int, int] | None) -> Any:
    """Return what a shard takes of one saved value of it, or of its whole table of this size."""
    if not isinstance(value, Tensor | ShardedTensor) or table is None:
        return value
    spans = (shard.rows, shard.cols)[: len(value.size())]
    if isinstance(value, ShardedTensor):  # of TorchRec's sharded models: the parts by their plan
        start, size = [span.start for span in spans], [len(span) for span in spans]
        for part in value.local_shards():
            if part.metadata.shard_offsets == start and list(part.tensor.shape) == size:
                return part.tensor
        raise CheckpointError(
            f"state {key!r} holds no part of {size} values at {start} on this rank, which table "
            f"{shard.table!r} needs; it was saved under another plan. Gather the whole tensor on "
            "every rank, and load that."
        )
    if not spans or tuple(value.shape) != table[: len(spans)]:
        return value
    return value[tuple(slice(span.start, span.stop) for span in spans)]
