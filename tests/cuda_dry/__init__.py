"""Dry runs of the CUDA path on a machine without a GPU: `make test-cuda-dry`.

Nothing pretends in Python to be on a GPU. torch's and FBGEMM's own CUDA code runs, with its
allocator, streams, events, pinned memory and checks of arguments, over a stand-in for the CUDA
runtime (`native/`) whose device memory is host memory. Kernels cannot run, so operators that launch
one compute on the CPU in the same memory (`device`, `fbgemm_ops`). What has no such computation
fails at its launch.

Finds: tensors on the wrong device, hidden host syncs, branches for the CPU that a GPU takes, wrong
arguments of FBGEMM's operators, streams that do not wait for each other. Does not find: what real
kernels compute, NCCL, speed.
"""

from __future__ import annotations

_installed = False


def install() -> None:
    """Make this process compute on the stand-in device.

    The process must have been started by `python -m tests.cuda_dry`.
    """
    global _installed
    if _installed:
        return
    _installed = True
    # operators must be known before their kernels are replaced
    import fbgemm_gpu  # noqa: F401

    import rayrec.distributed.kernels.lookup  # noqa: F401
    from tests.cuda_dry import device, fbgemm_ops

    device.install()
    fbgemm_ops.install()
