"""Schedules of values in parameter groups: the learning rate, momentum, or any other number.

A `ScheduleSpec` describes a schedule; a `ParamSchedule` is one bound to an optimizer. It computes its value from a
count of steps or epochs by a pure formula (`formulas.py`), so it resumes from that count alone, and a run whose end was
changed continues on the new course.

- Groups keep their proportions: each starts from its own `initial_lr` (or its current value), stored in
`ScheduledGroupValue`.
- Schedules of the same value form a chain, ordered by their windows. The result of one is the base of the next; a value
  is written once, by `_write`, for the whole chain. Schedules with different `ScheduledGroupValue` objects would
  overwrite each other, which `config.py` refuses.
- A warm-up multiplies the result. If values change per epoch and the warm-up per step, a `ScheduleWarmupClock` counts
  the steps.
- A metric schedule (`torch_schedule.py`) changes a factor, `ScheduledGroupValue.scales`, by which later values are
multiplied.

Not thread-safe. Nothing here communicates: a Trainer sends the groups' values with its next step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch.optim
from torch import Tensor

from kvstore_server import check
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    GroupValueError,
    SchedulerInUseError,
    ScheduleWarning,
    StateMismatchError,
    level_of_user,
)
from kvtrainer.schedules.formulas import Formula, Policy, make_formula, warmup_factor

MAX_MOMENTUM = 0.999
"""A warm-up raises momentum at most to this, unless the momentum itself is greater."""
_REMEMBERED = ("lr", "momentum")
"""Values whose start is also stored in the group, as torch's schedulers do: 'initial_lr'."""


@runtime_checkable
class BoundSchedule(Protocol):
    """A schedule that is bound to an optimizer: the interface through which a Trainer advances and saves it."""

    @property
    def by(self) -> str:
        """When to call `step`: after every 'step' that changed weights, after every 'epoch', or with a 'metric'."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise StateMismatchError unless `load_state_dict` can load this; nothing changes."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def refuse_second_scheduler(optimizer: object) -> None:
    """Raise SchedulerInUseError if the optimizer has its own lr_scheduler."""
    own = getattr(getattr(optimizer, "optimizer", None), "lr_scheduler", None)
    if own is not None:
        raise SchedulerInUseError(
            f"{own!r} decides the learning rate of this Trainer; leave out lr_scheduler or the schedule of 'lr'"
        )


class ScheduledGroupValue:
    """Reads and writes a value in an optimizer's groups. 'momentum' is betas[0] where a group has betas."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"a schedule is bound to a torch.optim.Optimizer or a Trainer, got {type(optimizer).__name__}"
            )
        if name == "lr":
            refuse_second_scheduler(optimizer)
        self.optimizer, self.name = optimizer, name
        self._bases: list[float] = []
        self._scheduled: dict[int, float] = {}
        """Group → the value that schedules wrote last, before it was scaled."""
        self._scales: dict[int, float] = {}
        """Group → the factor that results from `overrule`."""
        self._collect_bases()

    def __len__(self) -> int:
        return len(self.optimizer.param_groups)

    @property
    def bases(self) -> list[float]:
        """The value from which each group started."""
        self._collect_bases()
        return self._bases

    @bases.setter
    def bases(self, values: Sequence[float]) -> None:
        self._bases = list(values)

    def check_count(self, values: Sequence[object]) -> None:
        """Raise StateMismatchError unless a saved state has one value per group."""
        if len(values) != len(self):
            raise StateMismatchError(
                f"the saved schedule of {self.name!r} has {len(values)} groups, but the optimizer has {len(self)}"
            )

    def read(self, index: int) -> float:
        group = self.optimizer.param_groups[index]
        if self._is_beta(group):
            return float(group["betas"][0])
        value = group.get(self.name)
        if not check.is_number(value) and not isinstance(value, Tensor):
            numbers = sorted(key for key, one in group.items() if isinstance(one, float) or key == "betas")
            raise GroupValueError(
                f"parameter group {index} of this {type(self.optimizer).__name__} has no number {self.name!r} to "
                f"schedule; it has {', '.join(numbers)}"
            )
        return float(value)

    def write(self, index: int, value: float) -> None:
        """Write a scheduled value to this group, times the factor that results from `overrule`."""
        self._scheduled[index] = value
        self._put(index, value * self._scales.get(index, 1.0))

    def overrule(self, index: int, value: float) -> None:
        """Replace the current value of this group; values written later change by the same factor."""
        present = self.read(index)
        if present:
            self._scales[index] = self._scales.get(index, 1.0) * value / present
        self._put(index, value)

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule has written the value; `overrule` does not count."""
        return bool(self._scheduled)

    @property
    def scales(self) -> list[float]:
        """The factor by which `overrule` has changed each group; setting it writes scheduled values again."""
        return [self._scales.get(index, 1.0) for index in range(len(self))]

    @scales.setter
    def scales(self, scales: Sequence[float]) -> None:
        self._scales = dict(enumerate(scales))
        for index, value in self._scheduled.items():
            self.write(index, value)

    def indices(self, chosen: Sequence[int | str] | None) -> frozenset[int] | None:
        """Return the indices of groups given by index or name; None means all."""
        if chosen is None:
            return None
        if isinstance(chosen, str) or not isinstance(chosen, Sequence):
            raise ArgumentTypeError(f"groups must be a list of indices and names, got {chosen!r}")
        names: list[Any] = [group.get("name") for group in self.optimizer.param_groups]
        found = set()
        for one in chosen:
            matches = {at for at, name in enumerate(names) if one == (name if isinstance(one, str) else at)}
            if not matches:
                known = ", ".join(map(repr, [name for name in names if name is not None])) or "none"
                raise ConfigurationError(
                    f"there is no parameter group {one!r}; there are {len(names)}, with the names {known}"
                )
            found |= matches
        return frozenset(found)

    def _put(self, index: int, value: float) -> None:
        group = self.optimizer.param_groups[index]
        if self._is_beta(group):
            group["betas"] = (value, *tuple(group["betas"])[1:])
        elif isinstance(group[self.name], Tensor):
            # In place, because others may hold a reference to the tensor.
            group[self.name].fill_(value)
        else:
            group[self.name] = value

    def _collect_bases(self) -> None:
        for index in range(len(self._bases), len(self)):
            group, present = self.optimizer.param_groups[index], self.read(index)
            key = f"initial_{self.name}"
            # After a resume the group has the value that it started from.
            self._bases.append(float(group.get(key, present)))
            if self.name in _REMEMBERED:
                group.setdefault(key, present)

    def _is_beta(self, group: dict[str, Any]) -> bool:
        return self.name == "momentum" and "betas" in group and "momentum" not in group


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule without an optimizer. The fields are the arguments of ParamSchedule.

    Raises:
        ConfigurationError: A field is wrong.
    """

    name: str = "lr"
    policy: str | Policy = "fixed"
    by: str = "epoch"
    begin: int = 0
    end: int | None = None
    warmup: str | None = None
    warmup_iters: int = 0
    warmup_ratio: float = 0.1
    warmup_by_epoch: bool = False
    epoch_length: int | None = None
    groups: Sequence[int | str] | None = None
    passed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentTypeError(f"the name of the scheduled value must be a string, got {self.name!r}")
        check.one_of("by", self.by, ("step", "epoch"))
        check.integer("begin of a schedule", self.begin, 0)
        check.integer("passed of a schedule", self.passed, 0)
        if self.end is not None and check.integer("end of a schedule", self.end, 0) <= self.begin:
            raise ConfigurationError(
                f"end must be greater than begin, got begin={self.begin} and end={self.end}"
            )
        if self.epoch_length is not None:
            check.integer("epoch_length of a schedule", self.epoch_length, 1)
        if self.warmup is not None:
            check.one_of("warmup", self.warmup, (None, "constant", "linear", "exp"))
            check.integer("warmup_iters of a schedule", self.warmup_iters, 1)
            check.number("warmup_ratio", self.warmup_ratio, above=0, most=1)
            if self.warmup_by_epoch and self.by == "step" and self.epoch_length is None:
                raise ConfigurationError("warmup_by_epoch of a schedule by step needs epoch_length")
            if self.has_own_warmup_clock and self.begin:
                raise ConfigurationError(
                    f"a warm-up by step of a schedule that begins with epoch {self.begin} needs epoch_length, the "
                    "number of steps in an epoch"
                )
        self.formula()

    def formula(self) -> Formula:
        """Return the policy with its options."""
        return make_formula(self.policy, self.options, self.name, self.span)

    @property
    def span(self) -> int | None:
        """The length of the policy in steps or epochs; None if open-ended."""
        return None if self.end is None else self.end - self.begin

    @property
    def is_driven_by(self) -> str:
        """What advances it: with `epoch_length` always steps, even if its values change per epoch."""
        return "step" if self.epoch_length is not None else self.by

    @property
    def has_own_warmup_clock(self) -> bool:
        """Whether values change per epoch and the warm-up per step, with unknown epoch length."""
        return self.warmup is not None and self.is_driven_by == "epoch" and not self.warmup_by_epoch

    @property
    def warmup_length(self) -> int:
        """Length of the warm-up in the unit that advances it; in steps if it has its own clock."""
        per_unit = self.epoch_length if self.epoch_length is not None and self.warmup_by_epoch else 1
        return self.warmup_iters * per_unit if self.warmup is not None else 0


_ARGUMENTS = frozenset(ScheduleSpec.__dataclass_fields__) - {"name", "policy", "options"}


class ParamSchedule:
    """Writes a value of an optimizer's groups, immediately and whenever it is advanced. Not thread-safe.

    The policy starts from each group's 'initial_lr' (or 'initial_…') if there is one, else from its current value, so
    groups keep their proportions.

    Args:
        optimizer: Any torch.optim.Optimizer, also a Trainer, whose next step sends the value to servers.
        name: 'lr'; 'momentum', which is betas[0] for Adam and its variants; or any key of the groups with a number. Or
            a ScheduleSpec, which replaces all arguments but `after`.
        policy: A name (MMCV's or Detectron's: fixed, step, exp, poly, inv, CosineAnnealing, LinearAnnealing,
            FlatCosineAnnealing, CosineRestart, cyclic, OneCycle, steps_with_lrs, exp_decay), or a function (base, at,
            span) → value, of the steps or epochs since `begin`, and end - begin.
        after: A schedule of the same value to build on: its result is where this one starts from or, if this one ends
            before that begins, the other way round.
        by: Whether `step` is called after each 'step' of the optimizer or after each 'epoch' (the default).
        begin, end: The window in which it acts. After the end, the last value stays.
        warmup: None, 'constant', 'linear' or 'exp'. The learning rate is multiplied by a factor that grows from
            `warmup_ratio` to 1 over `warmup_iters` steps (epochs, if `warmup_by_epoch`); momentum is divided by it.
        epoch_length: Steps per epoch. With it, `step` is called after each step of the optimizer, whatever `by` is.
            Without it, a schedule by epoch with a warm-up by step needs `warmup_clock.step()` after each step.
        groups: The groups to write, by index or 'name'; None: all, including groups added later.
        passed: How many steps or epochs have already passed; groups should then have their 'initial_lr'.
        options: Options of the policy, such as gamma, power, min_lr, min_lr_ratio, periods, target_ratio.

    Raises:
        ConfigurationError: An argument is wrong, or a group does not have the value.
        SchedulerInUseError: The Trainer's own lr_scheduler determines the learning rate.

        schedule = ParamSchedule(trainer, "momentum", "cyclic", by="step", end=1000, target_ratio=(0.85 / 0.95, 1))
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str | ScheduleSpec = "lr",
        policy: str | Policy = "fixed",
        *,
        after: ParamSchedule | None = None,
        **options: Any,
    ) -> None:
        # 1. The description, and the schedule to build on.
        spec = name if isinstance(name, ScheduleSpec) else self.unbound(name, policy, **options)
        if spec is name and options:
            raise ConfigurationError(f"a ScheduleSpec contains all arguments; leave out {', '.join(options)}")
        if after is not None and (after.optimizer is not optimizer or after.name != spec.name):
            raise ConfigurationError(
                f"a schedule of {spec.name!r} can only build on one of the same value of the same optimizer"
            )
        # 2. The groups and the formula.
        self._spec = spec
        self.target: ScheduledGroupValue = (
            ScheduledGroupValue(optimizer, spec.name) if after is None else after.target
        )
        """Where it writes; shared by schedules that build on each other."""
        self._indices = self.target.indices(spec.groups)
        self._formula = spec.formula()
        peaks, num_groups = self._formula.options.get("maximum"), len(self.target)
        if isinstance(peaks, tuple) and len(peaks) != num_groups:
            raise ConfigurationError(
                f"max_lr has {len(peaks)} values, but there are {num_groups} parameter groups; give one for each, or a "
                "number"
            )
        # 3. Insert it into the chain of its value, before schedules that begin after its end, and write.
        self._chain: list[ParamSchedule] = [] if after is None else after._chain
        self._count, self._warm_count = spec.passed, 0
        self._warm_up = ScheduleWarmup(spec.name)
        self.warmup_clock: ScheduleWarmupClock | None = (
            ScheduleWarmupClock(self) if spec.has_own_warmup_clock else None
        )
        """Counts the steps of the warm-up of a schedule by epoch; None if it does not need one."""
        later = [at for at, one in enumerate(self._chain) if self._precedes(one)]
        self._chain.insert(later[0] if later else len(self._chain), self)
        try:
            self._write(is_jump=True)
        except BaseException:
            self.unbind()
            raise

    @staticmethod
    def unbound(name: str = "lr", policy: str | Policy = "fixed", **arguments: Any) -> ScheduleSpec:
        """Return the schedule without an optimizer, for the Trainer's `schedules`. Takes the same other arguments."""
        own = {key: arguments.pop(key) for key in tuple(arguments) if key in _ARGUMENTS}
        return ScheduleSpec(name, policy, **own, options=arguments)

    def unbind(self) -> None:
        """Remove it from the chain of schedules that build on each other; nothing is written."""
        self._chain.remove(self)

    @property
    def name(self) -> str:
        """The key of the scheduled value."""
        return self._spec.name

    @property
    def by(self) -> str:
        """When to call `step`: 'step' or 'epoch'."""
        return self._spec.is_driven_by

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer to which it is bound."""
        return self.target.optimizer

    def conflicts_with(self, other: ParamSchedule) -> bool:
        """Return whether both write the same value of a group without building on each other."""
        if self.target is other.target or self.name != other.name:
            return False
        return self._indices is None or other._indices is None or bool(self._indices & other._indices)

    def step(self, count: int | None = None) -> None:
        """Advance by one step or epoch, or to the given count, and write the value."""
        self._count = self._count + 1 if count is None else check.integer("the count of a schedule", count, 0)
        self._write(is_jump=count is not None)

    def step_warmup(self) -> None:
        """Advance only the warm-up by a step, and write the value while it lasts."""
        self._warm_count += 1
        if self._warm_count <= self._spec.warmup_length:
            self._write(is_jump=False)

    def last_values(self) -> list[float]:
        """Return the current value of every group."""
        return [self.target.read(index) for index in range(len(self.target))]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the value each group started from, as plain numbers."""
        return {
            "count": self._count,
            "warmup_count": self._warm_count,
            "base_values": list(self.target.bases),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless it is such a state, for the same number of groups."""
        self._read(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, with this schedule's own policy and end, and write the value.

        The state of mmengine's scheduler for the same value is accepted, too.

        Raises:
            StateMismatchError: It is not such a state, or has another number of groups; nothing has changed then.
        """
        self._count, self._warm_count, bases = self._read(state_dict)
        self.target.bases = bases
        self._write(is_jump=True)

    def _read(self, state_dict: Mapping[str, Any]) -> tuple[int, int, list[float]]:
        try:
            if is_mmengine_schedule_state(state_dict):
                count, warm = mmengine_schedule_count(state_dict, self), 0
            else:
                count, warm = int(state_dict["count"]), int(state_dict["warmup_count"])
            bases = [float(value) for value in state_dict["base_values"]]
        except StateMismatchError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(
                f"this is not the state of a ParamSchedule: {state_dict!r:.120}; load what its state_dict() returned"
            ) from error
        self.target.check_count(bases)
        return count, warm, bases

    def _write(self, is_jump: bool) -> None:
        """Write the chain's result to groups in a schedule's window; after its end, only when the count has jumped."""
        for index, value in enumerate(self.target.bases):
            if any(one._has(index) and one._is_on(is_jump) for one in self._chain):
                for one in self._chain:
                    value = one._value(index, value)
                self.target.write(index, value)

    def _has(self, index: int) -> bool:
        return self._indices is None or index in self._indices

    def _is_on(self, is_jump: bool) -> bool:
        at, end = self._at, self._spec.end
        return at >= self._spec.begin and (is_jump or end is None or at < end)

    @property
    def _steps_per_unit(self) -> int:
        """How often it is advanced per step or epoch that its values count."""
        return 1 if self._spec.by == "step" else self._spec.epoch_length or 1

    @property
    def _at(self) -> int:
        return self._count // self._steps_per_unit

    def _value(self, index: int, start: float) -> float:
        """Return the value, given the result of the schedule before it."""
        spec, at = self._spec, self._at
        if not self._has(index) or at < spec.begin:
            return start
        # 1. How far it is; after the end it stays at the last step.
        passed = at - spec.begin if spec.end is None else min(at, spec.end - 1) - spec.begin
        # 2. The formula. One that restarts ignores schedules that ended before it began.
        if self._formula.restarts:
            start = self.target.bases[index]
            for one in self._chain[: self._chain.index(self)]:
                start = start if one._precedes(self) else one._value(index, start)
        value = self._formula(start, passed, spec.span, self.target.bases[index], index)
        # 3. The warm-up.
        if not spec.warmup_length:
            return value
        is_apart = self.warmup_clock is not None
        warmed = self._warm_count if is_apart else self._count - spec.begin * self._steps_per_unit
        return self._warm_up(value, str(spec.warmup), warmed, spec.warmup_length, spec.warmup_ratio)

    def _precedes(self, other: ParamSchedule) -> bool:
        mine, its = self._spec, other._spec
        return mine.by == its.by and mine.end is not None and mine.end <= its.begin


def is_mmengine_schedule_state(state_dict: Mapping[str, Any]) -> bool:
    return {"_global_step", "param_name", "by_epoch"} <= set(state_dict)


def mmengine_schedule_count(state_dict: Mapping[str, Any], schedule: Any) -> int:
    """Return the count in the state of mmengine's scheduler, in updates: it counts backward passes, or epochs."""
    name, by_epoch = state_dict["param_name"], state_dict["by_epoch"]
    if name != schedule.name or by_epoch is not (schedule.by != "step"):
        theirs = "epoch" if by_epoch else "iteration"
        raise StateMismatchError(
            f"the state is for a scheduler of {name!r} by {theirs}, but this schedule is for {schedule.name!r} by "
            f"{schedule.by}; build the same schedules in the same order"
        )
    accumulation = None if by_epoch else getattr(schedule.optimizer, "accumulation", None)
    passes = 1 if accumulation is None else accumulation.counts
    return int(state_dict["_global_step"]) // int(passes)


class ScheduleWarmup:
    """Multiplies a value by `warmup_factor`. Momentum is divided by it, up to a limit, and then it warns once."""

    def __init__(self, name: str) -> None:
        self._is_of_momentum = name == "momentum"
        self._has_warned = False

    def __call__(self, value: float, kind: str, at: int, length: int, ratio: float) -> float:
        factor = warmup_factor(kind, at, length, ratio)
        if not self._is_of_momentum:
            return value * factor
        lifted = min(value / factor, max(value, MAX_MOMENTUM))
        if lifted != value / factor and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the warm-up would raise momentum {value:g} to {value / factor:g}; it is kept at {lifted:g}. A "
                "greater warmup_ratio avoids that. This warning appears once",
                ScheduleWarning,
                stacklevel=level_of_user(),
            )
        return lifted


class ScheduleWarmupClock:
    """Counts the steps of the warm-up of a schedule by epoch. Its state is empty: the schedule saves the count."""

    by = "step"

    def __init__(self, schedule: ParamSchedule) -> None:
        self.optimizer = schedule.optimizer
        self.step = schedule.step_warmup

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:
            raise StateMismatchError(
                f"the clock of a warm-up has no state, so this is for another schedule: {state_dict!r:.120}"
            )

    load_state_dict = check_state_dict
