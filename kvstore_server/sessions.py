"""Sessions: one process in the place of one rank, known by a secret token and by its sockets.

A token is random, and good only from the sockets that the process named when it said hello. Both are told to nobody
else, so whoever knows neither cannot speak for a rank. Nothing of that is ever logged or sent to others.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvstore_server.errors import FencedError, ProtocolError
from kvstore_server.namespace import Namespace
from kvstore_server.protocol.messages import Hello

_ENDED_KEPT = 1024
"""How many sessions that have ended are remembered with the reason; older ones get a general answer."""


class _Process(NamedTuple):
    """Who says hello; equal when that is repeated."""

    namespace: str
    rank: int
    nonce: bytes
    sockets: tuple[bytes, ...]


@dataclass(frozen=True)
class Session:
    """A process that stands for a rank now."""

    token: int
    space: Namespace
    process: _Process
    peer: bytes
    """The socket that said hello: where it is told what it did not ask for."""

    @property
    def rank(self) -> int:
        return self.process.rank


def random_token() -> int:
    """A token that nobody can guess."""
    return secrets.randbits(64)


class Sessions:
    """All sessions of one engine; `tokens` gives numbers of 64 bits."""

    def __init__(self, server: int, tokens: Callable[[], int]) -> None:
        self._server = server
        self._tokens = tokens
        self._live: dict[int, Session] = {}
        self._ended: OrderedDict[int, tuple[_Process, str]] = OrderedDict()
        """Token → whose it was, and why it is good no more."""
        self._opened: dict[_Process, int] = {}
        """The tokens of both, by process."""

    def __iter__(self) -> Iterator[Session]:
        return iter(self._live.values())

    def find(self, peer: bytes, token: int) -> Session:
        """The session of that token, for a message from the socket `peer`.

        Raises:
            FencedError: it has ended; or there is none, or it is not that socket's, which sound alike.
        """
        session = self._live.get(token)
        if session is not None and peer in session.process.sockets:
            return session
        process, reason = self._ended.get(token, (None, ""))
        if process is None or peer not in process.sockets:
            reason = "it has no session there"
        raise FencedError(f"this process may no longer write to server {self._server}: {reason}")

    def repeated(self, peer: bytes, hello: Hello) -> Session | None:
        """The session that the same process has opened with the same Hello before, if any.

        Raises:
            FencedError: it has ended since.
            ProtocolError: the Hello does not name the socket that sends it.
        """
        if peer not in hello.sockets:
            raise ProtocolError("a Hello must name the routing id of the socket that sends it")
        token = self._opened.get(_process_of(hello))
        return None if token is None else self.find(peer, token)

    def new_token(self) -> int:
        """A token that no session has; 0 is none."""
        token = 0
        while not token or token in self._live or token in self._ended:
            token = self._tokens()
        return token

    def open(self, token: int, peer: bytes, hello: Hello, space: Namespace) -> None:
        """Let a process speak for its rank from now on."""
        process = _process_of(hello)
        self._live[token] = Session(token, space, process, peer)
        self._opened[process] = token

    def end(self, token: int, reason: str) -> None:
        """Refuse what is still said in a session, with this reason."""
        self._ended[token] = (self._live.pop(token).process, reason)
        if len(self._ended) > _ENDED_KEPT:
            _, (process, _) = self._ended.popitem(last=False)
            del self._opened[process]


def _process_of(hello: Hello) -> _Process:
    return _Process(hello.namespace, hello.rank, hello.nonce, hello.sockets)
