"""Tables that go from one number of real ranks to another in memory: training goes on as from a
checkpoint, and no storage is involved.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.errors import CommError
from rayrec.layout import Shard, TableLayout
from rayrec.shards.state import ShardState
from rayrec.train import hand_over
from rayrec.train.checkpoint_config import CheckpointConfig
from rayrec.train.hand_over import HandOverTask, may_keep
from rayrec.train.loop import RankTrainer
from rayrec.train.optimizer_config import OptimizerConfig
from tests.clicks import write_clicks
from tests.gloo.trainers import WithDropout, context_of, numbers, spec_of
from tests.ranks import RankPool
from tests.worlds import plan_for

STOP = 6


def a_spec(folder: Path, ranks: int, run_path: str | None, group: int | None):
    spec = spec_of(folder, group or ranks)
    return replace(
        spec,
        model=WithDropout(spec.model),
        dense_optimizer=OptimizerConfig(name="adam", lr=1e-2),
        sparse_optimizer=OptimizerConfig(name="adam", lr=1e-2),
        report_every_s=0.001,
        sharding_group_size=group,
        run_path=run_path,
    )


def until(rank: int, ranks: int, folder: Path, run_path: str, going_to: int, group: int | None):
    """Train to step STOP, and keep the tables for so many ranks, or save where it is 0."""
    trainer = RankTrainer(a_spec(folder, ranks, run_path, group))
    # one rank that was asked is enough, as one that was told to stop is
    trainer.going_to = lambda: going_to if rank == ranks - 1 else 0
    trainer.begin()
    with trainer:
        assert trainer.run(lambda: trainer.step >= STOP)
        assert trainer.step == STOP and trainer.handed_over == bool(going_to)
        assert (trainer.newest is None) == bool(going_to)
    return True


def pass_on(rank: int, world_size: int, folder: Path, ranks: int, group: int | None):
    """What ranks of both worlds do."""
    plan = a_spec(folder, ranks, None, group).plan
    task = HandOverTask(plan=plan, ranks=ranks, group_size=group)
    sent = task.run(context_of(rank, world_size))
    assert (hand_over._held is not None) == (rank < ranks)
    return sent


def on(rank: int, ranks: int, folder: Path, run_path: str, handed: bool, group: int | None):
    """Train to the end, from what the ranks keep or from the checkpoint."""
    spec = a_spec(folder, ranks, None, group)
    resume = () if handed else (f"{run_path}/step-{STOP:08}",)
    spec = replace(spec, handed_over=handed, resume_from=resume, run_began=0)
    spec = replace(spec, checkpoint=CheckpointConfig(at_end=False))
    with RankTrainer(spec) as trainer:
        began = trainer.begin()
        assert (began.step, began.in_memory) == (STOP, handed)
        trainer.run()
        assert hand_over._held is None
        return numbers(trainer.model), trainer.rows, trainer.loss


CHANGES = [(1, 2, None, None), (3, 2, None, None), (2, 3, None, None), (4, 3, None, None)]
GROUPS = [(2, 4, None, 2), (4, 3, 2, None)]


@pytest.mark.parametrize(
    ("before", "after", "old_group", "new_group"),
    [
        (2, 1, None, None),
        *(pytest.param(*change, marks=pytest.mark.slow) for change in CHANGES + GROUPS),
    ],
)
def test_training_goes_on_as_from_a_checkpoint(
    ranks: RankPool,
    tmp_path: Path,
    before: int,
    after: int,
    old_group: int | None,
    new_group: int | None,
) -> None:
    write_clicks(tmp_path)
    saved, unsaved = str(tmp_path / "saved"), tmp_path / "unsaved"
    ranks.run(before, until, tmp_path, saved, 0, old_group)
    expected = ranks.run(after, on, tmp_path, saved, False, new_group)
    ranks.run(before, until, tmp_path, str(unsaved), after, old_group)
    sent = ranks.run(max(before, after), pass_on, tmp_path, after, new_group)
    told = ranks.run(after, on, tmp_path, str(unsaved), True, new_group)
    assert not unsaved.exists() and sum(sent) > 0
    for (got, *rest), (wanted, *others) in zip(told, expected, strict=True):
        assert rest == others and got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in got)


def lost(rank: int, ranks: int, folder: Path, run_path: str) -> Any:
    """A rank of the world before is not there any more."""
    if rank == 0:
        hand_over.keep(None)
    try:
        pass_on(rank, ranks, folder, ranks, None)
    except CommError as error:
        return str(error)
    finally:
        hand_over.keep(None)


def test_a_lost_rank_is_found(ranks: RankPool, tmp_path: Path) -> None:
    write_clicks(tmp_path)
    ranks.run(2, until, tmp_path, str(tmp_path / "run"), 2, None)
    told = ranks.run(2, lost, tmp_path, "")
    assert told == ["only 1 ranks still keep tables of the world before"] * 2


def passed_on_with_much_in_common(rank: int, ranks: int) -> None:
    """A megabyte of dense layers, which all of them have."""
    small, gathered = bytes(1 << 20), []
    layout = TableLayout((0, 4), (0, 2), ((0,),))
    plan = plan_for(ranks, {"t": layout})
    held = hand_over.Held(
        rank=rank,
        world_rank=rank,
        world_size=ranks,
        plan=plan,
        states=[ShardState(shard, torch.ones(4, 2)) for shard in plan.shards(rank)],
        state=small,
    )
    all_gather = dist.all_gather

    def noted(parts: list[torch.Tensor], *given: Any, **options: Any) -> Any:
        gathered.append(sum(part.numel() for part in parts))
        return all_gather(parts, *given, **options)

    hand_over.keep(held)
    dist.all_gather = noted
    try:
        HandOverTask(plan=plan, ranks=ranks).run(context_of(rank, ranks))
    finally:
        dist.all_gather = all_gather
    told = hand_over.take()
    assert (told.state, len(told.states)) == (small, len(plan.shards(rank)))
    assert 0 < max(gathered) < len(small)


def test_what_ranks_have_in_common_comes_from_one_of_them(ranks: RankPool) -> None:
    """Of all of them, it would lie in the memory of each as often as there are ranks."""
    ranks.run(3, passed_on_with_much_in_common)


def asked(rank: int, ranks: int, wanted: list[int | None], size: int) -> bool:
    rows = torch.zeros(1, 64).expand(size, 64)
    state = ShardState(Shard("t", range(size), range(64), rank), rows)
    return may_keep(wanted[rank], [state], None)


def test_ranks_agree_whether_they_hand_over(ranks: RankPool) -> None:
    assert ranks.run(2, asked, [0, 3], 10) == [True, True]
    assert ranks.run(2, asked, [0, 0], 10) == [False, False]
    assert ranks.run(2, asked, [3, None], 10) == [False, False]
    # more than any machine of the tests has
    assert ranks.run(2, asked, [3, 3], 1 << 34) == [False, False]
