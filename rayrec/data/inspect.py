"""A report on a data set: its columns, the schema that fits it, and its troubles.

`inspect_data` reads a sample of the rows, profiles each column (`column_profile`), says what it
could be (`advice`), and gives a `DataReport`: text for people, JSON for programs, a `FeatureSchema`
to train with. It costs at most half as much again as reading the sample.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayrec.data.advice import Advice, advise, advise_label, guess_label
from rayrec.data.column_profile import ColumnProfile, profile_column
from rayrec.data.column_types import missing, number_problem
from rayrec.data.converted import one_table_per_column
from rayrec.data.sampling import Sample, sample_rows
from rayrec.errors import ConfigError, InputError
from rayrec.layout.schema import FeatureSchema
from rayrec.layout.units import aligned, fit, format_count

ROWS = 200_000  # of the sample, unless said


@dataclass(frozen=True, slots=True)
class ColumnReport:
    """One column: what a sample of it holds, and what it could be."""

    profile: ColumnProfile
    advice: Advice

    @property
    def name(self) -> str:
        """Name of the column."""
        return self.profile.name


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """The findings of `inspect_data`.

    Attributes:
        path, kind, files: where the rows lie, and in how many files of which kind.
        rows: of all these files.
        sampled_rows, sampled_chunks: what was read.
        labels: the label columns, given or guessed; empty where none was found.
        columns: in the order of the files.
        width: one width for all tables, as most models need: that of the largest table.
    """

    path: str
    kind: str
    files: int
    rows: int
    sampled_rows: int
    sampled_chunks: int
    labels: tuple[str, ...]
    columns: tuple[ColumnReport, ...]
    width: int

    @property
    def label_rate(self) -> float | None:
        """The share of 1 among the first label of the sample; None where it is not of 0 and 1."""
        for column in self.columns:
            if self.labels and column.name == self.labels[0] and column.profile.binary:
                return column.profile.mean
        return None

    @property
    def troubles(self) -> tuple[str, ...]:
        """The troubles, as sentences that begin with the column."""
        found = [f"{c.name}: {trouble}" for c in self.columns for trouble in c.advice.troubles]
        if not self.labels:
            found.insert(0, "no column looks like the label. Name it.")
        if not any(c.advice.use == "feature" for c in self.columns):
            found.insert(0, "no column looks like ids, and a model needs at least one.")
        return tuple(found)

    def schema(self, embedding_dim: int | None = None) -> FeatureSchema:
        """The schema that fits: a table for each feature, and all tables of one width.

        Args:
            embedding_dim: the width; None takes `width`.
        Raises:
            ConfigError: there is no label, or no column of ids, or a column has no name.
        """
        if not self.labels:
            raise ConfigError(
                f"no column of {self.path!r} looks like the label. Name it; the columns are "
                f"{[c.name for c in self.columns]}."
            )
        advice = {column.name: column.advice for column in self.columns}
        if "" in advice:  # of the numbers of rows in a CSV file, as pyarrow reads it
            raise ConfigError(f"a column of {self.path!r} has no name; give it one in the files.")
        return one_table_per_column(
            {name: said.rows for name, said in advice.items() if said.use == "feature"},
            embedding_dim or self.width,
            label=self.labels,
            dense=[name for name, said in advice.items() if said.use == "dense"],
            hashed=[name for name, said in advice.items() if said.hash_buckets is not None],
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON data; "schema" is null where there is none."""
        told = asdict(self)
        told["columns"] = [asdict(c.profile) | {"advice": asdict(c.advice)} for c in self.columns]
        told |= {"label_rate": self.label_rate, "troubles": list(self.troubles), "schema": None}
        if self.labels and any(c.advice.use == "feature" for c in self.columns):
            told["schema"] = json.loads(self.schema().to_json())
        return told

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people: a line of sums, a line for each column, and what is wrong."""
        lines = [
            f"{self.path}: {self.files} {self.kind} files, {self.rows:,} rows; read "
            f"{self.sampled_rows:,} rows of {self.sampled_chunks} chunks"
        ]
        if self.labels:
            rate = self.label_rate
            shown = "" if rate is None else f", {rate:.2%} of it are 1"
            lines.append(f"label: {', '.join(self.labels)}{shown}")
        cells = [_cells(column, self.width) for column in self.columns]
        lines += ["", *aligned([_HEAD, *cells])]
        if self.troubles:
            lines += ["", "look at:", *(f"  {trouble}" for trouble in self.troubles)]
        return "\n".join(lines)


def inspect_data(
    path: str, label: str | Sequence[str] | None = None, rows: int = ROWS, where: str | None = None
) -> DataReport:
    """Look into a data set and propose a schema for it.

    Args:
        path: a folder, a file, or a URI of either, of Parquet or of Arrow IPC files.
        label: the label column, or columns; None guesses one by name and values.
        rows: of the sample, which is spread evenly over the data; at least 1.
        where: which rows are looked at, see `FileDataset`.
    Raises:
        ConfigError: `rows` is not positive, or `where` cannot be read.
        InputError: there is nothing to read, a file is broken, or a label is missing or no number.
    Cost: reading the sampled chunks whole, and at most half as much again; the metadata of all
        files.
    """
    if rows < 1:
        raise ConfigError(f"rows={rows}; look at 1 at least.")
    sample = sample_rows(path, rows, where)
    table = sample.table
    profiles = [profile_column(name, table.column(name)) for name in table.column_names]
    labels = (label,) if isinstance(label, str) else tuple(label or ())
    for name in labels:
        _check_label(name, sample, path)
    if not labels:
        guess = guess_label(profiles)
        labels = () if guess is None else (guess,)
    columns = []
    for profile in profiles:
        reach = sample.ranges.get(profile.name)
        is_label = profile.name in labels
        advice = advise_label(profile) if is_label else advise(profile, sample.rows, reach)
        columns.append(ColumnReport(profile, advice))
    return DataReport(
        path=str(path),
        kind=sample.kind,
        files=sample.files,
        rows=sample.rows,
        sampled_rows=table.num_rows,
        sampled_chunks=sample.chunks,
        labels=labels,
        columns=tuple(columns),
        width=max((column.advice.width for column in columns), default=0),
    )


def _check_label(name: str, sample: Sample, path: str) -> None:
    schema = sample.table.schema
    if schema.get_field_index(name) < 0:
        raise InputError(missing(name, schema, f"the files of {path!r}"))
    problem = number_problem(schema.field(name).type, name, "label")
    if problem is not None:
        raise InputError(f"{path!r}: {problem}")


_HEAD = ("column", "type", "null", "values", "range", "most frequent", "use", "why")


def _cells(column: ColumnReport, width: int) -> tuple[str, ...]:
    """The cells of one line of `to_text`."""
    profile, advice, counts = column.profile, column.advice, column.profile.counts
    kind = fit(profile.type, 24)
    if profile.lengths is not None:
        kind += f" x {profile.lengths.least}-{profile.lengths.most}"
    low, high = profile.low, profile.high
    use = str(advice.use)
    if advice.use == "feature":
        use += f" {advice.rows:,} x {width}{' hashed' if advice.hash_buckets else ''}"
    values = "" if counts is None else format_count(counts.distinct)
    if counts is not None and counts.counted < profile.values:
        values += f" in {format_count(counts.counted)}"
    return (
        fit(profile.name, 32),
        kind,
        f"{profile.null_share:.1%}",
        values,
        "" if low is None or high is None else f"{low:.6g} to {high:.6g}",
        "" if counts is None else f"{fit(str(counts.top), 16)} {counts.top_share:.1%}",
        use,
        advice.why,
    )
