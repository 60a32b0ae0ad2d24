"""Next-item losses and candidates on one process: equal to plain torch, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rayrec.comm import LocalExchange, SimulatedWorld
from rayrec.comm.differentiable import counts_by_rank, gather_rows, send_home
from rayrec.data import ItemSlices, SharedNegatives
from rayrec.errors import ConfigError, InputError
from rayrec.models import (
    FullSoftmax,
    Lists,
    NextItem,
    best_items,
    full_ranking,
    rank_items,
    rank_scores,
    softmax,
)
from rayrec.models.next_item import next_places
from rayrec.next_item_recipe import Kind, NextItemModel, NextItemRecipe
from tests.sequences import COUNTS, ITEMS, LOSSES, NEGATIVES, MeanOfPast, build, part, plain_loss

# float32 sums in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("step", [0, 3])
def test_a_batch_has_the_loss_and_the_gradients_of_plain_torch(loss: str, step: int) -> None:
    model, reference = build(loss, "cpu"), build(loss, "cpu")
    batch = part(step, 0, 1, loss)
    value, (told, logits, labels) = model(batch)
    value.backward()
    wanted = plain_loss(reference, step, loss)
    wanted.backward()
    torch.testing.assert_close(value, wanted, **CLOSE)
    assert float(told) == float(value.detach())
    assert logits == labels == {}
    assert model.loss_count(batch) == (27 if step == 0 else 4)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name, **CLOSE)


def test_logits_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = build("full", "cpu")(part(0, 0, 1, "full"))
    monkeypatch.setattr(softmax, "CHUNK_LOGITS", 2 * ITEMS + 1)
    model = build("full", "cpu")
    value, _ = model(part(0, 0, 1, "full"))
    value.backward()
    torch.testing.assert_close(value, whole, **CLOSE)
    reference = build("full", "cpu")
    plain_loss(reference, 0, "full").backward()
    torch.testing.assert_close(model.model.bias.grad, reference.model.bias.grad, **CLOSE)


def test_an_output_without_biases_and_a_batch_without_tokens() -> None:
    model = build("full", "cpu")
    model.model.bias = None
    value, _ = model(part(0, 0, 1, "full"))
    torch.nn.init.zeros_(model.model.items.embeddings["movie"].weight)
    zero, _ = model(part(0, 0, 1, "full"))
    assert float(value) != float(zero) == pytest.approx(np.log(ITEMS))
    empty = part(3, 1, 100, "full")
    assert empty.rows == model.loss_count(empty) == 0


def test_what_a_model_cannot_be_made_of() -> None:
    model = build("full", "cpu").model
    with pytest.raises(ConfigError, match=r"one table of the features .*'songs'"):
        NextItem(model.items, MeanOfPast(), history="songs")
    with pytest.raises(ConfigError, match=r"bias \(3,\) of a table of 23 items"):
        NextItem(model.items, MeanOfPast(), bias=torch.zeros(3))
    batch = part(0, 0, 1, "full")
    batch.sparse_features = part(1, 0, 2, "full").sparse_features
    with pytest.raises(ConfigError, match="slices of 11 of them"):
        build("full", "cpu")(batch)
    ids = batch.sparse_features
    doubled = type(ids)(
        ["history", "item", "candidates"],
        torch.cat([ids["history"].values(), ids["history"].values(), torch.arange(ITEMS)]),
        lengths=torch.cat([ids["history"].lengths(), ids["history"].lengths(), torch.tensor([23])]),
        stride_per_key_per_rank=[[4], [4], [1]],
    )
    batch.sparse_features = doubled
    with pytest.raises(InputError, match=r"'item' has \d+ ids in 4 rows"):
        build("full", "cpu")(batch)


def test_a_row_of_two_items_beside_one_of_none_is_refused() -> None:
    """There are as many items as rows, and each would be that of another row."""
    batch = part(0, 0, 1, "full")
    ids = batch.sparse_features
    lengths = ids["item"].lengths().clone()
    lengths[0], lengths[1] = 2, 0
    batch.sparse_features = type(ids)(
        ["history", "item", "candidates"],
        ids.values(),
        lengths=torch.cat([ids["history"].lengths(), lengths, torch.tensor([ITEMS])]),
        stride_per_key_per_rank=[[len(lengths)], [len(lengths)], [1]],
    )
    with pytest.raises(InputError, match=r"it needs one in each"):
        build("full", "cpu")(batch)


def test_the_item_after_each_position() -> None:
    offsets = torch.tensor([0, 0, 3, 4, 4])
    assert next_places(offsets, 4).tolist() == [1, 2, 4 + 1, 4 + 2]


def test_negatives_are_the_same_on_all_ranks_and_others_in_each_step() -> None:
    drawn = NEGATIVES.ids(5, 2, 0, 1)
    assert (drawn == NEGATIVES.ids(5, 2, 3, 4)).all()
    for other in ((6, 2), (5, 3)):
        assert (drawn != NEGATIVES.ids(*other, 0, 1)).any()


def test_negatives_add_their_counts_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    negatives, sums = SharedNegatives(count=9, num_items=ITEMS, counts=np.arange(ITEMS)), []
    cumsum = np.cumsum
    monkeypatch.setattr(np, "cumsum", lambda *given: sums.append(given) or cumsum(*given))
    drawn = [negatives.ids(0, step, 0, 1).tolist() for step in range(3)]
    assert len(sums) == 1 and drawn[0] != drawn[1]


def test_negatives_come_up_as_often_as_their_chance_tells() -> None:
    even, popular = np.ones(ITEMS) / ITEMS, COUNTS / COUNTS.sum()
    for proposal, counts, chances in (
        ("popularity", COUNTS, popular),
        ("uniform", None, even),
        ("mixed", COUNTS, (even + popular) / 2),
    ):
        many = SharedNegatives(count=200_000, num_items=ITEMS, proposal=proposal, counts=counts)
        shares = np.bincount(many.ids(1, 0, 0, 1), minlength=ITEMS) / many.count
        # five standard deviations of the largest share
        assert np.abs(shares - chances).max() < 5 * (chances.max() / many.count) ** 0.5
        drawable = chances > 0
        assert np.allclose(many.log_q()[drawable], np.log(chances[drawable]))
        assert not shares[~drawable].any() and np.isfinite(many.log_q()).all()


@pytest.mark.parametrize(
    "model, usual", [("sasrec", "mixed"), ("hstu", "popularity"), ("gru4rec", "popularity")]
)
def test_each_model_has_its_own_usual_draws(model: Kind, usual: str) -> None:
    recipe = NextItemRecipe(schema="{}", model=NextItemModel(model=model), counts=COUNTS)
    assert recipe.candidates().proposal == usual


def test_draws_by_popularity_do_not_depend_on_the_type_of_the_counts() -> None:
    """The items behind the first 2**24 counts are a seventeenth of all."""
    counts = np.concatenate([np.full(16, 1 << 20), np.ones(1 << 20, np.int64)])
    whole, single = (
        SharedNegatives(count=1000, num_items=len(one), counts=one)
        for one in (counts, counts.astype(np.float32))
    )
    drawn = whole.ids(0, 1, 0, 1)
    assert 30 < (drawn >= 16).sum() < 100
    np.testing.assert_array_equal(single.ids(0, 1, 0, 1), drawn)
    np.testing.assert_array_equal(single.log_q(), whole.log_q())


def test_one_draw_of_two_kinds_is_by_popularity() -> None:
    one = SharedNegatives(count=1, num_items=ITEMS, proposal="mixed", counts=COUNTS)
    alone = SharedNegatives(count=1, num_items=ITEMS, counts=COUNTS)
    assert (one.log_q() == alone.log_q()).all() and one.ids(0, 1, 0, 1) == alone.ids(0, 1, 0, 1)


def test_slices_hold_each_item_once() -> None:
    for ranks in (1, 2, 4, 30):
        slices = [ItemSlices(num_items=ITEMS).ids(0, 0, r, ranks) for r in range(ranks)]
        assert np.concatenate(slices).tolist() == list(range(ITEMS))


def test_draws_that_make_no_sense_are_refused() -> None:
    for counts, proposal in ((None, "popularity"), (None, "mixed"), (COUNTS, "uniform")):
        with pytest.raises(ConfigError, match="popularity and mixed draw by counts"):
            SharedNegatives(count=1, num_items=ITEMS, proposal=proposal, counts=counts)
    for counts in (COUNTS[:3], 0 * COUNTS, COUNTS - 1):
        with pytest.raises(ConfigError, match="one number of at least 0 for each"):
            SharedNegatives(count=1, num_items=ITEMS, counts=counts)
    with pytest.raises(ConfigError, match="it must be one of 'uniform', 'popularity'"):
        SharedNegatives(count=1, num_items=ITEMS, proposal="rare")


@pytest.mark.seeds(range(50))
def test_gradients_go_back_to_the_ranks_whose_rows_were_gathered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 5))
    sizes = rng.integers(0, 4, ranks).tolist()
    rows = [torch.from_numpy(rng.normal(size=(size, 3))) for size in sizes]
    weights = [torch.from_numpy(rng.normal(size=(sum(sizes), 3))) for _ in range(ranks)]

    def body(exchange):
        own = rows[exchange.rank].clone().requires_grad_()
        (told,) = counts_by_rank([len(own)], exchange, own.device)
        gathered = gather_rows(own, told, exchange)
        # every rank scores all rows, and each row's owner takes the square of what it hears
        scores = (gathered * weights[exchange.rank]).sum(1)
        loss = send_home(scores, told, exchange).square().sum()
        loss.backward()
        return told, gathered.detach(), loss.detach(), own.grad

    found = SimulatedWorld(ranks).run(body)
    whole = torch.cat(rows).requires_grad_()
    wanted = torch.stack([(whole * weight).sum(1) for weight in weights]).square().sum()
    wanted.backward()
    assert all(told == sizes for told, *_ in found)
    for _, gathered, _, _ in found:
        torch.testing.assert_close(gathered, whole.detach())
    torch.testing.assert_close(sum(loss for _, _, loss, _ in found), wanted.detach())
    torch.testing.assert_close(torch.cat([grad for *_, grad in found]), whole.grad)


def place_by_sort(scores: list[float], wanted: list[int]) -> list[int]:
    """A list of all items, best first, in which wanted ones stand behind others of their score."""
    order = sorted(
        range(len(scores)),
        key=lambda i: (-scores[i], i in wanted, wanted.index(i) if i in wanted else 0),
    )
    return [order.index(i) if scores[i] > -np.inf else len(scores) for i in wanted]


@pytest.mark.seeds(range(50))
def test_places_are_those_of_a_sort_with_ties_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_ranking, "CHUNK_SCORES", 12)
    rng = np.random.default_rng(seed)
    ranks, items = int(rng.integers(1, 5)), int(rng.integers(2, 20))
    # few values, so that many scores tie
    rows = torch.from_numpy(rng.integers(-1, 2, (items, 3))).float()
    biases = torch.from_numpy(rng.integers(0, 2, items)).float()
    known = torch.from_numpy(rng.random(items) < 0.8)
    asked, expected = [], []
    for _ in range(ranks):
        count = int(rng.integers(0, 4))
        queries = torch.from_numpy(rng.integers(-1, 2, (count, 3))).float()
        wanted = [
            rng.choice(items, min(items, int(rng.integers(0, 4))), False).tolist()
            for _ in range(count)
        ]
        seen = [rng.integers(0, items, int(rng.integers(0, 5))).tolist() for _ in range(count)]
        asked.append((queries, wanted, seen))
        for query, targets, past in zip(queries, wanted, seen, strict=True):
            scores = (rows @ query + biases).masked_fill(~known, -torch.inf).tolist()
            masked = [-np.inf if i in past else s for i, s in enumerate(scores)]
            pairs = zip(place_by_sort(scores, targets), place_by_sort(masked, targets), strict=True)
            expected += [tuple(min(place, items) for place in pair) for pair in pairs]

    def body(exchange):
        queries, wanted, seen = asked[exchange.rank]
        mine = slice(items * exchange.rank // ranks, items * (exchange.rank + 1) // ranks)
        return rank_items(
            queries,
            lists(wanted),
            lists(seen),
            rows[mine],
            biases[mine],
            mine.start,
            known[mine],
            exchange,
        )

    found = SimulatedWorld(ranks).run(body)
    pairs = [pair for p in found for pair in zip(p.kept.tolist(), p.masked.tolist(), strict=True)]
    # one that cannot be found stands behind all items, in whatever order
    assert [tuple(min(place, items) for place in pair) for pair in pairs] == expected


@pytest.mark.seeds(range(50))
def test_the_best_items_are_those_of_a_sort_with_lower_ids_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks, items = int(rng.integers(1, 5)), int(rng.integers(2, 20))
    k = int(rng.integers(1, items + 1))
    rows = torch.from_numpy(rng.integers(-1, 2, (items, 3))).float()
    biases = torch.from_numpy(rng.integers(0, 2, items)).float()
    # a row that is no number is in no list
    rows[rng.random(items) < 0.1] = torch.nan
    known = torch.from_numpy(rng.random(items) < 0.8)
    asked, expected = [], []
    for _ in range(ranks):
        count = int(rng.integers(0, 4))
        queries = torch.from_numpy(rng.integers(-1, 2, (count, 3))).float()
        left_out = [
            [rng.integers(0, items, int(rng.integers(0, 5))).tolist() for _ in range(count)]
            for _ in range(2)
        ]
        asked.append((queries, left_out))
        for n, query in enumerate(queries):
            scores = (rows @ query + biases).masked_fill(~known, torch.nan).tolist()
            there = {i: score for i, score in enumerate(scores) if score == score}
            for past in left_out:
                there = {i: score for i, score in there.items() if i not in past[n]}
            best = sorted(there, key=lambda i: (-there[i], i))[:k]
            none = k - len(best)
            found = [there[i] for i in best] + [-np.inf] * none
            expected.append((best + [-1] * none, found))

    def body(exchange):
        queries, left_out = asked[exchange.rank]
        mine = slice(items * exchange.rank // ranks, items * (exchange.rank + 1) // ranks)
        own = rows[mine], biases[mine], mine.start, known[mine]
        return best_items(queries, [lists(one) for one in left_out], *own, k, exchange)

    found = SimulatedWorld(ranks).run(body)
    pairs = [pair for ids, own in found for pair in zip(ids.tolist(), own.tolist(), strict=True)]
    assert pairs == expected


def lists(rows: list[list[int]]) -> Lists:
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Lists(torch.tensor([i for row in rows for i in row], dtype=torch.int64), lengths)


def test_a_model_that_has_diverged_finds_nothing() -> None:
    rows, known = torch.full((4, 2), torch.nan), torch.ones(4, dtype=torch.bool)
    one = torch.ones(1, 2), lists([[2]]), lists([[]]), rows, torch.zeros(4), 0, known
    assert rank_items(*one, LocalExchange()).kept.tolist() == [4]
    scores = torch.full((1, 4), torch.nan)
    assert rank_scores(scores, lists([[2]]), lists([[]]), known).kept.tolist() == [4]


def test_full_softmax_is_cross_entropy_also_of_far_scores() -> None:
    tokens, items = 300 * torch.randn(5, 4), torch.randn(7, 4)
    own = torch.tensor([0, 6, 3, 3, 1])
    scores = tokens @ items.t()
    found = FullSoftmax(7)(
        tokens,
        scores[torch.arange(5), own],
        own,
        items,
        torch.zeros(7),
        torch.arange(7),
        LocalExchange(),
    )
    wanted = torch.nn.functional.cross_entropy(scores, own, reduction="none")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-3)


def test_a_sampled_softmax_keeps_no_logits_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    loss, exchange = softmax.SampledSoftmax(50, torch.randn(50)), LocalExchange()
    given = [torch.randn(shape, requires_grad=True) for shape in ((70, 4), (70,), (30, 4), (30,))]
    tokens, own_scores, candidates, biases = given
    own_ids, ids = torch.randint(0, 50, (70,)), torch.arange(30)
    kept: list[int] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved.numel())
        return saved

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        losses = loss(tokens, own_scores, own_ids, candidates, biases, ids, exchange)
        return losses, torch.autograd.grad(losses.square().sum(), given)

    whole, wanted = run()
    monkeypatch.setattr(softmax, "SAMPLED_LOGITS", 400, raising=False)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        ours, grads = run()
    assert max(kept) <= 500
    torch.testing.assert_close(ours, whole)
    torch.testing.assert_close(grads, wanted)
