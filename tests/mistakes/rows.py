"""Mistakes in data: columns, types, values, and files that are none."""

from __future__ import annotations

from typing import Any

from tests.mistakes.case import mistakes
from tests.mistakes.spoil import (
    MADE_UP,
    Spoiler,
    both,
    column,
    column_by,
    content,
    copied,
    cut,
    edited,
    folder,
    table_by,
)

ROW = f"row {MADE_UP}"
NAN, INF = float("nan"), float("inf")
SCHEMA = "clicks/schema.json"


def _negative_everywhere(values: list[Any]) -> list[Any]:
    return [-1] * len(values)


def _huge(table: Any) -> Any:
    """Values whose sum over a layer is infinite."""
    import pyarrow as pa

    for name in ("d_0", "d_1", "d_2"):
        values = pa.array([(-1) ** row * 3.4e38 for row in range(table.num_rows)], pa.float32())
        table = table.set_column(table.column_names.index(name), name, values)
    return table


def _words(values: list[Any]) -> list[str]:
    return [f"w{i}" for i in range(len(values))]


def _lists_with_null(values: list[Any]) -> list[list[Any]]:
    return [[1, None] if row == MADE_UP else [1] for row, _ in enumerate(values)]


def _twice(table: Any) -> Any:
    return table.append_column("cat_1", table["cat_1"])


def _damaged(own: Any, data: Any) -> None:
    (source,) = (data / "clicks" / "train").glob("*.parquet")
    whole = bytearray(source.read_bytes())
    whole[4 : len(whole) // 2] = bytes(len(whole) // 2 - 4)
    (own / "train").mkdir()
    (own / "train" / "part-00000.parquet").write_bytes(whole)


def _as_arrow(name: str, keep: float = 1.0) -> Spoiler:
    """Write the rows as an Arrow IPC file, of which a share of the bytes is kept."""

    def write(own: Any, data: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.read_table(data / "clicks" / "train")
        (own / "train").mkdir(exist_ok=True)
        path = own / "train" / name
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep)])

    return Spoiler(f"[{name} keeps {keep:.0%} of an Arrow file]", write)


PARQUET = "train/part-00000.parquet"

BEFORE = [
    ("", "'cat_2' is missing", table_by(lambda t: t.drop_columns(["cat_2"]), "no column cat_2")),
    ("", "'label' is missing", table_by(lambda t: t.drop_columns(["label"]), "no label")),
    ("", "'d_1' is missing", table_by(lambda t: t.drop_columns(["d_1"]), "no column d_1")),
    ("", "'cat_1' occurs 2 times", table_by(_twice, "two columns cat_1")),
    ("", "no rows", table_by(lambda t: t.slice(0, 0), "no rows")),
    ("", "'cat_2'|hash_buckets", column_by("cat_2", _words, "string", "words")),
    ("", "'d_0'|number", column_by("d_0", _words, "string", "words")),
    ("", "'label'|number", column_by("label", _words, "string", "words")),
    ("", "'cat_2'|list", column("cat_2", 1.0, "float")),
    ("", "'d_0'|number", column_by("d_0", lambda v: [[1]] * len(v), "list", "lists")),
    ("", "'label'|number", column_by("label", lambda v: [[1]] * len(v), "list", "lists")),
    ("", f"id -7|{ROW}", column("cat_0", -7)),
    ("", f"id 10000|{ROW}", column("cat_0", 10_000)),
    ("", f"id 10000|{ROW}", column("cat_5", [1, 10_000])),
    ("", f"label|2|{ROW}", column("label", 2)),
    ("", f"label|-1|{ROW}", column("label", -1)),
    ("", f"label|null|{ROW}", column("label", None)),
    ("", f"d_0|inf|{ROW}", column("d_0", INF)),
    ("", f"d_0|inf|{ROW}", column("d_0", -INF)),
    ("", "0 files", folder("train")),
    ("", "part-00000.parquet|Parquet", content(PARQUET, "")),
    ("", "part-00000.parquet|Parquet", content(PARQUET, "label,cat_0\n1,2\n")),
    ("", "part-00000.parquet|Parquet", cut("clicks/train/part-00000.parquet", PARQUET, 0.9)),
    ("", "part-00000.parquet|Parquet", cut("clicks/train/part-00000.parquet", PARQUET, 0.01)),
    ("", "none of them Parquet", content("train/part.csv", "label,cat_0\n1,2\n")),
    ("", "x.arrow|Arrow IPC", _as_arrow("x.arrow", 0.7)),
    ("", "x.arrow|Arrow IPC", content("train/x.arrow", "words")),
    ("", "x.arrow|Arrow IPC", content("train/x.arrow", "")),
    (
        "",
        "b/part-00000.parquet|hash_buckets",
        both(
            copied("clicks/train", "train"),
            column_by("cat_0", _words, "string", "words", target="train/b"),
        ),
    ),
    ("", "x.arrow|part-00000.parquet", both(copied("clicks/train", "train"), _as_arrow("x.arrow"))),
]

DURING = [
    ("--set run.steps=12", f"id -7|{ROW}", column("cat_0", -7, statistics=False)),
    ("--set run.steps=12", f"id 10000|{ROW}", column("cat_0", 10_000, statistics=False)),
    ("--set run.steps=12", f"id 10000|{ROW}", column("cat_5", [3, 10_000], statistics=False)),
    ("", f"null inside|{ROW}", column_by("cat_5", _lists_with_null, "list", "null in a list")),
    ("", f"label|nan|{ROW}", column("label", NAN, "float")),
    ("", f"label|0.5|{ROW}", column("label", 0.5, "float")),
    ("", f"label|2|{ROW}", column("label", 2, statistics=False)),
    ("", f"label|null|{ROW}", column("label", None, statistics=False)),
    ("", f"d_0|nan|{ROW}", column("d_0", NAN)),
    ("", f"d_0|inf|{ROW}", column("d_0", INF, statistics=False)),
    ("", "part-00000.parquet|Parquet", Spoiler("[half of the bytes are zero]", _damaged)),
    ("--set run.steps=12", "diverged|huge", table_by(_huge, "3.4e38 in d_0, d_1, d_2")),
]

HELD_OUT = [
    ("", "'cat_2' is missing", table_by(lambda t: t.drop_columns(["cat_2"]), "no column cat_2")),
    ("", f"label|2|{ROW}", column("label", 2)),
    ("", f"id -7|{ROW}", column("cat_0", -7)),
    ("", "no rows", table_by(lambda t: t.slice(0, 0), "no rows")),
    ("", "Parquet", content(PARQUET, "words")),
]

WEIGHTED = edited(SCHEMA, "schema.json", "features.5.weights", "w")


def _weights(make: Any, title: str) -> Spoiler:
    def change(table: Any) -> Any:
        import pyarrow as pa

        ids = table["cat_5"].to_pylist()
        return table.append_column("w", pa.array([make(row, bag) for row, bag in enumerate(ids)]))

    return both(table_by(change, title), WEIGHTED)


WEIGHTS = [
    ("", "'w' is missing", both(copied("clicks/train", "train"), WEIGHTED)),
    (
        "",
        f"{ROW}|one weight per id",
        _weights(lambda row, bag: [1.0] * (len(bag) + (row == MADE_UP)), "one weight too many"),
    ),
    ("", "weights", _weights(lambda row, bag: ["a"] * len(bag), "words as weights")),
    ("", "weights|nan", _weights(lambda row, bag: [NAN] * len(bag), "weights of nan")),
]

LINE_OF_WEIGHTS = (
    "train --set data.train={own}/train --set data.schema={own}/schema.json --local "
    "--set run.steps=4"
)

MISTAKES = [
    *mistakes("rayrec train", "own data", BEFORE),
    *mistakes("rayrec train", "own data", DURING, late=True),
    *mistakes("rayrec train", "own evaluation", HELD_OUT),
    *mistakes(
        "rayrec train", "own evaluation", [("", f"d_0|nan|{ROW}", column("d_0", NAN))], late=True
    ),
    *mistakes("rayrec train", "", [(LINE_OF_WEIGHTS, *rest) for _, *rest in WEIGHTS], late=True),
]
