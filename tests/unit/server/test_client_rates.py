"""Rates of clients: who has used up what its key allows waits, and nobody else does."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore_server import client_rates
from kvstore_server.client_rates import ClientRates
from kvstore_server.errors import AccessDeniedError
from kvstore_server.keys import ClientLimits, KeyHolder, Role


def client(name: str = "alice", **limits: float) -> KeyHolder:
    return KeyHolder(name, name.encode(), Role.WORKER, limits=ClientLimits(**limits))


class Clients:
    """Sends messages named by numbers, and notes when each is handled."""

    def __init__(self) -> None:
        self.rates = ClientRates[int]()
        self.handled: list[tuple[int, float]] = []

    def send(self, holder: KeyHolder, number: int, now: float, nbytes: int = 0, time: float = 0.0) -> None:
        if not self.rates.holds_back(holder, number, nbytes, now):
            self.handle(holder, number, now, nbytes, time)

    def handle(self, holder: KeyHolder, number: int, now: float, nbytes: int, time: float) -> None:
        self.rates.charge(holder, now, 1, nbytes, time)
        self.handled.append((number, now))

    def let_pass(self, holder: KeyHolder, until: float, nbytes: int = 0, time: float = 0.0) -> None:
        now = 0.0
        while (wait := self.rates.next_due(now)) < math.inf and now + wait <= until:
            now += wait
            for number in self.rates.due(now):
                self.handle(holder, number, now, nbytes, time)


def test_messages_beyond_the_rate_are_handled_later_and_in_order() -> None:
    clients, alice = Clients(), client(requests=10)
    for number in range(40):
        clients.send(alice, number, 0.0)
    assert clients.rates.num_waiting == 29
    assert len(clients.handled) == 11  # what a second allows, and the one that overdraws it
    clients.let_pass(alice, math.inf)
    assert [number for number, _ in clients.handled] == list(range(40))
    assert clients.handled[-1][1] == pytest.approx(2.9)
    assert clients.rates.num_waiting == 0
    assert clients.rates.next_due(3.0) == math.inf


@pytest.mark.parametrize(
    ("limits", "used", "handled"),
    [({"bytes": 1000}, {"nbytes": 5000}, [0.0, 4.0, 9.0]), ({"time": 0.25}, {"time": 1.0}, [0.0, 3.0, 7.0])],
)
def test_what_takes_many_bytes_or_much_time_is_followed_by_a_pause(
    limits: dict[str, float], used: dict[str, Any], handled: list[float]
) -> None:
    clients, alice = Clients(), client(**limits)
    for number in range(3):
        clients.send(alice, number, 0.0, **used)
    clients.let_pass(alice, math.inf, **used)
    assert [now for _, now in clients.handled] == pytest.approx(handled)


def test_replies_count_as_well() -> None:
    rates, alice = ClientRates[int](), client(bytes=100)
    assert not rates.holds_back(alice, 0, 0, 0.0)
    rates.charge(alice, 0.0, nbytes=300)
    assert rates.holds_back(alice, 1, 0, 0.0)
    assert rates.next_due(0.0) == pytest.approx(2.0)


def test_others_do_not_wait_for_a_greedy_client() -> None:
    clients = Clients()
    for number in range(100):
        clients.send(client(requests=1), number, 0.0)
    for number in (1000, 1001):
        clients.send(client("bob", requests=5), number, 0.0)
        clients.send(client("carol"), number + 10, 0.0)
    assert [number for number, _ in clients.handled if number >= 1000] == [1000, 1010, 1001, 1011]


def test_what_was_not_used_is_not_saved_for_longer_than_a_second() -> None:
    clients, alice = Clients(), client(requests=10)
    clients.send(alice, 0, 0.0)
    for number in range(1, 40):
        clients.send(alice, number, 100.0)
    assert len(clients.handled) == 12


def test_heartbeats_do_not_wait_but_a_flood_of_them_is_dropped() -> None:
    rates, alice = ClientRates[int](), client(requests=10)
    while not rates.holds_back(alice, 0, 0, 0.0):
        rates.charge(alice, 0.0, 1)
    assert sum(rates.drops_heartbeat(alice, 0.0) for _ in range(150)) == 50
    assert not rates.drops_heartbeat(alice, 1.0)
    assert not any(rates.drops_heartbeat(client("bob"), 0.0) for _ in range(1000))


def test_heartbeats_do_not_keep_messages_from_being_handled() -> None:
    clients, alice = Clients(), client(requests=2)
    for number in range(6):
        clients.send(alice, number, 0.0)
    for tick in range(1, 50):
        assert not clients.rates.drops_heartbeat(alice, tick / 10)
    clients.let_pass(alice, 5.0)
    assert len(clients.handled) == 6


def test_refused_messages_count_and_a_flood_of_them_gets_no_answer() -> None:
    rates, alice = ClientRates[int](), client(requests=10)
    assert sum(rates.drops_refused(alice, 0.0, 0, 0.0) for _ in range(100)) == 80
    assert rates.holds_back(alice, 0, 0, 0.0)
    assert not rates.drops_refused(client("bob"), 0.0, 10**9, 10.0)


def test_clients_take_turns_when_their_messages_are_due() -> None:
    rates = ClientRates[str]()
    for name in ("alice", "bob"):
        holder = client(name, requests=10)
        rates.charge(holder, 0.0, 11)
        for number in range(3):
            assert rates.holds_back(holder, f"{name}{number}", 0, 0.0)
    assert list(rates.due(1.0)) == ["alice0", "bob0", "alice1", "bob1", "alice2", "bob2"]


def test_what_waits_of_a_client_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_rates, "MAX_WAITING", 100_000)
    clients, alice = Clients(), client(bytes=10)
    clients.send(alice, 0, 0.0, nbytes=50)
    for number in (1, 2):
        clients.send(alice, number, 0.0, nbytes=40_000)
    with pytest.raises(AccessDeniedError):
        clients.send(alice, 3, 0.0, nbytes=40_000)
    clients.send(client("bob"), 4, 0.0, nbytes=40_000)
    assert [number for number, _ in clients.handled] == [0, 4]


def test_limits_may_change_while_messages_wait() -> None:
    clients = Clients()
    for number in range(3):
        clients.send(client(requests=0.1), number, 0.0)
    assert len(clients.handled) == 1
    clients.send(client(requests=100), 3, 1.0)
    clients.let_pass(client(requests=100), 1.0)
    assert [number for number, _ in clients.handled] == [0, 1, 2, 3]
