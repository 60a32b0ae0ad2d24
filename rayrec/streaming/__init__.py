"""Streams: sources of events without an end, and the windows that a run cuts of them."""

from __future__ import annotations

from rayrec.streaming.config import StreamConfig, StreamStop
from rayrec.streaming.cutter import WindowCutter
from rayrec.streaming.dataset import StreamDataset
from rayrec.streaming.folder_source import FolderSource, FolderStream
from rayrec.streaming.source import Cursor, Lag, Polled, Refusal, StreamSource
from rayrec.streaming.window_log import WindowLog, WindowRecord

__all__ = [
    "Cursor",
    "FolderSource",
    "FolderStream",
    "Lag",
    "Polled",
    "Refusal",
    "StreamConfig",
    "StreamDataset",
    "StreamSource",
    "StreamStop",
    "WindowCutter",
    "WindowLog",
    "WindowRecord",
]
