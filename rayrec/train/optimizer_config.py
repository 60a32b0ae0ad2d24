"""`OptimizerConfig`: an optimizer by its name, as files and command lines say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayrec.errors import ConfigError
from rayrec.fields.typed import check_fields
from rayrec.spec.optimizers import SparseOptimizer, sparse_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

DENSE_OPTIMIZERS = {"adam": "Adam", "adagrad": "Adagrad", "sgd": "SGD"}  # -> class of torch.optim
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})  # of which one is chosen

# of torch, where it does not know an option or a value
_REFUSALS = (TypeError, ValueError, ArithmeticError, LookupError)

# torch's default rates for optimizers whose step is as long as the rate, whatever the gradient
_RATES = {"adam": 1e-3, "partial_rowwise_adam": 1e-3, "lamb": 1e-3}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """An optimizer by name, with its learning rate and options.

    Attributes:
        name: one of DENSE_OPTIMIZERS for the dense part, of SPARSE_OPTIMIZERS for the tables.
        lr: learning rate, at least 0.
        options: further arguments of the class of that name, in torch.optim or `rayrec.optim`, such
            as {"eps": 1e-6}; what is left out has that class's default.
    """

    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if "lr" in self.options:
            raise ConfigError(
                f"optimizer {self.name!r} has lr={self.lr} and options['lr']; say it once, as lr."
            )
        if not 0 <= self.lr < float("inf"):
            raise ConfigError(
                f"optimizer {self.name!r} has lr={self.lr}; it must be finite and not negative."
            )

    @classmethod
    def of_word(cls, word: str, base: OptimizerConfig) -> OptimizerConfig:
        """Return the optimizer of a name, with the rate of `base` or the usual one of its kind."""
        return cls(name=word, lr=base.lr if word == base.name else _RATES.get(word, base.lr))

    def make_dense(
        self, parameters: Sequence[nn.Parameter], module: nn.Module | None = None
    ) -> torch.optim.Optimizer:
        """Return torch's optimizer of dense parameters; one kernel updates those of a device.

        Args:
            module: whose parameters they are; its layers may have sparse gradients.
        Raises:
            ConfigError: torch has no such option, or refuses its value.
        """
        if self.options.get("capturable") and not all(one.is_cuda for one in parameters):
            raise ConfigError(
                f"dense_optimizer {self.name!r} has capturable, which torch has on GPUs alone; "
                "leave it out."
            )
        layers = () if module is None else module.modules()
        # such as torch.nn.Embedding has them; the kernel takes none
        is_sparse = any(getattr(layer, "sparse", False) is True for layer in layers)
        return self._make(parameters, not is_sparse)

    def _make(
        self, parameters: Sequence[nn.Parameter], fused: bool = True
    ) -> torch.optim.Optimizer:
        import torch  # late: a run is told before torch is needed

        try:
            kind = getattr(torch.optim, DENSE_OPTIMIZERS[self.name])
            options = dict(self.options)
            # torch has it for all of DENSE_OPTIMIZERS; it reads numbers as they lie in memory
            fits = all(one.is_contiguous() and one.is_floating_point() for one in parameters)
            if fused and fits and not _WAYS.intersection(options):
                options["fused"] = True
            return kind(parameters, lr=self.lr, **options)
        except _REFUSALS as error:
            raise ConfigError(f"dense_optimizer {self.name!r}: {error}.") from error

    def check_dense(self) -> None:
        """Check the name and the options of a dense optimizer.

        Raises:
            ConfigError: the name is not known, torch has no such option, or refuses its value.
        """
        if self.name not in DENSE_OPTIMIZERS:
            raise ConfigError(
                f"dense_optimizer {self.name!r} is not known; choose one of "
                f"{', '.join(DENSE_OPTIMIZERS)}."
            )
        for way in sorted(_WAYS.intersection(self.options)):
            if not isinstance(self.options[way], bool | None):
                raise ConfigError(
                    f"dense_optimizer {self.name!r} has {way}={self.options[way]!r}; it must be "
                    "true or false."
                )
        if self.options:
            import torch

            parameter = torch.nn.Parameter(torch.zeros(1))
            parameter.grad = torch.zeros(1)
            try:
                optimizer = self._make([parameter])
                # some values are read by a step alone, and some by the second one
                if not {"fused", "capturable"}.intersection(self.options):  # which a GPU may have
                    optimizer.step()
                    optimizer.step()
            except ConfigError:
                raise
            except (*_REFUSALS, RuntimeError) as error:
                raise ConfigError(f"dense_optimizer {self.name!r}: {error}.") from error

    def check_saved(self, extras: Mapping[str, Any], path: str) -> None:
        """Check that the checkpoint at `path`, with these extras, has this dense optimizer's state.

        Raises:
            ConfigError: it was trained with another one.
        """
        saved = extras.get("dense_optimizer", self.name)
        if saved != self.name:
            raise ConfigError(
                f"{path} was trained with the dense optimizer {saved!r}, the run wants "
                f"{self.name!r}. Use {saved!r}, or start a new run from its weights alone with "
                "init_from."
            )


# The defaults of every run, whoever starts it. benchmarks/quality_seeds.py says on what data the
# numbers were chosen.
DEFAULT_SPARSE = OptimizerConfig(name="rowwise_adagrad", lr=0.3)
DEFAULT_DENSE = OptimizerConfig(name="adam", lr=3e-3)
DEFAULT_BATCH = 1024  # rows of a step, where a command needs no word of it


def as_optimizer(said: SparseOptimizer | OptimizerConfig) -> SparseOptimizer:
    """Return a sparse optimizer as the lookup kernels take it.

    Raises:
        ConfigError: its name, or an option of it, is unknown or out of range.
    """
    if isinstance(said, SparseOptimizer):
        return said
    return sparse_optimizer(said.name, said.lr, **said.options)
