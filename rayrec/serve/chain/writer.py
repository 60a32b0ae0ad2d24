"""`ChainWriter`: publishes what training changed; every rank writes the rows that it packs.

How rows are packed depends on their table by one number, the power (`rayrec.quant.packing`), which
follows from its smallest and largest rows. Where that changes, all rows have to be packed anew, and
the next publication is a base.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rayrec.checkpoint import agree, read_manifest, save_checkpoint, watch_save, writes
from rayrec.dynamic.clock import clocks_in
from rayrec.layout.geometry import Shard
from rayrec.layout.plan import ShardingPlan
from rayrec.layout.tables import BaseEmbeddingConfig
from rayrec.quant import PackedTable, types_of
from rayrec.quant.types import Types
from rayrec.serve.artifact import DENSE
from rayrec.serve.chain.column_gather import PARTS, gather_columns, write_columns
from rayrec.serve.chain.folder import ChainFolder
from rayrec.serve.chain.publication import BASE, DELTA, ChainPlace, ChangedTable, Publication
from rayrec.serve.chain.row_files import write_rows
from rayrec.serve.chain.row_ranges import Changed, RowRanges
from rayrec.serve.dense_file import dense_bytes
from rayrec.serve.files import StoredFile
from rayrec.serve.live_rows import LiveRows
from rayrec.serve.manifest import Manifest
from rayrec.serve.signing import SigningKey
from rayrec.serve.stored import stored
from rayrec.serve.table_file import TABLES, table_path
from rayrec.shards.copies import TouchedState
from rayrec.shards.state import Gather, ShardState

Exporter = Callable[[str, Path], Manifest]
# files of one rank: name, number of rows and file of each table, and on rank 0 the dense part
Written = tuple[list[tuple[str, int, StoredFile]], StoredFile | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """State of the model after a step, beside its tables.

    Attributes:
        step: global steps done.
        plan: sharding plan of the tables, over the ranks that write.
        dense: parameters and buffers by name; rank 0's are published.
        time: seconds since 1970; rank 0's is published.
        event_time, ingest_time: of the newest rows of a stream; see `Publication`.
    """

    step: int
    plan: ShardingPlan
    dense: Mapping[str, Tensor]
    time: float
    event_time: int | None = None
    ingest_time: float | None = None


class ChainWriter:
    """Writer of one rank's part of publications; all ranks call the same methods together.

    Args:
        folder: folder that all hosts of the ranks see.
        tables: tables of the model as they begin.
        types: type of all tables' packed rows, or types by table name.
        rank: rank of this process.
        writers: number of ranks from 0 on that hold every table together; the others watch.
        key: key to sign publications with; None signs none.
    Attributes:
        tables: tables of the model; they may have other rows from one base to the next.
        head: newest publication of this writer; None before the first base.
    Raises:
        ConfigError: a type or table is not known.
    """

    def __init__(
        self,
        folder: ChainFolder,
        tables: Sequence[BaseEmbeddingConfig],
        types: Types,
        rank: int,
        writers: int,
        key: SigningKey | None = None,
    ) -> None:
        self._folder, self.tables, self._key = folder, tables, key
        self._types = types_of([table.name for table in tables], types)
        self._rank, self._writers = rank, writers
        self._ranges = RowRanges(tables, self._types)
        self._powers: dict[str, int] = {}
        self.head: Publication | None = None

    def publish_base(
        self,
        shards: Sequence[ShardState],
        moment: Moment,
        export: Exporter,
        gather: Gather,
        extras: Mapping[str, Any],
    ) -> None:
        """Publish all rows; training stands still meanwhile.

        Args:
            shards: shards of this rank.
            export: makes an artifact of a checkpoint, in a folder; called on rank 0.
            extras: JSON data of the checkpoint that is exported, with the clocks of its ids.
        Raises:
            CheckpointError: on every rank, when the model cannot be exported.
            SaveError: on every rank, when the storage refused.
        """
        what = f"publishing step {moment.step} into {self._folder.path}"
        (own, parent) = agree(f"{what}: preparing", self._begin_base, gather)[0]
        seq = 1 if parent is None else parent.seq + 1
        hidden = self._folder.hidden(ChainPlace(seq, BASE), own)
        weights = f"{hidden}-weights"
        self._save_weights(weights, shards, moment, gather, extras)

        def make() -> Manifest | None:
            reader = LiveRows(weights, read_manifest(weights), self.tables, clocks_in(extras))
            own = [state.shard for state in shards]
            self._ranges.measure(reader, self._packed_here(own, moment.plan))
            return export(weights, hidden) if self._rank == 0 else None

        manifest = agree(f"{what}: exporting", make, gather)[0]
        assert manifest is not None, "rank 0 has exported"
        self._powers = {table.packed.name: table.packed.power for table in manifest.tables}

        def finish() -> Publication | None:
            if self._rank:
                return None
            shutil.rmtree(weights, ignore_errors=True)
            publication = Publication(
                kind=BASE,
                run=uuid.uuid4().hex if parent is None else parent.run,
                seq=seq,
                parent="" if parent is None else parent.sha256,
                artifact=manifest.sha256,
                from_step=0,
                to_step=moment.step,
                time=moment.time,
                event_time=moment.event_time,
                ingest_time=moment.ingest_time,
                dense=None,
            ).sealed()
            self._folder.finish(publication, hidden, self._key)
            return publication

        self.head = agree(f"{what}: finishing", finish, gather)[0]

    def _begin_base(self) -> tuple[str, Publication | None]:
        """Return a word for the next base and the publication before it, on rank 0."""
        if self._rank:
            return "", None
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self._folder.clear()
        return f"-{uuid.uuid4().hex[:8]}", self._folder.head()

    def _save_weights(
        self,
        path: str,
        shards: Sequence[ShardState],
        moment: Moment,
        gather: Gather,
        extras: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint without state of optimizers, which the export reads."""
        if self._rank >= self._writers:
            watch_save(path, gather)
            return
        save_checkpoint(
            path,
            shards=[ShardState(state.shard, state.weight, ids=state.ids) for state in shards],
            tables=self.tables,
            plan=moment.plan,
            rank=self._rank,
            world_size=self._writers,
            gather=lambda value: gather(value)[: self._writers],
            dense=moment.dense,
            step=moment.step,
            extras=extras,
        )

    def _packed_here(self, shards: Sequence[Shard], plan: ShardingPlan) -> list[Shard]:
        """Return the shards whose rows this rank packs: those with the first column."""
        if self._rank >= self._writers:
            return []
        return [s for s in shards if s.cols.start == 0 and writes(plan, s, self._rank)]

    def publish_delta(self, shards: Sequence[TouchedState], moment: Moment, gather: Gather) -> bool:
        """Publish the rows that were touched since the last publication.

        Args:
            shards: copies of them, of this rank.
        Returns:
            False where nothing was published, since all rows have to be: the power of a table has
            changed, or the plan.
        Raises:
            CheckpointError: on every rank, when a row cannot be packed.
            SaveError: on every rank, when the storage refused.
        """
        head = self.head
        assert head is not None, "a base comes first"
        what = f"publishing step {moment.step} into {self._folder.path}"
        hidden = self._folder.hidden(ChainPlace(head.seq + 1, DELTA))
        mine: list[TouchedState] = []
        if self._rank < self._writers:
            mine = [one for one in shards if writes(moment.plan, one.shard, self._rank)]
        packed_here = self._packed_here([one.shard for one in mine], moment.plan)

        def begin() -> bool:
            write_columns(hidden, mine)
            (hidden / TABLES).mkdir(exist_ok=True)
            return set(packed_here) == self._ranges.shards

        if not all(agree(f"{what}: handing over", begin, gather)):
            return self._give_up_delta(hidden)
        changes: list[Changed] = []

        def measure() -> dict[str, tuple[float, float]]:
            changes.extend(gather_columns(hidden, mine, moment.plan))
            self._ranges.update(changes)
            return self._ranges.extremes()

        measured = agree(f"{what}: measuring", measure, gather)
        if self._ranges.powers(measured) != self._powers:
            return self._give_up_delta(hidden)
        written = agree(f"{what}: writing", lambda: self._write(hidden, changes, moment), gather)

        def finish() -> Publication | None:
            if self._rank:
                return None
            publication = self._delta(head, moment, written).sealed()
            shutil.rmtree(hidden / PARTS, ignore_errors=True)
            self._folder.finish(publication, hidden, self._key)
            return publication

        self.head = agree(f"{what}: finishing", finish, gather)[0]
        return True

    def _give_up_delta(self, hidden: Path) -> bool:
        if self._rank == 0:
            shutil.rmtree(hidden, ignore_errors=True)
        return False

    def _write(self, hidden: Path, changes: Sequence[Changed], moment: Moment) -> Written:
        """Pack and write the rows of this rank, and on rank 0 the dense part."""
        by_name = {table.name: (number, table) for number, table in enumerate(self.tables)}
        files = []
        for shard, rows, values, keys in changes:
            if not len(rows):
                continue
            number, table = by_name[shard.table]
            packed = PackedTable(
                table.name,
                table.num_embeddings,
                table.embedding_dim,
                self._types[table.name],
                self._powers[table.name],
                has_ids=keys is not None,
            )
            stem = table_path(table.name, number).removesuffix(".arrow")
            path = f"{stem}-{shard.rows.start}.arrow"
            file = write_rows(hidden, path, packed, rows, values, keys)
            files.append((table.name, len(rows), file))
        dense = stored(hidden, DENSE, dense_bytes(moment.dense)) if self._rank == 0 else None
        return files, dense

    def _delta(self, head: Publication, moment: Moment, written: Sequence[Written]) -> Publication:
        """Return the record of a delta, from the files that all ranks have written."""
        tables = []
        every = [entry for own, _ in written for entry in own]
        for table in self.tables:
            own = sorted((e for e in every if e[0] == table.name), key=lambda e: e[2].path)
            if own:
                rows = sum(rows for _, rows, _ in own)
                files = tuple(file for _, _, file in own)
                tables.append(ChangedTable(table.name, self._powers[table.name], rows, files))
        return Publication(
            kind=DELTA,
            run=head.run,
            seq=head.seq + 1,
            parent=head.sha256,
            artifact=head.artifact,
            from_step=head.to_step,
            to_step=moment.step,
            time=moment.time,
            event_time=moment.event_time,
            ingest_time=moment.ingest_time,
            tables=tuple(tables),
            dense=written[0][1],
        )
