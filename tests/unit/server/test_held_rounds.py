"""Rounds that are held on a server: its sum is told and kept, and the first decision about it counts for all ranks."""

from __future__ import annotations

import math
from typing import Any

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.errors import KVStoreError, ServerStoppingError, from_wire
from kvstore_server.protocol import messages as m
from tests.support.engines import EngineJob
from tests.support.messages import Done


class HeldJob(EngineJob):
    """Two ranks, and the requests of a round that they commit: rank r's has number 100 + r."""

    def __init__(self, workers: int = 2, mode: Mode = SYNCHRONOUS) -> None:
        super().__init__(workers, mode)

    def hold(self, *values: float | None, round_: int = 1, **said: Any) -> list[list[m.ReplyBody]]:
        """Each rank commits its value, and wants the norm; what each was told. A rank without a value vetoes."""
        for rank, value in enumerate(values):
            options = {"hold": 2.0, **said}
            flags = m.VETOES * (value is None)
            self.commit(rank, round_, value, flags, 100 * round_ + rank, **options)
        return [self.heard(rank, round_) for rank in range(len(values))]

    def heard(self, rank: int, round_: int = 1) -> list[m.ReplyBody]:
        """What a rank was told about its commit since this was last asked."""
        return self.told.pop((rank, 100 * round_ + rank), [])

    def resolve(
        self, rank: int, coef: float = 1.0, clip: float | None = None, skip: bool = False, round_: int = 1
    ) -> list[m.ReplyBody]:
        return self.ask(rank, m.Resolve(0, round_, coef, clip, skip), 100 * round_ + rank)

    def repeat(self, rank: int, round_: int = 1) -> list[m.ReplyBody]:
        return self.commit(rank, round_, pushed=True, hold=2.0, number=100 * round_ + rank)

    @property
    def counters(self) -> dict[str, Any]:
        [info] = self.ask(0, m.Stats())
        assert isinstance(info, m.Status)
        return dict(info.values["tables"][0])


def error_in(bodies: list[m.ReplyBody]) -> KVStoreError:
    [failed] = bodies
    assert isinstance(failed, m.Failed)
    return from_wire(failed.code, failed.text)


def held_in(bodies: list[m.ReplyBody]) -> m.Held:
    [held] = bodies
    assert isinstance(held, m.Held)
    return held


def test_elements_are_limited_after_the_sum_was_multiplied() -> None:
    job = HeldJob()
    job.hold(1.0, 2.0)
    job.resolve(0, coef=0.5, clip=1.25)
    assert job.total == [1.25]


def test_a_round_that_is_skipped_changes_nothing_and_the_next_one_goes_on() -> None:
    job = HeldJob()
    job.hold(1.0, 2.0)
    job.resolve(0, skip=True)
    assert job.heard(1) == [m.Vetoed(0, 1, ()), Done((0, 1, 0))]
    assert (job.total, job.counters["rounds_applied"], job.counters["round"]) == ([0.0], 0, 2)
    job.hold(1.0, 1.0, round_=2)
    job.resolve(1, round_=2)
    assert job.total == [2.0]


def test_a_commit_that_is_repeated_hears_again_what_is_held_and_later_how_it_ended() -> None:
    job = HeldJob()
    [first, _] = job.hold(1.0, 2.0)
    assert job.repeat(0) == first
    job.resolve(1)
    assert job.repeat(0) == [*first, Done((0, 1, 1))]
    assert job.total == [3.0]


def test_a_decision_about_a_round_that_is_not_held_is_refused() -> None:
    job = HeldJob()
    assert "which is not held" in str(error_in(job.resolve(0)))
    job.commit(0, 1, 1.0, hold=2.0)
    assert "round 1 is open" in str(error_in(job.resolve(0)))
    assert "round 1 is open" in str(error_in(job.resolve(0, round_=2)))


def test_a_round_that_nobody_decides_about_fails_at_its_deadline() -> None:
    job = HeldJob()
    job.hold(1.0, 2.0, timeout=30.0)
    assert job.tick(29.0, alive=(0, 1)) == {}
    job.tick(2.0, alive=(0, 1))
    for rank in range(2):
        error = error_in(job.heard(rank))
        assert "round 1 of 't' reached its deadline while it was held" in str(error)
        assert isinstance(error, TimeoutError)


def test_a_rank_that_is_lost_while_a_round_is_held_harms_nobody() -> None:
    job = HeldJob()
    job.hold(1.0, 2.0)
    assert job.leave(0, is_clean=False) == {}
    assert job.tick(25.0, alive=(1,)) == {}
    job.resolve(1, coef=0.5)
    assert job.heard(1) == [Done((0, 1, 1))]
    assert job.total == [1.5]


def test_ranks_that_disagree_on_whether_a_round_is_held_all_fail_and_both_are_named() -> None:
    job = HeldJob()
    job.commit(0, 1, 1.0, hold=2.0, number=100)
    job.commit(1, 1, 2.0, number=101)
    for rank in range(2):
        assert "rank 0 wants its norm of type 2, rank 1 wants nothing to be checked" in str(
            error_in(job.heard(rank))
        )
    assert job.total == [0.0]


def test_a_sum_that_overflows_is_not_finite_though_what_was_given_is() -> None:
    job = HeldJob()
    [first, _] = job.hold(3e38, 3e38)
    assert not held_in(first).is_finite
    assert held_in(first).partials == ((0, math.inf),)


def test_the_factor_of_each_rank_is_in_what_is_measured() -> None:
    job = HeldJob()
    for rank, factor in enumerate((0.5, 0.25)):
        job.commit(rank, 1, 2.0, number=100 + rank, rescale=factor, hold=1.0)
    assert held_in(job.heard(0)).partials == ((0, 8 * 1.5),)


def test_a_key_that_every_rank_leaves_out_is_not_measured() -> None:
    job = HeldJob()
    for rank in range(2):
        job.commit(rank, 1, number=100 + rank, hold=2.0, absent=((0, 0),))
    assert job.heard(0) == job.heard(1) == [m.Held(0, 1, (), True)]
    job.resolve(0)
    assert job.heard(1) == [m.Absent(0, 1, (0,)), Done((0, 1, 1))]


def test_contributions_that_count_one_by_one_cannot_be_held() -> None:
    job = HeldJob(mode=Mode("async"))
    [told] = job.hold(1.0)
    assert "that needs synchronous rounds" in str(error_in(told))
    assert job.total == [0.0]


def test_a_server_that_stops_lets_what_is_held_end_and_says_so_to_who_still_waits() -> None:
    job = HeldJob()
    job.hold(1.0, 2.0)
    job.engine.stop()
    assert not job.engine.is_idle()
    first, _, *farewells = job.engine.abandon(0.0)
    assert isinstance(first.reply.body, m.Failed)
    assert first.reply.body.code == ServerStoppingError.__name__
    assert "round 1 of 't'" in first.reply.body.text
    assert [(out.peer, out.reply.number) for out in farewells] == [(b"0", 0), (b"1", 0)]
    job = HeldJob()
    job.hold(1.0, 2.0)
    job.engine.stop()
    job.resolve(0)
    assert job.total == [3.0]
