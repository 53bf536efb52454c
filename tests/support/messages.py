"""Messages as tests send and compare them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.protocol import messages as m


class Done(m.Done):
    """(table, round, version) of rounds that were applied; equal to a reply that says the same."""

    def __init__(self, *rounds: tuple[int, int, int]) -> None:
        super().__init__(m.matrix(rounds, 3))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, m.Done) and self.rounds.tolist() == other.rounds.tolist()

    __hash__ = None  # type: ignore[assignment]


def contribution(
    slices: Iterable[tuple[int, Any]],
    round_: int,
    table: int = -1,
    given: int = 0,
    generation: int = 0,
    flags: int = 0,
    **options: Any,
) -> m.Contribute:
    """Slices, as (slot, bytes); with a table, also the commit of its round, to which so many slices were given."""
    slices = [(slot, _tensor(given)) for slot, given in slices]
    pushes = [(slot, round_, generation, payload.nbytes) for slot, payload in slices]
    commits = [(table, round_, given, given * generation, -1, flags)] if table >= 0 else []
    payloads = tuple(payload for _, payload in slices)
    return m.Contribute(
        m.matrix(pushes, m.PUSH_WORDS), payloads, m.matrix(commits, m.COMMIT_WORDS), **options
    )


def _tensor(data: Any) -> Tensor:
    """A tensor, or the bytes of one."""
    if isinstance(data, Tensor):
        return data
    # Not frombuffer, which takes no empty buffer, and warns of one that cannot be written.
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
