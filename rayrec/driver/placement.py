"""Room for the ranks in words: what a cluster lacks, and what is said and raised about it.

What can never fit is refused at once with the numbers; what may fit later (an autoscaling cluster)
is waited for, with a bound, and Ray's own word for its state is in the error. No Ray and no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rayrec.driver.cluster import Cluster
from rayrec.driver.scaling import ScalingConfig
from rayrec.driver.views import Resources
from rayrec.errors import ClusterError, ConfigError, RayrecError

NOTICE_AFTER_S = 3.0
# nodes that an error names
MOST_LISTED = 8


def shortage(scaling: ScalingConfig, total: Mapping[str, float], ranks: int) -> str:
    """Explain why a cluster with `total` resources cannot hold so many ranks, or return ""."""
    for resource, each in scaling.bundle.items():
        have, need = total.get(resource, 0.0), each * ranks
        # Sums of fractions of a CPU may be off in their last digits.
        if need > have + 1e-6:
            fit = int((have + 1e-6) / each)
            remedy = f"Use num_workers={fit}" if fit else f"Use machines with {resource}"
            if resource == "CPU":
                # rounded down, so that as many fit
                cpus = int(have / ranks * 100) / 100
                remedy += f", cpus_per_worker={cpus:g}, or a larger cluster."
            elif resource == "GPU":
                remedy += ", use_gpu=False, or a larger cluster."
            else:
                remedy += f" or start nodes with --resources '{{\"{resource}\": ...}}'."
            return (
                f"{ranks} ranks with {each:g} {resource} each need {need:g} "
                f"{resource}, the cluster has {have:g}. {remedy}"
            )
    return ""


def too_much(scaling: ScalingConfig, total: Mapping[str, float], cluster: Cluster) -> str:
    """Explain why ranks can never have room on a cluster, or return "" if they may."""
    # The total resources are compared, not the free ones: other work may end.
    missing = shortage(scaling, total, scaling.least)
    if not missing or not cluster.fixed or scaling.placement_timeout_s is not None:
        return ""
    hint = (
        " The cluster does not grow by itself; to wait for nodes that you add, say "
        "placement_timeout_s."
    )
    return missing if cluster.private else missing + hint


def why_waiting(scaling: ScalingConfig, told: Resources) -> str:
    """Explain what the smallest number of ranks waits for, or return "" if the nodes have room."""
    least = scaling.least
    return shortage(scaling, told.total, least) or crowding(scaling, told.free, least)


def refusal(scaling: ScalingConfig, state: str, told: Resources, waited_s: float) -> RayrecError:
    """Return the error for ranks that were not placed in time.

    Args:
        state: Ray's word for the state of their placement group.
        told: resources of the cluster.
        waited_s: seconds that they have waited.
    """
    why = why_waiting(scaling, told)
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


def crowding(scaling: ScalingConfig, nodes: Sequence[Mapping[str, float]], ranks: int) -> str:
    """Explain why nodes with these free resources have no room for so many ranks, or return ""."""
    strategy, bundle = scaling.placement_strategy, scaling.bundle

    def fitting(node: Mapping[str, float]) -> int:
        """Return the number of ranks that fit the node."""
        # sums of fractions of a CPU may be off in their last digits
        return int(min((node.get(name, 0.0) + 1e-6) / each for name, each in bundle.items()))

    fits = sorted(((fitting(node), i) for i, node in enumerate(nodes)), reverse=True)
    room = sum(fit for fit, _ in fits)
    strict = ""
    if strategy == "STRICT_PACK" and fits:
        strict, possible = "on one node", fits[0][0]
    elif strategy == "STRICT_SPREAD":
        strict, possible = "on nodes of their own", sum(fit > 0 for fit, _ in fits)
    if strict and possible < ranks <= room:
        return (
            f"{room} ranks have room now, but {possible} have it {strict}, as "
            f"{strategy} wants it. Choose another placement_strategy, or end what holds the rest."
        )
    if room >= ranks:
        return ""
    amounts = [amounts_of(bundle, nodes[i], " and ") for _, i in fits[:MOST_LISTED]]
    listed = ", ".join(amounts) + (", ..." if len(fits) > MOST_LISTED else "")
    return (
        f"{room} of {ranks} ranks have room now; free by node: {listed or 'nothing'}. End what "
        "holds the rest, or give fewer or smaller ranks (num_workers, cpus_per_worker)."
    )


def amounts_of(names: Iterable[str], amounts: Mapping[str, float], between: str = ", ") -> str:
    """Return amounts of resources as words, such as "2 CPU, 1 GPU"."""
    return between.join(f"{amounts.get(name, 0.0):g} {name}" for name in names)
