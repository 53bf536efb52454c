"""How much memory this process may use at most."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Bytes of the machine's memory, or of the container's share of it if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # not in a container, or one without a limit: "max"
        return total
