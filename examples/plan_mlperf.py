"""The tables of MLPerf's recommendation benchmark at full size, planned for eight GPUs.

The benchmark trains HSTU on histories of 4,086 events, each with an item, an artist and an album,
and eleven tables of 293 million rows of 512 columns; 600 GB in float32. Source: mlcommons/training,
recommendation/README.MD, revision f9353f6. Planning needs neither torch, nor Ray, nor a GPU.
"""

from dataclasses import replace

from rayrec import EmbeddingConfig, EmbeddingShardingPlanner, ParameterConstraints
from rayrec.layout import DataType
from rayrec.layout.presets import preset_topology
from rayrec.planner import NoPlan

EVENTS = 4086 + 1  # of a history, and the candidate
OF_EVENTS = {"item_id": 9_390_624, "artist_id": 1_293_395, "album_id": 3_367_692}
OF_USERS = {  # looked up once in a sequence
    "uid": 1_000_001,
    "user_x_artist": 100_000_000,
    "user_x_album": 40_000_000,
    "user_x_hour": 24_000_000,
    "item_x_hour": 40_000_000,
    "artist_x_hour": 32_000_000,
    "user_x_is_organic": 2_000_000,
    "user_x_artist_x_hour": 40_000_000,
}
TABLES = [
    EmbeddingConfig(rows, 512, name, feature_names=[name])
    for name, rows in (OF_EVENTS | OF_USERS).items()
]
CONSTRAINTS = {
    name: ParameterConstraints(pooling_factor=EVENTS if name in OF_EVENTS else 1)
    for name in OF_EVENTS | OF_USERS
}


def show(memory_gb: int, rows: int, data_type: DataType = DataType.FP32) -> None:
    """Print the plan for eight GPUs of so much memory, or what would help."""
    print(f"Eight GPUs of {memory_gb} GB, {rows} histories a rank, {data_type.name}:")
    gpus = preset_topology("b200" if memory_gb > 80 else "h100", hosts=1)
    free = int(memory_gb * 10**9 * 0.85)  # the rest is for the dense part
    topology = replace(gpus, memory_bytes=(free,) * 8)
    planner = EmbeddingShardingPlanner(topology, batch_size=rows, constraints=CONSTRAINTS)
    try:
        plan = planner.plan([replace(table, data_type=data_type) for table in TABLES])
    except NoPlan as error:
        print(f"{error}\n")
    else:
        print(f"{plan.report()}\n")


show(192, 1024)  # the benchmark's batch of 8,192
show(192, 512)
show(80, 128)
show(80, 128, DataType.FP16)
