"""FBGEMM's operators on the stand-in device: its own CUDA code up to the launches.

Each operator runs twice. First comes FBGEMM's host code with launches that do nothing: it checks
devices, types and shapes of its arguments and makes the output. Then the output, and rows and state
in place, are computed here, from the operator's arguments alone: placements, offsets,
hyperparameters, learning rate and iteration are read where the kernel reads them. The formulas of
the optimizers are those of `rayrec.spec.optimizers`, which other tests compare with
definitions.
"""

# T features, B bags of each, N ids, D width

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayrec import optim
from rayrec.optim import SparseOptimizer
from tests.cuda_dry import cache
from tests.cuda_dry.device import cpu_kernel, native_kernel, on_host, operator, replace
from tests.cuda_dry.runtime import launches_allowed
from tests.optim_reference import FBGEMM_OPTIMIZERS

DEVICE, MANAGED, CACHED, HOST = range(4)  # EmbeddingLocation
SUM = 0
_HAVE_CPU_KERNELS = (
    "FloatToFused8BitRowwiseQuantized",
    "Fused8BitRowwiseQuantizedToFloat",
    "asynchronous_complete_cumsum",
    "block_bucketize_sparse_features",
    "dense_to_jagged_forward",
    "jagged_to_padded_dense_backward",
    "jagged_to_padded_dense_forward",
    "permute_2D_sparse_data",
)
_LOOKUP = "split_embedding_codegen_forward_{}_pt2_wrapper"
_UPDATE = "split_embedding_backward_codegen_{}_{}_pt2_wrapper"


class Arguments(dict[str, Any]):
    """The arguments of one call by name; tensors of the device are CPU tensors in its memory."""

    @staticmethod
    def of(schema: torch.FunctionSchema, args: tuple[Any, ...]) -> Arguments:
        """From positional arguments, the rest by their defaults."""
        found = Arguments()
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else argument.default_value
            found[argument.name] = (
                on_host(value) if isinstance(value, Tensor) and value.is_cuda else value
            )
        return found


class Feature(NamedTuple):
    """One feature of a call.

    Attributes:
        number: t.
        ids: (N,) rows.
        places: (N,) of each id its line of the cache, -1 where its row is read from the table.
        bags: (N,) of each id.
        columns: of the output.
        span: of its ids among all.
    """

    number: int
    ids: Tensor
    places: Tensor
    bags: Tensor
    columns: slice
    span: slice


def features(call: Arguments) -> list[Feature]:
    """The features of a lookup or an update, in order."""
    assert call.get("pooling_mode", SUM) == SUM, "rayrec sums"
    widths = call["D_offsets"].tolist()
    count = len(widths) - 1
    offsets, found = call["offsets"].long(), []
    bags = (offsets.numel() - 1) // count
    for t in range(count):
        mine = offsets[t * bags : (t + 1) * bags + 1]
        span = slice(int(mine[0]), int(mine[-1]))
        ids = call["indices"][span].long()
        places = torch.full_like(ids, -1)
        if int(call["weights_placements"][t]) == CACHED:
            places = call["lxu_cache_locations"][span].long()
        numbers = torch.arange(bags).repeat_interleave(mine.diff())
        found.append(Feature(t, ids, places, numbers, slice(widths[t], widths[t + 1]), span))
    return found


class Rows:
    """The rows of one feature's table, wherever they lie.

    Attributes:
        table: what tells tables apart: features of one table share it.
    """

    def __init__(self, call: Arguments, feature: Feature) -> None:
        t = feature.number
        self.width = feature.columns.stop - feature.columns.start
        placement, base = int(call["weights_placements"][t]), int(call["weights_offsets"][t])
        self.table = placement, base
        memory = call["dev_weights"] if placement == DEVICE else call["uvm_weights"]
        rows = (memory.numel() - base) // self.width
        self._rows = memory[base : base + rows * self.width].view(rows, self.width)
        self._cache = call["lxu_cache_weights"]

    def read(self, ids: Tensor, places: Tensor) -> Tensor:
        """(N, D) float32."""
        found, cached = self._rows[ids].float(), places >= 0
        if cached.any():
            found[cached] = self._cache[places[cached], : self.width].float()
        return found

    def write(self, ids: Tensor, places: Tensor, values: Tensor) -> None:
        """Write (U, D) rows of unique ids."""
        cached = places >= 0
        self._rows[ids[~cached]] = values[~cached].to(self._rows.dtype)
        if cached.any():
            self._cache[places[cached], : self.width] = values[cached].to(self._cache.dtype)


def look_up(call: Arguments, output: Tensor) -> None:
    """Fill (B, sum of widths) with the sums of all bags."""
    output.zero_()
    for feature in features(call):
        rows = _weighted(call, feature, Rows(call, feature).read(feature.ids, feature.places))
        output[:, feature.columns] = torch.zeros(output.shape[0], rows.shape[1]).index_add_(
            0, feature.bags, rows
        )


def gradient_of_weights(call: Arguments, output: Tensor) -> None:
    """Fill (N,) with what each id's weight scales, its row, times the gradient of its bag."""
    for feature in features(call):
        rows = Rows(call, feature).read(feature.ids, feature.places)
        output[feature.span] = (rows * _gradient(call, feature)).sum(1)


def _gradient(call: Arguments, feature: Feature) -> Tensor:
    """(N, D): of the bag of each id."""
    return call["grad_output"][feature.bags, feature.columns].float()


def _weighted(call: Arguments, feature: Feature, values: Tensor) -> Tensor:
    weights = call["indice_weights"]
    if weights is None or not weights.numel():
        return values
    return values * weights[feature.span, None].float()


def optimizer_of(name: str, call: Arguments) -> SparseOptimizer:
    """The update that a kernel of FBGEMM makes with these arguments."""
    rate = {"lr": float(call["learning_rate_tensor"])}
    names = ("eps", "beta1", "beta2", "weight_decay", "momentum", "eta")
    given = rate | {key: call[key] for key in names if key in call}
    if name == "rowwise_adagrad":
        mode = {0: None, 1: "l2", 2: "decoupled"}[call["weight_decay_mode"]]
        if mode is None:  # FBGEMM reads no decay then
            return optim.RowWiseAdagrad(lr=rate["lr"], eps=given["eps"])
        return optim.RowWiseAdagrad(**given, weight_decay_mode=mode)
    if name in ("adam", "partial_rowwise_adam"):
        given["weight_decay_mode"] = "decoupled"
    return optim.SPARSE_OPTIMIZERS[name](**given)


def _state(call: Arguments, name: str, per: str, feature: Feature, width: int) -> Tensor:
    """(rows,) or (rows, D): a table's optimizer state, in place."""
    t = feature.number
    dev = int(call[f"{name}_placements"][t]) == DEVICE
    memory = call[f"{name}_dev" if dev else f"{name}_uvm"]
    base = int(call[f"{name}_offsets"][t])
    if per == "row":
        return memory[base:]
    rows = (memory.numel() - base) // width
    return memory[base : base + rows * width].view(rows, width)


def update(name: str, call: Arguments) -> None:
    """Sum the gradients of equal ids, over all features of a table, and update each row once."""
    optimizer = optimizer_of(name, call)
    tables: dict[tuple[int, int], list[Feature]] = {}
    for feature in features(call):
        tables.setdefault(Rows(call, feature).table, []).append(feature)
    for same in tables.values():
        _update_table(optimizer, call, same)


def _update_in_place(name: str, call: Arguments, output: Tensor | None) -> None:
    update(name, call)


def _update_table(optimizer: SparseOptimizer, call: Arguments, same: list[Feature]) -> None:
    ids = torch.cat([feature.ids for feature in same])
    places = torch.cat([feature.places for feature in same])
    grads = torch.cat([_weighted(call, feature, _gradient(call, feature)) for feature in same])
    touched, inverse = ids.unique(return_inverse=True)
    if not touched.numel():
        return
    sums = torch.zeros(touched.numel(), grads.shape[1]).index_add_(0, inverse, grads)
    of_touched = torch.empty_like(touched).scatter_(0, inverse, places)  # equal for equal ids
    rows = Rows(call, same[0])
    weight = rows.read(touched, of_touched)
    tables = {
        name: _state(call, name, per, same[0], rows.width)
        for name, per in optimizer.state_widths.items()
    }
    state = {name: table[touched].float() for name, table in tables.items()}
    optimizer.update_rows(optimizer.lr, call.get("iter", 0), weight, sums, state)
    rows.write(touched, of_touched, weight)
    for name, table in tables.items():
        table[touched] = state[name]


def _twice(name: str, compute: Callable[[Arguments, Any], None]) -> None:
    """Run FBGEMM's host code, then `compute`, which is given the first output."""
    schema, native = operator(f"fbgemm::{name}")._schema, native_kernel(f"fbgemm::{name}")

    def kernel(*args: Any) -> Any:
        with launches_allowed():
            found = native(*args)
        output = found[0] if isinstance(found, (list, tuple)) else found
        compute(Arguments.of(schema, args), on_host(output) if isinstance(output, Tensor) else None)
        return found

    replace(f"fbgemm::{name}", kernel)


def install() -> None:
    """Replace FBGEMM's CUDA kernels that rayrec uses; once in a process, after `device.install`."""
    for name in _HAVE_CPU_KERNELS:
        replace(f"fbgemm::{name}", cpu_kernel(f"fbgemm::{name}"))
    _twice("split_embedding_codegen_grad_indice_weights_pt2_wrapper", gradient_of_weights)
    for kind in ("unweighted", "weighted"):
        _twice(_LOOKUP.format(kind), look_up)
        for name in FBGEMM_OPTIMIZERS:
            _twice(_UPDATE.format(name, kind), partial(_update_in_place, name))
    _twice("bounds_check_indices", lambda call, output: None)  # ids of tests are within bounds
    for name, compute in cache.OPERATORS.items():
        _twice(name, compute)
