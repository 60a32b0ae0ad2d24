"""Entry point of a forked process, which becomes a replica and ends with its parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from rayrec.errors import RayrecError
from rayrec.serve.predictor import Predictor
from rayrec.serve.sealed_memory import populate
from rayrec.serve.server.leading import Lead
from rayrec.serve.server.pulse import Pulses
from rayrec.serve.server.settings import ServerSettings
from rayrec.serve.server.telling import say
from rayrec.storage import one_line

SIGNALS = {signal.SIGTERM, signal.SIGINT}
_PARENT_DEATH_SIGNAL = 1  # prctl's name of it


def run_forked(
    predictor: Predictor,
    settings: ServerSettings,
    number: int,
    said: Connection,
    pulses: Pulses,
    lead: Lead | None,
    parent: int,
) -> None:
    """Run a replica in a forked process; does not return."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        # a parent that is killed can end nobody
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    # here and not in the parent: gRPC does not survive a fork, and prometheus_client looks for the
    # folder of its numbers when it is imported
    from rayrec.serve.server.replica import run_replica

    own = [collection.packed.data for collection in predictor.collections.values()]
    for data in own if lead is None else lead.predictor.follower.copies.data:
        populate(data)
    # the objects here stay, so garbage collections need not look at them again
    gc.freeze()
    try:
        code = run_replica(predictor, settings, number, said, pulses, lead)
    except (RayrecError, OSError) as error:  # the latter: no descriptors, or no room for numbers
        say(f"replica {number}: {one_line(error)}")
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
