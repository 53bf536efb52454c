"""Loss scales: Gluon's, torch's and a static one; their sequences, what they save, and what they can load."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtrainer import Trainer, amp
from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.options.loss_scaler import (
    SMALLEST,
    LossScaler,
    StaticLossScaler,
    TorchLossScaler,
    loss_scaler_from_state,
    make_loss_scaler,
)

SEQUENCE = [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 16.0, 16.0, 16.0, 32.0, 32.0]
"""After each of eleven steps with an overflow in the seventh; begins at 8 and grows after three clean steps."""
OVERFLOWS = [step == 7 for step in range(1, 12)]


def after(scaler: Any, overflows: list[bool]) -> list[float]:
    seen = []
    for overflow in overflows:
        scaler.update(overflow)
        seen.append(scaler.loss_scale)
    return seen


def mmcv_state(scale: float, done: int, overflow: int, mode: str = "dynamic") -> dict[str, Any]:
    return {
        "cur_scale": scale, "cur_iter": done, "mode": mode, "last_overflow_iter": overflow,
        "scale_factor": 2.0, "scale_window": 3,
    }  # fmt: skip


def test_dynamic_scale_follows_torchs_grad_scaler() -> None:
    ours = TorchLossScaler(100.0, 1.5, 0.3, 4)
    theirs = torch.amp.GradScaler("cpu", 100.0, 1.5, 0.3, 4)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], 0.0)
    random = torch.Generator().manual_seed(0)
    for overflow in (torch.rand(50, generator=random) < 0.1).tolist():
        p.grad = torch.tensor([math.nan if overflow else 1.0])
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        ours.update(overflow)
        assert ours.loss_scale == theirs.get_scale()
    assert ours.state_dict() == theirs.state_dict()


def test_scales_do_not_depend_on_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert after(TorchLossScaler(8, growth_interval=3), OVERFLOWS) == SEQUENCE
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("scaler", "overflows", "expected"),
    [
        pytest.param(TorchLossScaler(8, min_scale=1), [True] * 5, [4, 2, 1, 1, 1], id="above the floor"),
        pytest.param(TorchLossScaler(2 * SMALLEST), [True] * 3, [SMALLEST] * 3, id="above 0"),
        pytest.param(
            TorchLossScaler(2.0**127, growth_interval=1), [False] * 2, [2.0**127] * 2, id="in float32"
        ),
        pytest.param(StaticLossScaler(512), [False, True, False], [512.0] * 3, id="static"),
    ],
)
def test_scale_stays_in_its_limits(scaler: LossScaler, overflows: list[bool], expected: list[float]) -> None:
    assert after(scaler, overflows) == expected


@pytest.mark.parametrize("kind", [LossScaler, TorchLossScaler, StaticLossScaler])
def test_gradients_carry_the_scale_until_they_are_unscaled_or_the_step_ends(kind: Any) -> None:
    scaler = kind(4.0)
    scaler.mark_unscaled()  # of nothing
    assert scaler.factor == 1
    scaler.mark_scaled()
    assert scaler.factor == 0.25
    scaler.mark_unscaled()
    assert scaler.factor == 1
    with pytest.raises(ConfigurationError, match=r"call amp\.unscale after the last backward pass"):
        scaler.mark_scaled()
    scaler.update(False)
    scaler.mark_scaled()
    scaler.update(True)
    assert scaler.factor == 1


def test_saved_scale_goes_on_as_if_uninterrupted() -> None:
    for cut in range(len(OVERFLOWS)):
        first = TorchLossScaler(1, growth_interval=3)
        first.loss_scale = 8.0  # as somebody may set it
        after(first, OVERFLOWS[:cut])
        second = TorchLossScaler()
        second.load_state_dict(first.state_dict())
        assert after(second, OVERFLOWS[cut:]) == SEQUENCE[cut:]


@pytest.mark.parametrize(
    "scaler", [LossScaler(512.0), StaticLossScaler(512.0), TorchLossScaler(512.0, growth_interval=3)]
)
def test_torchs_grad_scaler_takes_over_the_state_of_every_scaler(scaler: LossScaler) -> None:
    theirs = torch.amp.GradScaler("cpu")
    scaler.update(False)
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == 512
    assert theirs.state_dict()["_growth_tracker"] == scaler.clean_steps
    back = make_loss_scaler(512) if isinstance(scaler, StaticLossScaler) else type(scaler)()
    assert back is not None
    back.load_state_dict(theirs.state_dict())
    assert back.state_dict() == scaler.state_dict()


def test_states_that_older_releases_saved_still_load() -> None:
    static, gluon = (
        loss_scaler_from_state({"loss_scale": 8.0}),
        loss_scaler_from_state({"loss_scale": 8.0, "clean_steps": 3}),
    )
    assert (type(static), static.loss_scale) == (StaticLossScaler, 8)
    assert (type(gluon), gluon.loss_scale, gluon.clean_steps) == (LossScaler, 8, 3)
    loaded = TorchLossScaler()
    loaded.load_state_dict({"loss_scale": 8.0, "clean_steps": 3})
    assert (loaded.loss_scale, loaded.clean_steps) == (8, 3)


def test_empty_state_of_a_disabled_scaler_is_tolerated() -> None:
    for scaler in (TorchLossScaler(8), StaticLossScaler(8)):
        scaler.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
        assert scaler.loss_scale == 8


@pytest.mark.parametrize(("done", "overflow"), [(0, -1), (2, -1), (3, -1), (5, 1), (7, 6)])
def test_state_of_mmcvs_scaler_goes_on_with_the_same_numbers(done: int, overflow: int) -> None:
    """MMCV's rule, written out: it grows when a multiple of the window has passed since the last overflow."""
    scaler = TorchLossScaler(growth_interval=77)
    scaler.load_state_dict(mmcv_state(16.0, done, overflow))
    scale, last = 16.0, overflow
    for step, bad in enumerate([False, False, False, False, True, False, False, False], start=done):
        if bad:
            scale, last = max(scale / 2, 1.0), step
        elif (step - last) % 3 == 0:
            scale *= 2
        scaler.update(bad)
        assert scaler.loss_scale == scale


def test_state_of_a_static_scaler_gives_a_dynamic_one_its_scale() -> None:
    for state in (mmcv_state(256.0, 9, -1, "static"), StaticLossScaler(256).state_dict()):
        scaler = TorchLossScaler(growth_interval=5)
        scaler.load_state_dict(state)
        assert scaler.loss_scale == 256
        assert scaler.state_dict()["growth_interval"] == 5


def test_static_scale_is_an_option_that_no_saved_state_changes() -> None:
    scaler = StaticLossScaler(512)
    scaler.load_state_dict(TorchLossScaler(8).state_dict())
    assert scaler.loss_scale == 512


def test_floor_is_saved_and_one_that_was_asked_for_stays() -> None:
    saved = TorchLossScaler(8, min_scale=2).state_dict()
    plain, own = TorchLossScaler(), TorchLossScaler(min_scale=4)
    for scaler in (plain, own):
        scaler.load_state_dict(saved)
    assert (plain.min_scale, own.min_scale) == (2, 4)


@pytest.mark.parametrize(
    "scaler", [LossScaler(8.0), TorchLossScaler(8.0, growth_interval=9), StaticLossScaler(8.0)]
)
def test_saved_state_tells_which_kind_of_scaler_it_is(scaler: LossScaler) -> None:
    again = loss_scaler_from_state(scaler.state_dict())
    assert type(again) is type(scaler)
    assert again.state_dict() == scaler.state_dict()


def test_amp_asks_for_a_dynamic_scale_a_static_one_or_none() -> None:
    dynamic, static = make_loss_scaler("dynamic"), make_loss_scaler(512)
    assert isinstance(dynamic, TorchLossScaler)
    assert dynamic.loss_scale == 2.0**16
    assert isinstance(static, StaticLossScaler)
    assert (static.loss_scale, make_loss_scaler(512.0).loss_scale) == (512, 512)  # type: ignore[union-attr]
    assert make_loss_scaler(None) is None
    assert make_loss_scaler({"enabled": False}) is None


def test_amp_takes_the_arguments_of_torchs_grad_scaler() -> None:
    scaler = make_loss_scaler(
        {"init_scale": 8, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1, "min_scale": 2}
    )
    assert after(scaler, [False, True, True, True]) == [32, 8, 2, 2]


def test_amp_understands_mmcvs_older_names() -> None:
    old = {"init_scale": 8.0, "mode": "dynamic", "scale_factor": 2.0, "scale_window": 3}
    assert after(make_loss_scaler(old), OVERFLOWS) == SEQUENCE
    assert isinstance(make_loss_scaler({"init_scale": 512.0, "mode": "static"}), StaticLossScaler)


@pytest.mark.parametrize(
    "amp",
    [
        True, False, 0, -1, math.nan, math.inf, "static", "512", [512], {"init_scale": True}, {"init_scal": 8},
        {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"growth_interval": 2.5},
        {"init_scale": 1, "min_scale": 2}, {"enabled": 1}, {"mode": "fixed"}, {"mode": "static", "scale_window": 3},
    ],
)  # fmt: skip
def test_anything_else_is_refused(amp: Any) -> None:
    with pytest.raises(ConfigurationError):
        make_loss_scaler(amp)


@pytest.mark.parametrize("option", [{"growth_interval": 9}, {"init_scale": 2.0**25}])
def test_the_state_of_a_scaler_with_other_options_is_refused(tmp_path: Path, option: Any) -> None:
    p, q = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    saving = Trainer({"p": p}, "sgd", {"learning_rate": 0.25}, None, amp=option)
    saving.update_params(p.sum())
    saving.save_states(tmp_path / "states")
    trainer = Trainer({"p": q}, "sgd", {"learning_rate": 1.0}, None)
    amp.init_trainer(trainer)
    with pytest.raises(StateMismatchError, match=r"LossScaler: a (LossScaler has|loss scale must)"):
        trainer.load_states(tmp_path / "states")
    assert (trainer.learning_rate, trainer.amp_loss_scale) == (1.0, 2.0**16)


def test_endless_overflows_end_at_the_least_scale_and_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    scaler = LossScaler(SMALLEST * 2)
    assert after(scaler, [True, True, False]) == [SMALLEST, SMALLEST, SMALLEST]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "look for an infinity or a NaN" in caplog.text


def test_state_is_plain_and_goes_on_where_it_was() -> None:
    scaler, other = LossScaler(8.0), LossScaler()
    after(scaler, [True, *[False] * 1500])
    assert (scaler.state_dict()["scale"], scaler.state_dict()["_growth_tracker"]) == (4.0, 1500)
    other.load_state_dict(scaler.state_dict())
    assert after(other, [False] * 500) == [4.0] * 499 + [8.0]


REFUSED_BY_ALL: list[Any] = [
    None,
    7,
    {"scale": 1.0},
    {"loss_scale": 1.0, "clean_steps": 0, "more": 1},
    {"loss_scale": 1.0, "clean_steps": 1.5},
    {"loss_scale": math.nan, "clean_steps": 0},
    {**TorchLossScaler().state_dict(), "scale": 0.0},
    {**TorchLossScaler().state_dict(), "_growth_tracker": -1},
    {**TorchLossScaler().state_dict(), "growth_factor": 0.5},
    {**TorchLossScaler().state_dict(), "kind": "mine"},
    mmcv_state(8.0, 3, 4),
]
REFUSED_BY_GLUONS: list[Any] = [
    {},
    {"loss_scale": 1.0, "clean_steps": 2000},
    {"loss_scale": 2.0**25, "clean_steps": 0},
    TorchLossScaler(1, growth_interval=9).state_dict(),
]


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        *itertools.product([LossScaler, TorchLossScaler, StaticLossScaler], REFUSED_BY_ALL),
        *itertools.product([LossScaler], REFUSED_BY_GLUONS),
    ],
)
def test_state_of_something_else_is_refused_and_changes_nothing(kind: Any, state: Any) -> None:
    scaler = kind(2.0)
    before = scaler.state_dict()
    with pytest.raises(ConfigurationError):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("scale", [0, -1.0, True, "big", float("inf"), 2.0**25])
def test_impossible_scale_is_refused(scale: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a finite number from"):
        LossScaler(scale)
