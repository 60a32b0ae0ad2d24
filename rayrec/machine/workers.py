"""What the kernel of a machine tells of a Ray worker on it: that it is one, and that it is stopped.

A process that is stopped (SIGSTOP) and one that is busy both give no answer. The kernel knows which
is which at once, and without a timeout. Standard library only, since Ray runs `is_stopped` on nodes
in processes without torch.
"""

from __future__ import annotations

from pathlib import Path


def is_ray_worker(pid: int) -> bool:
    """Return True if a process of this machine is a Ray worker."""
    try:
        return b"RAY_RAYLET_PID=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Return True if a process of this machine is a Ray worker, and stopped."""
    try:
        # the name, in parentheses, may hold anything
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state == "T" and is_ray_worker(pid)
