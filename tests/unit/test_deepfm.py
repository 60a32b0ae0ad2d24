"""DeepFM: its factorization machine against all pairs, widths, empty batches, learning."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError
from rayrec.models import (
    DeepFM,
    DeepFMTrain,
    FactorizationMachine,
    FMInteractionArch,
    SimpleDeepFMNN,
)
from rayrec.sparse import KeyedTensor
from tests.unit.click_task import COLUMNS, DIM, FEATURES, batch, tables


def model(columns: int = COLUMNS, per_column: bool = False) -> DeepFMTrain:
    return DeepFMTrain(
        SimpleDeepFMNN(
            columns, tables(), hidden_layer_size=16, deep_fm_dimension=6, per_column=per_column
        )
    )


def rows(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(4, *shape, generator=generator, dtype=torch.float64)
        for shape in ((3,), (2, 3), (1, 3))
    ]


@pytest.mark.seeds(range(5))
def test_the_factorization_machine_sums_products_of_all_pairs(seed):
    inputs = rows(seed)
    columns = torch.cat([r.flatten(1) for r in inputs], 1).unbind(1)
    pairs = sum(a * b for a, b in combinations(columns, 2))
    torch.testing.assert_close(FactorizationMachine()(inputs).squeeze(1), pairs)
    vectors = torch.cat([r.view(4, -1, 3) for r in inputs], 1).unbind(1)
    dots = sum((a * b).sum(1) for a, b in combinations(vectors, 2))
    torch.testing.assert_close(FactorizationMachine(per_column=True)(inputs).squeeze(1), dots)


def test_the_interaction_is_dense_row_deep_part_and_machine():
    arch = FMInteractionArch(12, ["a", "b"], 5).double()
    dense, sparse = torch.rand(2, 4).double(), torch.rand(2, 2, 4).double()
    got = arch(dense, sparse)
    flat = torch.cat([dense, sparse.flatten(1)], 1)
    deep = arch.deep_fm.dense_module[0](flat).relu()
    torch.testing.assert_close(got, torch.cat([dense, deep, FactorizationMachine()([flat])], 1))
    assert torch.equal(DeepFM(nn.Identity())([dense, sparse]), flat)
    # by name, whatever their order
    keyed = KeyedTensor(
        ["b", "c", "a"], [4, 4, 4], torch.cat([sparse[:, 1], dense, sparse[:, 0]], 1)
    )
    assert torch.equal(arch(dense, keyed), got)
    assert FMInteractionArch(4, [], 5)(dense, keyed) is dense


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("columns", [0, COLUMNS])
@pytest.mark.parametrize("size", [6, 0])
def test_one_logit_per_row_and_gradients_everywhere(size, columns, per_column):
    train = model(columns, per_column)
    loss, (same_loss, logits, labels) = train(batch(size, 0, columns))
    assert (
        loss.shape == ()
        and logits.shape == labels.shape == (size,)
        and torch.equal(loss.detach(), same_loss)
    )
    if size:
        torch.testing.assert_close(loss, nn.BCEWithLogitsLoss()(logits, labels))
    loss.backward()
    for name, parameter in train.named_parameters():
        assert parameter.grad is not None, name
        assert size or not parameter.grad.any(), name


def test_parameter_names_are_those_of_torchrec():
    assert set(model().model.state_dict()) == {
        *(
            f"sparse_arch.embedding_bag_collection.embedding_bags.t{i}.weight"
            for i in range(FEATURES)
        ),
        *(f"dense_arch.model.{i}.{p}" for i in (0, 2) for p in ("weight", "bias")),
        *(
            f"{part}.{p}"
            for part in ("inter_arch.deep_fm.dense_module.0", "over_arch.model.0")
            for p in ("weight", "bias")
        ),
    }


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"one width, got \[2, 3\]"):
        FactorizationMachine(per_column=True)([torch.rand(1, 2), torch.rand(1, 3)])


def test_it_learns_a_task_that_needs_ids_and_dense_columns():
    torch.manual_seed(0)
    train = model()
    optimizer = torch.optim.Adam(train.parameters(), lr=0.01)
    for step in range(400):
        optimizer.zero_grad()
        loss, _ = train(batch(256, step))
        loss.backward()
        optimizer.step()
    held_out, _ = train(batch(2000, 10_000))
    assert held_out.item() < 0.4  # guessing gives log 2 = 0.69, and so does either input alone
    assert train.model.sparse_arch.D == DIM
