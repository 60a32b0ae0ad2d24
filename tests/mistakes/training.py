"""Mistakes in the options of jobs.train_dlrm: values, paths, options that contradict."""

from __future__ import annotations

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import copied, folder

HUGE = "1" + "0" * 30
LONG = "x" * 300

VALUES = [
    ("--ranks x", "--ranks|whole number"),
    ("--ranks ''", "--ranks|whole number"),
    ("--ranks 1.5", "--ranks|whole number"),
    ("--ranks 2:", "--ranks|LEAST:MOST"),
    ("--ranks 4:2", "--ranks|LEAST:MOST"),
    ("--ranks 0:2", "--ranks|LEAST:MOST"),
    ("--ranks 1:2:3", "--ranks|LEAST:MOST"),
    ("--model nothing", "--model|'dcn'"),
    ("--model ''", "--model"),
    ("--dense-layers ''", "--dense-layers|whole numbers"),
    ("--dense-layers 64,", "--dense-layers|whole numbers"),
    ("--dense-layers 0", "--dense-layers|whole numbers"),
    ("--dense-layers=-8", "--dense-layers|whole numbers"),
    ("--dense-layers 8.5", "--dense-layers|whole numbers"),
    (f"--dense-layers {HUGE}", "--dense-layers|at most"),
    ("--dense-layers 4000000000", "--dense-layers|at most"),
    ("--over-layers 64;32", "--over-layers|whole numbers"),
    ("--plan nothing", "plan 'nothing'|row_wise"),
    ("--plan ''", "plan ''|row_wise"),
    (f"--plan {LONG}", "plan|row_wise"),
    ("--plan {data}", "plan|row_wise"),
    ("--cpus-per-rank 0", "--cpus-per-rank|above 0"),
    ("--cpus-per-rank=-1", "--cpus-per-rank|above 0"),
    ("--cpus-per-rank nan", "--cpus-per-rank|above 0"),
    ("--cpus-per-rank inf", "--cpus-per-rank|above 0"),
    ("--cpus-per-rank x", "--cpus-per-rank|a number"),
    ("--cpus-per-rank 1e9", "--cpus-per-rank|processors"),
    ("--gpu", "GPU"),
    ("--global-batch 0", "--global-batch|at least 1"),
    ("--global-batch=-5", "--global-batch|at least 1"),
    ("--global-batch 2.5", "--global-batch|whole number"),
    ("--global-batch nan", "--global-batch|whole number"),
    ("--steps 0", "--steps|at least 1"),
    ("--steps=-1", "--steps|at least 1"),
    ("--steps x", "--steps|whole number"),
    ("--optimizer nothing", "--optimizer|rowwise_adagrad"),
    ("--dense-optimizer lamb", "--dense-optimizer|adam"),
    ("--sparse-lr=-0.1", "--sparse-lr|at least 0"),
    ("--sparse-lr nan", "--sparse-lr|finite"),
    ("--sparse-lr inf", "--sparse-lr|finite"),
    ("--sparse-lr x", "--sparse-lr|a number"),
    ("--dense-lr=-1", "--dense-lr|at least 0"),
    ("--dense-lr nan", "--dense-lr|finite"),
    ("--dense-lr ''", "--dense-lr|a number"),
    ("--qcomms-forward fp8", "--qcomms-forward|int8"),
    ("--qcomms-backward ''", "--qcomms-backward|int8"),
    ("--seed=-1", "--seed|between 0"),
    ("--seed 9223372036854775808", "--seed|between 0"),
    ("--seed 0.5", "--seed|whole number"),
    ("--timeout 0", "--timeout|above 0"),
    ("--timeout=-3", "--timeout|above 0"),
    ("--timeout nan", "--timeout|above 0"),
    ("--timeout inf", "--timeout|at most"),
    ("--timeout 1e12", "--timeout|at most"),
    ("--heartbeat-timeout 0", "--heartbeat-timeout|above 0"),
    ("--heartbeat-timeout nan", "--heartbeat-timeout|above 0"),
    ("--heartbeat-timeout x", "--heartbeat-timeout|a number"),
    ("--profile ''", "--profile"),
    ("--profile s3://bucket/profile", "file system"),
    ("--profile {data}/plan.json --profile-steps 1 --profile-skip 1", "profile|folder"),
    ("--profile /proc/nothing --profile-steps 1 --profile-skip 1", "profile|folder"),
    ("--profile {own}/p --profile-steps 0", "--profile-steps|at least 1"),
    ("--profile {own}/p --profile-skip=-1", "--profile-skip|at least"),
    ("--profile {own}/p --profile-steps 5", "profile takes|4 steps"),
    ("--nothing", "unrecognized arguments|--nothing"),
    ("extra", "unrecognized arguments|extra"),
    ("'two\nlines'", "unrecognized arguments|lines"),
    ("--step 4", "unrecognized arguments"),
]

PATHS = [
    ("--train ''", "--train"),
    ("--train {data}/nothing", "nothing"),
    (f"--train {{data}}/{LONG}", "xxx"),
    ("--train nofs://bucket/data", "nofs"),
    ("--train {data}/plan.json", "plan.json|Parquet"),
    ("--train {own}/empty", "empty|0 files", folder("empty")),
    ("--train {data}/runs", "'label' is missing"),
    ("--eval ''", "--eval"),
    ("--eval {data}/nothing", "nothing"),
    ("--eval {data}/clicks/schema.json", "schema.json|Parquet"),
    ("--schema ''", "--schema"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--schema {data}", "directory"),
    (f"--schema {LONG}", "--schema|name too long"),
    ("--schema {data}/plan.json", "plan.json|unknown field 'format'"),
    ("--checkpoint-dir ''", "--checkpoint-dir"),
    ("--checkpoint-dir {data}/plan.json", "--checkpoint-dir"),
    ("--checkpoint-dir {data}/plan.json/run", "--checkpoint-dir"),
    ("--checkpoint-dir /proc/nothing/run", "--checkpoint-dir"),
    ("--checkpoint-dir nofs://bucket/run", "nofs"),
    ("--checkpoint-dir s3://bucket", "names no folder"),
    ("--checkpoint-dir /", "names no folder"),
    ("--result ''", "--result"),
    ("--result {data}", "--result|folder"),
    ("--result {data}/plan.json/result.json", "--result"),
    ("--result /proc/nothing/result.json", "--result"),
    (f"--result {{own}}/{LONG}", "--result"),
    ("--result nofs://bucket/result.json", "nofs"),
]

TOGETHER = [
    ("--epochs 1", "steps|epochs|one of them"),
    ("--rows 100", "--rows|--train"),
    ("--eval-rows 100", "--eval-rows|--train"),
    ("--ranks 1", "--ranks|--local"),
    ("--ranks 1:2", "--ranks|--local"),
    ("--ranks 0", "--ranks|at least 1"),
    ("--placement-timeout 5", "placement|--local"),
    ("--pin-cores", "--pin-cores|--local"),
    ("--pin-cores --gpu", "--pin-cores"),
    ("--pin-cores --cpus-per-rank 0.5", "--pin-cores"),
    ("--profile-steps 1", "--profile-steps|without --profile"),
    ("--profile-skip 1", "--profile-skip|without --profile"),
    ("--keep 2", "--keep|--checkpoint-dir"),
    ("--checkpoint-every 2", "--checkpoint-every|--checkpoint-dir"),
    ("--checkpoint-dir {own}/run --checkpoint-every 0", "--checkpoint-every|at least 1"),
    ("--checkpoint-dir {own}/run --checkpoint-every x", "--checkpoint-every|whole number"),
    ("--checkpoint-dir {own}/run --keep 0", "--keep|at least 1"),
    ("--checkpoint-dir {own}/run --keep=-1", "--keep|at least 1"),
    ("--resume latest", "--resume latest|--checkpoint-dir"),
    ("--new-data", "--new-data|--resume"),
    ("--init-optimizer", "--init-optimizer|--init-from"),
    (
        "--resume {data}/runs/clicks/step-00000002 --init-from {data}/runs/clicks/step-00000002",
        "one",
    ),
    (
        "--plan {own}/plan.json",
        "plan is for 2 ranks|world has 1",
        copied("plan2.json", "plan.json"),
    ),
]

BARE = [
    (f"--eval {{data}}/clicks/eval --local {'--steps 2'}", "--eval|need --train"),
    ("--schema {data}/clicks/schema.json --local --steps 2", "--schema|need --train"),
    ("--train {data}/clicks/train --local --steps 2", "--train needs --schema"),
    ("--rows 0 --local", "--rows|at least 1"),
    ("--rows=-5 --local", "--rows|at least 1"),
    ("--rows x --local", "--rows|whole number"),
    ("--rows 1e4 --local", "--rows|whole number"),
    (f"--rows {HUGE} --local", "free"),
    ("--rows 10000000000000 --local", "free"),
    ("--rows 2000 --eval-rows 0 --local", "--eval-rows|at least 2"),
    ("--rows 2000 --eval-rows 1 --local", "--eval-rows|at least 2"),
    ("--rows 2000 --eval-rows 10000000000000 --local", "free"),
    ("--rows 2000 --eval-rows 500 --steps 2 --epochs 2 --local", "one of them"),
    ("--rows 2000 --eval-rows 500 --steps 2 --seed=-3 --local", "--seed"),
    ("--rows 2000 --steps 2 --local --checkpoint-dir {data}/plan.json", "--checkpoint-dir"),
    ("--rows 2000 --steps 2 --local --resume {data}/nothing", "nothing"),
    ("--rows 2000 --steps 2 --local --plan nothing", "plan 'nothing'"),
    ("--rows 2000 --steps 2 --local --gpu", "GPU"),
]

ON_RANKS = [
    ("--ranks 0", "--ranks|at least 1"),
    ("--ranks=-2", "--ranks|at least 1"),
    ("--pin-cores --cpus-per-rank 1.5", "--pin-cores"),
    ("--placement-timeout 0", "--placement-timeout|above 0"),
    ("--placement-timeout nan", "--placement-timeout|above 0"),
    ("--placement-timeout x", "--placement-timeout|a number"),
    ("--cpus-per-rank 1e-9", "--cpus-per-rank|0.0001"),
    ("--cpus-per-rank 1.5", "--cpus-per-rank|whole"),
    ("--plan {data}/plan.json --ranks 2", "plan is for 1 ranks|2"),
    ("--plan {data}/plan.json --ranks 1:2", "plan is for one number of ranks|num_workers=(1, 2)"),
    ("--ranks 1:2", "num_workers=(1, 2)|--checkpoint-dir"),
]

OVERWRITES = [
    ("--result {own}/schema.json", "--result|--schema", copied("clicks/schema.json", "schema.json"))
]

DIVERGES = [
    ("--sparse-lr 1e30 --steps 40", "diverged|learning rates"),
    ("--dense-lr 1e30 --steps 40 --dense-optimizer sgd", "diverged|learning rates"),
    ("--sparse-lr 1e38 --optimizer sgd --steps 40", "diverged|learning rates"),
]

FULL_DISK = [
    ("--checkpoint-dir {own}/run", "too large", 3_000, "run*"),
    ("--checkpoint-dir {own}/run --checkpoint-every 2", "too large", 3_000, "run*"),
]

MISTAKES = [
    *mistakes("train_dlrm", "clicks", VALUES),
    *mistakes("train_dlrm", "clicks", PATHS),
    *mistakes("train_dlrm", "clicks", TOGETHER),
    *mistakes("train_dlrm", "", BARE),
    *mistakes("train_dlrm", "clicks on ranks", ON_RANKS),
    *mistakes("train_dlrm", "own schema", OVERWRITES),
    *mistakes("train_dlrm", "clicks", DIVERGES, late=True),
    *[
        m
        for options, says, limit, left in FULL_DISK
        for m in mistakes(
            "train_dlrm", "clicks", [(options, says)], code=1, file_bytes=limit, may_leave=left
        )
    ],
    *mistakes("train_dlrm", "clicks", [("--result {own}/r", "large")], code=1, file_bytes=400),
    *mistakes("train_dlrm", "planted", [("", "large")], code=1, file_bytes=20_000),
    *mistakes("train_dlrm", "clicks", [("--over-layers 300000,300000", "memory")], code=1),
    *mistakes("train_dlrm", "clicks", [("", "storage")], code=1, stdout="/dev/full"),
]
