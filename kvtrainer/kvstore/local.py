"""The store of one process: the servers' engine, called in place of a server."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ClassVar

from torch import Tensor

from kvtrainer.comm.loopback import LocalEngine
from kvtrainer.kvstore.base import BUILT_IN, LOCAL_NAMES, Key, register
from kvtrainer.kvstore.verbs import TableKVStore


@register(*LOCAL_NAMES)
class LocalKVStore(TableKVStore):
    """Keeps keys in this process; several replicas of a value are summed. Rank 0 of 1 worker.

    Sums and updates run on the CPU for every name, so results are the same bit for bit. A round is over, and its
    error raised, when `push` returns. Keys may also be integers, which no optimizer can update.
    """

    capabilities: ClassVar[Collection[str]] = BUILT_IN["local"]

    def __init__(self, type: str = "local") -> None:
        engine = LocalEngine()
        super().__init__(type, engine.client, engine)

    def set_updater(self, updater: Callable[[Key, Tensor, Tensor], object]) -> None:
        """Call `updater(key, merged, stored)` in place of an optimizer; it changes `stored` in place.

        An error that it raises is raised by the push (as OptimizerError) and leaves the values as they were. It must
        not call this store, which is busy with the push.
        """
        self._set_updater(updater)
