"""Choose an optimizer per table before sharding: `apply_optimizer_in_backward` marks parameters,
the sharded runtime reads the marks.

The call is that of `torch.distributed.optim._apply_optimizer_in_backward`, and its classes may be
torch's or this package's. A mark is a value on the parameter and does nothing by itself: tables
that are not sharded train with an outer optimizer as ever. Marks that torch's own function has made
are read as well. A copy of a module (copy.deepcopy, pickle) loses its marks, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from rayrec.errors import ConfigError
from rayrec.optim.rowwise_adagrad import DenseRowWiseAdagrad
from rayrec.spec.optimizers import SPARSE_OPTIMIZERS, RowWiseAdagrad, SparseOptimizer

# options of torch's optimizers that no formula here has
_REFUSED = (
    "nesterov",
    "maximize",
    "amsgrad",
    "momentum",
    "centered",
    "dampening",
    "lr_decay",
    "initial_accumulator_value",
)
_MARK = "_rayrec_optimizer"


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer] | type[SparseOptimizer],
    params: nn.Module | Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Mark tables with the optimizer that their updates in the backward pass use.

    Args:
        optimizer_class: a class of SPARSE_OPTIMIZERS, one of torch.optim that is in the
            `torch_names` of such a class, or DenseRowWiseAdagrad.
        params: the tables' weights, or a module all of whose parameters are tables, such as an
            EmbeddingBagCollection.
        optimizer_kwargs: its constructor's arguments; what is left out has that class's default.
    Raises:
        ConfigError: the class or an argument has no counterpart in the lookup kernels, or a
            parameter has another optimizer already.

    Example:
        apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings, {"lr": 0.02})
        apply_optimizer_in_backward(torch.optim.Adam,
        model.embeddings.embedding_bags["user"].parameters(), {"lr": 1e-3})
    """
    optimizer = as_sparse_optimizer(optimizer_class, optimizer_kwargs or {})
    for parameter in params.parameters() if isinstance(params, nn.Module) else params:
        already = optimizer_of(parameter)
        if already is not None and already != optimizer:
            raise ConfigError(
                f"a table of shape {tuple(parameter.shape)} is marked with {already} and cannot "
                f"take {optimizer} as well. "
                "Mark each table once: single tables by their own parameters."
            )
        setattr(parameter, _MARK, optimizer)


def optimizer_of(parameter: Tensor) -> SparseOptimizer | None:
    """Return the optimizer that a table's weight is marked with, by this package or by torch.

    Raises:
        ConfigError: torch's mark has no counterpart in the lookup kernels, or there are two.
    """
    own = getattr(parameter, _MARK, None)
    # torch keeps them in two lists beside each other
    kinds = getattr(parameter, "_optimizer_classes", ())
    marks = map(as_sparse_optimizer, kinds, getattr(parameter, "_optimizer_kwargs", ()))
    found = list(dict.fromkeys(mark for mark in (own, *marks) if mark is not None))
    if len(found) > 1:
        raise ConfigError(
            f"a table of shape {tuple(parameter.shape)} is marked with {found[0]} and with "
            f"{found[1]}. Mark each table once."
        )
    return found[0] if found else None


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that an outer optimizer must update.

    Args:
        named_parameters: parameters of any module; those of a sharded model are all its own but
            for the tables.
        include: yield those that are marked instead.
    """
    for name, parameter in named_parameters:
        marks = (_MARK, "_in_backward_optimizers")
        if any(hasattr(parameter, mark) for mark in marks) == include:
            yield name, parameter


def as_sparse_optimizer(optimizer_class: type, kwargs: Mapping[str, Any]) -> SparseOptimizer:
    """Return the sparse optimizer of an optimizer class and its arguments.

    Raises:
        ConfigError: there is no counterpart; lists what is supported.
    """
    if optimizer_class in SPARSE_OPTIMIZERS.values():
        return _construct(optimizer_class, _split_betas(kwargs))
    if optimizer_class not in _OF_TORCH:
        names = ", ".join(cls.__name__ for cls in SPARSE_OPTIMIZERS.values())
        raise ConfigError(
            f"{optimizer_class.__name__} has no counterpart in the lookup kernels. Use one of "
            f"rayrec.optim ({names}) "
            f"or of torch.optim ({', '.join(cls.__name__ for cls in _OF_TORCH)})."
        )
    # torch's own defaults, so that what is left out means what it means there
    filled = _construct(
        optimizer_class, {"params": [nn.Parameter(torch.zeros(1, 1))], **kwargs}
    ).defaults
    for name in _REFUSED:
        if filled.get(name):
            raise ConfigError(
                f"torch.optim.{optimizer_class.__name__}({name}={filled[name]!r}): "
                f"tables cannot be trained with {name}."
            )
    return _of_torch(_OF_TORCH[optimizer_class], filled)


def _construct(cls: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return cls(**kwargs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{getattr(cls, '__name__', cls)}: {error}.") from error


def _split_betas(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(kwargs)
    if "betas" in values:
        values["beta1"], values["beta2"] = values.pop("betas")
    return values


def _of_torch(cls: type[SparseOptimizer], filled: Mapping[str, Any]) -> SparseOptimizer:
    """Return the sparse optimizer with the options that torch's has by the same names."""
    values = _split_betas(filled)
    values["weight_decay_mode"] = "decoupled" if filled.get("decoupled_weight_decay") else "l2"
    known = {f.name for f in fields(cls)}
    return cls(
        **{
            name: float(value) if isinstance(value, Tensor) else value
            for name, value in values.items()
            if name in known
        }
    )


_OF_TORCH: dict[type, type[SparseOptimizer]] = {
    getattr(torch.optim, name): cls
    for cls in SPARSE_OPTIMIZERS.values()
    for name in cls.torch_names
}
_OF_TORCH[DenseRowWiseAdagrad] = RowWiseAdagrad
