"""Parts that compare with the unsharded model: every collection, every optimizer and storage."""

from __future__ import annotations

import torch

from benchmarks.gpu.checks import Notes, Settings, Skip, assert_close, assert_equal
from benchmarks.gpu.models import (
    bags,
    cases,
    compare_training,
    plan_of,
    shard,
    target_of,
    trained_case,
)
from benchmarks.gpu.reference import Case, Collection
from rayrec.distributed.kernels.lookup import has_fused_kernel
from rayrec.layout import DataType, Storage
from rayrec.optim import (
    LAMB,
    SGD,
    SPARSE_OPTIMIZERS,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    SparseOptimizer,
)

# eps so large that no update hangs on the sign of a rounding error
RATES = {"adam": 0.02, "partial_rowwise_adam": 0.02, "lamb": 0.02, "lars_sgd": 0.5}


def _optimizer(kind: type[SparseOptimizer]) -> SparseOptimizer:
    options = {"eps": 1e-3, "eta": 0.1}
    known = {name: value for name, value in options.items() if hasattr(kind, name)}
    return kind(lr=RATES.get(kind.name, 0.1), **known)


OPTIMIZERS = {name: _optimizer(kind) for name, kind in SPARSE_OPTIMIZERS.items()}
OPTIONS: dict[str, SparseOptimizer] = {
    "rowwise_adagrad, l2 decay": RowWiseAdagrad(lr=0.1, eps=1e-3, weight_decay=0.1),
    "rowwise_adagrad, decoupled decay": RowWiseAdagrad(
        lr=0.1, eps=1e-3, weight_decay=0.1, weight_decay_mode="decoupled"
    ),
    "adam, decay": Adam(lr=0.02, eps=1e-3, weight_decay=0.1),
    "adam, l2 decay, in torch": Adam(lr=0.02, eps=1e-3, weight_decay=0.1, weight_decay_mode="l2"),
    "partial_rowwise_adam, decay": PartialRowWiseAdam(lr=0.02, eps=1e-3, weight_decay=0.1),
    "lamb, decay": LAMB(lr=0.02, eps=1e-3, weight_decay=0.1),
    "lars_sgd, decay": LarsSGD(lr=0.5, eta=0.1, weight_decay=0.1),
    "sgd, decay, in torch": SGD(lr=0.1, weight_decay=0.1),
}
STORAGES = {
    "device": Storage(),
    "host": Storage("host"),
    "cached": Storage("cached", load_factor=0.3),
}


def collections(settings: Settings, notes: Notes) -> None:
    """Forward, update and state of every kind of collection, whole and cut into blocks."""
    rows = settings.choose(5000, 300, 60)
    optimizer = OPTIMIZERS["rowwise_adagrad"]
    for case in cases(rows):
        with notes.check(case.name) as found:
            found |= compare_training(case, optimizer, settings)
    everything = cases(rows)[-1]
    for what, blocks in (("cut by rows", (3, 1)), ("cut by rows and columns", (2, 2))):
        with notes.check(f"{everything.name}, {what}") as found:
            plan = plan_of(everything, None, *blocks)
            found |= compare_training(everything, OPTIMIZERS["adagrad"], settings, plan)
    with notes.check("gradients of learned weights") as found:
        found["largest difference"] = _learned_weights(settings, rows)
    with notes.check("repeated ids of sequences sent once") as found:
        found["largest difference"] = _distinct(settings, rows)


def optimizers(settings: Settings, notes: Notes) -> None:
    """Forward, update and state of every optimizer in every storage, and its options."""
    rows = settings.choose(3000, 200, 40)
    for name, optimizer in OPTIMIZERS.items():
        for storage, where in STORAGES.items():
            for data_type in (DataType.FP32, DataType.FP16):
                with notes.check(f"{name}, {storage}, {data_type.value}") as found:
                    need_storage(settings, storage, optimizer, data_type)
                    case = trained_case(rows, data_type)
                    found |= compare_training(case, optimizer, settings, plan_of(case, where))
    case = trained_case(rows)
    with notes.check("rows whose gradient is 0 stay"):
        for optimizer in OPTIMIZERS.values():
            _train_by_zeros(case, optimizer, settings)
    for name, optimizer in OPTIONS.items():
        with notes.check(name) as found:
            found |= compare_training(case, optimizer, settings)


def _train_by_zeros(case: Case, optimizer: SparseOptimizer, settings: Settings) -> None:
    """A step whose gradients are 0, after which all rows must be what they were."""
    model = shard(case, optimizer, settings)
    before = [state.weight.clone() for state in model.shard_states()]
    (model(case.batch(30, 5, 0).to(settings.device)) * 0).sum().backward()
    for state, rows in zip(model.shard_states(), before, strict=True):
        assert_equal(f"rows of {state.shard.table} by {optimizer.name}", state.weight, rows)


def need_storage(
    settings: Settings, storage: str, optimizer: SparseOptimizer, data_type: DataType
) -> None:
    """Skip a check whose rows would lie off the device where they cannot."""
    if storage == "device":
        return
    settings.need_gpu(f"storage {storage!r}")
    if not has_fused_kernel(optimizer, "cuda", data_type):
        raise Skip("FBGEMM has no CUDA kernel for it, so rows stay on the device")


def _learned_weights(settings: Settings, rows: int) -> float:
    """The gradient of per-id weights, against autograd's."""
    case = Case("learned", (Collection((bags("w0", rows, 16, "ab"),), weighted=True),))
    optimizer = SGD(lr=0.0)
    kjt = case.batch(30, 5, settings.seed)
    torch.manual_seed(settings.seed)
    sides = ((settings.device, shard(case, optimizer, settings)), ("cpu", case.build("cpu")))
    grads = []
    for device, model in sides:
        weights = kjt.weights().detach().to(device).requires_grad_()
        batch = kjt.to(device)._like(weights=weights)
        output = model(batch)
        (output * target_of(output, 0)).sum().backward()
        assert weights.grad is not None
        grads.append(weights.grad)
    return assert_close("gradient of weights", grads[0], grads[1], 1e-4, 1e-5)


def _distinct(settings: Settings, rows: int) -> float:
    """Outputs with and without `dedup_sequences` after two steps."""
    case = next(case for case in cases(rows) if case.name == "sequences")
    outputs = []
    for dedup in (False, True):
        model = shard(case, OPTIMIZERS["sgd"], settings, dedup_sequences=dedup)
        for step in range(3):
            output = model(case.batch(30, 5, step).to(settings.device))
            (output * target_of(output, step)).sum().backward()
        outputs.append(output.detach())
    return assert_close("outputs", outputs[1], outputs[0], 1e-4, 1e-5)
