"""Mistakes at the rayrec command (plan, calibrate, make-data, chaos, none), at jobs.smoke, and in
the environment.
"""

from __future__ import annotations

import socket
import threading

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import content, copied, folder

LONG = "x" * 300
HUGE = "1" + "0" * 30

PLAN = [
    ("--schema ''", "--schema"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--schema {data}", "directory"),
    (f"--schema {LONG}", "too long"),
    ("--topology ''", "--topology"),
    ("--topology nothing", "'nothing'|presets"),
    (f"--topology {LONG}", "presets"),
    ("--topology {data}", "presets"),
    ("--topology {data}/plan.json", "plan.json"),
    ("--topology {data}/topology.json", "--ranks 2 contradicts"),
    ("--topology {data}/topology.json --ranks 1 --hosts 2", "--hosts 2 contradicts"),
    ("--topology {data}/topology.json --ranks 1 --reserve 0.1", "--reserve"),
    ("--ranks 0", "--ranks|1<=x"),
    ("--ranks 7 --hosts 2", "do not divide"),
    ("--ranks 1000000000", "--ranks|16384"),
    ("--hosts 0", "--hosts|1<=x"),
    ("--hosts 1000000000", "--hosts|16384"),
    ("--reserve 1", "--reserve|x<1"),
    ("--input-hidden 2", "--input-hidden|0<=x<=1"),
    ("--batch x", "--batch|integer"),
    (f"--batch {HUGE}", "batch"),
    ("--optimizer nothing", "--optimizer|rowwise_adagrad"),
    ("--kinds ''", "kind ''"),
    ("--kinds nothing", "'nothing'"),
    ("--kinds row_wise,", "kind ''"),
    ("--qcomms-forward fp8", "--qcomms-forward|int8"),
    ("--qcomms-backward ''", "--qcomms-backward"),
    ("--constraints ''", "--constraints"),
    ("--constraints {data}/nothing.json", "nothing.json"),
    ("--constraints {data}", "directory"),
    ("--profile ''", "--profile"),
    ("--profile {data}/nothing", "nothing"),
    ("--profile {data}/plan.json", "plan.json"),
    ("--profile {data}/films/train", "cat_0"),
    ("--profile {own}/empty", "empty", folder("empty")),
    ("--profile {own}/x.parquet", "x.parquet", content("x.parquet", "words")),
    ("--out ''", "--out"),
    ("--out {data}", "--out|folder"),
    ("--out {data}/plan.json/p.json", "--out"),
    ("--out /proc/nothing/p.json", "--out"),
    (f"--out {{own}}/{LONG}", "--out|too long"),
    ("--html {data}", "--html|folder"),
    ("--html /proc/nothing/p.html", "--html"),
    ("--out {own}/p --html {own}/p", "--html|--out"),
    (
        "--out {own}/s.json --schema {own}/s.json",
        "--out|--schema",
        copied("clicks/schema.json", "s.json"),
    ),
    ("--diff ''", "--diff"),
    ("--diff {data}/nothing.json", "nothing.json"),
    ("--diff {data}/clicks/schema.json", "schema.json"),
    ("extra", "unexpected extra argument"),
]

CALIBRATE = [
    ("--ranks 0", "--ranks|x>=1"),
    ("--cpus 0", "--cpus|x>0"),
    ("--cpus 1.5", "cpus_per_worker=1.5"),
    ("--memory 0", "--memory|x>0"),
    ("--out ''", "--out"),
    ("--out {data}", "--out|folder"),
    ("--out {data}/plan.json/t.json", "--out"),
    ("--out /proc/nothing/t.json", "--out"),
    ("extra", "unexpected extra argument"),
]

MAKE = [
    ("--rows 0", "--rows|x>=1"),
    (f"--rows {HUGE}", "free"),
    ("--eval-rows 1", "--eval-rows|x>=2"),
    ("--eval-rows 100000000000000", "free"),
    ("--dim 0", "--dim|x>=1"),
    ("--dim 2", "dim"),
    ("--seed=-1", "--seed|0<=x"),
    ("--days 2", "--days|x>=3"),
    ("--days 10", "--eval-rows|--days"),
    ("--drift-day 5", "--drift-day|--days"),
]

MAKE_PATHS = [
    ("make-data", "Missing argument|DIR"),
    ("make-data ''", "DIR"),
    ("make-data {data}/clicks", "already holds|--overwrite"),
    ("make-data {data}", "no part of a data set|--overwrite"),
    ("make-data {data}/plan.json", "plan.json"),
    ("make-data {data}/plan.json/made", "plan.json"),
    ("make-data /proc/nothing", "/proc/nothing"),
    (f"make-data {{own}}/{LONG} --rows 10 --eval-rows 10", "too long"),
    ("make-data {own}/made --days 10 --lifetime 5", "--lifetime|--days"),
    ("make-data {own}/made --days 10 --drift-day 10", "drift_day=10|between 1 and 9"),
    (f"make-data {{own}}/made --days 10 --rows {HUGE}", "free"),
]

CHAOS = [
    ("", "Missing argument|COMMAND"),
    ("--", "Missing argument|COMMAND"),
    ("--nothing -- sh", "No such option '--nothing'"),
    ("--every 0s -- sh", "--every|above 0"),
    ("--every soon -- sh", "--every|such as 20s"),
    ("--every 1e12s -- sh", "--every|at most"),
    ("--signals HUP -- sh", "--signals|'HUP'|KILL, STOP"),
    ("--signals 9 -- sh", "--signals|'9'"),
    ("--signals KILL,SIGKILL -- sh", "--signals|twice"),
    ("--runs 0 -- sh", "--runs|x>=1"),
    ("--faults 0 -- sh", "--faults|x>=1"),
    ("--seed=-1 -- sh", "--seed|0<=x"),
    ("--timeout never -- sh", "--timeout|duration"),
    ("--driver=3 -- sh", "--driver|does not take a value"),
    ("--out {data} -- sh --checkpoint-dir {own}/c", "--out|folder"),
    ("--out /proc/nothing/o.json -- sh --checkpoint-dir {own}/c", "--out"),
    ("-- no-such-command --checkpoint-dir {own}/c", "'no-such-command'|not found"),
    ("-- '' --checkpoint-dir {own}/c", "''|not found"),
    ("no-such-command --checkpoint-dir {own}/c", "'no-such-command'|not found"),
    ("-- sh", "no --checkpoint-dir|add"),
    ("-- sh --checkpoint-dir", "no --checkpoint-dir|add"),
    ("-- sh --checkpoint-dir=", "no --checkpoint-dir|add"),
    ("-- sh --checkpoint-dir s3://bucket/run", "s3://bucket/run|this machine"),
    ("-- sh --checkpoint-dir {data}/clicks", "not an empty folder"),
    ("-- sh --checkpoint-dir {data}/plan.json", "not an empty folder"),
    ("-- sh --checkpoint-dir {data}/plan.json/c", "plan.json"),
    ("-- sh --checkpoint-dir /proc/nothing", "/proc/nothing"),
    ("-- sh --checkpoint-dir {own}/c --local", "one process|--ranks 1"),
    ("-- sh --checkpoint-dir {own}/c --set run.resume_from=latest", "run.resume_from=latest|leave"),
    ("-- sh --checkpoint-dir {own}/c --ranks many", "--ranks|'many'"),
    ("--nodes -- sh --checkpoint-dir {own}/c --ranks 1", "--nodes|2 ranks"),
]

ALONE = [
    ("plan", "Missing option|--schema"),
    ("plan --schema {data}/clicks/schema.json", "Missing option|--topology"),
    ("calibrate", "Missing option|--ranks"),
    ("calibrate --ranks 1", "Missing option|--out"),
]

FINE = [
    "--version",
    "--help",
    "plan --help",
    "calibrate --help",
    "make-data --help",
    "train --help",
    "chaos --help",
    "completion bash",
]

SMOKE = [
    ("--ranks 0", "--ranks|x>=1"),
    ("--cpus-per-rank 0", "--cpus-per-rank|x>0"),
    ("--cpus-per-rank 1.5", "cpus_per_worker=1.5|whole"),
    ("--pin-cores --cpus-per-rank 0.5", "pin_cores"),
    ("--pin-cores --gpu", "pin_cores"),
    ("--placement-timeout 0", "--placement-timeout"),
    ("--plan row_wise", "No such option '--plan'"),
    ("extra", "unexpected extra argument"),
]

RAY_STARTS = [
    ("--ranks 500", "500 ranks|CPU"),
    ("--ranks 1000000000", "1000000000 ranks|CPU"),
    ("--ranks 1 --gpu", "GPU"),
    ("--ranks 1 --cpus-per-rank 900", "900 CPU"),
]

ADDRESSES = [
    ("127.0.0.1:1", "RAY_ADDRESS|127.0.0.1:1|nothing answers|ray start --head"),
    ("nowhere.invalid:6379", "RAY_ADDRESS|nothing answers"),
    ("words", "RAY_ADDRESS|words"),
    ("127.0.0.1", "RAY_ADDRESS|127.0.0.1"),
    ("127.0.0.1:99999", "RAY_ADDRESS|99999"),
    ("127.0.0.1:-5", "RAY_ADDRESS|-5"),
    ("127.0.0.1:port", "RAY_ADDRESS|port"),
    (":", "RAY_ADDRESS"),
    ("ray://127.0.0.1:10001", "Ray Client"),
    ("http://127.0.0.1:8265", "RAY_ADDRESS"),
    ("gcs://127.0.0.1:1", "RAY_ADDRESS|nothing answers"),
    ("[::1]:1", "RAY_ADDRESS"),
]


class _Silent:
    """A server that takes connections and never says a word, on a port of its own."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        while True:
            self._taken.append(self._socket.accept()[0])


def silent_address() -> str:
    """Return an address that takes connections and never answers, as long as this process lives."""
    return _Silent().address


SHORT = "--steps 2 --global-batch 256"

MISTAKES = [
    *mistakes("rayrec plan", "plan", PLAN),
    *mistakes("rayrec plan", "plan", [("", "storage")], code=1, stdout="/dev/full"),
    *mistakes(
        "rayrec plan", "plan", [("--out {own}/p.json", "--out|large")], code=1, file_bytes=400
    ),
    *mistakes("rayrec calibrate", "calibrate", CALIBRATE),
    *mistakes("rayrec make-data", "make-data", MAKE),
    *mistakes("rayrec make-data", "", MAKE_PATHS),
    *mistakes("rayrec make-data", "make-data", [("", "large")], code=1, file_bytes=5000),
    *mistakes("rayrec chaos", "", [(f"chaos {line}", says) for line, says in CHAOS]),
    *mistakes("rayrec", "", ALONE),
    *mistakes("rayrec", "", [(line, "") for line in FINE], code=0),
    *mistakes("smoke", "", SMOKE),
    *mistakes("smoke", "", RAY_STARTS, cold=True),
    *[
        m
        for address, says in ADDRESSES
        for m in mistakes("smoke", "smoke", [("", says)], env={"RAY_ADDRESS": address}, cold=True)
    ],
    *mistakes(
        "smoke",
        "smoke",
        [("", "does not start|AF_UNIX")],
        env={"RAY_TMPDIR": f"/tmp/{'x' * 90}"},
        cold=True,
    ),
]
