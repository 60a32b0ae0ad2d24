"""A table's own initial values: its `init_fn`, recorded once and played back for any rectangle.

`init_fn` fills a whole (num_embeddings, embedding_dim) tensor in place, as in TorchRec. No rank
holds a whole table, and values must not depend on the plan. So `init_fn` runs once on a tensor of
that shape without memory (the meta device), and every operator that it applies is recorded; a rank
then plays them back on its own rectangle. What depends on the shape, such as Xavier's bounds, is
that of the whole table. Random numbers are functions of (seed, table, how many draws came before,
row, column), as in `init`, and not those of torch's generator.

Supported: what treats each element alike: uniform_, normal_, rand_like, randn_like, arithmetic,
clamping, fill_, zero_, and copy_ from tensors that exist already, such as pretrained rows, whose
rectangle is cut out. So torch.nn.init's uniform_, normal_, constant_, ones_, zeros_, xavier_* and
kaiming_* are, and `trunc_normal_` of this module in place of torch's, which draws again and again
until every element fits. What needs several elements at once (a row by its number, orthogonal_,
sparse_, eye_) is a ConfigError.

Costs a few passes over the rectangle, a chunk of rows at a time.
"""

# R rows, C columns of a rectangle

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rayrec.errors import ConfigError, RayrecError
from rayrec.layout.tables import BaseEmbeddingConfig

Lanes = Callable[[int, range, range], np.ndarray]

_aten = torch.ops.aten
_DRAWS = "uniform_ normal_ rand_like randn_like"
_RANDOM = {getattr(_aten, name).default for name in _DRAWS.split()}
# these treat each element alike, and are not tagged as such
_ALIKE = "alias clone copy_ detach empty_like full_like ones_like zero_ zeros_like _to_copy"
_WHOLE = {getattr(_aten, name).default for name in _ALIKE.split()}
_WHOLE |= {_aten.fill_.Scalar, _aten.fill_.Tensor}


@dataclass(frozen=True)
class _TensorNumber:
    """Placeholder for a tensor of the table's shape: its number among them; 0 is the table."""

    number: int


@dataclass(frozen=True)
class _Step:
    """One operator; `number` is that of its result."""

    function: Any
    args: Any
    kwargs: Mapping[str, Any]
    number: int


class _Recorder(TorchDispatchMode):
    """Records what is done with tensors of the table's shape."""

    def __init__(self, table: BaseEmbeddingConfig, whole: Tensor) -> None:
        super().__init__()
        self.where, self.shape = f"init_fn of table {table.name!r}", whole.shape
        self.kept = [whole]  # an id must not be used again
        self.numbers = {id(whole): 0}
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mine = any(id(leaf) in self.numbers for leaf in pytree.tree_leaves((args, kwargs)))
        random = torch.Tag.nondeterministic_seeded in function.tags
        if not mine:
            if random:
                raise self.refused(
                    function,
                    "it draws numbers for a tensor of its own; draw into the given one, or by "
                    "rand_like",
                )
            return function(*args, **kwargs)
        if function not in _RANDOM and (
            random or not (function in _WHOLE or torch.Tag.pointwise in function.tags)
        ):
            raise self.refused(
                function,
                "a part of a table cannot be computed by it alone; use what treats each element "
                "alike",
            )
        if kwargs.get("generator") is not None:
            raise self.refused(
                function,
                "it has a generator; leave it out, the numbers follow from the model's seed",
            )
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor) or result.shape != self.shape:
            raise self.refused(
                function, f"its result has not the table's shape {tuple(self.shape)}"
            )
        same = function._schema.returns[0].alias_info is not None  # in place, or another name
        number = self.numbers[id(args[0])] if same else len(self.kept)
        self.kept.append(result)
        self.numbers[id(result)] = number
        options = {name: value for name, value in kwargs.items() if name != "device"}
        args, options = pytree.tree_map(self._slot, (args, options))
        self.steps.append(_Step(function, args, options, number))
        return result

    def _slot(self, leaf: Any) -> Any:
        return _TensorNumber(self.numbers[id(leaf)]) if id(leaf) in self.numbers else leaf

    def refused(self, function: Any, why: str) -> ConfigError:
        return ConfigError(
            f"{self.where} applies {function}: {why}. Or fill the table after it is made "
            "(load_table)."
        )


@dataclass(frozen=True)
class InitProgram:
    """The operators of a table's `init_fn`, to be played back for any rectangle."""

    steps: tuple[_Step, ...]
    shape: tuple[int, int]

    @classmethod
    def record(cls, table: BaseEmbeddingConfig) -> InitProgram:
        """Record the `init_fn` of a table.

        Raises:
            ConfigError: it does what cannot be done for a part of a table, or writes nothing.
        """
        assert table.init_fn is not None
        shape = (table.num_embeddings, table.embedding_dim)
        whole = torch.empty(shape, device="meta")
        recorder = _Recorder(table, whole)
        try:
            with torch.no_grad(), recorder:
                table.init_fn(whole)
        except RayrecError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{recorder.where} failed on a tensor without values ({type(error).__name__}: "
                f"{error}); it may not look at values."
            ) from error
        if not any(step.number == 0 for step in recorder.steps):
            raise ConfigError(
                f"{recorder.where} wrote nothing to a tensor without values, as torch's "
                "trunc_normal_, orthogonal_ and sparse_ do. Fill the given tensor in place; "
                "rayrec.modules.trunc_normal_ can."
            )
        return cls(tuple(recorder.steps), shape)

    @torch.no_grad()
    def play(self, lanes: Lanes, rows: range, cols: range) -> Tensor:
        """The rectangle rows x cols.

        Args:
            lanes: (number of the draw, rows, cols) -> (R, C) random uint32.
        Returns:
            (R, C) float32 on CPU.
        """
        values = {0: torch.zeros(len(rows), len(cols))}

        def own(leaf: Any) -> Any:
            if isinstance(leaf, _TensorNumber):
                return values[leaf.number]
            return self._cut(leaf, rows, cols) if isinstance(leaf, Tensor) else leaf

        for draw, step in enumerate(self.steps):
            args, kwargs = pytree.tree_map(own, (step.args, dict(step.kwargs)))
            if step.function in _RANDOM:
                drawn = _draw(step.function, args, kwargs, lanes(draw, rows, cols))
                known = values.get(step.number)
                values[step.number] = drawn if known is None else known.copy_(drawn)
            else:
                values[step.number] = step.function(*args, **kwargs)
        return values[0].float()

    def _cut(self, constant: Tensor, rows: range, cols: range) -> Tensor:
        """Return the part of a foreign tensor in a rectangle; sizes of 1 are broadcast."""
        constant = constant.detach().cpu()
        for dim, span, size in ((-1, cols, self.shape[1]), (-2, rows, self.shape[0])):
            if constant.dim() >= -dim and constant.shape[dim] == size:
                constant = constant.narrow(dim, span.start, len(span)) if size > 1 else constant
        return constant


def _draw(function: Any, args: Any, kwargs: Mapping[str, Any], lanes_RC: np.ndarray) -> Tensor:
    """Random numbers of one operator, from 32 random bits each."""
    if function in (_aten.uniform_.default, _aten.rand_like.default):
        # 24 bits fill a float32's mantissa
        bits = (lanes_RC >> np.uint32(8)).view(np.int32).astype(np.float32)
        share = torch.from_numpy(bits * np.float32(2.0**-24))
        if function is _aten.rand_like.default:
            return share
        low = _argument(args, kwargs, 1, "from", 0.0)
        high = _argument(args, kwargs, 2, "to", 1.0)
        return share.mul_(high - low).add_(low).clamp_(low, high)
    # the middle of each of 2**32 steps, so that neither 0 nor 1 becomes an infinite value
    middles = torch.from_numpy((lanes_RC.astype(np.float64) + 0.5) * 2.0**-32)
    standard = torch.special.ndtri(middles).float()
    if function is _aten.randn_like.default:
        return standard
    mean = _argument(args, kwargs, 1, "mean", 0.0)
    std = _argument(args, kwargs, 2, "std", 1.0)
    return standard.mul_(std).add_(mean)


def _argument(args: Any, kwargs: Mapping[str, Any], index: int, name: str, default: float) -> float:
    return args[index] if len(args) > index else kwargs.get(name, default)


def trunc_normal_(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Tensor:
    """Fill a tensor in place from a normal distribution that is cut off below `a` and above `b`.

    For an `init_fn`; arguments are those of torch.nn.init.trunc_normal_. Values come by the inverse
    of the distribution function.

    Raises:
        ConfigError: std is not above zero, or a not below b.
    """
    if not std > 0 or not a < b:
        raise ConfigError(
            f"trunc_normal_(std={std}, a={a}, b={b}): std must be above zero and a below b."
        )
    low, high = (math.erf((bound - mean) / std / math.sqrt(2.0)) for bound in (a, b))
    with torch.no_grad():
        standard = tensor.uniform_(low, high).erfinv_()
        return standard.mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)
