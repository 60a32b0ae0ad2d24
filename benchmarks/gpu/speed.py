"""Parts that measure: a step's cost to the host, its time against its bytes, rows of a DLRM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks import Notes, Settings
from benchmarks.gpu.clicks import batches_of, dlrm, tables_of, whole_tables, workload
from benchmarks.gpu.timing import Step, copy_bandwidth, count_syncs, host_us, step_ms
from benchmarks.workload import Workload, bytes_floor
from rayrec.data import Batch
from rayrec.distributed import DistributedModelParallel
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SPARSE_OPTIMIZERS, RowWiseAdagrad, SparseOptimizer
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import PipelineOptions, TrainPipelineSparseDist, train_step


def embedding_step(
    work: Workload, settings: Settings, optimizer: SparseOptimizer | None = None
) -> Step:
    """Forward of all tables and backward with the update, of batches that lie on the device."""
    tables = tables_of(work)
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables, device="meta"),
        plan=whole_tables(tables),
        sparse_optimizer=optimizer or RowWiseAdagrad(lr=0.02),
        device=settings.device,
        seed=settings.seed,
    )
    batches = [batch.sparse_features.to(settings.device) for batch in batches_of(work, 4)]

    def step(i: int) -> None:
        kjt = batches[i % len(batches)]
        fresh = KeyedJaggedTensor(  # a batch that no step has seen
            work.keys, kjt.values(), lengths=kjt.lengths(), length_per_key=kjt.length_per_key()
        )
        model(fresh).values().sum().backward()

    return step


def host(settings: Settings, notes: Notes) -> None:
    """What a step costs the host, with so few rows that the GPU is never behind."""
    tiny = workload(settings)
    tiny = Workload(batch=8, dim=tiny.dim, cap=1000, tables=tiny.tables)
    steps = settings.choose(200, 50, 5)
    with notes.check("embedding step") as found:
        step = embedding_step(tiny, settings)
        found["us"] = host_us(step, settings, steps)
        if settings.on_gpu:
            found["host syncs"] = count_syncs(step)
            found["kernels"] = _kernels(step)
    for name, optimizer in SPARSE_OPTIMIZERS.items():
        with notes.check(f"embedding step, {name}") as found:
            step = embedding_step(tiny, settings, optimizer(lr=0.02))
            found["us"] = host_us(step, settings, steps)
    with notes.check("DLRM step") as found:
        model, dense = dlrm(tiny, settings)
        batch = batches_of(tiny, 1)[0].to(settings.device)
        found["us"] = host_us(lambda i: train_step(model, dense, batch, 1), settings, steps)


def _kernels(step: Step) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step(0)
        torch.cuda.synchronize()
    return sum(event.count for event in trace.key_averages() if event.self_device_time_total)


def bandwidth(settings: Settings, notes: Notes) -> None:
    """A step's time against that of the bytes it must move, at the speed of a copy."""
    speed = copy_bandwidth(settings)
    notes.figure("copy GB/s", round(speed / 1e9, 1))
    rounds, steps = settings.choose(9, 3, 2), settings.choose(20, 4, 2)
    for pooling in (1, 10):
        work = workload(settings, pooling)
        with notes.check(f"embedding step, {pooling} ids a bag") as found:
            found["ms"] = step_ms(embedding_step(work, settings), settings, rounds, steps)
            floor_ms = 1e3 * bytes_floor(work) / speed
            found["floor ms"] = round(floor_ms, 4)
            found["share of bandwidth"] = round(floor_ms / found["ms"]["median"], 4)


def rows_per_second(settings: Settings, notes: Notes) -> None:
    """A whole DLRM, from batches in the host's memory to updated weights."""
    work = workload(settings)
    batches = batches_of(work, 4)
    rounds, steps = settings.choose(7, 3, 2), settings.choose(20, 4, 2)
    with notes.check("plain loop") as found:
        model, dense = dlrm(work, settings)

        def plain(i: int) -> object:
            return train_step(model, dense, batches[i % 4].to(settings.device), 1)

        _note_rows(found, plain, work, settings, rounds, steps)
    for name, options in (
        ("pipeline", PipelineOptions()),
        ("pipeline, bfloat16", PipelineOptions(autocast=torch.bfloat16)),
    ):
        with notes.check(name) as found:
            model, dense = dlrm(work, settings, prefetch=True)
            pipeline = TrainPipelineSparseDist(model, dense, settings.device, options)
            stream: Iterator[Batch] = (batches[i % 4] for i in count())
            step = _advance(pipeline, stream)
            _note_rows(found, step, work, settings, rounds, steps)
            found["peak memory GB"] = _peak_memory(settings)
            pipeline.close()
            model.close()


def _advance(pipeline: TrainPipelineSparseDist, stream: Iterator[Batch]) -> Step:
    return lambda i: pipeline.advance(stream)


def _note_rows(
    found: dict[str, object],
    step: Step,
    work: Workload,
    settings: Settings,
    rounds: int,
    steps: int,
) -> None:
    times = step_ms(step, settings, rounds, steps)
    found["ms"] = times
    found["rows/s"] = round(work.batch / times["median"] * 1e3)


def _peak_memory(settings: Settings) -> float | None:
    return round(torch.cuda.max_memory_allocated() / 1e9, 3) if settings.on_gpu else None
