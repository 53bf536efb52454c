"""Hooks that update through a Trainer, over one batch or several, also in half precision."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.errors import AnomalousParametersError, ArgumentTypeError, ConfigurationError
from kvtrainer.hooks import (
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    OptimizerHook,
)
from kvtrainer.scaling import StaticLossScaler
from tests.support.hook_runner import Runner, Weights, batch


def test_weights_are_updated_after_each_batch() -> None:
    model = Weights()
    Runner(model, OptimizerHook()).run([batch([1, 2]), batch([3, 4])])
    assert model.w.tolist() == [-4, -6]


@pytest.mark.parametrize(("limit", "step"), [(1.0, [0.6, 0.8]), (35.0, [3.0, 4.0])])
def test_gradient_is_clipped_and_its_norm_before_that_is_logged(limit: float, step: list[float]) -> None:
    model = Weights()
    runner = Runner(model, OptimizerHook(grad_clip={"max_norm": limit, "norm_type": 2}))
    runner.run([batch([3, 4])])
    assert [-w for w in model.w.tolist()] == pytest.approx(step, rel=1e-5)
    assert list(runner.log_buffer.val_history["grad_norm"]) == [5.0]


def test_logged_norm_is_averaged_with_the_number_of_samples_as_weight() -> None:
    runner = Runner(Weights(), OptimizerHook(grad_clip={"max_norm": 35}))
    runner.run([batch([3, 4]), batch([0, 6], [0, 2], [0, 1])])
    runner.log_buffer.average()
    assert runner.log_buffer.output["grad_norm"] == pytest.approx((5 * 1 + 9 * 3) / 4)


def test_values_may_be_clipped_and_without_clipping_no_norm_is_logged() -> None:
    model = Weights()
    runner = Runner(model, OptimizerHook(grad_clip={"type": "value", "clip_value": 0.5}))
    runner.run([batch([3, -4])])
    assert model.w.tolist() == [-0.5, 0.5]
    assert not runner.log_buffer.val_history


def test_norm_of_a_skipped_step_is_not_logged() -> None:
    model = Weights()
    runner = Runner(model, OptimizerHook(grad_clip={"max_norm": 35}))
    runner.run([batch([math.nan, 1]), batch([3, 4])])
    assert list(runner.log_buffer.val_history["grad_norm"]) == [5.0]
    assert model.w.tolist() == [-3, -4]


def test_parameters_that_are_not_in_the_loss_are_logged_or_raise(caplog: pytest.LogCaptureFixture) -> None:
    def model() -> nn.Module:
        weights = Weights()
        weights.spare = nn.Linear(2, 3)
        return weights

    Runner(model(), OptimizerHook(detect_anomalous_params=True)).run([batch([1, 2])])
    assert [r.message for r in caplog.records] == [
        "spare.weight with shape [3, 2] is not in the computational graph",
        "spare.bias with shape [3] is not in the computational graph",
    ]
    with pytest.raises(AnomalousParametersError, match=r"spare\.weight"):
        Runner(model(), OptimizerHook(detect_anomalous_params="raise")).run([batch([1, 2])])


def test_subclass_may_clip_the_reduced_gradient_in_its_own_way() -> None:
    class Sign(OptimizerHook):
        def clip_grads(self, params: Any) -> torch.Tensor:
            grads = [p.grad for p in params]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.sign_()
            return norm

    model = Weights()
    runner = Runner(model, Sign())
    runner.run([batch([3, 4]), batch([-3, 4])])
    assert model.w.tolist() == [0, -2]
    assert list(runner.log_buffer.val_history["grad_norm"]) == [5.0, 5.0]


def test_gradient_that_a_subclass_clips_is_unscaled_and_whole() -> None:
    seen: list[list[float]] = []

    class Looking(GradientCumulativeFp16OptimizerHook):
        def clip_grads(self, params: Any) -> None:
            seen.append([float(p.grad[0]) for p in params])

    model = Weights()
    Runner(model, Looking(cumulative_iters=2, loss_scale=64.0), max_iters=4).run([batch([2, 2])] * 4)
    assert seen == [[2.0], [2.0]]
    assert model.w.tolist() == [-4, -4]


def test_clipping_by_the_hook_itself_limits_what_it_is_given() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    for options, expected, reported in (
        ({"max_norm": 1.0}, [0.6, 0.8], 5.0),
        ({"type": "value", "clip_value": 3.5}, [3.0, 3.5], None),
    ):
        parameter.grad = torch.tensor([3.0, 4.0])
        assert (
            OptimizerHook(grad_clip=options).clip_grads([parameter, nn.Parameter(torch.zeros(1))]) == reported
        )
        assert parameter.grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert OptimizerHook(grad_clip={"max_norm": 1.0}).clip_grads([nn.Parameter(torch.zeros(1))]) is None


def test_subclass_may_look_for_anomalies_in_its_own_way() -> None:
    seen: list[float] = []

    class Looking(OptimizerHook):
        def detect_anomalous_parameters(self, loss: Any, runner: Any) -> None:
            seen.append(float(loss.detach()))

    runner = Runner(Weights(), Looking(detect_anomalous_params=True))
    runner.run([batch([1, 2]), batch([1, 2])])
    assert seen == [0.0, -5.0]


def test_options_of_the_trainer_stay_where_the_hook_says_nothing() -> None:
    model = Weights()
    Runner(model, OptimizerHook(), clip_grad={"max_norm": 1.0}).run([batch([3, 4])])
    assert model.w.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_runner_may_run_again_but_a_hook_cannot_change_a_trainer_that_has_begun() -> None:
    model = Weights()
    runner = Runner(model, OptimizerHook(grad_clip={"max_norm": 35}))
    runner.run([batch([1, 2])])
    runner.run([batch([1, 2])])
    assert model.w.tolist() == [-2, -4]
    runner.hook = OptimizerHook(grad_clip={"max_norm": 1})
    with pytest.raises(ConfigurationError, match="after the first step"):
        runner.run([])


def test_optimizer_of_the_runner_may_be_the_trainer() -> None:
    model = Weights()
    trainer = Trainer(model, "sgd", {"learning_rate": 1.0}, kvstore=None)
    runner = SimpleNamespace(optimizer=trainer, outputs={"loss": model(batch([1, 2])).sum()})
    hook = OptimizerHook()
    hook.before_run(runner)
    hook.after_train_iter(runner)
    assert model.w.tolist() == [-1, -2]


def test_runner_without_a_trainer_or_a_loss_is_refused() -> None:
    model = Weights()
    with pytest.raises(ArgumentTypeError, match=r"has no kvtrainer\.Trainer"):
        OptimizerHook().before_run(SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    runner = Runner(model, OptimizerHook())
    runner.outputs = {}
    with pytest.raises(ConfigurationError, match=r"needs runner\.outputs\['loss'\]"):
        runner.hook.after_train_iter(runner)


def test_gradients_of_several_batches_make_an_update_and_the_last_window_may_be_shorter() -> None:
    model = Weights(1)
    runner = Runner(model, GradientCumulativeOptimizerHook(3), max_iters=10)
    seen = []
    after = runner.hook.after_train_iter

    def record(same: Any) -> None:
        after(same)
        seen.append(round(model.w.item(), 5))

    setattr(runner.hook, "after_train_iter", record)  # noqa: B010
    runner.run([batch([1])] * 10)
    assert seen == [0, 0, -1, -1, -1, -2, -2, -2, -3, -4]


def test_batch_normalisation_under_accumulation_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    hook = GradientCumulativeOptimizerHook(cumulative_iters=2)
    Runner(model, hook, max_iters=4).run([])
    assert "batch normalisation" in caplog.text
    assert hook.has_batch_norm(model)
    assert not hook.has_batch_norm(model[0])


def test_accumulation_needs_to_know_where_the_run_ends() -> None:
    trainer = Trainer(Weights(), "sgd", kvstore=None)
    with pytest.raises(ConfigurationError, match=r"runner\.iter and runner\.max_iters"):
        GradientCumulativeOptimizerHook(cumulative_iters=2).before_run(SimpleNamespace(trainer=trainer))
    assert trainer.update_params(trainer.param_groups[0]["params"][0].sum()).updated  # nothing accumulates
    with pytest.raises(ConfigurationError, match="cumulative_iters"):
        GradientCumulativeOptimizerHook(cumulative_iters=0)


def test_static_scale_is_the_default_and_whole_numbers_are_scales_too() -> None:
    for hook, scale in ((Fp16OptimizerHook(), 512), (Fp16OptimizerHook(loss_scale=64), 64)):
        model = Weights()
        runner = Runner(model, hook)
        runner.run([batch([1, 2])])
        assert isinstance(runner.trainer.loss_scaler, StaticLossScaler)
        assert runner.trainer.loss_scaler.loss_scale == scale
        assert model.w.tolist() == [-1, -2]


def test_overflow_skips_the_step_under_a_static_scale() -> None:
    model = Weights(1)
    runner = Runner(model, Fp16OptimizerHook(loss_scale=512.0))
    runner.run([batch([1]), batch([math.inf]), batch([1])])
    assert model.w.item() == -2
    assert runner.meta["fp16"]["loss_scaler"] == {"loss_scale": 512}


def test_dynamic_scale_backs_off_and_its_state_is_in_the_meta_data_after_every_batch() -> None:
    hook = Fp16OptimizerHook(loss_scale={"init_scale": 8.0, "growth_interval": 3})
    runner = Runner(Weights(1), hook)
    scales = []
    after = hook.after_train_iter

    def record(same: Any) -> None:
        after(same)
        scales.append(runner.meta["fp16"]["loss_scaler"]["scale"])

    setattr(hook, "after_train_iter", record)  # noqa: B010
    runner.run([batch([math.inf if step == 7 else 1]) for step in range(1, 12)])
    assert scales == [8, 8, 16, 16, 16, 32, 16, 16, 16, 32, 32]


def test_scale_is_resumed_from_the_meta_data() -> None:
    old = {
        "cur_scale": 64.0, "cur_iter": 5, "mode": "dynamic", "last_overflow_iter": 2, "scale_factor": 2.0,
        "scale_window": 1000,
    }  # fmt: skip
    for saved, scale in ((old, 64), ({}, 2.0**16), ({**StaticLossScaler(4).state_dict()}, 4)):
        runner = Runner(Weights(1), Fp16OptimizerHook(loss_scale="dynamic"))
        runner.meta = {"fp16": {"loss_scaler": saved}}
        runner.run([])
        assert runner.trainer.loss_scaler is not None
        assert runner.trainer.loss_scaler.loss_scale == scale


def test_gradient_is_clipped_after_it_was_unscaled() -> None:
    model = Weights()
    runner = Runner(model, Fp16OptimizerHook(grad_clip={"max_norm": 1.0}, loss_scale=64))
    runner.run([batch([3, 4])])
    assert model.w.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert list(runner.log_buffer.val_history["grad_norm"]) == [5.0]


class Probe(nn.Module):
    """Remembers in which precision its forward pass multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.fp16_enabled = False
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.seen.append((y.dtype, self.fp16_enabled))
        if x.shape[0] == 0:
            raise ValueError("no samples")
        return y


def test_forward_pass_computes_in_half_precision_while_the_run_lasts() -> None:
    model = Probe()
    runner = Runner(model, Fp16OptimizerHook(loss_scale="dynamic"))
    runner.run([torch.ones(1, 2)])
    model(torch.ones(1, 2))
    assert model.seen == [(torch.float16, True), (torch.float32, False)]
    assert model.layer.weight.dtype == torch.float32


def test_every_replica_computes_its_loss_in_half_precision_while_the_run_lasts() -> None:
    model = DataParallel(Probe(), ["cpu"] * 2)
    hook, trainer = Fp16OptimizerHook(loss_scale=8), Trainer(model, "sgd", kvstore="device")
    runner = SimpleNamespace(trainer=trainer, model=model, meta={})
    hook.before_run(runner)
    model.forward_losses(torch.ones(2, 2), lambda replica, x: replica(x).float().sum())
    hook.after_run(runner)
    model.forward_losses(torch.ones(2, 2), lambda replica, x: replica(x).sum())
    seen = [replica.seen for replica in model.replicas]
    assert seen == [[(torch.float16, True), (torch.float32, False)]] * 2


def test_autocast_ends_where_the_forward_pass_raises() -> None:
    runner = Runner(Probe(), Fp16OptimizerHook(loss_scale="dynamic"))
    with pytest.raises(ValueError, match="no samples"):
        runner.run([torch.ones(0, 2)])
    assert not torch.is_autocast_enabled("cpu")


def test_accumulated_gradients_carry_one_scale() -> None:
    model = Weights(1)
    hook = GradientCumulativeFp16OptimizerHook(
        cumulative_iters=3, loss_scale={"init_scale": 8.0, "growth_interval": 1}
    )
    Runner(model, hook, max_iters=10).run([batch([1])] * 10)
    assert model.w.item() == pytest.approx(-4)


def test_single_worker_may_be_asked_for() -> None:
    model = Weights(1)
    runner = Runner(model, Fp16OptimizerHook(distributed=False))
    runner.run([batch([1])])
    assert model.w.item() == -1
    runner = Runner(model, Fp16OptimizerHook(distributed=False))
    trainer, runner.trainer = runner.trainer, None  # type: ignore[assignment]

    class Job:
        """Stands for a Trainer whose store has three workers."""

        kvstore = type("Store", (), {"num_workers": 3})()
        update_params = trainer.update_params
        configure = trainer.configure

    runner.trainer = Job()  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="3 workers"):
        runner.run([])


@pytest.mark.parametrize("options", [{"coalesce": False}, {"bucket_size_mb": 2}])
def test_size_of_buckets_is_refused_where_nothing_is_reduced_over_ranks(options: dict[str, Any]) -> None:
    hook = Fp16OptimizerHook(**options)
    assert {name: getattr(hook, name) for name in options} == options
    for given in (None, "device", "local", kvstore.create("device")):
        with pytest.raises(
            ConfigurationError, match=r"would have no effect: kvstore .* does not reduce over ranks"
        ):
            Runner(Weights(1), hook, kvstore=given).run([])


@pytest.mark.parametrize(
    "options",
    [
        {"coalesce": 1}, {"coalesce": False, "bucket_size_mb": 2}, {"bucket_size_mb": 0},
        {"bucket_size_mb": True}, {"loss_scale": None},
        {"loss_scale": "static"}, {"loss_scale": True}, {"loss_scale": {"init": 3}},
        {"grad_clip": 3}, {"grad_clip": {"max": 3}}, {"detect_anomalous_params": "loud"},
    ],
)  # fmt: skip
def test_impossible_options_are_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Fp16OptimizerHook(**options)


def test_methods_of_mmcvs_hook_copy_gradients_and_parameters() -> None:
    net = nn.Linear(1, 1, bias=False).half()
    net.weight.grad = torch.ones_like(net.weight)
    [master] = [p.detach().float() for p in net.parameters()]
    hook = Fp16OptimizerHook()
    hook.copy_grads_to_fp32(net, [master])
    assert master.grad is not None
    master -= master.grad
    hook.copy_params_to_fp16(net, [master])
    assert net.weight.item() == pytest.approx(master.item(), abs=1e-3)
