"""The pipeline's streams wait for each other, and memory lives as long as a stream uses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rayrec.data.batch import Batch
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.steps import routes_ahead
from rayrec.layout import EmbeddingBagConfig, Topology
from rayrec.modules import EmbeddingBagCollection
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import RankTrainer
from rayrec.train.ahead import Ready
from tests.cuda_dry.runs import spec_of, write_clicks

if TYPE_CHECKING:
    from tests.cuda_dry.races import Watch


class Race(Exception):
    """torch's sanitizer found one."""


@contextmanager
def watched() -> Iterator[Watch]:
    """As `races.watched`, which must not be imported before: it switches torch's hooks on."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    from tests.cuda_dry import races

    with races.watched() as watch:
        try:
            yield watch
        except CUDASanitizerErrors as error:
            raise Race(str(error)) from error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clicks")
    write_clicks(made)
    return made


def train(folder: Path, kind: str = "table_wise") -> list[str]:
    """What was freed too early."""
    with watched() as watch, RankTrainer(spec_of(folder, kind=kind), "cuda") as trainer:
        trainer.run()
        trainer.evaluate(trainer.spec.eval_data)  # type: ignore[arg-type]
        return list(watch.early)


def test_the_watch_sees_a_stream_that_does_not_wait() -> None:
    for waits in (True, False):
        with nullcontext() if waits else pytest.raises(Race), watched():
            a = torch.ones(4, device="cuda")
            side = torch.cuda.Stream()
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a.mul_(2)


@pytest.mark.parametrize("told", [False, True])
def test_the_watch_sees_memory_freed_under_a_stream(told: bool) -> None:
    with watched() as watch:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            a = torch.ones(4, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        b = a + 1
        if told:
            a.record_stream(torch.cuda.current_stream())
        del a
        assert bool(watch.early) is not told
        del b


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_the_trainers_streams_wait_for_each_other(folder: Path, kind: str) -> None:
    assert not train(folder, kind)


@pytest.mark.parametrize("waits", [True, False])
def test_a_step_that_does_not_wait_for_its_ids_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    if not waits:
        run = routes_ahead.RoutesAhead._run

        def without_event(self: routes_ahead.RoutesAhead, *args: Any) -> Any:
            return run(self, *args)._replace(done=None)

        monkeypatch.setattr(routes_ahead.RoutesAhead, "_run", without_event)
    table = EmbeddingBagConfig(50, 8, name="t", feature_names=["f"])
    with nullcontext() if waits else pytest.raises(Race), watched():
        model = DistributedModelParallel(
            EmbeddingBagCollection([table], device="meta"),
            plan=manual_plan([table], "table_wise", Topology.local(1)),
            device="cuda",
            prefetch=True,
        )
        for i in range(3):
            ids = torch.arange(i, i + 6, device="cuda")
            lengths = torch.full((3,), 2, dtype=torch.int32, device="cuda")
            kjt = KeyedJaggedTensor(["f"], ids, lengths=lengths)
            assert model.prefetch(kjt) is (i > 0)  # the first forward teaches who reads it
            model(kjt).values().sum().backward()
        model.close()


def test_a_step_that_does_not_wait_for_its_batch_would_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ready, "wait", lambda self: self.batch)
    with pytest.raises(Race):
        train(folder)


@pytest.mark.parametrize("who", [Batch, KeyedJaggedTensor])
def test_a_batch_that_is_not_kept_would_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, who: type
) -> None:
    monkeypatch.setattr(who, "record_stream", lambda self, stream: None)
    with suppress(Race):  # where the memory had another use by then
        assert train(folder)
