"""Mistakes in plans, topologies and constraints, which are JSON files too."""

from __future__ import annotations

from typing import Any

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import DROP, content, edited

# (place, value, what the last line says) in a plan for one rank
PLAN: list[tuple[str, Any, str]] = [
    ("format", DROP, "format"),
    ("world_size", 0, "rank"),
    ("hosts", [[0, 1]], "ranks"),
    ("tables.t_cat_0", DROP, "t_cat_0"),
    ("tables.nothing", {}, "nothing"),
    ("tables.t_cat_0.row_cuts", [5, 200], "t_cat_0|0"),
    ("tables.t_cat_0.row_cuts", [0, 300], "t_cat_0|300"),
    ("tables.t_cat_0.col_cuts", [0, 16], "t_cat_0"),
    ("tables.t_cat_0.owners", [], "t_cat_0"),
    ("tables.t_cat_0.owners", DROP, "t_cat_0|owners"),
    ("estimates.ranks", [], "estimates"),
]

NO_PLANS = [
    ("{", "plan.json|JSON"),
    ("{}", "plan.json|format"),
    ('{"format": "rayrec.plan", "format": "rayrec.plan"}', "plan.json|twice"),
]

TOPOLOGY: list[tuple[str, Any, str]] = [
    ("hosts", DROP, "hosts"),
    ("hosts", "one", "hosts"),
    ("device", DROP, "device"),
    ("memory_bytes", [10], "memory"),
    ("memory_bytes", [1.5], "memory_bytes"),
    ("memory_bw", float("nan"), "NaN"),
    ("intra_host_bw", -5, "intra_host_bw"),
    ("latency_s", float("inf"), "Infinity"),
    ("rates", 5, "rates"),
    ("", "words", "object"),
]

CONSTRAINTS: list[tuple[str, str]] = [
    ("", "constraints.json|JSON"),
    ('{"nothing": {}}', "'nothing'"),
    ('{"t_cat": {}}', "did you mean"),
    ('{"t_cat_0": {"kinds": ["nothing"]}}', "t_cat_0|'nothing'"),
    ('{"t_cat_0": {"skew": -1}}', "t_cat_0|skew"),
    ('{"t_cat_0": {"min_partition": 4.5}}', "t_cat_0|min_partition"),
    ('{"t_cat_0": {"ranks": []}}', "t_cat_0|ranks"),
    ('{"t_cat_0": {"ranks": 5}}', "t_cat_0|ranks"),
    ('{"t_cat_0": {"ranks": [7]}}', "t_cat_0|rank 7"),
    ('{"t_cat_0": {"hosts": [3]}}', "t_cat_0|host 3"),
    ('{"t_cat_0": {"together": ""}}', "t_cat_0|together"),
    ('{"t_cat_0": {"together": 5}}', "t_cat_0|together"),
    ('{"t_cat_0": {"storage": "moon"}}', "t_cat_0|storage"),
    ('{"t_cat_0": {"storage": 5}}', "t_cat_0|storage"),
    ('{"t_cat_0": {"cache_load_factor": 2}}', "t_cat_0|cache_load_factor"),
    ('{"t_cat_0": {"cache_load_factor": "half"}}', "t_cat_0|cache_load_factor|number"),
]

_GIVEN = "--plan {own}/plan.json"
_LIMITS = "--constraints {own}/constraints.json"

MISTAKES = [
    *mistakes(
        "rayrec train",
        "clicks",
        [
            (_GIVEN, says, edited("plan.json", "plan.json", place, value))
            for place, value, says in PLAN
        ],
    ),
    *mistakes(
        "rayrec train",
        "clicks",
        [(_GIVEN, says, content("plan.json", text)) for text, says in NO_PLANS],
    ),
    *mistakes(
        "rayrec plan",
        "plan, own topology",
        [
            ("", says, edited("topology.json", "topology.json", place, value))
            for place, value, says in TOPOLOGY
        ],
    ),
    *mistakes(
        "rayrec plan",
        "plan",
        [(_LIMITS, says, content("constraints.json", text)) for text, says in CONSTRAINTS],
    ),
]
