"""The part of tables outside of a GPU's memory: they train as those on it, and how caches hit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu.checks import Notes, Settings, assert_close
from benchmarks.gpu.timing import Step, step_ms
from benchmarks.workload import zipf_ids
from rayrec.distributed import DistributedModelParallel
from rayrec.layout import EmbeddingBagConfig, ShardingPlan, Storage, TableLayout, TablePlacement
from rayrec.modules import EmbeddingBagCollection
from rayrec.optim import RowWiseAdagrad
from rayrec.sparse import KeyedJaggedTensor

STORAGES = {
    "device": Storage(),
    "host": Storage("host"),
    "cached 5%": Storage("cached", load_factor=0.05),
    "cached 20%": Storage("cached", load_factor=0.2),
    "cached 50%": Storage("cached", load_factor=0.5),
}


def run(settings: Settings, notes: Notes) -> None:
    """See the module."""
    rows, width, bags = settings.choose((2_000_000, 64, 16384), (20_000, 32, 512), (500, 8, 32))
    rng = np.random.default_rng(settings.seed)
    batches = []
    for _ in range(settings.choose(24, 10, 6)):
        ids = torch.from_numpy(zipf_ids(rng, rows, 2 * bags, 1.05))
        kjt = KeyedJaggedTensor(["f"], ids, lengths=torch.full((bags,), 2, dtype=torch.int32))
        batches.append(kjt.sync().to(settings.device))
    wanted: list[torch.Tensor] = []
    for name, storage in STORAGES.items():
        with notes.check(name) as found:
            if name != "device":
                settings.need_gpu("a storage outside of its memory")
            model = _model(storage, rows, width, settings)
            outputs, hits = _train(model, batches)
            wanted = wanted or outputs
            for step, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
                assert_close(f"output of step {step}", got, want, 2e-4, 2e-5)
            if storage.kind == "cached":
                late = hits[len(hits) // 2 :]
                found["hit rate"] = round(sum(late) / len(late), 4)
                found["hit rate by step"] = [round(hit, 3) for hit in hits]
            found["ms"] = step_ms(_any_step(model, batches), settings, 5, 4)


def _model(storage: Storage, rows: int, width: int, settings: Settings) -> DistributedModelParallel:
    table = EmbeddingBagConfig(rows, width, name="t", feature_names=["f"])
    layout = TableLayout((0, rows), (0, width), ((0,),))
    plan = ShardingPlan(world_size=1, tables={"t": TablePlacement(layout, storage)})
    return DistributedModelParallel(
        EmbeddingBagCollection([table], device="meta"),
        plan=plan,
        sparse_optimizer=RowWiseAdagrad(lr=0.05, eps=1e-3),
        device=settings.device,
        seed=settings.seed,
    )


def _any_step(model: DistributedModelParallel, batches: list[KeyedJaggedTensor]) -> Step:
    return lambda i: _step(model, batches[i % len(batches)])


def _step(model: DistributedModelParallel, kjt: KeyedJaggedTensor) -> torch.Tensor:
    output = model(kjt).values()
    (output * 0.1).sum().backward()
    return output.detach()


def _train(
    model: DistributedModelParallel, batches: list[KeyedJaggedTensor]
) -> tuple[list[torch.Tensor], list[float]]:
    """Outputs by step, and before each step the share of its ids whose rows are in the cache."""
    (lookup,) = model._engine.lookups.values()
    outputs, hits = [], []
    for kjt in batches:
        hits.append(_hit_rate(lookup.kernel, kjt))
        outputs.append(_step(model, kjt).cpu())
    return outputs, hits


def _hit_rate(lookup: Any, kjt: KeyedJaggedTensor) -> float:
    kernel = getattr(lookup, "kernel", None)
    if kernel is None or not kernel.lxu_cache_weights.numel():
        return 0.0
    linear = torch.ops.fbgemm.linearize_cache_indices(
        kernel.cache_hash_size_cumsum, kjt.values(), kjt.offsets().long()
    )
    lines = torch.ops.fbgemm.lxu_cache_lookup(
        linear, kernel.lxu_cache_state, kernel.total_cache_hash_size
    )
    return float((lines >= 0).float().mean())
