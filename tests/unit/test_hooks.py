"""Hooks: their stages, order and names; updates through a Trainer; learning rates and momentum that they write."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.errors import (
    AnomalousParametersError,
    ArgumentTypeError,
    ConfigurationError,
    UnregisteredNameError,
)
from kvtrainer.hooks import (
    CyclicLrUpdaterHook,
    FixedLrUpdaterHook,
    Fp16OptimizerHook,
    GradientCumulativeFp16OptimizerHook,
    GradientCumulativeOptimizerHook,
    Hook,
    LrUpdaterHook,
    MomentumUpdaterHook,
    OneCycleLrUpdaterHook,
    OptimizerHook,
    Priority,
    StepLrUpdaterHook,
    get_priority,
)
from kvtrainer.log_buffer import LogBuffer
from kvtrainer.options.loss_scaler import StaticLossScaler
from kvtrainer.registry import HOOKS
from tests.support.scalar_training import zeros
from tests.unit.schedules.test_formulas import MMCV


class Runner:
    """A loop over batches that calls one hook, as MMCV's runners do."""

    def __init__(self, model: nn.Module, hook: Hook, max_iters: int = 0, **options: Any) -> None:
        self.model, self.hook = model, hook
        self.trainer = Trainer(model, "sgd", {"learning_rate": 1.0}, **{"kvstore": None, **options})
        self.log_buffer = LogBuffer()
        self.meta: dict[str, Any] = {}
        self.logger = logging.getLogger("runner")
        self.iter, self.max_iters = 0, max_iters
        self.outputs: Any = None

    def run(self, batches: list[torch.Tensor]) -> None:
        self.hook.before_run(self)
        for batch in batches:
            self.hook.before_train_iter(self)
            self.outputs = {"loss": self.model(batch).sum(), "num_samples": len(batch)}
            self.hook.after_train_iter(self)
            self.iter += 1
        self.hook.after_run(self)


class Weights(nn.Module):
    """The loss of a batch is its sum, over samples, times the weights; so the gradient is that sum."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(count))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * self.w


def batch(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_hook_names_the_stages_at_which_it_does_something() -> None:
    class Every(Hook):
        def after_epoch(self, runner: Any) -> None: ...

        def before_train_iter(self, runner: Any) -> None: ...

    assert Hook().get_triggered_stages() == []
    assert OptimizerHook().get_triggered_stages() == ["before_run", "after_train_iter"]
    assert Every().get_triggered_stages() == ["before_train_iter", "after_train_epoch", "after_val_epoch"]


def test_priorities_are_mmcvs() -> None:
    assert [get_priority(one) for one in ("HIGHEST", "very_high", Priority.NORMAL, 33)] == [0, 10, 50, 33]
    assert get_priority(OptimizerHook.priority) == get_priority("ABOVE_NORMAL") == 40
    wrong = {101: ConfigurationError, -1: ConfigurationError, "SOON": UnregisteredNameError}
    for bad, error in {**wrong, True: ArgumentTypeError, 1.5: ArgumentTypeError}.items():
        with pytest.raises(error):
            get_priority(bad)  # type: ignore[arg-type]


def test_hooks_can_ask_where_a_run_is() -> None:
    hook = Hook()
    runner = SimpleNamespace(epoch=3, iter=19, inner_iter=4, max_epochs=4, max_iters=20, data_loader=range(5))
    assert [hook.every_n_epochs(runner, n) for n in (0, 2, 3, 4)] == [False, True, False, True]
    assert [hook.every_n_iters(runner, n) for n in (-1, 10, 6)] == [False, True, False]
    assert [hook.every_n_inner_iters(runner, n) for n in (5, 2)] == [True, False]
    assert hook.end_of_epoch(runner)
    assert hook.is_last_epoch(runner)
    assert hook.is_last_iter(runner)


def test_places_of_training_and_validation_are_places_of_any_epoch_and_batch() -> None:
    general = [f"{when}_{what}" for what in ("epoch", "iter") for when in ("before", "after")]
    seen: list[str] = []
    methods = {name: lambda self, _, n=name: seen.append(n) for name in general}
    hook: Any = type("Recorder", (Hook,), methods)()
    for name in general:
        for kind in ("train", "val"):
            getattr(hook, name.replace("_", f"_{kind}_"))(None)
    assert seen == [name for name in general for _ in range(2)]


def test_gradient_is_clipped_and_its_norm_before_that_is_logged() -> None:
    for options, step, logged in (
        ({"max_norm": 1.0}, [0.6, 0.8], [5.0]),
        ({"type": "value", "clip_value": 3.5}, [3.0, 3.5], []),
    ):
        model = Weights()
        runner = Runner(model, OptimizerHook(grad_clip=options))
        runner.run([batch([3, 4])])
        assert [-w for w in model.w.tolist()] == pytest.approx(step, rel=1e-5)
        assert list(runner.log_buffer.val_history.get("grad_norm", [])) == logged
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor([3.0, 4.0])
        norm = OptimizerHook(grad_clip=options).clip_grads([parameter, nn.Parameter(torch.zeros(1))])
        assert norm == (logged[0] if logged else None)
        assert parameter.grad.tolist() == pytest.approx(step, rel=1e-5)
    assert OptimizerHook(grad_clip={"max_norm": 1.0}).clip_grads([nn.Parameter(torch.zeros(1))]) is None


def test_logged_norm_is_averaged_by_samples_without_that_of_a_skipped_step() -> None:
    model = Weights()
    runner = Runner(model, OptimizerHook(grad_clip={"max_norm": 35}))
    runner.run([batch([3, 4]), batch([math.nan, 1]), batch([0, 6], [0, 2], [0, 1])])
    runner.log_buffer.average()
    assert runner.log_buffer.output["grad_norm"] == pytest.approx((5 * 1 + 9 * 3) / 4)
    assert model.w.tolist() == [-3, -13]


def test_parameters_that_are_not_in_the_loss_are_logged_or_raise(caplog: pytest.LogCaptureFixture) -> None:
    model = Weights()
    model.spare = nn.Linear(2, 3)
    Runner(model, OptimizerHook(detect_anomalous_params=True)).run([batch([1, 2])])
    assert [r.message.split()[0] for r in caplog.records] == ["spare.weight", "spare.bias"]
    with pytest.raises(AnomalousParametersError, match=r"spare\.weight"):
        Runner(model, OptimizerHook(detect_anomalous_params="raise")).run([batch([1, 2])])


def test_optimizer_of_the_runner_may_be_the_trainer_and_a_subclass_may_look_for_anomalies() -> None:
    seen: list[float] = []

    class Looking(OptimizerHook):
        def detect_anomalous_parameters(self, loss: Any, runner: Any) -> None:
            seen.append(float(loss.detach()))

    model, hook = Weights(), Looking(detect_anomalous_params=True)
    runner = SimpleNamespace(optimizer=Trainer(model, "sgd", {"learning_rate": 1.0}, kvstore=None))
    hook.before_run(runner)
    for _ in range(2):
        runner.outputs = {"loss": model(batch([1, 2])).sum()}
        hook.after_train_iter(runner)
    assert seen == [0.0, -5.0]
    assert model.w.tolist() == [-2, -4]


def noted(hook: Any, note: Any) -> list[Any]:
    """What `note` says after each batch."""
    seen, after = [], hook.after_train_iter

    def record(runner: Any) -> None:
        after(runner)
        seen.append(note(runner))

    hook.after_train_iter = record
    return seen


def test_gradients_of_several_batches_make_an_update_and_the_last_window_may_be_shorter() -> None:
    model, hook = Weights(1), GradientCumulativeOptimizerHook(3)
    seen = noted(hook, lambda runner: round(model.w.item(), 5))
    Runner(model, hook, max_iters=10).run([batch([1])] * 10)
    assert seen == [0, 0, -1, -1, -1, -2, -2, -2, -3, -4]


def test_dynamic_scale_backs_off_and_its_state_is_in_the_meta_data_after_every_batch() -> None:
    hook = Fp16OptimizerHook(loss_scale={"init_scale": 8.0, "growth_interval": 3})
    seen = noted(hook, lambda runner: runner.meta["fp16"]["loss_scaler"]["scale"])
    Runner(Weights(1), hook).run([batch([math.inf if step == 7 else 1]) for step in range(1, 12)])
    assert seen == [8, 8, 16, 16, 16, 32, 16, 16, 16, 32, 32]


def test_single_worker_may_be_asked_for() -> None:
    model = Weights(1)
    runner = Runner(model, Fp16OptimizerHook(distributed=False))
    runner.run([batch([1])])
    assert model.w.item() == -1
    three = SimpleNamespace(num_workers=3)
    job: Any = SimpleNamespace(kvstore=three, update_params=None, configure=None)  # stands for a Trainer
    with pytest.raises(ConfigurationError, match="3 workers"):
        Fp16OptimizerHook(distributed=False).before_run(SimpleNamespace(trainer=job))


def test_subclass_may_clip_the_reduced_gradient_in_its_own_way() -> None:
    class Sign(OptimizerHook):
        def clip_grads(self, params: Any) -> torch.Tensor:
            grads = [p.grad for p in params]
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.sign_()
            return norm

    model = Weights()
    runner = Runner(model, Sign(grad_clip={"max_norm": 1e-3}))
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


def test_runner_without_a_trainer_or_a_loss_is_refused() -> None:
    model = Weights()
    with pytest.raises(ArgumentTypeError, match=r"has no kvtrainer\.Trainer"):
        OptimizerHook().before_run(SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    runner = Runner(model, OptimizerHook())
    runner.outputs = {}
    with pytest.raises(ConfigurationError, match=r"needs runner\.outputs\['loss'\]"):
        runner.hook.after_train_iter(runner)


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


def test_scale_is_resumed_from_the_meta_data() -> None:
    old = {
        "cur_scale": 64.0, "cur_iter": 5, "mode": "dynamic", "last_overflow_iter": 2, "scale_factor": 2.0,
        "scale_window": 1000,
    }  # fmt: skip
    for saved, scale in ((old, 64), ({}, 2.0**16), (StaticLossScaler(4).state_dict(), 4)):
        runner = Runner(Weights(1), Fp16OptimizerHook(loss_scale="dynamic"))
        runner.meta = {"fp16": {"loss_scaler": saved}}
        runner.run([])
        assert runner.trainer.loss_scaler is not None
        assert runner.trainer.loss_scaler.loss_scale == scale


def test_hook_has_its_scaler_before_the_run_and_the_trainer_takes_that_one() -> None:
    hook = Fp16OptimizerHook(loss_scale="dynamic")
    assert hook.loss_scaler is not None
    assert hook.loss_scaler.loss_scale == 2.0**16
    hook.loss_scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0).state_dict())
    runner = Runner(Weights(), hook)
    runner.run([batch([1, 2])])
    assert runner.trainer.loss_scaler is hook.loss_scaler
    assert (hook.loss_scaler.loss_scale, hook.loss_scaler.clean_steps) == (8, 1)
    assert Fp16OptimizerHook(loss_scale={"dtype": "bfloat16"}).loss_scaler is None


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


@pytest.mark.parametrize("options", [{"coalesce": False}, {"bucket_size_mb": 2}])
def test_size_of_buckets_is_refused_where_nothing_is_reduced_over_ranks(options: dict[str, Any]) -> None:
    hook = Fp16OptimizerHook(**options)
    assert {name: getattr(hook, name) for name in options} == options
    for given in (None, "device", "local", kvstore.create("device")):
        with pytest.raises(ConfigurationError, match="does not reduce over ranks"):
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


def scheduled(hook: Any, optimizer: Any, epochs: int, length: int, key: str = "lr") -> list[float]:
    """What the first group has in each batch of a run in which the hook takes part."""
    runner = SimpleNamespace(optimizer=optimizer, epoch=0, iter=0, data_loader=range(length))
    runner.max_epochs, runner.max_iters = epochs, epochs * length
    hook.before_run(runner)
    seen = []
    for runner.epoch in range(epochs):
        hook.before_train_epoch(runner)
        for _ in range(length):
            hook.before_train_iter(runner)
            seen.append(optimizer.param_groups[0][key])
            runner.iter += 1
    return seen


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(("policy", "name", "options", "base", "expected"), MMCV)
def test_hooks_of_schedules_write_the_values_of_mmcv(
    policy: str, name: str, options: dict[str, Any], base: float, expected: Sequence[float], length: int
) -> None:
    # As MMCV's runner finds the class of a policy; those of a cycle go by batch only.
    kind = policy.title() if policy == policy.lower() else policy
    cfg = {"type": kind + {"lr": "LrUpdaterHook", "momentum": "MomentumUpdaterHook"}[name], **options}
    by_batch = length == 1 or policy in ("cyclic", "OneCycle")
    cfg |= {"by_epoch": False} if by_batch else {}
    optimizer = torch.optim.SGD(zeros(1), **{"lr": 0.1, "momentum": 0.9, name: base})
    if by_batch:
        seen = scheduled(HOOKS.build(cfg), optimizer, 1, len(expected), name)
    else:
        seen = scheduled(HOOKS.build(cfg), optimizer, len(expected), length, name)[::length]
    assert seen == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    "warm_up", [{"warmup_iters": 4}, {"warmup_iters": 2, "warmup_by_epoch": True}], ids=["batches", "epochs"]
)
def test_hook_of_a_schedule_by_epoch_warms_up_from_batch_to_batch(warm_up: dict[str, Any]) -> None:
    hook = StepLrUpdaterHook(step=[1, 3], gamma=0.5, warmup="linear", warmup_ratio=0.2, **warm_up)
    optimizer = torch.optim.SGD(zeros(1), lr=0.1)
    expected = [0.1 * factor for factor in (0.2, 0.4, 0.5 * 0.6, 0.5 * 0.8, 0.5, 0.5, 0.25, 0.25)]
    assert scheduled(hook, optimizer, 4, 2) == pytest.approx(expected)
    assert hook.step == [1, 3]
    assert hook.priority == Priority.VERY_HIGH


def test_classes_derived_from_the_hook_have_a_formula_of_their_own() -> None:
    class Root(LrUpdaterHook):
        def get_lr(self, runner: Any, base_lr: float) -> float:
            return base_lr / math.sqrt(1 + runner.iter)

    class Half(MomentumUpdaterHook):
        def get_momentum(self, runner: Any, base_momentum: float) -> float:
            return base_momentum / 2

    optimizer = torch.optim.SGD(zeros(1), lr=0.1, momentum=0.8)
    rates = scheduled(Root(by_epoch=False), optimizer, 1, 3)
    assert rates == pytest.approx([0.1, 0.1 / 2**0.5, 0.1 / 3**0.5])
    warm = Half(warmup="constant", warmup_iters=1)
    assert scheduled(warm, optimizer, 1, 2, "momentum") == pytest.approx([0.4 / 0.9, 0.4])
    adam = torch.optim.Adam(zeros(1), betas=(0.8, 0.99))
    scheduled(Half(), adam, 1, 1)
    assert adam.param_groups[0]["betas"] == (0.4, 0.99)
    with pytest.raises(NotImplementedError):
        scheduled(LrUpdaterHook(), optimizer, 1, 1)


def test_formula_of_a_derived_class_finds_all_options_under_mmcvs_names() -> None:
    class Own(StepLrUpdaterHook):
        def get_lr(self, runner: Any, base_lr: float) -> float:
            options: Any = self
            return float(max(base_lr * options.gamma ** (runner.iter // options.step), options.min_lr or 0))

    optimizer = torch.optim.SGD(zeros(1), lr=0.5)
    assert scheduled(Own(step=2, by_epoch=False), optimizer, 1, 3) == pytest.approx([0.5, 0.5, 0.05])
    momentum = HOOKS.build({"type": "StepMomentumUpdaterHook", "step": 2, "min_momentum": 0.1})
    assert (momentum.gamma, momentum.min_momentum) == (0.5, 0.1)


def test_hook_writes_the_rates_of_a_trainer_before_it_updates() -> None:
    model = Weights()
    schedule, update = CyclicLrUpdaterHook(target_ratio=(3.0, 1.0), step_ratio_up=0.5), OptimizerHook()
    runner = Runner(model, update, max_iters=2)
    schedule.before_run(runner)
    for expected in (-1.0, -1.0 - 3.0):  # the rate is 1, and then 3
        schedule.before_train_iter(runner)
        runner.run([batch([1.0, 1.0])])
        assert model.w.tolist() == pytest.approx([expected] * 2)


def test_one_cycle_comes_to_mmcvs_numbers_to_the_last_bit() -> None:
    hook = OneCycleLrUpdaterHook(max_lr=0.01, pct_start=0.5)
    seen = scheduled(hook, torch.optim.SGD(zeros(1), lr=0.1), 1, 10)
    assert (seen[0], seen[5], seen[9]) == (0.0003999999999999993, 0.00904508879153485, 4e-08)


def test_peaks_of_a_cycle_may_differ_between_groups_and_optimizers() -> None:
    def made(*rates: float) -> torch.optim.SGD:
        return torch.optim.SGD([{"params": zeros(1), "lr": rate} for rate in rates])

    several = {"body": made(0.1, 0.2), "head": made(0.3)}
    hook = OneCycleLrUpdaterHook(max_lr={"body": [1.0, 2.0], "head": 4.0}, div_factor=10.0)
    runner = SimpleNamespace(optimizer=several, iter=0, max_iters=10)
    hook.before_run(runner)
    hook.before_train_iter(runner)
    rates = {name: [group["lr"] for group in one.param_groups] for name, one in several.items()}
    assert hook.base_lr == {"body": [0.1, 0.2], "head": [0.4]}
    assert rates == {"body": pytest.approx([0.1, 0.2]), "head": pytest.approx([0.4])}
    with pytest.raises(ConfigurationError, match="max_lr has 3 values"):
        scheduled(OneCycleLrUpdaterHook(max_lr=[1.0, 2.0, 3.0]), made(0.1, 0.2), 1, 5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("StepLrUpdaterHook", {}),
        ("StepLrUpdaterHook", {"step": 0}),
        ("ExpLrUpdaterHook", {"gamma": 0.5, "gama": 1}),
        ("StepLrUpdaterHook", {"step": 2, "by_epoch": [8, 11]}),
        ("FixedLrUpdaterHook", {"warmup": "slow", "warmup_iters": 3}),
        ("FixedLrUpdaterHook", {"warmup": "linear"}),
        ("CyclicLrUpdaterHook", {"by_epoch": True}),
        ("CyclicLrUpdaterHook", {"gamma": 5}),
        ("CosineAnnealingMomentumUpdaterHook", {}),
    ],
)
def test_impossible_options_of_schedules_are_refused_at_once(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        HOOKS.build({"type": kind, **options})


def test_hook_beside_a_schedule_of_the_trainer_is_refused() -> None:
    runner = Runner(Weights(), Hook(), schedules=[{"policy": "exp", "gamma": 0.5}])
    with pytest.raises(ConfigurationError, match="'lr'"):
        FixedLrUpdaterHook().before_run(runner)
    with pytest.raises(ArgumentTypeError):
        FixedLrUpdaterHook().before_run(SimpleNamespace())
    rates_only = SimpleNamespace(optimizer=torch.optim.Adagrad(zeros(1)))
    with pytest.raises(KeyError):
        MomentumUpdaterHook().before_run(rates_only)
