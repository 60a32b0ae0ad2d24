"""One private Ray cluster for all tests of this folder, on this machine, with a home of its own and
no authentication.

It is larger than the machine on purpose: ranks of tests are small and wait for each other. `ray
stop` is never called, since it would end every Ray process of the user; leaving the fixture ends
just this cluster. Cost: about 5 s once, then 3 to 8 s per run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayrec.data.synthetic import SyntheticPaths
from tests.clicks import LEARNABLE, write_clicks
from tests.ray.heads import Head, node_with_own_disk, started_head
from tests.ray.worlds import CLUSTER_CPUS, held

# Ray ends a process, and takes back its place, within a second or two
GIVE_BACK_S = 30.0


# before pytest-xdist, which else comes first where this folder is what pytest is given
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs Ray, and one worker process of pytest-xdist runs all of it:
    there is one cluster.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """See that pytest-xdist knows the group: it writes it behind the names of tests."""
    ours = [item for item in session.items if Path(__file__).parent in item.path.parents]
    grouped = session.config.getoption("loadgroup", default=False)
    if grouped and ours and not ours[0].nodeid.endswith("@ray"):
        raise pytest.UsageError(
            f"pytest {pytest.__version__} hides groups of tests from pytest-xdist; install the "
            "versions of pyproject.toml: pip install -e '.[dev]'"
        )


@pytest.fixture(scope="session")
def private_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home folder that Ray may write tokens to, with the variables that decide which cluster is
    used set for it.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("OMP_NUM_THREADS", "1")
        # Not Ray's 15, at which ranks start slowly beside other tests; not 0, so that a rank can be
        # seen to leave it.
        patch.setenv("RAY_worker_niceness", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield home


@pytest.fixture(scope="session")
def cluster(private_home: Path) -> Iterator[None]:
    """A connection to a private cluster of `CLUSTER_CPUS` CPUs."""
    import ray

    ray.init(
        address="local",
        num_cpus=CLUSTER_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        # Not Ray's ten seconds, for which a test of metrics would have to wait.
        _system_config={"metrics_report_interval_ms": 2000},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def all_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a file of tests that leaves a place, a process or a CPU of the shared cluster behind.

    What one test leaves, a later one would lack, and nobody could tell whose it was.
    """
    yield
    if "cluster" not in request.fixturenames:
        return
    deadline = time.monotonic() + GIVE_BACK_S
    while (left := held()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "left behind on the cluster: " + "; ".join(left)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the second node of `two_hosts` does not see."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def two_hosts(private_home: Path, hidden: Path) -> Iterator[Head]:
    """A cluster of two nodes of one CPU, the second with a disk of its own."""
    with started_head(private_home, num_cpus=1) as head, node_with_own_disk(head, hidden):
        yield head


@pytest.fixture(scope="session")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> SyntheticPaths:
    """A small click data set with planted truth; its rows fill no whole number of batches."""
    folder = tmp_path_factory.mktemp("clicks")
    return write_clicks(folder, rows_train=6007, rows_eval=2003, **LEARNABLE)


@pytest.fixture
def mark() -> Iterator[str]:
    """A value for the environment of a subprocess, by which all of its descendants can be found
    afterwards.
    """
    yield f"RAYREC_TEST_MARK={uuid.uuid4().hex}"
