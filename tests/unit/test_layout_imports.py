"""Layout and planner work on a machine that has the standard library and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCHEMA = {
    "label": "clicked",
    "features": [{"name": "user", "column": "user"}],
    "tables": [
        {"name": "user", "num_embeddings": 10**6, "embedding_dim": 64, "features": ["user"]}
    ],
}
BLOCK = """
import sys
BLOCKED = {"torch", "numpy", "ray", "pyarrow", "fbgemm_gpu", "rich"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("the block does not block")
"""
LIBRARY = """
import rayrec
assert rayrec.planner.EmbeddingShardingPlanner and rayrec.layout.units.format_bytes
assert not hasattr(rayrec, "nonsense")
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Topology
from rayrec.planner import EmbeddingShardingPlanner, manual_plan
tables = [EmbeddingBagConfig(10**i, 16, f"t{i}", feature_names=[f"f{i}"]) for i in range(1, 6)]
topology = Topology.local(4)
plan = EmbeddingShardingPlanner(topology, batch_size=64).plan(tables)
plan.check(tables, 4)
assert ShardingPlan.from_json(plan.to_json()) == plan and plan.report()
assert plan.diff(manual_plan(tables, "row_wise", topology))
"""
COMMAND = """
from rayrec.cli.main import main
raise SystemExit(main(["plan", "--topology", "h100", "--hosts", "2", *sys.argv[1:]]))
"""


def run(script: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + script, *words],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_is_made_without_any_other_package() -> None:
    run(LIBRARY)


def test_the_command_needs_no_other_package(tmp_path: Path) -> None:
    schema, page = tmp_path / "schema.json", tmp_path / "p.html"
    schema.write_text(json.dumps(SCHEMA))
    told = run(COMMAND, "--schema", str(schema), "--html", str(page))
    assert "on 16 ranks (2 hosts x 8 cuda)" in told and page.stat().st_size > 5000
