"""Dense gradients are averaged through shared memory, by a communication hook of DDP.

gloo's all_reduce moves about 1 GB/s between ranks of one host; here a bucket is published once when
it is ready, and summed at the end of the backward pass, so that ranks do not wait for each other in
the middle of it. Two ranks read each other's buckets; more first sum a part each and then read the
sums. Sums are taken in rank order, so that all ranks hold the same bits.
"""

# no postponed annotations: DistributedDataParallel looks at those of the hook
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from rayrec.comm.exchange import Exchange, Pending


def average_gradients(find_exchange: Callable[[], Exchange], bucket: GradBucket) -> Future[Tensor]:
    """Return a future of the bucket's buffer, averaged over ranks; this is the hook.

    Args:
        find_exchange: gives the exchange over shared memory, which nobody else uses, as it or with
            its waits counted.
    Raises:
        CommError: a peer is gone.
    """
    exchange, buffer = find_exchange(), bucket.buffer()
    finish = start_sum(exchange, buffer)
    future: Future[Tensor] = Future()

    def end_of_backward() -> None:
        finish()
        buffer.mul_(1.0 / exchange.world_size)
        future.set_result(buffer)

    # runs before DDP's own, which is queued later
    torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)
    return future


def average_at_once(find_exchange: Callable[[], Exchange], bucket: GradBucket) -> Future[Tensor]:
    """Do as `average_gradients`, but wait inside.

    Under static_graph DDP calls the hooks of the first backward pass when its own callback has
    begun already: one that is queued then comes too late.
    """
    exchange, buffer = find_exchange(), bucket.buffer()
    start_sum(exchange, buffer)()
    future: Future[Tensor] = Future()
    future.set_result(buffer.mul_(1.0 / exchange.world_size))
    return future


def start_sum(exchange: Exchange, buffer: Tensor) -> Callable[[], None]:
    """Publish `buffer`; the returned call puts the sum over ranks in its place.

    The buffer is (N,), with the same N on all ranks.
    """
    # two ranks read each other's whole buffer; more would read it world_size times
    start = _start_whole if exchange.world_size == 2 else _start_parts
    return start(exchange, buffer)


def _start_whole(exchange: Exchange, buffer: Tensor) -> Callable[[], None]:
    pending = exchange.all_gather(buffer, [buffer.numel()] * 2)

    def finish() -> None:
        first, second = pending.wait()
        torch.add(first, second, out=buffer)

    return finish


def _start_parts(exchange: Exchange, buffer: Tensor) -> Callable[[], None]:
    # Each rank sums one part of the buffer, and then all gather the parts.
    world, rank = exchange.world_size, exchange.rank
    bounds = [buffer.numel() * r // world for r in range(world + 1)]
    sizes = [b - a for a, b in pairwise(bounds)]
    pending: Pending[list[Tensor]] = exchange.views(buffer, sizes, [sizes[rank]] * world)

    def finish() -> None:
        # this rank's part, (sizes[rank],), from every rank; summed in rank order for equal bits
        first, *others = pending.wait()
        total = first.clone()
        for other in others:
            total += other
        torch.cat(exchange.all_gather(total, sizes).wait(), out=buffer)

    return finish
