"""MLPerf's recommendation benchmark at a thousandth of its size: HSTU ranks what a user will like.

Eleven tables, histories of 128 events with what the user did at each, eight features of context,
three layers, and windows of one day that are scored before they are trained on. The log is made up.
`python examples/train_mlperf.py` runs one rank in this process, with 2 behind it two Ray ranks.
"""

import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec import Driver, OptimizerConfig, RunConfig, ScalingConfig
from rayrec.data import Feature, FeatureSchema, ParquetDataset, SequenceColumn, write_event_log
from rayrec.data.windows import TimeWindows, WindowedDataset
from rayrec.layout import EmbeddingBagConfig, EmbeddingConfig
from rayrec.optim import ScheduleConfig
from rayrec.recipe import ModelRecipe
from rayrec.spec.hstu import HSTUConfig

EVENTS = {"item_id": 9390, "artist_id": 1293, "album_id": 3367, "action": 8}
CONTEXT = {"uid": 1000, "user_x_artist": 100_000, "user_x_album": 40_000, "user_x_hour": 24_000}
CONTEXT |= {"item_x_hour": 40_000, "artist_x_hour": 32_000, "user_x_is_organic": 2000}
CONTEXT |= {"user_x_artist_x_hour": 40_000}
PAST = {f"past_{name}": Feature(name=f"past_{name}", column=name, history=128) for name in EVENTS}
NOW = [Feature(name=name, column=name) for name in [*EVENTS, *CONTEXT] if name != "action"]
TABLES = [EmbeddingConfig(n, 16, k, feature_names=[k, f"past_{k}"]) for k, n in EVENTS.items()]
TABLES[-1] = EmbeddingConfig(8, 8, "action", feature_names=["past_action"])  # not yet known
TABLES += [EmbeddingBagConfig(n, 16, k, feature_names=[k]) for k, n in CONTEXT.items()]
TIMES = [("past_time", 128), ("now", None)]
SEQUENCES = tuple(SequenceColumn(name=k, column="time", history=n) for k, n in TIMES)
ROLES = {"label": "listened", "user": "uid", "time": "time", "sequences": SEQUENCES}
SCHEMA = FeatureSchema(features=(*PAST.values(), *NOW), tables=tuple(TABLES), **ROLES)
HSTU = HSTUConfig(width=32, layers=3, heads=4, times="past_time", candidate_time="now")
RECIPE = ModelRecipe(model="hstu_ranking", schema=SCHEMA.to_json(), hstu=HSTU, over_layers=(32,))
ADAM = {"betas": (0.95, 0.999), "eps": 1e-8}
OPTIONS = {"global_batch_size": 128, "clip_norm": 1.0, "dense_schedule": ScheduleConfig(warmup=10)}
OPTIONS["sparse_optimizer"] = OptimizerConfig(name="rowwise_adagrad", lr=0.1)
OPTIONS["dense_optimizer"] = OptimizerConfig(name="adam", lr=0.005, options=ADAM)


def windows(folder, events=6000):
    """Write a log of six days in which a user listens to some kinds of artists; cut it by day."""
    draw, e = np.random.default_rng(0).integers, {}
    user, item, hour = draw(0, 100, events), draw(0, 400, events), draw(0, 6 * 24, events)
    artist, album, likes = item % 40, item % 100, draw(0, 2, (100, 4))
    heard = np.where(draw(0, 10, events) < 9, likes[user, artist % 4], draw(0, 2, events))
    e |= {"item_id": item, "artist_id": artist, "album_id": album, "uid": user, "listened": heard}
    parts = {"user": user, "item": item, "artist": artist, "album": album, "hour": hour % 24}
    parts["is_organic"] = draw(0, 2, events)
    for name in list(CONTEXT)[1:]:  # a cross of some columns is their hash
        own = [parts[part] for part in name.split("_x_")]
        e[name] = sum(n * 7919**k for k, n in enumerate(own)) % CONTEXT[name]
    e |= {"action": np.where(heard, 1, 4), "day": hour // 24, "time": hour * 3600}
    pq.write_table(pa.table(e), f"{folder}/events.parquet")
    log = write_event_log(f"{folder}/events.parquet", f"{folder}/log", user="uid", time="time")
    return WindowedDataset(ParquetDataset(str(log.path), SCHEMA), TimeWindows(column="day"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        scaling = ScalingConfig(num_workers=int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        run = RunConfig(epochs=1, progress="off", **OPTIONS)
        for day in Driver(RECIPE, windows(folder), scaling, run).fit().evaluations:
            print(f"day {day.window}: {day.rows} rows, auc {day.scores['auc']:.4f}")
