"""What a debugger shows of the objects that hold a round: ids, numbers, the state, what is awaited, and no secrets."""

from __future__ import annotations

import re

import pytest

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.protocol import messages as m
from tests.support.engines import EngineJob
from tests.support.scripted import Bench


def test_a_workers_round_shows_its_tables_its_number_and_the_servers_that_it_waits_for() -> None:
    bench = Bench(2, lambda server, commit: [])
    round_ = bench.start()
    numbers = [server_request.number for server_request in round_.server_requests]
    awaited = ", ".join(f"server {at} (request {number})" for at, number in enumerate(numbers))
    assert repr(round_) == f"<Round 3 of tables ['w']: awaits {awaited}>"
    for server, number in enumerate(numbers):
        bench.servers.reply(server, number, bench.weights(server, 9.0))
    bench.rounds.wait(round_)
    assert repr(round_) == "<Round 3 of tables ['w']: over>"


def test_a_workers_round_that_failed_shows_the_error() -> None:
    bench = Bench(1, lambda server, commit: [bench.failed(server, "WorkerLostError")])
    round_ = bench.start()
    with pytest.raises(Exception, match="of server 0"):
        bench.rounds.wait(round_)
    assert repr(round_).endswith(": over, failed with WorkerLostError>")


def test_the_part_of_a_round_on_one_server_shows_what_is_still_to_come() -> None:
    bench = Bench(2, lambda server, commit: [])
    server_request = bench.start().server_requests[1]
    slices = len(bench.plan.slices_of(1))
    told = repr(server_request)
    assert f"for server 1, request {server_request.number}" in told
    assert "awaits the end for tables 'w'" in told
    assert f"{slices} slices are to come" in told


def test_a_workers_session_and_table_show_where_they_stand() -> None:
    bench = Bench(1, lambda server, commit: [])
    number = bench.start().server_requests[0].number
    assert repr(bench.session) == (
        f"<Session of rank 0 of 2 in 'job' with 1 servers: awaits answers to requests {number}>"
    )
    assert repr(bench.table) == "<RemoteTable 'w', next round 3, initialised, numbers {0: 5}>"
    bench.session.close("done", is_clean=True)
    assert "closed" in repr(bench.session)


def test_requests_for_rows_and_control_show_which_servers_have_not_answered() -> None:
    session = Bench(2, lambda server, commit: []).session
    calls = session.begin([(0, m.Stats()), (1, m.Stats())])
    first, second = calls.numbers
    calls.take(0, first, m.Status())
    assert repr(calls) == f"<Calls, 2 requests: awaits server 1 (Stats {second})>"
    calls.take(1, second, m.Status())
    assert repr(calls) == "<Calls, 2 requests: nothing is awaited>"


def test_a_server_shows_who_is_missing_from_a_round() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    job.commit(0, 1, 1.0)
    space = job.engine.namespaces["j"]
    shared = space.rounds.shared
    assert re.search(r"of 2 members: round 1 of table 0 waits for ranks \[1\]>", repr(shared))
    assert re.search(r"committed tables \[0\], 1 slices are here", repr(shared.inputs[0]))
    assert re.search(r"'j', sync, 2 workers, 1 tables: round 1 of 't' waits for ranks \[1\]>", repr(space))
    assert re.search(r"<Table 0 't', version 0: ready>", repr(space.tables[0]))
    job.commit(1, 1, 1.0)
    assert "nothing waits" in repr(shared)
    assert "nothing waits" in repr(space)


def test_a_server_shows_a_read_that_waits_and_whose_it_is() -> None:
    job = EngineJob(2, Mode("ssp", 0))
    job.commit(0, 1, 1.0)
    job.ask(0, m.Pull((0,), 30.0), 77)
    [wait] = job.engine.namespaces["j"].waits.all.values()
    assert "of request 77 of rank 0 for a read of table 0" in repr(wait)


def test_a_server_shows_a_session_without_its_token_its_nonce_or_its_sockets() -> None:
    job = EngineJob(1, SYNCHRONOUS)
    [session] = list(job.engine._sessions)
    assert "of rank 0 of 'j' (h0): UNKNOWN, last heard at 0.000" in repr(session)
    assert str(session.token) not in repr(session)
    assert "b'" not in repr(session)
