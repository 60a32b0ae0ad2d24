"""Wire codecs: what pooled rows and their gradients look like between ranks.

float16 and bfloat16 halve the bytes; int8 sends blocks of 128 values as bytes with a float32 scale
and offset each (3.76x fewer bytes), by FBGEMM's row-wise quantization. Forward and backward are set
apart, in TorchRec's terms (`QCommsConfig`). Sums and updates stay in float32 on either side. Rows
of sequences take the same codec; ids, lengths and dense gradients are never coded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rayrec.comm.exchange import Exchange
from rayrec.spec.wire import BLOCK, EXTRA, CommType, QCommsConfig

# CommType and QCommsConfig are known from here
__all__ = [
    "CastCodec",
    "Codec",
    "Codecs",
    "CommType",
    "Int8Codec",
    "QCommsConfig",
    "Sections",
    "coded_all_to_all",
]


class Codec(Protocol):
    """Coding of float32 values for the wire, and back."""

    def size(self, values: int) -> int:
        """Elements on the wire for a message of `values` float32 values."""
        ...

    def encode(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the flat wire tensor of (sum of sizes,) float32 values, message by message."""
        ...

    def decode(self, wire: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return (sum of sizes,) float32 values from what `encode` has made of them."""
        ...


@dataclass(frozen=True)
class CastCodec:
    """Cast to another floating point type."""

    dtype: torch.dtype

    def size(self, values: int) -> int:
        """Return `values`: a cast keeps the number of elements."""
        return values

    def encode(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Cast float32 values to the type on the wire."""
        return values.to(self.dtype)

    def decode(self, wire: Tensor, sizes: Sequence[int]) -> Tensor:
        """Cast what arrived back to float32."""
        return wire.float()


class Int8Codec:
    """Blocks of 128 values with a scale and an offset each; a message's last block is padded."""

    def size(self, values: int) -> int:
        """Return the bytes of as many blocks as `values` fill, the last one padded."""
        return -(-values // BLOCK) * (BLOCK + EXTRA)

    def encode(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Quantize each message to uint8, block by block."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        # A block never spans two sections, so a section has the same bytes for every receiver.
        padded = [
            functional.pad(part, (0, -part.numel() % BLOCK)) for part in values.split(list(sizes))
        ]
        blocks = torch.cat(padded).view(-1, BLOCK)
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(blocks).reshape(-1)

    def decode(self, wire: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the float32 values of quantized messages, without their padding."""
        if not wire.numel():
            return wire.new_empty(0, dtype=torch.float32)
        values = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(
            wire.view(-1, BLOCK + EXTRA)
        ).reshape(-1)
        whole = [-(-size // BLOCK) * BLOCK for size in sizes]
        return torch.cat(
            [part[:size] for part, size in zip(values.split(whole), sizes, strict=True)]
        )


_CODECS: dict[CommType, Codec | None] = {
    CommType.FP32: None,
    CommType.FP16: CastCodec(torch.float16),
    CommType.BF16: CastCodec(torch.bfloat16),
    CommType.INT8: Int8Codec(),
}


@dataclass(frozen=True)
class Codecs:
    """The codec of each direction; None sends float32 as it is."""

    forward: Codec | None = None
    backward: Codec | None = None

    @staticmethod
    def from_config(config: QCommsConfig | None) -> Codecs:
        """Return the codecs that the user's config names."""
        if config is None:
            return Codecs()
        return Codecs(_CODECS[config.forward_precision], _CODECS[config.backward_precision])


Sections = Sequence[Sequence[int]]


def coded_all_to_all(
    exchange: Exchange,
    codec: Codec | None,
    send: Tensor,
    send_sections: Sections,
    recv_sections: Sections,
) -> list[Tensor]:
    """Do as `Exchange.views` with float32 values, coded on the wire, and wait for them.

    A world of one rank codes nothing.

    Args:
        send_sections, recv_sections: per rank, the sizes of the sections of its message; each is
            coded by itself.
    """
    # elements per rank before the codec, and with it
    plain_out = [sum(sections) for sections in send_sections]
    plain_in = [sum(sections) for sections in recv_sections]
    if codec is None or exchange.world_size == 1:
        return exchange.views(send, plain_out, plain_in).wait()
    wire = codec.encode(send, list(chain.from_iterable(send_sections)))
    out = [sum(map(codec.size, sections)) for sections in send_sections]
    into = [sum(map(codec.size, sections)) for sections in recv_sections]
    received = exchange.all_to_all(wire, out, into).wait()
    values = codec.decode(received, list(chain.from_iterable(recv_sections)))
    return list(values.split(plain_in))
