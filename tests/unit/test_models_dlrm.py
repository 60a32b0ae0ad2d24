"""DLRM and DLRM_DCN: widths, empty batches, models without dense columns, and that they learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayrec.errors import ConfigError
from rayrec.models import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain, InteractionArch
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from tests.unit.click_task import COLUMNS, DIM, PlainBatch, batch, tables


def model(kind: str, columns: int = COLUMNS) -> DLRM:
    if kind == "dlrm":
        return DLRM(tables(), columns, [16, DIM], [16, 1])
    if kind == "projection":
        return DLRM_Projection(tables(), columns, [16, DIM], [16, 1], [12, 2 * DIM], [3 * DIM])
    return DLRM_DCN(tables(), columns, [16, DIM], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4)


def as_batch_of(rows: int, columns: int) -> PlainBatch:
    return batch(rows, 0, columns)


@pytest.mark.parametrize("columns", [0, COLUMNS])
@pytest.mark.parametrize("kind", ["dlrm", "dcn", "projection"])
def test_one_logit_per_row_and_gradients_everywhere(kind, columns):
    train = DLRMTrain(model(kind, columns))
    loss, (same_loss, logits, labels) = train(as_batch_of(6, columns))
    assert (
        loss.shape == ()
        and logits.shape == labels.shape == (6,)
        and torch.equal(loss.detach(), same_loss)
    )
    assert not (same_loss.requires_grad or logits.requires_grad or labels.requires_grad)
    torch.testing.assert_close(loss, nn.BCEWithLogitsLoss()(logits, labels))
    loss.backward()
    assert all(parameter.grad is not None for parameter in train.parameters())


@pytest.mark.parametrize("columns", [0, COLUMNS])
@pytest.mark.parametrize("kind", ["dlrm", "dcn", "projection"])
def test_a_batch_of_no_rows_gives_zero_loss_and_gradients(kind, columns):
    train = DLRMTrain(model(kind, columns))
    loss, (_, logits, _) = train(as_batch_of(0, columns))
    loss.backward()
    assert loss.item() == 0 and logits.shape == (0,)
    for name, parameter in train.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_interaction_is_the_dense_row_and_all_pairs():
    generator = torch.Generator().manual_seed(0)
    dense, sparse = torch.rand(2, 4, generator=generator), torch.rand(2, 3, 4, generator=generator)
    arch = InteractionArch(3)
    got, rows = arch(dense, sparse), torch.cat([dense[:, None], sparse], 1)
    pairs = [(rows[:, i] * rows[:, j]).sum(1) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(got, torch.cat([dense, torch.stack(pairs, 1)], 1))
    assert got.shape[1] == arch.out_features(4, True) and arch(None, sparse).shape[
        1
    ] == arch.out_features(4, False)


def test_module_names_are_those_of_torchrec():
    names = set(model("dlrm").state_dict())
    assert {
        "sparse_arch.embedding_bag_collection.embedding_bags.t0.weight",
        "dense_arch.model._mlp.0._linear.weight",
        "over_arch.model.0._mlp.0._linear.weight",
        "over_arch.model.1.bias",
    } <= names
    assert "inter_arch.crossnet.W_kernels.0" in model("dcn").state_dict()


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"must end in the tables' embedding_dim, 8"):
        DLRM(tables(), COLUMNS, [16, 4], [1])
    with pytest.raises(ConfigError, match="must end in"):
        DLRM_DCN(tables(), COLUMNS, [], [1], 1, 1)
    with pytest.raises(ConfigError, match="over_arch_layer_sizes is empty"):
        DLRM(tables(), COLUMNS, [DIM], [])
    uneven = [EmbeddingBagConfig(3, d, n, feature_names=[n]) for n, d in (("a", 4), ("b", 8))]
    with pytest.raises(ConfigError, match="need one embedding_dim"):
        DLRM(EmbeddingBagCollection(uneven), COLUMNS, [8], [1])


@pytest.mark.parametrize("kind", ["dlrm", "dcn", "projection"])
def test_it_learns_a_task_that_needs_ids_and_dense_columns(kind):
    torch.manual_seed(0)
    train = DLRMTrain(model(kind))
    optimizer = torch.optim.Adam(train.parameters(), lr=0.01)
    losses = []
    for step in range(300):
        optimizer.zero_grad()
        loss, _ = train(batch(256, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.6
    held_out, _ = train(batch(2000, 10_000))
    assert held_out.item() < 0.3  # guessing gives log 2 = 0.69, and so does either input alone


@pytest.mark.parametrize("columns", [0, COLUMNS])
def test_the_projection_is_a_product_of_what_two_branches_make(columns):
    net = model("projection", columns)
    part = as_batch_of(4, columns)
    rows = net.sparse_arch(part.sparse_features)
    dense = net.dense_arch(part.dense_features) if columns else None
    wide = rows.flatten(1) if dense is None else torch.cat((dense, rows.flatten(1)), 1)
    left, right = net.inter_arch.interaction_branch1(wide), net.inter_arch.interaction_branch2(wide)
    products = torch.stack(
        [(a.view(2, DIM) @ b.view(DIM, 3)).flatten() for a, b in zip(left, right, strict=True)]
    )
    want = products if dense is None else torch.cat((dense, products), 1)
    torch.testing.assert_close(net.inter_arch(dense, rows), want)
    with pytest.raises(
        ConfigError, match=r"interaction_branch2_layer_sizes=\[9\] must end in a multiple of .* 8"
    ):
        DLRM_Projection(tables(), columns, [16, DIM], [16, 1], [DIM], [9])
