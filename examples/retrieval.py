"""Two-tower retrieval: find items for users.

A user and an item become vectors whose dot product is the score. Each row of a batch is a pair that
belongs together, and the items of the other rows are its negatives. Then all items are ranked for
every user. The pairs are made: each user likes the items of one of 20 topics.
"""

import torch

from rayrec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    Topology,
)
from rayrec.data import Batch
from rayrec.metrics import RankingMetrics
from rayrec.models import TwoTower, TwoTowerTrain

USERS, ITEMS, TOPICS, B = 2_000, 1_000, 20, 512


def ids(**features):  # one id a row for each feature
    values = torch.cat(list(features.values()))
    return KeyedJaggedTensor(list(features), values, lengths=torch.ones_like(values))


tables = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=[name])
    for name, rows in (("user", USERS), ("item", ITEMS))
]
rows = EmbeddingBagCollection(tables, device="meta")
towers = TwoTower(rows, [32, 16], query_features=["user"], candidate_features=["item"])
module = TwoTowerTrain(towers, temperature=0.1, candidate_id="item")
plan = EmbeddingShardingPlanner(Topology.local(1), batch_size=B).plan(tables)
model = DistributedModelParallel(module, plan=plan, sparse_optimizer=RowWiseAdagrad(lr=0.1), seed=0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

random = torch.Generator().manual_seed(0)
dense, labels = torch.empty(B, 0), torch.ones(B)  # no dense columns
for _ in range(300):
    user = torch.randint(USERS, (B,), generator=random)
    # an item of the user's topic: ids that are equal modulo TOPICS
    item = torch.randint(ITEMS // TOPICS, (B,), generator=random) * TOPICS + user % TOPICS
    pairs = ids(user=user, item=item)
    batch = Batch(dense_features=dense, sparse_features=pairs, labels=labels, global_rows=B)
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()

users, items, metrics = torch.arange(USERS), torch.arange(ITEMS), RankingMetrics([10, 50])
with torch.no_grad():
    scores = towers.query(ids(user=users)) @ towers.candidate(ids(item=items)).T
metrics.update(scores, users[:, None] % TOPICS == items % TOPICS)  # each (USERS, ITEMS)
recall = metrics.compute().recall
print(f"recall@10 {recall[10]:.3f} of at most 0.200, recall@50 {recall[50]:.3f} of at most 1.000")
