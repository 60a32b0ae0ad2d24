"""Rows in and out: torch.distributed.checkpoint across plans and worlds, pretrained tables, a plain
state_dict of the whole.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from rayrec.distributed import DistributedModelParallel, load_table, unsharded_state_dict
from rayrec.errors import ConfigError, InputError, ShapeError
from rayrec.layout import DynamicConfig
from tests.gloo.small_dlrm import PATH, ROWS, build, changed, check_holds, make_plan, plan_of
from tests.ranks import RankPool
from tests.worlds import part_of


def save(rank: int, world_size: int, folder: str):
    model = DistributedModelParallel(build(), plan=make_plan("mixed", world_size))
    model.load_state_dict(changed().state_dict())
    dcp.save(model.state_dict(), checkpoint_id=folder)


def load(rank: int, world_size: int, folder: str):
    model = DistributedModelParallel(build(), plan=plan_of(world_size))
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    check_holds(model, changed().state_dict())


def test_torch_distributed_checkpoint_saves_2_ranks_and_loads_3_under_another_plan(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(2, save, str(tmp_path / "dcp"))
    ranks.run(3, load, str(tmp_path / "dcp"))


def export(rank: int, world_size: int, path: str):
    model = DistributedModelParallel(build(), plan=make_plan("mixed", world_size))
    model.load_state_dict(changed().state_dict())
    whole = unsharded_state_dict(model)
    assert (whole is not None) == (rank == 0)
    if whole is not None:
        torch.save(whole, path)
    dist.barrier()
    again = DistributedModelParallel(build(), plan=plan_of(world_size))
    again.load_state_dict(torch.load(path, weights_only=True))
    check_holds(again, changed().state_dict())


def test_the_unsharded_state_dict_goes_out_and_comes_back(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    ranks.run(3, export, path)
    plain = build("cpu")
    plain.load_state_dict(torch.load(path, weights_only=True))
    for a, b in zip(plain.parameters(), changed().parameters(), strict=True):
        assert torch.equal(a, b)


class TwoNames(torch.nn.Module):
    """A collection that a model has under two names beside each other, and under a third."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        table = EmbeddingBagConfig(9, 4, name="t", feature_names=["f"])
        self.query = EmbeddingBagCollection([table], device=device)
        self.item = self.query
        self.others = torch.nn.ModuleList([self.query, torch.nn.Linear(4, 1)])

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.query(ids).values() * self.item(ids).values()
        return self.others[1](rows + self.others[0](ids).values()).sum()


def train_two_names(rank: int, world_size: int):
    module = TwoNames()
    model = DistributedModelParallel(module)
    assert [name for name, _ in model.named_parameters()] == ["others.1.weight", "others.1.bias"]
    assert module.item is module.query and module.others[0] is module.query
    model(KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.ones(3, dtype=int))).backward()
    whole = unsharded_state_dict(model)
    if whole is not None:
        assert whole["item.embedding_bags.t.weight"] is whole["query.embedding_bags.t.weight"]
        TwoNames("cpu").load_state_dict(whole)
    return whole is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_collection_of_several_names_is_one_in_all_of_them(
    ranks: RankPool, world_size: int
) -> None:
    assert ranks.run(world_size, train_two_names)[0]


def copy_and_pickle(rank: int, world_size: int) -> None:
    model = DistributedModelParallel(build(), plan=make_plan("mixed", world_size))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="several ranks can be neither copied nor pickled"):
            attempt(model)


def test_a_model_of_several_ranks_is_neither_copied_nor_pickled(ranks: RankPool) -> None:
    ranks.run(2, copy_and_pickle)


def pretrained(rank: int, world_size: int, folder: str):
    model = DistributedModelParallel(build(), plan=make_plan("mixed", world_size))
    written = load_table(model, "t1", torch.full((ROWS[1], 8), 3.0)).written
    load_table(model, "t0", folder + "/t0.parquet")
    load_table(model, "t2", folder + "/t2.arrow")
    with pytest.raises(ShapeError, match="7 x 8"):
        load_table(model, "t1", torch.zeros(2, 8))
    with pytest.raises(InputError, match="'nothere'"):
        load_table(model, "nothere", torch.zeros(2, 8))
    with pytest.raises(InputError, match="row 50"):
        load_table(model, "t2", folder + "/bad.arrow")
    return written, [(s.shard, s.weight.detach().clone()) for s in model.shard_states()]


def arrow(values: torch.Tensor, rows: torch.Tensor | None) -> pa.Table:
    columns = {
        "weight": pa.FixedSizeListArray.from_arrays(
            pa.array(values.reshape(-1).numpy()), values.shape[1]
        )
    }
    if rows is not None:
        columns["row"] = pa.array(rows.numpy())
    return pa.table(columns)


def test_pretrained_rows_are_loaded_from_tensors_and_files(ranks: RankPool, tmp_path: Path) -> None:
    everything = torch.randn(ROWS[0], 8)
    some, where = torch.randn(5, 8), torch.tensor([44, 2, 30, 9, 0])
    pq.write_table(arrow(everything, None), tmp_path / "t0.parquet", row_group_size=7)
    for name, rows in (("t2", where), ("bad", where + 6)):
        with (
            pa.OSFile(str(tmp_path / f"{name}.arrow"), "wb") as sink,
            pa.ipc.new_file(sink, arrow(some, rows).schema) as writer,
        ):
            writer.write_table(arrow(some, rows))
    results = ranks.run(2, pretrained, str(tmp_path))
    assert sum(written for written, _ in results) == ROWS[1]  # t1 is row-wise
    initial = build("cpu").state_dict()
    wanted = {name: initial[PATH.format(name)].clone() for name in ("t2", "t3")}
    wanted |= {"t0": everything, "t1": torch.full((ROWS[1], 8), 3.0)}
    wanted["t2"][where] = some
    for _, states in results:
        for s, weight in states:
            assert torch.equal(weight, part_of(wanted[s.table], s))


WHOLE = {"weight": [[1.0, 2.0], [3.0, 4.0]], "id": [5, 6], "row": [0, 1]}
LARGE = pa.array(WHOLE["weight"], pa.large_list(pa.float32()))


@pytest.mark.parametrize("dynamic", [None, DynamicConfig()])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": LARGE}, None),
        ({"weight": [["a", "b"], ["c", "d"]]}, r"'weight' has type list<.*string>"),
        ({"weight": ["a", "b"]}, "'weight' has type string"),
        ({"weight": [[1.0, None], [3.0, 4.0]]}, "'weight' has rows without a value"),
        ({"id": ["5", "6"], "row": ["0", "1"]}, "'(id|row)' has type string"),
        ({"id": [5, None], "row": [0, None]}, "'(id|row)' has rows without a value"),
        ({"id": [[5, 6], [7, 8]], "row": [[0, 1], [0, 1]]}, "the ids for|'row' has lists"),
    ],
)
def test_a_file_holds_numbers(
    tmp_path: Path, dynamic: DynamicConfig | None, change: dict, says: str | None
) -> None:
    table = EmbeddingBagConfig(2, 2, "t", feature_names=["f"], dynamic=dynamic)
    model = DistributedModelParallel(EmbeddingBagCollection([table], device="meta"))
    pq.write_table(pa.table(WHOLE | change), tmp_path / "t.parquet")
    if says is None:
        assert load_table(model, "t", tmp_path / "t.parquet").written == 2
        return
    with pytest.raises((InputError, ShapeError), match=says):
        load_table(model, "t", tmp_path / "t.parquet")
