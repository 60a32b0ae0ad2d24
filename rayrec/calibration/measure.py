"""Measures the ranks of a cluster, and fits the cost model's constants to what was measured.

Every rank runs some real sharded steps and exchanges. All ranks make the same call and get the same
answer: `topology = measure_topology(exchange, topology, device)`.

The steps are random: tables of all sizes and widths, some or many ids per bag, every sharding kind,
so that no two constants always occur together. Waiting for other ranks is taken out by the step's
own timer; latency and bandwidth of the exchange are measured apart, inside the host and across.
Takes about ten seconds, and the memory of one of the random models at a time. Rates hold for the
optimizer and the element type that were measured (row-wise Adagrad, float32), and for as many
threads and ranks per host as took part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, thread_time

import torch
from torch import Tensor

from rayrec.comm.exchange import Exchange
from rayrec.distributed.program.engine_options import EngineOptions
from rayrec.distributed.sharding import shard_embeddings
from rayrec.layout import EmbeddingBagConfig, Layout, ShardingPlan, TablePlacement, Topology
from rayrec.layout.kinds import column_wise, data_parallel, row_wise, table_wise
from rayrec.layout.rates import PARTS
from rayrec.modules import EmbeddingBagCollection
from rayrec.observe.timer import StepTimer
from rayrec.optim import RowWiseAdagrad
from rayrec.planner import ParameterConstraints
from rayrec.planner.amounts import StepAmounts
from rayrec.planner.costs import CostModel
from rayrec.planner.fit_rates import Links, StepSample, fit_topology
from rayrec.planner.request import PlanRequest
from rayrec.sparse import KeyedJaggedTensor

DESIGNS = 32
WARMUP, STEPS = 3, 13
MOST_IDS = 250_000  # per rank and step
MOST_VALUES = 6_000_000  # values of pooled rows per rank and step
GATHER_ROWS, GATHER_WIDTH = 1 << 18, 64
LINK_BYTES = (1 << 12, 1 << 22)
LINK_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Design:
    """A random model, plan and batch size."""

    tables: tuple[EmbeddingBagConfig, ...]
    pooling: tuple[float, ...]
    layouts: tuple[Layout, ...]
    batch_size: int

    @property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """Constraints of the design for the planner: the pooling factor of each table."""
        pairs = zip(self.tables, self.pooling, strict=True)
        return {t.name: ParameterConstraints(pooling_factor=p) for t, p in pairs}

    def plan(self, topology: Topology) -> ShardingPlan:
        """Return the sharding plan of the design, for the ranks of `topology`."""
        pairs = zip(self.tables, self.layouts, strict=True)
        placements = {table.name: TablePlacement(layout) for table, layout in pairs}
        return ShardingPlan(world_size=topology.world_size, tables=placements, hosts=topology.hosts)


def random_design(seed: int, world_size: int) -> Design:
    """Draw a design, the same on every rank."""
    rng = random.Random(seed)
    count, batch = round(2 ** rng.uniform(1, 5.7)), 2 ** rng.randint(7, 11)
    mean_dim, mean_pooling = 2 ** rng.uniform(3, 7), 2 ** rng.uniform(0, 4.5)
    kinds = rng.choice(("tw", "rw", "cw", "dp tw", "tw rw cw", "tw rw cw dp")).split()
    make: dict[str, Callable[[EmbeddingBagConfig, Sequence[int]], Layout]]
    make = {"rw": row_wise, "cw": column_wise, "dp": data_parallel}
    tables, pooling, layouts = [], [], list[Layout]()
    for i in range(count):
        rows = round(10 ** rng.uniform(1.5, 5.3))
        dim = max(8, min(128, 4 * round(mean_dim * 2 ** rng.uniform(-1, 1) / 4)))
        table = EmbeddingBagConfig(rows, dim, f"t{i}", feature_names=[f"f{i}"])
        kind, ranks = rng.choice(kinds), range(world_size)
        tables.append(table)
        pooling.append(max(1.0, mean_pooling * 2 ** rng.uniform(-1, 1)))
        if kind == "tw" or (kind == "dp" and rows > 5000):
            layouts.append(table_wise(table, rng.randrange(world_size)))
        else:
            layouts.append(make[kind](table, ranks))
    width = sum(table.embedding_dim for table in tables)
    heavy = max(batch * sum(pooling) / MOST_IDS, batch * width / MOST_VALUES, 1.0)
    return Design(tuple(tables), tuple(pooling), tuple(layouts), max(16, round(batch / heavy)))


def random_batch(design: Design, seed: int, device: torch.device) -> KeyedJaggedTensor:
    """Draw a local batch of uniform ids, whose lengths vary around the design's means."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [_lengths(pooling, design.batch_size, generator) for pooling in design.pooling]
    ids = [
        torch.randint(t.num_embeddings, (int(n.sum()),), generator=generator)
        for t, n in zip(design.tables, lengths, strict=True)
    ]
    keys = [t.feature_names[0] for t in design.tables]
    return KeyedJaggedTensor(keys, torch.cat(ids).to(device), lengths=torch.cat(lengths).to(device))


def _lengths(pooling: float, bags: int, generator: torch.Generator) -> Tensor:
    """Draw lengths from 0 to twice the mean; always 1 for a mean of 1."""
    if pooling <= 1:
        return torch.ones(bags, dtype=torch.int32)
    return (torch.rand(bags, generator=generator) * (2 * pooling) + 0.5).to(torch.int32)


def plan_amounts(design: Design, topology: Topology, share_tables: bool) -> list[StepAmounts]:
    """Return the cost model's amounts of a step, by rank; `share_tables` has rows read in place."""
    costs = CostModel(topology)
    ranks = [StepAmounts()] * topology.world_size
    request = PlanRequest(
        tables=design.tables,
        topology=topology,
        batch_size=design.batch_size,
        constraints=design.constraints,
        share_tables=share_tables,
    )
    for work, layout in zip(request.works(), design.layouts, strict=True):
        home, owners = costs.layout_home_amounts(work, layout), costs.amounts(work, layout)
        ranks = [r.plus(home).plus(owners.get(i, StepAmounts())) for i, r in enumerate(ranks)]
    return ranks


def measure_step(
    design: Design, exchange: Exchange, topology: Topology, device: torch.device, share_tables: bool
) -> tuple[list[float], bool]:
    """Measure the seconds of every part and of the whole step on this rank, without waits.

    They are the lower quartile of some steps. Of a rank that works in one thread, only the seconds
    in which this thread worked count, so that others may use the machine meanwhile.

    Returns:
        the seconds, those of the step last; and whether rows were read in place, as they may be
        where `share_tables` asks for it.
    """
    collection = EmbeddingBagCollection(list(design.tables), device=torch.device("meta"))
    options = EngineOptions(share_tables=share_tables)
    module, engine = shard_embeddings(
        collection, design.plan(topology), exchange, RowWiseAdagrad(), device, 0, options
    )
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    timer = engine.runner.timer = StepTimer(clock)
    batches = [random_batch(design, 1000 * i + exchange.rank, device) for i in range(3)]
    gradient = torch.ones(
        design.batch_size, sum(t.embedding_dim for t in design.tables), device=device
    )
    steps = []
    for i in range(WARMUP + STEPS):
        timer.reset()
        start = clock()
        module(batches[i % len(batches)]).values().backward(gradient)
        if device.type == "cuda":
            torch.cuda.synchronize()
        took, parts = clock() - start, timer.read()
        # without waits: what other ranks take is fitted by their own samples
        worked = [parts[part].seconds - parts[part].waited for part in PARTS]
        steps.append([*worked, took - sum(part.waited for part in parts.values())])
    return [
        quantiles(values, n=4)[0] for values in zip(*steps[WARMUP:], strict=True)
    ], engine.deployed.shares_tables


def measure_topology(
    exchange: Exchange,
    topology: Topology,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    designs: int = DESIGNS,
) -> Topology:
    """Return the topology with measured constants; all ranks of the exchange call it together.

    Args:
        exchange: the ranks; nobody else uses it meanwhile.
        topology: hosts and memory of these ranks; its constants are replaced.
        say: receives a line about each measurement.
        designs: random plans to measure; fewer are quicker and less true.
    Raises:
        CommError: a peer is gone.
    """
    device = torch.device(device)
    say("random rows and links")
    links = _measure_links(exchange, topology, device)
    samples = []
    for seed in range(designs):
        design = random_design(seed, exchange.world_size)
        say(
            f"random plan {seed + 1} of {designs}: {len(design.tables)} tables, "
            f"{design.batch_size} rows per rank"
        )
        # Half of the plans read rows in place where they can, so that both ways are fitted.
        seconds, shared = measure_step(
            design, exchange, topology, device, share_tables=seed % 2 == 0
        )
        everyone = _share(exchange, seconds, device)
        # One sample per rank: seconds of the parts, with those of the whole step last.
        amounts = plan_amounts(design, topology, shared)
        samples += [
            StepSample(a, tuple(values[:-1]), values[-1])
            for a, values in zip(amounts, everyone, strict=True)
        ]
    return fit_topology(topology, links, samples)


def _share(exchange: Exchange, values: Sequence[float], device: torch.device) -> list[list[float]]:
    """Gather the values of every rank, on every rank."""
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    parts = exchange.all_gather(mine, [len(values)] * exchange.world_size).wait()
    return [part.tolist() for part in parts]


def _measure_links(exchange: Exchange, topology: Topology, device: torch.device) -> Links:
    host = set(topology.hosts[topology.host_of[exchange.rank]])
    near = [r for r in range(exchange.world_size) if r in host and r != exchange.rank]
    far = [r for r in range(exchange.world_size) if r not in host]
    small, _ = LINK_BYTES
    latency = max(_seconds(exchange, peers, small // 4, device) for peers in (near, far))
    ever_near, ever_far = any(len(h) > 1 for h in topology.hosts), len(topology.hosts) > 1
    # all ranks measure what any of them has, also those without such peers
    inside = _slope(exchange, near, device) if ever_near else None
    across = _slope(exchange, far, device) if ever_far else None
    bandwidth = _random_row_bandwidth(exchange, device)
    return Links(bandwidth, latency if exchange.world_size > 1 else 0.0, inside, across)


def _slope(exchange: Exchange, peers: Sequence[int], device: torch.device) -> float:
    """Measure the seconds per byte received from the peers, of the slowest rank."""
    small, large = ((n, _seconds(exchange, peers, n // 4, device)) for n in LINK_BYTES)
    most = max(int(v) for (v,) in _share(exchange, [len(peers)], device))
    return max(0.0, (large[1] - small[1]) / ((large[0] - small[0]) * most))


def _seconds(exchange: Exchange, peers: Sequence[int], count: int, device: torch.device) -> float:
    """Measure the seconds of an exchange of `count` float32 with each peer, by the quickest rank.

    The median of repeats; the time begins when the message is packed.
    """
    like = torch.zeros(1, device=device)
    splits = [count if rank in peers else 0 for rank in range(exchange.world_size)]
    took = []
    for _ in range(LINK_REPEATS):
        exchange.all_gather(like, [1] * exchange.world_size).wait()
        send = exchange.buffer(sum(splits), like).fill_(1.0)
        start = perf_counter()
        exchange.views(send, splits, splits).wait()
        seconds = perf_counter() - start
        took.append(min(value for (value,) in _share(exchange, [seconds], device)))
    return median(took)


def _random_row_bandwidth(exchange: Exchange, device: torch.device) -> float:
    """Measure the bytes/s of reading random rows on all ranks at once, and return the mean."""
    table = torch.ones(GATHER_ROWS, GATHER_WIDTH, device=device)
    rows = torch.randint(GATHER_ROWS, (GATHER_ROWS // 4,), device=device)
    out = torch.empty(len(rows), GATHER_WIDTH, device=device)
    took = []
    for _ in range(7):
        exchange.all_gather(torch.zeros(1, device=device), [1] * exchange.world_size).wait()
        start = perf_counter()
        _gather(table, rows, out)
        took.append(perf_counter() - start)
    shared = _share(exchange, [len(rows) * GATHER_WIDTH * 4 / median(took)], device)
    return sum(value for (value,) in shared) / len(shared)


def _gather(table: Tensor, rows: Tensor, out: Tensor) -> None:
    torch.index_select(table, 0, rows, out=out)
    if table.device.type == "cuda":
        torch.cuda.synchronize()
