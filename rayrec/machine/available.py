"""Memory that a process may still use."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int:
    """Return how much memory this process may still use: of the machine, and of its container.

    Memory of files that the kernel drops when it has to counts as available. 0 where nobody says.
    """
    machine = _lines_of(Path("/proc/meminfo")).get("MemAvailable:", 0) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
    # no limit ("max"), or no container
    except (OSError, ValueError):
        return machine
    dropped = _lines_of(group / "memory.stat").get("inactive_file", 0)
    return min(machine, max(0, limit - used + dropped))


def _lines_of(file: Path) -> dict[str, int]:
    """The first two words of each line."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:  # not Linux
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}
