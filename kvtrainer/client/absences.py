"""Servers that are gone and will be back: their processes are started again, with the state that they had.

A server's `Welcome` says for how long its workers wait. `Absences` decides from the time which of the servers that are
gone have to be probed, and which are not waited for any more. No sockets, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLE_TIME = 0.1
"""Seconds after the end of a process or connection before the server counts as gone: a server that is shut down says so
as its last message, which may still be on its way."""
PROBE_INTERVAL = 0.5
"""Seconds after which a probe that was not answered is repeated over a new connection; it doubles with each probe. The
socket keeps a probe until it is connected, so the first one is answered as soon as the server is back. The others are
for messages that get lost, and for connections that nothing answers, as where a host has gone."""
_MAX_INTERVAL = 8.0
"""Seconds between two probes at most."""
_GRACE = 2.0
"""Seconds that a later wait gives a server that has not come back in time."""


@dataclass
class Absence:
    why: str
    """What happened to the server, as the end of a sentence about it."""
    since: float
    timeout: float
    probe_at: float
    """When the next probe is due."""
    interval: float = PROBE_INTERVAL
    """Seconds until the one after that."""

    @property
    def ends_at(self) -> float:
        """When the server is not waited for any more."""
        return self.since + self.timeout


class Absences:
    """Which restartable servers are gone, and when each is probed. Times are on the session's clock."""

    def __init__(self) -> None:
        self.timeouts: dict[int, float] = {}
        """Server that keeps its state when its process ends → seconds to wait for its next process."""
        self.gone: dict[int, Absence] = {}
        """The servers that are gone."""

    def __contains__(self, server: object) -> bool:
        return server in self.gone

    def begin(self, server: int, why: str, now: float) -> bool:
        """Record that a server is gone, and will be probed now; returns whether it was still there before."""
        is_new = server not in self.gone
        if is_new:
            self.gone[server] = Absence(why, now, self.timeouts[server], now)
        self._probed(server, now)
        return is_new

    def take_due(self, now: float) -> list[int]:
        """Return the servers to probe now."""
        due = [server for server, absence in self.gone.items() if now >= absence.probe_at]
        for server in due:
            self._probed(server, now)
        return due

    def _probed(self, server: int, now: float) -> None:
        absence = self.gone[server]
        absence.probe_at, absence.interval = now + absence.interval, min(2 * absence.interval, _MAX_INTERVAL)

    def next_check(self, now: float) -> float:
        """Return the seconds until a probe is due, or the time of a server is over."""
        times = [absence.probe_at for absence in self.gone.values()]
        times += [absence.ends_at for absence in self.gone.values() if absence.ends_at > now]
        return max(min(times) - now, 0.0)

    def is_over(self, server: int, now: float) -> bool:
        """Return whether a server is gone and its time is over."""
        return server in self.gone and now >= self.gone[server].ends_at

    def is_hopeless(self, server: int, wait_began: float, now: float) -> bool:
        """Return whether a wait for a server must end. A later wait than the first gives it a short while, too."""
        if not self.is_over(server, now):
            return False
        absence = self.gone[server]
        return absence.ends_at > wait_began or now - wait_began >= min(_GRACE, absence.timeout)

    def extend(self, seconds: float) -> None:
        """Wait so much longer for all, because this process could not receive for so long."""
        for absence in self.gone.values():
            absence.since += seconds
