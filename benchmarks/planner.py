"""The planner: seconds and predicted step time against the lower bound, every plan of small cases,
and TorchRec's planner.

    python -m benchmarks.planner                  # marks, 56 random table sets, 24 small cases
    python -m benchmarks.planner --peer 20        # and TorchRec's planner on as many sets, where
    torchrec is installed

Predictions are of rayrec's cost model on a preset topology: they compare plans, and say nothing of
a real machine. Both planners' plans are priced by that one model, which is not TorchRec's; so the
comparison says which plan is better if the model is right.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import asdict, dataclass
from statistics import median

from benchmarks import report
from benchmarks.planner_sets import Problem, all_problems, make_problem, small_problems
from rayrec.layout import Layout, Replicated, TableLayout
from rayrec.layout.presets import preset_topology
from rayrec.planner import polish, search
from rayrec.planner.bounds import lower_bound, simple_bound
from rayrec.planner.costs import CostModel
from rayrec.planner.planner import plan_request

# tables, hosts of 8, seconds allowed
MARKS = ((26, 1, 0.1), (500, 4, 2.0), (1000, 16, 3.0), (1000, 128, 30.0))


@dataclass(frozen=True, slots=True)
class Outcome:
    """One problem planned.

    Attributes:
        cpu_s: of planning. step_ms: predicted, fixed latency left out.
        over_simple: step / max(cheapest total work / ranks, largest unavoidable piece). over_bound:
            step / `bounds.lower_bound`, which also knows that splitting adds work.
        over_long: the same search with a much finer ladder as the divisor; None where the bound is
            near enough.
    """

    name: str
    cpu_s: float
    step_ms: float
    over_simple: float
    over_bound: float
    over_long: float | None = None


def _seconds(problem: Problem) -> float:
    plan = plan_request(problem.request)
    assert plan.estimates is not None
    return plan.estimates.step_s - CostModel(problem.request.topology).fixed_cost().total_s


def run_problem(problem: Problem, long: bool = False) -> Outcome:
    """Plan once and compare."""
    before = time.process_time()
    step_s = _seconds(problem)
    cpu_s = time.process_time() - before
    items = problem.request.items()
    simple, over = step_s / simple_bound(items), step_s / lower_bound(items)
    over_long = step_s / min(step_s, _long_search(problem)) if long and simple > 1.1 else None
    return Outcome(problem.name, cpu_s, step_s * 1e3, simple, over, over_long)


def _long_search(problem: Problem, seconds: float = 60.0) -> float:
    """What the same search finds with a finer ladder, all of it polished, until it ends or the time
    is up.
    """
    kept = search.CEILINGS, search.POLISHED, polish.PATIENCE
    best, start = float("inf"), time.process_time()
    search.POLISHED, polish.PATIENCE = 100, 600
    try:
        for offset in range(12):
            search.CEILINGS = tuple(1.0 + offset * 0.002 + i * 0.025 for i in range(60))
            best = min(best, _seconds(problem))
            if time.process_time() - start > seconds:
                break
    finally:
        search.CEILINGS, search.POLISHED, polish.PATIENCE = kept
    return best


def best_of_all(problem: Problem) -> float:
    """Predicted seconds of the best plan of even cuts that fits the memory, by trying every option
    on every set of ranks.
    """
    items, world = problem.request.items(), problem.ranks
    limit = problem.request.topology.memory_bytes[0]
    every = []
    for item in items:
        ways = set()
        for option in item.options:
            (seconds,) = option.seconds.values()
            for site in option.sites:
                for ranks in itertools.combinations(site, option.num_ranks):
                    loads, used = [0.0] * world, [option.home_bytes] * world
                    for rank, load, num_bytes in zip(ranks, seconds, option.num_bytes, strict=True):
                        loads[rank], used[rank] = load, used[rank] + num_bytes
                    ways.add((*loads, option.home_s, *used))
        every.append(sorted(ways))
    best = float("inf")
    for choice in itertools.product(*every):
        sums = [sum(values) for values in zip(*choice, strict=True)]
        if max(sums[world + 1 :]) <= limit:
            best = min(best, max(sums[:world]) + sums[world])
    return best


def price_layouts(problem: Problem, layouts: dict[str, Layout]) -> float:
    """Predicted seconds of a plan given as layouts, fixed latency left out."""
    request, costs = problem.request, CostModel(problem.request.topology)
    loads, home_s = [0.0] * problem.ranks, 0.0
    for table, work in zip(request.tables, request.works(), strict=True):
        home_s += costs.layout_home_cost(work, layouts[table.name]).total_s
        for rank, price in costs.price(work, layouts[table.name]).items():
            loads[rank] += price.total_s
    return max(loads) + home_s


def torchrec_plan(problem: Problem) -> tuple[float, dict[str, Layout]]:
    """CPU seconds and layouts of TorchRec's planner, with device-resident kernels, as rayrec has
    them.
    """
    import torch
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    request = problem.request
    configs = [
        EmbeddingBagConfig(
            name=t.name,
            embedding_dim=t.embedding_dim,
            num_embeddings=t.num_embeddings,
            feature_names=list(t.feature_names),
        )
        for t in request.tables
    ]
    limits = {
        name: ParameterConstraints(
            pooling_factors=[own.pooling_factor], compute_kernels=["fused", "dense"]
        )
        for name, own in request.constraints.items()
    }
    world, host = problem.ranks, len(request.topology.hosts[0])
    topology = Topology(
        world_size=world,
        compute_device="cuda",
        local_world_size=host,
        hbm_cap=80 * 10**9,
        ddr_cap=10**12,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=request.batch_size, constraints=limits, debug=False
    )
    found: list[object] = []
    planner._callbacks = [lambda options: found.append(options) or options]
    before = time.process_time()
    planner.plan(
        EmbeddingBagCollection(tables=configs, device=torch.device("meta")),
        [EmbeddingBagCollectionSharder()],
    )
    cpu_s = time.process_time() - before
    layouts: dict[str, Layout] = {}
    for option in found[-1]:  # type: ignore[attr-defined]
        rows, dim = option.tensor.shape
        if option.sharding_type == "data_parallel":
            layouts[option.name] = Replicated(rows, dim, tuple(range(world)))
            continue
        cells = {
            (s.offset[0], s.offset[1]): s.rank for s in option.shards if s.size[0] and s.size[1]
        }
        tops, lefts = sorted({top for top, _ in cells}), sorted({left for _, left in cells})
        owners = tuple(tuple(cells[top, left] for left in lefts) for top in tops)
        layouts[option.name] = TableLayout((*tops, rows), (*lefts, dim), owners)
    return cpu_s, layouts


def main() -> None:
    """Print the tables and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=14, help="table sets per family (%(default)s)")
    parser.add_argument(
        "--small",
        type=int,
        default=24,
        help="small cases that are also solved exactly (%(default)s)",
    )
    parser.add_argument(
        "--peer",
        type=int,
        default=0,
        help="table sets that TorchRec's planner also plans (%(default)s)",
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="where the bound is loose, search again for up to 60 s (slow)",
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()

    lines = [
        "## Marks",
        "",
        "| tables x ranks | CPU s | allowed | step / lower bound |",
        "|---|---|---|---|",
    ]
    marks = []
    for tables, hosts, allowed in MARKS:
        family = "criteo" if tables == 26 else "production"
        problem = make_problem(family, 0, preset_topology("a100-80", hosts=hosts), count=tables)
        runs = [run_problem(problem) for _ in range(3)]
        times = sorted(run.cpu_s for run in runs)
        marks.append(asdict(runs[0]) | {"cpu_s": times, "allowed_s": allowed})
        spread = f"{times[1]:.3f} ({times[0]:.3f} to {times[2]:.3f})"
        lines.append(
            f"| {problem.tables} x {problem.ranks} | {spread} | {allowed} | "
            f"{runs[0].over_bound:.3f} |"
        )

    outcomes = [run_problem(problem, options.long) for problem in all_problems(options.seeds)]
    near = sum(outcome.over_bound <= 1.1 for outcome in outcomes)
    possible = sum(outcome.over_simple / outcome.over_bound <= 1.1 for outcome in outcomes)
    simple = sum(outcome.over_simple <= 1.1 for outcome in outcomes)
    lines += ["", f"## {len(outcomes)} random table sets", ""]
    lines += [
        f"Within 1.10x of the lower bound: {near} of {len(outcomes)}; of the simple bound: "
        f"{simple}, where {possible} can be."
    ]
    lines += [
        "",
        "| set | CPU s | step ms | step / simple bound | step / bound | step / long search |",
        "|---|---|---|---|---|---|",
    ]
    for o in outcomes:
        long = f"{o.over_long:.3f}" if o.over_long else "-"
        lines.append(
            f"| {o.name} | {o.cpu_s:.2f} | {o.step_ms:.3f} | {o.over_simple:.3f} | "
            f"{o.over_bound:.3f} | {long} |"
        )

    ratios = []
    for problem in small_problems(options.small):
        ratios.append(_seconds(problem) / best_of_all(problem))
    lines += ["", f"## {len(ratios)} small cases (4 tables, 2 or 3 ranks) against every plan", ""]
    lines.append(
        f"Median {median(ratios):.4f}, worst {max(ratios):.4f} of the best plan of even cuts."
    )

    peers = []
    if options.peer:
        lines += ["", "## TorchRec's planner, priced by the same model", ""]
        lines += ["| set | TorchRec CPU s | CPU s | TorchRec step / ours |", "|---|---|---|---|"]
        for seed in range(options.peer):
            family = ("criteo", "few_huge", "many_tiny", "production")[seed % 4]
            count = None if family in ("criteo", "few_huge") else 40
            problem = make_problem(
                family, 100 + seed, preset_topology("a100-80", hosts=1 + seed // 4 % 4), count=count
            )
            outcome = run_problem(problem)
            try:
                cpu_s, layouts = torchrec_plan(problem)
            except Exception as error:  # the peer's own refusal is a result
                lines.append(
                    f"| {problem.name} | {type(error).__name__} | {outcome.cpu_s:.2f} | - |"
                )
                continue
            ratio = price_layouts(problem, layouts) * 1e3 / outcome.step_ms
            peers.append(
                {"name": problem.name, "peer_cpu_s": cpu_s, "cpu_s": outcome.cpu_s, "ratio": ratio}
            )
            lines.append(f"| {problem.name} | {cpu_s:.2f} | {outcome.cpu_s:.2f} | {ratio:.3f} |")
        if peers:
            found = [float(p["ratio"]) for p in peers]
            lines += [
                "",
                f"TorchRec's plan is {median(found):.2f}x ours in the median, {min(found):.3f}x at "
                "the least.",
            ]
    text = "\n".join(lines)
    print(text)
    if options.write:
        results = {
            "marks": marks,
            "sets": [asdict(o) for o in outcomes],
            "small": ratios,
            "peers": peers,
        }
        print(report.write("planner", results, text))


if __name__ == "__main__":
    main()
