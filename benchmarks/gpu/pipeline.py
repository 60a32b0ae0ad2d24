"""The part of the pipelines: the same bits with and without work ahead, and what overlaps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks import Differs, Notes, Settings, assert_close, assert_equal
from benchmarks.gpu.clicks import batches_of, dlrm, workload
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.trace import Overlap, overlaps
from rayrec.data import Batch
from rayrec.distributed import DistributedModelParallel
from rayrec.train import TrainPipelineBase, TrainPipelineSparseDist, train_step

PIPELINES = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}
Numbers = dict[str, Tensor]
BUSY_CYCLES = 20_000_000  # of the GPU's clock: 10 ms at 2 GHz


def run(settings: Settings, notes: Notes) -> None:
    """See the module."""
    steps = settings.choose(12, 8, 5)
    batches = batches_of(workload(settings), steps)
    with repeatable():
        plain, exact = _plain(settings, batches), True
        with notes.check("the plain loop twice") as found:
            exact = _repeats(plain, _plain(settings, batches))
            found["bit for bit"] = exact
        for name in PIPELINES:
            with notes.check(f"{name} pipeline against the plain loop") as found:
                found["bit for bit"] = exact
                _compare(_piped(settings, batches, name), plain, exact)
    with notes.check("batches are pinned and copied without a wait"):
        settings.need_gpu("page-locked memory")
        _assert_pinned(batches[0])
    with notes.check("copies and exchanges overlap the step") as found:
        settings.need_gpu("streams")
        overlap = _profiled(settings, batches)
        found |= overlap._asdict()
        for what, ms, beside_ms in (
            ("the copies of batches", overlap.copies_ms, overlap.copies_beside_ms),
            ("the kernels of the exchange ahead", overlap.ahead_ms, overlap.ahead_beside_ms),
        ):
            if beside_ms < 0.5 * ms:
                raise Differs(f"{beside_ms} of {ms} ms of {what} ran beside kernels of the steps")
        if overlap.other_streams < 2:
            raise Differs(f"{overlap.other_streams} streams beside the step's, of two")


@contextmanager
def repeatable() -> Iterator[None]:
    """torch's kernels are those that repeat bit for bit, as far as it has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _numbers(model: DistributedModelParallel, losses: list[Tensor]) -> Numbers:
    found = {f"loss of step {i}": loss.cpu().view(1) for i, loss in enumerate(losses)}
    for state in model.shard_states():
        for key, tensor in state.tensors().items():
            found[f"{key} of {state.shard.table}"] = tensor.detach().cpu()
    return found | {name: p.detach().cpu() for name, p in model.dense_parameters()}


def _plain(settings: Settings, batches: list[Batch]) -> Numbers:
    model, dense = dlrm(workload(settings), settings)
    losses = []
    for batch in batches:
        done = train_step(model, dense, batch.to(settings.device), 1)
        losses.append(done.loss_sum / done.rows)
    return _numbers(model, losses)


def _piped(settings: Settings, batches: list[Batch], kind: str) -> Numbers:
    model, dense = dlrm(workload(settings), settings, prefetch=kind == "sparse")
    pipeline = PIPELINES[kind](model, dense, settings.device)
    losses = [step.loss.double() for step in pipeline.iterate(batches)]
    found = _numbers(model, losses)
    pipeline.close()
    model.close()
    return found


def _repeats(first: Numbers, second: Numbers) -> bool:
    """Whether two runs are the same bit for bit; they must be close in any case."""
    _compare(second, first, exact=False)
    return all(torch.equal(second[name], value) for name, value in first.items())


def _compare(got: Numbers, wanted: Numbers, exact: bool) -> None:
    """Where the plain loop repeats itself bit for bit, a pipeline must as well; else losses do."""
    for name, value in wanted.items():
        if exact:
            assert_equal(name, got[name], value)
        elif name.startswith("loss"):
            assert_close(name, got[name], value, 1e-3, 1e-4)


def _assert_pinned(batch: Batch) -> None:
    pinned = batch.pin_memory()
    kjt = pinned.sparse_features
    for tensor in (pinned.labels, pinned.dense_features, kjt.values(), kjt.lengths()):
        assert tensor.is_pinned()
    moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert_equal("ids after the copy", moved.sparse_features.values().cpu(), kjt.values())


def _profiled(settings: Settings, batches: list[Batch]) -> Overlap:
    """Some steps of the sparse pipeline under the profiler.

    Before each the GPU is kept busy for some milliseconds, so that the host is ahead of it, as with
    a larger model: what then waits for the steps before runs alone.
    """
    model, dense = dlrm(workload(settings), settings, prefetch=True)
    pipeline = TrainPipelineSparseDist(model, dense, settings.device)
    stream: Iterator[Batch] = (batches[i % len(batches)] for i in count())
    for _ in range(5):
        pipeline.advance(stream)
    synchronize(settings)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            torch.cuda._sleep(BUSY_CYCLES)
            pipeline.advance(stream)
        synchronize(settings)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        found = overlaps(path)
    pipeline.close()
    model.close()
    return found
