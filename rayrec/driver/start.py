"""Starting point of a run, chosen on the driver before any rank is started.

A run starts anew, from the weights of another run, or from a checkpoint. All that a manifest tells
is checked here: whether the checkpoint is of this model, these optimizers, this data and batch
size. What only the bytes of the rows tell, the ranks find out while they restore; for "latest" they
are given every older checkpoint, too, and fall back together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec.checkpoint import CheckpointManager, Manifest, check_tables, check_whole, read_manifest
from rayrec.driver.config import AUTO, LATEST, RunConfig
from rayrec.errors import CheckpointError, ConfigError, DamagedCheckpointError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.train.config import TrainData
from rayrec.train.data_cursor import check_cursor


def whole(path: str) -> Manifest:
    """Return the manifest of a checkpoint, checked against the presence and sizes of its files.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or has another size.
    """
    manifest = read_manifest(path)
    check_whole(path, manifest)
    return manifest


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of a run.

    Attributes:
        resume_from: checkpoints to try in this order; empty for a run that starts at step 0.
        step: global steps done in the first of them.
        fits: returns the manifest of a checkpoint that the run can go on from, else raises.
    """

    resume_from: tuple[str, ...] = ()
    step: int = 0
    fits: Callable[[str], Manifest] = whole


def fitting(
    manager: CheckpointManager,
    steps: Sequence[int],
    fits: Callable[[str], Manifest],
    say: Callable[[str], None],
) -> tuple[tuple[str, Manifest], ...]:
    """Return the checkpoints of a run that it can go on from, newest first.

    Args:
        steps: steps of the checkpoints to look at, in order.
        say: receives a line for every other one, which is passed over.
    """
    found = []
    for step in reversed(steps):
        path = manager.path(step)
        try:
            found.append((path, fits(path)))
        except CheckpointError as error:
            is_damaged = isinstance(error, DamagedCheckpointError)
            why = "is damaged" if is_damaged else "does not fit this run"
            say(f"passed over {path}, which {why}: {error}")
    return tuple(found)


def find_start(
    run: RunConfig,
    data: TrainData,
    tables: Callable[[], Sequence[BaseEmbeddingConfig]],
    say: Callable[[str], None],
) -> Start:
    """Find the starting point of a run, and check it as far as possible without reading rows.

    Args:
        run: options of the run, whose folder this driver holds.
        data: rows to train on.
        tables: returns the model's tables; called only when there is a checkpoint to compare.
        say: receives a line for every checkpoint that "latest" passes over.
    Raises:
        ConfigError: the run would write among checkpoints that it does not continue, there is
            nothing to continue from, or the checkpoint was trained with other data or options.
        CheckpointError: the checkpoint is missing, damaged, or of another model.
    """

    def fits(path: str) -> Manifest:
        manifest = whole(path)
        _check_model(run, manifest, path, tables(), with_state=True)
        return manifest

    if run.resume_from == LATEST or (run.resume_from == AUTO and _has_checkpoints(run)):
        return _latest(run, data, fits, say)
    if run.resume_from in (None, AUTO):
        _check_no_checkpoints(run)
        if run.init_from is not None:
            source = whole(run.init_from)
            with_state = run.init_optimizer_state
            _check_model(run, source, run.init_from, tables(), with_state=with_state)
        return Start(fits=fits)
    # A checkpoint that lies outside of the run's folder starts a run of its own there. Its
    # checkpoints must not mix with those of another run.
    manifest = read_manifest(run.resume_from)
    if (
        run.run_path is not None
        and CheckpointManager(run.run_path).step_of(run.resume_from) is None
    ):
        _check_no_checkpoints(run)
    fits(run.resume_from)
    _check_place(run, manifest, run.resume_from, data)
    return Start((run.resume_from,), manifest.step, fits)


def check_scored(path: str, tables: Sequence[BaseEmbeddingConfig]) -> Manifest:
    """Check that a checkpoint can be scored by a model with these tables; its manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    manifest = whole(path)
    check_tables(manifest, tables, {}, path)
    return manifest


def _latest(
    run: RunConfig, data: TrainData, fits: Callable[[str], Manifest], say: Callable[[str], None]
) -> Start:
    assert run.run_path is not None, "checked when the RunConfig was made"
    manager = CheckpointManager(run.run_path)
    # Older whole checkpoints are kept as well: damage inside the newest is found by the ranks.
    found = fitting(manager, manager.steps(), fits, say)
    if not found:
        if (newest := manager.latest()) is not None:
            # its error says more than that there is none
            fits(newest)
        raise ConfigError(
            f"{run.run_path} holds no complete checkpoint to resume from. Leave out resume_from to "
            "start the run, or correct the path."
        )
    newest, manifest = found[0]
    # other data or another batch size are what this run is told, and no reason to go back
    _check_place(run, manifest, newest, data)
    return Start(tuple(path for path, _ in found), manifest.step, fits)


def _has_checkpoints(run: RunConfig) -> bool:
    return run.run_path is not None and CheckpointManager(run.run_path).latest() is not None


def _check_no_checkpoints(run: RunConfig) -> None:
    """Refuse to write among another run's checkpoints: a step must mean one thing in a folder."""
    if run.run_path is None:
        return
    newest = CheckpointManager(run.run_path).latest()
    if newest is not None:
        raise ConfigError(
            f"{run.run_path} already holds checkpoints, the newest {newest}. Continue from it with "
            "resume_from='latest', or give the run another name or storage_path."
        )


def _check_place(run: RunConfig, manifest: Manifest, path: str, data: TrainData) -> None:
    if not run.new_data:
        check_cursor(manifest.cursor, run, data, path)


def _check_model(
    run: RunConfig,
    manifest: Manifest,
    path: str,
    tables: Sequence[BaseEmbeddingConfig],
    *,
    with_state: bool,
) -> None:
    """Compare tables and, where optimizer state is wanted, optimizers."""
    optimizers: dict[str, Any] = {}
    if with_state:
        said = run.optimizers_of(tables)
        own = said if isinstance(said, dict) else {table.name: said for table in tables}
        optimizers = {table: {"name": optimizer.name} for table, optimizer in own.items()}
        run.dense_optimizer.check_saved(manifest.extras, path)
    check_tables(manifest, tables, optimizers, path)
