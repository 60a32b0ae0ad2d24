"""A collection whose table grows, beside one whose rows the ranks read in place."""

from __future__ import annotations

import torch

from rayrec.distributed import DistributedModelParallel, table_configs
from rayrec.layout import DynamicConfig, EmbeddingBagConfig, GrowthConfig, Topology
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import SGD
from rayrec.planner import manual_plan
from rayrec.sparse import KeyedJaggedTensor
from tests.ranks import RankPool


class Two(torch.nn.Module):
    """A collection whose rows ranks read in place, and one whose table grows."""

    def __init__(self) -> None:
        super().__init__()
        rule = DynamicConfig(blocks=2, growth=GrowthConfig(max_num_embeddings=16))
        still = EmbeddingBagConfig(6, 8, "still", feature_names=["s"])
        grows = EmbeddingBagConfig(4, 8, "grows", feature_names=["g"], dynamic=rule)
        self.still = EmbeddingBagCollection(tables=[still], device="meta")
        self.grows = EmbeddingBagCollection(tables=[grows], device="meta")

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.still(kjt).values() * 2 + self.grows(kjt).values()


def beside(rank: int, world_size: int) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Outputs of this rank's half of two bags, with growth between the steps."""
    module = Two()
    plan = manual_plan(table_configs(module), "row_wise", Topology.local(world_size))
    model = DistributedModelParallel(module, plan=plan, sparse_optimizer=SGD(lr=0.1), seed=1)
    outputs, mine = [], range(2) if world_size == 1 else [rank]
    for step in range(4):
        bags = [[3 * step + bag + one for one in range(4)] for bag in mine]
        still = [[bag, step % 6] for bag in mine]
        ids = [one for part in (still, bags) for bag in part for one in bag]
        lengths = torch.tensor([2] * len(mine) + [4] * len(mine))
        output = model(KeyedJaggedTensor(["s", "g"], torch.tensor(ids), lengths=lengths))
        (output * output).sum().mul(world_size).backward()
        outputs.append(output.detach())
        model.grow()
    model.close()
    return outputs, model.plan.rows


def test_a_collection_that_is_read_in_place_stays_beside(ranks: RankPool) -> None:
    wanted, rows = beside(0, 1)
    assert rows == {"still": 6, "grows": 16}
    told = ranks.run(2, beside)
    assert all(one[1] == rows for one in told)
    for step, whole in enumerate(wanted):
        found = torch.cat([outputs[step] for outputs, _ in told])
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
