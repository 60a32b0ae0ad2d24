"""Arrow data to batches: schema, conversion, order of samples, files, loader, synthetic data."""

from rayrec.data.batch import Batch
from rayrec.data.candidates import ItemSlices, NextItemDataset, SharedNegatives
from rayrec.data.column_types import check_columns
from rayrec.data.convert import to_batch
from rayrec.data.event_log import EventSplit, WrittenLog, write_event_log
from rayrec.data.files import ArrowDataset, FileDataset, ParquetDataset
from rayrec.data.inspect import DataReport, inspect_data
from rayrec.data.loader import BatchLoader
from rayrec.data.order import SampleOrder
from rayrec.data.planted import SyntheticConfig
from rayrec.data.planted_log import PlantedLogConfig
from rayrec.data.random import RandomRecDataset
from rayrec.data.rows import RowDataset
from rayrec.data.synthetic import SyntheticPaths, write_synthetic
from rayrec.data.synthetic_log import write_planted_log
from rayrec.data.windows import TimeWindow, TimeWindows, WindowedDataset
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.schema_columns import DenseColumn, Feature, SequenceColumn

__all__ = [
    "ArrowDataset",
    "Batch",
    "BatchLoader",
    "DataReport",
    "DenseColumn",
    "EventSplit",
    "Feature",
    "FeatureSchema",
    "FileDataset",
    "ItemSlices",
    "NextItemDataset",
    "ParquetDataset",
    "PlantedLogConfig",
    "RandomRecDataset",
    "RowDataset",
    "SampleOrder",
    "SequenceColumn",
    "SharedNegatives",
    "SyntheticConfig",
    "SyntheticPaths",
    "TimeWindow",
    "TimeWindows",
    "WindowedDataset",
    "WrittenLog",
    "check_columns",
    "inspect_data",
    "to_batch",
    "write_event_log",
    "write_planted_log",
    "write_synthetic",
]
