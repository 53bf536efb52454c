"""Messages that are lost, delayed and doubled on purpose: as many as asked for, in both directions, same bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvstore_server.errors import ConfigurationError
from kvstore_server.protocol import messages as m
from kvtrainer.client.message_faults import FaultDraws, FaultyTransport, MessageFaults, parse_message_faults
from kvtrainer.client.session import Transport

MANY = 10_000


def test_the_variable_gives_shares_seconds_and_a_seed() -> None:
    assert parse_message_faults("drop=0.1,delay=0.05, duplicate=0.2,seconds=0.5,seed=3") == MessageFaults(
        0.1, 0.05, 0.2, 0.5, 3
    )
    assert parse_message_faults("drop=1") == MessageFaults(drop=1.0)
    assert parse_message_faults("") is None


@pytest.mark.parametrize(
    "text", ["drop", "drop=x", "drop=1.1", "drop=-0.1", "drop=nan", "lose=0.1", "seed=1.5", "seconds=inf"]
)
def test_a_wrong_value_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KVSTORE_FAULTS"):
        parse_message_faults(text)


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_ten_thousand_messages_is_a_tenth_within_a_hundredth(seed: int) -> None:
    draws = FaultDraws(MessageFaults(0.1, 0.1, 0.1, 0.02, seed), "sent by 0")
    drawn = [draws.delays() for _ in range(MANY)]
    arrived = [one for one in drawn if one]
    lost = 1 - len(arrived) / MANY
    late = sum(one[0] > 0 for one in arrived) / len(arrived)
    doubled = sum(len(one) == 2 for one in arrived) / len(arrived)
    # The standard deviation of such a share is 0.003.
    assert max(abs(share - 0.1) for share in (lost, late, doubled)) < 0.01
    assert 0 < max(max(one) for one in arrived) <= 0.02


def test_each_stream_and_each_seed_has_draws_of_its_own_that_repeat() -> None:
    def drawn(seed: int, stream: str) -> list[list[float]]:
        draws = FaultDraws(MessageFaults(0.3, 0.3, 0.3, 0.02, seed), stream)
        return [draws.delays() for _ in range(100)]

    assert drawn(1, "sent by 0") == drawn(1, "sent by 0")
    several = [drawn(1, "sent by 0"), drawn(1, "sent by 1"), drawn(1, "received by 0"), drawn(2, "sent by 0")]
    assert all(a != b for at, a in enumerate(several) for b in several[:at])


class Wire(Transport):
    """A transport in which what was sent can be seen, and what arrives is said by the test."""

    num_servers = 1

    def __init__(self) -> None:
        self.sent: list[m.Request] = []
        self.came: list[m.Reply] = []

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        self.sent.append(request)

    def receive(self, timeout: float) -> tuple[int, m.Reply] | None:
        return (0, self.came.pop(0)) if self.came else None

    def describe(self, server: int) -> str:
        return "a wire"

    def sockets(self, server: int) -> tuple[bytes, ...]:
        return ()

    def last_heartbeat(self, server: int) -> float:
        return 0.0

    def close(self) -> None: ...


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def faulty(**shares: float) -> tuple[Wire, Clock, FaultyTransport]:
    wire, clock = Wire(), Clock()
    return wire, clock, FaultyTransport(wire, MessageFaults(**shares, seed=1), clock, 0)


def send_all(wire: Wire, clock: Clock, transport: FaultyTransport) -> int:
    for number in range(MANY):
        transport.send(0, m.Request(1, 1, number, m.Stats()))
    clock.now += 1.0
    transport.receive(0.0)
    return len(wire.sent)


def receive_all(wire: Wire, clock: Clock, transport: FaultyTransport) -> int:
    wire.came += [m.Reply(number, m.Pending((), "")) for number in range(MANY)]
    count = 0
    for _ in range(2):
        while transport.receive(0.0) is not None:
            count += 1
        clock.now += 1.0
    return count


@pytest.mark.parametrize("all_of", [send_all, receive_all])
@pytest.mark.parametrize(("name", "expected"), [("drop", 0.9), ("duplicate", 1.1), ("delay", 1.0)])
def test_messages_of_both_directions_suffer_the_faults(
    all_of: Callable[[Wire, Clock, FaultyTransport], int], name: str, expected: float
) -> None:
    assert all_of(*faulty(**{name: 0.1})) / MANY == pytest.approx(
        expected, abs=0 if name == "delay" else 0.01
    )


def test_a_late_message_comes_behind_later_ones_when_it_is_due() -> None:
    wire, clock, transport = faulty(delay=1.0, seconds=2.0)
    for number in range(20):
        transport.send(0, m.Request(1, 1, number, m.Stats()))
    assert wire.sent == []
    clock.now = 2.0
    assert transport.receive(0.0) is None
    numbers = [request.number for request in wire.sent]
    assert sorted(numbers) == list(range(20)) != numbers


def test_a_late_message_keeps_the_bytes_that_it_was_sent_with() -> None:
    wire, clock, transport = faulty(delay=1.0)
    gradient = torch.arange(4.0)
    pushes = m.matrix([(0, 1, 0, gradient.nbytes)], m.PUSH_WORDS)
    transport.send(0, m.Request(1, 1, 1, m.Contribute(pushes, (gradient,), m.matrix((), m.COMMIT_WORDS))))
    gradient.zero_()
    clock.now = 1.0
    transport.receive(0.0)
    [request] = wire.sent
    assert isinstance(request.body, m.Contribute)
    assert [one.view(torch.float32).tolist() for one in request.body.payloads] == [[0.0, 1.0, 2.0, 3.0]]


def test_what_is_held_back_is_lost_with_the_connection_to_its_server() -> None:
    wire, clock, transport = faulty(delay=1.0)
    lost: list[int] = []
    wire.reconnect = lost.append  # type: ignore[method-assign]
    transport.send(0, m.Request(1, 1, 1, m.Stats()))
    wire.came.append(m.Reply(1, m.Pending((), "")))
    assert transport.receive(0.0) is None
    transport.reconnect(0)
    clock.now = 10.0
    assert transport.receive(0.0) is None
    assert (lost, wire.sent) == ([0], [])


def test_everything_else_of_a_transport_is_passed_on() -> None:
    own = {name for name in vars(Transport) if not name.startswith("_")}
    assert own - set(vars(FaultyTransport)) == set()
