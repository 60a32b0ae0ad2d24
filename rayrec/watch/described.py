"""The folder of a run in a few lines: how the run went, and its checkpoints.

It reads the run's events and lists the folder, so it works while a run trains and after it was
killed. `rayrec report` draws the curves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pyarrow import fs

from rayrec.checkpoint import CheckpointManager
from rayrec.layout.units import aligned, fit
from rayrec.storage import resolve
from rayrec.watch.events import files_of, read_events
from rayrec.watch.story import facts_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """The summary of a run's folder: how it went, and the steps of its complete checkpoints.

    Facts and settings, those of the newest life, are empty where the run left no events.
    """

    path: str
    facts: Mapping[str, str]
    settings: Mapping[str, Any]
    checkpoints: tuple[int, ...]
    best_step: int | None

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_text(self) -> str:
        """The report for people."""
        lines = [f"{self.path}: a run", *aligned([(f"  {n}", v) for n, v in self.facts.items()])]
        manager = CheckpointManager(self.path)
        lines.append("checkpoints:" if self.checkpoints else "checkpoints: none")
        for step in self.checkpoints:
            newest = ", the newest" if step == self.checkpoints[-1] else ""
            best = ", the best" if step == self.best_step else ""
            lines.append(f"  {manager.path(step)}{newest}{best}")
        if self.best_step is not None and self.best_step not in self.checkpoints:
            lines.append(f"  the best evaluation was at step {self.best_step}, which was not kept")
        told = [f"  {key} = {fit(json.dumps(value), 76)}" for key, value in self.settings.items()]
        return "\n".join([*lines, *(["settings:", *told] if told else [])])


def describe_run(path: str) -> RunReport | None:
    """Return the summary of a run's folder; None where `path` is something else.

    Raises:
        InputError: a line of its events is broken.
    """
    filesystem, root = resolve(path)
    if filesystem.get_file_info(root).type != fs.FileType.Directory:
        return None
    manager = CheckpointManager(path)
    steps, has_events = manager.steps(), bool(files_of(filesystem, root))
    if not steps and not has_events:
        return None
    events = read_events(path) if has_events else None
    return RunReport(
        path=path,
        facts={} if events is None else facts_of(events),
        settings={} if events is None else events.start.values["settings"],
        checkpoints=steps,
        best_step=manager.best_step(steps),
    )
