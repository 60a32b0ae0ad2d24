"""What a part finds: checks by name, each passed, failed or skipped with a reason."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PASS, FAIL, SKIPPED = "pass", "fail", "skipped"


class Skip(Exception):
    """A check cannot be made here; says why."""


class Differs(AssertionError):
    """Two results are not the same."""


class Settings(NamedTuple):
    """What every part is told.

    Attributes:
        device: "cuda" or "cpu".
        size: "full" for figures, "small" for a proof that the part works, "tiny" for tests.
        backend: of process groups.
        seed: of all random numbers.
    """

    device: str = "cpu"
    size: str = "small"
    backend: str = "gloo"
    seed: int = 0

    @property
    def on_gpu(self) -> bool:
        """Whether there are streams, page-locked memory and kernels of a GPU."""
        return self.device == "cuda"

    def choose(self, full: Any, small: Any, tiny: Any = None) -> Any:
        """One of three by the size; tiny is small where nothing else is given."""
        return {"full": full, "small": small, "tiny": small if tiny is None else tiny}[self.size]

    def need_gpu(self, what: str) -> None:
        """Raises Skip on CPU."""
        if not self.on_gpu:
            raise Skip(f"{what}: a GPU's alone")


class Notes:
    """The checks of one part.

    Args:
        path: written anew after every check, so that a part that dies leaves what it had found.
            None writes nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.checks: list[dict[str, Any]] = []
        self.figures: dict[str, Any] = {}
        self._path = path

    @contextmanager
    def check(self, name: str) -> Iterator[dict[str, Any]]:
        """Run a block as a check: it passes unless it raises. The dict is kept beside it."""
        numbers: dict[str, Any] = {}
        began = time.monotonic()
        self.checks.append({"name": name, "status": FAIL, "detail": "died here"})
        self._write()
        status, detail = PASS, ""
        try:
            yield numbers
        except Skip as reason:
            status, detail = SKIPPED, str(reason)
        except Exception as error:
            status, detail = FAIL, describe(error)
        took = round(time.monotonic() - began, 3)
        self.checks[-1] = {"name": name, "status": status, "detail": detail, "s": took} | numbers
        self._write()

    def figure(self, name: str, value: Any) -> None:
        """Keep a measured value, which no check judges."""
        self.figures[name] = value
        self._write()

    def result(self) -> dict[str, Any]:
        """Status of the part, its checks and figures."""
        return {"status": status_of(self.checks), "checks": self.checks, "figures": self.figures}

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.result()))


def status_of(checks: list[dict[str, Any]]) -> str:
    """Failed if any check is, skipped if all are."""
    found = {check["status"] for check in checks}
    if FAIL in found:
        return FAIL
    return PASS if PASS in found else SKIPPED


def describe(error: BaseException) -> str:
    """Kind, first line and the last places of an error, in one line."""
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]} ({' < '.join(reversed(places[-4:]))})"


def assert_close(what: str, got: Tensor, wanted: Tensor, rtol: float, atol: float) -> float:
    """The largest difference, which must be within bounds.

    Raises:
        Differs: it is not, or shapes differ; with numbers.
    """
    got, wanted = got.detach().double().cpu(), wanted.detach().double().cpu()
    if got.shape != wanted.shape:
        raise Differs(f"{what} is {tuple(got.shape)}, wanted {tuple(wanted.shape)}")
    if not got.numel():
        return 0.0
    off = (got - wanted).abs()
    bad = ~(off <= atol + rtol * wanted.abs())  # also where a value is no number
    if bool(bad.any()):
        worst = int(torch.where(bad, off.nan_to_num(torch.inf), -1.0).argmax())
        raise Differs(
            f"{what}: {int(bad.sum())} of {got.numel()} values differ, the worst is "
            f"{float(got.view(-1)[worst])!r} and should be {float(wanted.view(-1)[worst])!r}"
        )
    return float(off.max())


def assert_equal(what: str, got: Tensor, wanted: Tensor) -> None:
    """Every bit must be the same.

    Raises:
        Differs: says how many are not.
    """
    if got.shape != wanted.shape or not torch.equal(got, wanted):
        same_shape = got.shape == wanted.shape
        off = int((got != wanted).sum()) if same_shape else max(got.numel(), wanted.numel())
        raise Differs(f"{what}: {off} of {wanted.numel()} values are not the same bit for bit")
