"""A pipeline on one rank: errors and ends of the data, what is refused, and streams of a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.optim import sparse_optimizer
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.pipeline import PipelineOptions, TrainPipelineBase, TrainPipelineSparseDist
from rayrec.train.step import train_step
from tests.gloo.piped import PIPELINES
from tests.gloo.small_dlrm import STEPS, build, dmp, make_plan, parts


def alone(kind: str = "base", prefetch: bool = True, **options: Any) -> Any:
    model, dense = dmp(1, prefetch=prefetch)
    return PIPELINES[kind](model, dense, "cpu", PipelineOptions(**options))


@pytest.mark.parametrize("kind", PIPELINES)
def test_an_error_of_the_iterator_comes_after_the_batches_before_it(kind: str) -> None:
    def broken() -> Iterator[Any]:
        yield from (parts(i, 0, 1) for i in range(3))
        raise OSError("the disk is gone")

    pipeline, source = alone(kind), broken()
    assert all(len(pipeline.progress(source)) == 3 for _ in range(3))
    with pytest.raises(OSError, match="the disk is gone"):
        pipeline.progress(source)
    assert len(pipeline.progress(iter([parts(0, 0, 1)]))) == 3  # it goes on with another iterator


@pytest.mark.parametrize("read_ahead", [1, 3])
@pytest.mark.parametrize("kind", PIPELINES)
def test_few_batches_are_read_ahead_and_a_break_ends_the_thread(kind: str, read_ahead: int) -> None:
    read = []

    def counted() -> Iterator[Any]:
        for i in range(STEPS):
            read.append(i)
            yield parts(i, 0, 1)

    pipeline, source = alone(kind, read_ahead=read_ahead), counted()
    steps = pipeline.iterate(source)
    for done in range(1, 4):
        next(steps)
        time.sleep(0.05)
        # one waits on the device
        assert len(read) <= min(done + 1 + read_ahead, STEPS)
    steps.close()
    source.close()  # would raise while another thread runs it
    assert not any(t.name.startswith("rayrec-reader") for t in threading.enumerate())


def test_what_a_pipeline_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 0; use TrainPipelineBase"):
        TrainPipelineSparseDist(nn.Linear(1, 1), None, "cpu")
    with pytest.raises(ConfigError, match="prefetch=True"):
        list(alone("sparse", prefetch=False).iterate(parts(i, 0, 1) for i in range(3)))
    with pytest.raises(ConfigError, match=r"needs \(loss, output\)"):
        TrainPipelineBase(nn.Identity(), None, "cpu").progress(iter([1]))
    with pytest.raises(ConfigError, match="accumulate=0; it must be at least 1"):
        PipelineOptions(accumulate=0)
    with pytest.raises(ConfigError, match="read_ahead=0; it must be at least 1"):
        PipelineOptions(read_ahead=0)
    with pytest.raises(ConfigError, match="loss scaling"):
        PipelineOptions(autocast=torch.float16)


@dataclass
class OnDevice:
    """A batch that can be moved, as `rayrec.data.Batch`."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    rows: int
    global_rows: int

    @staticmethod
    def of(part: Any) -> OnDevice:
        return OnDevice(
            part.dense_features, part.sparse_features, part.labels, part.rows, part.global_rows
        )

    def _map(self, move: Any) -> OnDevice:
        return OnDevice(
            move(self.dense_features),
            move(self.sparse_features),
            move(self.labels),
            self.rows,
            self.global_rows,
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> OnDevice:
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> OnDevice:
        return self._map(lambda x: x.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        self._map(lambda x: x.record_stream(stream))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PIPELINES)
def test_on_a_gpu_batches_copied_on_a_stream_train_as_the_plain_loop(kind: str) -> None:
    def fresh() -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
        optimizer = sparse_optimizer("rowwise_adagrad", 0.05)
        module = build(dense_device="cuda")
        model = DistributedModelParallel(
            module,
            plan=make_plan("mixed", 1),
            sparse_optimizer=optimizer,
            device="cuda",
            seed=1,
            prefetch=True,
        )
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    batches = [OnDevice.of(parts(i, 0, 1)) for i in range(STEPS)]
    model, dense = fresh()
    wanted = [
        float(train_step(model, dense, b.to(torch.device("cuda")), 1).loss_sum) / b.rows
        for b in batches
    ]
    model, dense = fresh()
    got = [float(step.loss) for step in PIPELINES[kind](model, dense, "cuda").iterate(batches)]
    assert got == pytest.approx(wanted, rel=1e-4)  # atomic sums of the kernels come in any order


@pytest.mark.gpu
def test_on_a_gpu_ids_are_routed_on_a_stream_of_their_own_and_wait_for_their_copy() -> None:
    optimizer = sparse_optimizer("rowwise_adagrad", 0.05)
    model = DistributedModelParallel(
        build(dense_device="cuda"),
        plan=make_plan("mixed", 1),
        sparse_optimizer=optimizer,
        device="cuda",
        seed=1,
    )
    ahead = DistributedModelParallel(
        build(dense_device="cuda"),
        plan=make_plan("mixed", 1),
        sparse_optimizer=optimizer,
        device="cuda",
        seed=1,
        prefetch=True,
    )
    device = torch.device("cuda")
    model(OnDevice.of(parts(0, 0, 1)).to(device))
    ahead(OnDevice.of(parts(0, 0, 1)).to(device))
    caller = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(caller):  # neither the default stream nor the thread's
        torch.cuda._sleep(100_000_000)  # the copy below comes late
        batch = OnDevice.of(parts(1, 0, 1)).to(device, non_blocking=True)
        assert ahead.prefetch(batch.sparse_features)
        assert torch.equal(ahead(batch)[1][1], model(batch)[1][1])
        assert not ahead._engine._ahead
