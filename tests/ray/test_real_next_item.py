"""MovieLens' next films, by the commands of the page: converted, trained, exported and served."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from jobs import convert_movielens
from rayrec.checkpoint import TableReader, read_manifest, restore_checkpoint
from rayrec.cli.main import main
from rayrec.next_item_recipe import NextItemRecipe
from rayrec.serve import Predictor
from tests.unit.documents import BLOCKS
from tests.unit.running_replica import running

pytestmark = pytest.mark.slow
PAGE = [b for b in BLOCKS if b.page.stem == "sequences" and b.how == "not run"]


def test_the_page_leads_from_ratings_to_the_ten_films_of_the_trained_model(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    commands, run_file, scored, served = (block.code for block in PAGE)
    convert, train = commands.splitlines()
    words = convert.removeprefix("python -m jobs.convert_movielens ").split()
    words[0] = str(real_data / words[0])
    assert convert_movielens.main(words) == 0
    Path("sasrec.toml").write_text(run_file.replace("epochs = 12", "epochs = 2"))
    more = ["--set", "scaling.num_workers=0", "--set", "run.progress=off"]
    assert main([*train.removeprefix("rayrec ").split(), *more]) == 0
    for command in scored.replace("\\\n", "").splitlines():
        assert main([*shlex.split(command)[1:], "--local"]) == 0
    listed = pq.read_table("lists")
    assert set(listed.column_names) == {"user", "item", "score"} and listed.num_rows > 900

    export = served.splitlines()[0].removeprefix("rayrec ").split()
    assert main([*export, "--dtype", "fp32"]) == 0

    predictor = Predictor.load(export[-1])
    with running(predictor) as server:
        body = json.loads(re.search(r"-d '(.*)'", served)[1])
        status, said, _ = server.http("/predict", body)
        assert status == 200, said
        histories = [body["rows"][0]["history"], *some_histories()]
        asked = {**body, "rows": [{"history": past} for past in histories]}
        lists = server.http("/predict", asked)[1]["scores"]
    assert lists["item"][0] == said["scores"]["item"][0]
    for past, ids, scores in zip(histories, lists["item"], lists["score"], strict=True):
        wanted = ranked_by_the_checkpoint(export[1], past)
        assert ids == wanted.indices.tolist() and len(set(ids) - set(past)) == 10
        torch.testing.assert_close(torch.tensor(scores), wanted.values, rtol=1e-5, atol=1e-5)


def some_histories() -> list[list[int]]:
    """Of users of the log, as their events lie in it."""
    table = pq.read_table("data/films/log", columns=["user", "item", "time"]).sort_by("time")
    users = table.to_pandas().groupby("user")["item"].apply(list)
    return [users.iloc[number][-50:] for number in (0, 100, 900)]


def ranked_by_the_checkpoint(name: str, past: list[int]) -> torch.return_types.topk:
    """The first ten by plain torch, of items that follow another in training."""
    path = max(Path(name.removesuffix("@latest")).glob("step-*"))
    manifest, restored = read_manifest(str(path)), restore_checkpoint(str(path), [])
    recipe = NextItemRecipe.from_extras(manifest.extras, str(path))
    table = recipe.table()
    rows = TableReader(str(path), manifest).read(table.name, range(table.num_embeddings))
    encoder = recipe.model.encoder(table.embedding_dim).eval()
    prefix = "model.encoder."
    own = {n.removeprefix(prefix): t for n, t in restored.dense.items() if n.startswith(prefix)}
    encoder.load_state_dict(own)
    with torch.no_grad():
        state = encoder(rows[past], torch.tensor([0, len(past)]), None, None)[-1]
    scores = rows @ state + restored.dense["model.bias"]
    scores[~restored.dense["model.listed"]] = -torch.inf
    scores[past] = -torch.inf
    return scores.topk(10)
