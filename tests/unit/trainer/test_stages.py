"""Options of a Trainer's stages: what clip_grad and on_nonfinite mean, and where clipping, overflow and amp meet."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvstore_server.shard.norms import Decision, Measured
from kvtrainer import Trainer
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, NonFiniteGradientError
from kvtrainer.options.stages import GradientLimits, make_stage_limits
from kvtrainer.types import StepResult
from tests.support.ways_to_train import STORES


def parameter(values: list[float] | None = None) -> Parameter:
    return Parameter(torch.tensor(values or [0.0, 0.0]))


def trainer_of(p: Any, in_store: bool | None = None, lr: float = 1.0, **options: Any) -> Trainer:
    store = None if in_store is None else "local"
    params = p if isinstance(p, dict) else {"p": p}
    return Trainer(params, "torch:SGD", {"lr": lr}, store, None, in_store, **options)


def push(trainer: Trainer, p: Parameter, slopes: list[float], batch: float | None = None) -> StepResult:
    return trainer.update_params(p @ torch.tensor(slopes), batch)


@pytest.mark.parametrize(
    "options", [{"clip_grad": {"type": "value", "clip_value": 0.5}}, {"on_nonfinite": "skip"}]
)
def test_norm_that_is_not_limited_is_not_reported(options: dict[str, Any]) -> None:
    p = parameter()
    assert push(trainer_of(p, **options), p, [2.0, -0.25]).grad_norm is None


@pytest.mark.parametrize("in_store", STORES)
def test_dense_and_sparse_gradients_are_limited_by_their_common_norm(in_store: bool | None) -> None:
    w, p = torch.nn.Embedding.from_pretrained(torch.zeros(9, 1), freeze=False, sparse=True), parameter()
    trainer = trainer_of({"w": w.weight, "p": p}, in_store, clip_grad={"max_norm": 1.0})
    loss = 3.0 * w(torch.tensor([4])).sum() + p @ torch.tensor([0.0, 4.0])
    assert trainer.update_params(loss).grad_norm == pytest.approx(5.0)
    assert w.weight[4].item() == pytest.approx(-0.6, rel=1e-6)
    assert p[1].item() == pytest.approx(-0.8, rel=1e-6)


@pytest.mark.parametrize("in_store", STORES)
def test_nan_gradient_of_a_finite_loss_is_found(in_store: bool | None) -> None:
    p = parameter([0.0, 1.0])
    trainer = trainer_of(p, in_store, on_nonfinite="raise")
    with pytest.raises(NonFiniteGradientError, match="gradient, its norm or the loss"):
        trainer.update_params(torch.where(p > 0, p.sqrt(), torch.zeros(2)).sum())
    assert p.tolist() == [0.0, 1.0]


def test_context_computes_in_the_dtype_that_amp_names() -> None:
    layer = torch.nn.Linear(4, 2)
    for amp, dtype in (
        (None, torch.float32),
        ("dynamic", torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ):
        with trainer_of(dict(layer.named_parameters()), amp=amp) as trainer, trainer.context():
            assert layer(torch.ones(1, 4)).dtype == dtype


def test_each_replica_without_a_store_has_its_own_norm() -> None:
    p, q = parameter(), parameter()
    trainer = Trainer({"p": [p, q]}, "torch:SGD", {"lr": 1.0}, None, clip_grad={"max_norm": 1.0})
    (p @ torch.tensor([3.0, 4.0]) + q @ torch.tensor([0.0, 0.5])).backward()
    trainer.step(1)
    assert p.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert q.tolist() == [0.0, -0.5]


def test_options_may_change_before_the_first_step_and_not_later() -> None:
    p = parameter()
    trainer = trainer_of(p)
    trainer.configure(clip_grad={"max_norm": 1.0}, amp=4)
    assert push(trainer, p, [3.0, 4.0]).grad_norm == pytest.approx(5.0)
    with pytest.raises(ConfigurationError, match="clip_grad cannot change after the first step"):
        trainer.configure(clip_grad=None)


def test_wrong_change_leaves_the_options_as_they_were() -> None:
    p = parameter()
    trainer = trainer_of(p, clip_grad={"max_norm": 1.0})
    with pytest.raises(ConfigurationError, match="accumulate must be"):
        trainer.configure(clip_grad=None, accumulate=0)
    with pytest.raises(ConfigurationError, match="no option 'clip'"):
        trainer.configure(clip={"max_norm": 1.0})
    assert push(trainer, p, [3.0, 4.0]).grad_norm == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amp": "static"}, "amp must be 'dynamic', a number"),
        ({"amp": "bf16"}, r"a dict such as dict\(dtype='bfloat16'\)"),
        ({"amp": True}, "amp must be 'dynamic', a number"),
        ({"amp": {"dtype": "float64"}}, "'float16' or 'bfloat16', got 'float64'"),
        ({"amp": {"loss_scale": 8, "growth_interval": 3}}, "'growth_interval' would do nothing"),
        ({"detect_anomalous_params": "warn"}, "detect_anomalous_params must be"),
        ({"schedules": "StepLR"}, "schedules must be a list"),
        ({"accumulate": 1.5}, "accumulate must be an int"),
    ],
)
def test_wrong_options_are_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer_of(parameter(), **options)


def test_schedule_by_a_metric_needs_one_at_the_end_of_an_epoch() -> None:
    p = parameter()
    trainer = trainer_of(p, schedules=[{"type": "ReduceOnPlateauLR", "patience": 0, "factor": 0.5}])
    with pytest.raises(ConfigurationError, match=r"call end_epoch\(metric\)"):
        trainer.end_epoch()
    for metric in (1.0, 2.0):
        push(trainer, p, [1.0, 0.0])
        trainer.end_epoch(metric)
    assert trainer.get_lr() == {"lr": [0.5]}


FINITE, BROKEN = Measured(5.0, True), Measured(math.nan, False)


def limits(clip: dict[str, Any] | None = None, on_nonfinite: str | None = None) -> GradientLimits:
    return make_stage_limits(clip, on_nonfinite)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 4.0, 35.0])
def test_coefficient_is_that_of_torch(norm_type: float, max_norm: float) -> None:
    p = Parameter(torch.zeros(4, dtype=torch.float64))
    p.grad = torch.tensor([3.0, -4.0, 0.5, 0.0], dtype=torch.float64)
    unclipped = p.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([p], max_norm, norm_type)
    coef = limits({"max_norm": max_norm, "norm_type": norm_type}).decide(Measured(norm.item(), True)).coef
    torch.testing.assert_close(unclipped * coef, p.grad, rtol=1e-12, atol=0.0)


def test_norm_that_is_no_number_skips_the_step_unless_it_is_to_be_ignored() -> None:
    assert limits({"max_norm": 1}).decide(BROKEN) == Decision(skip=True)
    assert limits({"max_norm": 1}, "skip").decide(BROKEN) == Decision(skip=True)
    assert limits({"max_norm": 1}, "ignore").decide(BROKEN) == Decision()


def test_finite_gradient_whose_norm_overflows_counts_as_one_that_is_not_finite() -> None:
    overflowed = Measured(math.inf, True)
    assert limits({"max_norm": 1}).decide(overflowed) == Decision(skip=True)
    assert limits({"max_norm": 1}, "ignore").decide(overflowed) == Decision()
    assert limits({"type": "value", "clip_value": 2.0}).decide(overflowed) == Decision(clip_value=2.0)
    assert limits(None, "skip").decide(overflowed) == Decision()


def test_error_if_nonfinite_means_raise() -> None:
    assert limits({"max_norm": 1, "error_if_nonfinite": True}).on_nonfinite == "raise"
    with pytest.raises(ConfigurationError, match="error_if_nonfinite=True, but on_nonfinite is 'skip'"):
        limits({"max_norm": 1, "error_if_nonfinite": True}, "skip")


def test_norm_type_may_be_infinite_under_either_spelling() -> None:
    for given in (math.inf, "inf"):
        assert make_stage_limits({"max_norm": 2, "norm_type": given}) == GradientLimits(2.0, math.inf)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs max_norm"),
        ({"type": "value"}, "needs clip_value"),
        ({"type": "norms", "max_norm": 1}, "type must be 'norm' or 'value', got 'norms'"),
        ({"max_norm": 1, "foreach": True}, "no option 'foreach'"),
        ({"type": "value", "clip_value": 1, "max_norm": 1}, "no option 'max_norm'"),
        ({"max_norm": 0}, "max_norm of .*above 0, got 0"),
        ({"max_norm": math.nan}, "got nan"),
        ({"max_norm": math.inf}, "got inf"),
        ({"max_norm": True}, "got True"),
        ({"max_norm": "1"}, "got '1'"),
        ({"max_norm": 1, "norm_type": -2}, "norm_type of .*above 0, got -2"),
        ({"max_norm": 1, "error_if_nonfinite": 1}, "must be True or False, got 1"),
    ],
)
def test_wrong_entries_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_stage_limits(given)


def test_a_number_is_no_limit() -> None:
    with pytest.raises(ArgumentTypeError, match="must be a dict, got int: 35"):
        make_stage_limits(35)


def test_unknown_way_out_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"on_nonfinite .*got 'stop'"):
        make_stage_limits(None, "stop")


def test_workers_compare_all_that_decides() -> None:
    one = limits({"max_norm": 1}).summary
    assert one == {"max_norm": 1.0, "norm_type": 2.0, "clip_value": None, "checks_finite": True}
    assert limits({"max_norm": 2}).summary != one
    assert limits({"max_norm": 1}, "ignore").summary != one
    assert limits().summary is None


@pytest.mark.parametrize("clip", [{"max_norm": 0.5}, {"type": "value", "clip_value": 0.5}])
def test_clipping_leaves_a_row_sparse_gradient_as_it_was(clip: dict[str, Any]) -> None:
    rows = torch.nn.Embedding(4, 2, sparse=True)
    torch.nn.init.zeros_(rows.weight)
    rows.weight.grad_req = "add"  # type: ignore[assignment]
    trainer = Trainer(rows, "torch:SGD", {"lr": 1.0}, None, clip_grad=clip)
    for added in (1.0, 2.0):
        (rows(torch.tensor([1])) * 3.0).sum().backward()
        trainer.step()
        assert rows.weight.grad is not None
        assert rows.weight.grad.to_dense()[1].tolist() == [3.0 * added] * 2
