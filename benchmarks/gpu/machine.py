"""The first part: what the machine has, whether torch and FBGEMM fit, and one lookup."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch

from benchmarks.gpu.absent import is_absent
from benchmarks.gpu.checks import Notes, Settings, assert_close
from benchmarks.gpu.timing import copy_bandwidth
from benchmarks.report import hardware, versions
from rayrec._compat import PAIRS, check_pair, installed_fbgemm, require_fbgemm

PINNED = next(iter(PAIRS))  # the torch that rayrec asks for; the other pairs are let through


def run(settings: Settings, notes: Notes) -> None:
    """See the module."""
    notes.figure("machine", describe_machine(settings))
    with notes.check("torch and FBGEMM fit") as found:
        check_pair(torch.__version__, installed_fbgemm())
        require_fbgemm()
        release = ".".join(torch.__version__.split(".")[:2])
        found["release"] = "pinned" if release == PINNED else "neighbouring"
    with notes.check("one lookup, forward and backward") as found:
        found["largest difference"] = _one_lookup(settings)
    with notes.check("memory bandwidth by a copy") as found:
        found["GB/s"] = round(copy_bandwidth(settings) / 1e9, 1)


def describe_machine(settings: Settings) -> dict[str, Any]:
    """Names, versions and sizes."""
    found: dict[str, Any] = {
        "device": settings.device,
        "processor": hardware(),
        "system": platform.platform(),
        "versions": versions() | {"torch": torch.__version__},
        "importable": {name: not is_absent(name) for name in ("ray", "pyarrow", "torchrec")},
    }
    if settings.on_gpu:
        gpu = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory GB": round(gpu.total_memory / 1e9, 1),
            "multiprocessors": gpu.multi_processor_count,
            "CUDA": torch.version.cuda,
            "driver": _driver(),
        }
    return found


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.strip().splitlines() or ["unknown"])[0]


def _one_lookup(settings: Settings) -> float:
    """FBGEMM alone, without rayrec's runtime: two tables, SGD, against torch."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = torch.device(settings.device)
    where = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    if not settings.on_gpu:
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 16, *where), (30, 16, *where)],
        optimizer=EmbOptimType.EXACT_SGD,
        learning_rate=0.1,
        pooling_mode=PoolingMode.SUM,
        device=device,
    )
    torch.manual_seed(settings.seed)
    tables = [torch.randn(rows, 16) for rows in (50, 30)]
    for table, weight in zip(tables, kernel.split_embedding_weights(), strict=True):
        weight.copy_(table)
    ids = torch.tensor([1, 2, 2, 49, 0, 29, 29])  # bags of 2, 2 | 2, 1
    offsets = torch.tensor([0, 2, 4, 6, 7])
    pooled = kernel(ids.to(device), offsets.to(device))
    wanted = torch.zeros(2, 32)
    for table, columns, bags in (
        (0, slice(0, 16), ((1, 2), (2, 49))),
        (1, slice(16, 32), ((0, 29), (29,))),
    ):
        for row, bag in enumerate(bags):
            wanted[row, columns] = tables[table][list(bag)].sum(0)
    off = assert_close("pooled rows", pooled, wanted, 1e-5, 1e-6)
    pooled.sum().backward()
    updated = kernel.split_embedding_weights()[0][2]
    return max(off, assert_close("an updated row", updated, tables[0][2] - 0.2, 1e-5, 1e-5))
