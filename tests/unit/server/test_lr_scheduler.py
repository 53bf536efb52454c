"""Gluon's schedulers: traces of MXNet, closed forms, arguments that are refused, and how schedulers travel."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from kvstore_server.optimizer import lr_scheduler as base
from kvstore_server.optimizer.lr_scheduler import as_scheduler, create_scheduler_from_spec
from kvtrainer.errors import ConfigurationError
from kvtrainer.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    register,
)

# The learning rates after 0, 1, 2, ... updates, recorded from MXNet 1.9.1 and 2.0.0b1.
TRACES: list[tuple[LRScheduler, list[float]]] = [
    (FactorScheduler(step=2, factor=0.5, base_lr=1), [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]),
    (FactorScheduler(2, 0.1, stop_factor_lr=0.01, base_lr=1), [1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01]),
    (FactorScheduler(2, 0.5, stop_factor_lr=3, base_lr=1), [1, 1, 1, 3, 3, 3, 3]),
    (FactorScheduler(2, 0.0, base_lr=1), [1, 1, 1, 1e-8, 1e-8, 1e-8]),
    (MultiFactorScheduler([3, 5], 0.1, base_lr=1), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01]),
    (
        PolyScheduler(10, base_lr=1, pwr=2),
        [1, 0.81, 0.64, 0.49, 0.36, 0.25, 0.16, 0.09, 0.04, 0.01, 0, 0, 0],
    ),
    (
        CosineScheduler(10, base_lr=1, final_lr=0.1),
        [1, 0.97797543, 0.91405765, 0.81450336, 0.68905765, 0.55, 0.41094235, 0.28549664, 0.18594235, 0.12202457, 0.1],
    ),
    (
        CosineScheduler(10, base_lr=1, warmup_steps=4),
        [0, 0.25, 0.5, 0.75, 1, 0.9330127, 0.75, 0.5, 0.25, 0.066987298, 0, 0],
    ),
    (
        FactorScheduler(2, 0.5, base_lr=1, warmup_steps=3, warmup_begin_lr=0.1, warmup_mode="constant"),
        [0.1, 0.1, 0.1, 0.5, 0.5, 0.25, 0.25, 0.125],
    ),
    (
        MultiFactorScheduler([2, 3, 7], 0.5, base_lr=1, warmup_steps=5, warmup_begin_lr=0.2),
        [0.2, 0.36, 0.52, 0.68, 0.84, 0.25, 0.25, 0.25, 0.125],
    ),
    (
        PolyScheduler(10, base_lr=1, final_lr=0.2, warmup_steps=3),
        [0, 1 / 3, 2 / 3, 1, 0.787755, 0.608163, 0.461224, 0.346939, 0.265306, 0.216327, 0.2, 0.2],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scheduler", "trace"), TRACES, ids=[repr(s) for s, _ in TRACES])
def test_the_learning_rates_are_those_of_mxnet_in_any_order_of_asking(
    scheduler: LRScheduler, trace: list[float]
) -> None:
    expected = pytest.approx(trace, rel=1e-6, abs=1e-6)
    assert [scheduler(n) for n in range(len(trace))] == expected
    assert [scheduler(n) for n in reversed(range(len(trace)))][::-1] == expected


def test_decays_are_multiplied_one_by_one_as_in_mxnet_to_the_last_bit() -> None:
    """MXNet's own tests compare with `==`; 0.1**4 is another number than 0.1 multiplied four times."""
    factor = FactorScheduler(2, 0.1, base_lr=1)
    steps = MultiFactorScheduler([1, 2, 3, 5, 8, 13], 0.7, base_lr=0.3)
    lr = 1.0
    for n in range(1, 17, 2):
        assert factor(n) == factor(n + 1) == lr
        lr = max(lr * 0.1, 1e-8)
    # Recorded from MXNet 1.9.1 and 2.0.0b1, which agree.
    assert factor(9) == 0.00010000000000000003 != 0.1**4
    assert [steps(n) for n in (1, 3, 6, 14)] == [0.3, 0.147, 0.07202999999999998, 0.03529469999999999]


def test_asking_far_ahead_or_back_gives_the_bits_of_asking_step_by_step() -> None:
    ahead, by_step = FactorScheduler(1, 0.97, base_lr=0.3), FactorScheduler(1, 0.97, base_lr=0.3)
    trace = [by_step(n) for n in range(400)]
    assert [ahead(n) for n in (399, 7, 250, 0, 8)] == [trace[n] for n in (399, 7, 250, 0, 8)]
    ahead.factor = 0.5
    assert ahead(2) == 0.15


def test_no_number_of_updates_takes_long_and_the_answer_does_not_depend_on_the_way() -> None:
    far, by_step = (FactorScheduler(1, 1 - 1e-9, stop_factor_lr=0, base_lr=1) for _ in range(2))
    assert far(2**40) == pytest.approx(math.exp(-(2**40) * 1e-9), rel=1e-3)
    assert [far(n) for n in range(2**17, 2**17 + 3)] == [by_step(n) for n in range(2**17 - 9, 2**17 + 3)][9:]


def test_warm_up_poly_and_cosine_have_the_bits_of_mxnet() -> None:
    """Operations in MXNet's order, which is not that of the policies of kvtrainer; powers are the C library's."""
    base_lr, final, begin, warmup, length = 0.3, 0.07, 0.013, 50, 97
    same: dict[str, Any] = dict(base_lr=base_lr, final_lr=final, warmup_steps=warmup, warmup_begin_lr=begin)
    poly, cosine = PolyScheduler(warmup + length, pwr=0.9, **same), CosineScheduler(warmup + length, **same)
    for n in range(warmup):
        assert poly(n) == cosine(n) == begin + (base_lr - begin) * n / warmup
    for done in range(length + 1):
        assert poly(warmup + done) == final + (base_lr - final) * (1 - done / length) ** 0.9
        assert (
            cosine(warmup + done) == final + (base_lr - final) * (1 + math.cos(math.pi * done / length)) / 2
        )


@pytest.mark.parametrize("scheduler", [s for s, _ in TRACES], ids=lambda s: repr(s))
def test_a_new_base_lr_moves_the_whole_schedule_and_the_end_of_the_warmup(scheduler: LRScheduler) -> None:
    arguments = {k: v for k, v in scheduler.spec().items() if k != "name"}
    changed, fresh = type(scheduler)(**arguments), type(scheduler)(**{**arguments, "base_lr": 0.4})
    changed(7)
    changed.base_lr = 0.4
    assert changed.warmup_final_lr == 0.4
    assert [changed(n) for n in range(15)] == [fresh(n) for n in range(15)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactorScheduler(2, factor=1.5), r"factor.*from 0 to 1.*1\.5"),
        (lambda: MultiFactorScheduler([2], factor=2), r"factor.*from 0 to 1.*2"),
        (lambda: FactorScheduler(2, factor=-0.5), r"factor.*from 0 to 1.*-0\.5"),
        (lambda: FactorScheduler(0), "step must be an integer of at least 1, got 0"),
        (lambda: FactorScheduler(2.5), r"step must be an integer.*2\.5"),  # type: ignore[arg-type]
        (lambda: FactorScheduler(True), "step must be an integer.*True"),
        (lambda: MultiFactorScheduler([0, 3]), "each entry of step must be an integer of at least 1, got 0"),
        (lambda: MultiFactorScheduler([2, 2.5]), r"each entry of step.*2\.5"),  # type: ignore[list-item]
        (lambda: MultiFactorScheduler([5, 3]), r"increasing list of ints.*\[5, 3\]"),
        (lambda: MultiFactorScheduler([3, 3]), r"increasing list of ints.*\[3, 3\]"),
        (lambda: MultiFactorScheduler([]), r"list of at least one int, got \[\]"),
        (lambda: MultiFactorScheduler(3), "list of at least one int, got 3"),  # type: ignore[arg-type]
        (lambda: MultiFactorScheduler("35"), "list of at least one int, got '35'"),  # type: ignore[arg-type]
        (lambda: PolyScheduler(0), "maximum number of updates.*at least 1, got 0"),
        (lambda: CosineScheduler(-1), "maximum number of updates.*at least 1, got -1"),
        (lambda: CosineScheduler(9.5), r"maximum number of updates.*9\.5"),  # type: ignore[arg-type]
        (lambda: PolyScheduler(4, warmup_steps=4), "max_update must be more than warmup_steps.*got 4 and 4"),
        (lambda: PolyScheduler(4, pwr=-1), "pwr must be .*at least 0, got -1"),
        (lambda: PolyScheduler(4, final_lr=math.nan), "final_lr must be a finite number, got nan"),
        (lambda: LRScheduler(0.1, warmup_begin_lr=0.2), r"base_lr.*less than warmup_begin_lr.*0\.1 and 0\.2"),
        (lambda: LRScheduler(warmup_steps=-1), "warmup_steps must be an integer of at least 0, got -1"),
        (lambda: LRScheduler(warmup_steps=1.5), r"warmup_steps must be an int.*1\.5"),  # type: ignore[arg-type]
        (lambda: LRScheduler(warmup_mode="cubic"), "'linear' or 'constant', got 'cubic'"),
        (lambda: LRScheduler("fast"), "base_lr must be a finite number, got 'fast'"),  # type: ignore[arg-type]
        (lambda: LRScheduler(math.inf), "base_lr must be a finite number, got inf"),
    ],
)
def test_an_argument_that_makes_no_schedule_is_refused(make: Callable[[], LRScheduler], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize("value", [math.nan, "fast", None, 0.05])
def test_a_base_lr_that_is_refused_leaves_the_old_one(value: Any) -> None:
    scheduler = FactorScheduler(2, 0.5, base_lr=1, warmup_steps=2, warmup_begin_lr=0.1)
    with pytest.raises(ConfigurationError, match="base_lr"):
        scheduler.base_lr = value
    assert scheduler.base_lr == 1.0


def test_the_warmup_has_no_learning_rate_after_its_end() -> None:
    scheduler = FactorScheduler(2, base_lr=1, warmup_steps=2)
    assert scheduler.get_warmup_lr(1) == 0.5
    with pytest.raises(ConfigurationError, match="update 2 is not within the warm-up of 2 updates"):
        scheduler.get_warmup_lr(2)


@pytest.fixture(autouse=True)
def _restore_registry() -> Iterator[None]:
    before = dict(base._registry)
    yield
    base._registry.clear()
    base._registry.update(before)


class InverseRoot(LRScheduler):
    """A user's scheduler that passes what it does not know to its base."""

    def __init__(self, scale: float, **options: Any) -> None:
        super().__init__(**options)
        self.scale = scale

    def after_warmup(self, num_update: int) -> float:
        return self.base_lr / math.sqrt(1 + self.scale * num_update)


def travel(scheduler: LRScheduler) -> LRScheduler:
    return create_scheduler_from_spec(msgpack.unpackb(msgpack.packb(scheduler.spec())))


@pytest.mark.parametrize(
    "scheduler",
    [
        FactorScheduler(3, 0.7, 0.01, base_lr=1, warmup_steps=2, warmup_begin_lr=0.1, warmup_mode="constant"),
        MultiFactorScheduler([2, 5], 0.7, base_lr=1, warmup_steps=2),
        PolyScheduler(12, 0.4, pwr=3, final_lr=0.1, warmup_steps=4),
        CosineScheduler(12, 0.4, final_lr=0.1, warmup_steps=4, warmup_begin_lr=0.2),
    ],
    ids=lambda s: type(s).__name__,
)
def test_a_scheduler_that_travelled_gives_the_same_learning_rates(scheduler: LRScheduler) -> None:
    scheduler.base_lr = 0.3
    assert type(travel(scheduler)) is type(scheduler)
    assert [travel(scheduler)(n) for n in range(20)] == [scheduler(n) for n in range(20)]


def test_a_registered_scheduler_of_a_user_travels_with_the_arguments_of_its_bases() -> None:
    register(InverseRoot)
    there = travel(InverseRoot(0.5, base_lr=2, warmup_steps=1))
    assert isinstance(there, InverseRoot)
    assert [there(0), there(6)] == [0.0, 1.0]


def test_a_scheduler_that_defines_call_as_gluons_do_is_used_as_it_is() -> None:
    class Halved(LRScheduler):
        def __call__(self, num_update: int) -> float:
            return self.base_lr / 2

    scheduler = Halved(0.5)
    assert as_scheduler(scheduler) is scheduler
    assert scheduler(3) == 0.25


def test_a_scheduler_that_is_not_registered_is_not_described() -> None:
    class Slower(FactorScheduler):
        """It must not be mistaken for its registered base."""

    with pytest.raises(ConfigurationError, match=r"InverseRoot.*'inverseroot'.*register.*--import"):
        InverseRoot(0.5).spec()
    with pytest.raises(ConfigurationError, match=r"'slower'.*register"):
        Slower(2).spec()


def test_an_argument_that_was_not_kept_is_named() -> None:
    @register
    class Forgetful(LRScheduler):
        def __init__(self, period: int) -> None:
            super().__init__()

    with pytest.raises(ConfigurationError, match="argument 'period' must be kept"):
        Forgetful(3).spec()


@pytest.mark.parametrize("scale", [{1: 2}, [object()], print])
def test_an_argument_that_is_no_plain_value_is_named(scale: Any) -> None:
    register(InverseRoot)
    with pytest.raises(ConfigurationError, match=r"scale is .*only numbers, strings and lists"):
        InverseRoot(scale).spec()


def test_a_name_that_is_registered_again_is_replaced_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Other(InverseRoot):
        name = "InverseRoot"

    register(InverseRoot)
    with caplog.at_level(logging.WARNING):
        register(Other)
    assert "'inverseroot' is now" in caplog.text
    assert type(travel(Other(0.5))) is Other
    with pytest.raises(ConfigurationError, match=r"'inverseroot'.*register"):
        InverseRoot(0.5).spec()


def test_only_a_scheduler_class_can_be_registered() -> None:
    with pytest.raises(ConfigurationError, match="only a subclass of LRScheduler"):
        register(dict)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "needs a name"),
        ({}, "needs a name"),
        ({"name": 3}, "needs a name"),
        ({"name": "factor"}, "'factor' cannot be rebuilt.*step"),
        ({"name": "factor", "step": 2, "speed": 3}, "'factor' cannot be rebuilt.*speed"),
        ({"name": "factor", "step": 0}, "step must be an integer of at least 1"),
    ],
)
def test_a_malformed_description_is_refused(spec: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_scheduler_from_spec(spec)


def halving(num_update: int) -> float:
    return 0.5**num_update


def test_a_function_is_a_scheduler_in_its_own_process() -> None:
    scheduler = as_scheduler(halving)
    assert [scheduler(n) for n in range(3)] == [1.0, 0.5, 0.25]
    assert scheduler.base_lr == 1.0


@pytest.mark.parametrize("attempt", [lambda s: s.spec(), lambda s: setattr(s, "base_lr", 0.1)])
def test_a_function_neither_travels_nor_takes_a_learning_rate_beside_it(
    attempt: Callable[[LRScheduler], object],
) -> None:
    with pytest.raises(ConfigurationError, match=r"halving.*(neither sent|no effect)|no effect.*halving"):
        attempt(as_scheduler(halving))


@pytest.mark.parametrize("result", [None, float("nan"), "0.1", True])
def test_a_function_that_returns_no_learning_rate_is_named(result: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"returns for 3 must be a finite number"):
        as_scheduler(lambda num_update: result)(3)
