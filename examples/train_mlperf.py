"""MLPerf's recommendation benchmark at a thousandth of its size: HSTU ranks what a user listens to.

Eleven tables, histories of 128 events with what the user did at each, eight features of context,
three layers, and windows of one day that are scored before they are trained on. The log is made up.
"""

import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import Driver, OptimizerConfig, RunConfig, ScalingConfig, data
from rayrec.hstu_config import HSTUConfig
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.optim import RowWiseAdagrad, ScheduleConfig
from rayrec.recipe import ModelRecipe

EVENTS = {"item_id": 9390, "artist_id": 1293, "album_id": 3367}
CONTEXT = {"uid": 1000, "user_x_artist": 100_000, "user_x_album": 40_000, "user_x_hour": 24_000}
CONTEXT |= {"item_x_hour": 40_000, "artist_x_hour": 32_000, "user_x_is_organic": 2000}
CONTEXT |= {"user_x_artist_x_hour": 40_000}
FEATURES = [data.Feature(name=name, column=name) for name in EVENTS | CONTEXT]
FEATURES += [data.Feature(name=f"past_{k}", column=k, history=128) for k in [*EVENTS, "action"]]
TABLES = [EmbeddingConfig(n, 16, k, feature_names=[k, f"past_{k}"]) for k, n in EVENTS.items()]
TABLES += [EmbeddingConfig(8, 8, "action", feature_names=["past_action"])]  # not known yet
TABLES += [EmbeddingBagConfig(n, 16, k, feature_names=[k]) for k, n in CONTEXT.items()]
TIMES = [data.SequenceColumn(name="past", column="time", history=128)]
TIMES += [data.SequenceColumn(name="now", column="time")]
GIVEN = {"label": "listened", "user": "uid", "time": "time", "sequences": tuple(TIMES)}
SCHEMA = data.FeatureSchema(features=tuple(FEATURES), tables=tuple(TABLES), **GIVEN)
HSTU = HSTUConfig(width=32, layers=3, heads=4, times="past", candidate_time="now")
RECIPE = ModelRecipe(model="hstu_ranking", schema=SCHEMA.to_json(), hstu=HSTU, over_layers=(32,))
ADAM = OptimizerConfig(name="adam", lr=0.005, options={"betas": (0.95, 0.999), "eps": 1e-8})
OPTIONS = {"global_batch_size": 128, "clip_norm": 1.0, "dense_schedule": ScheduleConfig(warmup=10)}
OPTIONS |= {"dense_optimizer": ADAM, "sparse_optimizer": RowWiseAdagrad(lr=0.2, eps=1e-8)}


def windows(folder, events=6000):
    """Write a log of six days in which a user listens to some kinds of artists; cut it by day."""
    draw = np.random.default_rng(0).integers
    user, item, hour = draw(0, 100, events), draw(0, 400, events), draw(0, 6 * 24, events)
    parts = {"user": user, "item": item, "artist": item % 40, "album": item % 100}
    parts |= {"hour": hour % 24, "is_organic": draw(0, 2, events)}
    heard = np.where(draw(0, 10, events), draw(0, 2, (100, 4))[user, item % 4], draw(0, 2, events))
    log = {"uid": user, "day": hour // 24, "time": hour * 3600, "listened": heard}
    log |= {f"{name}_id": parts[name] for name in ("item", "artist", "album")}
    for name in list(CONTEXT)[1:]:  # a cross of some columns is their hash
        log[name] = sum(parts[p] * 7919**k for k, p in enumerate(name.split("_x_"))) % CONTEXT[name]
    pq.write_table(pa.table(log | {"action": np.where(heard, 1, 4)}), f"{folder}/events.parquet")
    cut = data.write_event_log(f"{folder}/events.parquet", f"{folder}/e", user="uid", time="time")
    rows = data.ParquetDataset(str(cut.path), SCHEMA)
    return data.WindowedDataset(rows, data.TimeWindows(column="day"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run, one_rank = RunConfig(epochs=1, **OPTIONS), ScalingConfig(num_workers=0)
        for day in Driver(RECIPE, windows(folder), one_rank, run).fit().evaluations:
            print(f"day {day.window}: {day.rows} rows, auc {day.scores['auc']:.4f}")
