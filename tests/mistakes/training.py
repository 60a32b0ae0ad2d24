"""Mistakes in the options and keys of a training run: values, paths, keys that contradict."""

from __future__ import annotations

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import copied, folder

HUGE = "1" + "0" * 30
LONG = "x" * 300
PROFILE = "--set run.profile.skip_steps=1 --set run.profile.steps=1 --set run.profile.path="
STEP = "{data}/runs/clicks/step-00000002"
LARGE = "--set model.over_layers="
FEW = "--local --set data.planted.rows_train=2000 --set run.steps=2"

VALUES = [
    ("--ranks x", "--ranks|whole number"),
    ("--ranks 4:2", "--ranks|LEAST:MOST"),
    ("--plan nothing", "plan 'nothing'|row_wise"),
    ("--plan ''", "plan ''|row_wise"),
    (f"--plan {LONG}", "plan|row_wise"),
    ("--plan {data}", "plan|row_wise"),
    ("--set model.model=''", "model ''|dlrm, dcn, din, hstu_ranking, mmoe, ple, two_tower"),
    ("--set model.dense_layers=64,", "dense_layers is '64,'|list"),
    (f"--set model.dense_layers=[{HUGE}]", "dense_layers|64 bits"),
    ("--set scaling.cpus_per_worker=nan", "cpus_per_worker=nan"),
    ("--set scaling.use_gpu=true", "GPU"),
    ("--set run.dense_optimizer.name=lamb", "'lamb'|adam"),
    ("--set run.sparse_optimizer.lr=inf", "lr=inf"),
    ("--set run.dense_optimizer.lr=-1", "lr=-1"),
    ("--set run.qcomms_forward=fp8", "qcomms_forward|'fp8'|int8"),
    ("--set run.timeout_s=1e12", "timeout_s|1000000000000"),
    ("--set run.heartbeat_timeout_s=nan", "heartbeat_timeout_s=nan"),
    ("--set run.profile.path=''", "profile"),
    ("--set run.profile.path=s3://bucket/profile", "file system"),
    (f"{PROFILE}{{data}}/plan.json", "profile|folder"),
    (f"{PROFILE}/proc/nothing", "profile|folder"),
    (f"{PROFILE}{{own}}/p --set run.profile.steps=0", "steps=0|at least 1"),
    (f"{PROFILE}{{own}}/p --set run.profile.steps=5", "profile takes|4 steps"),
    ("--steps 4", "'--steps'|--set run.steps"),
    ("extra", "the run file extra|No such file"),
    ("'two\nlines'", "the run file two lines|No such file"),
]

PATHS = [
    ("--set data.train=''", "train"),
    ("--set data.train={data}/nothing", "nothing"),
    (f"--set data.train={{data}}/{LONG}", "xxx"),
    ("--set data.train=nofs://bucket/data", "nofs"),
    ("--set data.train={data}/plan.json", "plan.json|Parquet"),
    ("--set data.train={own}/empty", "empty|0 files", folder("empty")),
    ("--set data.train={data}/runs", "'label' is missing"),
    ("--set data.eval={data}/nothing", "nothing"),
    ("--set data.eval={data}/clicks/schema.json", "schema.json|Parquet"),
    ("--set data.schema={data}/nothing.json", "cannot read [data] schema|nothing.json"),
    ("--set data.schema={data}", "directory"),
    (f"--set data.schema={LONG}", "schema|name too long"),
    ("--set data.schema={data}/plan.json", "plan.json|unknown field 'format'"),
    ("--checkpoint-dir ''", "--checkpoint-dir"),
    ("--checkpoint-dir {data}/plan.json", "run's folder|plan.json"),
    ("--checkpoint-dir {data}/plan.json/run", "run's folder|plan.json/run"),
    ("--checkpoint-dir /proc/nothing/run", "run's folder|/proc/nothing"),
    ("--checkpoint-dir nofs://bucket/run", "nofs"),
    ("--checkpoint-dir /", "names no folder"),
    ("--result ''", "--result"),
    ("--result {data}/plan.json/result.json", "--result"),
    ("--result /proc/nothing/result.json", "--result"),
    (f"--result {{own}}/{LONG}", "--result"),
    ("--result nofs://bucket/result.json", "nofs"),
]

TOGETHER = [
    ("--ranks 1:2", "--ranks|--local"),
    (
        "--plan {own}/plan.json",
        "plan is for 2 ranks|world has 1",
        copied("plan2.json", "plan.json"),
    ),
]

BARE = [
    ("--local --set data.eval={data}/clicks/eval", "[data] needs train"),
    ("--local --set data.train={data}/clicks/train", "[data] needs schema"),
    ("--local --set data.planted.rows_train=0", "rows_train=0|at least 1"),
    (f"--local --set data.planted.rows_train={HUGE}", "64 bits"),
    ("--local --set data.planted.rows_train=10000000000000", "free"),
    (f"{FEW} --set data.planted.rows_eval=1", "rows_eval=1|at least 2"),
    (f"{FEW} --set data.planted.rows_eval=10000000000000", "free"),
    (f"{FEW} --checkpoint-dir {{data}}/plan.json", "run's folder|plan.json"),
    (f"{FEW} --set run.resume_from={{data}}/nothing", "nothing"),
    (f"{FEW} --plan nothing", "plan 'nothing'"),
    (f"{FEW} --set scaling.use_gpu=true", "GPU"),
]

ON_RANKS = [
    ("--ranks 0", "--ranks|at least 1"),
    ("--set scaling.placement_timeout_s=0", "placement_timeout_s=0"),
    ("--plan {data}/plan.json --ranks 2", "plan is for 1 ranks|2"),
    ("--plan {data}/plan.json --ranks 1:2", "plan is for one number of ranks|num_workers=(1, 2)"),
    ("--ranks 1:2", "num_workers=(1, 2)|storage_path"),
]

OVERWRITES = [
    (
        "--result {own}/schema.json",
        "--result|[data] schema",
        copied("clicks/schema.json", "schema.json"),
    )
]

DIVERGES = [
    ("--set run.sparse_optimizer.lr=1e30 --set run.steps=40", "diverged|learning rates"),
    (
        "--set run.dense_optimizer.lr=1e30 --set run.steps=40 --set run.dense_optimizer.name=sgd",
        "diverged|learning rates",
    ),
]

FULL_DISK = [
    ("--checkpoint-dir {own}/run", "too large", 3_000, "run*"),
    ("--checkpoint-dir {own}/run --set run.checkpoint.every_n_steps=2", "too large", 3_000, "run*"),
]

MISTAKES = [
    *mistakes("rayrec train", "clicks", VALUES),
    *mistakes("rayrec train", "clicks", PATHS),
    *mistakes("rayrec train", "clicks", TOGETHER),
    *mistakes("train_dlrm", "", BARE),
    *mistakes("rayrec train", "clicks on ranks", ON_RANKS),
    *mistakes("rayrec train", "own schema", OVERWRITES),
    *mistakes("rayrec train", "clicks", DIVERGES, late=True),
    *[
        m
        for options, says, limit, left in FULL_DISK
        for m in mistakes(
            "rayrec train", "clicks", [(options, says)], code=1, file_bytes=limit, may_leave=left
        )
    ],
    *mistakes("rayrec train", "clicks", [("--result {own}/r", "large")], code=1, file_bytes=400),
    *mistakes("train_dlrm", "planted", [("", "large")], code=1, file_bytes=20_000),
    *mistakes("rayrec train", "clicks", [(f"{LARGE}[300000,300000]", "memory")], code=1),
    *mistakes("rayrec train", "clicks", [("", "storage")], code=1, stdout="/dev/full"),
]
