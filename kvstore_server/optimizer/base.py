"""The base of every optimizer: its numbers, their names and checks, and the update that subclasses define.

An optimizer here holds numbers only. Its state (momentum, averages) lies beside the weights, in
`slices.SliceState`, so the same object serves a parameter server and a trainer's own process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

from torch import Tensor

from kvstore_server.errors import ConfigurationError

StateValue = Tensor | float
"""One entry of an optimizer's state: a flat tensor, a 0-d tensor or a number."""

ALIASES = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""Gluon's spelling of an option -> the name of the group key, which is torch's."""

_GLUONS = {key: gluon for gluon, key in ALIASES.items()} | {"betas": "beta1 and beta2"}
_COMMON: Mapping[str, Any] = {"lr": 0.01, "weight_decay": 0.0, "clip_gradient": None}
_NEVER_NEGATIVE = frozenset({"weight_decay", "clip_gradient", "momentum", "eps"})


class Optimizer:
    """Base class of Gluon's optimizers and of user-defined ones.

    A subclass names its own options, with their defaults, in `defaults` and defines `update`; `register` it
    to use it by name and on a server. Options are accepted under Gluon's and under torch's spelling
    (`learning_rate` or `lr`, `wd` or `weight_decay`, `beta1` and `beta2` or `betas`, `epsilon` or `eps`).

    Args:
        learning_rate: step size; may be negative. Default 0.01, or the class's own.
        options: `wd` (0.0), `rescale_grad` (1.0: every gradient is multiplied by it), `clip_gradient` (None,
            or the bound on each element of the rescaled gradient), `multi_precision` (False; True keeps a
            float32 copy of half-precision weights) and the class's own options.

    Raises:
        ConfigurationError: an option is unknown, is given under both spellings, or has an impossible value.
    """

    name: ClassVar[str]
    """Name to register under; the class's name in lower case when a class does not set it itself."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The class's own options with their defaults; subclasses inherit them."""
    elementwise: ClassVar[bool] = True
    """Whether each element's update needs nothing but that element's weight, gradient and state."""
    clips: ClassVar[bool] = True
    """Whether gradients are clipped to `clip_gradient` before `update`."""
    may_raise: bool = True
    """Whether `update` can raise on valid input, so that the state must be kept for a rollback."""
    verified: bool = False
    """Tests show that zero padding stays zero and that bits do not depend on where a vector is cut."""

    hyper: dict[str, Any]
    """The live numbers under torch's group keys ('lr', 'weight_decay', 'momentum', ...); may be replaced."""
    rescale_grad: float
    multi_precision: bool

    def __init__(self, learning_rate: float | None = None, **options: Any) -> None:
        if learning_rate is not None:
            options["learning_rate"] = learning_rate
        self._take_common(options)
        who, valid = self.registered_name, self._valid_options()
        given = canonical_options(options, valid, who)
        self.hyper = {
            key: _checked(who, key, given[key], default) if key in given else default
            for key, default in valid.items()
        }

    @property
    def registered_name(self) -> str:
        """The name under which this optimizer travels to a server."""
        own: str = type(self).__dict__.get("name") or type(self).__name__.lower()
        return own

    @property
    def learning_rate(self) -> float:
        return float(self.hyper["lr"])

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate; the next update uses it."""
        self.hyper["lr"] = _checked(self.registered_name, "lr", lr, 0.0)

    @property
    def lr(self) -> float:
        return self.learning_rate

    @lr.setter
    def lr(self, value: float) -> None:
        self.set_learning_rate(value)

    @property
    def wd(self) -> float:
        """Weight decay; 0.0 for a torch class that has none (Rprop)."""
        return float(self.hyper.get("weight_decay", 0.0))

    @property
    def clip_gradient(self) -> float | None:
        """Bound on each element of the rescaled gradient; None where there is none (always for torch's)."""
        bound: float | None = self.hyper.get("clip_gradient")
        return bound

    def spec(self) -> dict[str, Any]:
        """Describe this optimizer as plain numbers and names; `create_from_spec` rebuilds it."""
        return {
            "name": self.registered_name,
            "hyper": {key: _plain(self.hyper[key]) for key in self._valid_options() if key in self.hyper},
            "rescale_grad": self.rescale_grad,
            "multi_precision": self.multi_precision,
        }

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        """Return the state before the first update: flat tensors like `weight`, 0-d tensors and numbers."""
        return {}

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update to `weight` and `state` in place.

        `weight` and `grad` are flat, both float32 or both float64, and hold neighbouring elements of one or
        several keys; `grad` is already rescaled and clipped, and may be overwritten. A state entry may be
        changed in place or assigned anew; the names 'step' and 'master' are reserved. `hyper` holds
        `self.hyper` with the multipliers applied to 'lr' and 'weight_decay', and 'step': which update of
        these keys this is, from 1. The result for an element must not depend on its neighbours.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(weight, grad, state, hyper)")

    def _valid_options(self) -> dict[str, Any]:
        """The options that end up in `hyper`, under their group keys, with their defaults."""
        valid = dict(_COMMON)
        for cls in reversed(type(self).__mro__):
            valid.update({ALIASES.get(key, key): v for key, v in vars(cls).get("defaults", {}).items()})
        return valid

    def _take_common(self, options: dict[str, Any]) -> None:
        """Move the two options that are no group keys from `options` to attributes."""
        who = self.registered_name
        self.rescale_grad = _checked(who, "rescale_grad", options.pop("rescale_grad", 1.0), 1.0)
        self.multi_precision = _checked(who, "multi_precision", options.pop("multi_precision", False), False)


def canonical_options(options: Mapping[str, Any], valid: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Return `options` under the names of group keys; raise ConfigurationError on unknown or doubled ones."""
    result: dict[str, Any] = {}
    betas: dict[int, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if given in ("beta1", "beta2") and "betas" in valid:
            betas[0 if given == "beta1" else 1] = value
        elif name not in valid:
            raise ConfigurationError(f"{who} has no option {given!r}; its options are {_listing(valid)}")
        elif name in result:
            raise ConfigurationError(f"{who} was given {name!r} under two spellings; give it once")
        else:
            result[name] = value
    if betas and "betas" in result:
        raise ConfigurationError(f"{who} was given betas and beta1 or beta2; give one of the two spellings")
    if betas:
        result["betas"] = tuple(betas.get(i, valid["betas"][i]) for i in (0, 1))
    return result


def _listing(valid: Mapping[str, Any]) -> str:
    return ", ".join([*map(_both_spellings, valid), "rescale_grad", "multi_precision"])


def _both_spellings(key: str) -> str:
    return f"{key} (or {_GLUONS[key]})" if key in _GLUONS else key


def _checked(who: str, name: str, value: Any, default: Any) -> Any:
    """Return `value` as the type of `default`, or raise ConfigurationError."""
    if isinstance(default, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(default):
            raise ConfigurationError(f"{who}: {name} must be {len(default)} numbers, got {value!r}")
        return tuple(_checked(who, name, v, d) for v, d in zip(value, default, strict=True))
    if isinstance(default, bool | str):
        if not isinstance(value, type(default)):
            raise ConfigurationError(f"{who}: {name} must be a {type(default).__name__}, got {value!r}")
        return value
    if value is None and default is None:
        return None
    label = f"{who}: {_both_spellings(name)}"
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigurationError(f"{label} must be a finite number, got {value!r}")
    if name in _NEVER_NEGATIVE and value < 0:
        raise ConfigurationError(f"{label} must not be negative, got {value!r}")
    if name == "betas" and not 0 <= float(value) < 1:
        raise ConfigurationError(f"{label} must be at least 0 and less than 1, got {value!r}")
    return int(value) if isinstance(default, int) and isinstance(value, Integral) else float(value)


def _plain(value: Any) -> Any:
    """Return what msgpack carries without change: a number for a 0-d tensor, a list for a tuple."""
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
