"""A plan for a model that fits no machine of yours.

Planning needs neither torch, nor Ray, nor a GPU. A topology says what a cluster would have. The
planner prints where each table would lie, why, and how long a step would take. What does not fit is
an error that lists the smallest changes that would help.
"""

from rayrec import EmbeddingBagConfig, EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.layout.presets import preset_topology
from rayrec.planner import NoPlan

SIZES = {  # rows of each table; together 640 GB of weights in float32
    "user": 600_000_000,
    "item": 400_000_000,
    "query": 200_000_000,
    "shop": 40_000_000,
    "city": 1_000_000,
    "hour": 24,
}
tables = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=128, feature_names=[name])
    for name, rows in SIZES.items()
]
# Words repeat: ten ids a bag, asked for by a Zipf law. Neither can be seen from the sizes.
constraints = {"query": ParameterConstraints(pooling_factor=10, skew=1.0)}


def plan_for(topology: Topology):
    planner = EmbeddingShardingPlanner(topology, batch_size=4096, constraints=constraints)
    return planner.plan(tables)


try:
    plan_for(preset_topology("h100", hosts=1))
except NoPlan as error:
    print(f"On one host of 8 GPUs: {error}\n")

plan = plan_for(preset_topology("h100", hosts=2))
print(plan.report())
print(f"\nAs JSON, to be saved and trained by: {len(plan.to_json()):,} characters.")
