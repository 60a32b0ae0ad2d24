"""A process that has joined a cluster stays there: another address is refused."""

from __future__ import annotations

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
