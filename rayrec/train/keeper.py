"""`Keeper`: writes a rank's part of the run's checkpoints, and fills the model from one.

A run continues from a checkpoint (weights, optimizers, step, place in the data), or starts with the
weights of another run. All ranks call the same methods together. A damaged checkpoint is found
while its rows are read; see `continuing`. What lies in memory instead is of `InMemoryKeeper`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayrec.checkpoint import (
    CheckpointManager,
    RestoredCheckpoint,
    dense_tensors,
    load_dense,
    restore_checkpoint,
)
from rayrec.distributed import DistributedModelParallel
from rayrec.errors import ConfigError
from rayrec.layout import BaseEmbeddingConfig
from rayrec.train.config import TrainSpec
from rayrec.train.continuing import first_whole, set_later_aside
from rayrec.train.data_cursor import DataCursor
from rayrec.train.dense_optimizer import check_dense_optimizer
from rayrec.train.random_state import go_on, random_state
from rayrec.train.saver import Saver
from rayrec.train.shaping import Best
from rayrec.train.window import gather_objects


class Keeper:
    """Saves and restores one rank of a run.

    Args:
        model: the sharded model, whose shards are saved and filled in place.
        tables: the configs of all tables of the model.
        dense: the optimizer of the dense parameters, or None where there are none.
        cursor: the place in the data, which a resume moves.
    Attributes:
        saver: writes the checkpoints.
        ending: no step follows.
        newest: path of the newest checkpoint of the run, or None.
        begun_from: path of the checkpoint that the run went on from, or None.
        trained: rows and seconds of the run until there, where it recovered from a failure.
        best: the best evaluation of the run until the checkpoint that it was restored from.
    """

    def __init__(
        self,
        spec: TrainSpec,
        model: DistributedModelParallel,
        tables: Sequence[BaseEmbeddingConfig],
        dense: torch.optim.Optimizer | None,
        cursor: DataCursor,
        rank: int,
        world_size: int,
    ) -> None:
        self._spec, self._model, self._tables = spec, model, tables
        # `dense` is None where the model has no dense parameters.
        self._dense, self._cursor = dense, cursor
        self._rank, self._world_size = rank, world_size
        # ranks that hold every table together; the others are their replicas
        self._writers = spec.sharding_group_size or world_size
        self.saver = Saver(spec.checkpoint, model, rank, self._writers, bool(spec.run_path))
        self.ending = False
        self._path: str | None = None
        self._note: Callable[[str], None] = lambda line: None
        # A checkpoint at this path is not written again.
        self.newest: str | None = None
        self.begun_from: str | None = None
        self.trained = (0, 0.0)
        self.best = Best()

    def save(
        self,
        step: int,
        path: str | None = None,
        best: Best | None = None,
        trained: tuple[int, float] = (0, 0.0),
    ) -> str:
        """Write a checkpoint, by default into the run's folder under the number of the step.

        Args:
            best: the best evaluation so far, whose own checkpoint is not pruned.
            trained: rows and seconds of the run so far.
        Returns:
            the path of the checkpoint; one that was written or restored there before is kept.
        Raises:
            SaveError: on every rank, when the storage refused on any of them.
        """
        run_path = self._spec.run_path if path is None else None
        manager = CheckpointManager(run_path) if run_path else None
        where = manager.path(step) if manager else path
        if not where:
            raise ConfigError("the run has no storage path; pass save(path) one.")
        if where == self.newest:
            return where
        self.finish()
        self._model.sync()  # replicas have drifted apart, and one of each is saved
        content = self._content(step, best, trained)
        kept = () if best is None or best.step is None else (best.step,)

        def then() -> None:
            num_to_keep = self._spec.checkpoint.num_to_keep
            if manager and self._rank == 0 and num_to_keep:
                manager.prune(num_to_keep, keep=kept)

        self.saver.save(where, content, then, apart=manager is None)
        self._path = where
        if not self.saver.under_way:
            self.finish()
        return where

    def finish(self) -> None:
        """Wait for the checkpoint that is being written behind the training, if there is one.

        Raises:
            SaveError: on every rank, when the storage refused on any of them.
        """
        path, self._path = self._path, None
        if self.saver.under_way and not self.saver.done:
            line = f"waiting for {path}, which is still being written"
            if not self.ending:
                line += ": the storage is slower than checkpoints are frequent"
            self._note(line)
        self.saver.finish()
        if path is not None:
            self.newest = path

    def _content(self, step: int, best: Best | None, trained: tuple[int, float]) -> dict[str, Any]:
        """Return the arguments of `save_checkpoint`: all of a checkpoint but the rows."""
        optimizers = {}
        for name, optimizer in self._model.sparse_optimizers.items():
            optimizers[name] = {"name": optimizer.name, **optimizer.hyperparameters}
        extras = {
            "dense_optimizer": self._spec.dense_optimizer.name,
            "table_updates": self._model.iteration,
            "trained": {"rows": trained[0], "seconds": trained[1]},
            **({} if best is None or best == Best() else {"best": best.to_json()}),
            **self._spec.extras,
        }
        return {
            "tables": self._tables,
            "plan": self._spec.plan,
            "dense": dense_tensors(self._model.dense_parameters(), self._model.module),
            "dense_optimizer": None if self._dense is None else self._dense.state_dict(),
            "step": step,
            "cursor": self._cursor.state(),
            "optimizers": optimizers,
            "extras": extras,
            "random": gather_objects(random_state(self._model.device)),
        }

    def begin(self, note: Callable[[str], None]) -> int:
        """Bring the model to the starting point of the spec, and return the steps done there.

        Args:
            note: receives a line about the starting point.
        Raises:
            CheckpointError, ConfigError: the errors of `restore` and `warm_start`.
        """
        spec, self._note = self._spec, note
        if spec.init_from and not spec.resume_from:
            self.warm_start(spec.init_from, optimizer_state=spec.init_optimizer_state)
            what = "weights and optimizer state" if spec.init_optimizer_state else "weights"
            note(f"started with the {what} of {spec.init_from}, at step 0")
            return 0
        if not spec.resume_from:
            return 0
        path, step = first_whole(self.restore, spec.resume_from, note)
        self.begun_from = path
        data = ", with new data from the beginning" if spec.new_data else ""
        # after a failure the driver says so, with the failure
        if spec.run_began is None:
            note(f"resumed from {path} at step {step}{data}")
        if step >= spec.steps:
            note(
                f"nothing is left to train: the run ends at step {spec.steps} and the checkpoint "
                f"is at step {step}"
            )
        self._set_later_aside(path, step)
        return step

    def restore(self, path: str, *, weights_only: bool = False) -> int:
        """Resume a checkpoint of any number of ranks and any plan, and return its global steps.

        Args:
            weights_only: take no optimizer state and no place in the data, as evaluation does.
        Raises:
            CheckpointError: it is missing, damaged, or of another model.
            ConfigError: the run's data, batch size or seed differ, so that the place in the data
                means other rows.
        """
        saved = self._load(path, with_state=not weights_only)
        if weights_only:
            return saved.step
        run_path = self._spec.run_path
        if run_path and CheckpointManager(run_path).step_of(path) == saved.step:
            self.newest = path
        self._cursor.restore(saved.cursor, path)
        self._model.go_on_from(saved.step)
        self._seed(saved.random, saved.step)
        self.best = Best.from_json(saved.extras.get("best"))
        began = self._spec.run_began
        if began is not None and saved.step > began:
            trained = saved.extras.get("trained", {})
            self.trained = int(trained.get("rows", 0)), float(trained.get("seconds", 0.0))
        return saved.step

    def warm_start(self, path: str, *, optimizer_state: bool = False) -> None:
        """Load the weights of another run; step and data cursor stay at the beginning.

        Args:
            path: a checkpoint whose tables and dense layers have this model's names and sizes.
            optimizer_state: take the state of the sparse and dense optimizers, too; otherwise they
                begin anew.
        Raises:
            CheckpointError: it is missing, damaged, of another model, or was trained with other
                sparse optimizers whose state is wanted.
            ConfigError: it was trained with another dense optimizer whose state is wanted.
        """
        self._load(path, with_state=optimizer_state)

    def _set_later_aside(self, path: str, step: int) -> None:
        if self._spec.run_path and self._rank == 0:
            set_later_aside(self._spec.run_path, path, step, self._note)

    def _seed(self, random: Sequence[Mapping[str, Any]], step: int) -> None:
        """Restore the random generators to their state at a step."""
        place = f"seed {self._spec.seed} step {step}"
        go_on(random, self._rank, self._world_size, self._model.device, place)

    def _load(self, path: str, *, with_state: bool) -> RestoredCheckpoint:
        """Fill tables and dense layers from a checkpoint, with the optimizers' state if asked."""
        states = self._model.shard_states()
        if not with_state:
            states = [type(state)(state.shard, state.weight) for state in states]
        names = {name: {"name": o.name} for name, o in self._model.sparse_optimizers.items()}
        saved = restore_checkpoint(
            path, states, tables=self._tables, optimizers=names if with_state else None
        )
        live = dense_tensors(self._model.dense_parameters(), self._model.module)
        load_dense(live, saved.dense, path)
        if not with_state:
            return saved
        check_dense_optimizer(saved.extras, self._spec.dense_optimizer.name, path)
        self._model.iteration = int(saved.extras.get("table_updates", 0))
        if self._dense is not None and saved.dense_optimizer is not None:
            # the run's learning rate and options, not the checkpoint's
            options = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._dense.param_groups
            ]
            self._dense.load_state_dict(saved.dense_optimizer)
            for group, own in zip(self._dense.param_groups, options, strict=True):
                group.update(own)
        return saved
