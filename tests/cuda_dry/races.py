"""Streams that do not wait for each other, and memory given back while another stream uses it.

The first is found by torch's own CUDA sanitizer, which follows events and waits as they are made
and needs no kernel to run; here it watches every thread. It ties tensors together that begin at one
address, so that a race between a tensor and a view that begins elsewhere in it goes unseen. The
second is looked for when memory is freed: every stream that used it but the one it was allocated on
must have been told to the allocator (`record_stream`).
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace, _sanitizer
from torch.cuda._sanitizer import CUDASanitizerDispatchMode
from torch.utils._python_dispatch import _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

_handle = _sanitizer.ArgumentHandler._handle_argument


def _handle_memory(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
    """Leave out tensors without elements: torch knows them by their ids, which others get later."""
    if not isinstance(value, torch.Tensor) or value.numel():
        _handle(self, value, *args, **kwargs)


_sanitizer.ArgumentHandler._handle_argument = _handle_memory
_turns = threading.RLock()


def _one_at_a_time(handle: Callable[..., Any]) -> Callable[..., Any]:
    """torch's sanitizer counts what happens, and would lose count between threads."""

    @wraps(handle)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _turns:
            return handle(*args, **kwargs)

    return wrapped


for _name, _method in list(vars(_sanitizer.EventHandler).items()):
    if _name.startswith("_handle_"):
        setattr(_sanitizer.EventHandler, _name, _one_at_a_time(_method))


class Watch(CUDASanitizerDispatchMode):
    """torch's sanitizer, and what it does not know: which streams use the memory of a tensor.

    Attributes:
        early: the operators that used memory which was freed too early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.early: list[str] = []
        self._known: dict[int, set[int]] = {}  # start of memory -> streams the allocator knows
        self._users: dict[int, dict[int, str]] = defaultdict(dict)
        _gpu_trace.register_callback_for_memory_allocation(self._on_allocation)
        _gpu_trace.register_callback_for_memory_deallocation(self._on_free)

    def _on_allocation(self, start: int) -> None:
        with _turns:
            self._known[start] = {torch.cuda.current_stream().stream_id}
            self._users.pop(start, None)

    def _on_free(self, start: int) -> None:
        with _turns:
            known, users = self._known.pop(start, None), self._users.pop(start, {})
        if known is not None:
            self.early += [what for stream, what in users.items() if stream not in known]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        with _turns:
            if func is torch.ops.aten.record_stream.default:
                self._known.get(_start(args[0]), set()).add(args[1].stream_id)
                return found
            stream = torch.cuda.current_stream().stream_id
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.numel():
                    self._users[_start(tensor)].setdefault(stream, str(func))
        return found


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_watch: list[Watch] = []  # one in a process: torch keeps its callbacks for good


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch this thread and those that start in the block.

    Raises:
        torch.cuda._sanitizer.CUDASanitizerErrors: where a race is found, in the thread that makes
            it.
    """
    if not _watch:
        _watch.append(Watch())
    watch, run = _watch[0], threading.Thread.run
    watch.early.clear()

    def run_watched(thread: threading.Thread) -> None:
        _push_mode(watch)
        try:
            run(thread)
        finally:
            _pop_mode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", run_watched)
        _push_mode(watch)
        try:
            yield watch
        finally:
            _pop_mode()
            torch.cuda.synchronize()
            sys.stderr.flush()
