"""The hook for half precision: autocast, scaled losses, and a scale that is saved and resumed with the run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.errors import ConfigurationError
from kvtrainer.hooks import Fp16OptimizerHook, GradientCumulativeFp16OptimizerHook
from kvtrainer.scaling import StaticLossScaler
from tests.unit.hooks.test_hooks import Runner, Weights, batch


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
        {"loss_scale": "static"}, {"loss_scale": True}, {"loss_scale": {"init": 3}}, {"grad_clip": 3},
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
