"""Lookup and update on several threads equal those on one bit for bit, and dense layers keep all
threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rayrec.distributed.kernels import parts
from rayrec.distributed.kernels.group_lookup import GroupLookup
from rayrec.distributed.kernels.ids import GroupIds
from rayrec.distributed.kernels.lookup import FusedLookup, make_lookup
from rayrec.distributed.kernels.parts import cut_bags, cut_rows
from rayrec.distributed.kernels.workers import Workers
from rayrec.distributed.program.groups import LookupGroup
from rayrec.layout import DataType
from rayrec.optim import SPARSE_OPTIMIZERS, RowWiseAdagrad
from tests.optim_reference import Work, random_optimizer, random_work

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Torch's threads as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.seeds(range(60))
def test_parts_cover_everything_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(parts, "LEAST_VALUES", 0)
    monkeypatch.setattr(parts, "_CACHED_VALUES", rng.choice([64, 1 << 17]))
    slots, bags, threads = rng.randint(1, 9), rng.randint(1, 20), rng.randint(2, 5)
    ids = [rng.choice([0, 1, 50, 900]) for _ in range(slots)]
    widths = [4 * rng.randint(1, 5) for _ in range(slots)]
    shards = sorted(rng.randint(0, slots) for _ in range(slots))
    blocks = cut_bags(ids, widths, bags, threads)
    covered = sorted((s, b) for block in blocks for s in block.slots for b in block.bags)
    assert covered == [(s, b) for s in range(slots) for b in range(bags)]
    assert all(len(block.slots) == 1 or block.bags == range(bags) for block in blocks)
    shares = cut_rows(ids, widths, shards, threads)
    whole = [s for share in shares if share.parts == 1 for s in share.slots]
    split = {
        share.slots: [other.part for other in shares if other.slots == share.slots]
        for share in shares
        if share.parts > 1
    }
    assert sorted([*whole, *(s for span in split for s in span)]) == list(range(slots))
    assert all(
        threads <= len(found) < 2 * threads and sorted(found) == list(range(len(found)))
        for found in split.values()
    )
    for share in shares:  # no shard is in two shares, but for the rows that they divide
        inside = {shards[s] for s in share.slots}
        assert not inside & {shards[s] for s in range(slots) if s not in share.slots}
    work = [sum(ids[s] * widths[s] for s in share.slots) / share.parts for share in shares]
    assert max(work) <= sum(work) / threads + 1e-6, "one thread must not hold all others up"
    assert work == sorted(work, reverse=True)


def sequence_of(work: Work) -> Work:
    """Its shards, made as wide as the first, as a sequence group."""
    width = work.group.shards[0].cols
    shards = {shard: replace(shard, cols=width) for shard in work.group.shards}
    slots = tuple(replace(slot, shard=shards[slot.shard]) for slot in work.group.slots)
    key = replace(work.group.key, sequence=True, width=len(width), weighted=False)
    return replace(work, group=LookupGroup(key, tuple(shards.values()), slots))


def sequence_batch(work: Work, count: int) -> GroupIds:
    """`count` rows of all shards."""
    rows = sum(len(shard.rows) for shard in work.group.shards)
    ids = torch.tensor([work.rng.randrange(rows) for _ in range(count)], dtype=torch.int64)
    return GroupIds(ids, torch.arange(count + 1), None)


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@pytest.mark.seeds(range(6))
@pytest.mark.parametrize("name", ["plain rowwise_adagrad", *sorted(SPARSE_OPTIMIZERS)])
def test_lookup_and_update_are_equal_bit_for_bit(
    name: str, seed: int, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LEAST_VALUES", 0)
    optimizer = (
        RowWiseAdagrad(0.1)
        if name.startswith("plain")
        else random_optimizer(name, random.Random(f"{name}{seed}"))
    )
    work = random_work(seed, optimizer, list(DataType)[seed % 3], rows=200)
    work = sequence_of(work) if sequence else work
    lookups = [GroupLookup(work.group, CPU, Workers(threads)) for threads in (1, 2, 3)]
    work.fill(*lookups)
    for count in (40, 0, 300, 7):
        routed = sequence_batch(work, count) if sequence else work.batch(count)
        grad = (
            torch.randn(count, work.group.key.width, generator=work.generator)
            if sequence
            else work.grad(count)
        )
        found = []
        for lookup in lookups:
            weights = None if routed.weights is None else routed.weights.clone().requires_grad_()
            out = lookup(replace(routed, weights=weights))
            out.backward(grad.clone())
            found.append((out.detach(), torch.zeros(0) if weights is None else weights.grad))
        for out, weight_grad in found[1:]:
            assert torch.equal(out, found[0][0]) and torch.equal(weight_grad, found[0][1])
    for one, *others in zip(*(lookup.shard_states() for lookup in lookups), strict=True):
        for other in others:
            assert all(
                torch.equal(tensor, other.tensors()[state])
                for state, tensor in one.tensors().items()
            )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_on_threads(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_VALUES", 0)
    work = random_work(4, RowWiseAdagrad(), rows=200)
    one, two = GroupLookup(work.group, CPU), GroupLookup(work.group, CPU, Workers(2))
    work.fill(one, two)
    routed = work.batch(50)
    with mode():
        assert torch.equal(one(routed), two(routed))


def test_clipped_row_wise_adagrad_is_fbgemms() -> None:
    optimizer = RowWiseAdagrad(0.1, max_gradient=0.3)
    work = random_work(3, optimizer, odd=False)
    ours, fused = make_lookup(work.group, CPU), FusedLookup(work.group, CPU)
    work.fill(ours, fused)
    for _ in range(4):
        routed, grad = work.batch(6), work.grad(6)
        ours(routed).backward(grad)
        fused(routed).backward(grad.clone())
    for mine, theirs in zip(ours.shard_states(), fused.shard_states(), strict=True):
        assert torch.equal(mine.weight, theirs.weight)


def test_tasks_run_on_all_threads_with_one_torch_thread_each() -> None:
    torch.set_num_threads(3)
    workers = Workers(torch.get_num_threads())
    together = threading.Barrier(3, timeout=60)  # passes when three threads are in a task at once
    seen = []

    def task() -> None:
        together.wait()
        seen.append((threading.get_ident(), torch.get_num_threads()))

    workers.run([task, task, task])
    assert len({thread for thread, _ in seen}) == 3 and {count for _, count in seen} == {1}
    assert torch.get_num_threads() == 3, "dense layers keep the rank's threads"
    born = []
    later = threading.Thread(target=lambda: born.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert born == [3]


def test_an_error_of_a_task_is_raised_after_all_threads_stopped() -> None:
    workers, done = Workers(2), []

    def fail() -> None:
        raise ValueError("row 7 is gone")

    with pytest.raises(ValueError, match="row 7"):
        workers.run([fail, *(lambda i=i: done.append(i) for i in range(5))])
    workers.run([lambda: done.append(9)] * 3)
    assert done.count(9) == 3
