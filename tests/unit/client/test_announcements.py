"""Workers announce their commits where a network lies between, and take weights that come slice by slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvstore_server.protocol import messages as m
from kvstore_server.shard.norms import Decision, Guard
from tests.support.scripted import SLOT, Bench, Scripted, is_announcement


def part(bench: Bench, server: int, slices: slice, value: float, version: int) -> m.Weights:
    """New weights of some of a server's slices, all of one value."""
    whole = bench.weights(server, value, version)
    return m.Weights(whole.parts[slices], whole.payloads[slices])


def announcements(bench: Bench) -> list[m.Contribute]:
    found = bench.servers.bodies(m.Contribute)
    return [body for body in found if isinstance(body, m.Contribute) and is_announcement(body)]


def test_a_commit_is_announced_to_every_server_before_its_slices() -> None:
    bench = Bench(2, lambda server, _: [bench.weights(server, 9.0)])
    bench.rounds.wait(bench.rounds.start(bench.contribution(rescale=0.5, hyper=b"numbers")))
    for server in range(2):
        first, *others = [r.body for to, r in bench.servers.sent if to == server]
        last = others[-1]
        assert isinstance(first, m.Contribute)
        assert isinstance(last, m.Contribute)
        assert not len(first.pushes)
        assert first.commits[:, :5].tolist() == last.commits[:, :5].tolist()
        assert (first.commits[:, m.COMMIT_FLAGS] ^ last.commits[:, m.COMMIT_FLAGS]).tolist() == [
            m.DECLARES_INTENT
        ]
        assert (first.rescale, first.hyper) == (last.rescale, last.hyper) == (0.5, b"numbers")


@pytest.mark.parametrize(
    "said",
    [
        {"veto": True},
        {"assign": True},
        {"joined": True},
        {"is_incremental": True},
        {"absent": frozenset({0})},
        {"guard": Guard(2.0, lambda _: Decision())},
    ],
)
def test_what_needs_the_whole_round_is_not_announced(said: dict[str, Any]) -> None:
    bench = Bench(1, lambda *_: [])
    bench.rounds.start(bench.contribution(**said))
    assert not announcements(bench)


def test_a_worker_that_wants_no_weights_announces_nothing() -> None:
    bench = Bench(1, lambda *_: [])
    bench.rounds.start(bench.contribution()._replace(outs=None))
    assert not announcements(bench)


@pytest.mark.parametrize("servers", [1, 2])
def test_through_shared_memory_slices_have_their_commit_with_them_unless_another_server_gets_one(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "is_remote", lambda *_: False)
    monkeypatch.setattr(Scripted, "channel", lambda *_: object())
    bench = Bench(servers, lambda server, _: [bench.weights(server, 9.0)], 1 << 16)
    bench.run()
    sent = [r.body for _, r in bench.servers.sent if isinstance(r.body, m.Contribute)]
    brought = [(len(body.pushes) > 0, len(body.commits) > 0) for body in sent]
    assert brought == ([(True, True)] if servers == 1 else [(True, False)] * 2 + [(False, True)] * 2)


def test_nothing_is_announced_where_no_network_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "is_remote", lambda *_: False)
    bench = Bench(2, lambda server, _: [bench.weights(server, 9.0)])
    bench.run()
    assert not announcements(bench)


def test_slices_that_are_sent_again_do_not_change_weights_that_came_before() -> None:
    bench = Bench(1, lambda *_: [], numel=1 << 15)
    ticket = bench.start()
    number = ticket.server_requests[0].number
    bench.servers.reply(0, number, part(bench, 0, slice(1), 4.0, 4))
    bench.servers.reply(0, number, m.Missing(5, 3, tuple(range(100, 108))))
    bench.servers.reply(0, number, part(bench, 0, slice(1, None), 4.0, 4))
    bench.rounds.wait(ticket)
    assert bench.out.unique().tolist() == [4.0]


def test_a_round_of_which_some_gradients_were_replaced_names_those_that_count_as_they_went_ahead() -> None:
    bench = Bench(1, lambda *_: [])
    slices = bench.plan.slices[:2]
    for slice_ in slices:
        bench.rounds.push_eagerly(bench.table, slice_, [torch.ones(one.numel) for one in slice_.segments])
    changed = bench.contribution()
    assert changed.values is not None
    changed.values[0]["float32"][0] = 7.0
    bench.rounds.start(changed)
    [said] = announcements(bench)
    assert said.commits[:, m.COMMIT_COUNT : m.COMMIT_VERSION].tolist() == [[8, 7]]
    assert said.pushes.tolist() == [[SLOT + 1, 3, 0, 0]]


def test_a_round_is_announced_of_which_some_slices_went_ahead_as_they_are() -> None:
    bench = Bench(1, lambda *_: [])
    slice_ = bench.plan.slices[1]
    bench.rounds.push_eagerly(bench.table, slice_, [torch.ones(one.numel) for one in slice_.segments])
    bench.rounds.start(bench.contribution())
    [said] = announcements(bench)
    assert said.commits[:, m.COMMIT_COUNT : m.COMMIT_VERSION].tolist() == [[len(bench.plan.slices), 0]]
