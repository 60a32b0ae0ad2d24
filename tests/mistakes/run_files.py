"""Mistakes in run files and at `rayrec train`, `rayrec evaluate` and `rayrec predict`."""

from __future__ import annotations

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import content

CHANGES = [
    ("--set", "Option '--set' requires an argument"),
    ("--set 'run.name=\"a'", "without a second one"),
    ("--set run.steps=0", "[run]|steps=0|at least 1"),
    ("--set run.timeout_s=0", "[run]|timeout_s=0"),
    ("--set run.shuffle=yes", "shuffle is 'yes'|true or false"),
    ("--set run.publish.every_n_steps=5", "publish|storage_path"),
    ("--set run.publish.dtype=int8", "[run.publish]|exactly one"),
    ("--set run.sparse_optimizer.name=nothing", "'nothing'"),
    ("--set run.sparse_optimizer.type=[]", "type is []|one of"),
    ("--set run.sparse_optimizer.options.eps=-1", "eps=-1|zero or more"),
    ("--set run.sparse_optimizer.options.weight_decay=1e308", "weight_decay=1e+308|float32"),
    ("--set run.dense_optimizer.options.betas=[]", "dense_optimizer 'adam'"),
    ("--set run.dense_optimizer.options.weight_decay=1" + "0" * 400, "dense_optimizer 'adam'"),
    ("--set run.dense_optimizer.options.fused=x", "fused='x'|true or false"),
    ("--set run.dense_optimizer.options.capturable=true", "capturable|GPUs"),
    ("--set run.dense_optimizer.options.differentiable=true", "dense_optimizer 'adam'"),
    ("--set run.resume_from={own}/nothing", "nothing"),
    ("--set scaling.grow_after_s=5", "[scaling]|grow_after_s|num_workers=(least"),
    ("--set scaling.num_workers=[1,2]", "num_workers=(1, 2)|storage_path"),
    ("--set model.dense_layers=64", "dense_layers is 64|list"),
    ("--set plan.topology={own}/nothing.json", "nothing.json"),
    ("--set \"plan.constraints.nothing.kinds=['row_wise']\"", "'nothing'"),
    ("--set data.train={own}", "--data"),
    ("--set data.windows.size=2", "[data.windows] needs column"),
    ("--set data.windows.column=label --set data.windows.size=0", "[data.windows]|size=0"),
    ("--set data.windows.column=label --set data.windows.start=x", "start|whole number"),
    ("--set data.windows.column=nothing", "no column 'nothing'"),
    ("--set data.windows.column=d_0", "column 'd_0' of the windows has type|int64"),
    ("--set data.windows.column=label --set data.windows.start=7", "no rows in windows|start=7"),
    ("--set data.windows.column=label --set run.steps=4000", "steps=4000|walked once"),
    ("--result {data}", "--result|folder"),
    ("{own}/nothing.toml", "nothing.toml|No such file"),
    ("--nothing", "No such option '--nothing'"),
]

FILES = [
    ("[run", "run.toml, line 1"),
    ("[run]\nsteps = many", "run.toml, line 2"),
    ("[run]\nstepz = 3", "run.toml: [run] has stepz|steps"),
    ("steps = 3", "run.toml|steps"),
    ("[run.profile]\nsteps = 3", "[run.profile] needs path"),
    ("[data]\ntrain = 'x'", "--data"),
    ('[plan]\nplan = "\\u0000"', "plan"),
]

SCORES = [
    ("--data ''", "--data"),
    ("--data {own}/nothing", "nothing"),
    ("--plan rowwise", "neither a file nor one of"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--global-batch-size 0", "--global-batch-size|x>=1"),
    ("--result {data}", "--result|folder"),
    ("extra", "unexpected extra argument (extra)"),
]

PREDICTIONS = [
    ("--keys cat_0,cat_0", "--keys|twice"),
    ("--keys nothing", "nothing"),
    ("--out {data}", "--out|folder"),
    ("--out {data}/clicks/eval/scores.parquet", "lies in the folder of --data"),
    ("--columns d_0 --keys d_0", "--columns|--keys|the same"),
    ("--workers 2", "--ranks|--local"),
    ("--workers 0", "--workers|x>=1"),
    ("--batch-size 0", "--batch-size|x>=1"),
    ("--batch-size 8 --global-batch-size 8", "--batch-size|--global-batch-size|the same"),
]

FOLDERS = [
    ("--out {data}", "--out|holds"),
    ("--out {data}/clicks/eval/scores", "--out|among the data"),
    ("--out {data}/clicks/schema.json", "--out|is a file"),
    ("--out /proc/nothing/scores", "--out"),
    ("--out s3://bucket/scores", "--out|another file system"),
    ("--columns nothing", "'nothing' is missing"),
    ("--columns score", "'score'|name of the scores"),
    ("--columns d_0,d_0", "--columns|twice"),
    ("--where nothing=1", "nothing"),
    ("--where 'label > 5'", "no rows where"),
    ("--result {own}/result.json", "--result|rayrec evaluate"),
    ("--data {own}/nothing", "nothing"),
    ("extra", "unexpected extra argument (extra)"),
]

ARTIFACTS = [
    *(row for row in FOLDERS if "--result" not in row[0]),
    ("--out {own}/scores.parquet", "--out|one file|folder"),
    ("--ranks 2", "--ranks|is an artifact"),
    ("--local", "--local|is an artifact"),
    ("--gpu", "--gpu|is an artifact"),
    ("--plan row_wise", "--plan|is an artifact"),
    ("--global-batch-size 8", "--global-batch-size|is an artifact"),
    ("--result {own}/result.json", "--result|is an artifact"),
    ("--schema {data}/nothing.json", "nothing.json"),
    ("--schema {data}/films/schema.json", "missing"),
    ("--workers 0", "--workers|x>=1"),
    ("--batch-size 0", "--batch-size|x>=1"),
]

MISTAKES = [
    *mistakes("rayrec train", "train", CHANGES),
    *mistakes(
        "rayrec train", "run file", [("", says, content("run.toml", text)) for text, says in FILES]
    ),
    *mistakes("rayrec evaluate", "scores", SCORES),
    *mistakes("rayrec predict", "predictions", PREDICTIONS),
    *mistakes("rayrec predict", "folder", FOLDERS),
    *mistakes("rayrec predict", "artifact", ARTIFACTS),
]
