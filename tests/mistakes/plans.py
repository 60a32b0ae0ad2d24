"""Mistakes in plans, topologies and constraints, which are JSON files too."""

from __future__ import annotations

from typing import Any

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import DROP, content, edited

DEEP = "[" * 100_000

# (place, value, what the last line says) in a plan for one rank
PLAN: list[tuple[str, Any, str]] = [
    ("format", DROP, "format"),
    ("format", "other", "format"),
    ("version", 9, "version"),
    ("world_size", 0, "rank"),
    ("world_size", "1", "world_size"),
    ("world_size", 2, "world_size"),
    ("hosts", [[0, 1]], "ranks"),
    ("hosts", [[1]], "hosts"),
    ("tables.t_cat_0", DROP, "t_cat_0"),
    ("tables.nothing", {}, "nothing"),
    ("tables.t_cat_0.row_cuts", [5, 200], "t_cat_0|0"),
    ("tables.t_cat_0.row_cuts", [0, 300], "t_cat_0|300"),
    ("tables.t_cat_0.row_cuts", [0, 90, 80, 200], "t_cat_0"),
    ("tables.t_cat_0.row_cuts", [0], "t_cat_0"),
    ("tables.t_cat_0.row_cuts", "all", "t_cat_0|row_cuts"),
    ("tables.t_cat_0.row_cuts", [0, 2.5], "t_cat_0|row_cuts"),
    ("tables.t_cat_0.col_cuts", [0, 3, 8], "t_cat_0"),
    ("tables.t_cat_0.col_cuts", [0, 16], "t_cat_0"),
    ("tables.t_cat_0.col_cuts", DROP, "t_cat_0|col_cuts"),
    ("tables.t_cat_0.owners", [[1]], "t_cat_0|rank"),
    ("tables.t_cat_0.owners", [[-1]], "t_cat_0"),
    ("tables.t_cat_0.owners", [[0, 0]], "t_cat_0"),
    ("tables.t_cat_0.owners", [], "t_cat_0"),
    ("tables.t_cat_0.owners", DROP, "t_cat_0|owners"),
    ("tables.t_cat_0.storage.kind", "moon", "t_cat_0|storage"),
    ("tables.t_cat_0.storage", DROP, "t_cat_0|storage"),
    ("tables.t_cat_0.extra", 1, "t_cat_0|extra"),
    ("estimates.ranks", [], "estimates"),
    ("extra", 1, "extra"),
]

NO_PLANS = [
    ("", "plan.json|JSON"),
    ("{", "plan.json|JSON"),
    ("[]", "plan.json|object"),
    ("{}", "plan.json|format"),
    (DEEP, "plan.json|JSON"),
    ('{"format": "rayrec.plan", "format": "rayrec.plan"}', "plan.json|twice"),
]

TOPOLOGY: list[tuple[str, Any, str]] = [
    ("hosts", DROP, "hosts"),
    ("hosts", [], "hosts"),
    ("hosts", [[0, 2]], "hosts"),
    ("hosts", [[0], []], "hosts"),
    ("hosts", "one", "hosts"),
    ("device", "tpu", "device"),
    ("device", DROP, "device"),
    ("memory_bytes", [], "memory_bytes"),
    ("memory_bytes", [-1], "memory_bytes"),
    ("memory_bytes", [10], "memory"),
    ("memory_bytes", [1.5], "memory_bytes"),
    ("memory_bw", 0, "memory_bw"),
    ("memory_bw", float("nan"), "NaN"),
    ("memory_bw", 1e-308, "speeds|inf seconds"),
    ("intra_host_bw", -5, "intra_host_bw"),
    ("inter_host_bw", "fast", "inter_host_bw"),
    ("latency_s", float("inf"), "Infinity"),
    ("latency_s", -1, "latency_s"),
    ("input_hidden", 2, "input_hidden"),
    ("rates", 5, "rates"),
    ("extra", 5, "extra"),
    ("", "words", "object"),
]

CONSTRAINTS: list[tuple[str, str]] = [
    ("", "constraints.json|JSON"),
    ("{", "constraints.json|JSON"),
    ("[]", "constraints.json|object"),
    (DEEP, "constraints.json|JSON"),
    ('{"t_cat_0": {"kinds": ["row_wise"]}, "t_cat_0": {}}', "constraints.json|twice"),
    ('{"nothing": {}}', "'nothing'"),
    ('{"t_cat": {}}', "did you mean"),
    ('{"t_cat_0": 5}', "t_cat_0|object"),
    ('{"t_cat_0": {"kind": ["row_wise"]}}', "t_cat_0|kind"),
    ('{"t_cat_0": {"kinds": []}}', "t_cat_0|kinds"),
    ('{"t_cat_0": {"kinds": "row_wise"}}', "t_cat_0|kinds"),
    ('{"t_cat_0": {"kinds": ["nothing"]}}', "t_cat_0|'nothing'"),
    ('{"t_cat_0": {"kinds": [5]}}', "t_cat_0|kinds"),
    ('{"t_cat_0": {"pooling_factor": 0}}', "t_cat_0|pooling_factor"),
    ('{"t_cat_0": {"pooling_factor": NaN}}', "NaN"),
    ('{"t_cat_0": {"pooling_factor": 1e308}}', "t_cat_0|pooling_factor"),
    ('{"t_cat_0": {"pooling_factor": "many"}}', "t_cat_0|pooling_factor|number"),
    ('{"t_cat_0": {"skew": -1}}', "t_cat_0|skew"),
    ('{"t_cat_0": {"skew": [1]}}', "t_cat_0|skew|number"),
    ('{"t_cat_0": {"min_partition": 6}}', "t_cat_0|min_partition"),
    ('{"t_cat_0": {"min_partition": 4.5}}', "t_cat_0|min_partition"),
    ('{"t_cat_0": {"weighted": "yes"}}', "t_cat_0|weighted"),
    ('{"t_cat_0": {"ranks": []}}', "t_cat_0|ranks"),
    ('{"t_cat_0": {"ranks": 5}}', "t_cat_0|ranks"),
    ('{"t_cat_0": {"ranks": [true]}}', "t_cat_0|ranks"),
    ('{"t_cat_0": {"ranks": [7]}}', "t_cat_0|rank 7"),
    ('{"t_cat_0": {"hosts": [3]}}', "t_cat_0|host 3"),
    ('{"t_cat_0": {"together": ""}}', "t_cat_0|together"),
    ('{"t_cat_0": {"together": 5}}', "t_cat_0|together"),
    ('{"t_cat_0": {"apart": [1]}}', "t_cat_0|apart"),
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
