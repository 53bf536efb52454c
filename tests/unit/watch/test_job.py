"""A job as its servers tell of it at two moments."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtrainer.watch.job import JobStatus, JobView, job_view_as_values, job_view_of


def worker(
    rank: int, late: float = 0.0, says: dict[str, float] | None = None, **other: Any
) -> dict[str, Any]:
    return {
        "rank": rank, "state": "here", "why": "", "address": f"host:{rank}", "silence": 0.5, "late": late,
        "joined": False, "round": -1, "says": says or {}, **other,
    }  # fmt: skip


def job(workers: list[dict[str, Any]], name: str = "train", **other: Any) -> dict[str, Any]:
    return {
        "name": name, "mode": "sync", "staleness": 0, "num_workers": len(workers), "rounds": 0, "waited": 0.0,
        "round_seconds": {"bounds": [0.1, 1.0], "counts": [0, 0, 0], "sum": 0.0}, "age": 60.0,
        "updates": 0, "tables": 1, "keys": 3, "bytes_in": 0, "bytes_out": 0, "messages_in": 0, "memory": 0,
        "workers": workers, "waits": [], "errors": [], **other,
    }  # fmt: skip


def server(*jobs: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "server": 0, "num_servers": 1, "memory": 5, "max_memory": 9, "is_stopping": False, "num_jobs": 1,
        "queued": 7, "uptime": 90.0, "cpu_seconds": 4.0, "clock": 500.0, "jobs": list(jobs),
        "is_authenticated": True, "refused": 0, **other,
    }  # fmt: skip


def seen(before: list[Any], now: list[Any], seconds: float = 2.0) -> JobView:
    """What is seen of servers that gave these answers, the second ones so many seconds after the first."""
    now = [
        facts and {**facts, **{name: facts[name] + seconds for name in ("uptime", "clock")}} for facts in now
    ]
    return job_view_of(
        JobStatus(10.0, before), JobStatus(10.0 + seconds, now), [f"tcp://s:{at}" for at in range(len(now))]
    )


def test_counts_become_rates() -> None:
    before = server(job([worker(0)], rounds=4, bytes_in=100))
    view = seen([before], [server(job([worker(0)], rounds=10, bytes_in=700, updates=9), cpu_seconds=5.5)])
    assert (view.jobs[0].rounds, view.jobs[0].updates) == (3.0, 9)
    assert view.servers[0].bytes_in == 300.0
    assert view.servers[0].cpu == 0.75


def test_rates_are_by_the_clock_of_the_server_that_counted() -> None:
    before, now = server(job([worker(0)])), server(job([worker(0)], rounds=10), clock=505.0, uptime=95.0)
    view = job_view_of(JobStatus(10.0, [before]), JobStatus(11.0, [now]), ["tcp://s:0"])
    assert view.jobs[0].rounds == 2.0


def test_a_server_that_was_started_again_has_no_rates_yet() -> None:
    before = server(job([worker(0)], rounds=100, bytes_in=9000))
    now = server(job([worker(0)], rounds=3, bytes_in=50), uptime=1.0, clock=502.0)
    view = job_view_of(JobStatus(10.0, [before]), JobStatus(12.0, [now]), ["tcp://s:0"])
    assert (view.jobs[0].rounds, view.servers[0].bytes_in, view.servers[0].cpu) == (0.0, 0.0, 0.0)


def test_the_step_of_a_job_is_that_of_its_furthest_worker_or_its_rounds() -> None:
    told = server(job([worker(0, says={"steps": 7}), worker(1, says={"steps": 9})], rounds=40))
    silent = server(job([worker(0)], rounds=40))
    assert [seen([one], [one]).jobs[0].step for one in (told, silent)] == [9, 40]


def test_the_slowest_worker_is_the_one_that_the_others_waited_for() -> None:
    before = server(job([worker(0, 5.0), worker(1, 1.0)]))
    view = seen([before], [server(job([worker(0, 5.5), worker(1, 2.5)]))])
    assert [one.late for one in view.jobs[0].workers] == [0.25, 0.75]
    assert view.jobs[0].slowest == view.jobs[0].workers[1]


def test_a_wait_that_is_not_over_counts_for_who_is_missing_and_for_who_waits() -> None:
    def facts(late: float, seconds: float, *waits: float) -> dict[str, Any]:
        says = {"seconds": seconds, "steps": 5, "step_seconds": 1.0, "wait_seconds": 1.0}
        open_waits = [{"what": "a round", "seconds": one, "missing": [1]} for one in waits]
        return server(job([worker(0, 0.0, says), worker(1, late, says)], waits=open_waits))

    first, second, third = facts(1.0, 10.0), facts(1.0, 12.0, 1.5), facts(3.0, 14.0)
    waiting, missing = seen([first], [second]).jobs[0].workers
    assert (waiting.late, waiting.waits, waiting.works) == (0.0, 0.75, 0.25)
    assert (missing.late, missing.waits) == (0.75, 0.0)
    assert seen([second], [third]).jobs[0].workers[1].late == 0.25, "it has been told of before"


def test_a_worker_that_is_silent_does_nothing() -> None:
    says = {"seconds": 10.0, "steps": 20, "step_seconds": 4.0, "wait_seconds": 1.0}
    facts = server(job([worker(0, 0.0, says, silence=8.0)]))
    [one] = seen([facts], [facts]).jobs[0].workers
    assert (one.steps, one.works, one.waits) == (0.0, 0.0, 0.0)


def test_a_wait_of_which_several_servers_tell_is_one_as_long_as_the_longest() -> None:
    def facts(*waits: tuple[str, float, int]) -> dict[str, Any]:
        told = [{"what": what, "seconds": seconds, "missing": [rank]} for what, seconds, rank in waits]
        return server(job([worker(0), worker(1)], waits=told))

    now = [facts(("round 7", 2.0, 1), ("a barrier", 9.0, 1)), facts(("round 7", 3.0, 1), ("round 7", 1.0, 0))]
    found = [(one.what, one.seconds, one.missing) for one in seen(now, now).jobs[0].waits]
    assert found == [("a barrier", 9.0, [1]), ("round 7", 3.0, [1]), ("round 7", 1.0, [0])]


def test_no_worker_is_slowest_where_none_waited() -> None:
    assert seen([server(job([worker(0)]))], [server(job([worker(0)]))]).jobs[0].slowest is None


def test_shares_of_a_worker_are_parts_of_its_own_time() -> None:
    said = {"seconds": 10.0, "steps": 10, "step_seconds": 2.0, "wait_seconds": 1.0, "samples": 100}
    says = {
        "seconds": 14.0,
        "steps": 18,
        "step_seconds": 3.0,
        "wait_seconds": 1.5,
        "samples": 300,
        "loss": 0.5,
    }
    [one] = seen([server(job([worker(0, 0.0, said)]))], [server(job([worker(0, 0.0, says)]))]).jobs[0].workers
    assert (one.steps, one.samples, one.works, one.waits, one.loss) == (2.0, 50.0, 0.75, 0.125, 0.5)


def test_a_worker_that_said_nothing_new_is_shown_as_it_was_so_far() -> None:
    says = {"seconds": 10.0, "steps": 20, "step_seconds": 4.0, "wait_seconds": 1.0}
    facts = server(job([worker(0, 0.0, says)]))
    [one] = seen([facts], [facts]).jobs[0].workers
    assert (one.steps, one.works, one.waits) == (2.0, 0.6, 0.1)


def test_what_servers_say_of_a_worker_is_put_together_by_the_worst() -> None:
    there, gone = worker(0, 1.0, silence=0.25), worker(0, 3.0, state="failed", why="killed", silence=-1.0)
    before = [server(job([worker(0)])), server(job([worker(0)]))]
    [one] = seen(before, [server(job([there])), server(job([gone]))], 4.0).jobs[0].workers
    assert (one.state, one.why, one.late) == ("failed", "killed", 0.75)


def test_a_server_that_does_not_answer_leaves_the_others_shown() -> None:
    view = seen([server(job([worker(0)])), None], [server(job([worker(0)])), None])
    assert [one.is_there for one in view.servers] == [True, False]
    assert len(view.jobs) == 1


def test_a_server_that_answers_again_is_shown_without_rates() -> None:
    view = seen([None], [server(job([worker(0, 7.0)], rounds=50))])
    assert view.jobs[0].rounds == 0.0
    assert view.jobs[0].workers[0].late == 0.0


def test_a_namespace_without_keys_is_shown_only_where_there_is_no_other() -> None:
    empty, full = job([worker(0)], "store", keys=0), job([worker(0)], "store/trainer")
    assert [one.name for one in seen([server(empty, full)], [server(empty, full)]).jobs] == ["store/trainer"]
    assert [one.name for one in seen([server(empty)], [server(empty)]).jobs] == ["store"]


def test_a_job_is_shown_while_the_server_with_its_keys_does_not_answer() -> None:
    outer, inner = job([worker(0)], "store", keys=0), job([worker(0)], "store/trainer", keys=0)
    view = seen([server(outer, inner), None], [server(outer, inner), None])
    assert [one.name for one in view.jobs] == ["store/trainer"]


def test_a_view_as_values_survives_json() -> None:
    facts = server(job([worker(0, 2.0)], waits=[{"what": "w", "seconds": 1.0, "missing": [0]}]))
    values = job_view_as_values(seen([facts], [facts]))
    assert json.loads(json.dumps(values)) == values
    assert values["jobs"][0]["waits"] == [{"what": "w", "seconds": 1.0, "missing": [0]}]


@pytest.mark.parametrize(("mode", "shown"), [("sync", "sync"), ("ssp", "ssp(3)"), ("async", "async")])
def test_the_mode_names_its_staleness(mode: str, shown: str) -> None:
    facts = server(job([worker(0)], mode=mode, staleness=3 if mode == "ssp" else 0))
    assert seen([facts], [facts]).jobs[0].mode == shown


def test_workers_with_rounds_of_their_own_are_so_many_behind_the_first() -> None:
    facts = server(job([worker(rank, round=at) for rank, at in enumerate((7, 9, 4))], mode="async"))
    [seen_now] = seen([facts], [facts]).jobs
    assert [one.behind for one in seen_now.workers] == [2, 0, 5]
    assert seen_now.last == seen_now.workers[2]


def test_of_workers_that_have_ended_or_share_their_rounds_none_is_behind() -> None:
    ended = [worker(0, round=9), worker(1, round=4, state="left")]
    for workers in (ended, [worker(0), worker(1)]):
        facts = server(job(workers))
        assert seen([facts], [facts]).jobs[0].last is None


def test_how_many_rounds_a_worker_was_left_out_of_is_what_the_server_says_that_knows_most() -> None:
    told = [worker(0), worker(1, left_out=3)], [worker(0, left_out=1), worker(1, left_out=2)]
    servers = [server(job(one), server=at, num_servers=2) for at, one in enumerate(told)]
    [shown] = seen(servers, servers).jobs
    assert [one.left_out for one in shown.workers] == [1, 3]
