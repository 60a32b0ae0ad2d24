"""Checks of a batch before it reaches the kernels, which would read out of bounds instead.

`check_kjt` asks whether a KeyedJaggedTensor is coherent, `check_ids` whether every id lies in its
table. Both are one vectorised pass with one host sync when all is well; the key, row and value to
blame are searched only after a failure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rayrec.errors import InputError, ShapeError
from rayrec.layout.tables import UNBOUNDED
from rayrec.sparse.kjt import KeyedJaggedTensor
from rayrec.sparse.ops import to_device


def check_kjt(kjt: KeyedJaggedTensor, source: str = "") -> None:
    """Check that keys are unique, and that lengths, offsets, values, weights and strides agree.

    Raises:
        ShapeError: sizes disagree; names both.
        InputError: a key occurs twice, a length is negative, or an inverse index points at no bag.
    """
    where = f" in {source}" if source else ""
    if len(kjt.index_per_key()) != len(kjt.keys()):
        twice = next(key for i, key in enumerate(kjt.keys()) if kjt.index_per_key()[key] != i)
        raise InputError(
            f"key {twice!r} occurs {kjt.keys().count(twice)} times{where}; a lookup would read "
            "the last one alone."
        )
    ranks = kjt.stride_per_key_per_rank()
    if kjt.variable_stride_per_key() and len(ranks) != len(kjt.keys()):
        raise ShapeError(
            f"stride_per_key_per_rank has {len(ranks)} rows for {len(kjt.keys())} keys{where}."
        )
    bags, ids = sum(kjt.stride_per_key()), kjt.values().shape[0]
    lengths, offsets = kjt.lengths().reshape(-1), kjt.offsets()
    if lengths.numel() != bags or offsets.numel() != bags + 1:
        raise ShapeError(
            f"{lengths.numel()} lengths and {offsets.numel()} offsets for {bags} bags of "
            f"{len(kjt.keys())} keys{where}; give one length per bag of every key."
        )
    weights = kjt.weights_or_none()
    if weights is not None and weights.shape[0] != ids:
        raise ShapeError(f"{weights.shape[0]} weights for {ids} ids{where}.")
    # offsets that wrap around are negative somewhere
    agree = ((torch.diff(offsets) == lengths) & (offsets[1:] >= 0)).all()
    # one host sync for all four answers
    answers = [(lengths >= 0).all(), agree, offsets[0] == 0, offsets[-1] == ids]
    coherent = torch.stack(answers).tolist()
    if not coherent[0]:
        bag = int((lengths < 0).nonzero()[0])
        key, row = _key_and_row(kjt, bag)
        raise InputError(
            f"length {int(lengths[bag])} of key {key!r}, row {row}{where} is negative."
        )
    if not all(coherent[1:]):
        raise ShapeError(
            f"{ids} ids, but the lengths sum to {int(lengths.sum())} and the offsets go from "
            f"{int(offsets[0])} to {int(offsets[-1])}{where}."
        )
    _check_inverse(kjt, where)


def _check_inverse(kjt: KeyedJaggedTensor, where: str) -> None:
    inverse = kjt.inverse_indices_or_none()
    if inverse is None:
        return
    names, rows = inverse
    missing = set(kjt.keys()) - set(names)
    if missing or rows.dim() != 2 or rows.shape[0] != len(names):
        raise ShapeError(
            f"inverse indices of shape {tuple(rows.shape)} for keys {names}{where}; need one row "
            f"for each of {kjt.keys()}."
        )
    stride_of = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
    bags = [stride_of.get(name, rows.shape[1]) for name in names]
    limits = torch.tensor(bags, device=rows.device)[:, None]
    bad = (rows < 0) | (rows >= limits)
    if bool(bad.any()):
        f, b = (int(x) for x in bad.nonzero()[0])
        raise InputError(
            f"inverse index {int(rows[f, b])} of key {names[f]!r}, row {b}{where} is not in [0, "
            f"{int(limits[f])})."
        )


_Extremes = tuple[list[int], list[int]]  # smallest and largest ids, key by key
_HIGHEST_BIT = -(2**63)


def check_ids(kjt: KeyedJaggedTensor, limits: Mapping[str, int], source: str = "") -> None:
    """Check that ids lie in [0, limit) of their key.

    Args:
        kjt: the batch; keys without a limit are not checked.
        limits: rows of the table (the smallest, when several) that a key looks up; 2**64 - 1 for
            ids of all 64 bits but -1.
        source: origin of the batch (file, step), for messages.
    Raises:
        InputError: names key, row (bag), value and the number of bad ids of that key.
        ShapeError: the ids have more than one dimension, or the lengths do not sum to their number.
    Cost: one pass over the ids; one host sync. On a GPU a second pass where an id is -1.
    """
    start_check_ids(kjt, limits, source)()


def start_check_ids(
    kjt: KeyedJaggedTensor, limits: Mapping[str, int], source: str = ""
) -> Callable[[], None]:
    """Check ids in two parts: they are read now, and the returned call judges them.

    It waits for the current stream unless somebody has done so since. On CPU all is done now.

    Raises:
        InputError: from the call, or now on CPU; see `check_ids`.
    """
    # torch makes floats of an empty list
    if kjt.values().is_floating_point() and kjt.values().numel():
        raise InputError(
            f"ids{f' in {source}' if source else ''} are {kjt.values().dtype}; they must be "
            "integers."
        )
    if kjt.values().dim() != 1:
        raise ShapeError(
            f"ids{f' in {source}' if source else ''} have shape {tuple(kjt.values().shape)}; give "
            "one dimension, with values.reshape(-1)."
        )
    if kjt.device().type == "cpu":
        _judge_extremes(kjt, limits, source)
        return lambda: None
    all_in = _start_comparing(kjt, limits)

    def finish() -> None:
        if not all_in():
            _judge_extremes(kjt, limits, source)

    return finish


def _judge_extremes(kjt: KeyedJaggedTensor, limits: Mapping[str, int], source: str) -> None:
    """Compare the smallest and the largest id of each key with its limit."""
    present = [index for index, size in enumerate(kjt.length_per_key()) if size]
    for index, low, high in zip(present, *_extremes(kjt, present), strict=True):
        limit = limits.get(kjt.keys()[index])
        if limit == UNBOUNDED and low < 0:
            # one pass more over the ids of a key that has negative ones
            span = kjt.offset_per_key()[index : index + 2]
            low = -1 if bool((kjt.values()[span[0] : span[1]] == -1).any()) else 0
        if limit is not None and (low < 0 or high >= limit):
            _blame(kjt, index, limit, source)


def _extremes(kjt: KeyedJaggedTensor, present: Sequence[int]) -> _Extremes:
    """Return the smallest and the largest id of the keys that have any."""
    if not present:
        return [], []
    firsts = [kjt.offset_per_key()[index] for index in present]
    # numpy takes all keys in one call
    values = kjt.values().detach().cpu().numpy()
    lows, highs = np.minimum.reduceat(values, firsts), np.maximum.reduceat(values, firsts)
    return lows.tolist(), highs.tolist()


def any_beyond(kjt: KeyedJaggedTensor, limits: Mapping[str, int]) -> Tensor:
    """Return whether any id is out of its range, on the device of the ids, shape ().

    It takes as many launches for many keys as for one. -1 counts as out of range also where its key
    has no limit.

    Raises:
        ShapeError: the lengths do not sum to the number of ids.
    """
    ids, keys, lengths = kjt.values(), kjt.keys(), kjt.length_per_key()
    # as unsigned numbers negative ids are beyond every limit, and -1 is the largest; torch compares
    # signed ones, which have the same order once the highest bit of each is turned over
    numbers = tuple(limits.get(key, UNBOUNDED) + _HIGHEST_BIT for key in keys)
    bounds = _on_device(numbers, ids.device)
    ordered = ids.long().bitwise_xor(_HIGHEST_BIT)
    if len(set(lengths)) == 1:
        return (ordered.view(len(keys), lengths[0]) >= bounds.unsqueeze(1)).any()
    sizes = to_device(lengths, ids.device)
    return (ordered >= bounds.repeat_interleave(sizes, output_size=ids.numel())).any()


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    # the one copy waits for the device, so that any stream may read it later
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _start_comparing(kjt: KeyedJaggedTensor, limits: Mapping[str, int]) -> Callable[[], bool]:
    """Start `any_beyond` on a GPU; the returned call tells whether no id is out of range."""
    # the copy runs on its own into page-locked memory; `read` waits for it when it is asked
    answer = torch.empty((), dtype=torch.bool, pin_memory=True)
    answer.copy_(any_beyond(kjt, limits), non_blocking=True)
    copied = torch.cuda.current_stream(kjt.device()).record_event()

    def read() -> bool:
        if not copied.query():
            copied.synchronize()
        return not bool(answer)

    return read


def _blame(kjt: KeyedJaggedTensor, index: int, limit: int, source: str) -> None:
    start, stop = kjt.offset_per_key()[index : index + 2]
    ids = kjt.values()[start:stop]
    outside = ids == -1 if limit == UNBOUNDED else (ids < 0) | (ids >= limit)
    bad = outside.nonzero().reshape(-1)
    position = torch.tensor([start + int(bad[0])], device=ids.device, dtype=kjt.offsets().dtype)
    key, row = _key_and_row(kjt, int(torch.searchsorted(kjt.offsets(), position, right=True)) - 1)
    value = int(ids[bad[0]])
    remedy = "enlarge the table or map the ids"
    if value < 0:
        remedy = "negative ids have no row; map missing values to an empty bag"
    where = f" in {source}" if source else ""
    if limit == UNBOUNDED:
        raise InputError(
            f"id -1 of key {key!r}, row {row}{where} is no id of a dynamic table; it occurs "
            f"{bad.numel()} times. Map missing values to an empty bag."
        )
    raise InputError(
        f"id {value} of key {key!r}, row {row}{where} is not in [0, "
        f"{limit}), the rows of its table; {bad.numel()} of {ids.numel()} ids of this key are out "
        f"of range. Try: {remedy}."
    )


def _key_and_row(kjt: KeyedJaggedTensor, bag: int) -> tuple[str, int]:
    """Key and row of a bag's index among all bags."""
    index = bisect_right(kjt.lengths_offset_per_key(), bag) - 1
    return kjt.keys()[index], bag - kjt.lengths_offset_per_key()[index]
