"""Checkpoints written behind the training, and as increments: what they hold is what a plain save
holds, bit for bit; errors are heard; generators go on.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rayrec.train.saver as saver
from rayrec.checkpoint import CheckpointManager, check_whole, load_table, read_manifest
from rayrec.errors import SaveError
from rayrec.train import CheckpointConfig, RankTrainer, TrainSpec
from rayrec.train.callbacks import Callback
from rayrec.train.events import Saved
from rayrec.train.save_thread import SaveThread
from tests.gloo.shaped import trained
from tests.gloo.trainers import WithDropout, spec_of
from tests.ranks import RankPool

STEPS, EVERY = 12, 2
BEHIND = CheckpointConfig(
    every_n_steps=EVERY, asynchronous=True, incremental=True, full_every=3, num_to_keep=2
)


def spec_with(folder: Path, world_size: int, run: Path, checkpoint: CheckpointConfig) -> TrainSpec:
    spec = spec_of(folder, world_size)
    return replace(spec, steps=STEPS, run_path=str(run), checkpoint=checkpoint)


def tables_at(path: str) -> dict[str, list[Any]]:
    tables = {}
    for table in read_manifest(path).tables:
        tables[table.name] = load_table(path, table.name).to_pydict()
    return tables


def both_ways(rank: int, world_size: int, folder: Path, out: Path, group: int | None) -> None:
    """The run with plain saves and with increments behind it; then from an increment on."""
    plain = CheckpointConfig(every_n_steps=EVERY)
    shaped: dict[str, Any] = {}
    if group is not None:
        spec = spec_of(folder, group)
        shaped = {"plan": spec.plan, "sharding_group_size": group, "sync_every": 2}
    one = replace(spec_with(folder, world_size, out / "plain", plain), **shaped)
    wanted, told = trained(one)
    behind = replace(BEHIND, num_to_keep=None)
    other = replace(spec_with(folder, world_size, out / "behind", behind), **shaped)
    numbers, events = trained(other)
    assert not [key for key in wanted if not torch.equal(wanted[key], numbers[key])]
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert saved == [event.step for event in told if isinstance(event, Saved)]
    if rank:
        return
    increments = 0
    for step in saved:
        paths = [CheckpointManager(str(out / name)).path(step) for name in ("plain", "behind")]
        assert tables_at(paths[0]) == tables_at(paths[1]), f"step {step}"
        check_whole(paths[1], read_manifest(paths[1]))
        increments += read_manifest(paths[1]).parent is not None
    assert len(saved) == STEPS // EVERY and increments == 4


def test_increments_behind_the_training_hold_what_plain_saves_hold(
    shaped: Path, tmp_path: Path
) -> None:
    both_ways(0, 1, shaped, tmp_path, None)


@pytest.mark.parametrize(
    ("world_size", "group"), [(2, None), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_increments_of_several_ranks_hold_what_plain_saves_hold(
    ranks: RankPool, shaped: Path, tmp_path: Path, world_size: int, group: int | None
) -> None:
    ranks.run(world_size, both_ways, shaped, tmp_path, group)


def resumed(rank: int, world_size: int, folder: Path, run: Path, step: int) -> dict[str, Any]:
    spec = spec_with(folder, world_size, run, BEHIND)
    path = CheckpointManager(str(run)).path(step)
    return trained(replace(spec, run_path=None, resume_from=(path,)))[0]


@pytest.mark.slow
def test_a_run_goes_on_from_an_increment_and_pruning_leaves_its_chain(
    ranks: RankPool, shaped: Path, tmp_path: Path
) -> None:
    def run(rank: int, world_size: int) -> dict[str, Any]:
        return trained(spec_with(shaped, world_size, tmp_path, BEHIND))[0]

    run(0, 1)
    manager = CheckpointManager(str(tmp_path))
    # steps 10 and 12 stay, and what they add to: every third one is whole
    assert manager.steps() == (8, 10, 12)
    assert [read_manifest(manager.path(s)).parent is None for s in manager.steps()] == [
        True,
        False,
        False,
    ]
    alone = resumed(0, 1, shaped, tmp_path, 10)
    for numbers in ranks.run(2, resumed, shaped, tmp_path, 10):
        for key, tensor in numbers.items():
            torch.testing.assert_close(tensor, alone[key], rtol=1e-4, atol=1e-5)


def test_the_checkpoint_after_another_was_restored_holds_its_rows(
    shaped: Path, tmp_path: Path
) -> None:
    other = spec_with(shaped, 1, tmp_path / "other", CheckpointConfig())
    trained(other)
    spec = spec_with(shaped, 1, tmp_path / "mine", replace(BEHIND, asynchronous=False))
    with RankTrainer(replace(spec, steps=4)) as trainer:
        trainer.begin()
        trainer.run()
        path = CheckpointManager(str(tmp_path / "other")).path(STEPS)
        trainer.restore(path)
        assert tables_at(trainer.save()) == tables_at(path)


@dataclass(frozen=True)
class Mirror(Callback):
    """Saves elsewhere what the run has saved."""

    folder: Path

    def on_checkpoint(self, saved: Saved, trainer: Any = None) -> None:
        if str(self.folder) not in saved.path:
            trainer.save(str(self.folder / str(saved.step)))


def test_a_checkpoint_elsewhere_is_not_the_newest_of_the_run(shaped: Path, tmp_path: Path) -> None:
    config = CheckpointConfig(every_n_steps=STEPS // 2)
    spec = spec_with(shaped, 1, tmp_path / "mine", config)
    spec = replace(spec, rank_callbacks=(Mirror(tmp_path / "mirror"),))
    with RankTrainer(spec) as trainer:
        trainer.begin()
        trainer.run()  # and does not write its last one twice, at the end
        mine = CheckpointManager(spec.run_path or "")
        assert trainer.newest == mine.latest() and mine.steps() == (STEPS // 2, STEPS)
        for step in mine.steps():
            assert tables_at(mine.path(step)) == tables_at(str(tmp_path / "mirror" / str(step)))


def dropped(rank: int, world_size: int, folder: Path, run: Path) -> None:
    """A model with dropout, in one go and in two."""
    spec = spec_with(folder, world_size, run, CheckpointConfig(every_n_steps=6))
    spec = replace(spec, model=WithDropout(spec.model))
    whole, _ = trained(spec)
    torch.manual_seed(rank + 17)  # what another process would have
    path = str(run / "step-00000006")
    rest, _ = trained(replace(spec, run_path=None, resume_from=(path,)))
    assert not [key for key in whole if not torch.equal(whole[key], rest[key])]


def test_dropout_goes_on_with_the_same_numbers(shaped: Path, tmp_path: Path) -> None:
    dropped(0, 1, shaped, tmp_path)


@pytest.mark.slow
def test_dropout_goes_on_with_the_numbers_of_each_rank(
    ranks: RankPool, shaped: Path, tmp_path: Path
) -> None:
    ranks.run(2, dropped, shaped, tmp_path)


def reseeded(rank: int, world_size: int, folder: Path, run: Path) -> list[float]:
    spec = spec_with(folder, world_size, run, CheckpointConfig())
    path = str(run / "step-00000012")
    drawn = []
    for _ in range(2):
        torch.manual_seed(rank)
        with RankTrainer(replace(spec, run_path=None, resume_from=(path,))) as trainer:
            trainer.begin()
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]
    return drawn


def test_another_number_of_ranks_is_seeded_anew_and_alike_each_time(
    ranks: RankPool, shaped: Path, tmp_path: Path
) -> None:
    trained(spec_with(shaped, 1, tmp_path, CheckpointConfig()))
    one, other = ranks.run(2, reseeded, shaped, tmp_path)
    assert one != other


def full(rank: int, world_size: int, folder: Path, run: Path) -> str:
    """The storage fills up after the second checkpoint: a file may have 100 bytes then."""
    spec = spec_with(folder, world_size, run, replace(BEHIND, num_to_keep=None))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_step(step: int) -> None:
        if step == 2 * EVERY + 1:
            while CheckpointManager(str(run)).steps()[-1] < 2 * EVERY:
                time.sleep(0.01)
            # Python would leave compiled modules cut short, which no later process can import
            sys.dont_write_bytecode = True
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    try:
        with pytest.raises(SaveError) as raised, RankTrainer(spec) as trainer:
            trainer.begin()
            trainer.run(on_step=on_step)
        return str(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = False


def test_a_full_storage_is_heard_by_all_ranks_and_what_was_whole_stays(
    ranks: RankPool, shaped: Path, tmp_path: Path
) -> None:
    errors = ranks.run(2, full, shaped, tmp_path)
    assert len(set(errors)) == 1 and "File too large" in errors[0]
    manager = CheckpointManager(str(tmp_path))
    assert manager.steps() == (EVERY, 2 * EVERY)
    for step in manager.steps():
        check_whole(manager.path(step), read_manifest(manager.path(step)))


def test_training_waits_for_slow_storage_and_says_so(
    shaped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, at_once, most = saver.save_checkpoint, [0], [0]

    def slow(*args: Any, **options: Any) -> Any:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.3)
        manifest = save(*args, **options)
        at_once[0] -= 1
        return manifest

    monkeypatch.setattr(saver, "save_checkpoint", slow)
    notes: list[str] = []
    spec = replace(spec_with(shaped, 1, tmp_path, BEHIND), report_every_s=0.01)
    _, events = trained(spec, notes)
    waits = [note for note in notes if "still being written" in note]
    assert most[0] == 1 and any("storage is slower" in note for note in waits)
    saved = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saved] == list(range(EVERY, STEPS + 1, EVERY))
    assert CheckpointManager(str(tmp_path)).steps()[-1] == STEPS


def test_seconds_of_training_say_when_to_save(shaped: Path, tmp_path: Path) -> None:
    config = CheckpointConfig(every_s=1e-4, at_end=False)
    spec = replace(spec_with(shaped, 1, tmp_path, config), report_every_s=1e-6)
    _, events = trained(spec)
    assert [event.step for event in events if isinstance(event, Saved)] == list(range(1, STEPS + 1))


def test_a_rank_that_leaves_does_not_wait_for_its_save() -> None:
    thread = SaveThread()

    def write() -> None:
        while not thread.given_up():
            time.sleep(0.005)
        raise SaveError("given up")

    thread.start(write)
    assert thread.busy and not thread.done
    started = time.perf_counter()
    thread.give_up()
    assert time.perf_counter() - started < 4 and not thread.busy
    thread.finish()  # nothing is left to raise


def gather_behind_the_world(rank: int, world_size: int) -> list[int]:
    """What a thread gathers once its world seems to be over, as it is for one that outlives it."""
    thread = SaveThread()
    is_initialized, dist.is_initialized = dist.is_initialized, lambda: False
    try:
        return thread.gather(rank)
    finally:
        dist.is_initialized = is_initialized


def test_a_thread_that_outlives_its_world_is_not_alone(ranks: RankPool) -> None:
    """It would take its own part for all parts, and publish rows of one rank as those of all."""
    assert ranks.run(2, gather_behind_the_world) == [[0, 1], [0, 1]]
