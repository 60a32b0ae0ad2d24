"""The pipeline's streams wait for each other, and memory lives as long as a stream uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.cuda._sanitizer import CUDASanitizerErrors

from rayrec.data.batch import Batch
from rayrec.distributed import routes_ahead
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import RankTrainer
from rayrec.train.ahead import Ready
from tests.cuda_dry.races import watched
from tests.cuda_dry.runs import spec_of, write_clicks


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
    with watched():
        a = torch.ones(4, device="cuda")
        side = torch.cuda.Stream()
        with torch.cuda.stream(side), pytest.raises(CUDASanitizerErrors):
            a.mul_(2)
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


def test_a_step_that_does_not_wait_for_its_ids_would_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = routes_ahead.RoutesAhead.take

    def impatient(self: routes_ahead.RoutesAhead, *args: object) -> object:
        self._started = [
            item._replace(routed=_without_event(item.routed)) for item in self._started
        ]
        return take(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(routes_ahead.RoutesAhead, "take", impatient)
    with pytest.raises(CUDASanitizerErrors):
        train(folder)


def _without_event(routed: object) -> object:
    class Done:
        def result(self) -> object:
            return routed.result()._replace(done=None)  # type: ignore[attr-defined]

    return Done()


def test_a_step_that_does_not_wait_for_its_batch_would_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ready, "wait", lambda self: self.batch)
    with pytest.raises(CUDASanitizerErrors):
        train(folder)


@pytest.mark.parametrize("who", [Batch, KeyedJaggedTensor])
def test_a_batch_that_is_not_kept_would_be_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, who: type
) -> None:
    monkeypatch.setattr(who, "record_stream", lambda self, stream: None)
    assert train(folder)
