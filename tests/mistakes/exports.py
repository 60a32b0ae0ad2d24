"""Mistakes at `rayrec export`, `rayrec serve`, `rayrec doctor` and `rayrec forget`."""

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
    ("--sample-rows 0", "--sample-rows|x>=1"),
    ("--max-logit-error 0", "--max-logit-error|x>0"),
    ("--max-auc-change nan", "--max-auc-change|finite"),
    ("--dtype int4 --max-logit-error 1e-6", "in logit|at most 1e-06|these alone"),
    ("extra", "unexpected extra argument (extra)"),
]

SERVE = "serve {own}/nothing --port 0 "
SERVES = [
    ("serve", "ARTIFACT"),
    ("serve '' --port 0", "ARTIFACT|is no path"),
    (SERVE, "nothing|manifest.json|rayrec export"),
    ("serve {data}/clicks --port 0", "clicks has no file manifest.json"),
    ("serve s3://b/served --port 0", "another file system"),
    (SERVE + "more", "unexpected extra argument (more)"),
    (SERVE + "--replicas 0", "--replicas|x>=1"),
    (SERVE + "--replicas many", "--replicas|'many'"),
    (SERVE + "--threads 0", "--threads|x>=1"),
    (SERVE + "--port 65536", "--port|0<=x<=65535"),
    (SERVE + "--http-port -1", "--http-port|0<=x<=65535"),
    (SERVE + "--port 9000 --http-port 9000", "port=9000 is both that of gRPC and of HTTP"),
    (SERVE + "--host ''", "host=''"),
    (SERVE + "--host nowhere.invalid", "cannot listen at nowhere.invalid|a host of this machine"),
    (SERVE + "--host 192.0.2.1", "cannot listen at 192.0.2.1|a host of this machine"),
    (SERVE + "--max-batch-rows 0", "--max-batch-rows|x>=1"),
    (SERVE + "--queue-rows 1.5", "--queue-rows|'1.5'"),
    (SERVE + "--drain 0", "--drain|0<x"),
    (SERVE + "--drain", "Option '--drain' requires an argument"),
    (SERVE + "--follow {data}/runs/clicks", "ARTIFACT|--follow RUN|not both"),
    (SERVE + "--poll 2", "--poll has no effect without --follow"),
    (SERVE + "--in-place", "--in-place has no effect without --follow"),
    ("serve --follow {data}/runs/clicks --port 0", "holds no base to begin with"),
    ("serve --follow {own}/nothing --port 0", "nothing holds no base"),
    ("serve --follow s3://b/run --port 0", "another file system"),
    ("serve --follow {data}/runs/clicks --poll 0 --port 0", "--poll|0<x"),
    (SERVE + "--workers 2", "No such option '--workers'"),
]

RUN = "doctor {data}/runs/clicks "
DOCTOR = [
    ("doctor", "RUN|CHECKPOINT|ARTIFACT"),
    ("doctor ''", "is no path"),
    ("doctor {own}/nothing", "nothing is neither a run"),
    ("doctor {data}/clicks", "clicks is neither a run"),
    ("doctor {data}/runs/clicks@newest", "clicks@newest is neither a run"),
    ("doctor {data}/runs/nothing@latest", "no complete checkpoint"),
    (RUN + "more", "unexpected extra argument (more)"),
    (RUN + "--html {own}", "--html|it is a folder"),
    (RUN + "--html", "Option '--html' requires an argument"),
    (RUN + "--arrow /proc/no/t.arrow", "--arrow|/proc/no/t.arrow"),
    (RUN + "--html {own}/one --arrow {own}/one", "--arrow|--html|name another file"),
]

FORGETS = [
    ("forget {data}/runs/clicks", "--keys"),
    ("forget --keys {own}/nothing.csv", "RUN"),
    ("forget --keys {own}/nothing.csv {data}/runs/clicks", "nothing.csv cannot be read"),
    ("forget --keys {data}/clicks/schema.json {data}/runs/clicks", "no known kind|.parquet"),
    ("forget --keys {own}/nothing.csv {own}/nothing", "nothing is no folder"),
    ("forget --keys {own}/nothing.csv s3://b/run", "another file system"),
    ("forget --keys {own}/nothing.csv --signing-key {own}/key {data}/runs/clicks", "nothing.csv"),
]

MISTAKES = [
    *mistakes("rayrec", "", DOCTOR),
    *mistakes("rayrec serve", "", SERVES),
    *mistakes("rayrec forget", "", FORGETS),
    *mistakes("rayrec export", "export", EXPORTS),
    *mistakes(
        "rayrec export",
        "",
        [
            ("export", "CHECKPOINT"),
            ("export {data}/runs/clicks/step-00000004", "OUT"),
            ("export {data}/clicks {own}/served", "clicks|manifest.json"),
            ("export {own}/nothing {own}/served", "nothing|manifest.json"),
            ("export {data}/runs/clicks/step-00000004 {data}/clicks", "clicks holds"),
            ("export {data}/runs/clicks/step-00000004 s3://b/served", "another file system"),
        ],
    ),
]
