"""A whole model on one GPU: every kind of collection, state_dicts, checkpoints, other plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rayrec.checkpoint import restore_checkpoint, save_checkpoint
from rayrec.distributed import DistributedModelParallel, load_table, table_configs
from rayrec.distributed.interop import unsharded_state_dict
from rayrec.optim import SPARSE_OPTIMIZERS, RowWiseAdagrad
from tests.cuda_dry.models import CPU, GPU, ROWS, Everything, batch, build, plan_of

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 sums in another order


def train(
    model: DistributedModelParallel, dense: torch.optim.Optimizer, steps: range
) -> list[Tensor]:
    losses = []
    for step in steps:
        dense.zero_grad()
        logits = model(batch(step).to(model.device))
        labels = torch.ones_like(logits)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        dense.step()
        losses.append(loss.detach().cpu())
    return losses


def numbers(model: DistributedModelParallel) -> dict[str, Tensor]:
    found = {
        f"{s.shard}.{name}": t.detach().cpu()
        for s in model.shard_states()
        for name, t in s.tensors().items()
    }
    return found | {name: p.detach().cpu() for name, p in model.dense_parameters()}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            got[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_collections_of_every_kind_train_as_on_the_cpu(name: str, kind: str) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    gpu, cpu = build(GPU, optimizer, kind), build(CPU, optimizer, kind)
    assert all(state.weight.is_cuda for state in gpu[0].shard_states())
    got, wanted = train(*gpu, range(4)), train(*cpu, range(4))
    torch.testing.assert_close(got, wanted, **TOLERANCE)
    assert_same(numbers(gpu[0]), numbers(cpu[0]))


def test_evaluation_updates_nothing() -> None:
    model, dense = build(GPU, SPARSE_OPTIMIZERS["adam"](lr=0.1))
    train(model, dense, range(2))
    before = numbers(model)
    model.eval()
    with torch.no_grad():
        assert model(batch(7).to(GPU)).is_cuda
    after = numbers(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert model.iteration == 2


def test_state_dicts_go_between_gpu_and_cpu() -> None:
    optimizer = RowWiseAdagrad(lr=0.1)
    gpu, dense = build(GPU, optimizer)
    train(gpu, dense, range(2))
    whole = unsharded_state_dict(gpu)
    assert whole is not None and all(not value.is_cuda for value in whole.values())
    plain = Everything("cpu")
    plain.load_state_dict(whole)
    cpu, _ = build(CPU, optimizer)
    cpu.load_state_dict(whole)
    other, _ = build(GPU, optimizer)
    other.load_state_dict(gpu.state_dict())
    wanted = gpu(batch(9).to(GPU)).detach().cpu()
    for model in (plain, cpu):
        torch.testing.assert_close(model(batch(9)).detach(), wanted, **TOLERANCE)
    assert torch.equal(other(batch(9).to(GPU)).detach().cpu(), wanted)


def test_pretrained_rows_are_written_to_the_gpu(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    model, _ = build(GPU, RowWiseAdagrad(lr=0.1), "column_wise")
    rows = torch.randn(ROWS, 16)
    assert load_table(model, "p1", rows).written == ROWS
    assert torch.equal(model.state_dict()["pooled.embedding_bags.p1.weight"].cpu(), rows)
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.flip(0).reshape(-1).numpy()), 16)
    pq.write_table(pa.table({"weight": values}), tmp_path / "rows.parquet")
    load_table(model, "p1", tmp_path / "rows.parquet")
    assert torch.equal(model.state_dict()["pooled.embedding_bags.p1.weight"].cpu(), rows.flip(0))


@pytest.mark.parametrize("name", sorted(SPARSE_OPTIMIZERS))
def test_checkpoints_go_between_gpu_and_cpu(name: str, tmp_path: Path) -> None:
    optimizer = SPARSE_OPTIMIZERS[name](lr=0.1)
    gpu, dense = build(GPU, optimizer)
    train(gpu, dense, range(3))
    tables = table_configs(Everything("meta"))
    for i, source in enumerate((gpu, None)):
        path = str(tmp_path / str(i))
        model = source or build(CPU, optimizer)[0]
        if source is None:
            restore_checkpoint(str(tmp_path / "0"), model.shard_states(), tables=tables)
        save_checkpoint(
            path,
            shards=model.shard_states(),
            tables=tables,
            plan=plan_of(),
            rank=0,
            world_size=1,
            gather=lambda value: [value],
            dense={},
            step=3,
        )
    back, _ = build(GPU, optimizer)
    restore_checkpoint(str(tmp_path / "1"), back.shard_states(), tables=tables)
    for mine, theirs in zip(back.shard_states(), gpu.shard_states(), strict=True):
        for key, tensor in theirs.tensors().items():
            assert torch.equal(mine.tensors()[key], tensor), key


def test_another_plan_in_the_middle_changes_nothing() -> None:
    optimizer = SPARSE_OPTIMIZERS["adam"](lr=0.1)
    steady, dense = build(GPU, optimizer)
    moved, other = build(GPU, optimizer)
    train(steady, dense, range(2))
    train(moved, other, range(2))
    moved.reshard(plan_of("row_wise"))
    moved.reshard(plan_of("column_wise"))
    got, wanted = train(moved, other, range(2, 4)), train(steady, dense, range(2, 4))
    torch.testing.assert_close(got, wanted, **TOLERANCE)
