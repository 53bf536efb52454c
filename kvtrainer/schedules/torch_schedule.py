"""torch's schedulers in the interface of a Trainer, and a schedule that lowers a value when a metric stalls."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.optim
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from kvtrainer.errors import ConfigurationError, StateMismatchError
from kvtrainer.schedules.param_schedule import (
    BoundSchedule,
    ScheduledGroupValue,
    is_mmengine_schedule_state,
    mmengine_schedule_count,
    refuse_second_scheduler,
)

_KINDS = {"tuple": tuple, "dict": dict, "counter": Counter}


class TorchSchedule:
    """A scheduler with torch's interface, which a Trainer advances per `by`, 'step' or 'epoch', and saves.

    ReduceLROnPlateau is advanced with a 'metric'. Raises SchedulerInUseError if the optimizer has its own scheduler.
    """

    def __init__(self, scheduler: Any, by: str) -> None:
        if isinstance(scheduler, LRScheduler) or getattr(scheduler, "param_name", None) == "lr":
            refuse_second_scheduler(scheduler.optimizer)
        self.scheduler = scheduler
        self.by = "metric" if isinstance(scheduler, ReduceLROnPlateau) else by

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.scheduler.optimizer  # type: ignore[no-any-return]

    @property
    def names(self) -> frozenset[str]:
        """The values that it writes, as far as that can be known."""
        is_torchs = isinstance(self.scheduler, LRScheduler)
        own = "lr" if is_torchs else getattr(self.scheduler, "param_name", "")
        return frozenset((own, "momentum") if getattr(self.scheduler, "cycle_momentum", False) else (own,))

    def step(self, *metric: float) -> None:
        """Advance it, with the metric if it needs one. Raises ConfigurationError if that is missing."""
        if self.by == "metric":
            _check_schedule_metric(metric)
        # torch warns if it has not seen optimizer.step(), but a Trainer also updates through other methods.
        self.scheduler.optimizer._opt_called = True
        self.scheduler.step(*metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the plain part of the scheduler's state: numbers, text and collections; never code."""
        return {
            key: _encode_torch_schedule_state(value)
            for key, value in self.scheduler.state_dict().items()
            if _is_json_schedule_value(value)
        }

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise StateMismatchError if it is for another kind of schedule. Some kinds cannot be distinguished."""
        mine, theirs = (
            {key for key in state if not key.startswith("_")} for state in (self.state_dict(), state_dict)
        )
        # Versions of torch differ in some entries.
        if (mine - theirs and theirs - mine) or "last_epoch" in mine - theirs:
            raise StateMismatchError(
                f"this is not the state of a {type(self.scheduler).__name__}: {state_dict!r:.120}; load what the "
                "state_dict() of one returned"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the scheduler. Raises as `check_state_dict`; nothing has changed then."""
        self.check_state_dict(state_dict)
        self.scheduler.load_state_dict(
            {key: _decode_torch_schedule_state(value) for key, value in state_dict.items()}
        )


class PlateauSchedule:
    """Multiplies a value of the groups when a metric stops improving, within a window.

    torch's ReduceLROnPlateau decides, on stand-ins for the optimizer's groups, which works for momentum, too. Values
    that other schedules write later are lowered by the same factor.

    Args:
        begin, end: It acts from the `begin`-th metric on (counted from 1) and before the `end`-th.
        minimum: Lower bound of the value, or a list with one for each group.
        optimizer, name, groups: As in `ParamSchedule`.
        options: Those of ReduceLROnPlateau: mode, factor, patience, threshold, threshold_mode, cooldown, eps.
    """

    by = "metric"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str = "lr",
        *,
        begin: int = 0,
        end: int | None = None,
        minimum: float | Sequence[float] = 0.0,
        groups: Sequence[int | str] | None = None,
        **options: Any,
    ) -> None:
        self.optimizer = optimizer
        self.target = ScheduledGroupValue(optimizer, name)
        """What it lowers; shared with schedules of the same value."""
        self._indices = self.target.indices(groups)
        self._begin, self._end, self._count = begin, end, 0
        self._stand_in = torch.optim.SGD(
            [{"params": [torch.zeros(1, device="cpu")]} for _ in range(len(self.target))], lr=0.0
        )
        lowest: Any = list(minimum) if isinstance(minimum, tuple) else minimum
        try:
            self._scheduler = ReduceLROnPlateau(self._stand_in, min_lr=lowest, **options)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"a schedule by metric cannot be made: {error}") from error

    def step(self, *metric: float) -> None:
        """Pass the next value of the metric. Raises ConfigurationError if it is missing."""
        _check_schedule_metric(metric)
        self._count += 1
        if self._count < self._begin or (self._end is not None and self._count >= self._end):
            return
        # 1. Copy the present values to the stand-ins; groups may have been added.
        groups = self._stand_in.param_groups
        for _ in range(len(groups), len(self.target)):
            self._stand_in.add_param_group({"params": [torch.zeros(1, device="cpu")]})
        before = [self.target.read(index) for index in range(len(groups))]
        for group, value in zip(groups, before, strict=True):
            group["lr"] = value
        # 2. Let torch decide, and copy back what it lowered.
        self._scheduler.step(*metric)
        for index, group in enumerate(groups):
            is_mine = self._indices is None or index in self._indices
            if is_mine and group["lr"] != before[index]:
                self.target.overrule(index, group["lr"])

    @property
    def name(self) -> str:
        return self.target.name

    def state_dict(self) -> dict[str, Any]:
        """Return the progress, the best metric, and the factors by which values were lowered, as plain numbers."""
        state = self._scheduler.state_dict()
        return {"count": self._count, "scales": self.target.scales, **{key: state[key] for key in _PROGRESS}}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._read(state_dict)

    def _read(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        # mmengine's state lacks the factors. They are only needed where another schedule writes the value.
        if is_mmengine_schedule_state(state_dict) and {*_PROGRESS[:3]} <= set(state_dict):
            if self.target.is_scheduled:
                raise StateMismatchError(
                    f"mmengine does not save by how much its schedule by metric has lowered {self.name!r}, which "
                    "another schedule writes, too; resume without schedules, and set the present value"
                )
            count = mmengine_schedule_count(state_dict, self)
            own = {"count": count, "last_epoch": count, "scales": [1.0] * len(state_dict["_last_value"])}
            state_dict = {**own, **{key: state_dict[key] for key in _PROGRESS[:3]}}
        if set(state_dict) != {"count", "scales", *_PROGRESS}:
            raise StateMismatchError(f"this is not the state of a schedule by metric: {state_dict!r:.120}")
        self.target.check_count(state_dict["scales"])
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state_dict = self._read(state_dict)
        self._count = int(state_dict["count"])
        self.target.scales = state_dict["scales"]
        self._scheduler.load_state_dict({key: state_dict[key] for key in _PROGRESS})


def bind_torch_schedule(one: Any, by: str) -> Any:
    """Wrap a torch scheduler in a TorchSchedule. It is advanced per `by`, unless it has a `by_epoch` of its own.

    A BoundSchedule, or anything that is not a scheduler, is returned unchanged.
    """
    if isinstance(one, BoundSchedule) or not is_torch_scheduler(one):
        return one
    return TorchSchedule(one, "epoch" if getattr(one, "by_epoch", False) is True else by)


def is_torch_scheduler(one: object) -> bool:
    """Return whether this is bound to an optimizer and has a torch scheduler's methods; `step` without arguments."""
    if isinstance(one, LRScheduler):
        return True
    if isinstance(one, type | torch.optim.Optimizer) or not hasattr(one, "optimizer"):
        return False
    methods = [getattr(one, name, None) for name in ("step", "state_dict", "load_state_dict")]
    if not all(map(callable, methods)):
        return False
    needed = inspect.signature(one.step).parameters.values()  # type: ignore[attr-defined]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not inspect.Parameter.empty or p.kind in variadic for p in needed)


def _check_schedule_metric(metric: Sequence[float]) -> None:
    if not metric:
        raise ConfigurationError("this schedule needs a metric, such as the validation loss: step(metric)")


_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


def _is_json_schedule_value(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json_schedule_value, value))
    if isinstance(value, Mapping):
        return all(
            _is_json_schedule_value(key) and _is_json_schedule_value(one) for key, one in value.items()
        )
    if isinstance(value, Tensor):
        return value.dim() == 0
    return value is None or isinstance(value, bool | int | float | str)


def _encode_torch_schedule_state(value: Any) -> Any:
    """Encode collections as lists for JSON, which has no tuples and no keys other than strings."""
    if isinstance(value, list):
        return [_encode_torch_schedule_state(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode_torch_schedule_state(one) for one in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            kind: [
                [_encode_torch_schedule_state(key), _encode_torch_schedule_state(one)]
                for key, one in value.items()
            ]
        }
    return value.item() if isinstance(value, Tensor) else value


def _decode_torch_schedule_state(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_torch_schedule_state(one) for one in value]
    if isinstance(value, Mapping):
        [(kind, items)] = value.items()
        unpacked = [_decode_torch_schedule_state(one) for one in items]
        return _KINDS[kind](unpacked if kind == "tuple" else dict(unpacked))
    return value
