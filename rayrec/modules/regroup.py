"""`KTRegroupAsDict`: `KeyedTensor.regroup_as_dict` as a module, whose groups are part of the model.

There is nothing to cache: a regroup is planned in a few microseconds, and cuts its inputs by views.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rayrec.errors import ShapeError
from rayrec.layout.tables import DataType
from rayrec.modules.names import DTYPES
from rayrec.sparse import KeyedTensor


class KTRegroupAsDict(nn.Module):
    """Regroup keyed tensors into one tensor per name.

    Args:
        groups: keys of each group; a key may serve several groups.
        emb_dtype: the type of the results; that of the inputs when None.
        multi_device: taken as TorchRec's, whose buffers it moves; there are none here.
    Raises:
        ShapeError: the numbers of groups and names differ.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ShapeError(
                f"KTRegroupAsDict got {len(groups)} groups and {len(keys)} keys; it needs one key "
                "per group."
            )
        self._groups, self._keys = [list(group) for group in groups], list(keys)
        self._dtype = None if emb_dtype is None else DTYPES[emb_dtype]

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """name -> (B, sum of the group's widths).

        Raises:
            UnknownKeyError: no tensor has a key of a group.
            InputError: there are no tensors.
        """
        groups = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._keys)
        if self._dtype is None:
            return groups
        return {name: tensor.to(self._dtype) for name, tensor in groups.items()}
