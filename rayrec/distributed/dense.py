"""The dense part of a model on several ranks: DistributedDataParallel and what it needs here.

Gradients are averaged through shared memory where all ranks are CPU ranks of one host
(`rayrec.comm.gradient_average`), else over the process group. Parameters that a step does not use,
on all ranks or on some, are right unless DDP is told to see to them itself (`rayrec.comm.unused`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rayrec.comm.choose import Transport, exchange_for
from rayrec.comm.exchange import Exchange
from rayrec.comm.gradient_average import average_at_once, average_gradients
from rayrec.comm.shared_memory import SharedMemoryExchange
from rayrec.comm.unused import Hook, reach_all, with_unused
from rayrec.errors import ConfigError

# arguments of DDP that are not the user's to give
_OWN = "self module device_ids output_device dim process_group device_mesh check_reduction"
_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters.keys()
_DDP = frozenset(_ARGUMENTS - set(_OWN.split()))
_EXTRA = ("comm_hook", "params_to_ignore")


def check_ddp_options(options: Mapping[str, Any], module: nn.Module) -> None:
    """Check the names of options, and the names of parameters in them.

    Args:
        options: keyword arguments of DistributedDataParallel; or "comm_hook", a pair (state, hook)
            as for register_comm_hook, or "params_to_ignore", names of what is not averaged.
    Raises:
        ConfigError: names the option or the parameter.
    """
    for name in options:
        if name not in _DDP and name not in _EXTRA:
            known = ", ".join(sorted({*_DDP, *_EXTRA}))
            raise ConfigError(f"ddp_options has {name!r}, which is none of {known}.")
    names = dict(module.named_parameters())
    lost = [name for name in options.get("params_to_ignore", ()) if name not in names]
    if lost:
        raise ConfigError(
            f"ddp_options['params_to_ignore'] names {lost[0]!r}; the model has no such dense "
            "parameter."
        )
    hook = options.get("comm_hook")
    if hook is not None and not (isinstance(hook, tuple) and len(hook) == 2 and callable(hook[1])):
        raise ConfigError(f"ddp_options['comm_hook'] must be a pair (state, hook), got {hook!r}.")


class DenseReplicas:
    """A module whose dense parameters stay the same on all ranks: their gradients are averaged.

    Parameters may be frozen and thawed between steps, on all ranks alike.

    Args:
        transport: lets gradients go through shared memory, unless it is PROCESS_GROUP.
        watch: wraps an exchange so that its waits are counted.
        options: checked by `need_averages`; what they leave out is DDP's default, but that buffers
            are not broadcast and gradients are views of buckets.
    Raises:
        ConfigError: DDP refuses the value of an option.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        process_group: dist.ProcessGroup | None,
        transport: Transport,
        watch: Callable[[Exchange], Exchange],
        options: Mapping[str, Any],
    ) -> None:
        ignored = list(options.get("params_to_ignore", ()))
        if ignored:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        self._module = module
        self._parameters = [p for name, p in module.named_parameters() if name not in ignored]
        given = {name: value for name, value in options.items() if name in _DDP}
        self._given = dict(options)
        self._keywords: dict[str, Any] = {"gradient_as_bucket_view": True, **given}
        if "broadcast_buffers" not in given:
            self._keywords.setdefault("forward_sync_buffers", False)
        self._keywords["device_ids"] = [device] if device.type == "cuda" else None
        self._keywords["process_group"] = process_group
        # with these DDP does the same at a higher price, or was told that nothing ever changes
        self._reaches_all = not (given.get("find_unused_parameters") or given.get("static_graph"))
        self._state: Any = process_group
        self._hook: Hook = allreduce_hook
        if options.get("comm_hook") is not None:
            self._state, self._hook = options["comm_hook"]
        elif device.type == "cpu" and transport is not Transport.PROCESS_GROUP:
            exchange = exchange_for(process_group, device, transport, own=True)
            if isinstance(exchange, SharedMemoryExchange):
                self._state = partial(watch, exchange)
                at_once = given.get("static_graph")
                self._hook = average_at_once if at_once else average_gradients
        self._averages = True
        self._flags: list[bool] | None = None
        self._ddp: DistributedDataParallel | None = None
        self._follow()

    def _wrap(self) -> DistributedDataParallel | None:
        """Return DDP around the parameters that are trained now; None where none is."""
        self._trained = [p for p in self._parameters if p.requires_grad]
        if not self._trained:
            return None
        try:
            ddp = DistributedDataParallel(self._module, **self._keywords)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ddp_options {self._given}: {error}") from error
        # another one finds parameters and buffers as training has left them
        self._keywords["init_sync"] = False
        ddp.register_comm_hook(
            self._state, with_unused(self._hook) if self._reaches_all else self._hook
        )
        return ddp

    def _follow(self) -> None:
        # DDP would wait for what was frozen since, and not average what was thawed
        flags = [p.requires_grad for p in self._parameters]
        if flags != self._flags:
            # where DDP refuses, the next call has to try again: without it nothing is averaged
            self._flags, self._ddp = None, None
            self._ddp = self._wrap()
            self._flags = flags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; the backward pass from what it returns averages gradients."""
        self._follow()
        if self._ddp is None:
            return self._module(*args, **kwargs)
        # as DDP's own no_sync does, but also for one that is made inside of it
        self._ddp.require_backward_grad_sync = self._averages
        output = self._ddp(*args, **kwargs)
        if not self._reaches_all:
            return output
        begin = partial(_begin_backward, self._ddp.reducer) if self._averages else _nothing
        return reach_all(output, self._trained, begin)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are not averaged but kept for a later step."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before


def _begin_backward(reducer: Any) -> None:
    """Have gradients averaged in this backward pass, also where the forward pass had one before.

    DDP does this once per forward pass; in a second backward pass gradients would stay those of
    each rank.
    """
    reducer._rebuild_buckets()  # after the very first backward pass, else nothing
    reducer.prepare_for_backward([])


def _nothing() -> None:
    """Gradients of this forward pass are kept, not averaged."""


def need_averages(module: nn.Module, options: Mapping[str, Any], ranks: int) -> bool:
    """Return True if ranks have gradients of dense parameters to average, now or once thawed.

    Args:
        options: arguments of DDP, see `check_ddp_options`.
    Raises:
        ConfigError: an option is unknown, or torch was told to update a parameter in the backward
            pass.
    """
    check_ddp_options(options, module)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    marked = [name for name, p in trained.items() if hasattr(p, "_in_backward_optimizers")]
    if ranks > 1 and marked:
        raise ConfigError(
            f"dense parameter {marked[0]!r} is marked by torch's _apply_optimizer_in_backward, "
            "which would update it before its gradient is averaged over the ranks. Mark tables "
            "alone, and give an optimizer to the rest."
        )
    names = {name for name, _ in module.named_parameters()}
    return ranks > 1 and bool(names - set(options.get("params_to_ignore", ())))


def materialize(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give dense modules on the meta device real, initial parameters, the same on every rank.

    Raises:
        ConfigError: such a module has no reset_parameters().
    """
    owners = []
    for owner in module.modules():
        own = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            owners.append(owner)
    if not owners:
        return
    # the caller's random numbers go on as if nothing had been drawn here
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
