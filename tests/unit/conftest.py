"""What several files of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.documents import environment
from tests.warm import Warm


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """An interpreter that has imported torch, for programs that take less time than that."""
    interpreter = Warm(environment(tmp_path_factory.mktemp("warm")))
    yield interpreter
    interpreter.close()
