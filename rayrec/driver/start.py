"""Where a run starts, decided on the driver before any rank is started for it.

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
from rayrec.errors import ConfigError, DamagedCheckpointError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.train.config import Dataset
from rayrec.train.dense import check_dense_optimizer
from rayrec.train.place import check_same_place, meaning_of_place
from rayrec.train.table_optimizers import optimizers_of


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts.

    Attributes:
        resume_from: checkpoints to try in this order; empty for a run that starts at step 0.
        step: global steps done in the first of them.
    """

    resume_from: tuple[str, ...] = ()
    step: int = 0


def find_start(
    run: RunConfig,
    data: Dataset,
    tables: Callable[[], Sequence[BaseEmbeddingConfig]],
    say: Callable[[str], None],
) -> Start:
    """Decide where a run starts, and check what can be checked without reading rows.

    Args:
        run: says where; its folder is held by this driver.
        data: what to train on.
        tables: gives the model's tables; called only when there is a checkpoint to compare with.
        say: gets a line for every damaged checkpoint that "latest" passes over.
    Raises:
        ConfigError: the run would write among checkpoints that it does not continue, there is
            nothing to continue from, or the checkpoint was trained with other data or options.
        CheckpointError: the checkpoint is missing, damaged, or of another model.
    """
    if run.resume_from == AUTO and _has_checkpoints(run):
        return _latest(run, data, tables(), say)
    if run.init_from is not None:
        _check_no_checkpoints(run)
        manifest = read_manifest(run.init_from)
        check_whole(run.init_from, manifest)
        _check_model(run, manifest, run.init_from, tables(), with_state=run.init_optimizer_state)
        return Start()
    if run.resume_from in (None, AUTO):
        _check_no_checkpoints(run)
        return Start()
    if run.resume_from == LATEST:
        return _latest(run, data, tables(), say)
    manifest = read_manifest(run.resume_from)
    # A checkpoint that lies outside of the run's folder starts a run of its own there. Its
    # checkpoints must not mix with those of another run.
    if (
        run.run_path is not None
        and CheckpointManager(run.run_path).step_of(run.resume_from) is None
    ):
        _check_no_checkpoints(run)
    check_whole(run.resume_from, manifest)
    _check_resume(run, manifest, run.resume_from, data, tables())
    return Start((run.resume_from,), manifest.step)


def check_scored(path: str, tables: Sequence[BaseEmbeddingConfig]) -> Manifest:
    """Check that a checkpoint can be scored by a model with these tables; its manifest.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    manifest = read_manifest(path)
    check_whole(path, manifest)
    check_tables(manifest, tables, {}, path)
    return manifest


def _latest(
    run: RunConfig, data: Dataset, tables: Sequence[BaseEmbeddingConfig], say: Callable[[str], None]
) -> Start:
    assert run.run_path is not None, "checked when the RunConfig was made"
    manager = CheckpointManager(run.run_path)
    whole: list[tuple[str, Manifest]] = []
    damage: DamagedCheckpointError | None = None
    # Older whole checkpoints are kept as well: damage inside the newest is found by the ranks.
    for step in reversed(manager.steps()):
        path = manager.path(step)
        try:
            manifest = read_manifest(path)
            check_whole(path, manifest)
        except DamagedCheckpointError as error:
            say(f"passed over {path}, which is damaged: {error}")
            damage = damage or error
            continue
        whole.append((path, manifest))
    if not whole:
        if damage is not None:
            raise damage
        raise ConfigError(
            f"{run.run_path} holds no complete checkpoint to resume from. Leave out resume_from "
            "(--resume) to start the run, or correct the path."
        )
    newest, manifest = whole[0]
    _check_resume(run, manifest, newest, data, tables)
    return Start(tuple(path for path, _ in whole), manifest.step)


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
            "resume_from='latest' (--resume latest), or give the run another name or storage_path."
        )


def _check_resume(
    run: RunConfig,
    manifest: Manifest,
    path: str,
    data: Dataset,
    tables: Sequence[BaseEmbeddingConfig],
) -> None:
    _check_model(run, manifest, path, tables, with_state=True)
    if not run.new_data:
        meaning = meaning_of_place(
            data, run.global_batch_size, run.seed, run.shuffle, run.drop_last
        )
        check_same_place(manifest.cursor, meaning, path)


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
        said = optimizers_of(run, tables)
        own = said if isinstance(said, dict) else {table.name: said for table in tables}
        optimizers = {table: {"name": optimizer.name} for table, optimizer in own.items()}
        check_dense_optimizer(manifest.extras, run.dense_optimizer.name, path)
    check_tables(manifest, tables, optimizers, path)
