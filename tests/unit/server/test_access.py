"""Who may send which message: the table, for every role and every message."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from kvstore_server.access import ADMIN_ACTIONS, ALLOWED, AccessControl
from kvstore_server.errors import AccessDeniedError
from kvstore_server.keys import ClientLimits, KeyHolder, Role
from kvstore_server.protocol import messages as m
from tests.support.access_table import rows

CLIENTS = {
    **{role.value.encode(): KeyHolder(role.value, b"", role) for role in Role},
    b"alice": KeyHolder("alice", b"", Role.WORKER, ("job-*",), frozenset({0, 2})),
}
"""By public key, which is the name here."""
MESSAGES = get_args(m.RequestBody)


def message(kind: type[Any], **values: Any) -> Any:
    """A message of a kind, whose fields are of no account."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(made, field.name, values.get(field.name, ""))
    return made


def may(name: str, body: Any, peer: bytes = b"peer") -> bool:
    try:
        AccessControl(lambda: CLIENTS).check(peer, name, body)
    except AccessDeniedError:
        return False
    return True


def test_the_table_has_every_message() -> None:
    assert set(ALLOWED) == set(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_is_for_the_roles_that_the_table_says(kind: type[Any]) -> None:
    assert {role for role in Role if may(role.value, message(kind, action="cut"))} == ALLOWED[kind]


def test_observers_only_look_and_admins_may_do_everything() -> None:
    assert [kind for kind in MESSAGES if may("observer", message(kind))] == [m.GetStatus]
    assert all(may("admin", message(kind)) for kind in MESSAGES)
    assert {kind for kind in MESSAGES if not may("worker", message(kind, action="list"))} == {m.Command}


@pytest.mark.parametrize("action", sorted(ADMIN_ACTIONS))
def test_only_an_admin_saves_and_loads(action: str) -> None:
    assert not may("worker", m.Snapshot(action, tag="a"))
    assert may("admin", m.Snapshot(action, tag="a"))


def test_a_worker_goes_back_to_a_snapshot_but_loads_nothing() -> None:
    assert may("worker", m.Snapshot("restore", 5))
    assert not may("worker", m.Snapshot("restore", 5, tag="a"))


@pytest.mark.parametrize(
    ("namespace", "rank", "allowed"),
    [
        ("job-1", 0, True),
        ("job-1/trainer1", 2, True),
        ("job-1", 1, False),
        ("job", 0, False),
        ("x/job-1", 0, False),
    ],
)
def test_a_worker_has_the_namespaces_and_ranks_of_its_key(namespace: str, rank: int, allowed: bool) -> None:
    assert may("alice", message(m.Hello, namespace=namespace, rank=rank)) is allowed
    assert may("worker", message(m.Hello, namespace=namespace, rank=rank))


def test_an_unknown_client_may_do_nothing() -> None:
    assert not any(may("nobody", message(kind)) for kind in MESSAGES)
    assert not any(may("", message(kind)) for kind in MESSAGES)


def test_a_routing_id_belongs_to_the_key_that_used_it_first() -> None:
    access = AccessControl(lambda: CLIENTS)
    access.check(b"peer", "worker", message(m.Heartbeat))
    for name in ("admin", "observer", "alice"):
        with pytest.raises(AccessDeniedError):
            access.check(b"peer", name, m.GetStatus())
    access.check(b"peer", "worker", m.GetStatus())
    assert access.refused == {"stolen routing id": 3}


def test_a_message_through_shared_memory_has_the_role_of_its_socket() -> None:
    access = AccessControl(lambda: CLIENTS)
    access.check(b"worker", "worker", message(m.Heartbeat))
    access.check(b"observer", "observer", m.GetStatus())
    access.check(b"worker", "", message(m.Contribute))
    for peer in (b"observer", b"unknown"):
        with pytest.raises(AccessDeniedError):
            access.check(peer, "", message(m.Contribute))
    assert access.refused == {"unknown key": 2}


def test_a_client_that_is_removed_is_refused_from_the_next_message_on() -> None:
    clients = dict(CLIENTS)
    access = AccessControl(lambda: clients)
    access.check(b"peer", "worker", message(m.Contribute))
    del clients[b"worker"]
    with pytest.raises(AccessDeniedError):
        access.check(b"peer", "worker", message(m.Contribute))


class Sessions:
    """Sessions of clients with limits; what they have said hello with, and claimed."""

    def __init__(self, **limits: float) -> None:
        names = {name: KeyHolder(name, name.encode(), Role.WORKER) for name in ("alice", "bob")}
        names["alice"] = dataclasses.replace(names["alice"], limits=ClientLimits(**limits))
        self.hellos: list[Any] = []
        self.claimed: dict[str, int] = {}
        clients = {one.public: one for one in names.values()}
        self.access = AccessControl(lambda: clients, lambda: self.hellos, lambda: self.claimed)

    def join(self, key: str, namespace: str, rank: int = 0) -> bool:
        body = message(m.Hello, namespace=namespace, rank=rank, sockets=(f"{key}{namespace}{rank}".encode(),))
        try:
            self.access.check(body.sockets[0], key, body)
        except AccessDeniedError:
            return False
        self.hellos.append(body)
        self.claimed.setdefault(namespace, 0)
        return True


def test_a_client_has_no_more_sessions_than_its_key_allows() -> None:
    sessions = Sessions(sessions=2)
    assert [sessions.join("alice", "a", rank) for rank in range(3)] == [True, True, False]
    assert sessions.join("alice", "a", 1)  # takes the place of the one before
    assert all(sessions.join("bob", "b", rank) for rank in range(5))
    del sessions.hellos[0]
    assert sessions.access.refused == {"sessions": 1}
    assert not sessions.join("alice", "a", 3)
    sessions.hellos.clear()
    assert sessions.join("alice", "a", 3)


def test_a_client_takes_part_in_no_more_namespaces_than_its_key_allows() -> None:
    sessions = Sessions(namespaces=2)
    assert [sessions.join("alice", name) for name in ("a", "b", "c", "a")] == [True, True, False, True]
    assert sessions.join("alice", "a", 1)
    assert sessions.join("bob", "c")
    assert not sessions.join("alice", "c", 1)
    assert sessions.access.refused == {"namespaces": 2}


def test_the_memory_of_a_namespace_is_that_of_the_client_that_came_first() -> None:
    sessions = Sessions(memory=1000)
    for key, name, rank in [
        ("alice", "a", 0),
        ("bob", "a", 1),
        ("bob", "b", 0),
        ("alice", "b", 1),
        ("alice", "c", 0),
    ]:
        assert sessions.join(key, name, rank)
    sessions.claimed = {"a": 300, "b": 500, "c": 900}
    found = {name: sessions.access.memory_of(name) for name in ("a", "b", "c", "d")}
    assert found == {"a": ("alice", 1000, 1200), "b": None, "c": ("alice", 1000, 1200), "d": None}


def test_a_namespace_that_waits_for_its_worker_still_counts() -> None:
    sessions = Sessions(memory=1000, namespaces=1)
    assert sessions.join("alice", "a")
    sessions.hellos.clear()  # it has left, and the namespace has not ended
    sessions.claimed["a"] = 900
    assert not sessions.join("alice", "b")
    assert sessions.access.memory_of("a") == ("alice", 1000, 900)
    del sessions.claimed["a"]
    assert sessions.join("alice", "b")


def test_who_owns_a_namespace_is_found_again_after_a_restart() -> None:
    sessions = Sessions(memory=1000)
    sessions.claimed["a"] = 700
    sessions.hellos = [message(m.Hello, namespace="a", rank=0, sockets=(b"silent",)),
                       message(m.Hello, namespace="a", rank=1, sockets=(b"peer",))]  # fmt: skip
    assert sessions.access.memory_of("a") is None
    sessions.access.check(b"peer", "alice", message(m.Heartbeat))
    assert sessions.access.memory_of("a") == ("alice", 1000, 700)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 5] == rows()
