"""Who may import whom: an import never points up, and packages of one layer do not import each
other.

Every import statement counts, also inside functions and under TYPE_CHECKING, and so does a string
that is a dotted module name (lazy exports load by name). `check_source` is tested on sources that
break each rule, since a test that could not fail would be a defect.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayrec

ROOT = Path(__file__).parents[2]

LAYERS = {  # package -> layer; the lower knows nothing of the higher
    "errors": -1,
    "fields": 0,
    "lazy": 0,
    "version": 0,
    "checks": 1,
    "command": 1,
    "_compat": 1,
    "layout": 1,
    "observe.times": 1,
    "machine": 1,
    "spec": 1,
    "storage": 2,
    "planner": 2,
    "report": 2,
    "sparse": 3,
    "modules": 4,
    "shards": 4,
    "comm": 5,
    "optim": 5,
    "data": 5,
    "metrics": 5,
    "models": 6,
    "quant": 7,
    "checkpoint": 7,
    "dynamic": 6,
    "observe": 6,
    "hstu_config": 6,
    "streams": 6,
    "recipe": 7,
    "next_item_recipe": 7,
    "distributed.program": 7,
    "serve": 8,
    "serve.server": 9,
    "distributed.kernels": 8,
    "distributed.steps": 9,
    "distributed.ways": 10,
    "distributed": 11,
    "train": 12,
    "actors": 13,
    "calibration": 13,
    "watch": 13,
    "doctor": 14,
    "driver": 14,
    "serve.ray_serve": 10,
    "serve.cluster": 15,
    "chaos": 15,
    "erasure": 15,
    "runs": 15,
    "cli": 16,
    "jobs": 17,
}
# standard library only: plans are made and read without torch
PURE = {
    "errors",
    "fields",
    "checks",
    "command",
    "version",
    "layout",
    "observe.times",
    "planner",
    "spec",
}
# formulas of tensors: torch inside of functions, when there are tensors, and for their types
LATE_TORCH = {"spec"}
MAY_IMPORT_RAY = {"driver", "actors", "jobs", "serve.cluster", "serve.ray_serve"}
MAY_IMPORT_ACTORS = {"driver", "actors"}
EXEMPT = {"rayrec"}  # rayrec/__init__.py, whose lazy exports name every layer


def package_of(module: str) -> str:
    """The package of LAYERS that a module belongs to: rayrec.data.loader -> data,
    rayrec.distributed.steps.route -> distributed.steps, actors.rank -> actors, torch.nn -> torch.
    """
    parts = module.split(".")
    if parts[0] != "rayrec" or len(parts) == 1:
        return parts[0]
    room = ".".join(parts[1:3])
    return room if room in LAYERS else parts[1]


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of everything that a source imports or names as a module of rayrec,
    actors or jobs.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                if base == "rayrec":  # a subpackage, or a public name that lives in one
                    yield node.lineno, rayrec._HOME.get(alias.name, f"rayrec.{alias.name}")
                else:
                    yield node.lineno, base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.split(".")
            if (
                len(parts) > 1
                and parts[0] in ("rayrec", "actors", "jobs")
                and package_of(node.value) in LAYERS
            ):
                yield node.lineno, node.value


def late_lines(source: str) -> set[int]:
    """The lines that are not run when the module is imported: functions, and TYPE_CHECKING."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_typing or isinstance(node, ast.FunctionDef):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def check_source(source: str, module: str, is_package: bool = False) -> list[str]:
    """Offences of one module, as "line: what it imports: why not"."""
    own = package_of(module)
    if own not in LAYERS:
        return [f"1: package {own!r} is in no layer; add it to LAYERS"]
    found = []
    for line, target in imports(source, module, is_package):
        other = package_of(target)
        if other == own:
            continue
        why = ""
        if other == "ray" and own not in MAY_IMPORT_RAY:
            why = f"only {', '.join(sorted(MAY_IMPORT_RAY))} may import ray"
        elif other == "actors" and own not in MAY_IMPORT_ACTORS:
            why = "only rayrec/driver starts actors"
        elif other in LAYERS:
            if LAYERS[other] > LAYERS[own]:
                why = f"layer {LAYERS[own]} ({own}) may not import layer {LAYERS[other]} ({other})"
            elif LAYERS[other] == LAYERS[own]:
                why = f"{own} and {other} are of one layer and do not import each other"
            elif own in PURE and other not in PURE:
                why = f"{own} imports {sorted(PURE)} and the standard library only"
        elif other == "torch" and own in LATE_TORCH and line in late_lines(source):
            continue
        elif own in PURE and other not in sys.stdlib_module_names:
            why = f"{own} imports the standard library only"
        elif target == "rayrec" or target.startswith("rayrec."):
            why = f"rayrec.{other} is in no layer; add it to LAYERS"
        if why:
            found.append(f"{line}: {target}: {why}")
    return found


def modules() -> Iterator[tuple[Path, str]]:
    """Every product file and its module name."""
    for top in ("rayrec", "actors", "jobs"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_import_points_up():
    offences = [
        f"{path.relative_to(ROOT)}:{offence}"
        for path, module in modules()
        if module not in EXEMPT
        for offence in check_source(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not offences, "\n" + "\n".join(offences)


def test_the_walk_finds_every_layer():
    found = {package_of(module) for _, module in modules() if module not in EXEMPT}
    assert found <= set(LAYERS)
    assert set(LAYERS) - found <= {"cli"}  # planned, not written yet


@pytest.mark.parametrize(
    ("module", "source", "named"),
    [
        ("rayrec.layout.plan", "from rayrec.planner import manual_plan", "1: rayrec.planner"),
        ("rayrec.layout.plan", "import numpy as np", "1: numpy"),
        ("rayrec.planner.costs", "def f():\n    import torch.nn\n", "2: torch.nn"),
        ("rayrec.planner.costs", "from rayrec import _compat", "1: rayrec._compat"),
        ("rayrec.metrics.gauc", "from rayrec.data import Batch", "1: rayrec.data"),
        ("rayrec.metrics.gauc", "from rayrec import data", "1: rayrec.data"),
        (
            "rayrec.train.loop",
            "if TYPE_CHECKING:\n    from rayrec.driver import Driver\n",
            "2: rayrec.driver",
        ),
        ("rayrec.train.loop", "from rayrec import Driver", "1: rayrec.driver"),
        ("rayrec.train.loop", "import ray", "1: ray"),
        ("rayrec.train.loop", "from ray.util import placement_group", "1: ray.util"),
        ("rayrec.train", "HOME = {'Driver': 'rayrec.driver.driver'}", "1: rayrec.driver.driver"),
        (
            "rayrec.distributed.steps.route",
            "from ...train.step import train_step",
            "1: rayrec.train.step",
        ),
        ("jobs.train_dlrm", "from actors.rank import RankActor", "1: actors.rank"),
        ("rayrec.data.loader", "import actors", "1: actors"),
        ("rayrec.errors", "import rayrec.layout", "1: rayrec.layout"),
        ("rayrec.spec.optimizers", "import torch\n\ndef f():\n    import torch\n", "1: torch"),
        ("rayrec.spec.optimizers", "def f():\n    import numpy\n", "2: numpy"),
        ("rayrec.sparse.kjt", "import rayrec.fancy", "1: rayrec.fancy"),
        ("rayrec.fancy.thing", "", "1: package 'fancy'"),
    ],
)
def test_an_offence_is_found_and_named(module, source, named):
    (offence,) = check_source(source, module)
    assert offence.startswith(named), offence


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "rayrec.planner.costs",
            "import math\nfrom rayrec.layout import Shard\nfrom rayrec.errors import PlanError",
        ),
        (
            "rayrec.distributed.engine",
            "import torch\nfrom rayrec.checkpoint import ShardState\nfrom .route import route",
        ),
        ("rayrec.driver.rank_group", "import ray\nfrom actors.rank import RankActor"),
        ("actors.rank", "from rayrec.train import RankTrainer"),
        ("jobs.smoke", "import ray\nfrom rayrec import Driver\nfrom rayrec.recipe import x"),
        ("rayrec.spec.optimizers", "def f():\n    import torch\n"),
        ("rayrec.spec.optimizers", "if TYPE_CHECKING:\n    from torch import Tensor\n"),
        ("rayrec.layout.codec", "FORMAT = 'rayrec.plan'"),  # a string, and no module of ours
    ],
)
def test_what_is_allowed_passes(module, source):
    assert check_source(source, module) == []
