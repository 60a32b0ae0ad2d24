"""The cluster of a run, without Ray: what it hears while it plans, and whose results it keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec.driver import head as module
from rayrec.driver import ray_cluster
from rayrec.driver.commands import Keep, Plan
from rayrec.driver.head import Head
from rayrec.driver.rank_group import Prepared, RankGroup
from rayrec.driver.ray_cluster import RayCluster
from rayrec.driver.roster import Place, Role, Seat
from rayrec.driver.run import Rules, Run
from rayrec.driver.scaling import ScalingConfig
from rayrec.machine.signals import Signals


def cluster_of(
    prepare: Callable[[RankGroup], Prepared] = lambda group: Prepared(None),
) -> tuple[Run, RayCluster, threading.Event]:
    run, stop = Run.of(Rules(scaling=ScalingConfig())), threading.Event()
    return run, RayCluster(run, prepare, Signals(), stop, print), stop


@pytest.mark.parametrize("waits", [False, True])
def test_a_request_to_stop_ends_a_plan_that_waits_for_the_head(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """A plan that is made meanwhile has ranks that save."""
    head, answers = Head(), threading.Event()
    monkeypatch.setattr(ray_cluster, "head", head)
    monkeypatch.setattr(module, "SOON_S", 0.01)
    monkeypatch.setattr(ray_cluster, "NOTICE_AFTER_S", 0.05 if waits else 30.0)
    timer = threading.Timer(10.0 if waits else 0.2, answers.set)
    timer.start()

    def prepare(group: RankGroup) -> Prepared:
        head.aside(answers.wait)
        return head.answer(lambda: Prepared(None), group.check)

    run, cluster, stop = cluster_of(prepare)
    run.needs = frozenset()
    stop.set()
    cluster.do(Plan(processes=()))
    timer.cancel()
    answers.set()
    head.begin()
    planned = cluster.look().planned
    assert planned is not None and planned.given_up == waits


def test_results_of_ranks_that_paused_stand_until_others_end_their_task() -> None:
    run, cluster, _ = cluster_of()
    task: Any = object()
    run.roster.seats = [Seat(role=Role.RANK, place=Place(0, 0), process=1)]
    processes: Any = {1: SimpleNamespace(result="before")}
    cluster.prepared, cluster.processes = Prepared(task), processes
    before = cluster.prepared, ("before",)
    for said in ("before", "again"):
        # `decide` says so in the look in which it has them kept
        run.has_result, processes[1].result = True, said
        cluster.do(Keep())
    cluster.prepared, processes[1].result = Prepared(task), None
    assert cluster.outcome() == (before[0], ("again",))
    run.has_result, processes[1].result = False, "after"
    assert cluster.outcome() == (cluster.prepared, ("after",))
