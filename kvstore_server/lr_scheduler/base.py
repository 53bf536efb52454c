"""The base of every learning-rate scheduler: warm-up, checks, and the names under which schedulers travel.

A schedule is a pure function of `num_update` and of its constructor's arguments. Asking changes nothing, so it may
be asked about any update in any order, and what `LRScheduler.spec` returns is all there is to store or to send.

The dictionary of names is the only state; it changes through `register` alone.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, ClassVar, TypeVar

from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean

_log = logging.getLogger(__name__)

_MODES = ("linear", "constant")


class LRScheduler:
    """A warm-up, and after it what a subclass defines in `after_warmup`.

    In a linear warm-up update `n` has `warmup_begin_lr + (base_lr - warmup_begin_lr) * n / warmup_steps`, in a
    constant one `warmup_begin_lr`.

    A subclass may also define `__call__` itself, as Gluon's do. It keeps every argument of its constructor in an
    attribute of the same name, depends on nothing else, and is registered with `register`; otherwise it can be used,
    but neither sent to a server nor saved.

    Args:
        base_lr: the learning rate after the warm-up; may be set at any time.
        warmup_steps: how many updates the warm-up takes.
        warmup_begin_lr: the learning rate it starts from; at most `base_lr`.
        warmup_mode: 'linear' or 'constant'.

    Raises:
        ConfigurationError: an argument has the wrong type or an impossible value.
    """

    name: ClassVar[str]
    """Name to register under; the class's name in lower case when a class does not set it itself."""

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.warmup_steps = self._integer("warmup_steps", warmup_steps, 0)
        self.warmup_begin_lr = self._number("warmup_begin_lr", warmup_begin_lr)
        if warmup_mode not in _MODES:
            raise self._wrong(f"warmup_mode must be {' or '.join(map(repr, _MODES))}, got {warmup_mode!r}")
        self.warmup_mode = warmup_mode
        self.base_lr = base_lr

    @property
    def base_lr(self) -> float:
        """The learning rate after the warm-up, where the decay starts. Setting it moves the whole schedule."""
        return self._base_lr

    @base_lr.setter
    def base_lr(self, value: float) -> None:
        value = self._number("base_lr", value)
        if value < self.warmup_begin_lr:
            raise self._wrong(
                f"base_lr must not be less than warmup_begin_lr, got {value} and {self.warmup_begin_lr}. Where the "
                "optimizer has a learning_rate too, base_lr is that learning_rate"
            )
        self._base_lr = value

    @property
    def warmup_final_lr(self) -> float:
        """Where the warm-up ends: always the present `base_lr`."""
        return self.base_lr

    def __call__(self, num_update: int) -> float:
        """Return the learning rate after `num_update` updates."""
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.after_warmup(num_update)

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the learning rate of an update within the warm-up.

        Raises:
            ConfigurationError: the warm-up is over by then.
        """
        if num_update >= self.warmup_steps:
            raise self._wrong(f"update {num_update} is not within the warm-up of {self.warmup_steps} updates")
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the learning rate of an update after the warm-up; the warm-up's updates are counted too."""
        raise NotImplementedError(f"{type(self).__name__} must define after_warmup(num_update)")

    def spec(self) -> dict[str, Any]:
        """Describe this scheduler by its name and plain values; `create_from_spec` rebuilds it.

        Raises:
            ConfigurationError: its class is not registered, or does not keep an argument, or keeps one that is more
                than numbers, strings and lists of them.
        """
        cls = type(self)
        if _registry.get(_name_of(cls)) is not cls:
            raise self._wrong(
                f"it cannot be sent to a server or saved, because {_name_of(cls)!r} does not stand for its class; "
                "decorate that with kvtrainer.lr_scheduler.register, and start the servers with --import MODULE"
            )
        return {"name": _name_of(cls), **{key: self._kept(key) for key in _argument_names(cls)}}

    def __repr__(self) -> str:
        kept = (f"{key}={getattr(self, key, '?')!r}" for key in _argument_names(type(self)))
        return f"{type(self).__name__}({', '.join(kept)})"

    def _kept(self, key: str) -> Any:
        """The constructor's argument as a plain value."""
        if not hasattr(self, key):
            raise self._wrong(f"its constructor's argument {key!r} must be kept in an attribute of that name")
        value = getattr(self, key)
        plain = list(value) if isinstance(value, tuple) else value
        for item in plain if isinstance(plain, list) else [plain]:
            if not isinstance(item, int | float | str | None):
                raise self._wrong(
                    f"{key} is {value!r}, but only numbers, strings and lists of them can travel"
                )
        return plain

    def _number(self, label: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise self._wrong(f"{label} must be a finite number, got {value!r}")
        return float(value)

    def _integer(self, label: str, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise self._wrong(f"{label} must be an int of at least {least}, got {value!r}")
        return int(value)

    def _wrong(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"{type(self).__name__}: {text}")


_Registered = TypeVar("_Registered", bound=type[LRScheduler])
_registry: dict[str, type[LRScheduler]] = {}


def register(cls: _Registered) -> _Registered:
    """Make a scheduler class known by name, so that it can be sent and saved; a decorator.

    A name that exists is replaced, with a warning in the log. A server that shall evaluate the schedule needs the
    same registration: start it with --import MODULE.

    Raises:
        ConfigurationError: `cls` is not a subclass of LRScheduler.
    """
    if not (isinstance(cls, type) and issubclass(cls, LRScheduler)):
        raise ConfigurationError(
            f"only a subclass of LRScheduler can be registered as a scheduler, got {cls!r}"
        )
    name = _name_of(cls)
    known = _registry.get(name)
    if known is not None and known is not cls:
        _log.warning("learning-rate scheduler %r is now %s; it was %s", name, _where(cls), _where(known))
    _registry[name] = cls
    return cls


def create_from_spec(spec: Mapping[str, Any]) -> LRScheduler:
    """Rebuild the scheduler that `LRScheduler.spec` described.

    Raises:
        UnknownNameError: no scheduler of that name is registered in this process; lists the valid ones.
        ConfigurationError: the description is malformed or has a bad value.
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


def _name_of(cls: type[LRScheduler]) -> str:
    own: str = vars(cls).get("name") or cls.__name__
    return own.lower()


def _argument_names(cls: type[LRScheduler]) -> list[str]:
    """The arguments that can be given to the constructor by name; **options stands for those of the next class."""
    names: dict[str, None] = {}
    for owner in cls.__mro__:
        if "__init__" not in vars(owner):
            continue
        _, *parameters = inspect.signature(vars(owner)["__init__"]).parameters.values()
        names |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
