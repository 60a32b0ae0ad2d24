"""Advice on a column from its profile: its use in a schema, and its troubles.

The rules are few and said with each column (`why`): texts and lists of integers are features, and
so are integers that repeat; fractions are dense columns, and so are integers that are negative,
have two values, or are named like amounts. What training would refuse is left out. Ids are taken as
they are where the files say how far they reach and most of that range is used, else hashed into
twice as many buckets as there are likely to be values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayrec.data.column_profile import ColumnProfile, Lengths
from rayrec.layout.tables import MAX_FLOAT32

Use = Literal["label", "feature", "dense", "none"]

MAX_BUCKETS = 1 << 26
MAX_WIDTH = 64
MANY_NULLS, SKEWED, MOSTLY_EMPTY = 0.5, 0.5, 0.5
RARE = 0.001  # a label that is 1, or 0, in fewer rows than this
FEW = 10  # different values, of which one may well be the most
KEY_ROWS = 1000  # so many different values without a repetition are a key
LONG_LIST = 50  # times the mean length
LABELS = ("label", "target", "y", "click", "clicked", "is_click", "conversion", "converted", "like")
_ID = re.compile(r"(^|_)(id|ids|cat|category|code|hash)(_|\d|$)", re.IGNORECASE)
_AMOUNT = re.compile(
    r"(^|_)(num|count|cnt|n|age|price|amount|score|days|hours|minutes|seconds|ms|duration|len|"
    r"length|size|total|sum|rate|dense|d|int)(_|\d|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The use of a column in a schema, and its troubles.

    Attributes:
        use: label, feature, dense, or none of these.
        why: the reason, in few words.
        hash_buckets: of a feature whose values are hashed.
        rows, width: of a feature's table.
        troubles: what is wrong with the column, each a sentence.
    """

    use: Use
    why: str
    hash_buckets: int | None = None
    rows: int = 0
    width: int = 0
    troubles: tuple[str, ...] = ()


def guess_label(profiles: Sequence[ColumnProfile]) -> str | None:
    """The column that is likely the label: by its name, else the only one of 0 and 1."""
    numbers = [p for p in profiles if p.kind in ("integers", "fractions") and p.lengths is None]
    binary = [p for p in numbers if p.binary and p.low != p.high and not p.nulls]
    for candidates in (binary, numbers):
        named = {p.name.lower(): p.name for p in candidates}
        for name in LABELS:
            if name in named:
                return named[name]
    return binary[0].name if len(binary) == 1 else None


def advise_label(profile: ColumnProfile) -> Advice:
    """Advice on a label column of numbers."""
    troubles = []
    if profile.nulls:
        troubles.append(f"{_percent(profile.null_share)} of the labels are null. Drop these rows.")
    if profile.unreal:
        share = profile.unreal / max(1, profile.values)
        troubles.append(f"{_percent(share)} of the labels are NaN or infinite. Drop these rows.")
    if profile.low == profile.high:
        troubles.append("all labels are the same; there is nothing to learn.")
    elif not profile.binary:
        troubles.append(
            f"the labels lie between {_short(profile.low)} and {_short(profile.high)}; clicks are "
            "0 or 1."
        )
    elif not RARE <= (profile.mean or 0.0) <= 1 - RARE:
        troubles.append(f"{_percent(profile.mean or 0.0)} of the labels are 1.")
    return Advice(use="label", why="the label", troubles=tuple(troubles))


def advise(profile: ColumnProfile, rows: int, reach: tuple[int, int] | None) -> Advice:
    """Advice on a column beside the label.

    Args:
        rows: of the whole data set.
        reach: the least and largest value of all rows, where files tell of them.
    """
    refused = _refused(profile, reach)
    if refused is not None:
        return Advice(use="none", why="left out", troubles=(refused,))
    why = _as_feature(profile)
    if why is None:
        return Advice(use="dense", why=_as_dense(profile), troubles=_dense_troubles(profile))
    return _feature(profile, rows, reach, why)


def _refused(profile: ColumnProfile, reach: tuple[int, int] | None) -> str | None:
    """Why a column is left out; None when it can be used."""
    counts, is_list = profile.counts, profile.lengths is not None
    if profile.kind == "other":
        return f"the type {profile.type} is not read."
    if not profile.values and not profile.unreal:
        return "all rows are null or empty."
    if profile.inner_nulls:
        return f"{profile.inner_nulls} nulls lie inside of lists. Drop them when writing the data."
    if profile.kind == "fractions" and is_list:
        return "lists of fractions are no ids. They may be the weights of a feature's ids."
    if profile.unreal:
        share = _percent(profile.unreal / profile.values)
        return f"{share} of the values are NaN or infinite. Write null instead."
    if max(abs(profile.low or 0), abs(profile.high or 0)) > MAX_FLOAT32:
        return f"the values reach {_short(profile.high)}, beyond float32."
    varies = reach is not None and reach[0] != reach[1]
    if profile.constant and not profile.null_share and not varies:
        only = profile.low if counts is None else counts.top
        return f"all values are {_short(only)}."
    named = _ID.search(profile.name) or _AMOUNT.search(profile.name)
    is_key = counts is not None and counts.distinct == counts.counted >= KEY_ROWS
    if is_key and not is_list and (profile.kind == "texts" or not named):
        return "no value occurs twice: a key of the row, a time, or free text."
    return None


def _as_feature(profile: ColumnProfile) -> str | None:
    """Why a column is a feature; None when it is a dense column."""
    if profile.kind == "fractions":
        return None
    if profile.lengths is not None:
        return "lists"
    if profile.kind == "texts":
        return "texts"
    if _ID.search(profile.name):
        return "integers named like ids"
    return None if _as_dense(profile) else "integers that repeat"


def _as_dense(profile: ColumnProfile) -> str:
    """Why a column is dense; empty for integers that are rather ids."""
    if profile.kind == "fractions":
        return "fractions"
    if profile.binary or (profile.counts is not None and profile.counts.distinct <= 2):
        return "integers of two values"
    if (profile.low or 0) < 0:
        return "integers, some of them negative"
    return "integers named like amounts" if _AMOUNT.search(profile.name) else ""


def _dense_troubles(profile: ColumnProfile) -> tuple[str, ...]:
    troubles = _null_troubles(profile)
    if profile.kind == "fractions" and profile.whole and not profile.binary:
        troubles += ["whole numbers are stored as fractions. Cast them to int64 if they are ids."]
    return tuple(troubles)


def _null_troubles(profile: ColumnProfile) -> list[str]:
    if profile.null_share <= MANY_NULLS:
        return []
    return [f"{_percent(profile.null_share)} of the rows are null."]


def _feature(profile: ColumnProfile, rows: int, reach: tuple[int, int] | None, why: str) -> Advice:
    troubles, counts, lengths = _null_troubles(profile), profile.counts, profile.lengths
    assert counts is not None, "a column without values is refused"
    values = int(rows * profile.values / max(1, profile.rows))
    likely = counts.estimate(max(values, counts.counted))
    if counts.top_share > SKEWED and counts.distinct > FEW:
        troubles.append(f"{_short(counts.top)} is {_percent(counts.top_share)} of all values.")
    troubles += _list_troubles(lengths)
    size = None
    if profile.kind == "integers":
        low, high = reach or (int(profile.low or 0), int(profile.high or 0))
        if low < 0:
            troubles.append(f"ids reach down to {low}, so they are hashed.")
        elif reach is None:
            troubles.append("the files do not say how far ids reach, so they are hashed.")
        elif high >= 4 * likely + 1000:
            troubles.append(
                f"ids reach up to {_short(high)}, about {_short(likely)} of them different, so "
                "they are hashed."
            )
        else:
            size = _rounded(high + 1)
    buckets = None
    if size is None:
        buckets = 16
        while buckets < min(2 * likely, MAX_BUCKETS):
            buckets *= 2
    return Advice(
        use="feature",
        why=why,
        hash_buckets=buckets,
        rows=size or buckets or 0,
        width=width_of(size or likely),
        troubles=tuple(troubles),
    )


def _list_troubles(lengths: Lengths | None) -> list[str]:
    troubles: list[str] = []
    if lengths is None:
        return troubles
    if lengths.empty > MOSTLY_EMPTY:
        troubles.append(f"{_percent(lengths.empty)} of the lists are empty.")
    if lengths.most > max(LONG_LIST, LONG_LIST * lengths.mean):
        troubles.append(
            f"list lengths are mixed, from {lengths.least} to {lengths.most} with a mean of "
            f"{lengths.mean:.1f}. Cut the longest."
        )
    return troubles


def _rounded(size: int) -> int:
    """The size rounded up to two figures, since held-out rows may have ids that are higher."""
    step = 10 ** max(0, len(str(size)) - 2)
    return -(-size // step) * step


def width_of(values: int) -> int:
    """A usual width for so many values: twice their fourth root, as a multiple of 4."""
    return min(MAX_WIDTH, max(4, 4 * round(2 * values**0.25 / 4 + 0.499)))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 or not share else f"{share:.2g} of 1"


def _short(value: float | str | None) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= 30 else value[:28] + "..")
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
