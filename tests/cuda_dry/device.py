"""torch's operators on the stand-in device.

The allocator, copies and views are torch's own, computations are the CPU's: for every operator with
a CUDA kernel `install` registers one that runs the operator's CPU kernel on the same memory. It
stands where the CUDA kernel stood, below autograd and for every thread, so that the code above sees
what it sees on a GPU. As there, tensors of two devices do not mix.

Costs about 0.2 ms an operator. Random numbers are those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda_dry import runtime

CPU = torch.device("cpu")

# they launch no kernel: memory, views, and what copies one value to the host
_NATIVE = {
    f"aten::{name}"
    for name in (
        *(
            "empty.memory_format",
            "empty_strided",
            "resize_",
            "record_stream",
            "_local_scalar_dense",
        ),
        *("copy_",),  # between host and device; `install` sees to copies within it
        *(
            "set_",
            "set_.source_Storage",
            "set_.source_Storage_storage_offset",
            "set_.source_Tensor",
        ),
        *("as_strided", "view", "_reshape_alias", "view_as_real", "view_as_complex", "unfold"),
    )
}
# the size of their result is known on the device alone
_SYNCS = {
    f"aten::{name}"
    for name in (
        *("nonzero", "nonzero.out", "masked_select", "masked_select.out", "equal", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    )
}
# they take an index on the CPU, and copy it
_INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index")

_libraries: list[torch.library.Library] = []


def operator(name: str) -> Any:
    """The overload "namespace::name.overload"."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key, such as "CUDA"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def on_host(tensor: Tensor) -> Tensor:
    """The same memory as a CPU tensor, which must not outlive `tensor`."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), CPU, storage.nbytes()
    )
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor in device memory."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if made.numel():
        on_host(made).copy_(tensor)
    return made


class Carried:
    """The arguments of one call on their way to the CPU and its results on their way back.

    Args:
        name: of the operator.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._device: torch.device | None = None  # of the arguments
        self._devices: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id of the host tensor -> both; keeps it alive

    def down(self, value: Any) -> Any:
        """The argument for the CPU kernel.

        Raises:
            RuntimeError: a CPU tensor that no CUDA kernel would take.
        """
        if isinstance(value, Tensor):
            if value.is_cuda:
                self._stay_on(value.device)
                host = on_host(value)
                self._devices[id(host)] = value, host
                return host
            return self._from_host(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self.down(item) for item in value)
        if isinstance(value, torch.device) and value.type == "cuda":
            self._stay_on(value)
            return CPU
        return None if isinstance(value, torch.Generator) else value

    def _stay_on(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = self._device or device
        if self._device != device:
            raise RuntimeError(f"{self._name}: arguments on {self._device} and {device}")

    def _from_host(self, tensor: Tensor) -> Tensor:
        if self._name.startswith(_INDEXED) and not tensor.is_floating_point():
            there = tensor.to("cuda")  # a copy that the host waits for
            return on_host(there).clone()  # `there` lives on: its memory would be taken at once
        if tensor.dim():
            raise RuntimeError(
                f"{self._name}: expected all tensors on one device, got a GPU's and a CPU tensor "
                f"of shape {tuple(tensor.shape)}"
            )
        return tensor

    def up(self, value: Any) -> Any:
        """The result for the caller; what was written in place is the caller's own tensor."""
        if isinstance(value, Tensor):
            if id(value) not in self._devices:
                return on_device(value, self._device or torch.device("cuda"))
            device, host = self._devices[id(value)]
            if device.shape != host.shape:  # an output that the operator has enlarged
                device.resize_(host.shape)
                on_host(device).copy_(host)
            return device
        if isinstance(value, (list, tuple)):
            return type(value)(self.up(item) for item in value)
        return value


def _syncs(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _SYNCS:
        return True
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    masks = args[1] if name.startswith(_INDEXED) else ()
    return any(
        isinstance(mask, Tensor) and mask.dtype in (torch.bool, torch.uint8) for mask in masks
    )


def cpu_kernel(name: str) -> Callable[..., Any]:
    """An operator's CPU kernel for tensors of the device."""
    overload = operator(name)
    tensors = [argument.type.kind() == "TensorType" for argument in overload._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if _syncs(name, args, kwargs):
            runtime.stopped(name)
        carried, run = Carried(name), overload
        # a number that was made a tensor for this overload is a number again, which others take
        if any(tensors[i] and isinstance(arg, (int, float)) for i, arg in enumerate(args)):
            run = overload._overloadpacket
        found = run(
            *carried.down(args), **{key: carried.down(value) for key, value in kwargs.items()}
        )
        return carried.up(found)

    return kernel


def replace(name: str, kernel: Callable[..., Any]) -> None:
    """Register the CUDA kernel of an operator anew, for the rest of the process.

    An operator that is made of others has its gradient from them, which a kernel would cut off.
    """
    composite = has_kernel(name, "CompositeImplicitAutograd")
    assert has_kernel(name, "CUDA") or not composite, name
    namespace, _, rest = name.partition("::")
    if not _libraries or _libraries[-1].ns != namespace:
        _libraries.append(torch.library.Library(namespace, "IMPL"))
    _libraries[-1].impl(rest, kernel, "CUDA")


def native_kernel(name: str) -> Callable[..., Any]:
    """The CUDA kernel that an operator has now, as a function."""
    kernel = torch.library.get_kernel(name, "CUDA")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return lambda *args: kernel.call_boxed(keys, *args)


def install() -> None:
    """Replace torch's CUDA kernels; once in a process."""
    copy = native_kernel("aten::copy_")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and has_kernel(name, "CUDA") and name not in _NATIVE:
            replace(name, cpu_kernel(name))

    def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
        if self.is_cuda and src.is_cuda:
            on_host(self).copy_(on_host(src))
        else:
            copy(self, src, non_blocking)
        return self

    replace("aten::copy_", copy_)
    # a kernel that takes its time, for tests that need a late one: here nothing is late
    torch.cuda._sleep = lambda cycles: None
