"""Pipelines equal the plain loop bit for bit on 1, 2 and 4 ranks, drain, pass errors on in order,
and fall back with one warning.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.errors import ConfigError
from rayrec.layout import Topology
from rayrec.models import DeepFMTrain, SimpleDeepFMNN, TwoTower, TwoTowerTrain
from rayrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from rayrec.optim import sparse_optimizer
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.ahead import find_kjts
from rayrec.train.pipeline import (
    EvalPipeline,
    EvalPipelineSparseDist,
    PipelineOptions,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from rayrec.train.step import train_step
from tests.gloo.small_dlrm import STEPS, build, dmp, make_plan, parts
from tests.ranks import RankPool

PIPELINES = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}
EVAL = {"base": EvalPipeline, "sparse": EvalPipelineSparseDist}


class Outcome(NamedTuple):
    losses: list[float]
    outputs: list[torch.Tensor]
    dense: dict[str, torch.Tensor]
    tables: list[torch.Tensor]


def outcome(
    model: DistributedModelParallel, losses: list[Any], outputs: list[torch.Tensor]
) -> Outcome:
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    return Outcome(
        [float(x) for x in losses],
        outputs,
        dense,
        [s.weight.detach().clone() for s in model.shard_states()],
    )


def plain(rank: int, world_size: int) -> Outcome:
    model, dense = dmp(world_size)
    steps = [train_step(model, dense, parts(i, rank, world_size), world_size) for i in range(STEPS)]
    return outcome(model, [s.loss_sum / max(1, s.rows) for s in steps], [s.logits for s in steps])


def count_prefetches(model: DistributedModelParallel) -> list[bool]:
    started: list[bool] = []
    prefetch = model.prefetch
    model.prefetch = lambda kjt: started.append(prefetch(kjt)) or started[-1]  # type: ignore[method-assign, func-returns-value]
    return started


def piped(rank: int, world_size: int, kind: str) -> Outcome:
    model, dense = dmp(world_size, prefetch=kind == "sparse")
    started = count_prefetches(model)
    pipeline = PIPELINES[kind](model, dense, "cpu")
    batches = (parts(i, rank, world_size) for i in range(STEPS))
    losses, outputs = [], []
    while True:
        try:
            loss, logits, _ = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(loss)
        outputs.append(logits)
    # all but the first batch travelled ahead
    assert started == ([True] * (STEPS - 1) if kind == "sparse" else []), started
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    assert not model._engine._ahead  # nothing is left under way
    pipeline.close()
    return outcome(model, losses, outputs)


def assert_equal(got: Outcome, wanted: Outcome) -> None:
    assert got.losses == wanted.losses
    for name in ("outputs", "tables"):
        for a, b in zip(getattr(got, name), getattr(wanted, name), strict=True):
            assert torch.equal(a, b), name
    assert got.dense.keys() == wanted.dense.keys() and all(
        torch.equal(v, wanted.dense[n]) for n, v in got.dense.items()
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_step_equals_the_plain_loop_bit_for_bit(ranks: RankPool, world_size: int) -> None:
    wanted = ranks.run(world_size, plain)
    for kind in PIPELINES:
        for got, want in zip(ranks.run(world_size, piped, kind), wanted, strict=True):
            assert len(got.losses) == STEPS
            assert_equal(got, want)


def evaluated(rank: int, world_size: int, kind: str) -> bool:
    model, _ = dmp(world_size, prefetch=True)
    model.eval()
    before = outcome(model, [], [])
    with torch.no_grad():
        wanted = [model(parts(i, rank, world_size))[1][1] for i in range(STEPS)]
    pipeline = EVAL[kind](model, "cpu")
    got = [
        step.output[1]
        for step in pipeline.iterate(parts(i, rank, world_size) for i in range(STEPS))
    ]
    again = [
        step.output[1]
        for step in pipeline.iterate(parts(i, rank, world_size) for i in range(STEPS))
    ]
    assert_equal(outcome(model, [], []), before)
    assert not any(x.requires_grad for x in got)
    return (
        all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(got, wanted, again, strict=True)
        )
        and len(got) == STEPS
    )


@pytest.mark.parametrize("kind", EVAL)
def test_evaluation_equals_the_plain_loop_and_changes_nothing(ranks: RankPool, kind: str) -> None:
    assert ranks.run(2, evaluated, kind) == [True, True]


def accumulated(rank: int, world_size: int, accumulate: int, by_hand: bool) -> Outcome:
    """Micro-batches by hand: every gradient exchanged, divided by their number, one dense update
    per group.
    """
    model, dense = dmp(world_size, prefetch=True)
    source = [parts(i, rank, world_size) for i in range(STEPS)]
    if not by_hand:
        pipeline = TrainPipelineSparseDist(
            model, dense, "cpu", PipelineOptions(accumulate=accumulate)
        )
        steps = list(pipeline.iterate(source))
        return outcome(model, [s.loss for s in steps], [s.output[1] for s in steps])
    losses, logits = [], []
    for i, batch in enumerate(source):
        if i % accumulate == 0:
            dense.zero_grad()
        loss, (_, out, _) = model(batch)
        (loss * (batch.rows * world_size / batch.global_rows) / accumulate).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(source):
            dense.step()
        losses.append(loss)
        logits.append(out)
    return outcome(model, losses, logits)


@pytest.mark.parametrize("accumulate", [3, 2 * STEPS])
def test_accumulation_equals_dense_updates_of_summed_gradients(
    ranks: RankPool, accumulate: int
) -> None:
    # gradients are summed before or after they are averaged over ranks
    close = {"rtol": 1e-4, "atol": 1e-5}
    for got, want in zip(
        ranks.run(2, accumulated, accumulate, False),
        ranks.run(2, accumulated, accumulate, True),
        strict=True,
    ):
        torch.testing.assert_close(got.losses, want.losses, **close)
        torch.testing.assert_close(got.tables, want.tables, **close)
        torch.testing.assert_close(got.dense, want.dense, **close)


def in_bfloat16(rank: int, world_size: int) -> list[Outcome]:
    found = []
    for dtype in (None, torch.bfloat16):
        tables = build().model.sparse_arch.embedding_bag_collection
        module = DeepFMTrain(SimpleDeepFMNN(5, tables, hidden_layer_size=16, deep_fm_dimension=8))
        model = DistributedModelParallel(module, plan=make_plan("mixed", world_size), prefetch=True)
        dense = torch.optim.Adam(model.parameters(), lr=1e-2)
        pipeline = TrainPipelineSparseDist(model, dense, "cpu", PipelineOptions(autocast=dtype))
        steps = list(pipeline.iterate(parts(i, rank, world_size) for i in range(STEPS)))
        found.append(outcome(model, [s.loss for s in steps], [s.output[1].float() for s in steps]))
    return found


def test_bfloat16_dense_layers_train_nearly_as_float32_does(ranks: RankPool) -> None:
    for exact, rough in ranks.run(2, in_bfloat16):
        # bfloat16 has 8 bits: losses of about 0.7 are off by some 0.003, and differ at all or
        # nothing was cast
        assert exact.losses != rough.losses and exact.losses == pytest.approx(
            rough.losses, abs=0.02
        )
        assert all(p.dtype == torch.float32 for p in [*rough.dense.values(), *rough.tables])


class OwnIds(nn.Module):
    """Half of its ids come with the batch, half it weighs itself."""

    def __init__(self) -> None:
        super().__init__()
        table = lambda name: [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])]  # noqa: E731
        self.plain = EmbeddingBagCollection(table("a"), device="meta")
        weighted = EmbeddingBagCollection(table("b"), is_weighted=True, device="meta")
        self.learned = FeatureProcessedEmbeddingBagCollection(
            weighted, PositionWeightedModuleCollection({"b": 3})
        )

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.plain(batch.ids).values().sum(1) + self.learned(batch.others).values().sum(1)
        loss = (out - batch.wanted).square().mean()
        return loss, out.detach()


def ids_of(step: int, rank: int, rows: int = 6, shared: bool = True) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = KeyedJaggedTensor(
        ["a", "b"],
        torch.randint(0, 20, (2 * rows * 3,), generator=generator),
        lengths=torch.full((2 * rows,), 3),
    )
    ids, others = (ids, ids) if shared else ids.split([1, 1])
    return SimpleNamespace(ids=ids, others=others, wanted=torch.rand(rows, generator=generator))


def own_ids(
    rank: int, world_size: int, kind: str, shared: bool
) -> tuple[list[float], list[str], int]:
    torch.manual_seed(0)
    module = OwnIds()
    plan = manual_plan(
        table_configs(module), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(module, plan=plan, prefetch=True)
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    started = count_prefetches(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = list(
            PIPELINES[kind](model, dense, "cpu").iterate(
                ids_of(i, rank, shared=shared) for i in range(5)
            )
        )
    assert not model._engine._ahead  # nothing is left under way
    return (
        [float(s.loss) for s in steps],
        [str(w.message) for w in caught if w.category is RuntimeWarning],
        sum(started),
    )


@pytest.mark.parametrize("shared", [False, True])
def test_ids_that_the_model_makes_itself_work_unpipelined_with_one_warning(
    ranks: RankPool, shared: bool
) -> None:
    runs = zip(
        ranks.run(2, own_ids, "sparse", shared), ranks.run(2, own_ids, "base", shared), strict=True
    )
    for (got, said, started), (wanted, nothing, _) in runs:
        assert got == wanted and not nothing
        # the other collection's own KJT still travels ahead, unless keys are ambiguous
        assert started == (0 if shared else 4)
        assert len(said) == 1 and said[0].startswith(
            "learned._embedding_bag_collection gets a KeyedJaggedTensor that is not the batch's"
        )


def two_towers(rank: int, world_size: int, kind: str) -> list[float]:
    torch.manual_seed(0)
    table = lambda name: EmbeddingBagCollection(  # noqa: E731
        [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])], device="meta"
    )
    module = TwoTowerTrain(
        TwoTower(table("a"), [8], table("b")), temperature=0.1, candidate_id=None
    )
    plan = manual_plan(
        table_configs(module), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(module, plan=plan, prefetch=True)
    batches = [
        SimpleNamespace(sparse_features=b.ids, labels=torch.ones(6))
        for b in (ids_of(i, rank) for i in range(6))
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return [
            float(s.loss)
            for s in PIPELINES[kind](
                model, torch.optim.SGD(model.parameters(), 0.1), "cpu"
            ).iterate(batches)
        ]


def one_tower(rank: int, world_size: int) -> None:
    """After steps of both towers, ids of one tower alone are embedded as before."""
    table = lambda name: EmbeddingBagCollection(  # noqa: E731
        [EmbeddingBagConfig(20, 8, name=f"t_{name}", feature_names=[name])], device="meta"
    )
    towers = TwoTower(table("a"), [8], table("b"))
    plan = manual_plan(
        table_configs(towers), "row_wise", Topology.local(world_size, memory_bytes=1 << 30)
    )
    model = DistributedModelParallel(towers, plan=plan, seed=0)
    model.eval()
    with torch.no_grad():
        both = ids_of(0, rank).ids
        wanted = [vectors.clone() for vectors in model(both)]
        assert torch.equal(model.module.query(both.split([1, 1])[0]), wanted[0])
        assert torch.equal(model.module.candidate(both.split([1, 1])[1]), wanted[1])
        for got, vectors in zip(model(both), wanted, strict=True):
            assert torch.equal(got, vectors)


def test_a_collection_whose_features_are_missing_takes_no_part(ranks: RankPool) -> None:
    ranks.run(2, one_tower)


def test_collections_that_share_a_batch_share_its_prefetch(ranks: RankPool) -> None:
    assert ranks.run(2, two_towers, "sparse") == ranks.run(2, two_towers, "base")


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
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        PipelineOptions(accumulate=0)
    with pytest.raises(ConfigError, match="reads at least one batch"):
        PipelineOptions(read_ahead=0)
    with pytest.raises(ConfigError, match="loss scaling"):
        PipelineOptions(autocast=torch.float16)


def test_ids_are_found_wherever_a_batch_keeps_them() -> None:
    @dataclass(slots=True)
    class Inner:
        ids: KeyedJaggedTensor
        other: int = 0

    class Named(NamedTuple):
        first: Any
        second: Any

    a, b, c = (ids_of(i, 0).ids for i in range(3))
    assert find_kjts(a) == [a]
    assert find_kjts(SimpleNamespace(x=[b, (a, {"k": Inner(c)})], y=a, z=torch.ones(1))) == [
        b,
        a,
        c,
    ]
    assert find_kjts(Named(Inner(a), {"k": b})) == [a, b]
    assert find_kjts(torch.ones(1)) == []


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
