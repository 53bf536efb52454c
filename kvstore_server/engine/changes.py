"""What has changed of a namespace since its last image; see `image`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvstore_server.memo import BoundedCache
from kvstore_server.optimizer.state import Entries

_MAX_BASES = 1024
"""Sets of tables whose rounds end together; more are forgotten and begin again with an image."""


@dataclass
class ImageChanges:
    """What the next image of a namespace contains.

    Args:
        mark: Called with every change, so that an image is made before the next answer.
    """

    mark: Callable[[], object]
    segments: BoundedCache[Any]
    """Where tables are whose rounds end together; see `image`."""
    tables: set[int] = field(default_factory=set)
    """Tables that ended a round, or changed in another way."""
    hypers: set[int] = field(default_factory=set)
    """Tables for which a rank sent hyper-parameters."""
    clients: set[tuple[int, int]] = field(default_factory=set)
    """(table, rank) with a new `client_state`."""
    sessions: set[int] = field(default_factory=set)
    """Tokens of sessions that were opened or ended."""
    has_members: bool = True
    has_optimizer: bool = True
    is_new: bool = True
    """No image says yet that there is this namespace."""
    num_declared: int = 0
    """Tables whose declaration is in an image."""
    num_barriers: int = 0
    """Barriers whose outcome is in an image, as far as it is kept."""
    entries: dict[int, list[Entries]] = field(default_factory=dict)
    """Block → the entries of its segments in the images so far."""
    tensors: list[dict[str, Tensor]] = field(default_factory=list)
    """For each block, its flat state in the images so far."""
    steps: dict[int, int] = field(default_factory=dict)
    """Table → the version after the last encoded change of weights in an image."""

    bases: dict[tuple[int, ...], Any] = field(default_factory=dict)
    """Tables → the image from which increments of their numbers count; see `increments`."""
    last_base: int = 0

    def keep_base(self, tables: tuple[int, ...], base: Any) -> None:
        if len(self.bases) >= _MAX_BASES:
            self.bases.clear()
        self.bases[tables] = base

    def note_tables(self, numbers: Iterable[int]) -> None:
        self.tables.update(numbers)
        self.mark()

    def note_hypers(self, numbers: Iterable[int]) -> None:
        self.hypers.update(numbers)
        self.mark()

    def note_client(self, table: int, rank: int) -> None:
        # Logged with the next change, such as the end of the round: until then the commit that brought it is not
        # logged either, and both come again.
        self.clients.add((table, rank))

    def note_session(self, token: int) -> None:
        self.sessions.add(token)
        self.note_members()

    def note_members(self) -> None:
        self.has_members = True
        self.mark()

    def note_optimizer(self) -> None:
        self.has_optimizer = True
        self.mark()

    def note_all(self, space: Any) -> None:
        """Let the next image be a whole one."""
        every = range(len(space.tables))
        self.tables, self.hypers = set(every), set(every)
        self.clients = set(space.client_states)
        self.has_members = self.has_optimizer = self.is_new = True
        self.num_declared = self.num_barriers = 0
        self.entries, self.tensors, self.steps, self.bases = {}, [], {}, {}

    def clear(self) -> None:
        for some in (self.tables, self.hypers, self.clients, self.sessions):
            some.clear()
        self.has_members = self.has_optimizer = self.is_new = False
