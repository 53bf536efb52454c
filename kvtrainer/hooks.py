"""Hooks under MMCV's names, through which a runner trains with a Trainer.

A runner is any object that calls `before_run`, `before_train_epoch`, `after_train_iter` and so on at these points of
its loop. Each hook class says which attributes of the runner it reads. There are two families:

- `OptimizerHook` and its subclasses call the Trainer's whole step after each batch. Their options are translated into
  the Trainer's (`hook_arguments`) and set once, before the run. Clipping, loss scaling and accumulation are then done
  by the Trainer, and so work over every kvstore.
- `ValueHook` and its subclasses write learning rates and momentum into parameter groups. They count the runner's
  batches and epochs; the Trainer's own schedules count updates. The formulas are those of `kvtrainer.schedules`.

`lr_config` and `momentum_config` of a Trainer need no hook; these classes are for existing runners, and for classes
derived from MMCV's. Hooks are not thread-safe: a runner calls them one after another.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from kvstore_server import check
from kvtrainer.anomalies import checked_mode, report_anomalies
from kvtrainer.common.registry_class import HOOKS
from kvtrainer.config import hook_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnregisteredNameError
from kvtrainer.options.loss_scaler import make_precision, unscale
from kvtrainer.options.stages import make_stage_limits
from kvtrainer.parallel import DataParallel
from kvtrainer.precision import copy_grads_to_fp32, copy_params_to_fp16
from kvtrainer.ranks.process_group import Buckets
from kvtrainer.schedules.config import WARMUP_OF_MOMENTUM, is_stepwise_schedule
from kvtrainer.schedules.formulas import Formula, check_formula_options, make_formula
from kvtrainer.schedules.param_schedule import ScheduledGroupValue, ScheduleSpec, ScheduleWarmup
from kvtrainer.types import StepResult

_log = logging.getLogger(__name__)

Values = list[Any] | dict[str, list[Any]]
"""A value for each parameter group; for several optimizers, a list by the name of each."""


class Priority(IntEnum):
    """The order in which hooks run at the same point: the smallest number first. The numbers are MMCV's.

    Learning-rate schedules have VERY_HIGH, momentum schedules HIGH, the optimizer ABOVE_NORMAL.
    """

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority) -> int:
    """Return a priority, a number from 0 (first) to 100 or a name in any case, as a number.

    Raises:
        UnregisteredNameError: There is no priority of that name; also a KeyError.
        ArgumentTypeError, ConfigurationError: It has another type, or is out of range.
    """
    if isinstance(priority, str):
        check.known("Priority", [priority.upper()], Priority.__members__, error=UnregisteredNameError)
        return Priority[priority.upper()].value
    if not check.is_integer(priority):
        names = ", ".join(Priority.__members__)
        raise ArgumentTypeError(f"a priority is an int from 0 to 100 or one of {names}, got {priority!r}")
    return check.integer("a priority", priority, 0, 100)


class Hook:
    """A hook that does nothing. Subclasses override what they need; a runner calls the methods by name.

    By default, the methods for training and validation call the general ones.
    """

    stages: ClassVar[tuple[str, ...]] = (
        "before_run", "before_train_epoch", "before_train_iter", "after_train_iter", "after_train_epoch",
        "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_run",
    )  # fmt: skip
    """The points in a runner's loop, in order."""
    priority: Priority = Priority.NORMAL
    """Where a runner puts the hook by default."""

    def get_triggered_stages(self) -> list[str]:
        """Return the stages at which the hook does something, in order."""
        kind = type(self)
        found = {name for name in _PLACES if getattr(kind, name) is not getattr(Hook, name)}
        return [name for name in self.stages if found & {name, _GENERAL.get(name, name)}]

    def before_run(self, runner: Any) -> None:
        """Called before the first epoch."""

    def after_run(self, runner: Any) -> None:
        """Called after the last epoch."""

    def before_epoch(self, runner: Any) -> None:
        """Called before any pass over data."""

    def after_epoch(self, runner: Any) -> None:
        """Called after any pass over data."""

    def before_iter(self, runner: Any) -> None:
        """Called before any batch."""

    def after_iter(self, runner: Any) -> None:
        """Called after any batch."""

    def before_train_epoch(self, runner: Any) -> None:
        """Called before a pass over the training data."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: Any) -> None:
        """Called after a pass over the training data."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: Any) -> None:
        """Called before the forward pass of a training batch."""
        self.before_iter(runner)

    def after_train_iter(self, runner: Any) -> None:
        """Called after the forward pass of a training batch, when `runner.outputs` is set."""
        self.after_iter(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Called before a pass over the validation data."""
        self.before_epoch(runner)

    def after_val_epoch(self, runner: Any) -> None:
        """Called after a pass over the validation data."""
        self.after_epoch(runner)

    def before_val_iter(self, runner: Any) -> None:
        """Called before a validation batch."""
        self.before_iter(runner)

    def after_val_iter(self, runner: Any) -> None:
        """Called after a validation batch."""
        self.after_iter(runner)

    def every_n_epochs(self, runner: Any, n: int) -> bool:
        """Return whether the current epoch is the last of each `n`; False for n < 1."""
        return n > 0 and (runner.epoch + 1) % n == 0

    def every_n_inner_iters(self, runner: Any, n: int) -> bool:
        """Return whether the batch is the last of each `n` in its epoch; False for n < 1."""
        return n > 0 and (runner.inner_iter + 1) % n == 0

    def every_n_iters(self, runner: Any, n: int) -> bool:
        """Return whether the batch is the last of each `n`; False for n < 1."""
        return n > 0 and (runner.iter + 1) % n == 0

    def end_of_epoch(self, runner: Any) -> bool:
        """Return whether the batch is the last of its epoch."""
        return bool(runner.inner_iter + 1 == len(runner.data_loader))

    def is_last_epoch(self, runner: Any) -> bool:
        """Return whether this is the last epoch."""
        return bool(runner.epoch + 1 == runner.max_epochs)

    def is_last_iter(self, runner: Any) -> bool:
        """Return whether this is the last batch."""
        return bool(runner.iter + 1 == runner.max_iters)


_GENERAL = {name: name.replace("train_", "").replace("val_", "") for name in Hook.stages}
"""Stage → the method that it calls by default."""
_PLACES = frozenset({*_GENERAL, *_GENERAL.values()})


@HOOKS.register()
class OptimizerHook(Hook):
    """Runs backward pass, clipping and update for the loss in `runner.outputs`, through the Trainer's own step.

    `runner` is any object with a Trainer as its `trainer` or `optimizer`, and `outputs`: {"loss": tensor,
    "num_samples": int}. If it has a `log_buffer`, that gets "grad_norm", the norm before clipping, weighted by
    `num_samples`; except from a skipped step, whose infinite norm would spoil the average.

    A subclass may override `clip_grads`, which then clips the reduced gradient in place of the Trainer, and
    `detect_anomalous_parameters`, as with MMCV's hooks.

    Args:
        grad_clip: The Trainer's option `clip_grad`; None leaves that option unchanged.
        detect_anomalous_params: True or "log" logs parameters that the loss does not depend on, "raise" raises.

    Raises:
        ConfigurationError: An argument is wrong. `before_run` raises it if the Trainer refuses an option, as it does
            after its first step.
    """

    priority = Priority.ABOVE_NORMAL

    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, detect_anomalous_params: bool | str = False
    ) -> None:
        make_stage_limits(grad_clip)
        self.grad_clip = None if grad_clip is None else dict(grad_clip)
        self.detect_anomalous_params = checked_mode(detect_anomalous_params)
        self._configured: weakref.ref[Any] | None = None

    def before_run(self, runner: Any) -> None:
        """Set the Trainer's options, once per Trainer, so that a runner may run again."""
        trainer = trainer_of(runner)
        if self._configured is None or self._configured() is not trainer:
            options = hook_arguments(self._own_options())
            if options:
                trainer.configure(**options)
            self._hand_over(trainer)
            self._configured = weakref.ref(trainer)

    def after_train_iter(self, runner: Any) -> None:
        """Run the step. When it returns the weights are new, unless gradients are being accumulated."""
        outputs = runner.outputs
        if not isinstance(outputs, Mapping) or "loss" not in outputs:
            raise ConfigurationError(
                f"{type(self).__name__} needs runner.outputs['loss'], got {outputs!r:.80}; let train_step return "
                "dict(loss=..., num_samples=...)"
            )
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(outputs["loss"], runner)
        norm = self._update(trainer_of(runner), outputs["loss"])
        buffer = getattr(runner, "log_buffer", None)
        if buffer is not None and norm is not None:
            buffer.update({"grad_norm": float(norm)}, outputs.get("num_samples", 1))

    def clip_grads(self, params: Iterable[Tensor]) -> Tensor | None:
        """Clip the gradients of these parameters according to `grad_clip`. Return the norm before, if a norm is
        limited.

        The Trainer does not call this method: it clips the reduced gradient itself, in this process or on servers. Only
        an override is called, between `allreduce_grads()` and `update()`, which requires that the store does not run
        the optimizer.
        """
        given = dict(self.grad_clip or {})
        kind, grads = given.pop("type", "norm"), [p for p in params if p.requires_grad and p.grad is not None]
        if not grads or self.grad_clip is None:
            return None
        if kind == "norm":
            return torch.nn.utils.clip_grad_norm_(grads, **given)
        torch.nn.utils.clip_grad_value_(grads, **given)
        return None

    def detect_anomalous_parameters(self, loss: Any, runner: Any) -> None:
        """Log every parameter that the loss does not depend on, or raise; to the runner's logger if it has one."""
        model, logger = getattr(runner, "model", None), getattr(runner, "logger", None)
        if isinstance(model, torch.nn.Module) and not isinstance(model, DataParallel):
            report_anomalies(loss, model, self.detect_anomalous_params, logger)
        else:  # for replicas, the Trainer knows the parameters' names
            trainer_of(runner).report_anomalies(loss, self.detect_anomalous_params, logger)

    def _update(self, trainer: Any, loss: Any) -> float | None:
        """Run the step; return the norm to log."""
        if type(self).clip_grads is OptimizerHook.clip_grads:
            result: StepResult = trainer.update_params(loss)
            return None if result.skipped else result.grad_norm
        # A subclass clips by itself, so the step is run in its two halves.
        trainer.backward(loss)
        trainer.allreduce_grads()
        norm = None
        if trainer.accumulation.is_boundary:
            if trainer.loss_scaler is not None:
                unscale(trainer)
            norm = self.clip_grads(p for group in trainer.param_groups for p in group["params"])
        trainer.update()
        return None if norm is None or trainer.last.skipped else float(norm)

    def _hand_over(self, trainer: Any) -> None:
        """Called once, after the options were set, for what is not an option."""

    def _own_options(self) -> dict[str, Any]:
        is_told = {"loss_scale": True, "coalesce": True, "bucket_size_mb": True}
        is_told["grad_clip"] = type(self).clip_grads is OptimizerHook.clip_grads
        is_told["cumulative_iters"] = getattr(self, "cumulative_iters", 1) > 1
        return {name: value for name, value in vars(self).items() if is_told.get(name)}


@HOOKS.register()
class Fp16OptimizerHook(OptimizerHook):
    """An OptimizerHook with loss scaling, for a model that computes in half precision where that is safe.

    During the run the forward pass of `runner.model` runs in `trainer.context()`, that is, under torch.autocast. After
    every batch the scaler's state is stored in `runner.meta["fp16"]["loss_scaler"]`, and so in checkpoints;
    `before_run` loads it from there.

    Args:
        grad_clip, detect_anomalous_params: As in OptimizerHook; gradients are unscaled first.
        coalesce, bucket_size_mb: As in `Trainer.configure`, for gradients that ranks of torch.distributed reduce. The
            defaults, True and -1, leave the choice to the store.
        loss_scale: "dynamic", a number, or a dict, as for the Trainer's option `amp`.
        distributed: False if this is the only worker. This is only checked: the store decides who takes part.

    Raises:
        ConfigurationError: An argument is wrong; `before_run`: the Trainer refuses an option.
    """

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        coalesce: bool = True,
        bucket_size_mb: float = -1,
        loss_scale: float | str | Mapping[str, Any] = 512.0,
        distributed: bool = True,
        detect_anomalous_params: bool | str = False,
    ) -> None:
        super().__init__(grad_clip, detect_anomalous_params)
        Buckets(bucket_size_mb, coalesce)  # checks the values
        self.coalesce, self.bucket_size_mb = coalesce, bucket_size_mb
        self.loss_scale, self.distributed = loss_scale, bool(distributed)
        precision = make_precision(hook_arguments(self._own_options())["amp"])
        self.loss_scaler = None if precision is None else precision.scaler
        """The scaler that the Trainer uses once the run has begun; None with bfloat16, which needs none."""
        self._autocast = ExitStack()
        """Undoes what `before_run` has attached to the model."""

    def before_run(self, runner: Any) -> None:
        """Set the Trainer's options, load the scaler's state from `runner.meta`, and enable autocast."""
        trainer = trainer_of(runner)
        self._check_alone(trainer)
        super().before_run(runner)
        meta = getattr(runner, "meta", None)
        saved = meta.get("fp16", {}).get("loss_scaler") if isinstance(meta, Mapping) else None
        if saved is not None and trainer.loss_scaler is not None:
            trainer.loss_scaler.load_state_dict(saved)
        model = getattr(runner, "model", None)
        if isinstance(model, torch.nn.Module):
            self._attach_autocast(model, trainer)

    def after_train_iter(self, runner: Any) -> None:
        super().after_train_iter(runner)
        self._check_alone(trainer_of(runner))
        scaler, meta = trainer_of(runner).loss_scaler, getattr(runner, "meta", None)
        if scaler is not None and isinstance(meta, dict):
            meta.setdefault("fp16", {})["loss_scaler"] = scaler.state_dict()

    def _hand_over(self, trainer: Any) -> None:
        trainer.loss_scaler = self.loss_scaler

    def after_run(self, runner: Any) -> None:
        """Disable autocast."""
        self._autocast.close()

    # Subclasses may call these, as they do with MMCV's hook.
    copy_grads_to_fp32 = staticmethod(copy_grads_to_fp32)
    copy_params_to_fp16 = staticmethod(copy_params_to_fp16)

    def _attach_autocast(self, model: torch.nn.Module, trainer: Any) -> None:
        """Run the model's forward pass in the Trainer's context, which is left even if it raises."""
        self._autocast.close()
        # DataParallel runs replicas in threads, and autocast is a state of the thread.
        local = threading.local()

        def enter(*_: Any) -> None:
            context: AbstractContextManager[Any] = trainer.context()
            context.__enter__()
            local.__dict__.setdefault("open", []).append(context)

        def leave(*_: Any) -> None:
            if local.__dict__.get("open"):
                local.open.pop().__exit__(None, None, None)

        # The forward passes of replicas do not go through that of their DataParallel.
        for one in model.replicas if isinstance(model, DataParallel) else (model,):
            self._autocast.callback(one.register_forward_pre_hook(enter).remove)
            self._autocast.callback(one.register_forward_hook(leave, always_call=True).remove)
            for module in one.modules():
                # Models written for MMCV check this attribute to choose their dtype.
                if getattr(module, "fp16_enabled", None) is False:
                    setattr(module, "fp16_enabled", True)  # noqa: B010
                    self._autocast.callback(setattr, module, "fp16_enabled", False)

    def _check_alone(self, trainer: Any) -> None:
        """Raise ConfigurationError if distributed=False contradicts the store, which exists from the first step on."""
        count = getattr(trainer.kvstore, "num_workers", 1)
        if not self.distributed and count > 1:
            raise ConfigurationError(
                f"distributed=False, but the Trainer's kvstore has {count} workers; leave it out"
            )


@HOOKS.register()
class GradientCumulativeOptimizerHook(OptimizerHook):
    """An OptimizerHook that accumulates the gradients of several batches before an update.

    The loss of a batch is divided by their number. If fewer batches are left at the end of the run, their losses are
    divided by that number, and the last one causes an update. The runner therefore needs `iter` and `max_iters`.

    Args:
        cumulative_iters: Batches per update.
        others: As in OptimizerHook, or in the other base class of a subclass.
    """

    def __init__(self, cumulative_iters: int = 1, **others: Any) -> None:
        self.cumulative_iters = check.integer("cumulative_iters", cumulative_iters, 1)
        super().__init__(**others)

    def before_run(self, runner: Any) -> None:
        """Tell the Trainer where the run ends. Raises ConfigurationError if the runner does not know."""
        done, total = getattr(runner, "iter", None), getattr(runner, "max_iters", None)
        if done is None or total is None:
            raise ConfigurationError(f"{type(self).__name__} needs runner.iter and runner.max_iters")
        super().before_run(runner)
        if self.cumulative_iters > 1:
            model = getattr(runner, "model", None)
            if isinstance(model, torch.nn.Module) and self.has_batch_norm(model):
                _log.warning(
                    "batch normalisation uses statistics of single batches, not of %d", self.cumulative_iters
                )
        trainer_of(runner).set_progress(done, total)

    def has_batch_norm(self, module: torch.nn.Module) -> bool:
        """Return whether a submodule normalises with batch statistics."""
        return any(isinstance(part, _BatchNorm) for part in module.modules())


@HOOKS.register()
class GradientCumulativeFp16OptimizerHook(GradientCumulativeOptimizerHook, Fp16OptimizerHook):
    """An Fp16OptimizerHook that updates every `cumulative_iters` batches. Its other arguments are keyword arguments."""


class ValueHook(Hook):
    """Writes a value of the parameter groups: base of LrUpdaterHook and MomentumUpdaterHook.

    Args:
        by_epoch: Whether the value changes per epoch or per batch; None means what is usual for the policy.
        warmup: None, 'constant', 'linear' or 'exp'.
        warmup_iters: Length of the warm-up in batches, or in epochs with `warmup_by_epoch`.
        warmup_ratio: The factor at its start; by default 0.1, for momentum 0.9.
        options: Options of the policy, under MMCV's names; all of them become attributes.

    Raises:
        ConfigurationError: An argument is wrong. `before_run`: the policy does not fit the length of the run, or the
            Trainer has a schedule for the same value.
        GroupValueError: `before_run`: a parameter group does not have the value.
    """

    policy: str | None = None
    """A policy's name as in `lr_config`; None for classes with their own formula."""
    _value = "lr"

    def __init_subclass__(cls, policy: str | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.policy = policy or cls.policy

    def __init__(
        self,
        by_epoch: bool | None = None,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float | None = None,
        warmup_by_epoch: bool = False,
        **options: Any,
    ) -> None:
        # 1. Per batch or per epoch: some policies are defined per batch only.
        if not isinstance(by_epoch, bool | None):
            raise ArgumentTypeError(f"by_epoch must be True, False or None, got {by_epoch!r:.80}")
        by_batch = self.policy is not None and is_stepwise_schedule(self.policy)
        if by_epoch and by_batch:
            raise ConfigurationError(f"the policy {self.policy!r} counts batches; leave by_epoch out")
        self.by_epoch = not by_batch if by_epoch is None else by_epoch
        # 2. The warm-up. With `warmup_by_epoch` its length in batches is known when an epoch begins.
        usual = WARMUP_OF_MOMENTUM if self._value == "momentum" else ScheduleSpec.warmup_ratio
        ratio = usual if warmup_ratio is None else warmup_ratio
        ScheduleSpec(warmup=warmup, warmup_iters=warmup_iters, warmup_ratio=ratio)  # checks the values
        self.warmup, self.warmup_ratio, self.warmup_by_epoch = warmup, ratio, warmup_by_epoch
        self.warmup_epochs = warmup_iters if warmup_by_epoch else None
        self.warmup_iters: int | None = None if warmup_by_epoch else warmup_iters
        # 3. The policy's options, checked and with defaults.
        if self.policy is not None:
            theirs = {"every": "step", "maximum": "max_lr"}
            theirs |= {"minimum": f"min_{self._value}", "minimum_ratio": f"min_{self._value}_ratio"}
            # Attributes have MMCV's names, which subclasses that override the formula read.
            given = check_formula_options(self.policy, options, self._value)
            vars(self).update({theirs.get(name, name): value for name, value in given.items()})
        elif options:
            raise ConfigurationError(f"{type(self).__name__} has no option {', '.join(map(repr, options))}")
        self._options = options
        vars(self).update(options)
        vars(self).update({f"base_{self._value}": [], f"regular_{self._value}": []})
        self._targets: dict[str, ScheduledGroupValue] = {}
        self._policy: Formula | None = None
        self._warm_up = ScheduleWarmup(self._value)

    def before_train_epoch(self, runner: Any) -> None:
        if self.warmup_epochs is not None:
            self.warmup_iters = self.warmup_epochs * len(runner.data_loader)
        if self.by_epoch:
            self._write(self._renew(runner))

    def before_train_iter(self, runner: Any) -> None:
        regular = getattr(self, f"regular_{self._value}") if self.by_epoch else self._renew(runner)
        left = (self.warmup_iters or 0) - runner.iter if self.warmup is not None else -1
        if left > 0:
            self._write(getattr(self, f"get_warmup_{self._value}")(runner.iter))
        elif left == 0 or not self.by_epoch:
            self._write(regular)

    def before_run(self, runner: Any) -> None:
        """Find the optimizer, or several, and store the values that their groups start from."""
        # 1. Find the optimizers. None may have a schedule that writes the same value.
        found = getattr(runner, "trainer", None)
        found = getattr(runner, "optimizer", None) if found is None else found
        if not isinstance(found, Mapping | torch.optim.Optimizer):
            raise ArgumentTypeError(f"{type(runner).__name__} has no trainer and no optimizer")
        several = dict(found) if isinstance(found, Mapping) else {"": found}
        for other in (each for one in several.values() for each in getattr(one, "schedules", ())):
            if self._value in getattr(other, "names", {getattr(other, "name", None)}):
                raise ConfigurationError(
                    f"{type(self).__name__} would overwrite the Trainer's own schedule of {self._value!r}; use only "
                    "one of them"
                )
        # 2. The length of the run is known now, so the formula can be completed.
        self._targets = {name: ScheduledGroupValue(one, self._value) for name, one in several.items()}
        if self.policy is not None:
            self._policy = make_formula(self.policy, self._options, self._value, self._progress(runner)[1])
        bases = {name: list(to.bases) for name, to in self._targets.items()}
        setattr(self, f"base_{self._value}", bases if isinstance(found, Mapping) else bases[""])

    def _progress(self, runner: Any) -> tuple[int, int | None]:
        at, last = ("epoch", "max_epochs") if self.by_epoch else ("iter", "max_iters")
        return int(getattr(runner, at, 0)), getattr(runner, last, None)

    def _get(self, runner: Any, base: float) -> float:
        if self._policy is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no policy; override its get_lr or get_momentum"
            )
        return float(self._policy(base, *self._progress(runner)))

    def _get_regular(self, runner: Any) -> Values:
        get = getattr(self, f"get_{self._value}")
        return _map_hook_values(lambda base: get(runner, base), getattr(self, f"base_{self._value}"))

    def _get_warmup(self, cur_iters: int) -> Values:
        where = str(self.warmup), cur_iters, self.warmup_iters or 1, self.warmup_ratio
        return _map_hook_values(
            lambda one: self._warm_up(one, *where), getattr(self, f"regular_{self._value}")
        )

    def _write(self, values: Values) -> None:
        for name, its in (values if isinstance(values, Mapping) else {"": values}).items():
            target = self._targets[name]
            for index, value in zip(range(len(target)), its, strict=False):
                target.write(index, value)

    def _renew(self, runner: Any) -> Values:
        """Compute the current values without warm-up, through MMCV's method names, which subclasses may override."""
        values: Values = getattr(self, f"get_regular_{self._value}")(runner)
        setattr(self, f"regular_{self._value}", values)
        return values


@HOOKS.register()
class LrUpdaterHook(ValueHook):
    """Writes learning rates. Subclasses override `get_lr`. The arguments are those of `ValueHook`."""

    priority = Priority.VERY_HIGH

    base_lr: Values
    regular_lr: Values

    get_lr = ValueHook._get
    get_regular_lr = ValueHook._get_regular
    get_warmup_lr = ValueHook._get_warmup


@HOOKS.register()
class MomentumUpdaterHook(ValueHook):
    """Writes momentum, or the first of the betas. Subclasses override `get_momentum`.

    A warm-up starts from a higher momentum, at most 0.999. The arguments are those of `ValueHook`.
    """

    priority = Priority.HIGH
    _value = "momentum"

    base_momentum: Values
    regular_momentum: Values

    get_momentum = ValueHook._get
    get_regular_momentum = ValueHook._get_regular
    get_warmup_momentum = ValueHook._get_warmup


@HOOKS.register()
class FixedLrUpdaterHook(LrUpdaterHook, policy="fixed"):
    """`lr_config=dict(policy="fixed")`."""


@HOOKS.register()
class StepLrUpdaterHook(LrUpdaterHook, policy="step"):
    """`lr_config=dict(policy="step", step, gamma=0.1, min_lr=None)`."""


@HOOKS.register()
class ExpLrUpdaterHook(LrUpdaterHook, policy="exp"):
    """`lr_config=dict(policy="exp", gamma)`."""


@HOOKS.register()
class PolyLrUpdaterHook(LrUpdaterHook, policy="poly"):
    """`lr_config=dict(policy="poly", power=1.0, min_lr=0.0)`."""


@HOOKS.register()
class InvLrUpdaterHook(LrUpdaterHook, policy="inv"):
    """`lr_config=dict(policy="inv", gamma, power=1.0)`."""


@HOOKS.register()
class CosineAnnealingLrUpdaterHook(LrUpdaterHook, policy="CosineAnnealing"):
    """`lr_config=dict(policy="CosineAnnealing", min_lr or min_lr_ratio)`."""


@HOOKS.register()
class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook, policy="FlatCosineAnnealing"):
    """`lr_config=dict(policy="FlatCosineAnnealing", start_percent=0.75, …)`. Also min_lr or min_lr_ratio."""


@HOOKS.register()
class CosineRestartLrUpdaterHook(LrUpdaterHook, policy="CosineRestart"):
    """`lr_config=dict(policy="CosineRestart", periods, restart_weights=[1], …)`. Also min_lr or min_lr_ratio."""


@HOOKS.register()
class LinearAnnealingLrUpdaterHook(LrUpdaterHook, policy="LinearAnnealing"):
    """`lr_config=dict(policy="LinearAnnealing", min_lr or min_lr_ratio)`."""


@HOOKS.register()
class CyclicLrUpdaterHook(LrUpdaterHook, policy="cyclic"):
    """`lr_config=dict(policy="cyclic", target_ratio, cyclic_times, …)`. Also step_ratio_up, anneal_strategy, gamma."""


@HOOKS.register()
class OneCycleLrUpdaterHook(LrUpdaterHook, policy="OneCycle"):
    """`lr_config=dict(policy="OneCycle", max_lr, …)`.

    `max_lr` may be a list with one value per group, or a dict of lists by the names of several optimizers. A group
    starts from its `max_lr` divided by `div_factor`.
    """

    div_factor: float

    def __init__(self, max_lr: Any, *, div_factor: float = 25.0, **kwargs: Any) -> None:
        # The options are those of a group that starts from 1; `get_lr` scales them.
        super().__init__(max_lr=div_factor, div_factor=div_factor, **kwargs)
        self.max_lr = max_lr

    def before_run(self, runner: Any) -> None:
        super().before_run(runner)
        starts: dict[str, list[float]] = {}
        for name, target in self._targets.items():
            peaks = self.max_lr.get(name, ()) if isinstance(self.max_lr, Mapping) else self.max_lr
            peaks = peaks if isinstance(peaks, list | tuple) else [peaks] * len(target)
            if len(peaks) != len(target):
                of = f"{len(target)} parameter groups{name and f' of {name}'}"
                raise ConfigurationError(f"max_lr has {len(peaks)} values for {of}; give one for each")
            starts[name] = [float(peak) / self.div_factor for peak in peaks]
        self.base_lr = starts if isinstance(self.base_lr, Mapping) else starts[""]

    def get_lr(self, runner: Any, base: float) -> float:
        assert self._policy is not None
        options = {**self._policy.options, "maximum": base * self.div_factor}
        return replace(self._policy, options=options)(base, *self._progress(runner))


@HOOKS.register()
class StepMomentumUpdaterHook(MomentumUpdaterHook, policy="step"):
    """`momentum_config=dict(policy="step", step, gamma=0.5, min_momentum=None)`."""


@HOOKS.register()
class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook, policy="CosineAnnealing"):
    """`momentum_config=dict(policy="CosineAnnealing", …)`. It takes min_momentum or min_momentum_ratio."""


@HOOKS.register()
class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook, policy="LinearAnnealing"):
    """`momentum_config=dict(policy="LinearAnnealing", …)`. It takes min_momentum or min_momentum_ratio."""


@HOOKS.register()
class CyclicMomentumUpdaterHook(MomentumUpdaterHook, policy="cyclic"):
    """`momentum_config=dict(policy="cyclic", target_ratio=(0.85 / 0.95, 1.0), …)`."""


@HOOKS.register()
class OneCycleMomentumUpdaterHook(MomentumUpdaterHook, policy="OneCycle"):
    """`momentum_config=dict(policy="OneCycle", base_momentum=0.85, …)`. max_momentum is 0.95 by default."""


def _map_hook_values(function: Callable[[Any], Any], values: Values) -> Values:
    if isinstance(values, Mapping):
        return {name: [function(one) for one in its] for name, its in values.items()}
    return [function(one) for one in values]


def trainer_of(runner: Any) -> Any:
    """Return the runner's Trainer: its `trainer`, or its `optimizer` if that is a Trainer.

    Raises:
        ArgumentTypeError: It has none.
    """
    for name in ("trainer", "optimizer"):
        found = getattr(runner, name, None)
        if hasattr(found, "update_params") and hasattr(found, "configure"):
            return found
    raise ArgumentTypeError(f"{type(runner).__name__} has no kvtrainer.Trainer as its trainer or optimizer")
