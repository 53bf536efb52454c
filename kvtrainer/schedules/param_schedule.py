"""Schedules of numbers in parameter groups: of the learning rate, of momentum, of any other.

What is written is a function of how many steps or epochs there were, so a schedule resumes from that count alone, and a
schedule that was made longer or shorter since goes on along its new course.
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
from kvtrainer.schedules.formulas import Formula, Policy, make_policy, warmup_factor

MOST_MOMENTUM = 0.999
"""The most to which a warm-up raises momentum, unless the momentum to come to is greater itself."""
_REMEMBERED = ("lr", "momentum")
"""Values whose start is kept in the group as well, as torch's schedulers do: 'initial_lr'."""


@runtime_checkable
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


def refuse_second_scheduler(optimizer: object) -> None:
    """Raise SchedulerInUseError if the optimizer has a lr_scheduler of its own."""
    own = getattr(getattr(optimizer, "optimizer", None), "lr_scheduler", None)
    if own is not None:
        raise SchedulerInUseError(
            f"{own!r} decides the learning rate of this Trainer; leave out lr_scheduler or the schedule of 'lr'"
        )


class GroupValue:
    """Read and write one number in the groups of an optimizer; 'momentum' is betas[0] where there are betas.

    Groups are looked up anew each time, because loading state replaces them and they may become more.

    Raises:
        ArgumentTypeError: this is no optimizer.
        GroupValueError: a group has no such number; also a KeyError.
        SchedulerInUseError: the optimizer takes its learning rate from a scheduler of its own.
    """

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
        """Group → the factor that `overrule` has made of it."""
        self._collect_bases()

    def __len__(self) -> int:
        return len(self.optimizer.param_groups)

    @property
    def bases(self) -> list[float]:
        """The value that each group started from."""
        self._collect_bases()
        return self._bases

    @bases.setter
    def bases(self, values: Sequence[float]) -> None:
        self._bases = list(values)

    def check_count(self, values: Sequence[object]) -> None:
        """Raise StateMismatchError unless a saved state has one value for each group."""
        if len(values) != len(self):
            raise StateMismatchError(
                f"the state of the schedule of {self.name!r} is one of {len(values)} groups, here there are {len(self)}"
            )

    def read(self, index: int) -> float:
        """Return the present value in this group."""
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
        """Put a scheduled value into this group, as small as `overrule` made former ones."""
        self._scheduled[index] = value
        self._put(index, value * self._scales.get(index, 1.0))

    def overrule(self, index: int, value: float) -> None:
        """Put a value into this group in place of the present one; what is written later is in proportion."""
        present = self.read(index)
        if present:
            self._scales[index] = self._scales.get(index, 1.0) * value / present
        self._put(index, value)

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule writes the value; `overrule` alone does not count."""
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
        """Find the groups that are meant by indices or names; None for all.

        Raises:
            ConfigurationError: there is no such group.
        """
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
            group[self.name].fill_(value)
        else:
            group[self.name] = value

    def _collect_bases(self) -> None:
        for index in range(len(self._bases), len(self)):
            group, present = self.optimizer.param_groups[index], self.read(index)
            key = f"initial_{self.name}"
            self._bases.append(float(group.get(key, present)))
            if self.name in _REMEMBERED:
                group.setdefault(key, present)

    def _is_beta(self, group: dict[str, Any]) -> bool:
        return self.name == "momentum" and "betas" in group and "momentum" not in group


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule before it has an optimizer; the arguments are those of ParamSchedule.

    Raises:
        ConfigurationError: an argument is wrong.
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
        return make_policy(self.policy, self.options, self.name, self.span)

    @property
    def span(self) -> int | None:
        """How many steps or epochs the policy has."""
        return None if self.end is None else self.end - self.begin

    @property
    def is_driven_by(self) -> str:
        """What advances it: with `epoch_length` steps, also where its values go by epoch."""
        return "step" if self.epoch_length is not None else self.by

    @property
    def has_own_warmup_clock(self) -> bool:
        """Whether values go by epoch, the warm-up by step, and no epoch's length is known."""
        return self.warmup is not None and self.is_driven_by == "epoch" and not self.warmup_by_epoch

    @property
    def warmup_length(self) -> int:
        """Length of the warm-up in what advances it. That is steps where it has a clock of its own."""
        per_unit = self.epoch_length if self.epoch_length is not None and self.warmup_by_epoch else 1
        return self.warmup_iters * per_unit if self.warmup is not None else 0


_ARGUMENTS = frozenset(ScheduleSpec.__dataclass_fields__) - {"name", "policy", "options"}


class ParamSchedule:
    """Write a value of an optimizer's groups: at once, and whenever it is advanced.

    Args:
        optimizer: Any torch.optim.Optimizer, so also a Trainer, from where the value travels to servers.
        name: 'lr'; 'momentum', which is betas[0] of the Adams; or any key of the groups that holds a number. Or a
            ScheduleSpec, which says everything but `after`.
        policy: A name (MMCV's or Detectron's: fixed, step, exp, poly, inv, CosineAnnealing, LinearAnnealing,
            FlatCosineAnnealing, CosineRestart, cyclic, OneCycle, steps_with_lrs, exp_decay); or a function
            (base, at, span) → value, with how many steps or epochs have passed since `begin`, and end - begin.
        after: A schedule of the same value to build on: what it gives is where this one starts from, or, if this one
            ends before it begins, the other way round.
        by: Whether `step` is called after each 'step' of the optimizer or after each 'epoch' (the default).
        begin, end: From where up to where it holds. Past the end the value stays what it was last.
        warmup: None, 'constant', 'linear' or 'exp': the learning rate is multiplied by something that grows from
            `warmup_ratio` to 1 over `warmup_iters` steps (epochs, if `warmup_by_epoch`), momentum is divided by it.
        epoch_length: Steps in an epoch. `step` is then called after each step of the optimizer, whatever `by` says.
            Without it a schedule by epoch whose warm-up goes by step needs `warmup_clock.step()` after each step.
        groups: The groups to write, by index or by their 'name'; None: all, later ones too.
        passed: How many steps or epochs are over already; the groups should know their 'initial_lr' then.
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
        name: str | ScheduleSpec = "lr",
        policy: str | Policy = "fixed",
        *,
        after: ParamSchedule | None = None,
        **options: Any,
    ) -> None:
        spec = name if isinstance(name, ScheduleSpec) else self.unbound(name, policy, **options)
        if spec is name and options:
            raise ConfigurationError(f"a ScheduleSpec says everything itself; leave out {', '.join(options)}")
        if after is not None and (after.optimizer is not optimizer or after.name != spec.name):
            raise ConfigurationError(
                f"a schedule of {spec.name!r} can only build on one of the same value of the same optimizer"
            )
        self._spec = spec
        self.target: GroupValue = GroupValue(optimizer, spec.name) if after is None else after.target
        """What it writes to; schedules that build on one another have the same."""
        self._indices = self.target.indices(spec.groups)
        self._formula = spec.formula()
        peaks, num_groups = self._formula.options.get("maximum"), len(self.target)
        if isinstance(peaks, tuple) and len(peaks) != num_groups:
            raise ConfigurationError(
                f"max_lr has {len(peaks)} values, but there are {num_groups} parameter groups; give one for each, or a "
                "number"
            )
        self._chain: list[ParamSchedule] = [] if after is None else after._chain
        self._count, self._warm_count = spec.passed, 0
        self._warm_up = Warmup(spec.name)
        self.warmup_clock: WarmupClock | None = WarmupClock(self) if spec.has_own_warmup_clock else None
        """Counts the steps of a warm-up of a schedule by epoch; None where there is no need of one."""
        later = [at for at, one in enumerate(self._chain) if self._precedes(one)]
        self._chain.insert(later[0] if later else len(self._chain), self)
        try:
            self._write(is_jump=True)
        except BaseException:
            self.unbind()
            raise

    @staticmethod
    def unbound(name: str = "lr", policy: str | Policy = "fixed", **arguments: Any) -> ScheduleSpec:
        """Return the same schedule without an optimizer, for the Trainer's `schedules`; arguments as of the class."""
        own = {key: arguments.pop(key) for key in tuple(arguments) if key in _ARGUMENTS}
        return ScheduleSpec(name, policy, **own, options=arguments)

    def unbind(self) -> None:
        """Let it no longer count in the schedules that build on one another; nothing is written."""
        self._chain.remove(self)

    @property
    def name(self) -> str:
        """The key of the value that is scheduled."""
        return self._spec.name

    @property
    def by(self) -> str:
        """'step' or 'epoch': when `step` is to be called."""
        return self._spec.is_driven_by

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that it is bound to."""
        return self.target.optimizer

    def writes_beside(self, other: ParamSchedule) -> bool:
        """Return whether both write one value of a group without building on each other."""
        if self.target is other.target or self.name != other.name:
            return False
        return self._indices is None or other._indices is None or bool(self._indices & other._indices)

    def step(self, count: int | None = None) -> None:
        """Advance by one step or epoch, or to where `count` of them have passed; writes the value."""
        self._count = self._count + 1 if count is None else check.integer("the count of a schedule", count, 0)
        self._write(is_jump=count is not None)

    def step_warmup(self) -> None:
        """Advance the warm-up alone by a step; writes the value while it lasts."""
        self._warm_count += 1
        if self._warm_count <= self._spec.warmup_length:
            self._write(is_jump=False)

    def last_values(self) -> list[float]:
        """Return the present value of every group."""
        return [self.target.read(index) for index in range(len(self.target))]

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is, and where each group started from: plain numbers."""
        return {
            "count": self._count,
            "warmup_count": self._warm_count,
            "base_values": list(self.target.bases),
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError unless it is such a state, of as many groups."""
        self._read(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, with the policy and the end that this schedule has; writes the value.

        The state of mmengine's scheduler of the same value will do, too.

        Raises:
            StateMismatchError: it is no such state, or one of another number of groups; nothing has changed then.
        """
        self._count, self._warm_count, bases = self._read(state_dict)
        self.target.bases = bases
        self._write(is_jump=True)

    def _read(self, state_dict: Mapping[str, Any]) -> tuple[int, int, list[float]]:
        try:
            if is_of_mmengine(state_dict):
                count, warm = count_in_mmengine(state_dict, self), 0
            else:
                count, warm = int(state_dict["count"]), int(state_dict["warmup_count"])
            bases = [float(value) for value in state_dict["base_values"]]
        except StateMismatchError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(
                f"this is no state of a ParamSchedule: {state_dict!r:.120}; load what its state_dict() returned"
            ) from error
        self.target.check_count(bases)
        return count, warm, bases

    def _write(self, is_jump: bool) -> None:
        """Write the value of all schedules of the chain; of groups that wait for a begin, or are past all ends, not.

        What is past the end has been written before, unless this is a jump.
        """
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
        """How often it is advanced in each step or epoch by which its values go."""
        return 1 if self._spec.by == "step" else self._spec.epoch_length or 1

    @property
    def _at(self) -> int:
        return self._count // self._steps_per_unit

    def _value(self, index: int, start: float) -> float:
        """Return what it makes of the value that the schedule before it gives."""
        spec, at = self._spec, self._at
        if not self._has(index) or at < spec.begin:
            return start
        passed = at - spec.begin if spec.end is None else min(at, spec.end - 1) - spec.begin
        if self._formula.restarts:  # from what came before, but for schedules that end before this one begins
            start = self.target.bases[index]
            for one in self._chain[: self._chain.index(self)]:
                start = start if one._precedes(self) else one._value(index, start)
        value = self._formula(start, passed, spec.span, self.target.bases[index], index)
        if not spec.warmup_length:
            return value
        is_apart = self.warmup_clock is not None
        warmed = self._warm_count if is_apart else self._count - spec.begin * self._steps_per_unit
        return self._warm_up(value, str(spec.warmup), warmed, spec.warmup_length, spec.warmup_ratio)

    def _precedes(self, other: ParamSchedule) -> bool:
        mine, its = self._spec, other._spec
        return mine.by == its.by and mine.end is not None and mine.end <= its.begin


def is_of_mmengine(state_dict: Mapping[str, Any]) -> bool:
    """Return whether this is the state of one of mmengine's schedulers."""
    return {"_global_step", "param_name", "by_epoch"} <= set(state_dict)


def count_in_mmengine(state_dict: Mapping[str, Any], schedule: Any) -> int:
    """Return how often a schedule was advanced, by the state of mmengine's scheduler.

    That one counts epochs or backward passes, a schedule by step updates.

    Raises:
        StateMismatchError: it writes another value, or one of the two goes by epoch and the other does not.
    """
    name, by_epoch = state_dict["param_name"], state_dict["by_epoch"]
    if name != schedule.name or by_epoch is not (schedule.by != "step"):
        theirs = "epoch" if by_epoch else "iteration"
        raise StateMismatchError(
            f"the state is that of a scheduler of {name!r} by {theirs}, the schedule here is one of {schedule.name!r} "
            f"by {schedule.by}; build the same ones in the same order"
        )
    accumulation = None if by_epoch else getattr(schedule.optimizer, "accumulation", None)
    passes = 1 if accumulation is None else accumulation.counts
    return int(state_dict["_global_step"]) // int(passes)


class Warmup:
    """Multiply a value by `warmup_factor`; divide momentum by it, but not up to 1, and warn once where that matters."""

    def __init__(self, name: str) -> None:
        self._is_of_momentum = name == "momentum"
        self._has_warned = False

    def __call__(self, value: float, kind: str, at: int, length: int, ratio: float) -> float:
        factor = warmup_factor(kind, at, length, ratio)
        if not self._is_of_momentum:
            return value * factor
        lifted = min(value / factor, max(value, MOST_MOMENTUM))
        if lifted != value / factor and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the warm-up would raise momentum {value:g} to {value / factor:g}; it is kept at {lifted:g}. A "
                "warmup_ratio that is further from 0 avoids that. This is said once",
                ScheduleWarning,
                stacklevel=level_of_user(),
            )
        return lifted


class WarmupClock:
    """Count the steps of a warm-up of a schedule that goes by epoch; a BoundSchedule beside that one.

    Its state is empty, because the schedule saves the count.
    """

    by = "step"

    def __init__(self, schedule: ParamSchedule) -> None:
        self.optimizer = schedule.optimizer
        self.step = schedule.step_warmup

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if state_dict:
            raise StateMismatchError(
                f"the clock of a warm-up has no state, so this is that of another schedule: {state_dict!r:.120}"
            )

    load_state_dict = check_state_dict
