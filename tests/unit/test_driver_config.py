"""What the driver refuses before anything is started, and its small pure parts. No Ray here."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayrec.driver.config import FailureConfig, RunConfig
from rayrec.driver.display import Display
from rayrec.driver.placement import crowding, shortage
from rayrec.driver.planning import check_plan_word
from rayrec.driver.rank_process import death_line
from rayrec.driver.roster import neighbours
from rayrec.driver.scaling import ScalingConfig
from rayrec.errors import ConfigError, PlanError, TrainingFailed
from rayrec.optim import Adam
from rayrec.spec.task import Task
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.events import Evaluation, ProgressReport
from rayrec.train.optimizer_config import OptimizerConfig
from rayrec.train.publish_config import PublishConfig
from rayrec.train.scoring import ONE_BINARY, Scoring
from rayrec.train.seat import RankAddress, places_on_machines

CONTRADICTIONS: dict[type, list[tuple[dict[str, Any], str]]] = {
    ScalingConfig: [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": True}, "num_workers=True"),
        ({"placement_timeout_s": float("nan")}, "placement_timeout_s=nan"),
        ({"spares": -1}, "spares=-1.*at least 0"),
        ({"spares": True}, "spares=True"),
        ({"num_workers": (1, 2), "spares": 1}, "spares=1.*num_workers=\\(1, 2\\)"),
        ({"num_workers": 0, "spares": 1}, "spares is about ranks on a cluster"),
        ({"num_workers": (4, 1)}, "least <= most"),
        ({"num_workers": (0, 4)}, "1 <= least"),
        ({"num_workers": (1, 2, 3)}, "a list of 2"),
        ({"num_workers": (1, True)}, "a list of 2"),
        ({"num_workers": (1, 2), "shrink_after_s": 0}, "shrink_after_s=0"),
        ({"num_workers": (1, 2), "grow_after_s": -1}, "grow_after_s=-1"),
        ({"num_workers": 2, "shrink_after_s": 5}, "number of ranks that changes"),
        ({"num_workers": (2, 2), "grow_after_s": 5}, "num_workers=2"),
        ({"num_workers": (1, 2), "placement_strategy": "STRICT_PACK"}, "one by one; use PACK"),
        ({"cpus_per_worker": 0}, "cpus_per_worker=0"),
        ({"cpus_per_worker": 1.5}, "cpus_per_worker=1.5.*whole"),
        ({"cpus_per_worker": 1e-9}, "cpus_per_worker=1e-09.*0.0001"),
        ({"num_workers": 0, "pin_cores": True}, "pin_cores is about ranks on a cluster"),
        ({"num_workers": 0, "placement_timeout_s": 5}, "placement_timeout_s is about"),
        ({"num_workers": 0, "resources_per_worker": {"x": 1}}, "resources_per_worker is"),
        ({"num_workers": 0, "placement_strategy": "SPREAD"}, "placement_strategy is"),
        ({"placement_strategy": "TIGHT"}, "STRICT_PACK"),
        ({"pin_cores": True, "cpus_per_worker": 0.5}, "pin_cores.*cpus_per_worker=0.5"),
        ({"pin_cores": True, "use_gpu": True}, "pin_cores.*use_gpu=True"),
        ({"resources_per_worker": {"GPU": 1}}, "use_gpu"),
    ],
    RunConfig: [
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=9223372036854775808"),
        ({"steps": 1.5}, "steps=1.5"),
        ({"resume_from": ""}, "resume_from=''"),
        ({"resume_from": "latest"}, "needs RunConfig\\(storage_path"),
        ({"resume_from": "a", "init_from": "b"}, "Give one of them"),
        ({"new_data": True}, "give resume_from"),
        ({"init_optimizer_state": True}, "give init_from"),
        ({"qcomms_forward": "fp7"}, "'fp7' is unknown"),
        ({"storage_path": "/tmp/ray/s/working_dir_files/_ray_pkg_1/runs"}, "temporary copy"),
        (
            {"accumulate": 2, "failure": FailureConfig(max_failures=1, sync_every_n_steps=9)},
            "sync_every_n_steps=9.*accumulate=2",
        ),
        ({"heartbeat_timeout_s": 0}, "heartbeat_timeout_s=0"),
        ({"resume_from": "auto"}, "resume_from='auto' needs RunConfig\\(storage_path"),
        (
            {"resume_from": "auto", "storage_path": "/tmp/runs", "new_data": True},
            "resume_from='auto' may continue it many times",
        ),
        ({"steps": None}, "exactly one"),
        ({"epochs": 1}, "exactly one"),
        ({"global_batch_size": 0, "steps": 1}, "global_batch_size=0"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": "a\0b"}, "name of one folder"),
        (
            {"steps": 4, "accumulate": 2, "publish": PublishConfig(every_n_rows=9, path="/tmp/a")},
            "PublishConfig has every_n_rows=9 and RunConfig has accumulate=2",
        ),
        (
            {"sparse_optimizer": OptimizerConfig(name="adam", lr=0.1, options={"beta": 0.5})},
            "'adam' has no option 'beta'; it has lr, .*beta1",
        ),
        (
            {"sparse_optimizer": OptimizerConfig(name="adam", lr=0.1, options={"beta1": 1.0})},
            r"Adam\(beta1=1.0\)",
        ),
        (
            {"dense_optimizer": OptimizerConfig(name="adam", lr=0.1, options={"beta1": 0.5})},
            "dense_optimizer 'adam': .*beta1",
        ),
        *(
            ({"checkpoint": CheckpointConfig(**options)}, "that has no storage; give RunConfig")
            for options in (
                {"num_to_keep": 2},
                {"every_n_steps": 1},
                {"every_n_rows": 1},
                {"every_s": 60},
                {"asynchronous": True},
                {"incremental": True},
            )
        ),
    ],
    FailureConfig: [
        ({"max_failures": -2}, "max_failures=-2.*at least -1"),
        ({"max_failures": True}, "max_failures=True"),
        ({"max_failures": 1, "sync_every_n_steps": 0}, "sync_every_n_steps=0"),
        ({"sync_every_n_steps": 9}, "max_failures=0.*needs no sync points"),
    ],
    CheckpointConfig: [
        ({"num_to_keep": 0}, "num_to_keep=0"),
        ({"every_n_steps": 5, "every_s": 60}, "every_n_steps=5 and every_s=60; give one"),
        ({"every_n_rows": 5, "every_s": 60}, "every_n_rows=5 and every_s=60; give one"),
        ({"every_n_rows": 0}, "every_n_rows=0"),
        ({"every_event_s": 0}, "every_event_s=0"),
        ({"every_s": 0}, "every_s=0; it must be above 0"),
        ({"full_every": 3}, "full_every=3 without incremental=True"),
        ({"full_every": 1, "incremental": True}, "full_every=1; it must be at least 2"),
    ],
    OptimizerConfig: [
        ({"name": "adam", "lr": float("nan")}, "lr=nan"),
        ({"name": "adam", "lr": 0.1, "options": {"lr": 1}}, "say it once"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [(kind, *case) for kind, cases in CONTRADICTIONS.items() for case in cases],
)
def test_contradictions_are_refused(kind: type, options: dict[str, Any], words: str) -> None:
    given = {"global_batch_size": 8, "steps": 1} if kind is RunConfig else {}
    with pytest.raises(ConfigError, match=words):
        kind(**(given | options))


def test_an_optimizer_is_said_as_a_value_or_by_name_and_options() -> None:
    value = Adam(lr=0.1, beta2=0.9, max_gradient=1.0)
    named = OptimizerConfig(name="adam", lr=0.1, options={"beta2": 0.9, "max_gradient": 1.0})
    for said in (value, named):
        run = RunConfig(global_batch_size=8, steps=1, sparse_optimizer=said)
        assert run.tables_optimizer == value and run.sparse_optimizer.name == "adam"


def test_run_path_joins_storage_and_name() -> None:
    assert (
        RunConfig(global_batch_size=8, steps=1, storage_path="s3://b/runs/", name="x").run_path
        == "s3://b/runs/x"
    )
    assert RunConfig(global_batch_size=8, steps=1).run_path is None


@pytest.mark.parametrize(
    ("scaling", "total", "words"),
    [
        (
            ScalingConfig(num_workers=4),
            {"CPU": 2.0},
            ["4 CPU", "has 2", "num_workers=2", "cpus_per_worker=0.5"],
        ),
        (
            ScalingConfig(num_workers=2, use_gpu=True),
            {"CPU": 8.0},
            ["2 GPU", "has 0", "use_gpu=False"],
        ),
        (
            ScalingConfig(num_workers=2, resources_per_worker={"fast": 1}),
            {"CPU": 8.0, "fast": 1.0},
            ["2 fast", "has 1"],
        ),
    ],
)
def test_a_shortage_is_told_with_numbers_and_a_remedy(
    scaling: ScalingConfig, total: dict[str, float], words: list[str]
) -> None:
    text = shortage(scaling, total, scaling.least)
    assert all(word in text for word in words), text


def test_what_fits_is_no_shortage() -> None:
    assert shortage(ScalingConfig(cpus_per_worker=0.5), {"CPU": 2.0}, 4) == ""


@pytest.mark.parametrize(
    ("free", "strategy", "why"),
    [
        ((0.8, 4.0), "PACK", ""),
        (
            (1.5, 1.5, 1.8),
            "PACK",
            "3 of 4 ranks have room now; free by node: 1.8 CPU, 1.5 CPU, 1.5",
        ),
        (
            (3.0, 2.0),
            "STRICT_PACK",
            "5 ranks have room now, but 3 have it on one node, as STRICT_PACK",
        ),
        ((3.0, 2.0), "STRICT_SPREAD", "5 ranks have room now, but 2 have it on nodes of their own"),
        ((1.0,), "STRICT_PACK", "1 of 4 ranks have room"),
        ((), "PACK", "0 of 4 ranks have room now; free by node: nothing"),
    ],
)
def test_why_there_is_no_room_is_said_by_node(
    free: tuple[float, ...], strategy: str, why: str
) -> None:
    """4.8 free CPUs of three nodes hold no four ranks of a CPU each."""
    scaling = ScalingConfig(num_workers=4, placement_strategy=strategy)
    text = crowding(scaling, [{"CPU": cpus} for cpus in free], scaling.least)
    assert why in text and bool(text) == bool(why)


def test_ranks_of_a_node_are_neighbours_and_the_drivers_node_comes_first() -> None:
    nodes = ["b", "a", "c", "a", "b", "c"]
    addresses = [
        RankAddress(node_id=node, host=f"10.0.0.{ord(node)}", pid=i) for i, node in enumerate(nodes)
    ]
    order = neighbours(addresses, here="c")
    assert [nodes[i] for i in order] == ["c", "c", "a", "a", "b", "b"]
    assert sorted(order) == list(range(6))


def test_ranks_are_numbered_by_machine() -> None:
    addresses = [
        RankAddress(node_id=node, host=host, pid=i)
        for i, (node, host) in enumerate(["ax", "bx", "cy", "bx"])
    ]
    assert places_on_machines(addresses) == [(0, 3), (1, 3), (0, 1), (2, 3)]


def test_plan_words(tmp_path: Any) -> None:
    for word in ("auto", "row_wise", "grid_shard"):
        check_plan_word(word)
    with pytest.raises(ConfigError, match=r"rowwise.*neither.*row_wise"):
        check_plan_word("rowwise")
    with pytest.raises(ConfigError, match="neither a file nor"):
        check_plan_word("x" * 300)  # too long for the name of a file
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError):
        check_plan_word(str(tmp_path / "plan.json"))


def test_death_lines_are_one_line() -> None:
    for text in (
        "The actor died because its node has died. Node Id: x\nmore",
        "Worker unexpectedly exits with\na code",
        "odd\nlast",
        "",
    ):
        line = death_line(RuntimeError(text))
        assert line and "\n" not in line


def test_training_failed_keeps_its_fields_through_pickle() -> None:
    error = pickle.loads(pickle.dumps(TrainingFailed("m", 3, "h", "c", "t")))
    assert (error.rank, error.host, error.cause, error.traceback, str(error)) == (
        3,
        "h",
        "c",
        "t",
        "m",
    )


def test_plain_lines_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("auto", total_steps=10)
    display.event(ProgressReport(step=5, rows=100, rows_per_s=1234.5, loss=0.25, auc=0.75))
    display.event("a line")
    display.close()
    Display("off").line("nothing")
    assert capsys.readouterr().out == "step 5/10  1,234 rows/s  loss 0.25000  auc 0.7500\na line\n"


def test_a_window_that_is_scored_again_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("plain", total_steps=10)
    for window, step in ((3, 0), (4, 5), (4, 5), (9, 8)):
        display.event(
            Evaluation(step=step, scores={"auc": 0.7}, rows=2, seconds=0.1, window=window)
        )
    assert [(e.window, e.step) for e in display.evaluations] == [(3, 0), (4, 5), (9, 8)]
    assert (
        capsys.readouterr().out.splitlines()[-1] == "step 8  window 9, before training: auc 0.7000"
    )
    display.go_back(5)
    assert [e.window for e in display.evaluations] == [3, 4]


def scores(labels: list[int], tasks: tuple[Task, ...] = (), **model: bool) -> dict[str, float]:
    """The scores of these labels, for every task, as ranks tell them."""
    told = Scoring(tasks, torch.device("cpu"), SimpleNamespace(**model) if model else None)  # type: ignore[arg-type]
    logits = torch.zeros(len(labels))
    outputs = {task.name: (logits, torch.tensor(labels)) for task in tasks or ONE_BINARY}
    told.add(outputs, None)
    return told.scores(told.state())


def test_labels_that_are_all_the_same_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*windows: dict[str, float], evaluation: dict[str, float] | None = None) -> list[str]:
        display = Display("plain", total_steps=len(windows))
        for step, window in enumerate(windows, 1):
            event = ProgressReport(step=step, rows=1, rows_per_s=1.0, loss=0.1, scores=window)
            display.event(event)
        for _ in range(2 * (evaluation is not None)):
            display.event(Evaluation(step=1, scores=evaluation or {}, rows=2, seconds=0.1))
        return [line for line in capsys.readouterr().out.splitlines() if "labels:" in line]

    mixed, none, all_ = scores([0, 1]), scores([0, 0]), scores([1, 1])
    assert not lines(mixed, mixed, evaluation=mixed) and not lines(none, all_)
    assert not lines(none, none, mixed, none)
    (line,) = lines(none, none, none)
    assert line.startswith("labels: the label is 0 in all rows so far")
    many = {**none, "rows": 60_000}
    (line,) = lines(many, many, many)  # before the end, and once
    assert line.startswith("labels: the label is 0 in all rows so far")
    (line,) = lines(mixed, evaluation=all_)
    assert line.startswith("labels: the label is 1 in all rows of the evaluation: no auc and ne.")
    tasks = (Task(name="buy"), Task(name="stay", kind="regression"))
    (line,) = lines(scores([0, 0], tasks))
    assert "the label of 'buy' is 0 in all" in line and "stay" not in line
    assert not lines(scores([1, 1], gives_probabilities=False))  # in-batch softmax: all are clicks


def test_paths_are_made_absolute_where_they_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunConfig(
        global_batch_size=8, steps=1, storage_path="runs", name="a", resume_from="old/step-00000001"
    )
    monkeypatch.chdir("/")
    assert (
        run.run_path == f"{tmp_path}/runs/a" and run.resume_from == f"{tmp_path}/old/step-00000001"
    )
    remote = RunConfig(global_batch_size=8, steps=1, storage_path="s3://bucket/runs/")
    assert remote.run_path == "s3://bucket/runs/run"
