"""Tables of Apache Iceberg in a catalog in SQLite, and what other writers do to them.

pyiceberg writes no compaction and no files of deletes, so the metadata of its own snapshots are
changed into theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

NAME = "shop.clicks"


def properties_of(folder: Path) -> dict[str, str]:
    """Return the properties of the catalog of a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"{folder}/files"}


def catalog_of(folder: Path) -> Any:
    """Return the catalog of a folder, which is made if it is not there."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("default", **properties_of(folder))
    catalog.create_namespace_if_not_exists("shop")
    return catalog


def make_table(folder: Path, schema: pa.Schema, version: int = 2) -> Any:
    """Return a new table of a version of the format in the catalog of a folder."""
    properties = {"format-version": str(version)}
    return catalog_of(folder).create_table(NAME, schema, properties=properties)


def change_summary(table: Any, change: Callable[[dict[str, str]], None]) -> None:
    """Change the summary of the newest snapshot of a table where it lies."""
    path = Path(table.metadata_location)
    metadata = json.loads(path.read_text())
    newest = metadata["current-snapshot-id"]
    change(next(one for one in metadata["snapshots"] if one["snapshot-id"] == newest)["summary"])
    path.write_text(json.dumps(metadata))
    table.refresh()


def compact(table: Any) -> None:
    """Put all rows of a table into new files, as compaction by other writers does."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    rows, files = table.scan().to_arrow(), [one.file for one in table.scan().plan_files()]
    with table.transaction() as change, change.update_snapshot().overwrite() as overwrite:
        for file in files:
            overwrite.delete_data_file(file)
        for file in _dataframe_to_data_files(table.metadata, rows, table.io):
            overwrite.append_data_file(file)
    change_summary(table, lambda summary: summary.update(operation="replace"))


def make_delete_file(table: Any) -> None:
    """Make the file that the newest snapshot adds one of deletes, as merge-on-read writes them."""
    from pyiceberg.manifest import (
        DataFileContent,
        ManifestContent,
        write_manifest,
        write_manifest_list,
    )

    newest = table.current_snapshot()
    manifests = newest.manifests(table.io)
    own = next(one for one in manifests if one.added_snapshot_id == newest.snapshot_id)
    entries = own.fetch_manifest_entry(table.io)
    for entry in entries:
        entry.data_file._data[0] = DataFileContent.POSITION_DELETES
    output = table.io.new_output(own.manifest_path)
    Path(own.manifest_path).unlink()
    spec, schema, number = table.spec(), table.schema(), newest.snapshot_id
    with write_manifest(2, spec, schema, output, number, "null") as writer:
        for entry in entries:
            writer.add(entry)
    written = writer.to_manifest_file()
    written._data[3] = ManifestContent.DELETES
    Path(newest.manifest_list).unlink()
    others = [one for one in manifests if one is not own]
    parent, sequence = newest.parent_snapshot_id, newest.sequence_number
    output = table.io.new_output(newest.manifest_list)
    with write_manifest_list(2, output, number, parent, sequence, "null") as listing:
        listing.add_manifests([written, *others])
