"""Ids of TorchRec's managed collisions: from state_dicts of its shapes, and from TorchRec itself
where it is installed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayrec.distributed import DistributedModelParallel, load_table, managed_collision_ids
from rayrec.errors import ConfigError, InputError
from rayrec.layout import DynamicConfig, EmbeddingBagConfig
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor

NO_RAW_ID = 2**63 - 1
ROWS, WIDTH = 8, 4
MODULES = "_managed_collision_collection._managed_collision_modules"


def mch_state(**changed: Tensor) -> dict[str, Tensor]:
    """What a table "t" of MCH says that keeps counts and iterations (DistanceLFU)."""
    segments = torch.full((1025,), -1)
    segments[:2] = torch.tensor([0, ROWS])
    buffers = {
        "_output_segments_tensor": segments,
        "_current_iter_tensor": torch.tensor([9]),
        "_mch_sorted_raw_ids": torch.tensor([-3, -1, 5, 700, 2**40, *[NO_RAW_ID] * 3]),
        "_mch_remapped_ids_mapping": torch.tensor([4, 6, 3, 5, 2, 1, 0, 7]),
        "_mch_counts": torch.tensor([4, 1, 8, 2**40, 1, 0, 0, NO_RAW_ID]),
        "_mch_last_access_iter": torch.tensor([9, 9, 4, 1, 2, 0, 0, 9]),
    }
    found = {f"{MODULES}.t.{name}": value for name, value in {**buffers, **changed}.items()}
    found["_embedding_module.embedding_bags.t.weight"] = torch.randn(ROWS, WIDTH)
    return found


def mpzch_state(**changed: Tensor) -> dict[str, Tensor]:
    """What a table "t" of MPZCH says that has an eviction policy and counts its ids."""
    identities = torch.tensor([-1, 7, -1, 2**40, -9, 0, -1, 3]).view(-1, 1)
    hours = torch.tensor([-1, 500, -1, 498, 490, 500, -1, 499], dtype=torch.int32)
    buffers = {
        "_hash_zch_identities": nn.Parameter(identities, requires_grad=False),
        "_hash_zch_runtime_meta": torch.tensor([0, 3, 0, 1, 2, 2**33, 0, 9]).view(-1, 1),
        "_hash_zch_metadata": hours.view(-1, 1),
        "_hash_zch_bucket": torch.tensor([[2]]),
    }
    return {f"m.{MODULES}.t.{name}": value for name, value in {**buffers, **changed}.items()}


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key.rpartition(".")[2] not in names}


def lists(found: tuple[Tensor | None, ...]) -> list[list[int] | None]:
    return [None if part is None else part.tolist() for part in found]


def test_the_buffers_of_mch() -> None:
    wanted = [[-3, 5, 700, 2**40], [4, 3, 5, 2], [0, 5, 8, 7], [4, 8, 2**31 - 1, 1]]
    assert lists(managed_collision_ids(mch_state(), "t")) == wanted
    lru = without(mch_state(), "_mch_counts")
    assert lists(managed_collision_ids(lru, "t")) == [*wanted[:3], None]
    lfu = without(mch_state(), "_mch_last_access_iter")
    assert lists(managed_collision_ids(lfu, "t")) == [*wanted[:2], None, wanted[3]]


def test_the_buffers_of_mpzch() -> None:
    wanted = [[7, 2**40, -9, 0, 3], [1, 3, 4, 5, 7], [0, 2, 10, 0, 1], [3, 1, 2, 2**31 - 1, 9]]
    assert lists(managed_collision_ids(mpzch_state(), "t")) == wanted
    found = managed_collision_ids(mpzch_state(), "t", steps_per_hour=60)
    assert lists(found) == [*wanted[:2], [0, 120, 600, 0, 60], wanted[3]]
    plain = without(mpzch_state(), "_hash_zch_metadata", "_hash_zch_runtime_meta")
    assert lists(managed_collision_ids(plain, "t")) == [*wanted[:2], None, None]
    none = mpzch_state(_hash_zch_identities=torch.full((ROWS, 1), -1))
    assert lists(managed_collision_ids(none, "t")) == [[], [], [], []]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (dict, "no managed collisions of table 't'"),
        (lambda: without(mch_state(), "_mch_sorted_raw_ids"), "no managed collisions of table 't'"),
        (lambda: {**mch_state(), **mpzch_state()}, "several managed collisions of table 't'"),
        (
            lambda: without(mch_state(), "_mch_remapped_ids_mapping"),
            "'_mch_remapped_ids_mapping' of table 't' is NoneType; a whole tensor is wanted",
        ),
        (
            lambda: mch_state(_mch_counts=torch.zeros(3)),
            r"'_mch_counts' of table 't' has shape \(3,\), not \(8,\) or \(8, 1\)",
        ),
        (
            lambda: mpzch_state(_hash_zch_runtime_meta=torch.zeros(ROWS, 2)),
            "of several columns holds no counts: leave its key out",
        ),
    ],
)
def test_what_is_no_managed_collision_is_refused(state: Callable, says: str) -> None:
    with pytest.raises(InputError, match=says):
        managed_collision_ids(state(), "t")


def test_steps_per_hour_is_for_hours() -> None:
    with pytest.raises(ConfigError, match="counts steps, so steps_per_hour has no meaning"):
        managed_collision_ids(mch_state(), "t", steps_per_hour=60)
    with pytest.raises(ConfigError, match="steps_per_hour=0; it must be at least 1"):
        managed_collision_ids(mpzch_state(), "t", steps_per_hour=0)


def check_loaded(state_dict: dict[str, Any], weight: Tensor, ids: list[int]) -> None:
    """A dynamic table looks these ids up as the module's rows of them, and no others."""
    rule = DynamicConfig(blocks=1)
    table = EmbeddingBagConfig(2 * ROWS, WIDTH, "t", feature_names=["f"], dynamic=rule)
    model = DistributedModelParallel(EmbeddingBagCollection([table], device="meta"))
    found = managed_collision_ids(state_dict, "t")
    said = load_table(
        model, "t", weight[found.rows], ids=found.ids, ages=found.ages, hits=found.hits
    )
    assert said == (len(ids), 0) and sorted(found.ids.tolist()) == sorted(ids)
    asked = torch.tensor([*ids, 424242])
    kjt = KeyedJaggedTensor(["f"], asked, lengths=torch.ones(len(asked), dtype=torch.int32))
    with torch.no_grad():
        looked_up = model(kjt).values()
    assert not looked_up[-1].any()
    rows = dict(zip(found.ids.tolist(), found.rows.tolist(), strict=True))
    assert torch.equal(looked_up[:-1], weight[[rows[one] for one in ids]])


def test_a_table_of_mch_becomes_a_dynamic_one() -> None:
    state = mch_state()
    weight = state["_embedding_module.embedding_bags.t.weight"]
    check_loaded(state, weight, [-3, 5, 700, 2**40])


@pytest.fixture(scope="module")
def torchrec() -> SimpleNamespace:
    """TorchRec's names, where it is installed."""
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor
    from torchrec import KeyedJaggedTensor as Jagged
    from torchrec.modules import hash_mc_evictions, hash_mc_modules, mc_modules
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    def model_of(module: nn.Module) -> nn.Module:
        configs = [EmbeddingBagConfig(ROWS, WIDTH, "t", feature_names=["f"])]
        modules = mc_modules.ManagedCollisionCollection({"t": module}, configs)
        return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), modules)

    def look_up(model: nn.Module, ids: list[int]) -> Tensor:
        lengths = torch.ones(len(ids), dtype=torch.int64)
        with torch.no_grad():
            return model(Jagged(["f"], torch.tensor(ids), lengths=lengths))[0].values()

    return SimpleNamespace(
        model_of=model_of,
        look_up=look_up,
        jagged=JaggedTensor,
        mc=mc_modules,
        hashed=hash_mc_modules.HashZchManagedCollisionModule,
        evictions=hash_mc_evictions,
    )


@pytest.mark.parametrize("policy", ["LFU", "LRU", "DistanceLFU"])
def test_mch_of_torchrec_becomes_a_dynamic_table(torchrec: SimpleNamespace, policy: str) -> None:
    rng = random.Random(policy)
    rule = getattr(torchrec.mc, f"{policy}_EvictionPolicy")()
    module = torchrec.mc.MCHManagedCollisionModule(ROWS, torch.device("cpu"), rule, 1)
    model = torchrec.model_of(module)
    favourites = [rng.randrange(-(2**63), 2**63 - 1) for _ in range(12)]
    for step in range(10):
        torchrec.look_up(model, rng.choices(favourites[step // 4 : step // 4 + 8], k=6))
    model.eval()
    state = model.state_dict()
    found = managed_collision_ids(state, "t")
    ids, weight = found.ids.tolist(), state["_embedding_module.embedding_bags.t.weight"]
    assert len(ids) == ROWS - 1, "the last place is for ids that have none"
    assert (found.ages is None) == (policy == "LFU") and (found.hits is None) == (policy == "LRU")
    check_loaded(state, weight, ids)
    assert torch.equal(torchrec.look_up(model, ids), weight[found.rows])


def test_mpzch_of_torchrec_becomes_a_dynamic_table(torchrec: SimpleNamespace) -> None:
    """On the CPU TorchRec only reads it, so ids are put where TorchRec finds them."""
    config = torchrec.evictions.HashZchEvictionConfig(features=["f"], single_ttl=10)
    module = torchrec.hashed(
        ROWS,
        torch.device("cpu"),
        total_num_buckets=2,
        eviction_policy_name=torchrec.evictions.HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        eviction_config=config,
        track_id_freq=True,
    )
    model = torchrec.model_of(module)
    module.reset_intrainer_bulk_eval_mode()
    model.eval()
    identities, hours = module._hash_zch_identities.data, module._hash_zch_metadata

    def place_of(one: int) -> int:
        ids = torchrec.jagged(torch.tensor([one]), lengths=torch.ones(1, dtype=torch.int64))
        return int(module.remap({"f": ids})["f"].values()[0])

    ids = []
    for one in (7, 8, 2**40 + 1, 9, 123_456_789_012):
        for place in (identities == -1).nonzero()[:, 0].tolist():
            identities[place] = one
            if place_of(one) == place:
                hours[place] = 500 - one % 7
                ids.append(one)
                break
            identities[place] = -1
    assert len(ids) >= 4
    state = model.state_dict()
    found = managed_collision_ids(state, "t")
    assert found.ages is not None and found.hits is not None
    assert found.ages.tolist() == [one % 7 - min(i % 7 for i in ids) for one in found.ids.tolist()]
    weight = state["_embedding_module.embedding_bags.t.weight"]
    check_loaded(state, weight, found.ids.tolist())
    assert torch.equal(torchrec.look_up(model, found.ids.tolist()), weight[found.rows])
