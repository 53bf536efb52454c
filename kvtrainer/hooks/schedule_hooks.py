"""MMCV's hooks that write a learning rate or momentum before each epoch or batch, over our policies.

They count what the runner counts, batches and epochs, and not updates. `lr_config` and `momentum_config` of a Trainer
need no hook; these are for runners, and for classes that were derived from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.optim

from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.hooks.base import Hook, Priority
from kvtrainer.schedules.formulas import Formula, check_options, make_policy, warmup_factor
from kvtrainer.schedules.param_schedule import GroupValue, MomentumWarmup, ScheduleSpec

Values = list[Any] | dict[str, list[Any]]
"""One for each parameter group; of several optimizers by their names."""


class UpdaterHook(Hook):
    """Write a value of the parameter groups; see LrUpdaterHook and MomentumUpdaterHook.

    Args:
        by_epoch: Whether the value changes from epoch to epoch, or else from batch to batch; None: as the policy goes.
        warmup: None, 'constant', 'linear' or 'exp'.
        warmup_iters: Batches of the warm-up; epochs, if `warmup_by_epoch`.
        warmup_ratio: Where it begins; None: 0.1, of momentum 0.9.
        options: Of the policy, under MMCV's names; all of them are attributes, too.

    Raises:
        ConfigurationError: an argument is wrong. `before_run`: the policy does not fit the length of the run, or the
            Trainer has a schedule of the same value.
        GroupValueError: `before_run`: a parameter group has no such value.
    """

    policy: str | None = None
    """A name as in `lr_config`; None of classes with a formula of their own."""
    _value = "lr"
    _counts_batches = False
    """Whether the policy goes by batch only."""

    def __init__(
        self,
        by_epoch: bool | None = None,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float | None = None,
        warmup_by_epoch: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(by_epoch, bool | None):
            raise ArgumentTypeError(
                f"by_epoch must be True, False or None, got {by_epoch!r:.80}; options of the policy are given by name"
            )
        if by_epoch and self._counts_batches:
            raise ConfigurationError(f"the policy {self.policy!r} goes by batch; leave by_epoch out")
        self.by_epoch = not self._counts_batches if by_epoch is None else by_epoch
        ratio = (0.9 if self._value == "momentum" else 0.1) if warmup_ratio is None else warmup_ratio
        ScheduleSpec(warmup=warmup, warmup_iters=warmup_iters, warmup_ratio=ratio)  # checks them
        self.warmup, self.warmup_ratio, self.warmup_by_epoch = warmup, ratio, warmup_by_epoch
        self.warmup_epochs = warmup_iters if warmup_by_epoch else None
        self.warmup_iters: int | None = None if warmup_by_epoch else warmup_iters
        if self.policy is not None:
            theirs = {"every": "step", "maximum": "max_lr"}
            theirs |= {"minimum": f"min_{self._value}", "minimum_ratio": f"min_{self._value}_ratio"}
            # Under MMCV's names, for classes that override the formula.
            given = check_options(self.policy, options, self._value)
            vars(self).update({theirs.get(name, name): value for name, value in given.items()})
        elif options:
            raise ConfigurationError(f"{type(self).__name__} has no option {', '.join(map(repr, options))}")
        self._options = options
        vars(self).update(options)
        vars(self).update({f"base_{self._value}": [], f"regular_{self._value}": []})
        self._targets: dict[str, GroupValue] = {}
        self._policy: Formula | None = None

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
        """Find the optimizer, or several, and note what their groups start from."""
        found = getattr(runner, "trainer", None)
        found = getattr(runner, "optimizer", None) if found is None else found
        if not isinstance(found, Mapping | torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"{type(runner).__name__} has neither a Trainer as runner.trainer nor an optimizer as runner.optimizer"
            )
        several = dict(found) if isinstance(found, Mapping) else {"": found}
        for one in several.values():
            others = getattr(one, "schedules", ())
            if any(
                self._value in getattr(other, "names", {getattr(other, "name", None)}) for other in others
            ):
                raise ConfigurationError(
                    f"the Trainer has a schedule of {self._value!r}, and this {type(self).__name__} would undo what "
                    "that writes; leave out one of them"
                )
        self._targets = {name: GroupValue(one, self._value) for name, one in several.items()}
        if self.policy is not None:
            self._policy = make_policy(self.policy, self._options, self._value, self._progress(runner)[1])
        bases = {name: [to.base(at) for at in range(len(to))] for name, to in self._targets.items()}
        setattr(self, f"base_{self._value}", bases if isinstance(found, Mapping) else bases[""])

    def _progress(self, runner: Any) -> tuple[int, int | None]:
        """Return how many epochs or batches have passed, and how many there will be."""
        at, last = ("epoch", "max_epochs") if self.by_epoch else ("iter", "max_iters")
        return int(getattr(runner, at, 0)), getattr(runner, last, None)

    def _of_policy(self, runner: Any, base: float) -> float:
        if self._policy is None:
            raise NotImplementedError(
                f"{type(self).__name__} has no policy, so it must say its values itself"
            )
        return float(self._policy(base, *self._progress(runner)))

    def _write(self, values: Values) -> None:
        for name, its in (values if isinstance(values, Mapping) else {"": values}).items():
            target = self._targets[name]
            for index, value in zip(range(len(target)), its, strict=False):
                target.write(index, value)

    def _factor(self, at: int) -> float:
        return warmup_factor(str(self.warmup), at, self.warmup_iters or 1, self.warmup_ratio)

    def _renew(self, runner: Any) -> Values:
        """Ask for the values of now, without a warm-up; the methods have MMCV's names, for who overrides them."""
        values: Values = getattr(self, f"get_regular_{self._value}")(runner)
        setattr(self, f"regular_{self._value}", values)
        return values


class LrUpdaterHook(UpdaterHook):
    """Write learning rates; derive from it and override `get_lr`. Arguments as of UpdaterHook."""

    priority = Priority.VERY_HIGH

    base_lr: Values
    regular_lr: Values

    def get_lr(self, runner: Any, base_lr: float) -> float:
        """Return the learning rate of now of a group that started from `base_lr`, without a warm-up."""
        return self._of_policy(runner, base_lr)

    def get_regular_lr(self, runner: Any) -> Values:
        """Return those of all groups."""
        return _each(lambda base: self.get_lr(runner, base), self.base_lr)

    def get_warmup_lr(self, cur_iters: int) -> Values:
        """Return what the warm-up makes of them in this batch."""
        return _each(lambda rate: rate * self._factor(cur_iters), self.regular_lr)


class MomentumUpdaterHook(UpdaterHook):
    """Write momentum, or the first of the betas; derive from it and override `get_momentum`.

    A warm-up raises momentum, to 0.999 at most. Arguments as of UpdaterHook.
    """

    priority = Priority.HIGH
    _value = "momentum"

    base_momentum: Values
    regular_momentum: Values

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lift = MomentumWarmup()

    def get_momentum(self, runner: Any, base_momentum: float) -> float:
        """Return the momentum of now of a group that started from `base_momentum`, without a warm-up."""
        return self._of_policy(runner, base_momentum)

    def get_regular_momentum(self, runner: Any) -> Values:
        """Return those of all groups."""
        return _each(lambda base: self.get_momentum(runner, base), self.base_momentum)

    def get_warmup_momentum(self, cur_iters: int) -> Values:
        """Return what the warm-up makes of them in this batch."""
        return _each(lambda one: self._lift(one, self._factor(cur_iters)), self.regular_momentum)


class FixedLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="fixed")`."""

    policy = "fixed"


class StepLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="step", step, gamma=0.1, min_lr=None)`."""

    policy = "step"


class ExpLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="exp", gamma)`."""

    policy = "exp"


class PolyLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="poly", power=1.0, min_lr=0.0)`."""

    policy = "poly"


class InvLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="inv", gamma, power=1.0)`."""

    policy = "inv"


class CosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="CosineAnnealing", min_lr or min_lr_ratio)`."""

    policy = "CosineAnnealing"


class FlatCosineAnnealingLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="FlatCosineAnnealing", start_percent=0.75, min_lr or min_lr_ratio)`."""

    policy = "FlatCosineAnnealing"


class CosineRestartLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="CosineRestart", periods, restart_weights=[1], min_lr or min_lr_ratio)`."""

    policy = "CosineRestart"


class LinearAnnealingLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="LinearAnnealing", min_lr or min_lr_ratio)`."""

    policy = "LinearAnnealing"


class CyclicLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="cyclic", target_ratio, cyclic_times, step_ratio_up, anneal_strategy, gamma)`."""

    policy = "cyclic"
    _counts_batches = True


class OneCycleLrUpdaterHook(LrUpdaterHook):
    """`lr_config=dict(policy="OneCycle", max_lr, …)`.

    `max_lr` may be a list with one for each group, and a dict of these by the names of several optimizers. What a group
    starts from is its part of that, divided by `div_factor`.
    """

    policy = "OneCycle"
    _counts_batches = True
    div_factor: float

    def __init__(self, max_lr: Any, *, div_factor: float = 25.0, **kwargs: Any) -> None:
        # The policy's own numbers are those of a group that starts from 1.
        super().__init__(max_lr=div_factor, div_factor=div_factor, **kwargs)
        self.max_lr = max_lr

    def before_run(self, runner: Any) -> None:
        super().before_run(runner)
        starts: dict[str, list[float]] = {}
        for name, target in self._targets.items():
            peaks = self.max_lr.get(name, ()) if isinstance(self.max_lr, Mapping) else self.max_lr
            peaks = peaks if isinstance(peaks, list | tuple) else [peaks] * len(target)
            if len(peaks) != len(target):
                raise ConfigurationError(
                    f"max_lr has {len(peaks)} values for the {len(target)} parameter groups of the optimizer {name}; "
                    "give one for each, or a number"
                )
            starts[name] = [float(peak) / self.div_factor for peak in peaks]
        self.base_lr = starts if isinstance(self.base_lr, Mapping) else starts[""]

    def get_lr(self, runner: Any, base_lr: float) -> float:
        assert self._policy is not None
        options = {**self._policy.options, "maximum": base_lr * self.div_factor}
        return replace(self._policy, options=options)(base_lr, *self._progress(runner))


class StepMomentumUpdaterHook(MomentumUpdaterHook):
    """`momentum_config=dict(policy="step", step, gamma=0.5, min_momentum=None)`."""

    policy = "step"


class CosineAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """`momentum_config=dict(policy="CosineAnnealing", min_momentum or min_momentum_ratio)`."""

    policy = "CosineAnnealing"


class LinearAnnealingMomentumUpdaterHook(MomentumUpdaterHook):
    """`momentum_config=dict(policy="LinearAnnealing", min_momentum or min_momentum_ratio)`."""

    policy = "LinearAnnealing"


class CyclicMomentumUpdaterHook(MomentumUpdaterHook):
    """`momentum_config=dict(policy="cyclic", target_ratio=(0.85 / 0.95, 1.0), …)`."""

    policy = "cyclic"
    _counts_batches = True


class OneCycleMomentumUpdaterHook(MomentumUpdaterHook):
    """`momentum_config=dict(policy="OneCycle", base_momentum=0.85, max_momentum=0.95, …)`."""

    policy = "OneCycle"
    _counts_batches = True


def _each(function: Callable[[Any], Any], values: Values) -> Values:
    if isinstance(values, Mapping):
        return {name: [function(one) for one in its] for name, its in values.items()}
    return [function(one) for one in values]
