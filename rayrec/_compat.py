"""One check, at the first import of `rayrec.sparse`, that torch and fbgemm-gpu fit each other.

FBGEMM's operators are compiled against one minor version of torch; a wrong pair fails later with an
undefined symbol or a missing operator. The check reads the installed distributions, loads the
operators once (about a second, the load that any user of them pays) and says which command mends a
wrong pair. The pairs below are those that the tests ran on.
"""

from __future__ import annotations

import importlib
from importlib import metadata

from rayrec.errors import VersionError

# torch minor version -> fbgemm-gpu minor version: the pair that is pinned, and then one that is let
# through, for machines whose torch is given (docs/gpu.md)
PAIRS = {"2.13": "1.8", "2.11": "1.6"}
_DISTRIBUTIONS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
_REMEDY = (
    "Install a fitting pair: `pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0`, or the extra "
    "rayrec[cpu] (rayrec[cuda] on GPUs)."
)
_OPS = ("asynchronous_complete_cumsum", "permute_2D_sparse_data", "jagged_to_padded_dense")


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def installed_fbgemm() -> tuple[str, str] | None:
    """(distribution, version) of the installed fbgemm-gpu, or None."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_pair(torch_version: str, fbgemm: tuple[str, str] | None) -> None:
    """Raise when the versions do not fit.

    Args:
        torch_version: text of `torch.__version__`, for example "2.13.0+cpu".
        fbgemm: (distribution, version), or None when neither distribution is installed.
    Raises:
        VersionError: names the versions found and the install command.
    """
    if fbgemm is None:
        raise VersionError(
            f"torch {torch_version} is here, but neither {' nor '.join(_DISTRIBUTIONS)}. {_REMEDY}"
        )
    name, version = fbgemm
    wanted = PAIRS.get(_minor(torch_version))
    if wanted is None:
        raise VersionError(
            f"torch {torch_version} is not supported; supported are {', '.join(PAIRS)}. {_REMEDY}"
        )
    if _minor(version) != wanted:
        raise VersionError(
            f"torch {torch_version} needs {name} {wanted}.x, found {version}. {_REMEDY}"
        )


def require_fbgemm() -> None:
    """Check the versions and load FBGEMM's operators into `torch.ops.fbgemm`.

    Raises:
        VersionError: the pair does not fit, or the operators do not load.
    """
    import torch

    fbgemm = installed_fbgemm()
    check_pair(torch.__version__, fbgemm)
    try:
        importlib.import_module("fbgemm_gpu")
        for op in _OPS:
            getattr(torch.ops.fbgemm, op)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise VersionError(
            f"torch {torch.__version__} and {fbgemm} are installed, but FBGEMM does not load: "
            f"{error}. {_REMEDY}"
        ) from error
