"""Start of a rank's run: anew, from weights, a checkpoint, a sync point, or tables in memory.

Each way fills the rows and returns or goes to a `RunState`. A damaged checkpoint is found while its
rows are read, so every rank tries the same checkpoints in the same order, and they agree, after
each, whether it was whole. All ranks call the same functions together.
"""

from __future__ import annotations

from rayrec.checkpoint import (
    CheckpointManager,
    RestoredCheckpoint,
    read_manifest,
    restore_checkpoint,
)
from rayrec.dynamic.clock import clocks_in
from rayrec.errors import CheckpointError, DamagedCheckpointError
from rayrec.shards.overlap import fill
from rayrec.train import hand_over
from rayrec.train.checkpoints import Checkpoints
from rayrec.train.events import Began
from rayrec.train.run_state import LiveRun, RunState
from rayrec.train.shaping import Best
from rayrec.train.sync_points import RankPoints
from rayrec.train.window import gather_objects


def begin(live: LiveRun, checkpoints: Checkpoints, points: RankPoints | None) -> Began:
    """Bring a run to the starting point of its spec, and note it in a line.

    Raises:
        CheckpointError, ConfigError: as `restore` raises them.
    """
    spec = live.spec
    if spec.handed_over:
        live.on_phase("taking the tables over")
        held = hand_over.take()
        live.model.take_rows(held.plan.rows)
        fill(live.model.shard_states(), held.states)
        state = RunState.from_bytes(held.state)
        live.model.iteration, live.model.id_clocks = state.updates, state.id_clocks
        return _go_on_in_memory(live, checkpoints, state)
    point = None if points is None else points.go_back(live)
    if point is not None:
        live.model.id_clocks = point.id_clocks
        return _go_on_in_memory(live, checkpoints, point)
    if spec.resume_from:
        path = _resume(live, checkpoints)
        return Began(step=live.step, path=path)
    if spec.init_from:
        # step and place in the data stay at the beginning
        saved = _read_weights(live, spec.init_from, optimizer_state=spec.init_optimizer_state)
        _tell_left_out(live, saved)
        what = "weights and optimizer state" if spec.init_optimizer_state else "weights"
        live.note(f"started with the {what} of {spec.init_from}, at step 0")
    return Began(step=live.step, path=None)


def restore(
    live: LiveRun, checkpoints: Checkpoints, path: str, *, weights_only: bool = False
) -> None:
    """Resume a checkpoint of any number of ranks and any plan.

    Args:
        weights_only: take no optimizer state and no place in the data, as evaluation does.
    Raises:
        CheckpointError: it is missing, damaged, or of another model.
        ConfigError: the run's data, batch size or seed differ, so that the place in the data means
            other rows.
    """
    spec = live.spec
    if weights_only:
        live.step = _read_weights(live, path).step
        return
    saved = _read(live, path, with_state=True)
    _tell_left_out(live, saved)
    if spec.run_path and CheckpointManager(spec.run_path).step_of(path) == saved.step:
        checkpoints.newest = path
    live.go_to(_state_of(live, saved, path), path)


def _state_of(live: LiveRun, saved: RestoredCheckpoint, path: str) -> RunState:
    """Return the state of a run that goes on from a checkpoint."""
    epoch, batch = live.cursor.place_in(saved.cursor, path)
    # rows of the run before a failure count, those of another run do not
    began = live.spec.run_began
    is_same_run = began is not None and saved.step > began
    trained = saved.extras.get("trained", {}) if is_same_run else {}
    return RunState(
        step=saved.step,
        epoch=epoch,
        batch=batch,
        rows=int(trained.get("rows", 0)),
        seconds=float(trained.get("seconds", 0.0)),
        best=Best(**(saved.extras.get("best") or {})),
        updates=int(saved.extras.get("table_updates", 0)),
        id_clocks=clocks_in(saved.extras),
        dense=saved.dense,
        dense_optimizer=saved.dense_optimizer,
        world_size=len(saved.random),
        random=dict(enumerate(saved.random)),
    )


def _tell_left_out(live: LiveRun, saved: RestoredCheckpoint) -> None:
    """Tell of dynamic tables that became too small; all ranks call it together."""
    # a rank without rows of a table has not looked at its ids
    told = gather_objects(dict(saved.left_out))
    for table in sorted({table for own in told for table in own}):
        if ids := max(own.get(table, 0) for own in told):
            live.note(
                f"table {table!r}: {ids} ids of the checkpoint have no row, since blocks are full"
            )


def _read_weights(live: LiveRun, path: str, *, optimizer_state: bool = False) -> RestoredCheckpoint:
    """Fill rows and dense layers from a checkpoint."""
    saved = _read(live, path, with_state=optimizer_state)
    live.load_dense(saved.dense, path)
    if optimizer_state:
        live.load_dense_optimizer(saved.dense_optimizer)
    return saved


def _read(live: LiveRun, path: str, *, with_state: bool) -> RestoredCheckpoint:
    """Fill the rows from a checkpoint, with their optimizers' state and updates if asked.

    Raises:
        CheckpointError: it is missing, damaged, of another model, or was trained with other sparse
            optimizers whose state is wanted.
        ConfigError: it was trained with another dense optimizer whose state is wanted.
    """
    _take_rows(live, path)
    states = live.model.shard_states()
    if not with_state:
        states = [type(state)(state.shard, state.weight, ids=state.ids) for state in states]
    names = {name: {"name": o.name} for name, o in live.model.sparse_optimizers.items()}
    saved = restore_checkpoint(
        path, states, tables=live.model.tables, optimizers=names if with_state else None
    )
    live.model.id_clocks = clocks_in(saved.extras)
    if with_state:
        live.spec.dense_optimizer.check_saved(saved.extras, path)
        live.model.iteration = int(saved.extras.get("table_updates", 0))
    return saved


def _take_rows(live: LiveRun, path: str) -> None:
    """Give tables that grow the rows that they had grown to in a checkpoint, up to their bound."""
    if not any(table.most_rows > table.num_embeddings for table in live.tables):
        return
    rows: dict[str, int] | None = None
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        pass  # the restore that follows says so
    else:
        saved = {table.name: table.num_embeddings for table in manifest.tables}
        rows = {
            table.name: table.fitting(saved.get(table.name, 0)).num_embeddings
            for table in live.tables
            if table.dynamic is not None
        }
    # all ranks read one manifest, but may fail apart
    told = gather_objects(rows)
    if rows is not None and None not in told:
        live.model.take_rows(rows)


def _resume(live: LiveRun, checkpoints: Checkpoints) -> str:
    """Resume the first of the spec's checkpoints that no rank finds damaged; return its path."""
    spec = live.spec
    for path in spec.resume_from:
        damage = ""
        try:
            restore(live, checkpoints, path)
        except DamagedCheckpointError as error:
            damage = str(error)
        # all ranks pass over what one of them finds damaged
        first = next((told for told in gather_objects(damage) if told), "")
        if not first:
            break
        if path == spec.resume_from[-1]:
            raise DamagedCheckpointError(first)
        live.note(f"passed over {path}, which is damaged: {first}")
    step = live.step
    data = ", with new data from the beginning" if spec.new_data else ""
    # after a failure the driver says so, with the failure
    if spec.run_began is None:
        live.note(f"resumed from {path} at step {step}{data}")
    if step >= spec.steps:
        live.note(
            f"nothing is left to train: the run ends at step {spec.steps} and the checkpoint "
            f"is at step {step}"
        )
    _set_later_aside(live, path, step)
    return path


def _go_on_in_memory(live: LiveRun, checkpoints: Checkpoints, state: RunState) -> Began:
    """Go to a state that was kept in memory, whose rows are in place."""
    live.go_to(state, "the memory of the ranks")
    if live.spec.run_path:
        path = CheckpointManager(live.spec.run_path).path(state.step)
        if path in live.spec.resume_from:
            checkpoints.newest = path
        # only damaged ones are later, since a whole one would have been gone on from
        _set_later_aside(live, path, state.step)
    return Began(step=live.step, path=None, in_memory=True)


def _set_later_aside(live: LiveRun, path: str, step: int) -> None:
    """Move later steps of the run's folder away, since the run writes those steps anew."""
    run_path = live.spec.run_path
    if not run_path or live.rank != 0 or CheckpointManager(run_path).step_of(path) is None:
        return
    folder = CheckpointManager(run_path).set_aside(step)
    if folder is not None:
        live.note(f"checkpoints after step {step} were set aside in {folder}")
