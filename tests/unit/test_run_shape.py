"""What shapes a run does what it says, in one process: rates, clipping, accumulation, types,
optimizers of tables, evaluations on the way, early stopping, tasks and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrec.checkpoint import CheckpointManager
from rayrec.errors import ConfigError
from rayrec.layout import ShardingPlan
from rayrec.metrics import Metric
from rayrec.optim import SGD, Adam, ScheduleConfig, learning_rate_at, schedule
from rayrec.spec.task import Task
from rayrec.train import CheckpointConfig, OptimizerConfig, RankTrainer, TrainSpec
from rayrec.train.callbacks import Callback
from rayrec.train.events import Evaluation, Event, ProgressReport, Saved
from rayrec.train.scoring import check_tasks
from rayrec.train.shaping import Best, EarlyStopping, EvaluationConfig
from tests.gloo.shaped import TASKS, many_of
from tests.gloo.trainers import spec_of


class Seen(Callback):
    """Keeps what a function makes of the trainer after every step."""

    def __init__(self, look: Any) -> None:
        self.look, self.values = look, []

    def on_step(self, step: int, trainer: Any = None) -> None:
        self.values.append(self.look(trainer))


def run(spec: TrainSpec, look: Any = None) -> tuple[list[Event], list[Any], RankTrainer]:
    seen = Seen(look or (lambda trainer: None))
    events: list[Event] = []
    with RankTrainer(replace(spec, rank_callbacks=(seen,))) as trainer:
        trainer.run(on_event=events.append)
    return events, seen.values, trainer


def rates(trainer: Any) -> tuple[float, float]:
    """The learning rates of the tables and of the dense part."""
    tables = trainer._rates._tables.param_groups[0]["lr"]
    return tables, trainer._dense.param_groups[0]["lr"]


def test_learning_rates_follow_their_schedules(shaped: Path) -> None:
    sparse = schedule(10, warmup=3, decay="cosine", floor=0.1)
    dense = schedule(12, warmup=4, decay="step", floor=0.5, every=5)
    spec = replace(spec_of(shaped, 1), sparse_schedule=sparse, dense_schedule=dense)
    events, seen, _ = run(spec, rates)
    for step, (tables, others) in enumerate(seen):
        assert tables == pytest.approx(learning_rate_at(step, spec.sparse_optimizer.lr, sparse))
        assert others == pytest.approx(learning_rate_at(step, spec.dense_optimizer.lr, dense))
    last = [e for e in events if isinstance(e, ProgressReport)][-1]
    assert last.learning_rates["sparse"] == pytest.approx(seen[-1][0])
    assert last.learning_rates["dense"] == pytest.approx(seen[-1][1])
    assert seen[0][0] == 0.0 and seen[3][0] > seen[9][0]


def test_a_schedule_in_words_covers_the_steps_of_the_run(shaped: Path) -> None:
    said = ScheduleConfig(decay="linear", warmup=3, floor=0.1)
    spec = replace(spec_of(shaped, 1), sparse_schedule=said, dense_schedule=said)
    stages = schedule(spec.steps, decay="linear", warmup=3, floor=0.1)
    _, seen, _ = run(spec, rates)
    factors = [learning_rate_at(step, 1.0, stages) for step in range(spec.steps)]
    assert factors[0] == 0 and factors[3] == 1 and 0.1 < factors[-1] < 0.4
    bases = spec.sparse_optimizer.lr, spec.dense_optimizer.lr
    for factor, now in zip(factors, seen, strict=True):
        assert now == pytest.approx([base * factor for base in bases])
    with pytest.raises(ConfigError, match="must end before"):
        replace(spec, sparse_schedule=ScheduleConfig(warmup=spec.steps))
    for wrong in ({"decay": "poly"}, {"warmup": -1}, {"warmup": 0.5}, {"floor": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ScheduleConfig(**{"decay": "linear", **wrong})


def test_a_schedule_of_zero_moves_no_table(shaped: Path) -> None:
    frozen = replace(spec_of(shaped, 1), sparse_schedule=schedule(20, warmup=19))
    _, _, trainer = run(replace(frozen, steps=1))
    with RankTrainer(frozen) as untrained:
        for one, other in zip(
            trainer.model.shard_states(), untrained.model.shard_states(), strict=True
        ):
            assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_dense_gradients_are_clipped(shaped: Path, option: str) -> None:
    limit = 0.01

    def largest(trainer: Any) -> float:
        grads = [p.grad for _, p in trainer.model.dense_parameters()]
        if option == "clip_norm":
            return float(torch.nn.utils.get_total_norm(grads))
        return max(float(grad.abs().max()) for grad in grads)

    _, unclipped, _ = run(spec_of(shaped, 1), largest)
    _, clipped, _ = run(replace(spec_of(shaped, 1), **{option: limit}), largest)
    assert max(unclipped) > 2 * limit and max(clipped) <= limit * 1.001


def test_accumulation_updates_the_dense_layers_at_multiples_and_at_the_end(shaped: Path) -> None:
    def dense(trainer: Any) -> Tensor:
        return torch.cat([p.detach().flatten() for _, p in trainer.model.dense_parameters()])

    spec = replace(spec_of(shaped, 1), accumulate=3)
    _, seen, _ = run(spec, dense)
    changed = [n for n in range(2, 14) if not torch.equal(seen[n - 1], seen[n - 2])]
    assert changed == [3, 6, 9, 12, 13]


def test_an_accumulated_gradient_is_the_mean_of_its_steps(shaped: Path) -> None:
    """With tables that stand still, three steps of accumulation are one of the mean gradient."""
    still = OptimizerConfig(name="sgd", lr=0.0)
    moving = OptimizerConfig(name="sgd", lr=0.5)
    spec = replace(
        spec_of(shaped, 1), sparse_optimizer=still, dense_optimizer=moving, shuffle=False
    )
    _, _, joined = run(replace(spec, steps=3, accumulate=3))
    _, _, whole = run(replace(spec, steps=1, global_batch_size=384))
    for (_, one), (_, other) in zip(
        joined.model.dense_parameters(), whole.model.dense_parameters(), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_dense_layers_compute_in_bfloat16(shaped: Path) -> None:
    dtypes: dict[str, set[torch.dtype]] = {}
    for dtype in ("float32", "bfloat16"):
        kept = dtypes.setdefault(dtype, set())
        with RankTrainer(replace(spec_of(shaped, 1), dense_dtype=dtype, steps=2)) as trainer:
            for module in trainer.model.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_hook(lambda m, i, out, kept=kept: kept.add(out.dtype))
            trainer.run()
            assert all(s.weight.dtype is torch.float32 for s in trainer.model.shard_states())
    assert dtypes == {"float32": {torch.float32}, "bfloat16": {torch.bfloat16}}


def test_tables_have_their_own_optimizers(shaped: Path) -> None:
    own = {"t_cat_0": Adam(lr=0.02, eps=1e-6), "t_cat_1": OptimizerConfig(name="sgd", lr=0.3)}
    with RankTrainer(replace(spec_of(shaped, 1), table_optimizers=own)) as trainer:
        used = trainer.model.sparse_optimizers
        assert used["t_cat_0"] == own["t_cat_0"] and used["t_cat_1"] == SGD(lr=0.3)
        assert used["t_cat_2"] == trainer.spec.tables_optimizer
    with pytest.raises(ConfigError, match=r"table 'cat_9'; the model's tables are t_cat_0, "):
        RankTrainer(replace(spec_of(shaped, 1), table_optimizers={"cat_9": SGD(lr=0.1)}))


def evaluated(shaped: Path, **options: Any) -> TrainSpec:
    config = EvaluationConfig(**{"every_n_steps": 3, **options})
    return many_of(shaped, 1, evaluation=config)


def test_evaluations_come_at_their_steps_and_sample_whole_batches(shaped: Path) -> None:
    spec = evaluated(shaped, rows=100)
    events, _, trainer = run(spec)
    scored = [e for e in events if isinstance(e, Evaluation)]
    assert [e.step for e in scored] == [3, 6, 9, 12] and all(e.rows == 128 for e in scored)
    assert trainer.final_scores(lambda: False, lambda: None)["click/rows"] == 301
    wanted = {"click/auc", "genre/accuracy", "genre/recall@2", "genre/ndcg@2", "rating/mse"}
    assert wanted <= set(scored[0].scores)


def test_evaluations_come_after_seconds(shaped: Path) -> None:
    config = EvaluationConfig(every_s=1e-6)
    events, _, _ = run(replace(many_of(shaped, 1), evaluation=config))
    reports = [e.step for e in events if isinstance(e, ProgressReport)]
    assert [e.step for e in events if isinstance(e, Evaluation)] == reports


def test_the_best_checkpoint_is_kept(shaped: Path, tmp_path: Path) -> None:
    spec = replace(
        evaluated(shaped, score="click/ne", keep_best=True),
        run_path=str(tmp_path),
        checkpoint=CheckpointConfig(every_n_steps=1, num_to_keep=1),
        dense_optimizer=OptimizerConfig(name="sgd", lr=0.2),
    )
    events, _, trainer = run(spec)
    scored = {e.step: e.scores["click/ne"] for e in events if isinstance(e, Evaluation)}
    best = min(scored, key=lambda step: scored[step])
    assert trainer.best.step == best and trainer.best.value == scored[best]
    assert set(CheckpointManager(str(tmp_path)).steps()) == {best, 13}
    assert best in [e.step for e in events if isinstance(e, Saved) and e.best]


def test_the_last_model_is_kept_as_the_best_where_it_is(shaped: Path, tmp_path: Path) -> None:
    """13 steps are no multiple of 3: the evaluation after training is the only one of step 13."""
    spec = replace(
        evaluated(shaped, score="click/ne", keep_best=True),
        run_path=str(tmp_path),
        checkpoint=CheckpointConfig(every_n_steps=1, num_to_keep=1),
    )
    events, _, trainer = run(spec)
    scored = {e.step: e.scores for e in events if isinstance(e, Evaluation)}
    assert list(scored) == [3, 6, 9, 12, 13]
    assert trainer.best.step == 13 and trainer.best.value == scored[13]["click/ne"]
    assert trainer.final_scores(lambda: False, lambda: None) == scored[13]
    (step,) = CheckpointManager(str(tmp_path)).steps()
    assert step == 13 and [e.step for e in events if isinstance(e, Saved) and e.best][-1] == 13


def test_early_stopping_ends_a_run_and_one_that_resumes_it(shaped: Path, tmp_path: Path) -> None:
    still = OptimizerConfig(name="sgd", lr=0.0)
    spec = replace(
        evaluated(shaped, score="click/auc", early_stopping=EarlyStopping(patience=2)),
        sparse_optimizer=still,
        dense_optimizer=still,
        run_path=str(tmp_path),
    )
    _, _, trainer = run(spec)
    assert trainer.step == 9
    assert trainer.early.startswith("click/auc was not better in 2 evaluations; the best was 0.")
    with RankTrainer(spec) as again:
        again.restore(str(tmp_path / "step-00000009"))
        assert again.best == trainer.best
        again.run()
        assert again.step == 9 and again.early == trainer.early


def test_best_needs_a_gain_above_the_margin() -> None:
    config = EvaluationConfig(
        every_n_steps=1, score="auc", early_stopping=EarlyStopping(min_delta=0.1)
    )
    best = Best().after(1, 0.5, config)
    assert best.after(2, 0.59, config) == Best(step=1, value=0.5, without=1, scored=2)
    assert best.after(2, 0.61, config) == Best(step=2, value=0.61, scored=2)
    assert best.after(2, float("nan"), config).without == 1


class Positives(Metric):
    """The share of positive predictions."""

    def start(self, device: torch.device) -> Tensor:
        return torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        state += torch.tensor([float((predictions > 0).sum()), float(labels.numel())])

    def scores(self, state: Tensor) -> Mapping[str, float]:
        return {"positives": float(state[0] / state[1])}


class LargestShare(Positives):
    """Keeps a quotient in its state, which does not add up."""

    def add(self, state: Tensor, predictions: Tensor, labels: Tensor) -> None:
        state[0] = (predictions > 0).double().mean()


def test_metrics_of_the_user_are_scored_and_those_that_do_not_merge_are_refused(
    shaped: Path,
) -> None:
    task = Task(name="click", metrics=(Positives(),))
    events, _, _ = run(replace(spec_of(shaped, 1), tasks=(task,)))
    scores = [e for e in events if isinstance(e, ProgressReport)][-1].scores
    assert 0 <= scores["positives"] <= 1 and "auc" in scores
    with pytest.raises(ConfigError, match="metric LargestShare cannot be merged"):
        check_tasks((Task(name="click", metrics=(LargestShare(),)),))
    with pytest.raises(ConfigError, match=r"'recal@5', which a multiclass task has not: recall@K"):
        check_tasks((Task(name="a", kind="multiclass", classes=3, metrics=("recal@5",)),))
    with pytest.raises(ConfigError, match="two tasks are named 'a'"):
        check_tasks((Task(name="a"), Task(name="a")))


def test_the_loss_of_tasks_is_their_weighted_sum(shaped: Path) -> None:
    spec = many_of(shaped, 1)
    assert spec.data is not None
    batch = next(iter(spec.data.loader(0, 1, 128, shuffle=False)))
    torch.manual_seed(1)
    model = spec.model()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    loss, (_, logits, labels) = model(batch)
    weights, functional = batch.weights, torch.nn.functional
    click = functional.binary_cross_entropy_with_logits(
        logits["click"], labels["click"], reduction="none"
    )
    genre = functional.cross_entropy(logits["genre"], labels["genre"].long(), reduction="none")
    rating = 0.5 * (logits["rating"] - labels["rating"]) ** 2
    wanted = (weights * (click + 0.5 * genre + 0.25 * rating)).mean()
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EvaluationConfig(), "give exactly one"),
        (lambda: EvaluationConfig(every_n_steps=1, keep_best=True), "no score to compare"),
        (lambda: EvaluationConfig(every_n_steps=1, score="mine"), 'Give mode="max"'),
        (
            lambda: EvaluationConfig(every_s=1.0, score="auc", early_stopping=EarlyStopping()),
            "speed of the machine",
        ),
        (lambda: Task(name="a", kind="multiclass"), "needs classes"),
        (lambda: Task(name="a/b"), "without a slash"),
        (lambda: schedule(5, warmup=5), "must end before the schedule"),
        (lambda: schedule(5, decay="step"), "needs it"),
        (lambda: TrainSpec(**BASE, clip_norm=1.0, clip_value=1.0), "give one"),
        (lambda: TrainSpec(**BASE, clip_norm=0.0), "clip_norm"),
        (lambda: TrainSpec(**BASE, accumulate=0), "accumulate"),
        (lambda: TrainSpec(**BASE, dense_dtype="float16"), "one of 'float32', 'bfloat16'"),
        (
            lambda: TrainSpec(**BASE, accumulate=3, checkpoint=CheckpointConfig(every_n_steps=4)),
            "no multiple of accumulate",
        ),
        (lambda: TrainSpec(**BASE, rank_callbacks=(Seen,)), "each item an instance of Callback"),
    ],
)
def test_options_that_contradict_each_other_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


PLAN = ShardingPlan(world_size=1, tables={})
BASE: dict[str, Any] = {"model": None, "data": None, "plan": PLAN, "global_batch_size": 8}


def test_tasks_are_those_of_the_data(shaped: Path) -> None:
    spec = many_of(shaped, 1)
    with pytest.raises(ConfigError, match=r"tasks are|needs \d outputs|has 3 labels a row"):
        run(replace(spec, model=replace(spec.model, tasks=TASKS[:2]), tasks=TASKS[:2]))  # type: ignore[type-var]
