"""Where a network lies between, workers send slices in parts, few at a time, and take weights that come so."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zmq

from kvstore_server.codec import make_codec, torch_dtype
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import decode_frames, encode_frames
from kvtrainer.client.connection import Connection
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.flow_control import MAX_PART_BYTES, STALL, FlowWindow, part_bytes_in_flight
from kvtrainer.client.tables import Compressor
from tests.support.messages import contribution
from tests.support.scripted import SLOT, Bench, is_announcement
from tests.support.switchboard import Line, connected, play

LENGTH = 32 * 1024
"""Elements of a part."""
NO_COMMITS = m.matrix((), m.COMMIT_WORDS)
ANNOUNCEMENT = contribution([], 3, 0, 8, flags=m.DECLARES_INTENT | m.WANTS_WEIGHTS)


def part(number: int, numel: int = LENGTH, slot: int = 0, round_: int = 3) -> m.Contribute:
    """A part of a slice, by its number."""
    pushes = m.matrix([(slot | (number * LENGTH + numel) << m.PART, round_, 0, 4 * numel)], m.PUSH_WORDS)
    return m.Contribute(pushes, (torch.full((numel,), float(number)),), NO_COMMITS)


def answer(begin: int, end: int, value: float) -> m.Weights:
    """New weights of some elements of the first slice."""
    values = torch.full((end - begin,), value)
    return m.Weights(m.matrix([(SLOT | end << m.PART, 4, m.WHOLE, values.nbytes)], 4), (values,))


def rest(bench: Bench, value: float) -> m.Weights:
    """New weights of all slices but the first."""
    whole = bench.weights(0, value, 4)
    return m.Weights(whole.parts[1:], whole.payloads[1:])


def test_large_slices_are_sent_in_parts_which_together_are_the_gradient() -> None:
    bench = Bench(1, lambda *_: [])
    given = bench.contribution()
    assert given.values is not None
    given.values[0]["float32"].copy_(torch.arange(1 << 18))
    bench.rounds.start(given)
    bodies = [body for body in bench.servers.bodies(m.Contribute) if isinstance(body, m.Contribute)]
    sent, most = dict[int, list[torch.Tensor]](), part_bytes_in_flight(1 << 20)
    for body in bodies:
        for word, _, _, nbytes in body.pushes.tolist():
            slot, end = m.unpack_slot(word)
            assert nbytes <= most
            assert sum(one.nbytes for one in sent.setdefault(slot, [])) + nbytes == 4 * end
            sent[slot] += [one.view(torch.float32) for one in body.payloads]
    numbers = torch.cat([one for slot in sorted(sent) for one in sent[slot]])
    assert torch.equal(numbers, torch.arange(1 << 18, dtype=torch.float32))
    assert is_announcement(bodies[0])
    assert len(bodies[-1].commits)


@pytest.mark.parametrize(
    ("share", "size"), [(1, 32768), (24 << 16, 65536), (24 << 16 | 1, 69632), (1 << 30, MAX_PART_BYTES)]
)
def test_a_part_is_a_24th_of_what_a_server_has_within_bounds(share: int, size: int) -> None:
    assert part_bytes_in_flight(share) == size


def test_weights_that_come_in_parts_are_written_when_all_are_here() -> None:
    bench = Bench(1, lambda *_: [])
    ticket, length = bench.start(), bench.plan.slices[0].length
    number = ticket.server_requests[0].number
    for body in (answer(0, 4096, 4.0), answer(4096, length, 5.0)):
        bench.servers.reply(0, number, body)
    bench.servers.reply(0, number, rest(bench, 6.0), after=1.0)
    bench.session.wait(ticket.open, lambda _: None, 0.0, 100.5)
    assert not bench.out.any()
    bench.rounds.wait(ticket)
    assert set(bench.out[:4096].tolist()) == {4.0}
    assert set(bench.out[4096:length].tolist()) == {5.0}
    assert set(bench.out[length:].tolist()) == {6.0}


def test_parts_of_a_version_that_was_taken_back_do_not_count() -> None:
    bench = Bench(1, lambda *_: [])
    ticket = bench.start()
    number = ticket.server_requests[0].number
    bench.servers.reply(0, number, answer(0, 4096, 4.0))
    bench.servers.reply(0, number, bench.weights(0, 6.0, 6))
    bench.rounds.wait(ticket)
    assert bench.out.unique().tolist() == [6.0]


def test_behind_a_part_that_was_lost_the_others_wait_for_the_whole_slice() -> None:
    bench = Bench(1, lambda *_: [])
    ticket, length = bench.start(), bench.plan.slices[0].length
    number = ticket.server_requests[0].number
    bench.servers.reply(0, number, rest(bench, 6.0))
    bench.servers.reply(0, number, answer(4096, length, 5.0))
    bench.servers.reply(0, number, bench.weights(0, 7.0, 4), after=1.0)
    bench.rounds.wait(ticket)
    assert bench.out.unique().tolist() == [6.0, 7.0]


def test_a_part_that_comes_twice_is_written_once() -> None:
    bench = Bench(1, lambda *_: [])
    ticket, length = bench.start(), bench.plan.slices[0].length
    number = ticket.server_requests[0].number
    for body in (answer(0, 4096, 4.0), answer(0, 4096, 9.0), answer(4096, length, 4.0)):
        bench.servers.reply(0, number, body)
    bench.servers.reply(0, number, rest(bench, 4.0))
    bench.rounds.wait(ticket)
    assert bench.out.unique().tolist() == [4.0]


# ---------------------------------------------------------------- gradients in half precision


class HalfJob:
    """Two workers of a server that give compressed gradients, and take new weights as bfloat16."""

    def __init__(self, compression: str) -> None:
        self.clients, self.tables = connected([Engine(EngineConfig())], 2), []
        optimizer = create("sgd", learning_rate=0.1)
        for client in self.clients:
            client.set_optimizer(optimizer.spec())
            [table] = client.register(
                {"t": [TensorSpec(dtype, (400, 300), dtype) for dtype in ("float32", "float64", "float16")]},
                False,
            )
            table.takes_half = True
            table.compressor = Compressor(make_codec({"type": compression}), table.plan)
            self.tables.append(table)
        self.hyper = pack_hypers([dict(optimizer.plain_hyper())], {}, {}, True)
        self.arenas = [self.filled(rank) for rank in range(2)]

    def filled(self, seed: int) -> dict[str, torch.Tensor]:
        generator, sizes = torch.Generator().manual_seed(seed), self.tables[0].plan.arena_sizes
        return {
            name: torch.randn(size, generator=generator).to(torch_dtype(name)) for name, size in sizes.items()
        }

    def train(self) -> list[torch.Tensor]:
        """Give first values and two gradients; returns the last weights of all workers, and what is kept back."""
        for round_ in range(3):
            values = [self.filled(10 * round_ + rank) for rank in range(2)]
            rows = zip(self.tables, values, self.arenas, strict=True)
            play(self.clients, [Contribution([t], [v], [a], 1.0, self.hyper) for t, v, a in rows])
        kept = [table.compressor.residuals() for table in self.tables if table.compressor is not None]
        return [flat for arenas in (*self.arenas, *kept) for flat in arenas.values()]


@pytest.mark.parametrize(("compression", "are_cut"), [("bf16", True), ("fp16", True), ("int8", False)])
def test_what_is_sent_in_half_precision_goes_in_parts_and_gives_the_same_bits_as_whole_slices(
    compression: str, are_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, send = [], Line.send

    def note(line: Line, server: int, request: m.Request, priority: int = 0) -> None:
        if isinstance(request.body, m.Contribute) and request.body.encoding and len(request.body.pushes) == 1:
            parts.append(m.unpack_slot(int(request.body.pushes[0, m.PUSH_SLOT]))[1])
        send(line, server, request, priority)

    monkeypatch.setattr(Line, "send", note)
    in_parts = HalfJob(compression).train()
    assert any(parts) == are_cut
    parts.clear()
    monkeypatch.setattr(Line, "is_remote", lambda *_: False)
    whole = HalfJob(compression).train()
    assert not any(parts)
    assert all(torch.equal(one, other) for one, other in zip(in_parts, whole, strict=True))


def test_parts_are_larger_while_rounds_of_other_tables_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    clients, sizes, send = connected([Engine(EngineConfig())], 2), set[int](), Line.send

    def note(line: Line, server: int, request: m.Request, priority: int = 0) -> None:
        if isinstance(request.body, m.Contribute) and len(request.body.pushes) == 1:
            sizes.add(int(request.body.pushes[0, m.PUSH_NBYTES]))
        send(line, server, request, priority)

    monkeypatch.setattr(Line, "send", note)
    specs = {name: [TensorSpec(name, (1 << 18,), "float32")] for name in ("a", "b")}
    tables = [client.register(specs, False) for client in clients]
    arenas = [[{"float32": torch.ones(1 << 18)} for _ in specs] for _ in clients]

    def contribution_to(which: int) -> list[Contribution]:
        rows = zip(tables, arenas, strict=True)
        return [Contribution([own[which]], [arena[which]], [arena[which]]) for own, arena in rows]

    for which in range(2):
        play(clients, contribution_to(which))
    sizes.clear()
    first = [client.rounds.start(one) for client, one in zip(clients[:1], contribution_to(0), strict=False)]
    alone = max(sizes)
    assert alone == part_bytes_in_flight(1 << 20)
    second = [client.rounds.start(one) for client, one in zip(clients[:1], contribution_to(1), strict=False)]
    assert max(sizes) == part_bytes_in_flight(2 << 20) > alone
    other = [clients[1].rounds.start(contribution_to(which)[1]) for which in range(2)]
    for client, rounds in zip(clients, ([*first, *second], other), strict=True):
        for one in rounds:
            client.rounds.wait(one)
    sizes.clear()
    play(clients, contribution_to(0))
    assert max(sizes) == alone


# ---------------------------------------------------------------- the window


def sent(
    window: FlowWindow, *numbers: int, now: float = 0.0, slot: int = 0, priority: int = 0, numel: int = LENGTH
) -> list[int]:
    """Send those of these parts of a slice, in order, that may go."""
    gone = []
    window.end_if_stalled(now)
    for number in numbers:
        body = part(number, numel, slot)
        if window.must_hold(body, priority, now):
            break
        window.sent(body, priority)
        gone.append(number)
    return gone


def weights(end: int = LENGTH, kind: int = m.WHOLE, slot: int = 0) -> m.Weights:
    """New weights of a slice up to an element; 0: all of them."""
    values = torch.zeros(end or 4 * LENGTH, dtype=torch.bfloat16 if kind == m.HALF else torch.float32)
    return m.Weights(m.matrix([(slot | end << m.PART, 4, kind, values.nbytes)], 4), (values,))


@pytest.fixture
def window() -> FlowWindow:
    """A window of a round that was announced."""
    made = FlowWindow()
    made.sent(ANNOUNCEMENT, 0)
    return made


def test_a_part_waits_until_earlier_ones_are_answered(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    window.answered(weights())
    assert sent(window, 3, 4) == [3]


def test_fewer_parts_go_at_once_where_another_table_has_some_on_their_way(window: FlowWindow) -> None:
    assert sent(window, 0) == [0]
    window.sent(ANNOUNCEMENT, 0)
    assert sent(window, 0, 1, 2, slot=1) == [0]
    window.answered(weights())
    assert sent(window, 1, 2, slot=1) == [1]


def test_a_part_waits_for_none_that_are_less_urgent(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    assert sent(window, 0, 1, 2, 3, slot=1, priority=1) == [0, 1, 2]
    window.answered(weights(2 * LENGTH))
    assert sent(window, 3, priority=0) == []
    window.answered(weights(3 * LENGTH, slot=1))
    assert sent(window, 3, priority=0) == [3]


def test_parts_of_a_slices_last_round_are_on_their_way_no_longer(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2) == [0, 1, 2]
    window.answered(weights())
    window.sent(ANNOUNCEMENT, 0)
    first = part(0, round_=4)
    window.sent(first, 0)
    assert not window.must_hold(part(1, round_=4), 0, 0.0)
    window.sent(part(1, round_=4), 0)
    assert window.must_hold(part(2, round_=4), 0, 0.0)


def test_the_first_part_of_a_slices_next_round_waits_as_any_other(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2) == [0, 1, 2]
    window.answered(weights(3 * LENGTH))
    window.sent(ANNOUNCEMENT, 0)
    assert sent(window, 0, 1, 2, slot=1) == [0, 1, 2]
    assert window.must_hold(part(0, round_=4), 0, 0.0)


@pytest.mark.parametrize(("is_left", "count"), [(False, 3), (True, 12)])
def test_more_short_parts_are_on_their_way_while_a_worker_computes(
    is_left: bool, count: int, window: FlowWindow
) -> None:
    window.polls_only = is_left
    assert [at for at in range(20) if sent(window, 0, slot=at, numel=4096)] == [*range(count)]


def test_a_short_part_waits_no_longer_than_others(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2) == [0, 1, 2]
    window.answered(weights())
    assert not window.must_hold(part(3, 1024), 0, 0.0)


def test_other_messages_never_wait(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    for body in (contribution([(0, b"1234")], 3), contribution([], 3, 0, 8), m.Heartbeat()):
        assert not window.must_hold(body, 0, 0.0)


def test_parts_of_a_round_that_was_not_announced_do_not_wait() -> None:
    assert sent(FlowWindow(), *range(9)) == [*range(9)]


def test_a_round_without_answers_goes_on_after_a_while_and_the_next_as_a_whole(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    assert window.release_at == STALL
    assert sent(window, *range(3, 9), now=STALL) == [*range(3, 9)]
    window.sent(ANNOUNCEMENT, 0)
    assert sent(window, *range(9)) == [*range(9)]
    window.sent(ANNOUNCEMENT, 0)
    assert sent(window, *range(4), slot=1) == [0, 1, 2]


def test_a_round_that_waits_while_gradients_are_computed_does_not_have_the_next_go_as_a_whole() -> None:
    window = FlowWindow()
    expected = contribution([], 3, 0, 8, flags=m.DECLARES_INTENT | m.WANTS_WEIGHTS | m.TENTATIVE)
    window.sent(expected, 0)
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    assert sent(window, 3, 4, now=STALL) == [3, 4]
    window.sent(expected, 0)
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]


def test_the_more_rounds_go_without_answers_the_more_go_as_a_whole(window: FlowWindow) -> None:
    held = []
    while len(held) < 20:
        held.append(sent(window, *range(9)) == [0, 1, 2])
        sent(window, *range(3, 9), now=STALL)
        window.answered(weights(0))  # of the whole round, at its end
        window.sent(ANNOUNCEMENT, 0)
    assert [at for at, was_held in enumerate(held) if was_held] == [0, 2, 5, 10, 19]


@pytest.mark.parametrize("kind", [m.WHOLE, m.HALF])
def test_weights_answer_as_many_elements_as_they_are_of_whatever_their_kind(
    kind: int, window: FlowWindow
) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    window.answered(weights(LENGTH, kind))
    assert sent(window, 3, 4) == [3]
    window.answered(weights(3 * LENGTH, kind))
    assert sent(window, 4, 5, 6) == [4, 5]


def test_weights_of_a_whole_slice_answer_all_that_was_sent_of_it(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    window.answered(weights(0))
    assert sent(window, 3, 4, 5, 6) == [3, 4, 5]


def test_weights_that_come_twice_answer_a_part_once(window: FlowWindow) -> None:
    assert sent(window, 0, 1, 2, 3) == [0, 1, 2]
    window.answered(weights())
    window.answered(weights())
    assert sent(window, 3, 4) == [3]


def test_a_part_that_is_sent_again_is_not_on_its_way_twice(window: FlowWindow) -> None:
    assert sent(window, 0, 0, 1, 2, 3) == [0, 0, 1, 2]


@pytest.mark.parametrize("is_answered", [True, False])
def test_parts_that_wait_leave_with_an_answer_or_when_none_comes(
    is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtrainer.client.flow_control.STALL", 3600.0 if is_answered else 0.05)
    bodies: list[Any] = [ANNOUNCEMENT, *[part(number) for number in range(6)], contribution([], 3, 0, 8)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind("tcp://127.0.0.1:0")
        connection = Connection([server.getsockopt_string(zmq.LAST_ENDPOINT)])
        try:
            for number, body in enumerate(bodies):
                connection.send(0, m.Request(1, 1, number + 1, body))
            came: list[int] = []
            while len(came) < len(bodies):
                if server.poll(0 if came else 60_000):
                    peer, *frames = server.recv_multipart(copy=False)
                    came.append(decode_frames(frames)[2])
                    if is_answered and len(came) > 1:
                        reply = m.Reply(1, weights(LENGTH * (len(came) - 1)))
                        server.send_multipart([peer.bytes, *encode_frames(reply)])
                else:
                    connection.receive(0.01)
        finally:
            connection.close()
    assert came == [*range(1, len(bodies) + 1)]


def test_what_came_while_a_worker_computed_is_looked_at_before_parts_stop_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtrainer.client.flow_control.STALL", 0.0)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind("tcp://127.0.0.1:0")
        connection = Connection([server.getsockopt_string(zmq.LAST_ENDPOINT)])
        try:
            for body in (ANNOUNCEMENT, *[part(number) for number in range(9)]):
                connection.send(0, m.Request(1, 1, 1, body))
            monkeypatch.setattr("kvtrainer.client.flow_control.STALL", 3600.0)
            peer, *_ = server.recv_multipart()
            server.send_multipart([peer, *encode_frames(m.Reply(1, weights()))])
            assert connection._sockets[0].poll(60_000)
            connection.send(0, m.Request(1, 1, 1, part(9)))
            assert connection.receive(0.0) is not None
            assert connection.receive(0.0) is None
            assert connection._queues[0]
        finally:
            connection.close()


class Workers:
    """Workers that push tables in one order, and send parts of the most urgent ones first, to one server."""

    def __init__(self, seed: int, tables: int, parts: int, count: int) -> None:
        self.rng = random.Random(seed)
        self.parts = parts
        self.windows = [FlowWindow() for _ in range(count)]
        self.pushed = [0] * count
        self.queues: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        """Of each worker (table, part) that wait, the most urgent one first: the last table."""
        self.order = list(range(tables))
        self.rng.shuffle(self.order)
        self.came: Counter[tuple[int, int]] = Counter()
        self.answers: list[list[tuple[int, int]]] = [[] for _ in range(count)]

    def run(self) -> int:
        """Let workers do what they can, in any order; returns how many parts were answered."""
        answered = 0
        while moves := [*self._moves()]:
            worker, what = self.rng.choice(moves)
            window = self.windows[worker]
            if what == "push":
                table = self.order[self.pushed[worker]]
                self.pushed[worker] += 1
                window.sent(ANNOUNCEMENT, table)
                self.queues[worker] += [(-table, number) for number in range(self.parts)]
                self.queues[worker].sort()
            elif what == "send":
                urgency, number = self.queues[worker].pop(0)
                window.sent(part(number, slot=-urgency), -urgency)
                self.came[-urgency, number] += 1
                if self.came[-urgency, number] == len(self.windows):
                    answered += 1
                    for one in self.answers:
                        one.append((-urgency, number))
            else:
                table, number = self.answers[worker].pop(0)
                window.answered(weights((number + 1) * LENGTH, slot=table))
        return answered

    def _moves(self) -> Iterator[tuple[int, str]]:
        for worker, queue in enumerate(self.queues):
            if self.pushed[worker] < len(self.order):
                yield worker, "push"
            if queue and not self.windows[worker].must_hold(
                part(queue[0][1], slot=-queue[0][0]), -queue[0][0], 0.0
            ):
                yield worker, "send"
            if self.answers[worker]:
                yield worker, "take"


def test_workers_that_send_what_is_urgent_first_never_wait_for_each_other() -> None:
    for seed in range(60):
        assert Workers(seed, tables=5, parts=7, count=3).run() == 5 * 7


def test_what_short_parts_a_worker_leaves_behind_go_when_it_looks_in() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.LINGER, 0)
        server.bind("tcp://127.0.0.1:0")
        connection = Connection([server.getsockopt_string(zmq.LAST_ENDPOINT)])
        try:
            for body in (ANNOUNCEMENT, *[part(0, 4096, slot) for slot in range(12)]):
                connection.send(0, m.Request(1, 1, 1, body))
            assert connection._queues[0]
            assert connection.receive(0.0) is None
            assert not connection._queues[0]
        finally:
            connection.close()
