"""Streams: rows that never end, cut into windows that are facts of a run.

A `StreamSource` gives rows behind a cursor. Rank 0 of a run cuts them into windows (`cutting`),
writes each into the run's folder (`kept`), and all ranks read it from there (`dataset`).
"""

from rayrec.streams.config import DeltaConfig, IcebergConfig, KafkaConfig, StreamConfig
from rayrec.streams.dataset import StreamDataset, schema_of
from rayrec.streams.kept import StreamWindow
from rayrec.streams.source import Refusal, SourceLag, StreamRows, StreamSource

__all__ = [
    "DeltaConfig",
    "IcebergConfig",
    "KafkaConfig",
    "Refusal",
    "SourceLag",
    "StreamConfig",
    "StreamDataset",
    "StreamRows",
    "StreamSource",
    "StreamWindow",
    "schema_of",
]
