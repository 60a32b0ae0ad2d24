"""Every block of code in the documents runs as it stands there, or says why it does not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.cli.main import main
from rayrec.data import FeatureSchema
from rayrec.layout import ShardingPlan
from rayrec.serve import Predictor
from tests.unit.documents import BLOCKS, ROOT, Block, environment, execute, run, walk
from tests.unit.running_replica import running
from tests.warm import Warm

ALONE = [block for block in BLOCKS if block.how == "tested" and block.language == "python"]
OWN_MACHINE = [block for block in BLOCKS if block.how == "own machine"]
WALKS = sorted({block.page for block in BLOCKS if block.how == "walk"})
# pages whose walk starts a cluster, or many processes
SLOW = {
    "README",
    "walkthrough",
    "checkpoints",
    "cli",
    "data",
    "doctor",
    "dynamic",
    "forget",
    "own-loop",
    "pipelining",
    "serving",
    "shaping-a-run",
    "slow-run",
    "watching",
}
COMMANDS = re.compile(r"^(make|python3?|ray|rayrec|pip|aws|export|\.venv/bin/\w+) ", re.MULTILINE)


def test_every_block_of_code_says_how_it_is_tested():
    kinds = {
        "python": {"tested", "walk"},
        "json": {"tested", "walk"},
        "sh": {"walk", "own machine", "not run"},
    }
    silent = [
        f"{b.page.name}: {b.code[:60]!r}"
        for b in BLOCKS
        if b.language in kinds and b.how not in kinds[b.language]
    ]
    assert not silent, "say how each is tested (tests/unit/documents.py): " + "; ".join(silent)
    assert all(block.what for block in BLOCKS if block.how == "not run"), (
        "say why a block is not run"
    )
    assert len(ALONE) > 5 and len(WALKS) > 3 and len(OWN_MACHINE) > 1


def test_commands_stand_in_blocks_that_are_known_as_such():
    unknown = [
        f"{b.page.name}: {b.code[:60]!r}"
        for b in BLOCKS
        if b.language in ("", "text") and COMMANDS.search(b.code)
    ]
    assert not unknown, "mark blocks of commands as sh: " + "; ".join(unknown)


@pytest.mark.xdist_group("warm interpreter")
@pytest.mark.parametrize("block", ALONE, ids=lambda block: block.name)
def test_an_example_runs(block: Block, tmp_path: Path, warm: Warm):
    run(block.code, tmp_path, warm)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=[pytest.mark.slow, pytest.mark.ray] if p.stem in SLOW else [])
        for p in WALKS
    ],
    ids=lambda p: p.stem,
)
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, warm: Warm):
    printed = walk(page, tmp_path, warm)
    assert printed
    if page.stem == "README":
        auc, checkpoint = printed[-1].splitlines()[-1].split()
        assert float(auc) > 0.6 and Path(checkpoint, "manifest.json").is_file()
    if page.stem == "walkthrough":
        check_served_candidates(page, tmp_path)


def check_served_candidates(page: Path, folder: Path) -> None:
    """Ask a server as the end of a page does; the trained model gives the same scores and order."""
    (asked,) = (block for block in BLOCKS if block.page == page and block.how == "not run")
    found = re.search(r"-d '(.*?)'", asked.code, re.DOTALL)
    assert found
    body = json.loads(found[1])
    served = folder / "served/listening"
    with running(Predictor.load(served)) as server:
        status, said, _ = server.http("/predict", body)
    assert status == 200, said
    rows = pa.Table.from_pylist([body["user"] | row for row in body["rows"]])
    pq.write_table(rows, folder / "asked.parquet")
    words = f"{folder}/runs/listening@latest --data {folder}/asked.parquet --local"
    words += f" --schema {served}/schema.json --out {folder}/wanted"
    assert main(["predict", *words.split()]) == 0
    wanted = pq.read_table(folder / "wanted")["score"].to_numpy()
    np.testing.assert_allclose(said["scores"], wanted, atol=1e-5)
    assert np.argsort(said["scores"]).tolist() == np.argsort(wanted).tolist()


@pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if b.how == "tested" and b.language == "json"],
    ids=lambda block: block.name,
)
def test_json_is_what_its_page_says(block: Block):
    read = {
        "schema": lambda text: FeatureSchema.from_json(text),
        "plan": lambda text: ShardingPlan.from_json(text, "the page"),
    }
    read[block.what](block.code)
    assert json.loads(block.code)


def own_machine(script: str) -> list[str]:
    """A command that runs a script where no port, no process and no shared memory of this machine
    is seen; all of it ends with it.
    """
    setup = "ip link set lo up && mount -t tmpfs none /dev/shm && "
    return [
        "unshare",
        "--net",
        "--mount",
        "--ipc",
        "--pid",
        "--fork",
        "--mount-proc",
        "bash",
        "-ec",
        setup + script,
    ]


def has_own_machine() -> bool:
    try:
        return subprocess.run(own_machine("true"), capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("block", OWN_MACHINE, ids=lambda block: block.name)
def test_a_cluster_of_ones_own_runs_as_written(block: Block, tmp_path: Path):
    """From a copy of the product, since `--working-dir .` sends the folder; Ray's default ports are
    those of a network without others.
    """
    if not has_own_machine():
        pytest.skip("a network of its own needs root and iproute2")
    for name in ("rayrec", "actors", "jobs", "pyproject.toml", ".rayignore"):
        (tmp_path / name).symlink_to(ROOT / name)
    printed = execute(own_machine(block.code), tmp_path, timeout_s=280)
    assert "succeeded" in printed.lower(), printed
    assert environment(tmp_path)["HOME"] == str(tmp_path)
