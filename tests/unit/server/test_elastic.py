"""What a server answers where the members of a job may change."""

from __future__ import annotations

from typing import Any

import torch

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import SYNCHRONOUS
from kvstore_server.engine.views import MemberView as View
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from tests.sim.schedule import Adding
from tests.sim.workers import packed, tiny_slices
from tests.support.engines import DEAD_AFTER, EngineJob

VIEW: dict[str, Any] = {"view": 0, "members": (0, 1)}


def test_a_rank_that_joins_is_told_that_the_round_before_has_failed() -> None:
    job = EngineJob(3, SYNCHRONOUS, first=False, initial_workers=2, min_workers=1)
    for rank in (0, 1):
        job.commit(rank, 0, None if rank else 1.0, **VIEW)
    job.commit(0, 1, 1.0, **VIEW)
    job.commit(2, 1, flags=m.WANTS_WEIGHTS | m.REPEATS, number=77, **VIEW)
    assert all(isinstance(body, m.Pending) for body in job.replies[2, 77])
    job.ask(1, m.Abort(0, 1, "no memory", False))
    [told] = job.tick()[2, 77]
    assert isinstance(told, m.Failed)
    assert (told.code, told.table, told.round, told.next_round) == ("RoundAbortedError", 0, 1, 2)


ALL: dict[str, Any] = {"view": 1, "members": (0, 1, 2), "num_backup": 1}
"""The view of the rounds after the first one, which leave out one of three ranks."""
WANTS = m.WANTS_WEIGHTS


def backup_job() -> EngineJob:
    job = EngineJob(3, SYNCHRONOUS, first=False, initial_workers=3, min_workers=1, backup_workers=1)
    for rank in range(3):
        job.commit(rank, 0, None if rank else 0.0, view=0, members=(0, 1, 2))
    return job


def total(job: EngineJob) -> float:
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    return float(weights.payloads[0][0])


def told(job: EngineJob, rank: int, number: int) -> list[str]:
    return [type(body).__name__ for body in job.replies.get((rank, number), [])]


def test_a_round_ends_with_the_first_that_commit_it_and_the_late_one_gets_the_weights() -> None:
    job = backup_job()
    job.commit(2, 1, 1.0, flags=WANTS, number=50, **ALL)
    assert told(job, 2, 50) == []
    job.commit(0, 1, 10.0, flags=WANTS, number=51, **ALL)
    assert total(job) == 11.0
    assert told(job, 2, 50) == told(job, 0, 51) == ["Members", "Members", "Weights"]
    closed, following = job.replies[0, 51][:2]
    assert closed == m.Members(0, 1, 2, (0, 2), closes=True)
    assert following == m.Members(0, 2, 3, (0, 1, 2), num_backup=1)
    job.commit(1, 1, 100.0, flags=WANTS, number=52, **ALL)
    assert total(job) == 11.0
    assert job.replies[1, 52][0] == m.LeftOut(0, 2, 1, False, (), (0, 1, 2), 3, 1, 2, (0, 2))
    assert told(job, 1, 52) == ["LeftOut", "Weights"]


def test_a_late_gradient_counts_in_no_later_round() -> None:
    job = backup_job()
    job.push(1, 1, 100.0)
    for rank in (0, 2):
        job.commit(rank, 1, 1.0, **ALL)
    job.commit(1, 1, pushed=True, **ALL)
    later: dict[str, Any] = {**ALL, "view": 3}
    for rank in (0, 2):
        job.commit(rank, 2, 1.0, **later)
    assert total(job) == 4.0


def test_a_commit_that_is_repeated_after_its_round_is_told_again_with_whom_it_was_closed() -> None:
    job = backup_job()
    for rank in (0, 2):
        job.commit(rank, 1, 1.0, flags=WANTS, **ALL)
    job.commit(2, 1, 1.0, flags=WANTS, number=60, **ALL)
    assert told(job, 2, 60) == ["Members", "Members", "Weights"]
    assert total(job) == 2.0


def test_who_has_missed_rounds_may_ask_for_the_weights_after_the_open_one() -> None:
    job = backup_job()
    for rank in (0, 2):
        job.commit(rank, 1, 1.0, **ALL)
    job.commit(1, 2, flags=WANTS | m.FOLLOWS, number=70, **ALL)
    assert told(job, 1, 70) == ["Pending"]
    for rank in (0, 2):
        job.commit(rank, 2, 1.0, **{**ALL, "view": 3})
    assert told(job, 1, 70) == ["Pending", "LeftOut", "Weights"]


def test_a_process_that_expects_other_backup_workers_is_refused() -> None:
    job = backup_job()
    answer = job.hello(1, initial_workers=3, min_workers=1, backup_workers=0)
    assert isinstance(answer, m.Failed)
    assert answer.code == "ConfigurationError"


def test_rounds_of_other_jobs_are_not_closed() -> None:
    job = EngineJob(2, SYNCHRONOUS)
    [answer] = job.ask(0, m.CloseRound(0, 1, 2, (0,)))
    assert isinstance(answer, m.Failed)
    assert answer.code == "ProtocolError"


class OtherServer:
    """The second server of a job of three ranks and one backup worker, which does not decide."""

    def __init__(self) -> None:
        self.engine = Engine(EngineConfig(1, 2, run_id=1))
        self.replies: dict[int, list[m.ReplyBody]] = {rank: [] for rank in range(3)}
        self.sessions: dict[int, int] = {}
        specs = (TensorSpec("a", (16,), "float32"), TensorSpec("b", (16,), "float32"))
        with tiny_slices():
            plan = make_plan(specs, 2)
            self.slices = plan.slices_of(1)
            for rank in range(3):
                peer = b"%d" % rank
                self.ask(rank, m.Hello("j", rank, 3, 1, 2, "", "h", peer.ljust(16), (peer,), resumes=True,
                                       initial_workers=3, min_workers=1, backup_workers=1))  # fmt: skip
                welcome = self.replies[rank].pop()
                assert isinstance(welcome, m.Welcome)
                self.sessions[rank] = welcome.session
                self.ask(rank, m.SetOptimizer(packed(Adding.name)))
                rows = tuple([tuple(one) for one in plan.specs])
                self.ask(rank, m.Register("t", rows, False, digest=plan.digest))  # type: ignore[arg-type]
        for rank in range(3):
            self.commit(rank, 0, 0.0 if rank == 0 else None, View(0, (0, 1, 2)))
        for replies in self.replies.values():
            replies.clear()

    def ask(self, rank: int, body: m.RequestBody) -> None:
        run = 0 if isinstance(body, m.Hello) else 1
        request = m.Request(run, self.sessions.get(rank, 0), 1, body)
        for out in self.engine.handle(b"%d" % rank, request, 0.0):
            self.replies[int(out.peer)].append(out.reply.body)

    def commit(self, rank: int, round_: int, value: float | None, view: View) -> None:
        given = [] if value is None else [torch.full((one.length,), value) for one in self.slices]
        pushes = [(at, round_, 0, one.nbytes) for at, one in enumerate(given)]
        commits = [(0, round_, len(given), 0, -1, WANTS)]
        self.ask(rank, m.Contribute(
            m.matrix(pushes, m.PUSH_WORDS), tuple(given), m.matrix(commits, m.COMMIT_WORDS), timeout=30.0,
            view=view.number, members=view.ranks, num_backup=view.num_backup, closes=view.closes >= 0,
        ))  # fmt: skip

    @property
    def total(self) -> float:
        return float(self.engine.namespaces["j"].shard.storage.padded[0][0])

    def told(self, rank: int) -> list[str]:
        return [type(body).__name__ for body in self.replies[rank]]


OPEN, CLOSED = View(1, (0, 1, 2), 1), View(2, (0, 2), 0, 1)


def test_another_server_ends_no_round_before_it_knows_who_counts() -> None:
    server = OtherServer()
    for rank in range(3):
        server.commit(rank, 1, 10.0**rank, OPEN)
    assert server.total == 0.0
    server.ask(0, m.CloseRound(0, 1, CLOSED.number, CLOSED.ranks))
    assert server.total == 101.0
    assert [server.told(rank) for rank in range(3)] == [["Weights"], ["LeftOut", "Weights"], ["Weights"]]


def test_another_server_waits_for_the_commits_of_those_that_count() -> None:
    server = OtherServer()
    server.commit(0, 1, 1.0, OPEN)
    server.ask(0, m.CloseRound(0, 1, CLOSED.number, CLOSED.ranks))
    server.commit(1, 1, 10.0, OPEN)
    assert server.total == 0.0
    server.commit(2, 1, 100.0, OPEN)
    assert server.total == 101.0
    assert server.told(1) == ["Pending", "LeftOut", "Weights"]


def test_a_commit_says_with_whom_its_round_was_closed_if_the_message_about_it_was_lost() -> None:
    server = OtherServer()
    for rank in range(3):
        server.commit(rank, 1, 10.0**rank, OPEN)
    server.commit(2, 1, 100.0, CLOSED)
    assert server.total == 101.0


def test_a_late_rank_may_pass_on_with_whom_a_round_was_closed() -> None:
    server = OtherServer()
    for rank in range(3):
        server.commit(rank, 1, 10.0**rank, OPEN)
    server.ask(1, m.CloseRound(0, 1, CLOSED.number, CLOSED.ranks))
    assert server.total == 101.0


def test_a_rank_without_a_part_in_a_closed_round_cannot_abort_it() -> None:
    server = OtherServer()
    server.commit(0, 1, 1.0, OPEN)
    server.ask(0, m.CloseRound(0, 1, CLOSED.number, CLOSED.ranks))
    server.ask(1, m.Abort(0, 1, "no", False, True))
    assert server.replies[1][-1] == m.Status({"applied": True})
    server.commit(2, 1, 100.0, OPEN)
    assert server.total == 101.0


def test_a_gradient_of_a_round_that_has_failed_before_it_counts_is_not_asked_for_again() -> None:
    job = backup_job()
    job.ask(0, m.Abort(0, 1, "no memory", False, True))
    job.commit(1, 1, 1.0, flags=WANTS, number=80, **ALL)
    assert told(job, 1, 80) == ["LeftOut", "Weights"]
    left_out = job.replies[1, 80][0]
    assert isinstance(left_out, m.LeftOut)
    assert (left_out.round, left_out.applied, left_out.closed_view) == (2, 0, -1)


def test_a_job_whose_members_are_all_lost_has_not_finished_because_another_rank_gives_up() -> None:
    """Its snapshots would be removed, and its next process be told that there is nothing to do."""
    job = EngineJob(2, SYNCHRONOUS, first=False, initial_workers=1, min_workers=1)
    job.tick(DEAD_AFTER + 1, alive=(1,))  # rank 0, the only member, is not heard of any more
    job.leave(1, is_clean=True)
    assert "j" not in job.engine._finished


def test_a_job_has_finished_when_its_members_have_but_those_that_were_lost() -> None:
    job = EngineJob(2, SYNCHRONOUS, first=False, initial_workers=2, min_workers=1)
    job.tick(DEAD_AFTER + 1, alive=(1,))
    job.leave(1, is_clean=True)
    assert "j" in job.engine._finished
