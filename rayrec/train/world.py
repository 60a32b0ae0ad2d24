"""Entering and leaving a world of ranks: rendezvous, process group, threads, device.

Leaving after an error cuts this rank's connections first, so that the others, who wait for it in a
collective, fail within milliseconds and not at the timeout.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

from rayrec.comm.process_group import (
    connect_store,
    destroy_process_group,
    init_process_group,
    shutdown_sockets,
)
from rayrec.machine.cores import pinned
from rayrec.train.rank_error import causes
from rayrec.train.seat import Seat

# All ranks come to a meeting within moments, since each has its task by then.
JOIN_S = 60.0


@contextmanager
def joined(seat: Seat, store: dist.Store | None = None) -> Iterator[dist.ProcessGroup]:
    """Join the world of `seat`, and leave it at the end of the block.

    Args:
        seat: position of this rank in its world.
        store: the rendezvous, on the rank that made it; the others connect to the seat's address.
    Raises:
        JoinError: the other ranks did not come in time.
        ConfigError: the machine has too few cores to pin its ranks to.
    """
    place = nullcontext() if seat.pin is None else pinned(seat.pin[0], [seat.threads] * seat.pin[1])
    with place:
        if seat.device == "cuda":
            torch.cuda.set_device(0)
        torch.set_num_threads(max(1, seat.threads))
        join_s = min(JOIN_S, seat.timeout_s)
        if store is None:
            store = connect_store(seat.store_host, seat.store_port, timeout_s=join_s)
        backend = "nccl" if seat.device == "cuda" else "gloo"
        group = init_process_group(
            store,
            seat.rank,
            seat.world_size,
            backend=backend,
            timeout_s=seat.timeout_s,
            join_s=join_s,
            generation=seat.generation,
        )
        try:
            yield group
        except BaseException as error:
            shutdown_sockets()
            # the frames of the error hold the model, whose process groups are about to end
            for link in causes(error):
                traceback.clear_frames(link.__traceback__)
            raise
        finally:
            del group
            destroy_process_group()
