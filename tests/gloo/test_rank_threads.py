"""Real ranks with two threads each train as ranks with one, bit for bit, and their dense layers
keep both threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.kernels import parts
from rayrec.layout import EmbeddingBagConfig, row_wise, table_wise
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor
from tests.ranks import RankPool
from tests.worlds import plan_for

ROWS, BAGS, IDS, DIM = (3000, 50, 400), 256, 6, 16


def train(rank: int, world_size: int, threads: int) -> tuple[list[Tensor], list[Tensor], int]:
    """Outputs by step, this rank's rows and sums in the end, and torch's threads after the last
    step.
    """
    torch.get_num_threads()  # a thread that is new to torch takes over the number that was set last
    torch.set_num_threads(threads)
    tables = [
        EmbeddingBagConfig(rows, DIM, name=f"t{i}", feature_names=[f"f{i}"])
        for i, rows in enumerate(ROWS)
    ]
    layouts = [
        row_wise(tables[0], range(world_size)),
        table_wise(tables[1], 1),
        table_wise(tables[2], 1),
    ]
    plan = plan_for(world_size, {t.name: layout for t, layout in zip(tables, layouts, strict=True)})
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables, device="meta"), plan=plan, seed=1
    )
    assert BAGS * IDS * DIM * world_size > parts.LEAST_VALUES, "too little work to be cut"
    outputs = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.cat([torch.randint(rows, (BAGS * IDS,), generator=generator) for rows in ROWS])
        kjt = KeyedJaggedTensor(
            [f"f{i}" for i in range(len(ROWS))], ids, lengths=torch.full((len(ROWS) * BAGS,), IDS)
        )
        values = model(kjt).values()
        values.backward(torch.randn(values.shape, generator=generator))
        outputs.append(values.detach().clone())
    kept = [tensor.clone() for state in model.shard_states() for tensor in state.tensors().values()]
    left = torch.get_num_threads()
    torch.set_num_threads(1)
    return outputs, kept, left


def test_ranks_of_two_threads_are_ranks_of_one_bit_for_bit(ranks: RankPool) -> None:
    one, two = ranks.run(2, train, 1), ranks.run(2, train, 2)
    for (outputs, kept, threads), (their_outputs, their_kept, their_threads) in zip(
        one, two, strict=True
    ):
        assert (threads, their_threads) == (1, 2)
        assert all(
            torch.equal(a, b)
            for a, b in zip(outputs + kept, their_outputs + their_kept, strict=True)
        )
