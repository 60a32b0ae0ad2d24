"""The parts of `python -m benchmarks.gpu --device cuda` take the CUDA path to its end."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import parts
from benchmarks.gpu.checks import FAIL, PASS, SKIPPED, Notes, Settings

TINY = Settings(device="cuda", size="tiny", backend="cuda:gloo")
NO_TRACE = "copies and exchanges overlap the step"  # the stand-in has no profile of a GPU


@pytest.mark.parametrize("name", parts.PARTS)
def test_a_part_takes_the_cuda_path(name: str) -> None:
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no kernel here
        result = parts.run_here(name, TINY, Notes())
    bad = {check["name"]: check["detail"] for check in result["checks"] if check["status"] == FAIL}
    bad.pop(NO_TRACE, None)
    assert not bad
    passed = sum(check["status"] == PASS for check in result["checks"])
    assert passed or (name == "torchrec" and result["status"] == SKIPPED)


def test_storages_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    result = parts.run_here("optimizers", TINY, Notes())
    names = {check["name"] for check in result["checks"] if check["status"] == PASS}
    assert {"adam, host, FP32", "adam, cached, FP32", "sgd, cached, FP16"} <= names
    skipped = {check["name"] for check in result["checks"] if check["status"] == SKIPPED}
    # FBGEMM has no kernel for these, and rows stay on the device
    off_device = [f"{where}, {kind}" for where in ("host", "cached") for kind in ("FP32", "FP16")]
    without = {f"{n}, {what}" for n in ("rmsprop", "lamb", "lars_sgd") for what in off_device}
    assert skipped == without | {"adam, host, FP16", "adam, cached, FP16"}


def test_a_steps_cost_to_the_host_is_counted() -> None:
    result = parts.run_here("host", TINY, Notes())
    check = next(check for check in result["checks"] if check["name"] == "embedding step")
    # that torch knows of: the wait for the check of the ids is an event's
    assert check["host syncs"] == 0
