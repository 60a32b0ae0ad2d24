"""What shapes a run, on real ranks: evaluations, tasks and callbacks reach the driver, a callback
that raises on one rank ends the run of all after a save, and a loop of the user's own is driven.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rayrec import Callback, CheckpointConfig, EvaluationConfig
from rayrec.checkpoint import CheckpointManager
from rayrec.data.synthetic import SyntheticPaths
from rayrec.errors import TrainingFailed
from rayrec.train import LoopContext
from rayrec.watch import read_events
from tests.ray import worlds

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
STEPS = 11


class Heard(Callback):
    def __init__(self) -> None:
        self.moments: list[str] = []
        self.last = 0

    def on_start(self, info: Any) -> None:
        self.moments.append("start")

    def on_step(self, step: int, trainer: Any = None) -> None:
        self.last = step

    def on_window(self, report: Any, trainer: Any = None) -> None:
        self.moments.append("window")

    def on_evaluation(self, evaluation: Any, trainer: Any = None) -> None:
        self.moments.append(f"evaluation {evaluation.step}")

    def on_checkpoint(self, saved: Any, trainer: Any = None) -> None:
        self.moments.append(f"checkpoint {saved.step}")

    def on_end(self, error: Any, trainer: Any = None) -> None:
        self.moments.append("end")


class Breaks(Callback):
    """Raises on rank 1 at a step."""

    def on_step(self, step: int, trainer: Any = None) -> None:
        if trainer.rank == 1 and step == 4:
            raise ValueError("not today")


def loop(context: LoopContext) -> dict[str, float]:
    model = context.shard(context.build())
    optimizer = torch.optim.Adagrad([p for _, p in model.dense_parameters()], lr=0.01)
    context.track(optimizer)
    for batch in context.batches():
        loss, (_, logits, labels) = model(batch)
        optimizer.zero_grad()
        (loss * context.loss_weight(batch)).backward()
        optimizer.step()
        context.report(loss, logits, labels)
    return {"ranks": float(context.world_size)}


@pytest.mark.slow
def test_a_run_is_shaped_and_watched(clicks: SyntheticPaths, tmp_path: Path) -> None:
    heard = Heard()
    options: dict[str, Any] = {
        "steps": STEPS,
        "storage_path": str(tmp_path),
        "evaluation": EvaluationConfig(every_n_steps=4, rows=512, score="auc", keep_best=True),
        "checkpoint": CheckpointConfig(every_n_steps=8, num_to_keep=1),
    }
    result = worlds.driver(clicks, 2, callbacks=[heard], **options).fit()
    told = [moment for moment in heard.moments if moment != "window"]
    assert told[0] == "start" and told[-1] == "end" and heard.last == STEPS
    assert [m for m in told if m.startswith("evaluation")] == [
        "evaluation 4",
        "evaluation 8",
        f"evaluation {STEPS}",
    ]
    kept = CheckpointManager(str(tmp_path / "run")).steps()
    assert set(kept) == {result.best_step, STEPS}
    events = read_events(str(tmp_path / "run"))
    assert [e.step for e in events.of("evaluation")] == [4, 8, STEPS]
    (start,) = events.of("start")
    assert start.values["hosts"] == [ray.util.get_node_ip_address()] * 2


@pytest.mark.slow
def test_a_loop_of_the_users_own_is_driven(clicks: SyntheticPaths) -> None:
    ended = worlds.driver(clicks, 2, steps=STEPS, train_loop=loop).fit()
    assert ended.metrics == {"ranks": 2.0} and ended.steps == STEPS
    assert ended.train_loss is not None and ended.reports[-1].auc is not None


@pytest.mark.slow
def test_a_callback_of_one_rank_ends_the_run_of_all(clicks: SyntheticPaths, tmp_path: Path) -> None:
    run = worlds.driver(
        clicks, 2, rank_callbacks=[Breaks()], storage_path=str(tmp_path), steps=100_000
    )
    with pytest.raises(
        TrainingFailed, match=r"rank 1 of 2 .*Breaks.on_step raised ValueError: not today in rank 1"
    ):
        run.fit()
    (step,) = CheckpointManager(str(tmp_path / "run")).steps()
    assert 4 <= step < 100_000
