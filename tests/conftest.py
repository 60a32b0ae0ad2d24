"""What several tiers share: one thread per process, a pool of real ranks, the folder of real data,
GPU gating.

The plugins choose the seeds of random worlds and look for what a session left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's rendezvous looks up the names of 127.0.0.1 and who connects; a query that a name server
# drops then costs one second, not five
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import pytest

from tests.ranks import RankPool

MOST_WORKERS = 8
pytest_plugins = ("tests.seeds", "tests.leftovers")


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
        pytest.skip(
            f"no real data at {folder}; set RAYREC_DATA to a folder with ml-100k/ and criteo-tiny/"
        )
    return folder


@pytest.fixture(scope="session")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `write_shaped` writes; no test writes to it."""
    from tests.gloo.shaped import write_shaped

    folder = tmp_path_factory.mktemp("shaped")
    write_shaped(folder)
    return folder


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker process per core, of which each may have four ranks of its own."""
    return min(
        MOST_WORKERS,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no device, with the reason."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(
                    pytest.mark.skip(reason="no CUDA device: run on a machine with a GPU")
                )
