"""`BinaryMetrics`: AUC, normalized entropy and more of click predictions, merged exactly.

The state is one vector of int64 counts, so states of ranks, batches or days merge by adding them,
in any order, to the same result bit for bit. AUC comes from two histograms of the logits, one per
label. Bins are cut in the bits of the float32 logit (sign, 32 octaves from 2**-24 to 2**8, 2**11
bins each): a bin is at most 2**-11 of its logit wide, alike on every device. Logits within a bin
count as ties (half right), so the AUC is off by at most half the share of (click, no click) pairs
that fall into one bin: `auc_error`, mostly below 1e-4. Log losses and probabilities are computed in
float64 and summed in units of 2**-24, off by at most 3e-8 per row. Costs about twenty element-wise
passes and 2 MiB of counts; nothing is copied to the host until `compute`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rayrec.errors import InputError, ShapeError

# logits below 2**-24 are zero, above 2**8 the outermost bin; 2**_FINE bins an octave
_LOW, _OCTAVES, _FINE = -24, 32, 11
_SIDE = _OCTAVES << _FINE  # bins of one sign
_BINS = 2 * _SIDE + 1
_UNIT = float(1 << 24)
_SUMS = 7  # rows, clicks, losses, predicted, right, bad logits, bad labels
STATE_SIZE = _SUMS + 2 * _BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class BinaryScores:
    """Quality of click predictions; nan where it is undefined (no rows, or one class only).

    Attributes:
        auc: probability that a click's logit is above a non-click's; ties count half.
        auc_error: bound on |auc - exact auc| from binning.
        logloss: mean binary cross entropy, nats.
        ne: normalized entropy, logloss / entropy of the base rate; 1 is what predicting the base
            rate gets.
        calibration: sum of predicted probabilities / number of clicks; 1 is calibrated.
        accuracy: share of rows on the right side of probability 1/2, which itself means a click.
        base_rate: share of clicks.
    """

    rows: int
    auc: float
    auc_error: float
    logloss: float
    ne: float
    calibration: float
    accuracy: float
    base_rate: float

    def to_dict(self) -> dict[str, float]:
        """The scores by name."""
        return asdict(self)

    @property
    def logloss_bits(self) -> float:
        """Mean binary cross entropy in bits, which is TorchRec's `logloss`."""
        return self.logloss / math.log(2)

    @property
    def cross_entropy_sum(self) -> float:
        """Binary cross entropy summed over the rows, nats; 0 without rows."""
        return self.logloss * self.rows if self.rows else 0.0

    @property
    def cross_entropy_sum_bits(self) -> float:
        """Binary cross entropy summed over the rows, bits, as in the state of TorchRec's NE."""
        return self.cross_entropy_sum / math.log(2)


class BinaryMetrics:
    """Accumulates logits and labels in {0, 1}; see the top of this file for what is exact."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._state = torch.zeros(STATE_SIZE, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (B,) any float type; computed in float32 for the bins, float64 for the sums. B
                may be 0.
            labels: (B,) 0 or 1, any type. Others, and NaN logits, are counted and reported by
                `compute`, without a host sync here.
        Raises:
            ShapeError: not vectors of the same length.
        """
        if logits.dim() != 1 or logits.shape != labels.shape:
            raise ShapeError(
                f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be vectors "
                "of the same length; squeeze them."
            )
        state = self._state
        logits, labels = logits.detach().to(state.device), labels.detach().to(state.device)
        clicks = labels == 1
        bad = logits.isnan()
        x = torch.where(bad, torch.zeros_like(logits), logits).double().clamp(-256.0, 256.0)
        y = clicks.double()
        loss = torch.nn.functional.softplus(-x) * y + torch.nn.functional.softplus(x) * (1 - y)
        right, bad_labels = (x >= 0) == clicks, ~clicks & (labels != 0)
        # whole numbers, in units of 2**-24 where they are none: they add up the same in any order
        losses, predicted = (loss * _UNIT).round(), (x.sigmoid() * _UNIT).round()
        sums = [torch.ones_like(clicks), clicks, losses, predicted, right, bad, bad_labels]
        state[:_SUMS] += torch.stack([s.long().sum() for s in sums])
        index = _SUMS + _bin(x.float()) + _BINS * clicks.long()
        state.scatter_add_(0, index, torch.ones_like(index))

    def state(self) -> Tensor:
        """(STATE_SIZE,) int64: all that was seen. States add."""
        return self._state.clone()

    def merge(self, state: Tensor) -> None:
        """Add what another accumulator saw.

        Raises:
            ShapeError: `state` is not the state of a `BinaryMetrics`.
        """
        if state.shape != self._state.shape or state.dtype != torch.int64:
            raise ShapeError(
                f"a state is ({STATE_SIZE},) int64, not {tuple(state.shape)} {state.dtype}; pass "
                "the result of state()."
            )
        self._state += state.to(self._state.device)

    @classmethod
    def from_state(cls, state: Tensor, device: torch.device | str = "cpu") -> BinaryMetrics:
        """An accumulator that saw what `state` says; for example the sum of all ranks' states."""
        metrics = cls(device)
        metrics.merge(state)
        return metrics

    @classmethod
    def over(cls, state: Tensor) -> BinaryMetrics:
        """An accumulator that reads and writes this very (STATE_SIZE,) int64 tensor."""
        metrics = cls.__new__(cls)
        metrics._state = state
        return metrics

    def reset(self) -> None:
        """Forget everything."""
        self._state.zero_()

    def compute(self) -> BinaryScores:
        """The scores of everything seen.

        Raises:
            InputError: NaN logits or labels other than 0 and 1 were seen.
        """
        state = self._state.cpu()
        rows, clicks, loss, predicted, right, bad_logits, bad_labels = state[:_SUMS].tolist()
        if bad_logits:
            raise InputError(
                f"{bad_logits} of {rows} logits are NaN: the model has diverged. Lower the "
                "learning rate or check its inputs."
            )
        if bad_labels:
            raise InputError(
                f"{bad_labels} of {rows} labels are neither 0 nor 1; click metrics need binary "
                "labels."
            )
        others = rows - clicks
        counts = state[_SUMS:].view(2, _BINS)
        negative, positive = counts[:, counts.any(0)].tolist()
        # Python integers, since pairs of a billion rows pass 2**63
        below = wins = ties = 0
        for n, p in zip(negative, positive, strict=True):
            wins += p * below
            ties += p * n
            below += n
        nan = math.nan
        pairs = clicks * others
        logloss = loss / _UNIT / rows if rows else nan
        rate = clicks / rows if rows else nan
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if pairs else nan
        return BinaryScores(
            rows=rows,
            auc=(2 * wins + ties) / (2 * pairs) if pairs else nan,
            auc_error=ties / (2 * pairs) if pairs else nan,
            logloss=logloss,
            ne=logloss / entropy if pairs else nan,
            calibration=predicted / _UNIT / clicks if clicks else nan,
            accuracy=right / rows if rows else nan,
            base_rate=rate,
        )


def _bin(x: Tensor) -> Tensor:
    """(B,) float32 without NaN -> (B,) int64 in [0, _BINS), in the same order; zero is _SIDE."""
    # exponent and the first _FINE bits of the mantissa number the bins of one sign
    bits = x.contiguous().view(torch.int32)
    magnitude = ((bits & 0x7FFFFFFF) >> (23 - _FINE)).long() - ((127 + _LOW) << _FINE) + 1
    magnitude.clamp_(0, _SIDE)
    return _SIDE + torch.where(bits < 0, -magnitude, magnitude)
