"""Jagged containers with TorchRec's names and meaning, on torch and FBGEMM.

Importing this package checks that torch and fbgemm-gpu fit each other and loads FBGEMM's operators.
"""

from rayrec._compat import require_fbgemm

require_fbgemm()

from rayrec.sparse import pytrees  # noqa: E402, F401
from rayrec.sparse.jagged import JaggedTensor, JaggedTensors  # noqa: E402
from rayrec.sparse.key_index import UnknownKeyError  # noqa: E402
from rayrec.sparse.keyed_tensor import KeyedTensor  # noqa: E402
from rayrec.sparse.kjt import KeyedJaggedTensor  # noqa: E402
from rayrec.sparse.validate import check_ids, check_kjt, start_check_ids  # noqa: E402

__all__ = [
    "JaggedTensor",
    "JaggedTensors",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "UnknownKeyError",
    "check_ids",
    "check_kjt",
    "start_check_ids",
]
