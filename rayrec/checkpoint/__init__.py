"""Checkpoints hold tables as rectangles in Arrow files and restore under any plan."""

from rayrec.checkpoint.fits import check_tables, check_whole
from rayrec.checkpoint.inspect import CheckpointReport, inspect_checkpoint
from rayrec.checkpoint.manager import CheckpointManager
from rayrec.checkpoint.manifest import FileEntry, Manifest
from rayrec.checkpoint.restore import RestoredCheckpoint, read_manifest, restore_checkpoint
from rayrec.checkpoint.save import save_checkpoint, watch_save
from rayrec.checkpoint.table import load_table
from rayrec.shards.overlap import OverlapWriter
from rayrec.shards.state import Gather, ShardState

__all__ = [
    "CheckpointManager",
    "CheckpointReport",
    "FileEntry",
    "Gather",
    "Manifest",
    "OverlapWriter",
    "RestoredCheckpoint",
    "ShardState",
    "check_tables",
    "check_whole",
    "inspect_checkpoint",
    "load_table",
    "read_manifest",
    "restore_checkpoint",
    "save_checkpoint",
    "watch_save",
]
