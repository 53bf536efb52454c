"""Gluon's learning-rate schedulers as pure functions.

A schedule is a function of `num_update` and of its constructor's arguments. Calling it changes nothing, so it may be
called for any update in any order, and `LRScheduler.spec` is all that has to be stored or sent. A plain function of
`num_update` can be used, too, but only in this process.

The four schedulers have MXNet's arguments, values and errors. Unlike MXNet's they have no position: the number of
decays is computed from `num_update`, and a new `base_lr` applies to the whole schedule. Operations are in MXNet's
order, so the bits are the same.

The registry of names is the only state; only `register` changes it.
"""

from __future__ import annotations

import inspect
import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from kvstore_server import check
from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean

_log = logging.getLogger(__name__)

_ONE_BY_ONE = 1 << 16
"""Decays up to this number are multiplied one by one; multiples of it use a power, so that any count is fast."""


class LRScheduler:
    """Warm up, then follow what a subclass defines in `after_warmup`.

    In a linear warm-up, update `n` has `warmup_begin_lr + (base_lr - warmup_begin_lr) * n / warmup_steps`, in a
    constant one `warmup_begin_lr`.

    A subclass may instead define `__call__` itself, as Gluon's do. To be sent to servers and saved it must keep every
    constructor argument in an attribute of the same name, depend on nothing else, and be registered with `register`.

    Args:
        base_lr: The learning rate after the warm-up; may be set at any time.
        warmup_steps: How many updates the warm-up takes.
        warmup_begin_lr: The learning rate at its beginning; at most `base_lr`.
        warmup_mode: 'linear' or 'constant'.

    Raises:
        ConfigurationError: An argument has the wrong type or an impossible value.
    """

    name: ClassVar[str]
    """Name to register under; by default the class's name in lower case."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.warmup_steps = check.integer(self._label("warmup_steps"), warmup_steps, 0)
        self.warmup_begin_lr = check.number(self._label("warmup_begin_lr"), warmup_begin_lr)
        self.warmup_mode = check.one_of(self._label("warmup_mode"), warmup_mode, ("linear", "constant"))
        self.base_lr = base_lr

    @property
    def base_lr(self) -> float:
        """The learning rate after the warm-up, where the decay begins. Setting it changes the whole schedule."""
        return self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = check.number(self._label("base_lr"), value)
        if value < self.warmup_begin_lr:
            raise self._wrong(
                f"base_lr must not be less than warmup_begin_lr, got {value} and {self.warmup_begin_lr}. Where the "
                "optimizer has a learning_rate too, base_lr is that learning_rate"
            )
        self._base_lr = value

    @property
    def warmup_final_lr(self) -> float:
        """The learning rate at the end of the warm-up: always the current `base_lr`."""
        return self.base_lr

    def __call__(self, num_update: int) -> float:
        """Return the learning rate after `num_update` updates."""
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.after_warmup(num_update)

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the learning rate of an update during the warm-up.

        Raises:
            ConfigurationError: The warm-up is over by then.
        """
        if num_update >= self.warmup_steps:
            raise self._wrong(f"update {num_update} is not within the warm-up of {self.warmup_steps} updates")
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up; `num_update` counts the warm-up, too."""
        raise NotImplementedError(f"{type(self).__name__} must define after_warmup(num_update)")

    def spec(self) -> dict[str, Any]:
        """Describe this scheduler by its name and plain values; `create_scheduler_from_spec` rebuilds it.

        Raises:
            ConfigurationError: Its class is not registered, or an argument is not kept in an attribute, or is more
                than numbers, strings and lists of them.
        """
        cls = type(self)
        if _registry.get(_scheduler_name(cls)) is not cls:
            raise self._wrong(
                f"it cannot be sent to a server or saved, because {_scheduler_name(cls)!r} is not registered "
                "for its class; decorate that with kvtrainer.lr_scheduler.register, and start the servers "
                "with --import MODULE"
            )
        return {
            "name": _scheduler_name(cls),
            **{key: self._kept(key) for key in _scheduler_argument_names(cls)},
        }

    def __repr__(self) -> str:
        kept = (f"{key}={getattr(self, key, '?')!r}" for key in _scheduler_argument_names(type(self)))
        return f"{type(self).__name__}({', '.join(kept)})"

    def _kept(self, key: str) -> Any:
        if not hasattr(self, key):
            raise self._wrong(f"its constructor's argument {key!r} must be kept in an attribute of that name")
        value = getattr(self, key)
        plain = list(value) if isinstance(value, tuple) else value
        for item in plain if isinstance(plain, list) else [plain]:
            if not isinstance(item, int | float | str | None):
                raise self._wrong(
                    f"{key} is {value!r}, but only numbers, strings and lists of them can be sent"
                )
        return plain

    def _label(self, argument: str) -> str:
        return f"{type(self).__name__}: {argument}"

    def _wrong(self, text: str) -> ConfigurationError:
        return ConfigurationError(self._label(text))


_Registered = TypeVar("_Registered", bound=type[LRScheduler])
_registry: dict[str, type[LRScheduler]] = {}


def register(cls: _Registered) -> _Registered:
    """Register a scheduler class by name, so that it can be sent and saved; a decorator.

    An existing name is replaced, which is logged as a warning. A server that evaluates the schedule needs the same
    registration: start it with --import MODULE.

    Raises:
        ConfigurationError: `cls` is not a subclass of LRScheduler.
    """
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise ConfigurationError(
            f"only a subclass of LRScheduler can be registered as a scheduler, got {cls!r}"
        )
    name = _scheduler_name(cls)
    if _registry.get(name, cls) is not cls:
        _log.warning("learning-rate scheduler %r is now %r; it was %r", name, cls, _registry[name])
    _registry[name] = cls
    return cls


def create_scheduler_from_spec(spec: Mapping[str, Any]) -> LRScheduler:
    """Rebuild the scheduler that `LRScheduler.spec` described.

    Raises:
        UnknownNameError: No scheduler of that name is registered in this process; lists the valid ones.
        ConfigurationError: The description is malformed or has a bad value.
    """
    arguments = dict(spec) if isinstance(spec, Mapping) else {}
    name = arguments.pop("name", None)
    if not isinstance(name, str):
        raise ConfigurationError(f"a scheduler's description needs a name and its arguments, got {spec!r}")
    cls = _registry.get(name.lower())
    if cls is None:
        raise UnknownNameError(
            f"there is no learning-rate scheduler {name!r}; known are {', '.join(sorted(_registry))}. A user-defined "
            f"one must be registered in every process: start the servers with --import MODULE"
            f"{did_you_mean(name, _registry)}"
        )
    try:
        return cls(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the learning-rate scheduler {name!r} cannot be rebuilt: {error}"
        ) from error


def _scheduler_name(cls: type[LRScheduler]) -> str:
    own: str = vars(cls).get("name") or cls.__name__
    return own.lower()


def _scheduler_argument_names(cls: type[LRScheduler]) -> list[str]:
    """Return the names of the constructor's arguments; **options stands for those of the next class."""
    names: dict[str, None] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        _, *parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        names |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


class _DecayingScheduler(LRScheduler):
    factor: float
    _reached: tuple[object, int, float] | None = None
    """Cache of the last result, from which the next one continues; it changes no result."""

    def _decayed(self, decays: int, least: float = -math.inf) -> float:
        """Multiply `base_lr` `decays` times, but never below `least`."""
        # One by one, because a power would be rounded differently; powers of whole blocks keep large counts fast.
        done = decays - decays % _ONE_BY_ONE
        start = self.base_lr, self.factor, least, done
        lr = max(self.base_lr * self.factor**done, least) if done else self.base_lr
        if self._reached is not None and self._reached[0] == start and self._reached[1] <= decays:
            _, done, lr = self._reached
        for _ in range(done, decays):
            lr = max(lr * self.factor, least)
        self._reached = start, decays, lr
        return lr


@register
class FactorScheduler(_DecayingScheduler):
    """`base_lr * factor**k` with `k = ceil(num_update / step) - 1`. From k = 1 on at least `stop_factor_lr`.

    Args:
        step: How many updates are between two decays, at least 1; the warm-up counts.
        factor: The factor of each decay, from 0 to 1.
        stop_factor_lr: The lower bound of decays.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See `LRScheduler`.
    """

    name = "factor"

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step = check.integer(self._label("step"), step, 1)
        self.factor = check.number(self._label("factor"), factor, 0, 1)
        self.stop_factor_lr = check.number(self._label("stop_factor_lr"), stop_factor_lr)

    def after_warmup(self, num_update: int) -> float:
        return self._decayed(max(0, (num_update - 1) // self.step), self.stop_factor_lr)


@register
class MultiFactorScheduler(_DecayingScheduler):
    """`base_lr * factor**k`, where k counts the entries of `step` below `num_update`.

    Args:
        step: A list of increasing ints, the first at least 1; the warm-up counts.
        factor: The factor of each decay, from 0 to 1.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See `LRScheduler`.
    """

    name = "multifactor"

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if not isinstance(step, list | tuple) or not step:
            raise self._wrong(f"step must be a list of at least one int, got {step!r}")
        self.step = [check.integer(self._label("each entry of step"), entry, 1) for entry in step]
        if any(after <= before for before, after in zip(self.step, self.step[1:], strict=False)):
            raise self._wrong(f"step must be an increasing list of ints, got {step!r}")
        self.factor = check.number(self._label("factor"), factor, 0, 1)

    def after_warmup(self, num_update: int) -> float:
        return self._decayed(bisect_left(self.step, num_update))


class _AnnealingScheduler(LRScheduler, ABC):
    """Decays from `base_lr` at the end of the warm-up to `final_lr` at `max_update`."""

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        name = self._label("max_update, the maximum number of updates,")
        self.max_update = check.integer(name, max_update, 1)
        if self.max_update <= self.warmup_steps:
            raise self._wrong(
                f"max_update must be more than warmup_steps, because the decay is between them; got {max_update} and "
                f"{self.warmup_steps}"
            )
        self.final_lr = check.number(self._label("final_lr"), final_lr)

    def after_warmup(self, num_update: int) -> float:
        done = min(num_update, self.max_update) - self.warmup_steps
        left = self._left(done, self.max_update - self.warmup_steps)
        return self.final_lr + (self.base_lr - self.final_lr) * left

    @abstractmethod
    def _left(self, done: int, span: int) -> float:
        """Return the fraction of the decay that is left after `done` of `span` updates; 1 after none."""


@register
class PolyScheduler(_AnnealingScheduler):
    """`final_lr + (base_lr - final_lr) * (1 - p)**pwr`. p goes from 0 to 1 between warm-up and `max_update`.

    Args:
        max_update: The update at which the decay ends; more than `warmup_steps`.
        pwr: The exponent, at least 0.
        final_lr: The learning rate at the end.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See `LRScheduler`.
    """

    name = "poly"

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.pwr = check.number(self._label("pwr"), pwr, 0)

    def _left(self, done: int, span: int) -> float:
        return float((1 - done / span) ** self.pwr)


@register
class CosineScheduler(_AnnealingScheduler):
    """`final_lr + (base_lr - final_lr) * (1 + cos(pi p)) / 2`. p goes from 0 to 1 between warm-up and `max_update`.

    Args:
        max_update: The update at which the decay ends; more than `warmup_steps`.
        final_lr: The learning rate at the end.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See `LRScheduler`.
    """

    name = "cosine"

    def _left(self, done: int, span: int) -> float:
        return (1 + math.cos(math.pi * done / span)) / 2


class FunctionScheduler(LRScheduler):
    """Takes the learning rate from a user's function; it has neither base_lr nor warm-up."""

    warmup_steps = 0

    def __init__(self, function: Callable[[int], float]) -> None:
        self.function = function

    @property
    def base_lr(self) -> float:
        return self(0)

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        raise ConfigurationError(
            f"learning_rate {value!r} would have no effect beside {self!r}, which alone decides the learning rate; "
            "give one of the two"
        )

    def __call__(self, num_update: int) -> float:
        """Return the function's value for `num_update`. Raises ConfigurationError if that is not a finite number."""
        return check.number(
            self._label(f"what {self.function!r} returns for {num_update}"), self.function(num_update)
        )

    def spec(self) -> dict[str, Any]:
        """Raise ConfigurationError: a function is code, which is neither sent nor saved."""
        raise ConfigurationError(
            f"{self.function!r} as lr_scheduler works only where this process computes the learning rate; code is "
            "neither sent to a server nor saved. Use a scheduler of kvtrainer.lr_scheduler, or write a subclass of "
            "LRScheduler, register it, and start servers with --import MODULE"
        )


def as_scheduler(value: object) -> LRScheduler:
    """Return a scheduler unchanged, a function as `FunctionScheduler`. Raises ConfigurationError for anything else."""
    if isinstance(value, LRScheduler):
        return value
    if isinstance(value, type) or not callable(value):
        raise ConfigurationError(
            "lr_scheduler must be a scheduler, such as those of kvtrainer.lr_scheduler, or a function that returns the "
            f"learning rate for num_update; got {value!r}"
        )
    return FunctionScheduler(value)
