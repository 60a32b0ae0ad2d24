"""What several tiers share: one thread per process, a pool of real ranks, the folder of real data, GPU gating, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.leftovers import left_behind, mark_session, shared_memory
from tests.ranks import RankPool


@pytest.fixture(scope="session", autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails at the end of the session when a process or shared memory of it is left; the first fixture is the last to end."""
    before, mark = shared_memory(), mark_session()
    yield
    left = left_behind(mark, before)
    assert not left, "left behind by this session:\n" + "\n".join(left)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four rank processes, each of which joins a fresh gloo group per task."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the public data sets; skips when absent."""
    folder = Path(os.environ.get("RAYREC_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; set RAYREC_DATA to a folder with ml-100k/ and criteo-tiny/")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no device, with the reason."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
