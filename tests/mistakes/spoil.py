"""Ways to spoil sound files, as values that say what they do.

Each function here returns a `Spoiler`: called with the mistake's own folder and the folder of sound
files, it writes the spoilt files into the former.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DROP = object()  # as a value: remove the field
MADE_UP = 137  # the row that gets a wrong value

Write = Callable[[Path, Path], None]


@dataclass(frozen=True, slots=True)
class Spoiler:
    """A way to spoil files, with a title for people."""

    title: str
    write: Write

    def __call__(self, own: Path, data: Path) -> None:
        self.write(own, data)


def both(*spoilers: Spoiler) -> Spoiler:
    """Spoil one thing after another."""

    def write(own: Path, data: Path) -> None:
        for spoiler in spoilers:
            spoiler(own, data)

    return Spoiler(" ".join(spoiler.title for spoiler in spoilers), write)


def content(name: str, value: str | bytes, title: str = "") -> Spoiler:
    """Write a file with this content."""

    def write(own: Path, data: Path) -> None:
        target = own / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value if isinstance(value, bytes) else value.encode())

    return Spoiler(f"[{title or f'{name} is {value[:30]!r}'}]", write)


def copied(source: str, name: str) -> Spoiler:
    """Copy a sound file or folder."""

    def write(own: Path, data: Path) -> None:
        copy_of(data / source, own / name)

    return Spoiler("", write)


def folder(name: str) -> Spoiler:
    """Make an empty folder."""
    return Spoiler(
        f"[{name} is an empty folder]", lambda own, data: (own / name).mkdir(parents=True)
    )


def edited(source: str, name: str, place: str, value: Any) -> Spoiler:
    """Copy a JSON file and set or drop one field of it.

    Args:
        source: the sound file.
        name: of the copy.
        place: the way to the field, such as tables.0.name; "" is the whole.
        value: what to write, or DROP.
    """

    def write(own: Path, data: Path) -> None:
        root = json.loads((data / source).read_text())
        if not place:
            root = value
        else:
            *way, last = [int(step) if step.isdigit() else step for step in place.split(".")]
            inner = root
            for step in way:
                inner = inner[step]
            if value is DROP:
                del inner[last]
            elif isinstance(inner, list) and last == len(inner):
                inner.append(value)
            else:
                inner[last] = value
        (own / name).write_text(json.dumps(root))

    what = f"without {place}" if value is DROP else f"{place or 'all'}={json.dumps(value)[:40]}"
    return Spoiler(f"[{name}: {what}]", write)


def column(
    name: str,
    value: Any,
    kind: str = "",
    *,
    source: str = "clicks/train",
    target: str = "train",
    statistics: bool = True,
) -> Spoiler:
    """Copy Parquet data with one wrong value in a column.

    Args:
        value: for one row; a list stands for the ids of a row.
        kind: type of the column then, such as "float"; by default as it was.
        statistics: keep what tells of the value before training.
    """

    def change(values: list[Any]) -> list[Any]:
        values[MADE_UP] = value
        return values

    return column_by(name, change, kind, f"{value!r}", source, target, statistics)


def column_by(
    name: str,
    change: Callable[[list[Any]], Sequence[Any]],
    kind: str,
    title: str,
    source: str = "clicks/train",
    target: str = "train",
    statistics: bool = True,
) -> Spoiler:
    """Copy Parquet data with a changed column; as `column`, by a function of all values."""

    def write(own: Path, data: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pq.read_table(data / source)
        kinds = {"float": pa.float32(), "string": pa.string(), "list": pa.list_(pa.int64())}
        made = pa.array(change(table[name].to_pylist()), kinds.get(kind, table[name].type))
        place = table.column_names.index(name)
        (own / target).mkdir(parents=True, exist_ok=True)
        path = own / target / "part-00000.parquet"
        spoilt = table.set_column(place, name, made)
        pq.write_table(spoilt, path, row_group_size=1000, write_statistics=statistics)

    return Spoiler(f"[column {name}: {title}{' ' + kind if kind else ''}]", write)


def table_by(
    change: Callable[[Any], Any], title: str, source: str = "clicks/train", target: str = "train"
) -> Spoiler:
    """Copy Parquet data through a function of the whole table."""

    def write(own: Path, data: Path) -> None:
        import pyarrow.parquet as pq

        (own / target).mkdir(parents=True, exist_ok=True)
        table = change(pq.read_table(data / source))
        pq.write_table(table, own / target / "part-00000.parquet")

    return Spoiler(f"[{title}]", write)


def cut(source: str, name: str, keep: float) -> Spoiler:
    """Copy a file and keep only a share of its bytes."""

    def write(own: Path, data: Path) -> None:
        whole = (data / source).read_bytes()
        target = own / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(whole[: int(len(whole) * keep)])

    return Spoiler(f"[{name} cut to {keep:.0%}]", write)


def checkpoint(
    change: Callable[[Path], None], title: str, source: str = "clicks/step-00000004"
) -> Spoiler:
    """Copy a checkpoint to `step` and change it."""

    def write(own: Path, data: Path) -> None:
        copy_of(data / "runs" / source, own / "step")
        change(own / "step")

    return Spoiler(f"[checkpoint: {title}]", write)


def copy_of(source: Path, target: Path) -> None:
    """Copy a file or a folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
