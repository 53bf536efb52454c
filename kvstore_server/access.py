"""Who may ask a server for what, if clients have keys: one check of every message, before it is handled.

The key with which a client has connected has a role. An observer asks only how the server does; a worker takes part in
the jobs, and has the ranks, that its key is for; an admin may do everything, also what changes the job of others:
commands, and saving and loading by hand.

A key may also limit how many sessions and namespaces its client has at a time, and how much memory; rates are the
business of `client_rates`.

A routing id belongs to the key that used it first. So a client that learns another one's routing id, and even the token
of its session, cannot speak for it with its own key. Messages through shared memory come from a process that has said
hello over a socket, under the same routing id.

Refusals are counted by reason. Pure: no sockets and no clock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstore_server.budget import ClientMemory
from kvstore_server.errors import AccessDeniedError
from kvstore_server.keys import KeyHolder, Role
from kvstore_server.protocol import messages as m

ADMIN_ACTIONS = frozenset({"save", "keep", "drop", "find", "check"})
"""Actions of `Snapshot` that only an admin may ask for; so is "restore" with a tag. The others are part of training."""
_ALL = frozenset(Role)
_TRAINING = frozenset({Role.WORKER, Role.ADMIN})
_ADMIN = frozenset({Role.ADMIN})
ALLOWED: Mapping[type[Any], frozenset[Role]] = {
    m.GetStatus: _ALL,
    **dict.fromkeys(
        (
            m.Hello, m.Register, m.Contribute, m.Resolve, m.Abort, m.Pull, m.PullRows, m.MapRows, m.SetOptimizer,
            m.Gather, m.GetState, m.SliceState, m.Snapshot, m.Heartbeat, m.Leave, m.JoinRounds, m.LeaveRounds,
            m.CloseRound, m.Stats, m.Profile, m.JoinJob, m.Listening,
        ),
        _TRAINING,
    ),
    m.Command: _ADMIN,
}  # fmt: skip
"""Message → the roles that may send it, but for `ADMIN_ACTIONS`."""
_PEERS_KEPT = 1 << 16
"""Routing ids whose keys are remembered; the one that was silent the longest is forgotten first."""


def _is_by_hand(body: m.RequestBody) -> bool:
    """Return whether a message saves the job under a tag, or loads it."""
    if not isinstance(body, m.Snapshot):
        return False
    return body.action in ADMIN_ACTIONS or (body.action == "restore" and bool(body.tag))


class AccessControl:
    """Checks messages against the clients' keys.

    Args:
        clients: Returns the present clients by public key; called for each message.
        hellos: Returns what the open sessions have begun with, the oldest first.
        namespaces: Returns the namespaces that exist, and the bytes that each of them has claimed.
    """

    def __init__(
        self,
        clients: Callable[[], Mapping[bytes, KeyHolder]],
        hellos: Callable[[], Iterable[m.Hello]] = tuple,
        namespaces: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._clients, self._hellos, self._namespaces = clients, hellos, namespaces
        self._owners: dict[str, bytes] = {}
        """Namespace → the public key of the client that was the first to join it."""
        self._keys: OrderedDict[bytes, str] = OrderedDict()
        """Routing id → the public key of the client that has it, once it has asked for more than the status."""
        self.refused = Counter[str]()
        """Reason → how often a message was refused for it."""

    def check(self, peer: bytes, key: str, body: m.RequestBody) -> KeyHolder:
        """Return whose message it is. Raises AccessDeniedError unless it may be handled.

        Args:
            peer: The routing id of the sender.
            key: The public key with which the sender has connected; empty for a message through shared memory.
        """
        # 1. Who is it?
        clients, owner = self._clients(), self._keys.get(peer, "")
        key = key or owner
        client = clients.get(key.encode())
        if client is None:
            raise self._refuse(
                "unknown key", f"the server does not know the key {key[:8]}… of this client, or no longer"
            )
        name = client.name
        if owner and owner != key:
            raise self._refuse("stolen routing id", f"client {name!r} uses a routing id of another one")
        if not owner and not isinstance(body, m.GetStatus):
            if len(self._keys) >= _PEERS_KEPT:
                self._keys.popitem(last=False)
            self._keys[peer] = owner = key
        if owner:
            self._keys.move_to_end(peer)
        # 2. May it send such a message?
        kind, role = type(body).__name__, client.role
        if role not in ALLOWED.get(type(body), _ADMIN):
            raise self._refuse(
                "role", f"client {name!r} has the role {role.value}, which may not send {kind}"
            )
        if role is not Role.ADMIN and _is_by_hand(body):
            raise self._refuse(
                "role", f"client {name!r} has the role {role.value}; saving and loading take the role admin"
            )
        # 3. May it be this worker?
        if isinstance(body, m.Hello) and role is not Role.ADMIN:
            if not client.may_join(body.namespace):
                raise self._refuse(
                    "namespace",
                    f"client {name!r} is for namespaces {client.namespaces}, not {body.namespace!r:.80}",
                )
            if client.ranks is not None and body.rank not in client.ranks:
                raise self._refuse(
                    "rank",
                    f"client {name!r} is for ranks {sorted(client.ranks)}, and not for rank {body.rank}",
                )
        # 4. Has it too many already?
        if isinstance(body, m.Hello):
            self._note_hello(client, body)
        return client

    def known_sender(self, peer: bytes, kind: type[Any]) -> KeyHolder | None:
        """Return whose message of a kind it is; None if `check` has to say, or why it is refused."""
        owner = self._keys.get(peer, "")
        client = self._clients().get(owner.encode())
        if client is None or client.role not in ALLOWED.get(kind, _ADMIN):
            return None
        self._keys.move_to_end(peer)
        return client

    def _note_hello(self, client: KeyHolder, hello: m.Hello) -> None:
        """Refuse one session or namespace too many, and note who was the first in a namespace."""
        owners = self._find_owners()
        if min(client.limits.sessions, client.limits.namespaces) < math.inf:
            self._check_number(client, hello, owners)
        owners.setdefault(hello.namespace, client.public)

    def _check_number(self, client: KeyHolder, hello: m.Hello, owners: Mapping[str, bytes]) -> None:
        limits, place = client.limits, (hello.namespace, hello.rank)
        # A session with the same place will be replaced.
        others = [
            one
            for one in self._hellos()
            if (one.namespace, one.rank) != place and self._owner_of(one) == client.public
        ]
        if len(others) >= limits.sessions:
            raise self._refuse(
                "sessions",
                f"client {client.name!r} has {len(others)} sessions, and may have {limits.sessions:g}",
            )
        names = {one.namespace for one in others}
        names.update(name for name, owner in owners.items() if owner == client.public)
        if hello.namespace not in names and len(names) >= limits.namespaces:
            raise self._refuse(
                "namespaces",
                f"client {client.name!r} takes part in {len(names)} namespaces, and may in {limits.namespaces:g}",
            )

    def holder_of(self, peer: bytes, key: str = "") -> KeyHolder | None:
        """Return who has connected with a key, or without one who owns a routing id; None if that is not known."""
        return self._clients().get((key or self._keys.get(peer, "")).encode())

    def memory_of(self, namespace: str) -> ClientMemory | None:
        """Return the memory of the client that was the first to join a namespace; None without a limit."""
        if all(one.limits.memory == math.inf for one in self._clients().values()):
            return None
        owners = self._find_owners()
        client = self._clients().get(owners.get(namespace, b""))
        if client is None or client.limits.memory == math.inf:
            return None
        used = sum(nbytes for name, nbytes in self._namespaces().items() if owners.get(name) == client.public)
        return ClientMemory(client.name, int(client.limits.memory), used)

    def _find_owners(self) -> dict[str, bytes]:
        """Return the owners of the namespaces that exist.

        After a restart of the server they are not known until a member of each has sent something.
        """
        present = self._namespaces()
        self._owners = {name: key for name, key in self._owners.items() if name in present}
        if len(self._owners) < len(present):
            for hello in self._hellos():
                key = self._owner_of(hello)
                if key and hello.namespace in present:
                    self._owners.setdefault(hello.namespace, key)
        return self._owners

    def _owner_of(self, hello: m.Hello) -> bytes:
        return next((self._keys[one].encode() for one in hello.sockets if one in self._keys), b"")

    def _refuse(self, reason: str, text: str) -> AccessDeniedError:
        self.refused[reason] += 1
        return AccessDeniedError(text)
