"""Choice of the exchange of a group of ranks, from where they are or as the caller says.

CPU ranks of one host share memory; where a job spans hosts, those of each host do, and a process
group joins the hosts; GPU ranks, and ranks that cannot share memory, use the process group alone. A
rank that is alone in its group has nobody to talk to.
"""

from __future__ import annotations

import os
from enum import Enum
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist

from rayrec.comm.exchange import Exchange, LocalExchange
from rayrec.comm.joined import share_hosts
from rayrec.comm.process_group import ProcessGroupExchange, new_group, timeout_s
from rayrec.errors import CommError, ConfigError


class Transport(Enum):
    """Transport of ids, rows and gradients between ranks."""

    AUTO = "auto"
    PROCESS_GROUP = "process_group"
    SHARED_MEMORY = "shared_memory"


def exchange_for(
    group: dist.ProcessGroup | None,
    device: torch.device,
    transport: Transport = Transport.AUTO,
    own: bool = False,
) -> Exchange:
    """Make an exchange over the ranks of `group`.

    Every rank of the group calls it, in the same order as other collectives.

    Args:
        group: the default group when None, which itself is never used for the exchange, but one
            with connections of its own.
        transport: AUTO chooses as the module says; PROCESS_GROUP never shares memory; SHARED_MEMORY
            raises where AUTO would not share memory among any ranks.
        own: also make new connections for any other group.
    Raises:
        CommError: no process group exists, or SHARED_MEMORY is not possible.
    """
    if not dist.is_initialized():
        raise CommError(
            "no process group: call torch.distributed.init_process_group first, or train through "
            "rayrec.Driver."
        )
    if dist.get_world_size(group) == 1 and transport is not Transport.PROCESS_GROUP:
        return LocalExchange()
    whole = _process_group_exchange(group, own)
    if transport is Transport.PROCESS_GROUP or device.type != "cpu":
        if transport is Transport.SHARED_MEMORY:
            raise CommError(
                f"transport 'shared_memory' is for CPU ranks, these are on {device.type}; use "
                "'auto'."
            )
        return whole
    joined = share_hosts(whole, number_of(host_identity()), timeout_s())
    if joined is whole and transport is Transport.SHARED_MEMORY:
        raise CommError(
            "transport 'shared_memory': no two ranks share a host and can share memory there; use "
            "'auto'."
        )
    return joined


def _process_group_exchange(group: dist.ProcessGroup | None, own: bool) -> ProcessGroupExchange:
    if group is None or group is dist.group.WORLD:
        return ProcessGroupExchange(new_group())
    if own:
        group = new_group(dist.get_process_group_ranks(group), members_only=True)
    return ProcessGroupExchange(group)


def host_identity() -> str:
    """Text that is equal for two processes exactly when they can share memory.

    It names the boot of the kernel, the process namespace and the user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    kernel = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return f"{kernel}/{os.readlink(namespace) if namespace.exists() else ''}/{os.getuid()}"


def number_of(text: str) -> int:
    """A whole number of 56 bits that ranks exchange in the place of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")


def usable_device(device: torch.device | str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: torch knows no such device, or has none here.
    """
    try:
        torch.empty(0, device=device)
    # torch without CUDA answers by an assertion
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device={str(device)!r} cannot be used here ({str(error).splitlines()[0]}); torch "
            f"{torch.__version__} sees {torch.cuda.device_count()} GPUs. Give 'cpu' or one of them."
        ) from error
    return torch.device(device)


def device_of(group: dist.ProcessGroup | None, grouped: bool) -> torch.device:
    """This rank's GPU where its group is one of NCCL or takes no tensors of a CPU, else the CPU.

    Args:
        group: the default group when None.
        grouped: False where this rank is alone and has no process group.
    """
    config = dist.get_backend_config(group) if grouped else "cpu"
    if "nccl" in config or ("cuda" in config and "cpu" not in config):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
