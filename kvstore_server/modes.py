"""When a contribution counts: the mode of a namespace, the same for all of its tables and ranks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_server.errors import ConfigurationError

SYNC, ASYNC, SSP = "sync", "async", "ssp"


@dataclass(frozen=True)
class Mode:
    """The mode of a namespace.

    Args:
        name: "sync": a round takes one contribution of every rank. "async": a contribution is applied when it comes.
            "ssp": as async, but nobody reads weights that miss more than `staleness` contributions of another rank
            (stale synchronous parallel; Ho et al., 2013).
        staleness: For "ssp": how many contributions a rank that reads may be ahead of the slowest one.
        slow_down: Not for "sync": divide the learning rate of a contribution by its staleness, the number of updates
            since the weights that it was computed with (Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD, 2016).
    """

    name: str = SYNC
    staleness: int = 0
    slow_down: bool = False

    @property
    def is_sync(self) -> bool:
        return self.name == SYNC

    @property
    def bound(self) -> int | None:
        """By how many contributions a reader may be ahead of the slowest rank; None: there is no limit."""
        return self.staleness if self.name == SSP else None

    def check(self) -> None:
        """Raise ConfigurationError unless the parts fit together."""
        if self.name not in (SYNC, ASYNC, SSP):
            raise ConfigurationError(
                f"the mode of a namespace is {SYNC}, {ASYNC} or {SSP}, got {self.name!r}"
            )
        if self.staleness < 0 or (self.staleness and self.name != SSP):
            raise ConfigurationError(
                f"staleness={self.staleness} does not go with mode {self.name!r}; only {SSP!r} takes one, of 0 or more"
            )
        if self.slow_down and self.is_sync:
            raise ConfigurationError(
                "synchronous contributions are never stale: slow_down does not go with 'sync'"
            )

    def __str__(self) -> str:
        parts = [self.name]
        parts += [f"staleness={self.staleness}"] if self.name == SSP else []
        parts += ["slow_down"] if self.slow_down else []
        return " ".join(parts)


SYNCHRONOUS = Mode()
