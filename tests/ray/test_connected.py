"""A process that has joined a cluster stays there, and a signal while it joins ends it as any."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rayrec.driver.cluster import connected
from rayrec.errors import ConfigError


def test_the_address_of_another_cluster_is_refused(cluster: None) -> None:
    import ray

    own = ray.get_runtime_context().gcs_address
    port = own.rpartition(":")[2]
    for address in ("", "auto", own, f"gcs://{own}", f"localhost:{port}"):
        with connected(address=address):
            assert ray.is_initialized()
    for address in ("203.0.113.7:6379", "127.0.0.1:1"):
        with (
            pytest.raises(ConfigError, match=rf"cluster at {own}, and the address is {address}; "),
            connected(address=address),
        ):
            pass


STARTING = """
import os, signal
import ray._private.utils as utils
from rayrec.driver.cluster import connected
from rayrec.machine.signals import hold_signals

take = utils.set_sigterm_handler
def taken(handler):
    take(handler)
    os.kill(os.getpid(), signal.SIGTERM)
utils.set_sigterm_handler = taken
with hold_signals(), connected(address="local"):
    raise AssertionError
"""


@pytest.mark.slow
def test_sigterm_that_ray_takes_ends_with_the_code_of_the_signal() -> None:
    ended = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, timeout=60)
    assert ended.returncode == 143, ended.stderr.decode()[-2000:]
