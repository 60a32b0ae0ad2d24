"""The jagged containers as pytrees of torch, which takes them apart and joins them again.

Keys, strides and which tensors there are stay on the host, so that a compiled or copied container
knows what the original knew.
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import register_pytree_node

from rayrec.sparse.jagged import JaggedTensor, JaggedTensors
from rayrec.sparse.keyed_tensor import KeyedTensor
from rayrec.sparse.kjt import KeyedJaggedTensor


def _flatten_jagged(jt: JaggedTensor) -> tuple[list[Any], tuple[bool, ...]]:
    tensors = jt._tensors()
    return [t for t in tensors if t is not None], tuple(t is not None for t in tensors)


def _unflatten_jagged(leaves: Any, present: Any) -> JaggedTensor:
    leaf = iter(leaves)
    return JaggedTensor(*(next(leaf) if has else None for has in present))  # type: ignore[arg-type]


def _flatten_dict(tensors: JaggedTensors) -> tuple[list[Any], list[str]]:
    return list(tensors.values()), list(tensors)


def _unflatten_dict(values: Any, names: Any) -> JaggedTensors:
    return JaggedTensors(zip(names, values, strict=True))


def _flatten_keyed(kt: KeyedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    return [kt._values], (kt._keys, kt._length_per_key, kt._key_dim)


def _unflatten_keyed(leaves: Any, context: Any) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor(context[0], context[1], values, context[2])


def _flatten_kjt(kjt: KeyedJaggedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    tensors = kjt._tensors()
    ranks = kjt._stride_per_key_per_rank
    inverse_keys = kjt._inverse_indices[0] if kjt._inverse_indices else None
    present = tuple(t is not None for t in tensors)
    leaves = [t for t in tensors if t is not None]
    return leaves, (kjt._keys, kjt.stride(), ranks, inverse_keys, present, kjt.time)


def _unflatten_kjt(leaves: Any, context: Any) -> KeyedJaggedTensor:
    keys, stride, ranks, inverse_keys, present, time = context
    leaf = iter(leaves)
    values: Any
    values, weights, lengths, offsets, inverse = (next(leaf) if has else None for has in present)
    pair = None if inverse is None else (inverse_keys, inverse)
    parts = (keys, values, weights, lengths, offsets, stride, ranks)
    return KeyedJaggedTensor(*parts, inverse_indices=pair, time=time)


for kind, flatten, unflatten in (
    (JaggedTensor, _flatten_jagged, _unflatten_jagged),
    (JaggedTensors, _flatten_dict, _unflatten_dict),
    (KeyedTensor, _flatten_keyed, _unflatten_keyed),
    (KeyedJaggedTensor, _flatten_kjt, _unflatten_kjt),
):
    name = f"rayrec.sparse.{kind.__name__}"
    register_pytree_node(kind, flatten, unflatten, serialized_type_name=name)
