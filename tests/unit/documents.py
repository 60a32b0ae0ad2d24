"""Programs of documents, run in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str, folder: Path, timeout_s: float = 120) -> str:
    """What a program prints; its failure is the test's."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
