"""Which server gets which slices: balanced by bytes, and the same in every process."""

from __future__ import annotations

from collections.abc import Sequence


def place(sizes: Sequence[int], units: Sequence[Sequence[int]], num_servers: int, seed: int) -> list[int]:
    """Give each unit to the server that holds the fewest bytes so far, biggest unit first.

    Args:
        sizes: Bytes of each item.
        units: Items, by index, that must stay together; each item is in one unit.
        seed: Rotates who is asked first, so that many tables of one key do not all land on server 0.

    Returns:
        The server of each item.
    """
    loads = [0] * num_servers
    placed = [0] * len(sizes)
    totals = [sum(sizes[i] for i in unit) for unit in units]
    for at in sorted(range(len(units)), key=lambda at: (-totals[at], at)):
        server = min(range(num_servers), key=lambda s: (loads[s], (s - seed) % num_servers))
        loads[server] += totals[at]
        for i in units[at]:
            placed[i] = server
    return placed
