"""Ranks that share memory: killed at random moments, and run for long."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch

from rayrec.comm.process_group import connect_store, create_store, init_process_group
from rayrec.distributed import DistributedModelParallel
from rayrec.errors import CommError
from rayrec.layout import EmbeddingBagConfig, row_wise, table_wise
from rayrec.models import DLRM, DLRMTrain
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor
from tests.leftovers import shared_memory, unheld
from tests.ranks import RankPool
from tests.worlds import plan_for

ROUNDS, WORLD = 100, 3
SOAK_STEPS = 20_000


class _Batch:
    def __init__(self, rank: int, step: int) -> None:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        lengths = torch.randint(0, 4, (2 * 16,), generator=generator)
        ids = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
        self.sparse_features = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths.int())
        self.dense_features = torch.randn(16, 3, generator=generator)
        self.labels = torch.randint(0, 2, (16,), generator=generator).float()


def build(world: int) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """A small DLRM with a row-wise and a table-wise table, and its dense optimizer."""
    tables = [EmbeddingBagConfig(50, 8, name=n, feature_names=[n]) for n in "ab"]
    layouts = {"a": row_wise(tables[0], range(world)), "b": table_wise(tables[1], world - 1)}
    plan = plan_for(world, layouts)
    dlrm = DLRM(EmbeddingBagCollection(tables, device="meta"), 3, [8, 8], [8, 1])
    model = DistributedModelParallel(
        DLRMTrain(dlrm), plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.01), seed=1
    )
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def train_step(
    model: DistributedModelParallel, dense: torch.optim.Optimizer, batch: _Batch
) -> float:
    """One step; its loss."""
    dense.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    dense.step()
    return float(loss.detach())


def live(rank: int, pipe: Connection) -> None:
    """A rank that trains until a peer is gone, and then tells when it knew."""
    torch.set_num_threads(1)
    # it lives for a second, or hangs, and then its stack says where
    faulthandler.dump_traceback_later(15)
    store = create_store("127.0.0.1") if rank == 0 else None
    if store is not None:
        pipe.send(store.port)
    else:
        store = connect_store("127.0.0.1", pipe.recv())
    init_process_group(store, rank, WORLD, timeout_s=30)
    model, dense = build(WORLD)
    pipe.send("ready")
    step = 0
    try:
        while True:
            train_step(model, dense, _Batch(rank, step % 8))
            step += 1
    except (
        CommError,
        RuntimeError,
    ):  # RuntimeError: DDP agrees on its buckets over gloo, in the second step
        pipe.send((time.monotonic(), step))
    os._exit(0)


def nursery() -> None:
    """Fork ranks round by round, which is quicker than starting Python for each; prints the slowest
    survivor's seconds per round.
    """
    # DDP imports it when it is made, which took each of 300 ranks longer than all else
    importlib.import_module("torch._dynamo")
    context = mp.get_context("fork")
    rng = random.Random(0)
    for _ in range(ROUNDS):
        pipes, processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=live, args=(rank, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        port = pipes[0].recv()
        for pipe in pipes[1:]:
            pipe.send(port)
        for pipe in pipes:
            assert pipe.recv() == "ready"
        victim = rng.randrange(WORLD)
        time.sleep(rng.random() * 0.05)
        killed = time.monotonic()
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        told = []
        for rank, pipe in enumerate(pipes):
            if rank != victim:
                assert wait([pipe], 20), f"rank {rank} hangs after rank {victim} was killed"
                told.append(pipe.recv()[0] - killed)
        for process in processes:
            process.join(20)
            assert process.exitcode is not None
        print(f"{max(told):.4f}", flush=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory between ranks needs Linux")
@pytest.mark.timeout(900)
def test_survivors_of_a_killed_rank_raise_soon_and_leave_nothing() -> None:
    before = shared_memory()
    code = "from tests.gloo.test_endurance import nursery; nursery()"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    pipe = subprocess.PIPE
    family = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=pipe,
        stderr=pipe,
        text=True,
        cwd=root,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = family.communicate(timeout=500)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(family.pid, signal.SIGKILL)  # the ranks, too, whatever happened
    assert family.returncode == 0, err[-2000:]
    seconds = [float(line) for line in out.split()]
    # milliseconds with a core to spare; without one the survivors wait for their turn
    assert len(seconds) == ROUNDS and max(seconds) < 10, seconds
    assert not unheld(shared_memory() - before)


def soak(rank: int, world: int, steps: int) -> tuple[list[float], list[float]]:
    model, dense = build(world)
    batches = [_Batch(rank, i) for i in range(50)]
    resident, seconds = [], []
    page = os.sysconf("SC_PAGE_SIZE")
    for _ in range(10):
        start = time.process_time()
        for i in range(steps // 10):
            train_step(model, dense, batches[i % len(batches)])
        seconds.append(time.process_time() - start)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * page)
    return resident, seconds


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_long_run_keeps_its_memory_and_its_pace(ranks: RankPool) -> None:
    for resident, seconds in ranks.run(2, soak, SOAK_STEPS, timeout_s=500):
        assert max(resident[1:]) <= resident[1] * 1.02, resident
        # a leak of work grows without end; a busy machine does not
        assert min(seconds[-3:]) <= 1.5 * min(seconds[1:4]), seconds
