"""Room for the ranks: a placement group with one bundle for each, on a cluster that can hold it.

A placement group is all or nothing, so ranks never start half. What can never fit is refused at
once with the numbers; what may fit later (an autoscaling cluster) is waited for, with a bound, and
Ray's own word for its state is in the error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from rayrec.driver.cluster import Cluster
from rayrec.driver.facts import resources
from rayrec.driver.head import head
from rayrec.driver.scaling import PLACEMENT_TIMEOUT_S, ScalingConfig
from rayrec.errors import ClusterError, ConfigError, RayrecError

NOTICE_AFTER_S = 3.0
WAIT_TURN_S = 0.25
# nodes that an error names
MOST_LISTED = 8


def shortage(scaling: ScalingConfig, total: Mapping[str, float], ranks: int | None = None) -> str:
    """Explain why a cluster with `total` resources cannot hold the ranks, or return "" if it can.

    Args:
        ranks: number of ranks; None means the smallest number that a run may have.
    """
    ranks = scaling.least if ranks is None else ranks
    for resource, each in scaling.bundle.items():
        have, need = total.get(resource, 0.0), each * ranks
        # Sums of fractions of a CPU may be off in their last digits.
        if need > have + 1e-6:
            fit = int((have + 1e-6) / each)
            remedy = f"Use num_workers={fit}" if fit else f"Use machines with {resource}"
            if resource == "CPU":
                cpus = _fraction(have / ranks)
                remedy += f", cpus_per_worker={cpus}, or a larger cluster."
            elif resource == "GPU":
                remedy += ", use_gpu=False, or a larger cluster."
            else:
                remedy += f" or start nodes with --resources '{{\"{resource}\": ...}}'."
            return (
                f"{ranks} ranks with {each:g} {resource} each need {need:g} "
                f"{resource}, the cluster has {have:g}. {remedy}"
            )
    return ""


@contextmanager
def placed(
    scaling: ScalingConfig,
    cluster: Cluster,
    notice: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Any]:
    """Hold a placement group with a bundle per rank inside the block; it is removed at the end.

    It is for the smallest number of ranks that a run may have.

    Args:
        notice: told once when the cluster has no room yet.
        check: called several times a second while waiting; its error ends the wait.
    Raises:
        ConfigError: the ranks do not fit, or not within the time that `scaling` allows; says what
            is needed and what there is.
    """
    from ray.util.placement_group import placement_group

    refuse_too_much(scaling, cluster, check)
    bundles, strategy = [dict(scaling.bundle)] * scaling.least, scaling.placement_strategy
    made: list[Any] = []
    try:
        head.answer(lambda: made.append(placement_group(bundles, strategy=strategy)), check)
        wait_for_room(scaling, cluster, made[0], notice, check)
        yield made[0]
    finally:
        give_back(made)
        head.settle()


def give_back(groups: Sequence[Any]) -> None:
    """Have placement groups removed, those included that the head has yet to be asked for."""
    from ray.util.placement_group import remove_placement_group

    def remove() -> None:
        for group in groups:
            remove_placement_group(group)

    head.aside(remove)


def wait_for_room(
    scaling: ScalingConfig,
    cluster: Cluster,
    group: Any,
    notice: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every bundle of a placement group has its place; see `placed`.

    Ray finds new places by itself for the bundles of a node that is gone.

    Raises:
        ConfigError: the errors of `placed`.
    """
    missing = refuse_too_much(scaling, cluster, check)
    wait_s = longest_wait(scaling)
    if comes_in_time(group, min(NOTICE_AFTER_S, wait_s), check):
        return
    # a lost node takes a moment to leave the sum
    told = head.answer(resources, check)
    what = missing or shortage(scaling, told.total) or crowding(scaling, told.free)
    what = what or "Ray has not given it yet"
    notice(f"waiting for room: {what} (up to {wait_s:.0f} s)")
    if not comes_in_time(group, wait_s - NOTICE_AFTER_S, check):
        raise refusal(scaling, group, wait_s, check)


def total(check: Callable[[], None] = lambda: None) -> Mapping[str, float]:
    """Return the total resources of the cluster, free or not; `check` is that of `placed`."""
    return head.answer(resources, check).total


def longest_wait(scaling: ScalingConfig) -> float:
    """Seconds that a run waits for room."""
    wait_s = scaling.placement_timeout_s
    return PLACEMENT_TIMEOUT_S if wait_s is None else wait_s


def refuse_too_much(
    scaling: ScalingConfig, cluster: Cluster, check: Callable[[], None] = lambda: None
) -> str:
    """Refuse ranks that can never have room; return what a cluster that may grow lacks, or ""."""
    # The total resources are compared, not the free ones: other work may end.
    missing = shortage(scaling, total(check))
    if missing and cluster.fixed and scaling.placement_timeout_s is None:
        hint = (
            " The cluster does not grow by itself; to wait for nodes that you add, say "
            "placement_timeout_s (--placement-timeout)."
        )
        raise ConfigError(missing if cluster.private else missing + hint)
    return missing


def comes_in_time(group: Any, timeout_s: float, check: Callable[[], None]) -> bool:
    """Wait for a placement group in short turns; return True once it is placed.

    Args:
        check: called several times a second; its error ends the wait.
    """
    from ray.util.placement_group import placement_group_table

    deadline = time.monotonic() + timeout_s
    while True:
        check()
        if head.answer(lambda: placement_group_table(group), check).get("state") == "CREATED":
            return True
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(WAIT_TURN_S, left_s))


def refusal(
    scaling: ScalingConfig, group: Any, waited_s: float, check: Callable[[], None] = lambda: None
) -> RayrecError:
    """Return the error for ranks that were not placed, with the state of their placement group."""
    from ray.util.placement_group import placement_group_table

    table = head.answer(lambda: placement_group_table(group), check)
    state = table.get("stats", {}).get("scheduling_state", table.get("state", "unknown"))
    told = head.answer(resources, check)
    why = shortage(scaling, told.total) or crowding(scaling, told.free)
    said = (
        f"no room for {scaling.least} ranks of {scaling.bundle} "
        f"({scaling.placement_strategy}) after {waited_s:.0f} s; Ray says {state}. "
    )
    if why:
        return ConfigError(said + why)
    return ClusterError(
        f"{said}The nodes have room for all of them, so the head of the cluster is slow, or the "
        "room came just now. Start the run again."
    )


def crowding(
    scaling: ScalingConfig, nodes: Sequence[Mapping[str, float]], ranks: int | None = None
) -> str:
    """Explain why nodes with these free resources have no room for the ranks, or return "".

    Args:
        ranks: number of ranks; None means the smallest number that a run may have.
    """
    least = scaling.least if ranks is None else ranks
    strategy, bundle = scaling.placement_strategy, scaling.bundle
    # sums of fractions of a CPU may be off in their last digits
    fits = sorted(
        (int(min((node.get(name, 0.0) + 1e-6) / each for name, each in bundle.items())), i)
        for i, node in enumerate(nodes)
    )[::-1]
    room = sum(fit for fit, _ in fits)
    strict = ""
    if strategy == "STRICT_PACK" and fits:
        strict, possible = "on one node", fits[0][0]
    elif strategy == "STRICT_SPREAD":
        strict, possible = "on nodes of their own", sum(fit > 0 for fit, _ in fits)
    if strict and possible < least <= room:
        return (
            f"{room} ranks have room now, but {possible} have it {strict}, as "
            f"{strategy} wants it. Choose another placement_strategy, or end what holds the rest."
        )
    if room >= least:
        return ""
    amounts = (
        " and ".join(f"{nodes[i].get(name, 0.0):g} {name}" for name in bundle) for _, i in fits
    )
    listed = ", ".join(islice(amounts, MOST_LISTED)) + (", ..." if len(fits) > MOST_LISTED else "")
    return (
        f"{room} of {least} ranks have room now; free by node: {listed or 'nothing'}. End what "
        "holds the rest, or give fewer or smaller ranks (num_workers, cpus_per_worker)."
    )


def _fraction(value: float) -> str:
    # rounded down, so that as many fit
    return f"{int(value * 100) / 100:g}"
