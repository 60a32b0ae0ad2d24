"""Dropout whose mask follows from the data's place in the run, not from the rank that holds it.

torch draws a mask from the generator of a process, so a run on two ranks drops other elements than
a run on one. Here an element is dropped by a hash of the seed, the step, the number of its row in
the global batch, its position in the sequence, its column and the layer. So N ranks equal one, and
a restored run equals the one that went on.

DEFINITION. h(x) is splitmix64's output function modulo 2**64. The key of a row is
h(h(h(seed) ^ step) ^ row), that of a value h(key ^ position). Word w of a value in layer s is
h(key + (2**32 s + w) * 0x9E3779B97F4A7C15); it decides columns 4w to 4w + 3 by 16 bits each, lowest
first. A column is dropped where its bits, as a number from -2**15, are below n - 2**15, where n is
round(p * 2**16), and 2**16 - 1 at most. Cost: eight operations per four columns, and two per
column; a third of what torch's own dropout costs on CPU.

    # B sequences, T values of all of them, D columns, W words of a value
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rayrec.errors import ConfigError
from rayrec.modules.jagged_rows import JaggedOffsets

_GOLDEN = 0x9E3779B97F4A7C15


def _signed(number: int) -> int:
    """The number whose 64 bits, read with a sign, are those of `number`."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 with its sign; the mask makes the new bits zeros
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """splitmix64's output function of each element; int64 in and out."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def row_keys(
    seed: int, step: int, first_row: int, rows: int, device: torch.device | str | None = None
) -> Tensor:
    """Return the keys of a rank's rows of a step.

    Args:
        seed: of the run; the same on all ranks.
        step: number of the global batch.
        first_row: number of the first of these rows in the global batch.
        rows: B.
    Returns:
        (B,) int64.
    """
    # made on the CPU: two numbers are hashed, and no device waits for them
    of_step = mix(mix(torch.tensor([_signed(seed)])) ^ _signed(step))
    numbers = torch.arange(first_row, first_row + rows, device=device)
    return mix(numbers ^ of_step.to(numbers.device, non_blocking=True))


def value_keys(rows: Tensor, sequences: JaggedOffsets) -> Tensor:
    """(B,) keys of the rows -> (T,) keys of their values."""
    return mix(rows.index_select(0, sequences.row) ^ sequences.positions)


class JaggedDropout(nn.Module):
    """Dropout of (T, D) values by their keys.

    Args:
        p: the share to drop, from 0 to below 1; rounded to 1 / 65536, but not to 1.
        layer: a number that no other dropout of the model has, so that their masks differ.
    Raises:
        ConfigError: p is out of range.
    """

    def __init__(self, p: float, layer: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ConfigError(f"JaggedDropout(p={p}): p must be at least 0 and below 1.")
        self.p, self.layer = p, layer

    def forward(self, values: Tensor, keys: Tensor | None = None) -> Tensor:
        """Drop columns and scale the others up, in training; else return the values.

        Args:
            values: (T, D).
            keys: (T,) int64 of `value_keys`. Without them torch's generator draws the mask, and
                ranks together do not drop what one rank would.
        """
        if not self.training or not self.p:
            return values
        if keys is None:
            return functional.dropout(values, self.p)
        return values * self.mask(keys, values.shape[1]).to(values.dtype)

    def mask(self, keys: Tensor, columns: int) -> Tensor:
        """(T, columns) float32: 0 for what is dropped, and what scales the mean to 1 elsewhere."""
        words = torch.arange(-(-columns // 4), device=keys.device) + (self.layer << 32)
        bits = mix(keys.unsqueeze(1) + words * _signed(_GOLDEN)).view(torch.int16)[:, :columns]
        # some must be left, or there is nothing to scale up
        dropped = min(round(self.p * (1 << 16)), (1 << 16) - 1)
        return (bits >= dropped - (1 << 15)) * (1 / (1 - dropped / (1 << 16)))

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"
