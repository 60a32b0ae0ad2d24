"""Nodes that are announced to go: an elastic run leaves them, any other run saves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.heads import ROOT

pytestmark = pytest.mark.slow


def test_notices_come_before_losses(private_home: Path, tmp_path: Path) -> None:
    """In a process of its own, since it needs a cluster of several nodes."""
    command = [sys.executable, "-m", "tests.ray.preempted_nodes", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    told = done.stdout[-4000:] + done.stderr[-2000:]
    assert done.returncode == 0, told
    _, left, moved, saved = done.stdout.split("-- ")
    assert re.search(r" with rank [01] will go in \d+ s; the ranks save and go on without it", left)
    assert "['leave'] [1, 2]\n0 failures, 2 resizes\nequal tables" in left, told
    assert "shrunk from 2 to 1 ranks at step" in left and "grown from 1 to 2 ranks" in left
    assert "leave it as soon as there is room elsewhere" in moved, told
    assert re.search(r"left .* at step \d+; all ranks go on elsewhere", moved), told
    assert "['move', 'leave'] []\n0 failures, 0 resizes\nequal tables" in moved, told
    assert "so that nothing is lost with it" in saved, told
    assert "['save'] 1 failure\nwent on from what was saved\nequal tables" in saved, told
