"""Schedules of a group's values in closed form: of the learning rate, of momentum, of any number in a group.

What is written is a function of how many steps or epochs there were, so a schedule resumes from that count alone, and a
schedule that was made longer or shorter since goes on along its new course.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.optim

from kvtrainer.errors import ConfigurationError, ScheduleWarning, StateMismatchError
from kvtrainer.schedules.group_values import GroupValue
from kvtrainer.schedules.policies import FromInitial, Policy, warmed_momentum, warmup_factor
from kvtrainer.schedules.policy_names import spread_over_groups
from kvtrainer.schedules.spec import ScheduleSpec

__all__ = ["BoundSchedule", "ParamSchedule", "ScheduleSpec"]

_ARGUMENTS = frozenset(ScheduleSpec.__dataclass_fields__) - {"name", "policy", "options"}


class BoundSchedule(Protocol):
    """A schedule that is tied to an optimizer, as a Trainer advances and saves it."""

    @property
    def by(self) -> str:
        """When `step` is called: after every 'step' that changed weights, after every 'epoch', or with a 'metric'."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise StateMismatchError unless `load_state_dict` can take this; nothing changes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ParamSchedule:
    """Writes a value of an optimizer's groups: at once, and whenever it is advanced.

    Args:
        optimizer: Any torch.optim.Optimizer, so also a Trainer, from where the value travels to servers.
        name: 'lr'; 'momentum', which is betas[0] of the Adams; or any key of the groups that holds a number.
        policy: A name (MMCV's or Detectron's: fixed, step, exp, poly, inv, CosineAnnealing, LinearAnnealing,
            FlatCosineAnnealing, CosineRestart, cyclic, OneCycle, steps_with_lrs, exp_decay); or a function
            (base, at, span) → value, with how many steps or epochs have passed since `begin`, and end - begin.
        by: Whether `step` is called after each 'step' of the optimizer or after each 'epoch'.
        begin, end: From where up to where it holds. Past the end the value stays what it was last.
        warmup: None, 'constant', 'linear' or 'exp': the learning rate is multiplied by something that grows from
            `warmup_ratio` to 1 over `warmup_iters` steps (epochs, if `warmup_by_epoch`), momentum is divided by it.
        epoch_length: Steps in an epoch. `step` is then called after each step of the optimizer, whatever `by` says.
            Without it a schedule by epoch whose warm-up goes by step needs `warmup_clock.step()` after each step.
        groups: The groups to write, by index or by their 'name'; None: all, later ones too.
        passed: How many steps or epochs are over already; the groups should know their 'initial_lr' then.
        after: A schedule of the same value to build on: what it gives is where this one starts from, or, if this one
            ends before it begins, the other way round.
        options: Of the policy, such as gamma, power, min_lr, min_lr_ratio, periods, target_ratio.

    The policy starts from each group's 'initial_lr' (or 'initial_…'), or else from its present value, so groups keep
    their proportions.

    Raises:
        ConfigurationError: an argument is wrong, or a group has no such value.
        SchedulerInUseError: the Trainer's own lr_scheduler decides the learning rate.

        schedule = ParamSchedule(trainer, "momentum", "cyclic", by="step", end=1000, target_ratio=(0.85 / 0.95, 1))
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str = "lr",
        policy: str | Policy = "fixed",
        *,
        by: str = "epoch",
        begin: int = 0,
        end: int | None = None,
        warmup: str | None = None,
        warmup_iters: int = 0,
        warmup_ratio: float = 0.1,
        warmup_by_epoch: bool = False,
        epoch_length: int | None = None,
        groups: Sequence[int | str] | None = None,
        passed: int = 0,
        after: ParamSchedule | None = None,
        **options: Any,
    ) -> None:
        warm = (warmup, warmup_iters, warmup_ratio, warmup_by_epoch)
        spec = ScheduleSpec(name, policy, by, begin, end, *warm, epoch_length, groups, passed, options)
        self._start(spec, optimizer, after)

    @classmethod
    def unbound(cls, name: str = "lr", policy: str | Policy = "fixed", **arguments: Any) -> ScheduleSpec:
        """The same schedule without an optimizer, for the Trainer's `schedules`; arguments as of the class."""
        own = {key: arguments.pop(key) for key in tuple(arguments) if key in _ARGUMENTS}
        return ScheduleSpec(name, policy, **own, options=arguments)

    @classmethod
    def bound(
        cls, spec: ScheduleSpec, optimizer: torch.optim.Optimizer, after: ParamSchedule | None = None
    ) -> ParamSchedule:
        """Tie a schedule that `unbound` made to an optimizer; `after` and what is raised as of the class."""
        schedule = cls.__new__(cls)
        schedule._start(spec, optimizer, after)
        return schedule

    def _start(
        self, spec: ScheduleSpec, optimizer: torch.optim.Optimizer, after: ParamSchedule | None
    ) -> None:
        if after is not None and (after.optimizer is not optimizer or after.name != spec.name):
            raise ConfigurationError(
                f"a schedule of {spec.name!r} can only build on one of the same value of the same optimizer"
            )
        self._spec = spec
        self._target: GroupValue = GroupValue(optimizer, spec.name) if after is None else after._target
        self._indices = self._target.indices(spec.groups)
        count = len(optimizer.param_groups)
        self._policies = spread_over_groups(spec.policy, spec.options, count, spec.name, spec.span)
        self._chain: list[ParamSchedule] = [] if after is None else after._chain
        self._count, self._warm_count = spec.passed, 0
        self._lift = MomentumWarmup()
        self.warmup_clock: WarmupClock | None = WarmupClock(self) if spec.has_own_warmup_clock else None
        """What counts the steps of a warm-up of a schedule by epoch; None where there is no need of one."""
        later = [at for at, one in enumerate(self._chain) if self._precedes(one)]
        self._chain.insert(later[0] if later else len(self._chain), self)
        try:
            self._write(is_jump=True)
        except BaseException:
            self.unbind()
            raise

    def unbind(self) -> None:
        """Let it no longer count in the schedules that build on one another; nothing is written."""
        self._chain.remove(self)

    @property
    def name(self) -> str:
        """What is scheduled."""
        return self._spec.name

    @property
    def by(self) -> str:
        """'step' or 'epoch': when `step` is to be called."""
        return self._spec.is_driven_by

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What it is bound to."""
        return self._target.optimizer

    @property
    def target(self) -> GroupValue:
        """What it writes to; schedules that build on one another have the same."""
        return self._target

    def writes_beside(self, other: ParamSchedule) -> bool:
        """Whether both write the same value of a group, and neither builds on the other."""
        if self._target is other._target or self.name != other.name:
            return False
        return self._indices is None or other._indices is None or bool(self._indices & other._indices)

    def step(self, count: int | None = None) -> None:
        """Advance by one step or epoch, or to where `count` of them have passed; writes the value."""
        if count is not None:
            self._spec.check_count("the count", count, 0)
        self._count = self._count + 1 if count is None else count
        self._write(is_jump=count is not None)

    def last_values(self) -> list[float]:
        """The present value of every group."""
        return [self._target.read(i) for i in range(len(self._target))]

    def state_dict(self) -> dict[str, Any]:
        """How far it is, and where each group started from: plain numbers."""
        bases = [self._target.base(i) for i in range(len(self._target))]
        return {"count": self._count, "warmup_count": self._warm_count, "base_values": bases}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless it is such a state, of as many groups."""
        self._read(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, with the policy and the end that this schedule has; writes the value.

        Raises:
            StateMismatchError: it is no such state, or one of another number of groups; nothing has changed then.
        """
        self._count, self._warm_count, bases = self._read(state_dict)
        self._target.set_bases(bases)
        self._write(is_jump=True)

    def _read(self, state_dict: Mapping[str, Any]) -> tuple[int, int, list[float]]:
        try:
            count, warm = int(state_dict["count"]), int(state_dict["warmup_count"])
            bases = [float(value) for value in state_dict["base_values"]]
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(
                f"this is no state of a ParamSchedule: {state_dict!r:.120}; load what its state_dict() returned"
            ) from error
        if len(bases) != len(self._target):
            raise StateMismatchError(
                f"the state of the schedule of {self.name!r} is one of {len(bases)} groups, here there are "
                f"{len(self._target)}"
            )
        return count, warm, bases

    def _write(self, is_jump: bool) -> None:
        """Write the value of all schedules of the chain; of groups that wait for a begin, or are past all ends, not.

        What is past the end has been written before, unless this is a jump.
        """
        for index in range(len(self._target)):
            mine = [one for one in self._chain if one._has(index) and one._is_on(is_jump)]
            if mine:
                value = self._target.base(index)
                for one in self._chain:
                    value = one._value(index, value)
                self._target.write(index, value)

    def _has(self, index: int) -> bool:
        return self._indices is None or index in self._indices

    def _is_on(self, is_jump: bool) -> bool:
        at, end = self._at, self._spec.end
        return at >= self._spec.begin and (is_jump or end is None or at < end)

    @property
    def _at(self) -> int:
        """How many of what the values go by have passed."""
        is_split = self._spec.by == "epoch" and self._spec.epoch_length is not None
        return self._count // self._spec.epoch_length if is_split else self._count  # type: ignore[operator]

    def _value(self, index: int, start: float) -> float:
        """What it makes of the value that the schedule before it gives."""
        spec, at = self._spec, self._at
        if not self._has(index) or at < spec.begin:
            return start
        passed = at - spec.begin if spec.end is None else min(at, spec.end - 1) - spec.begin
        policy = self._policies[min(index, len(self._policies) - 1)]
        if isinstance(policy, FromInitial):
            start = self._restarted(index) if policy.restarts else start
            value = float(policy.formula(start, self._target.base(index), passed))
        else:
            value = float(policy(start, passed, spec.span))
        if not spec.warmup_length:
            return value
        per_unit = 1 if spec.by == "step" or spec.epoch_length is None else spec.epoch_length
        warmed = self._warm_count if self.warmup_clock is not None else self._count - spec.begin * per_unit
        factor = warmup_factor(str(spec.warmup), warmed, spec.warmup_length, spec.warmup_ratio)
        if spec.name != "momentum":
            return value * factor
        return self._lift(value, factor)

    def _restarted(self, index: int) -> float:
        """Return what the schedules before this one give, but for those that end before it begins."""
        value = self._target.base(index)
        for one in self._chain[: self._chain.index(self)]:
            if not one._precedes(self):
                value = one._value(index, value)
        return value

    def _precedes(self, other: ParamSchedule) -> bool:
        mine, its = self._spec, other._spec
        return mine.by == its.by and mine.end is not None and mine.end <= its.begin


class MomentumWarmup:
    """Raise momentum in a warm-up, but not to 1; warn once where that makes a difference."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, momentum: float, factor: float) -> float:
        """Return momentum divided by the factor of the learning rate, or less."""
        lifted = warmed_momentum(momentum, factor)
        if lifted != momentum / factor and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the warm-up would raise momentum {momentum:g} to {momentum / factor:g}; it is kept at {lifted:g}. A "
                "warmup_ratio that is further from 0 avoids that. This is said once",
                ScheduleWarning,
                stacklevel=7,
            )
        return lifted


class WarmupClock:
    """Counts the steps of a warm-up of a schedule that goes by epoch; a BoundSchedule beside that one."""

    by = "step"

    def __init__(self, schedule: ParamSchedule) -> None:
        self._schedule = schedule

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """What its schedule is bound to."""
        return self._schedule.optimizer

    def step(self) -> None:
        """Advance by one step; writes the value while the warm-up lasts."""
        schedule = self._schedule
        schedule._warm_count += 1
        if schedule._warm_count <= schedule._spec.warmup_length:
            schedule._write(is_jump=False)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the schedule saves the count."""
        return {}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError if it is the state of another schedule."""
        if state_dict:
            raise StateMismatchError(
                f"the clock of a warm-up has no state, so this is that of another schedule: {state_dict!r:.120}"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Nothing to do: see `state_dict`. Raises StateMismatchError if there is one."""
        self.check_state_dict(state_dict)
