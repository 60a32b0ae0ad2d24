"""Checkpoints hold tables as rectangles in Arrow files and restore under any plan."""

from rayrec.checkpoint.compatibility import check_tables, check_whole
from rayrec.checkpoint.contents import CheckpointReport, inspect_checkpoint
from rayrec.checkpoint.dense_tensors import dense_tensors, load_dense
from rayrec.checkpoint.entries import FileEntry, Parent
from rayrec.checkpoint.manager import CheckpointManager
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.paths import checkpoint_path
from rayrec.checkpoint.restore import (
    RestoredCheckpoint,
    check_dense,
    read_manifest,
    restore_checkpoint,
)
from rayrec.checkpoint.rows import TableReader
from rayrec.checkpoint.save import agree, save_checkpoint, watch_save, writes
from rayrec.checkpoint.table import load_table
from rayrec.shards.copies import TouchedState, copy_touched, copy_whole
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import Gather, ShardState

__all__ = [
    "CheckpointManager",
    "CheckpointReport",
    "FileEntry",
    "Gather",
    "Manifest",
    "OverlapWriter",
    "Parent",
    "RestoredCheckpoint",
    "ShardState",
    "TableReader",
    "TouchedState",
    "agree",
    "check_dense",
    "check_tables",
    "check_whole",
    "checkpoint_path",
    "copy_touched",
    "copy_whole",
    "dense_tensors",
    "inspect_checkpoint",
    "load_dense",
    "load_table",
    "read_manifest",
    "restore_checkpoint",
    "save_checkpoint",
    "watch_save",
    "writes",
]
