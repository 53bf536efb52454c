"""Rounds whose sum is held until a rank decides what becomes of it, and the norms that are measured then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.errors import (
    ConfigurationError,
    KVStoreError,
    ProtocolError,
    ServerStoppingError,
    from_wire,
)
from kvstore_server.plan import Plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.rows import RowSet
from kvstore_server.shard.norms import (
    Decision,
    Guard,
    Measured,
    apply_decision,
    combine,
    is_finite,
    measure,
    partial_norm,
    same_decision,
)
from tests.support.engines import EngineJob, filled, plan_of
from tests.support.messages import Done
from tests.support.pairwise import pairwise


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
        return self.replies.pop((rank, 100 * round_ + rank), [])

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


def test_a_decision_about_a_later_round_is_refused() -> None:
    job = HeldJob()
    assert isinstance(error_in(job.resolve(0, round_=2)), ProtocolError)


def test_a_decision_about_a_sum_that_an_earlier_process_held_waits_for_the_commits() -> None:
    # It was still on its way when the server was restarted, which has lost the commits.
    job = HeldJob()
    job.resolve(0)
    job.commit(0, 1, 1.0, hold=2.0, number=100)
    job.resolve(0)
    assert (job.heard(0), job.total, job.counters["round"]) == ([], [0.0], 1)
    job.commit(1, 1, 2.0, hold=2.0, number=101)
    assert [len(held_in(job.heard(rank)).partials) for rank in range(2)] == [1, 1]
    job.resolve(1)
    assert job.total == [3.0]


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


INF = math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of(values: Tensor, p: float) -> float:
    """In long doubles, by numpy."""
    wide = np.abs(values.double().numpy().astype(np.longdouble)).reshape(-1)
    return float(wide.max()) if p == INF else float((wide**p).sum() ** (np.longdouble(1) / np.longdouble(p)))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 0.5, INF])
@pytest.mark.parametrize("numel", [1, 7, 16384, 16385, 300_001])
def test_a_norm_is_that_of_long_doubles(p: float, numel: int) -> None:
    values = randn(numel)
    got = combine([partial_norm(values, p)], p)
    assert got == pytest.approx(norm_of(values, p), rel=1e-12)


@pytest.mark.parametrize(
    ("p", "bad", "at"), pairwise([1.0, 2.0, 3.0, INF], [math.nan, INF, -INF], [0, 40_000])
)
def test_what_is_not_finite_stays_so_in_the_norm(p: float, bad: float, at: int) -> None:
    values = randn(50_000)
    values[at] = bad
    partial = partial_norm(values, p)
    for partials in ([partial, 1.0], [1.0, partial]):
        total = combine(partials, p)
        assert math.isnan(total) if math.isnan(bad) else total == INF
    assert not is_finite(values, partial)


@pytest.mark.parametrize("magnitude", [1e200, 1e-200])
@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 9.0, 0.5, INF])
def test_powers_that_float64_cannot_hold_do_not_spoil_a_norm(p: float, magnitude: float) -> None:
    values = torch.tensor([3.0, -4.0, 0.0, 1.0], dtype=torch.float64) * magnitude
    partials = [partial_norm(values[:2], p), partial_norm(values[2:], p)]
    assert combine(partials, p) / magnitude == pytest.approx(norm_of(values / magnitude, p), rel=1e-12)


@pytest.mark.parametrize(
    ("values", "p"), [(torch.full((4,), 1e308, dtype=torch.float64), 2.0), (torch.ones(20_000), 0.01)]
)
def test_a_norm_too_large_for_float64_is_infinite_though_the_numbers_are_finite(
    values: Tensor, p: float
) -> None:
    partial = partial_norm(values, p)
    assert partial == INF
    assert is_finite(values, partial)
    assert combine([partial, 1.0], p) == INF


def test_the_greatest_magnitude_forgets_no_nan_that_came_before_it() -> None:
    assert math.isnan(combine([math.nan, 5.0, 1.0], INF))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_the_number_of_threads_changes_no_bit(p: float) -> None:
    values = randn(1 << 18)
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(partial_norm(values, p))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, True, "2", None])
def test_a_norm_type_that_is_no_number_above_zero_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match=r"norm_type.*above 0"):
        Guard(wrong, lambda measured: Decision())  # type: ignore[arg-type]


def test_decisions_are_the_same_when_they_have_the_same_effect() -> None:
    assert same_decision(Decision(math.nan), Decision(math.nan))
    assert same_decision(Decision(0.1, skip=True), Decision(0.2, 3.0, skip=True))
    assert not same_decision(Decision(0.1), Decision(0.2))
    assert not same_decision(Decision(), Decision(skip=True))
    assert not same_decision(Decision(clip_value=1.0), Decision())


SHAPES = {"small": (7,), "big": (500, 300), "bias": (3, 3)}


def gradients() -> tuple[Plan, dict[str, Tensor], dict[str, Tensor]]:
    plan = plan_of(SHAPES)
    values = {key: randn(*shape, seed=at) for at, (key, shape) in enumerate(SHAPES.items())}
    return plan, values, filled(plan, values)


def batch_of(values: Mapping[str, Tensor], *keys: str) -> Tensor:
    return torch.cat([values[key].reshape(-1) for key in keys])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, INF])
def test_all_parameters_are_measured_together(p: float) -> None:
    plan, values, arenas = gradients()
    norm, finite = measure(plan, arenas, {}, [True] * 3, p)
    assert norm == pytest.approx(norm_of(batch_of(values, *SHAPES), p), rel=1e-12)
    assert finite


def test_what_is_left_out_does_not_count_even_if_it_is_not_finite() -> None:
    plan, values, arenas = gradients()
    begin = plan.key_offsets[2]
    arenas["float32"][begin : begin + 9] = math.nan
    norm, finite = measure(plan, arenas, {}, [True, True, False], 2.0)
    assert norm == pytest.approx(norm_of(batch_of(values, "small", "big"), 2.0), rel=1e-12)
    assert finite
    assert measure(plan, arenas, {}, [True] * 3, 2.0).is_finite is False
    assert measure(plan, arenas, {}, [False] * 3, 2.0) == Measured(0.0, True)


def test_rows_count_in_place_of_what_is_in_the_arena() -> None:
    plan, values, arenas = gradients()
    rows = RowSet(torch.tensor([2, 499]), randn(2, 300, seed=9))
    expected = torch.cat([batch_of(values, "small", "bias"), rows.values.reshape(-1)])
    norm, _ = measure(plan, arenas, {1: rows}, [True] * 3, 2.0)
    assert norm == pytest.approx(norm_of(expected, 2.0), rel=1e-12)
    assert measure(plan, arenas, {1: rows}, [False] * 3, 2.0).norm == 0.0


def test_a_scale_that_is_still_to_come_is_counted() -> None:
    plan, _, arenas = gradients()
    scaled = {dtype: flat * 0.3 for dtype, flat in arenas.items()}
    assert measure(plan, arenas, {}, [True] * 3, 2.0, 0.3) == measure(plan, scaled, {}, [True] * 3, 2.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_limit_of_the_elements_may_be_more_than_their_dtype_holds(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, -2.0], dtype=dtype)
    apply_decision(values, Decision(clip_value=1e300))
    assert values.tolist() == [1.0, -2.0]
