"""The loss scales that a Trainer's option `amp` asks for: torch's dynamic one, and one that does not change.

The arithmetic of the dynamic scale is torch.amp.GradScaler's own. What saved it before may have been torch, MMCV's
LossScaler or this library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.amp

from kvtrainer.errors import ConfigurationError
from kvtrainer.precision.loss_scaler import FIRST, LEAST, LossScaler, Scaler

_log = logging.getLogger(__name__)

_LARGEST = float(torch.finfo(torch.float32).max)
_TORCHS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
"""What torch.amp.GradScaler saves."""
_MMCVS = {"cur_scale", "cur_iter", "mode", "last_overflow_iter", "scale_factor", "scale_window"}
"""What MMCV's LossScaler saves."""


class TorchLossScaler(LossScaler):
    """A scale that torch.amp.GradScaler adapts: it backs off when gradients overflow, and grows after clean steps.

    Args:
        init_scale: what to begin with.
        growth_factor, backoff_factor, growth_interval: as of torch.amp.GradScaler.
        min_scale: a floor, such as the 1 of MMCV's LossScaler. Without it the floor is 2^-24, below which torch's
            scale would go on to 0.

    Raises:
        ConfigurationError: a number is impossible.
    """

    def __init__(
        self,
        init_scale: float = FIRST,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float | None = None,
    ) -> None:
        super().__init__()
        scale = _positive("init_scale", init_scale)
        factors = _checked_factors(growth_factor, backoff_factor, growth_interval)
        self.min_scale = None if min_scale is None else _positive("min_scale", min_scale)
        if self.min_scale is not None and self.min_scale > scale:
            raise ConfigurationError(f"min_scale {min_scale!r} is above init_scale {init_scale!r}")
        self._torch = torch.amp.GradScaler("cpu", scale, *factors)
        self._synchronise()

    def update(self, overflow: bool) -> None:
        """End a step: adapt the scale. `overflow`: whether a gradient was infinite or not a number, on any worker."""
        self.mark_dropped()
        self._make_tensors()
        before = self._torch.get_scale()
        if before != self.loss_scale:  # somebody has set it
            before = self.loss_scale
            self._torch.update(before)
        probe = torch.zeros((), dtype=torch.float32, device="cpu")
        probe.grad = torch.full_like(probe, math.inf if overflow else 0.0)
        optimizer = SimpleNamespace(param_groups=[{"params": [probe]}])
        self._torch.unscale_(cast(torch.optim.Optimizer, optimizer))
        self._torch.update()
        floor = LEAST if self.min_scale is None else self.min_scale
        if self._torch.get_scale() < floor:
            self._torch.update(floor)
        self._synchronise()
        if overflow and before > floor == self.loss_scale:
            _log.warning(
                "gradients overflow although the loss scale has come down to %g, which is the least; if they still do, "
                "look for an infinity or a NaN in the data or the loss",
                floor,
            )

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers under torch's names, and `min_scale` if there is one; torch.amp.GradScaler can load them."""
        floor = {} if self.min_scale is None else {"min_scale": self.min_scale}
        return {**self._torch.state_dict(), "scale": self.loss_scale, **floor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a scaler has saved: this one, torch's, MMCV's or kvtrainer.amp.LossScaler.

        An empty state, which torch's saves while it is disabled, changes nothing. A floor that was set here stays.

        Raises:
            ConfigurationError: it is something else; nothing has changed then.
        """
        if isinstance(state, Mapping) and not state:
            _log.info("the saved state of the loss scaler is empty: it goes on with %g", self.loss_scale)
            return
        numbers = {**self._torch.state_dict(), "_growth_tracker": 0, **_read(state)}
        if self.min_scale is None and state.get("min_scale") is not None:
            self.min_scale = _positive("min_scale", state["min_scale"])
        self._torch.load_state_dict(numbers)
        self._synchronise()

    def _make_tensors(self) -> None:
        """Let torch's scaler make its tensors, if they are not there: it does so for the first loss."""
        self._torch.scale(torch.zeros((), device="cpu"))

    def _synchronise(self) -> None:
        self._make_tensors()
        self.loss_scale = self._torch.get_scale()
        self.clean_steps = self._torch._get_growth_tracker()


class StaticLossScaler(LossScaler):
    """A scale that never changes. A step whose gradients overflow is skipped all the same.

    Raises:
        ConfigurationError: `scale` is not a number above 0.
    """

    is_static = True

    def __init__(self, scale: float = 512.0) -> None:
        super().__init__()
        self.loss_scale = _positive("a loss scale", scale)

    def update(self, overflow: bool) -> None:
        """End a step; nothing changes."""
        self.mark_dropped()

    def state_dict(self) -> dict[str, Any]:
        """The scale, which is saved for the record."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that it is the state of a scaler. The scale stays: it is an option, not something that was learned.

        Raises:
            ConfigurationError: it is something else.
        """
        if isinstance(state, Mapping) and not state:
            return
        saved = _read(state)["scale"]
        if saved != self.loss_scale:
            _log.info("the saved loss scale is %g; the static one of %g stays", saved, self.loss_scale)


def make_loss_scaler(amp: Any) -> Scaler | None:
    """The loss scaler that `amp` asks for; None for none.

    Args:
        amp: "dynamic"; a number, whole or not, for a scale that does not change; None; or a dict with arguments of
            TorchLossScaler and `enabled`. MMCV's older names `mode`, `scale_factor` and `scale_window` are understood.

    Raises:
        ConfigurationError: it is something else.
    """
    if amp is None:
        return None
    if isinstance(amp, str) and amp == "dynamic":
        return TorchLossScaler()
    if isinstance(amp, Mapping):
        return _from_dict(dict(amp))
    if isinstance(amp, bool) or not isinstance(amp, Real):
        raise ConfigurationError(
            f"amp must be 'dynamic', a number (a static loss scale), a dict such as dict(dtype='bfloat16') or "
            f"dict(init_scale=512.0), or None, got {amp!r}"
        )
    return StaticLossScaler(float(amp))


def scaler_from_state(state: Mapping[str, Any]) -> Scaler:
    """A scaler of the kind that has saved this, with its numbers.

    Raises:
        ConfigurationError: no scaler saves such a state.
    """
    names = set(state) if isinstance(state, Mapping) else set()
    if names == {"loss_scale"}:
        return StaticLossScaler(state["loss_scale"])
    scaler = LossScaler() if names == {"loss_scale", "clean_steps"} else TorchLossScaler()
    scaler.load_state_dict(state)
    return scaler


def _from_dict(given: dict[str, Any]) -> Scaler | None:
    known = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "min_scale", "enabled")
    is_enabled, mode = given.pop("enabled", True), given.pop("mode", "dynamic")
    if not isinstance(is_enabled, bool):
        raise ConfigurationError(f"enabled of a loss scaler must be True or False, got {is_enabled!r}")
    if mode not in ("dynamic", "static"):
        raise ConfigurationError(f"mode of a loss scaler must be 'dynamic' or 'static', got {mode!r}")
    if "scale_factor" in given:
        factor = _positive("scale_factor", given.pop("scale_factor"))
        given = {"growth_factor": factor, "backoff_factor": 1.0 / factor, **given}
    if "scale_window" in given:
        given = {"growth_interval": given.pop("scale_window"), **given}
    unknown = sorted(set(given) - set(known), key=str)
    if unknown:
        raise ConfigurationError(
            f"a loss scaler has no option {', '.join(map(repr, unknown))}; its options are {', '.join(known)}"
        )
    if mode == "static":
        if set(given) - {"init_scale"}:
            raise ConfigurationError(f"a static loss scale has init_scale only, got {given!r}")
        scaler: Scaler = StaticLossScaler(given.get("init_scale", FIRST))
    else:
        scaler = TorchLossScaler(**given)
    return scaler if is_enabled else None


def _read(state: Any) -> dict[str, Any]:
    """The numbers of a saved state, checked, under torch's names; `scale` is always there.

    Raises:
        ConfigurationError: no scaler saves such a state.
    """
    names = set(state) if isinstance(state, Mapping) else set()
    if names - {"min_scale"} == _TORCHS:
        factors = _checked_factors(
            *(state[k] for k in ("growth_factor", "backoff_factor", "growth_interval"))
        )
        numbers = dict(zip(("growth_factor", "backoff_factor", "growth_interval"), factors, strict=True))
        numbers |= {"scale": state["scale"], "_growth_tracker": state["_growth_tracker"]}
    elif names == _MMCVS:
        numbers = _of_mmcv(state)
    elif names in ({"loss_scale"}, {"loss_scale", "clean_steps"}):
        numbers = {"scale": state["loss_scale"], "_growth_tracker": state.get("clean_steps", 0)}
    else:
        raise ConfigurationError(f"these are no numbers of a loss scaler: {state!r:.200}")
    numbers["scale"] = _positive("the saved scale", numbers["scale"])
    count = numbers.get("_growth_tracker", 0)
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
        raise ConfigurationError(f"a saved count of clean steps must be an int from 0 on, got {count!r}")
    return numbers


def _of_mmcv(state: Mapping[str, Any]) -> dict[str, Any]:
    """MMCV counts iterations, and remembers that of the last overflow, which is -1 before the first one."""
    if state["mode"] == "static":
        return {"scale": state["cur_scale"]}
    factor = _positive("the saved scale_factor", state["scale_factor"])
    growth, backoff, window = _checked_factors(factor, 1.0 / factor, state["scale_window"])
    done, overflow = state["cur_iter"], state["last_overflow_iter"]
    if not all(isinstance(one, Integral) for one in (done, overflow)) or not -1 <= overflow < max(done, 1):
        raise ConfigurationError(f"iteration {overflow!r} of {done!r} cannot have been the last overflow")
    clean = (int(done) - int(overflow) - 1) % window
    return {
        "scale": state["cur_scale"],
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": window,
        "_growth_tracker": clean,
    }


def _checked_factors(growth: Any, backoff: Any, interval: Any) -> tuple[float, float, int]:
    growth, backoff = _positive("growth_factor", growth), _positive("backoff_factor", backoff)
    if growth <= 1 or backoff >= 1:
        raise ConfigurationError(
            f"a loss scale grows by a growth_factor above 1 and backs off by a backoff_factor below 1, got {growth!r} "
            f"and {backoff!r}"
        )
    if isinstance(interval, bool) or not isinstance(interval, Integral) or interval < 1:
        raise ConfigurationError(f"growth_interval must be an int of at least 1, got {interval!r}")
    return growth, backoff, int(interval)


def _positive(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= _LARGEST:
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")
    return float(value)
