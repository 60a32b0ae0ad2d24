"""Mistakes at `rayrec export`."""

from __future__ import annotations

from tests.mistakes.case import mistakes

EXPORTS = [
    ("--dtype int3", "--dtype|int3|int8"),
    ("--table t_cat_0", "NAME=TYPE"),
    ("--table t_cat_0=int3", "NAME=TYPE"),
    ("--table nothing=fp16", "no table 'nothing'|t_cat_0"),
    ("--table t_cat_0=fp16 --table t_cat_0=fp32", "'t_cat_0' twice"),
    ("--data {own}/nothing", "nothing"),
    ("--data ''", "--data"),
    ("--sample-rows 0", "--sample-rows|at least 1"),
    ("--max-logit-error 0", "--max-logit-error|above 0"),
    ("--max-auc-change nan", "--max-auc-change|above 0"),
    ("--dtype int4 --max-logit-error 1e-6", "in logit|at most 1e-06|these alone"),
    ("extra", "unrecognized arguments: extra"),
]

MISTAKES = [
    *mistakes("rayrec export", "export", EXPORTS),
    *mistakes(
        "rayrec export",
        "",
        [
            ("export", "CHECKPOINT, OUT"),
            ("export {data}/runs/clicks/step-00000004", "OUT"),
            ("export {data}/clicks {own}/served", "clicks|manifest.json"),
            ("export {own}/nothing {own}/served", "nothing|manifest.json"),
            ("export {data}/runs/clicks/step-00000004 {data}/clicks", "clicks holds"),
            ("export {data}/runs/clicks/step-00000004 s3://b/served", "another file system"),
        ],
    ),
]
