"""Scripted servers that are gone and come back: who is waited for, for how long, and what is sent again."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvstore_server.errors import RoundAbortedError
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.processes import ProcessState
from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision, Guard
from kvtrainer.client.absences import PROBE_INTERVAL, SETTLE_TIME, Absences
from kvtrainer.client.contribution import Contribution
from kvtrainer.client.session import REPEAT_AFTER, Session
from kvtrainer.errors import KVStoreError, ServerLostState, ServerStoppingError, ServerUnreachableError
from tests.support.scripted import Bench, Scripted, add_table, is_commit

WAIT = 60.0
"""Seconds for which servers are waited for here."""


class Restarting(Scripted):
    """One server or more that are silent from `gone_at` to `back_at`, and otherwise answer Stats and heartbeats.

    What it is sent while it is gone is lost.
    """

    def __init__(self, num_servers: int = 1, gone: int = 0) -> None:
        super().__init__(num_servers, self._act)
        self.restart_timeout = WAIT
        self.gone, self.gone_at, self.back_at = gone, 110.0, 120.0
        self.unheard: list[m.Request] = []
        """What the server was sent while it was gone."""

    def send(self, server: int, request: m.Request, priority: int = 0) -> None:
        if server == self.gone and self.now >= self.gone_at and isinstance(request.body, m.Heartbeat):
            # The socket keeps a probe until it is connected.
            self.sent.append((server, request))
            self.reply(server, request.number, m.Pending(()), max(self.back_at - self.now, 0.0))
            return
        super().send(server, request, priority)

    def _act(self, server: int, request: m.Request) -> list[m.ReplyBody] | None:
        if server == self.gone and self.gone_at <= self.now < self.back_at:
            self.unheard.append(request)
            return []
        return [m.Status()] if isinstance(request.body, m.Stats) else None


def _gone(**options: float) -> tuple[Restarting, Session]:
    """A connected worker whose only server is gone, so that a call meets that."""
    servers = Restarting()
    session = servers.session(**options)
    servers.now = servers.gone_at
    servers.ended.add(0)
    return servers, session


def test_a_call_is_answered_by_the_next_process_of_a_server_whose_process_has_ended() -> None:
    servers, session = _gone(dead_after=5.0)  # less than the server is gone
    assert session.call(0, m.Stats()) == m.Status()
    assert servers.now == servers.back_at
    assert set(servers.reconnected) == {0}
    assert servers.reopened == [(0, 1000, 10)]
    assert len({r.number for _, r in servers.sent if isinstance(r.body, m.Stats)}) == 1


def test_a_server_that_is_gone_and_back_makes_one_line_of_the_log_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, session = _gone(slow_after=WAIT)
    session.call(0, m.Stats())
    gone, back = [record.getMessage() for record in caplog.records]
    killed = "was killed by signal 9 (SIGKILL)"
    assert gone == f"server 0 (here) {killed}; waiting up to 60 s for it to come back"
    assert back.startswith("server 0 (here) is back after 9.")


def test_a_server_that_does_not_come_back_in_time_is_named_with_how_its_process_ended() -> None:
    servers, session = _gone(dead_after=5.0, timeout=1.0)
    servers.back_at = 1000.0
    servers.how_ended = lambda server: "was killed by signal 9 (SIGKILL)"  # type: ignore[method-assign]
    with pytest.raises(ServerUnreachableError, match=r"server 0 \(here\) was killed by signal 9.* 60 s"):
        session.call(0, m.Stats())
    assert servers.now == pytest.approx(servers.gone_at + WAIT, abs=2 * PROBE_INTERVAL)


def test_a_later_call_to_a_server_that_did_not_come_back_gives_it_a_short_while() -> None:
    servers, session = _gone()
    servers.back_at = 1000.0
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    before = servers.now
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    assert servers.now == pytest.approx(before + REPEAT_AFTER, abs=PROBE_INTERVAL)
    servers.back_at = servers.now + 1.0
    session._probe(0)
    assert session.call(0, m.Stats()) == m.Status()


def test_without_a_time_to_restart_the_end_of_a_process_is_an_error_as_ever() -> None:
    servers = Restarting()
    servers.restart_timeout = 0.0
    session = servers.session()
    servers.now = servers.gone_at
    servers.ended.add(0)
    with pytest.raises(ServerUnreachableError, match="the process of server 0"):
        session.call(0, m.Stats())
    assert servers.now < servers.gone_at + 1.0
    assert servers.reconnected == []


def test_a_server_over_a_network_is_gone_once_its_connection_is_closed() -> None:
    servers, session = _gone()
    servers.ended.clear()
    servers.disconnected.add(0)
    assert session.call(0, m.Stats()) == m.Status()
    assert servers.now == servers.back_at


def test_a_silent_server_is_waited_for_as_long_again_and_not_blamed() -> None:
    servers, session = _gone(dead_after=8.0)
    servers.ended.clear()
    servers.back_at = servers.gone_at + 40.0
    assert session.call(0, m.Stats(), timeout=WAIT) == m.Status()
    assert servers.now == servers.back_at


def test_the_last_words_of_a_server_are_heard_before_it_counts_as_gone() -> None:
    servers, session = _gone()
    servers.reply(0, 0, m.Failed("ServerStoppingError", "server 0 was stopped"), after=0.5 * SETTLE_TIME)
    with pytest.raises(ServerStoppingError):
        session.call(0, m.Stats())
    assert servers.reconnected == []


def test_a_server_that_comes_back_without_the_state_of_the_job_is_no_longer_waited_for() -> None:
    servers, session = _gone()
    lost = m.Failed("ServerLostState", "server 0 was restarted")
    servers.gone_at = 200.0
    servers.answer = lambda server, request: [lost] if servers.reconnected else []
    servers.send = super(Restarting, servers).send  # type: ignore[method-assign]
    before = servers.now
    with pytest.raises(ServerLostState):
        session.call(0, m.Stats())
    assert servers.now < before + 1.0
    assert servers.reopened == []


def test_a_server_that_ends_again_before_it_has_answered_is_connected_to_again_at_once() -> None:
    servers, session = _gone()
    receive = servers.receive

    def ends_again(timeout: float) -> tuple[int, m.Reply] | None:
        if servers.now > servers.gone_at + 3.0:
            servers.receive = receive  # type: ignore[method-assign]
            servers.ended.add(0)
            servers.reconnected.clear()
            return None
        return receive(timeout)

    servers.receive = ends_again  # type: ignore[method-assign]
    assert session.call(0, m.Stats()) == m.Status()
    assert servers.reconnected
    assert servers.ended == set()
    assert servers.now == servers.back_at


def test_a_server_whose_memory_cannot_be_shared_yet_is_asked_again_until_it_can() -> None:
    servers, session = _gone()
    servers.may_reopen = False
    receive = servers.receive

    def later(timeout: float) -> tuple[int, m.Reply] | None:
        servers.may_reopen = servers.now >= servers.back_at + 3.0
        return receive(timeout)

    servers.receive = later  # type: ignore[method-assign]
    assert session.call(0, m.Stats()) == m.Status()
    assert servers.back_at + 3.0 <= servers.now <= servers.back_at + 3.0 + 16 * PROBE_INTERVAL


def test_the_wait_for_another_server_goes_on_while_one_is_gone() -> None:
    servers = Restarting(2, gone=1)
    session = servers.session()
    servers.now = servers.gone_at
    servers.ended.add(1)
    servers.back_at = 1000.0
    servers.answer = lambda server, request: []
    servers.reply(0, session._last_number + 1, m.Status(), after=5.0)
    assert session.call(0, m.Stats()) == m.Status()
    assert servers.now == servers.gone_at + 5.0


def test_while_a_server_is_gone_others_are_not_asked_more_often() -> None:
    servers = Restarting(2, gone=1)
    session = servers.session()
    servers.now = servers.gone_at
    servers.ended.add(1)
    again: list[int] = []
    asked = [SimpleNamespace(server=server) for server in range(2)]
    assert not session.wait(asked, lambda one: again.append(one.server), servers.now, 9.0)
    assert again.count(0) <= 19 / REPEAT_AFTER


def test_requests_that_nobody_waits_for_yet_are_repeated_when_the_server_is_back() -> None:
    servers, session = _gone()
    prefetched = session.begin([(0, m.Stats())])
    assert session.call(0, m.Stats()) == m.Status()
    before = servers.now
    assert session.finish(prefetched) == [m.Status()]
    assert servers.now == before


def test_nothing_is_sent_to_a_server_that_is_gone_except_probes() -> None:
    servers, session = _gone()
    session.call(0, m.Stats())
    late = [r for r in servers.unheard if not isinstance(r.body, m.Stats)]  # one was sent before it was known
    assert late == []
    assert len(servers.unheard) <= 2


def test_a_process_that_stood_still_gives_a_server_that_is_gone_as_much_more_time() -> None:
    servers, session = _gone()
    receive = servers.receive

    def stops_once(timeout: float) -> tuple[int, m.Reply] | None:
        if servers.reconnected:
            servers.receive = receive  # type: ignore[method-assign]
            servers.now += 200.0
            servers.back_at = servers.now + 5.0
            servers._replies.clear()
            return None
        return receive(timeout)

    servers.receive = stops_once  # type: ignore[method-assign]
    assert session.call(0, m.Stats()) == m.Status()


def test_whoever_only_looks_does_not_wait_for_a_server_that_is_gone() -> None:
    servers, session = _gone()
    servers.back_at = 1000.0
    session.ask_all([(0, m.Stats())], timeout=1.0)
    before = servers.now
    assert session.ask_all([(0, m.Stats())], timeout=5.0) == [None]
    assert servers.now == before


def test_whoever_has_to_know_waits_longer_than_its_own_time_for_a_server_that_is_gone() -> None:
    servers, session = _gone()
    assert session.ask_all([(0, m.Stats())], timeout=5.0, awaits_restarts=True) == [m.Status()]
    assert servers.now == servers.back_at


def test_a_paused_server_is_named_as_paused(caplog: pytest.LogCaptureFixture) -> None:
    servers, session = _gone(dead_after=4.0)
    servers.ended.clear()
    servers.states[0] = ProcessState.STOPPED
    assert session.call(0, m.Stats(), timeout=WAIT) == m.Status()
    assert "its process is paused" in caplog.text


def test_closing_says_goodbye_to_no_server_that_is_gone() -> None:
    servers, session = _gone()
    servers.back_at = 1000.0
    with pytest.raises(ServerUnreachableError):
        session.call(0, m.Stats())
    session.close("it is done", is_clean=True)
    assert servers.bodies(m.Leave) == []


# ---------------------------------------------------------------- rounds


class Restarted(Bench):
    """Servers that answer commits with the value 2.0, of which the last ends when it is sent its first commit."""

    def __init__(self, num_servers: int, **options: float) -> None:
        self.last = num_servers - 1
        self.is_back = False
        super().__init__(num_servers, self._answers, restart_timeout=WAIT, **options)

    def _answers(self, server: int, body: m.Contribute) -> Iterable[m.ReplyBody]:
        if server == self.last and not self.is_back:
            self.end()
            return self.first_answers(server, body)
        return self.answers(server, body)

    def first_answers(self, server: int, body: m.Contribute) -> Iterable[m.ReplyBody]:
        """What the last server answers before it ends."""
        return []

    def answers(self, server: int, body: m.Contribute) -> Iterable[m.ReplyBody]:
        return [self.weights(server, 2.0)]

    def end(self) -> None:
        self.servers.ended.add(self.last)

    def _answer(self, server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if isinstance(request.body, m.Heartbeat) and server == self.last and not self.is_back:
            self.is_back = True
            self.servers.sent.clear()
            return [m.Pending(())]
        if server in self.servers.ended:
            return []
        return super()._answer(server, request)

    def slices(self, server: int) -> set[int]:
        """The slots of which the server was sent something since the last one came back."""
        bodies: list[Any] = self.servers.bodies(m.Contribute, server)
        return {m.unpack_slot(word)[0] for body in bodies for word in body.pushes[:, m.PUSH_SLOT].tolist()}


def test_a_server_that_is_back_gets_all_slices_and_commits_of_the_open_round() -> None:
    bench = Restarted(2)
    bench.run()
    assert bench.out.eq(2.0).all()
    assert len(bench.slices(1)) == len(bench.plan.slices_of(1))
    assert [is_commit(r.body) for to, r in bench.servers.sent if to == 1].count(True) == 1
    assert bench.table.round == 4


def test_a_server_that_has_answered_before_it_ended_is_not_sent_the_round_again() -> None:
    bench = Restarted(2)
    bench.first_answers = lambda server, body: [bench.weights(1, 2.0)]  # type: ignore[method-assign]
    bench.run()
    assert [is_commit(r.body) for to, r in bench.servers.sent if to == 1].count(True) == 1


def test_weights_that_a_server_has_sent_before_it_ended_are_not_mixed_with_those_of_its_next_process() -> (
    None
):
    bench = Restarted(1, numel=1 << 20)  # type: ignore[arg-type]
    slices = bench.plan.slices_of(0)
    assert len(slices) > 1
    parts = [(100, 3, m.WHOLE, 4 * slices[0].length)]
    early = m.Weights(m.matrix(parts, 4), (torch.full((slices[0].length,), 9.0),))
    bench.first_answers = lambda server, body: [early]  # type: ignore[method-assign]
    bench.run()
    assert bench.out.eq(2.0).all()  # of the same version, but a round that is done again may end otherwise


def test_a_round_that_failed_on_another_server_is_aborted_on_one_that_is_back_before_its_commit() -> None:
    bench = Restarted(2)
    done: list[m.RequestBody] = []

    def answers(server: int, body: m.Contribute) -> list[m.ReplyBody]:
        return [bench.failed(server, "WorkerLostError" if server == 0 else "RoundAbortedError")]

    bench.answers = answers  # type: ignore[method-assign]
    with pytest.raises(KVStoreError) as caught:
        bench.run()
    assert not isinstance(caught.value, RoundAbortedError)
    done += [r.body for to, r in bench.servers.sent if to == 1 and not isinstance(r.body, m.Heartbeat)]
    assert isinstance(done[0], m.Abort)
    assert is_commit(done[1])
    assert bench.slices(1) == set()  # so it cannot be applied there
    assert bench.table.broken is None


def test_a_server_that_ended_while_it_held_a_sum_measures_again_before_it_is_told_the_decision() -> None:
    decided: list[float] = []

    def decide(measured: Any) -> Decision:
        decided.append(measured.norm)
        return Decision(coef=0.5)

    bench = Restarted(2)
    guard = Guard(2.0, decide)

    def held(server: int) -> m.Held:
        return m.Held(server + 5, 3, ((server, 3.0 + server),), True)

    bench.first_answers = lambda server, body: [held(1)]  # type: ignore[method-assign]
    bench.answers = lambda server, body: [held(server)]  # type: ignore[method-assign]
    resolved: list[int] = []
    base = bench._answer

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if isinstance(request.body, m.Resolve):
            if server not in bench.servers.ended:
                resolved.append(server)
            return [bench.weights(server, 2.0)] if server not in bench.servers.ended else []
        return base(server, request)

    bench.servers.answer = answer
    bench.rounds.wait(bench.rounds.start(bench.contribution(guard=guard)))
    assert decided == [5.0]
    assert sorted(resolved) == [0, 1]
    assert bench.out.eq(2.0).all()


def test_every_open_round_is_sent_again_also_one_that_is_not_waited_for() -> None:
    """Two workers that wait for different keys of one server would otherwise wait for each other."""
    bench = Restarted(1)
    bench.answers = lambda server, body: []  # type: ignore[method-assign]
    other = add_table(bench.rounds, "x", make_plan([TensorSpec("x", (4,), "float32")], 1), 40, 3)
    out = {"float32": torch.zeros(16)}
    first = bench.rounds.start(Contribution([other], [out], [out]))
    bench.start()  # ends the server, as its first commit has
    session = bench.session
    while not bench.is_back:
        session.wait([SimpleNamespace(server=0)], lambda one: None, bench.servers.now, 1.0)
    session.process_received()
    numbers = {int(r.body.commits[0, m.COMMIT_TABLE]) for _, r in bench.servers.sent if is_commit(r.body)}  # type: ignore[union-attr]
    assert numbers == {5, 40}
    assert not first.is_over


# ---------------------------------------------------------------- absences


def test_a_probe_is_due_at_intervals_and_the_time_of_a_server_ends_once() -> None:
    absences = Absences()
    absences.timeouts[2] = 10.0
    assert absences.begin(2, "ended", 100.0)
    assert not absences.begin(2, "ended again", 101.0)
    assert absences.gone[2].why == "ended"
    assert absences.take_due(101.1) == []
    assert absences.next_check(101.1) == pytest.approx(2 * PROBE_INTERVAL - 0.1)
    assert absences.take_due(102.1) == [2]
    assert absences.take_due(102.1) == []
    assert absences.gone[2].probe_at == pytest.approx(102.1 + 4 * PROBE_INTERVAL)
    assert not absences.is_over(2, 109.9)
    assert absences.is_over(2, 110.0)
    assert absences.is_hopeless(2, wait_began=109.0, now=110.0)
    assert not absences.is_hopeless(2, wait_began=200.0, now=201.0)
    assert absences.is_hopeless(2, wait_began=200.0, now=202.0)
    absences.extend(5.0)
    assert not absences.is_over(2, 112.0)
