"""Rows of float32 to packed bytes, with a bound on what rounding costs.

A packed INT8 or INT4 row is FBGEMM's: float16 scale, float16 bias, codes. The order of the steps
matters. The bias is rounded down to float16 and the scale up, and only then codes are computed,
against the rounded two. A packer that computes codes first spoils rows of small values, whose
float16 scale has few bits. A table whose values are so small that even the rounded scale would be
coarse is multiplied by a power of two before it is packed; the lookup divides by it again, and both
are exact. So the error of a value is at most 1.05 times half a step of a perfect scale, for tables
of 1e-13 as for tables of 1e4, of the rows that have a range of at least 2e-8 (INT4: 2e-9) of the
largest value of their table and an offset of at most 32 times their range. One power serves a whole
table, so the scale of a smaller row is coarse: its error is at most 1e-12 of that value more.

    # N rows of a chunk, D width of the table
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rayrec.errors import InputError
from rayrec.quant.types import QuantType

LARGEST = 65504.0  # the largest float16
_CHUNK_VALUES = 1 << 18  # packed at a time, so that intermediate results stay in the cache
# float16 numbers are whole multiples of 2**-24; a scale of 40 of them is within 2.5 percent
_COARSE_SCALE = 40 * 2.0**-24
_NORMAL = 2.0**-13
MAX_POWER = 60


class TableRange:
    """Range of a table's values, seen in one pass: it tells if rows can be packed, and the power.

    Args:
        table: its name, for messages.
        kind: the type to pack it as.
    Attributes:
        largest: size of any value seen.
        smallest: step of any row seen that is not 0; inf before.
    """

    def __init__(self, table: str, kind: QuantType) -> None:
        self._table, self._kind = table, kind
        self.largest, self.smallest = 0.0, math.inf

    def add(self, rows: Tensor, first_row: int) -> None:
        """Look at a chunk of rows.

        Args:
            rows: (N, D) of any float type.
            first_row: number of the first of them in the table.
        Raises:
            InputError: a value is not finite, or too large for the type; names table and row.
        """
        self.ranges(rows, range(first_row, first_row + len(rows)))

    def ranges(self, rows: Tensor, numbers: range | Tensor) -> tuple[Tensor, Tensor]:
        """Look at some rows as `add` does, and return for each what `include` takes.

        Args:
            numbers: (N,) numbers of the rows in the table.
        Returns:
            (N,) float32 sizes, and (N,) float32 steps.
        Raises:
            InputError: a row cannot be packed; see `add`.
        """
        if not rows.numel():
            return torch.empty(0), torch.empty(0)
        low, high = (bound.float() for bound in torch.aminmax(rows, dim=1))
        sizes = torch.maximum(low.abs(), high.abs())
        most = math.inf if self._kind is QuantType.FP32 else LARGEST
        # a NaN compares as false, so the good rows are asked for
        good = (sizes <= most) & sizes.isfinite()
        if not bool(good.all()):
            row = int((~good).nonzero()[0])
            raise self._refused(int(numbers[row]), rows[row])
        # Of a row far from zero the bias limits the precision, and not the scale.
        steps = torch.maximum(high - low, sizes / 64) if self._kind.top_code else sizes
        self.include(sizes, steps)
        return sizes, steps

    def include(self, sizes: Tensor, steps: Tensor) -> None:
        """Count rows of which `ranges` was taken before, or the extremes of other rows."""
        steps = steps[steps > 0]
        if sizes.numel():
            self.largest = max(self.largest, float(sizes.max()))
        if steps.numel():
            self.smallest = min(self.smallest, float(steps.min()))

    def power(self) -> int:
        """The power of two by which the rows seen are multiplied before they are packed."""
        if self._kind is QuantType.FP32 or math.isinf(self.smallest):
            return 0
        step = self.smallest / max(1, self._kind.top_code)
        if step >= (_COARSE_SCALE if self._kind.top_code else _NORMAL):
            return 0
        wanted = math.ceil(math.log2(_NORMAL / step))
        return max(0, min(wanted, math.floor(math.log2(LARGEST / self.largest)), MAX_POWER))

    def _refused(self, row: int, values: Tensor) -> InputError:
        where = f"row {row} of table {self._table!r}"
        broken = ~values.isfinite()
        if bool(broken.any()):
            value = float(values[broken][0])
            return InputError(
                f"{where} holds {value}: the model has diverged. Take an earlier checkpoint."
            )
        return InputError(
            f"{where} holds {float(values[values.abs().argmax()]):g}; {self._kind.name} rows hold "
            f"at most {LARGEST:g}. Take an earlier checkpoint, or fp32 for this table."
        )


def pack_rows(rows: Tensor, kind: QuantType, power: int = 0) -> Tensor:
    """Pack rows that `TableRange` has let through.

    Args:
        rows: (N, D) of any float type.
        power: the rows are multiplied by 2**power.
    Returns:
        (N, kind.row_bytes(D)) uint8.
    """
    count, width = rows.shape
    packed = torch.empty(count, kind.row_bytes(width), dtype=torch.uint8)
    at_a_time = max(1, _CHUNK_VALUES // width)
    for start in range(0, count, at_a_time):
        chunk = rows[start : start + at_a_time].float()
        if power:
            chunk = chunk * 2.0**power
        out = packed[start : start + at_a_time]
        if not kind.top_code:
            chunk = chunk.half() if kind is QuantType.FP16 else chunk
            out.copy_(chunk.contiguous().view(torch.uint8))
        else:
            _pack_codes(chunk, kind, out)
    return packed


def _pack_codes(rows: Tensor, kind: QuantType, out: Tensor) -> None:
    low, high = torch.aminmax(rows, dim=1, keepdim=True)
    bias = low.half()
    bias = torch.where(bias.float() > low, _next(bias, -math.inf), bias)
    # in float64, so that the comparisons below are those of the exact numbers
    high, exact_bias = high.double(), bias.double()
    scale = ((high - exact_bias) / kind.top_code).half()
    short = scale.double() * kind.top_code + exact_bias < high
    scale = torch.where(short, _next(scale, math.inf), scale)
    # a row of one value that float16 holds: any scale does, but not zero
    scale = torch.where(scale == 0, _next(scale, math.inf), scale)
    codes = rows.sub(bias.float()).div_(scale.float()).round_().to(torch.uint8)
    if kind is QuantType.INT4:
        if codes.shape[1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    out[:, :2], out[:, 2:4], out[:, 4:] = scale.view(torch.uint8), bias.view(torch.uint8), codes


def _next(values: Tensor, towards: float) -> Tensor:
    return torch.nextafter(values, torch.tensor(towards, dtype=torch.half))


def unpack_rows(packed: Tensor, kind: QuantType, width: int, power: int = 0) -> Tensor:
    """The values that packed rows stand for.

    Args:
        packed: (N, kind.row_bytes(width)) uint8.
    Returns:
        (N, width) float32.
    """
    if not kind.top_code:
        return _floats(packed, torch.half if kind is QuantType.FP16 else torch.float32, power)
    codes = packed[:, 4:]
    if kind is QuantType.INT4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, :width]
    scale = _floats(packed[:, :2], torch.half)
    bias = _floats(packed[:, 2:4], torch.half)
    return (codes.float() * scale + bias) * 2.0**-power


def _floats(data: Tensor, dtype: torch.dtype, power: int = 0) -> Tensor:
    # a copy, since a view as wider numbers needs an even place in memory
    return data.clone(memory_format=torch.contiguous_format).view(dtype).float() * 2.0**-power
