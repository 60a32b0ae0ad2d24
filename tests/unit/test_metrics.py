"""Streaming click metrics against their formulas over all rows and pairs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, replace

import pytest
import torch

from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.metrics import STATE_SIZE, BinaryMetrics, BinaryScores, PlantedScores, regret


def sample(
    seed: int, rows: int = 3000, scale: float = 1.5, shift: float = -1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, generator=g) * scale + shift
    return logits, (torch.rand(rows, generator=g) < logits.sigmoid()).float()


def exact_auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Over all pairs, ties count half."""
    p, n = logits[labels == 1].double(), logits[labels == 0].double()
    order = (p[:, None] > n[None, :]).double() + 0.5 * (p[:, None] == n[None, :]).double()
    return order.mean().item()


def scores_of(logits: torch.Tensor, labels: torch.Tensor) -> BinaryScores:
    metrics = BinaryMetrics()
    metrics.update(logits, labels)
    return metrics.compute()


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 3.0, 100.0])
@pytest.mark.seeds(range(4))
def test_scores_equal_the_formulas(seed, scale):
    logits, labels = sample(seed, scale=scale, shift=-scale / 2)
    got = scores_of(logits, labels)
    assert abs(got.auc - exact_auc(logits, labels)) <= got.auc_error + 1e-12
    assert got.auc_error < (2e-4 if scale >= 1e-3 else 0.51)  # below 2**-24 everything is one tie
    x, rate = logits.double(), labels.double().mean().item()
    logloss = torch.nn.functional.binary_cross_entropy_with_logits(x, labels.double()).item()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert got.rows == 3000 and got.base_rate == rate
    assert got.logloss == pytest.approx(logloss, abs=4e-8)
    assert got.ne == pytest.approx(logloss / entropy, abs=1e-7)
    assert got.calibration == pytest.approx(
        (x.sigmoid().sum() / labels.double().sum()).item(), abs=3e-7
    )
    assert got.accuracy == ((logits >= 0) == (labels == 1)).double().mean().item()


@pytest.mark.seeds(range(8))
def test_any_partition_in_any_order_gives_the_same_state(seed):
    logits, labels = sample(seed)
    whole = BinaryMetrics()
    whole.update(logits, labels)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(logits), generator=g)
    cuts = torch.randint(0, len(logits) + 1, (6,), generator=g).sort().values.tolist()
    merged = BinaryMetrics()
    for rows in torch.tensor_split(order, cuts):
        part = BinaryMetrics()
        part.update(logits[rows], labels[rows])
        merged.merge(part.state())
    assert torch.equal(merged.state(), whole.state())
    assert BinaryMetrics.from_state(whole.state()).compute() == whole.compute()


def test_ties_count_half_and_order_decides_the_rest():
    labels = torch.tensor([0, 1, 0, 1])
    assert scores_of(torch.tensor([1.0, 1.0, 1.0, 1.0]), labels).auc == 0.5
    assert scores_of(torch.tensor([-1.0, 2.0, -3.0, 0.5]), labels).auc == 1.0
    assert scores_of(torch.tensor([1.0, -2.0, 3.0, -0.5]), labels).auc == 0.0
    assert scores_of(torch.tensor([1.0, 1.0, 3.0, 4.0]), labels).auc == (0.5 + 0 + 1 + 1) / 4


def test_bins_keep_the_order_of_numbers():
    """A greater logit never lands in a lower bin: zero, signs, denormals, infinities."""
    x = torch.cat([torch.logspace(-40, 38, 4000), torch.tensor([0.0, math.inf])])
    x = torch.cat([-x, x]).sort().values
    metrics = [
        scores_of(torch.stack([a, b]), torch.tensor([0, 1])).auc
        for a, b in zip(x[:-1:50], x[50::50], strict=False)
    ]
    assert all(auc in (0.5, 1.0) for auc in metrics) and metrics.count(1.0) > 15


def test_a_probability_of_one_half_means_a_click():
    assert scores_of(torch.zeros(4), torch.tensor([1, 1, 1, 0])).accuracy == 0.75


def test_extreme_logits_stay_finite():
    got = scores_of(torch.tensor([math.inf, -math.inf, 1e30, -1e30]), torch.tensor([1, 0, 0, 1]))
    assert (
        got.logloss == pytest.approx(128.0)
        and got.auc == pytest.approx(0.5)
        and got.accuracy == 0.5
    )


def test_half_precision_and_integer_labels_are_taken():
    logits, labels = sample(0)
    assert scores_of(logits.bfloat16(), labels.long()) == scores_of(
        logits.bfloat16().float(), labels.double()
    )


def test_no_rows_and_one_class_give_nan_not_errors():
    none = scores_of(torch.empty(0), torch.empty(0))
    assert none.rows == 0 and all(math.isnan(v) for v in astuple(none)[1:])
    one = scores_of(torch.tensor([0.3, -0.2]), torch.tensor([0, 0]))
    assert (
        math.isnan(one.auc)
        and math.isnan(one.ne)
        and math.isnan(one.calibration)
        and one.logloss > 0
    )


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([math.nan, 1.0], [0.0, 1.0], "1 of 2 logits are NaN"),
        ([0.0, 1.0], [0.5, 1.0], "1 of 2 labels"),
        ([0.0, 1.0], [math.nan, 1.0], "labels"),
    ],
)
def test_bad_rows_are_reported_when_computing(logits, labels, message):
    with pytest.raises(InputError, match=message):
        scores_of(torch.tensor(logits), torch.tensor(labels))


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match=r"\(2, 1\)"):
        BinaryMetrics().update(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ShapeError, match=str(STATE_SIZE)):
        BinaryMetrics().merge(torch.zeros(3, dtype=torch.int64))


def test_reset_forgets():
    metrics = BinaryMetrics()
    metrics.update(*sample(0))
    metrics.reset()
    assert not metrics.state().any()


def test_regret_is_the_distance_from_the_truth(tmp_path):
    scores = scores_of(*sample(0))
    truth = PlantedScores(
        rows=3000,
        base_rate=0.3,
        bayes_auc=scores.auc + 0.01,
        bayes_logloss=0.4,
        bayes_ne=scores.ne - 0.02,
    )
    assert regret(scores, truth).auc == pytest.approx(0.01) and regret(
        scores, truth
    ).ne == pytest.approx(0.02)
    with pytest.raises(ConfigError, match="3000 rows, the truth of 5"):
        regret(scores, replace(truth, rows=5))
    with pytest.raises(ConfigError, match=r"none\.json"):
        PlantedScores.load(tmp_path / "none.json")
    for field, value in (
        ("bayes_auc", "high"),
        ("rows", 3.5),
        ("base_rate", True),
        ("shuffled_labels", 1),
    ):
        (tmp_path / "truth.json").write_text(json.dumps({**asdict(truth), field: value}))
        with pytest.raises(ConfigError, match=rf"truth\.json has {field}="):
            PlantedScores.load(tmp_path / "truth.json")
    for text in ("[]", "{", "[" * 100_000):
        (tmp_path / "truth.json").write_text(text)
        with pytest.raises(ConfigError, match=r"cannot read .*truth\.json"):
            PlantedScores.load(tmp_path / "truth.json")
    (tmp_path / "truth.json").write_text(json.dumps(asdict(truth)))
    assert PlantedScores.load(tmp_path / "truth.json") == truth


@pytest.mark.parametrize("rows", [1, 700])
def test_cross_entropy_is_told_in_nats_and_bits_as_mean_and_sum(rows):
    logits, labels = sample(5, rows)
    p = logits.double().sigmoid()
    bits = -(labels * p.log2() + (1 - labels) * (1 - p).log2())
    got = scores_of(logits, labels)
    found = got.logloss_bits, got.cross_entropy_sum_bits, got.cross_entropy_sum
    want = float(bits.mean()), float(bits.sum()), float(bits.sum()) * math.log(2)
    assert found == pytest.approx(want, rel=1e-6)


def test_the_cross_entropy_of_no_rows_is_zero_in_sum_and_undefined_in_mean():
    none = BinaryMetrics().compute()
    assert none.cross_entropy_sum == none.cross_entropy_sum_bits == 0.0 and math.isnan(
        none.logloss_bits
    )
