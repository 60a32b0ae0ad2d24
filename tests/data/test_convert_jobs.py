"""The Criteo and MovieLens conversions: on small files written here, and on the real data where it
is present.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import random
import re
import timeit
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from jobs import convert_criteo as criteo_job
from jobs import convert_movielens as movielens_job
from jobs.convert_criteo import CATEGORIES, DENSE, convert_criteo, parse_hex
from jobs.convert_movielens import convert_movielens
from jobs.movielens_files import GENRES
from rayrec.command import run_command
from rayrec.data import FeatureSchema, ParquetDataset
from rayrec.data.hashing import hash_integers
from rayrec.errors import ConfigError, InputError

DATA = Path(os.environ.get("RAYREC_DATA", Path(__file__).parents[3] / "shared" / "data"))
CRITEO, MOVIELENS = DATA / "criteo-tiny" / "train.tiny.csv", DATA / "ml-100k"
needs_criteo = pytest.mark.skipif(
    not CRITEO.exists(), reason=f"no Criteo sample at {CRITEO} (set RAYREC_DATA)"
)
needs_movielens = pytest.mark.skipif(
    not MOVIELENS.exists(), reason=f"no MovieLens-100k at {MOVIELENS} (set RAYREC_DATA)"
)


def criteo_rows(rng: random.Random, n: int) -> list[list[str]]:
    def row() -> list[str]:
        dense = [rng.choice(("", "0", "-2", str(rng.randrange(5000)))) for _ in DENSE]
        return [
            str(rng.randrange(2)),
            *dense,
            *(rng.choice(("", f"{rng.getrandbits(32):08x}")) for _ in CATEGORIES),
        ]

    return [row() for _ in range(n)]


def expected_row(row: list[str], buckets: int) -> list:
    dense = [float(np.float32(math.log1p(max(float(x or 0), 0.0)))) for x in row[1:14]]
    ids = [
        None if not x else int(hash_integers(np.array([int(x, 16)]), buckets)[0]) for x in row[14:]
    ]
    return [int(row[0]), *dense, *ids]


def read(folder: Path) -> list[list]:
    return [list(r.values()) for r in ds.dataset(folder).to_table().to_pylist()]


@pytest.mark.parametrize("layout", ["tsv", "csv", "csv with id", "gz"])
def test_criteo_text_equals_reading_row_by_row(tmp_path, layout):
    rows = criteo_rows(random.Random(0), 300)
    tab = layout in ("tsv", "gz")
    lines = ["\t".join(r) if tab else ",".join((["7"] if "id" in layout else []) + r) for r in rows]
    if not tab:
        lines.insert(
            0, ",".join([*(["Id"] if "id" in layout else []), "Label", *DENSE, *CATEGORIES])
        )
    file = tmp_path / ("a.gz" if layout == "gz" else "a.txt")
    text = ("\n".join(lines) + "\n").encode()
    file.write_bytes(gzip.compress(text) if layout == "gz" else text)
    done = convert_criteo(
        [file], tmp_path / "out", num_buckets=1000, dim=8, eval_fraction=0.2, seed=3
    )
    train, held_out = read(done.train), read(done.eval)
    want = [expected_row(r, 1000) for r in rows]
    assert (done.rows_train, done.rows_eval) == (len(train), len(held_out)) and 30 < len(
        held_out
    ) < 90
    assert [r for r in want if r in train] == train and [
        r for r in want if r in held_out
    ] == held_out
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, want))
    schema = FeatureSchema.load(done.schema)
    assert sum(b.rows for b in ParquetDataset(done.train, schema).loader(0, 1, 64)) == len(train)


def test_the_criteo_split_depends_on_the_row_number_alone(tmp_path):
    rows = ["\t".join(r) for r in criteo_rows(random.Random(1), 200)]
    (tmp_path / "whole").write_text("\n".join(rows) + "\n")
    (tmp_path / "a").write_text("\n".join(rows[:77]) + "\n")
    (tmp_path / "b").write_text("\n".join(rows[77:]))
    one = convert_criteo([tmp_path / "whole"], tmp_path / "one", seed=5)
    two = convert_criteo([tmp_path / "a", tmp_path / "b"], tmp_path / "two", seed=5)
    other = convert_criteo([tmp_path / "whole"], tmp_path / "other", seed=6)
    assert read(one.train) == read(two.train) and read(one.eval) == read(two.eval)
    assert read(one.eval) != read(other.eval)


def test_criteo_refuses_what_it_cannot_read(tmp_path):
    row = ["1", *["3"] * 13, *["0a1b2c3d"] * 26]

    def bad(at: int, value: str) -> Path:
        file = tmp_path / "bad.tsv"
        file.write_text(
            "\t".join(row) + "\n" + "\t".join([*row[:at], value, *row[at + 1 :]]) + "\n"
        )
        return file

    cases = [
        (bad, (0, "2"), "label 2"),
        (bad, (0, ""), "label"),
        (bad, (2, "x"), r"bad\.tsv"),
        (bad, (20, "0g"), "C7 of .*'0g'"),
    ]
    cases += [
        (bad, (3, "nan"), r"column I3 of .*bad\.tsv holds nan"),
        (bad, (4, "inf"), "I4 of .* holds inf"),
    ]
    for make, args, message in cases:
        with pytest.raises(InputError, match=message):
            convert_criteo([make(*args)], tmp_path / "out")
    (tmp_path / "short").write_text("1\t2\t3\n")
    (tmp_path / "empty").write_text("")
    for name, message in (
        ("short", "has 3 columns"),
        ("empty", "has 0 columns"),
        ("none", "cannot read"),
    ):
        with pytest.raises(InputError, match=message):
            convert_criteo([tmp_path / name], tmp_path / "out")
    with pytest.raises(ConfigError, match="num_buckets=0"):
        convert_criteo([bad(0, "1")], tmp_path / "out", num_buckets=0)
    with pytest.raises(ConfigError, match=f"num_buckets={2**31}"):
        convert_criteo([bad(0, "1")], tmp_path / "out", num_buckets=2**31)
    with pytest.raises(InputError, match="all 2 rows were held out by eval_fraction"):
        convert_criteo([bad(0, "1")], tmp_path / "out", eval_fraction=1 - 1e-12)
    assert not (tmp_path / "out").exists(), "a conversion that fails leaves no folder"


@pytest.mark.seeds(range(5))
def test_hex_strings_read_as_their_values_also_when_sliced(seed):
    rng = random.Random(seed)
    words = [
        f"{rng.getrandbits(rng.choice((4, 32, 60))):{rng.choice('xX')}}"
        for _ in range(rng.randint(0, 40))
    ]
    assert parse_hex(pa.array(words, pa.string()), "x").tolist() == [int(w, 16) for w in words]
    assert parse_hex(pa.array(["zz", *words], pa.string()).slice(1), "x").tolist() == [
        int(w, 16) for w in words
    ]


@pytest.mark.parametrize("word", ["", "xy", "12 ", "é", "1" * 16])
def test_what_is_not_hex_is_refused(word):
    with pytest.raises(InputError, match="not a hex category"):
        parse_hex(pa.array(["ab", word]), "x")


def test_hex_strings_that_are_all_different_take_no_longer_than_repeated_ones():
    rng = random.Random(0)
    different = [f"{rng.getrandbits(32):08x}" for _ in range(20_000)]

    def seconds(words: list[str]) -> float:
        text = pa.array(words)
        return min(timeit.repeat(lambda: parse_hex(text, "x"), number=1, repeat=10))

    # one Python object for each different string made it 8 to 15 times as long
    assert seconds(different) < 4 * seconds(rng.choices(different[:100], k=len(different)))


@needs_criteo
def test_the_real_criteo_sample_converts_and_loads(tmp_path, capsys):
    assert (
        criteo_job.main(
            [
                str(CRITEO),
                str(tmp_path),
                "--num-buckets",
                "500",
                "--dim",
                "8",
                "--eval-fraction",
                "0.1",
            ]
        )
        == 0
    )
    with CRITEO.open() as file:
        rows = list(csv.reader(file))[1:]
    schema = FeatureSchema.load(tmp_path / "schema.json")
    train, held_out = read(tmp_path / "train"), read(tmp_path / "eval")
    assert sorted(map(repr, train + held_out)) == sorted(
        repr(expected_row(r[1:], 500)) for r in rows
    )
    loaded = sum(
        b.rows
        for part in ("train", "eval")
        for b in ParquetDataset(tmp_path / part, schema).loader(0, 1, 128)
    )
    assert loaded == len(rows) == 1999
    assert "1999" not in capsys.readouterr().err


def small_movielens(folder: Path) -> Path:
    folder.mkdir()
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n10\t24\tM\twriter\t85711\n3\t17\tF\tother\tT8H1N\n"
    )
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        '5\tA "B" \t1995\tDrama War\n7\tC\tV\tDrama\n9\tD\t1995\tComedy Drama War\n'
    )
    ratings = [f"{(10, 3)[i % 2]}\t{(5, 7, 9)[i % 3]}\t{i % 5 + 1}\t88{i}" for i in range(40)]
    (folder / "ml-100k.inter").write_text(
        "\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *ratings]) + "\n"
    )
    return folder


def test_movielens_joins_users_and_items_to_ratings(tmp_path):
    done = convert_movielens(small_movielens(tmp_path / "in"), tmp_path / "out", seed=1)
    assert (done.rows_train, done.rows_eval) == (36, 4)
    # Comedy, Drama, War by place; items 5, 7, 9 by place
    genres = {0: [1, 2], 1: [1], 2: [0, 1, 2]}
    want = []
    for i in range(40):
        user, item = i % 2, i % 3
        # age bucket, gender (F, M), occupation (other, writer), zip (85, T8)
        side = [(1, 1, 1, 0), (0, 0, 0, 1)][user]
        stars, year = i % 5 + 1, 0 if item != 1 else 1
        time = int(f"88{i}")
        want.append([int(stars >= 4), user, item, genres[item], *side, year, float(stars), time])
    assert sorted(map(repr, read(done.train) + read(done.eval))) == sorted(map(repr, want))


def test_a_split_by_time_holds_out_the_latest_ratings(tmp_path, capsys):
    source, out = small_movielens(tmp_path / "in"), tmp_path / "out"
    arguments = [str(source), str(out), "--split", "time", "--eval-fraction", "0.25"]
    assert run_command(movielens_job.main, arguments) == 0
    times = [[row[-1] for row in read(out / part)] for part in ("train", "eval")]
    assert [sorted(part) for part in times] == [
        sorted([*range(880, 890), *range(8810, 8840)])[:30],
        sorted([*range(880, 890), *range(8810, 8840)])[30:],
    ]
    assert times[0] != sorted(times[0])  # batches are mixed
    assert run_command(movielens_job.main, [*arguments[:2], "--split", "user"]) == 2
    with pytest.raises(ConfigError, match="split='user'"):
        convert_movielens(source, tmp_path / "other", split="user")


@pytest.mark.parametrize("split", ["leave-one-out", "time"])
def test_the_ratings_are_an_event_log_with_histories_of_items(tmp_path, capsys, split):
    source, out = small_movielens(tmp_path / "in"), tmp_path / "out"
    inter = source / "ml-100k.inter"
    inter.write_text(
        re.sub(r"\t88(\d*)\n", lambda found: f"\t{880 + int(found[1]) // 7}\n", inter.read_text())
    )
    arguments = [str(source), str(out), "--sequences", "3", "--split", split]
    assert run_command(movielens_job.main, arguments) == 0
    assert "40 events of 2 users" in capsys.readouterr().out
    times = [880 + i // 7 for i in range(40)]
    rows = {user: [i for i in range(40) if i % 2 == user] for user in range(2)}
    # a tenth is 4, and all events of the time of the fourth from the end are held out with it
    test = {i for i in range(40) if times[i] >= times[36]}
    validation = {i for i in range(40) if times[i] >= times[32]} - test
    if split == "leave-one-out":
        test, validation = {38, 39}, {36, 37}
    schema = FeatureSchema.load(out / "schema.json")
    for part, wanted in (("test", test), ("validation", validation)):
        data = ParquetDataset(out / "log", schema, where=f"split == '{part}'")
        loader = data.loader(0, 1, 64, shuffle=False, ordered=True, keep_columns=["user"])
        batch = next(loader)
        loader.close()
        order = [i for user in rows for i in rows[user] if i in wanted]
        before = [rows[i % 2][: rows[i % 2].index(i)][-3:] for i in order]
        found = {name: bags.to_dense() for name, bags in batch.sparse_features.to_dict().items()}
        found |= {name: bags.to_dense() for name, bags in batch.sequences.items()}
        lists = {name: [bag.tolist() for bag in bags] for name, bags in found.items()}
        assert lists["history"] == [[i % 3 for i in past] for past in before]
        assert lists["history_time"] == [[times[i] for i in past] for past in before]
        assert lists["item"] == [[i % 3] for i in order]
        assert lists["event_time"] == [[times[i]] for i in order]
    assert [table.name for table in schema.embedding_configs()] == ["t_item"]


def test_what_has_no_effect_beside_sequences_is_refused(tmp_path, capsys):
    source = small_movielens(tmp_path / "in")
    arguments = [str(source), str(tmp_path / "out"), "--sequences", "3"]
    for more in (["--seed", "1"], ["--eval-fraction", "0.1"], ["--split", "random"]):
        assert run_command(movielens_job.main, [*arguments, *more]) == 2
        assert more[0 if "random" not in more else 1].lstrip("-") in capsys.readouterr().err
    assert run_command(movielens_job.main, [*arguments[:2], "--split", "leave-one-out"]) == 2
    assert not (tmp_path / "out").exists()


def test_movielens_names_what_is_wrong(tmp_path, capsys):
    source = small_movielens(tmp_path / "in")
    for fraction in (0.0, 1.0, math.nan, math.inf, 1e-9):
        with pytest.raises(ConfigError, match=f"eval_fraction={fraction}"):
            convert_movielens(source, tmp_path / "out", eval_fraction=fraction)
    for rating in ("nan", "inf", "", "1e2"):
        lines = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n10\t5\t3\t1\n"
        (source / "ml-100k.inter").write_text(f"{lines}10\t5\t{rating}\t1\n")
        with pytest.raises(InputError, match=f"'rating' holds '{rating}' in row 1"):
            convert_movielens(source, tmp_path / "out")
    with pytest.raises(InputError, match="neither"):
        convert_movielens("x" * 300, tmp_path / "out")
    with pytest.raises(ConfigError, match="too long"):
        convert_movielens(small_movielens(tmp_path / "again"), tmp_path / ("x" * 300))
    items = (tmp_path / "again" / "ml-100k.item").read_text()
    (tmp_path / "again" / "ml-100k.item").write_text(f"{items}5\tE\t1990\tWar\n")
    with pytest.raises(InputError, match="item_id '5' is in the list of them twice"):
        convert_movielens(tmp_path / "again", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (source / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n10\t5\t3\t1\n99\t5\t3\t1\n"
    )
    with pytest.raises(InputError, match="row 1 names user_id '99'"):
        convert_movielens(source, tmp_path / "out")
    (source / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n10\t5\tgood\t1\n"
    )
    with pytest.raises(InputError, match=r"ml-100k\.inter: column 'rating' holds 'good'"):
        convert_movielens(source, tmp_path / "out")
    (source / "ml-100k.user").write_text("user_id:token\tage:token\n10\t3\n")
    assert run_command(movielens_job.main, [str(source), str(tmp_path / "out")]) == 2
    assert run_command(criteo_job.main, [str(source / "none"), str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "no column 'gender'" in errors[0] and "none" in errors[1]


def test_a_second_conversion_does_not_mix_with_the_first(tmp_path, capsys):
    """Rows of both would be read together; with --overwrite the second takes the place of the
    first.
    """
    source, out = small_movielens(tmp_path / "in"), tmp_path / "out"
    arguments = [str(source), str(out), "--eval-fraction", "0.5"]
    assert run_command(movielens_job.main, arguments) == 0
    (out / "train" / "older.parquet").write_bytes(
        (out / "train" / "part-00000.parquet").read_bytes()
    )
    (out / "mine.txt").write_text("not of the conversion")
    before = read(out / "train")
    assert run_command(movielens_job.main, arguments) == 2
    assert "already holds train and eval and schema.json" in capsys.readouterr().err
    assert read(out / "train") == before
    assert run_command(movielens_job.main, [*arguments, "--overwrite"]) == 0
    assert len(read(out / "train")) == len(before) // 2 and (out / "mine.txt").exists()


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path, capsys):
    source, out = small_movielens(tmp_path / "in"), tmp_path / "out"
    assert run_command(movielens_job.main, [str(source), str(out), "--eval-fraction", "0.5"]) == 0
    before = sorted(path.name for path in out.rglob("*"))
    (source / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n10\t5\tgood\t1\n"
    )
    assert run_command(movielens_job.main, [str(source), str(out), "--overwrite"]) == 2
    assert sorted(path.name for path in out.rglob("*")) == before


def test_binary_input_is_no_criteo_log(tmp_path, capsys):
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    assert run_command(criteo_job.main, [str(tmp_path / "noise"), str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "noise" in line


@pytest.mark.slow
@needs_movielens
def test_the_files_of_grouplens_convert_to_the_same(tmp_path):
    """The real data, written as GroupLens writes them, give the same rows as the tab-separated
    form.
    """
    as_grouplens(MOVIELENS, tmp_path / "lens")
    assert movielens_job.main([str(MOVIELENS), str(tmp_path / "a")]) == 0
    assert movielens_job.main([str(tmp_path / "lens"), str(tmp_path / "b")]) == 0
    for part in ("train", "eval"):
        assert read(tmp_path / "a" / part) == read(tmp_path / "b" / part)
    assert (tmp_path / "a" / "schema.json").read_text() == (
        tmp_path / "b" / "schema.json"
    ).read_text()


def as_grouplens(source: Path, out: Path) -> None:
    """u.data, u.user and u.item with what the tab-separated files say."""
    out.mkdir()

    def rows(name: str) -> list[list[str]]:
        return [
            line.split("\t")
            for line in (source / name).read_text(encoding="utf-8").splitlines()[1:]
        ]

    (out / "u.data").write_text("".join("\t".join(row) + "\n" for row in rows("ml-100k.inter")))
    (out / "u.user").write_text("".join("|".join(row) + "\n" for row in rows("ml-100k.user")))
    lines = []
    for item, _, year, genres in rows("ml-100k.item"):
        flags = ["1" if genre in genres.split(" ") else "0" for genre in GENRES]
        lines.append(
            "|".join([item, "L\u00e9on", f"01-Jan-{year}" if year else "", "", "http://x", *flags])
        )
    (out / "u.item").write_text("\n".join(lines) + "\n", encoding="latin-1")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("u.data", "1|2|3\n", "with 4 columns"),
        ("u.item", "1|T|01-Jan-1995||u" + "|7" * 19 + "\n", "row 0 holds '7' for genre unknown"),
    ],
)
def test_a_bad_file_of_grouplens_is_named(tmp_path, name, text, says):
    (tmp_path / "u.data").write_text("1\t1\t5\t0\n")
    (tmp_path / "u.user").write_text("1|24|M|technician|85711\n")
    (tmp_path / "u.item").write_text("1|T|01-Jan-1995||u" + "|0" * 19 + "\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=says):
        convert_movielens(tmp_path, tmp_path / "out")


@needs_movielens
def test_the_real_movielens_converts_without_leaks(tmp_path):
    """Sizes of the known set; train and eval share no rating; held-out rows depend on the seed; no
    column repeats the rating.
    """
    assert movielens_job.main([str(MOVIELENS), str(tmp_path / "a")]) == 0
    train, held_out = read(tmp_path / "a" / "train"), read(tmp_path / "a" / "eval")
    assert (len(train), len(held_out)) == (90_000, 10_000)
    assert not {tuple(r[1:3]) for r in train} & {tuple(r[1:3]) for r in held_out}
    schema = FeatureSchema.load(tmp_path / "a" / "schema.json")
    assert (
        schema.limits()["user"] == 943
        and schema.limits()["item"] == 1682
        and schema.limits()["genres"] == 19
    )
    assert schema.columns() == (
        "label",
        "user",
        "item",
        "genres",
        "age",
        "gender",
        "occupation",
        "zip",
        "year",
    )
    assert sum(
        b.labels.sum().item()
        for b in ParquetDataset(tmp_path / "a" / "train", schema).loader(0, 1, 9000)
    ) == sum(r[0] for r in train)
    assert movielens_job.main([str(MOVIELENS), str(tmp_path / "b"), "--seed", "1"]) == 0
    assert read(tmp_path / "b" / "eval") != held_out
