"""Mistakes at jobs.convert_criteo and jobs.convert_movielens: options, paths, and text that is
none.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mistakes.case import mistakes
from tests.mistakes.sound import criteo_row
from tests.mistakes.spoil import Spoiler, both, content, copied, folder

LONG = "x" * 300

COMMON = [
    ("--dim 0", "--dim|x>=1"),
    ("--dynamic 0", "--dynamic|x>=1"),
    ("--eval-fraction 1", "--eval-fraction|x<1"),
    ("--eval-fraction=-0.1", "--eval-fraction|0<=x"),
    ("--seed=-1", "--seed|0<=x"),
    ("--nothing", "No such option '--nothing'"),
]

OF_CRITEO = [
    ("--num-buckets 0", "--num-buckets|1<=x"),
    ("--num-buckets 3000000000", "--num-buckets|2147483647"),
    ("--dynamic 64", "num_buckets=100 and dynamic=64"),
    ("--eval-fraction 0.9999999", "no row to train on"),
]

OF_FILMS = [
    ("--eval-fraction 0", "eval_fraction=0.0|between 0 and 1"),
    ("--dynamic 1" + "0" * 20, "t_user|elements"),
    ("--eval-fraction 0.00001", "holds out 0"),
    ("--eval-fraction 0.99999", "holds out 1500"),
]

CRITEO_PATHS = [
    ("", "Missing argument"),
    ("{data}/criteo.tsv", "Missing argument"),
    ("'' {own}/out", "SOURCE"),
    ("{data}/criteo.tsv ''", "OUT"),
    ("{data}/nothing.tsv {own}/out", "nothing.tsv"),
    (f"{LONG} {{own}}/out", "too long"),
    ("{data}/ml {own}/out", "ml"),
    ("{data}/clicks/train/part-00000.parquet {own}/out", "part-00000.parquet"),
    ("{data}/ml/ml-100k.inter {own}/out", "4 columns"),
    ("{data}/criteo.tsv {data}/plan.json", "plan.json"),
    ("{data}/criteo.tsv {data}/plan.json/out", "plan.json"),
    ("{data}/criteo.tsv /proc/nothing", "/proc/nothing"),
    (f"{{data}}/criteo.tsv {{own}}/{LONG}", "too long"),
    ("{data}/criteo.tsv {data}/clicks", "already holds"),
    ("{data}/criteo.tsv {data}/nothing.tsv {own}/out", "nothing.tsv"),
]

FILM_PATHS = [
    ("", "Missing argument"),
    ("{data}/ml", "Missing argument"),
    ("'' {own}/out", "SOURCE"),
    ("{data}/ml ''", "OUT"),
    ("{data}/nothing {own}/out", "nothing"),
    (f"{LONG} {{own}}/out", "neither"),
    ("{data}/plan.json {own}/out", "neither"),
    ("{data}/clicks {own}/out", "neither"),
    ("{data}/ml {data}/plan.json", "plan.json"),
    ("{data}/ml /proc/nothing", "/proc/nothing"),
    ("{data}/ml {data}/clicks", "already holds"),
]


def _log(change: Callable[[list[str]], list[str]], title: str, name: str = "criteo.tsv") -> Spoiler:
    """Write a Criteo log of 50 rows whose row 20 is changed."""

    def write(own: Path, data: Path) -> None:
        draw = random.Random(5)
        rows = [criteo_row(draw) for _ in range(50)]
        rows[20] = change(rows[20])
        (own / name).write_text("".join("\t".join(row) + "\n" for row in rows))

    return Spoiler(f"[{title}]", write)


def _put(place: int, value: str) -> Callable[[list[str]], list[str]]:
    return lambda row: [*row[:place], value, *row[place + 1 :]]


def _header(own: Path, data: Path) -> None:
    names = ["label", *(f"C{i}" for i in range(1, 27)), *(f"I{i}" for i in range(1, 14))]
    rows = (data / "criteo.tsv").read_text().replace("\t", ",")
    (own / "criteo.tsv").write_text(",".join(names) + "\n" + rows)


def _zipped(keep: float) -> Spoiler:
    def write(own: Path, data: Path) -> None:
        whole = gzip.compress((data / "criteo.tsv").read_bytes())
        (own / "criteo.tsv.gz").write_bytes(whole[: int(len(whole) * keep)])

    return Spoiler(f"[{keep:.0%} of a gzip file]", write)


LOGS = [
    ("", "0 columns", content("criteo.tsv", "")),
    ("", "columns", content("criteo.tsv", "\n\n\n")),
    ("", "columns", content("criteo.tsv", b"\x00\xff\xfe" * 500, "binary text")),
    ("", "columns", content("criteo.tsv", "1\t2\t3\n")),
    ("", "criteo.tsv", _log(lambda row: row[:-1], "a row of 39 fields")),
    ("", "criteo.tsv", _log(lambda row: [*row, "0"], "a row of 41 fields")),
    ("", "label 2", _log(_put(0, "2"), "label 2")),
    ("", "label", _log(_put(0, ""), "no label")),
    ("", "criteo.tsv", _log(_put(0, "yes"), "label yes")),
    ("", "label nan", _log(_put(0, "nan"), "label nan")),
    ("", "many", _log(_put(1, "many"), "a count of words")),
    ("", "I1|nan", _log(_put(1, "nan"), "a count of nan")),
    ("", "I2|inf", _log(_put(2, "inf"), "a count of inf")),
    ("", "C1|'xyz'", _log(_put(14, "xyz"), "a category that is no hex")),
    ("", "C26|digits", _log(_put(39, "0" * 40), "a category of 40 digits")),
    ("", "header|label", Spoiler("[a header in another order]", _header)),
]

ZIPPED = [
    ("{own}/criteo.tsv.gz {own}/out", "criteo.tsv.gz", _zipped(0.5)),
    ("{own}/criteo.tsv.gz {own}/out", "criteo.tsv.gz", content("criteo.tsv.gz", "1\t2\t3\n")),
    ("{own}/criteo.tsv.gz {own}/out", "criteo.tsv.gz", content("criteo.tsv.gz", "")),
    ("{own}/criteo.bz2 {own}/out", "criteo.bz2", content("criteo.bz2", b"BZh9\x00\x01", "no bz2")),
]


def _films(name: str, change: Callable[[list[str]], list[str]], title: str) -> Spoiler:
    """Copy the film files and change the lines of one."""

    def write(own: Path, data: Path) -> None:
        path = own / "ml" / f"ml-100k.{name}"
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")

    return both(copied("ml", "ml"), Spoiler(f"[ml-100k.{name}: {title}]", write))


def _cell(row: int, place: int, value: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        fields = lines[row].split("\t")
        fields[place] = value
        return [*lines[:row], "\t".join(fields), *lines[row + 1 :]]

    return change


def _without(name: str) -> Spoiler:
    return both(
        copied("ml", "ml"),
        Spoiler(f"[no ml-100k.{name}]", lambda own, data: (own / f"ml/ml-100k.{name}").unlink()),
    )


def _empty(lines: list[str]) -> list[str]:
    return lines[:1]


def _grouplens(name: str, text: Any, title: str) -> Spoiler:
    """Write the files of GroupLens, one of them with other text."""
    texts = {
        "u.data": "1\t1\t5\t880000000\n1\t2\t3\t880000001\n" * 10,
        "u.user": "1|24|M|writer|85711\n",
        "u.item": "".join(f"{i}|film|01-Jan-1995||url|{'|'.join('0' * 19)}\n" for i in (1, 2)),
    }
    spoilers = [content(f"ml/{key}", value) for key, value in {**texts, name: text}.items()]
    return Spoiler(f"[{name}: {title}]", both(*spoilers).write)


FILMS = [
    ("", "ml-100k.inter|neither", _without("inter")),
    ("", "ml-100k.user", _without("user")),
    ("", "ml-100k.item", _without("item")),
    ("", "'rating'", _films("inter", _cell(0, 2, "stars:float"), "no rating")),
    ("", "'age'", _films("user", _cell(0, 1, "years:token"), "no age")),
    ("", "'class'", _films("item", _cell(0, 3, "kind:token"), "no class")),
    ("", "'five'|row", _films("inter", _cell(7, 2, "five"), "a rating of words")),
    ("", "'nan'", _films("inter", _cell(7, 2, "nan"), "a rating of nan")),
    ("", "'inf'", _films("inter", _cell(7, 2, "inf"), "a rating of inf")),
    ("", "rating|''", _films("inter", _cell(7, 2, ""), "no rating in a row")),
    ("", "'old'|row", _films("user", _cell(7, 1, "old"), "an age of words")),
    ("", "user_id '999'", _films("inter", _cell(7, 0, "999"), "an unknown user")),
    ("", "item_id '999'", _films("inter", _cell(7, 1, "999"), "an unknown item")),
    ("", "user_id|twice", _films("user", lambda lines: [*lines, lines[3]], "a user twice")),
    ("", "item_id|twice", _films("item", lambda lines: [*lines, lines[3]], "an item twice")),
    ("", "ml-100k.inter", _films("inter", _empty, "no ratings")),
    ("", "ml-100k.inter", _films("inter", lambda lines: [*lines, "1\t2"], "a short row")),
    ("", "ml-100k.user", both(copied("ml", "ml"), content("ml/ml-100k.user", "", "no text"))),
    (
        "",
        "ml-100k.item",
        both(copied("ml", "ml"), content("ml/ml-100k.item", b"\xff\xfe\x00", "binary")),
    ),
    (
        "",
        "ml-100k.inter",
        both(copied("ml", "ml"), content("ml/ml-100k.inter", b"\x00" * 900, "zeros")),
    ),
    ("", "u.data", _grouplens("u.data", "1,1,5\n", "commas")),
    ("", "u.data|'x'", _grouplens("u.data", "1\t1\tx\t8\n" * 20, "a rating of words")),
    ("", "u.user", _grouplens("u.user", "1|24\n", "two fields")),
    ("", "u.user", _grouplens("u.user", b"\x00\x01\x02", "binary")),
    (
        "",
        "u.item|genre",
        _grouplens("u.item", f"1|f|01-Jan-1995||u|{'|'.join('2' * 19)}\n", "flags of 2"),
    ),
    ("", "neither", folder("ml")),
]

FULL_DISK = [("", "large")]

MISTAKES = [
    *mistakes("convert_criteo", "criteo", [*COMMON, *OF_CRITEO]),
    *mistakes("convert_criteo", "", [*CRITEO_PATHS, *ZIPPED]),
    *mistakes("convert_criteo", "own criteo", LOGS),
    *mistakes("convert_criteo", "criteo", FULL_DISK, code=1, file_bytes=5000),
    *mistakes("convert_movielens", "films", [*COMMON, *OF_FILMS]),
    *mistakes("convert_movielens", "", FILM_PATHS),
    *mistakes("convert_movielens", "own films", FILMS),
    *mistakes("convert_movielens", "films", FULL_DISK, code=1, file_bytes=3000),
]
