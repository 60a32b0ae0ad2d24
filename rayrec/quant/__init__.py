"""Quantized tables: packed rows of FP32, FP16, INT8 or INT4, and collections that look them up."""

from rayrec.layout.words import foreign_names
from rayrec.quant.bags import mark_checked
from rayrec.quant.collections import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from rayrec.quant.packing import TableRange, pack_rows, unpack_rows
from rayrec.quant.quantize import (
    Packed,
    Reference,
    configs_of,
    exchanged,
    quantize,
    reference_collections,
)
from rayrec.quant.tables import PackedTable, PackedTables, pack_tables
from rayrec.quant.types import QuantType, types_of

__all__ = [
    "Packed",
    "PackedTable",
    "PackedTables",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantType",
    "Reference",
    "TableRange",
    "configs_of",
    "exchanged",
    "mark_checked",
    "pack_rows",
    "pack_tables",
    "quantize",
    "reference_collections",
    "types_of",
    "unpack_rows",
]

__getattr__ = foreign_names(__name__)
