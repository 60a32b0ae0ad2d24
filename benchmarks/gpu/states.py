"""Parts on what outlives a step: checkpoints, other plans, state_dicts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.absent import is_absent
from benchmarks.gpu.checks import Notes, Settings, Skip, assert_close, assert_equal
from benchmarks.gpu.equality import OPTIMIZERS, STORAGES, need_storage
from benchmarks.gpu.models import cases, plan_of, shard, train, trained_case
from benchmarks.gpu.reference import Case
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import DataType, Storage
from rayrec.optim import SparseOptimizer


def checkpoints(settings: Settings, notes: Notes) -> None:
    """Save and restore of every optimizer in every storage: the same bits, and training goes on."""
    case = trained_case(settings.choose(3000, 200, 40))
    for name, optimizer in OPTIMIZERS.items():
        for storage, where in STORAGES.items():
            with notes.check(f"{name}, {storage}"):
                if is_absent("pyarrow"):
                    raise Skip("pyarrow is not importable, and checkpoints are Arrow files")
                need_storage(settings, storage, optimizer, DataType.FP32)
                with tempfile.TemporaryDirectory() as folder:
                    _save_and_restore(case, optimizer, where, settings, Path(folder))


def _save_and_restore(
    case: Case, optimizer: SparseOptimizer, storage: Storage, settings: Settings, folder: Path
) -> None:
    from rayrec.checkpoint import restore_checkpoint, save_checkpoint

    plan = plan_of(case, storage)
    model = shard(case, optimizer, settings, plan)
    batches = [case.batch(20, 5, seed) for seed in range(4)]
    for step in range(2):
        train(model, batches[step], step)
    save_checkpoint(
        str(folder / "checkpoint"),
        shards=model.shard_states(),
        tables=case.tables,
        plan=plan,
        rank=0,
        world_size=1,
        gather=lambda value: [value],
        dense={},
        step=2,
        extras={"table_updates": model.iteration},
    )
    # into rows on the device, cut in two, and with other initial values
    other = shard(
        case, optimizer, settings._replace(seed=settings.seed + 1), plan_of(case, None, 2)
    )
    saved = restore_checkpoint(str(folder / "checkpoint"), other.shard_states(), tables=case.tables)
    other.iteration = int(saved.extras["table_updates"])
    _assert_same_tables(other, model)
    for step in (2, 3):
        got, wanted = (train(one, batches[step], step) for one in (other, model))
        assert_close(f"output of step {step} after the restore", got, wanted, 2e-4, 2e-5)


def _assert_same_tables(got: DistributedModelParallel, wanted: DistributedModelParallel) -> None:
    """Rows and state bit for bit, whatever the cuts by rows."""
    mine: dict[str, list[torch.Tensor]] = {}
    theirs: dict[str, list[torch.Tensor]] = {}
    for model, found in ((got, mine), (wanted, theirs)):
        for state in sorted(model.shard_states(), key=lambda one: one.shard.rows.start):
            for key, tensor in state.tensors().items():
                found.setdefault(f"{key} of {state.shard.table}", []).append(tensor.cpu())
    for key, parts in theirs.items():
        assert_equal(key, torch.cat(mine[key]), torch.cat(parts))


def plans(settings: Settings, notes: Notes) -> None:
    """Another plan in the middle of training changes nothing; state_dicts carry the rows."""
    case = cases(settings.choose(3000, 200, 40))[-1]
    for name in ("sgd", "adagrad", "adam"):
        with notes.check(f"another plan twice, {name}") as found:
            found["largest difference"] = _reshard(case, OPTIMIZERS[name], settings)
    with notes.check("from rows on the device to the host and to a cache"):
        settings.need_gpu("storages")
        steady, moved = (shard(case, OPTIMIZERS["sgd"], settings) for _ in range(2))
        for step, storage in enumerate((*STORAGES.values(), Storage())):
            moved.reshard(plan_of(case, storage))
            kjt = case.batch(20, 5, step)
            got, wanted = (train(one, kjt, step) for one in (moved, steady))
            assert_close(f"output in storage {storage.label}", got, wanted, 2e-4, 2e-5)
    with notes.check("state_dicts"):
        model = shard(case, OPTIMIZERS["sgd"], settings)
        train(model, case.batch(20, 5, 0), 0)
        plain = case.build("cpu")
        plain.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
        other = shard(case, OPTIMIZERS["sgd"], settings._replace(seed=settings.seed + 1))
        other.load_state_dict(plain.state_dict())
        _assert_same_tables(other, model)


def _reshard(case: Case, optimizer: SparseOptimizer, settings: Settings) -> float:
    steady, moved = (shard(case, optimizer, settings) for _ in range(2))
    worst = 0.0
    for step, blocks in enumerate(((1, 1), (3, 1), (2, 2), (1, 1))):
        moved.reshard(plan_of(case, None, *blocks))
        kjt = case.batch(20, 5, step)
        got, wanted = (train(one, kjt, step) for one in (moved, steady))
        worst = max(worst, assert_close(f"output of step {step}", got, wanted, 2e-4, 2e-5))
    return worst
