"""Loss scalers for half precision, how they adapt, and the option `amp`.

A scaled loss keeps small float16 gradients above the smallest representable number; the step divides the gradients by
the scale. `LossScaler` has the whole mechanism, with Gluon's values. `TorchLossScaler` and `StaticLossScaler` only
change the values; the former computes in float32, as torch.amp.GradScaler does.

Life of a scale: `mark_scaled` when a loss is multiplied, `factor` undoes that in the step, `mark_unscaled` if the loop
unscaled its gradients itself, and `update` after each step, with a flag that all workers agree on, so that scales stay
equal. `_carried` holds the scale of the present gradients, because the scale may be replaced in between.

A saved state may come from torch, MMCV's LossScaler, or this library; `_read_loss_scaler_state` recognises it by its
keys and returns it under torch's names. A state that does not fit changes nothing.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.optim

from kvstore_server import check
from kvtrainer.errors import AmpNotInitializedError, ConfigurationError, StateMismatchError

_log = logging.getLogger(__name__)

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**-24
CLEAN_STEPS = 2000
"""After this many steps in a row without an overflow the scale doubles."""

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""The keys that torch.amp.GradScaler saves."""
_KIND = "kind"
"""Saved in addition, except by scalers of torch's kind. torch's own load_state_dict ignores it."""
_GLUON, _STATIC = "gluon", "static"
_MMCVS = {"cur_scale", "cur_iter", "mode", "last_overflow_iter", "scale_factor", "scale_window"}
"""The keys that MMCV's LossScaler saves."""
_OLD_KINDS = {frozenset({"loss_scale"}): _STATIC, frozenset({"loss_scale", "clean_steps"}): _GLUON}
"""The keys that our scalers saved before they used torch's."""


class LossScaler:
    """A power of two that halves on overflow and doubles after 2000 clean steps in a row.

    The values are MXNet's. MXNet however halves one step late, and so overflows twice.

    Args:
        loss_scale: The initial value, at most 2^24.
    """

    _kind: str | None = _GLUON
    """`_GLUON`, `_STATIC`, or None for torch's, which rounds the scale to float32."""
    _growth, _backoff, _interval = 2.0, 0.5, CLEAN_STEPS
    _least, _most = SMALLEST, LARGEST

    def __init__(self, loss_scale: float = FIRST) -> None:
        self.loss_scale = check.number("a loss scale", loss_scale, SMALLEST, LARGEST)
        """The factor for the next loss."""
        self.clean_steps = 0
        """Steps without an overflow since the scale last changed."""
        self.min_scale: float | None = None
        """The lower bound that was asked for."""
        self._carried: float | None = None
        """The scale in the present gradients, None without a scaled loss. `loss_scale` may have changed since."""
        self._is_unscaled = False

    @property
    def factor(self) -> float:
        """The factor that undoes the scale in the present gradients; 1 if they do not come from a scaled loss."""
        return 1.0 if self._carried is None else 1.0 / self._carried

    @property
    def is_scaled(self) -> bool:
        """Whether the present gradients come from a scaled loss, even if they were unscaled since."""
        return self._carried is not None or self._is_unscaled

    def mark_scaled(self) -> None:
        """Record that gradients of a scaled loss follow.

        Raises:
            ConfigurationError: The gradients to which they would be added were already unscaled.
        """
        if self._is_unscaled:
            raise ConfigurationError(
                "the gradients were unscaled already, and a scaled loss would be added to them; call amp.unscale after "
                "the last backward pass before the step"
            )
        self._carried = self.loss_scale

    def mark_unscaled(self) -> None:
        """Record that the present gradients were multiplied by `factor`."""
        self._is_unscaled |= self._carried is not None
        self._carried = None

    def mark_dropped(self) -> None:
        """Record that there are no gradients any more."""
        self._carried, self._is_unscaled = None, False

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. `overflow`: whether a gradient was infinite or NaN on any worker."""
        self.mark_dropped()
        if self._kind == _STATIC:
            return
        self.loss_scale = before = self._rounded(self.loss_scale)
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.loss_scale = max(self._rounded(before * self._backoff), self._rounded(self._least))
            if before > self._least == self.loss_scale:
                _log.warning(
                    "gradients overflow although the loss scale has reached its minimum, %g; if that goes on, look for "
                    "an infinity or a NaN in the data or the loss",
                    self._least,
                )
        elif self.clean_steps == self._interval:
            self.clean_steps = 0
            grown = min(self._rounded(before * self._growth), self._most)
            self.loss_scale = grown if math.isfinite(grown) else before

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers that torch.amp.GradScaler can load, with the lower bound, if any, and the kind."""
        values = self.loss_scale, self._growth, self._backoff, self._interval, self.clean_steps
        more = {"min_scale": self.min_scale, _KIND: self._kind}
        numbers = dict(zip(_TORCHS, values, strict=True))
        return numbers | {name: value for name, value in more.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a scaler of this library, of torch's, or of MMCV's.

        A LossScaler takes the scale and the count of clean steps, if the saved factors equal its own. A TorchLossScaler
        also takes the factors, and the lower bound unless it has one. A StaticLossScaler keeps its scale, which is an
        option and not a result of training. The last two accept an empty state, which torch's disabled scaler saves,
        and ignore it.

        Raises:
            ConfigurationError: The state is something else; nothing has changed then.
        """
        # 1. An empty state, or a static scale: nothing to load.
        if self._kind != _GLUON and isinstance(state, Mapping) and not state:
            _log.info("the saved state of the loss scaler is empty; the scale stays %g", self.loss_scale)
            return
        numbers = {**self.state_dict(), **_read_loss_scaler_state(state)}
        scale, *factors, clean_steps = (numbers[name] for name in _TORCHS)
        if self._kind == _STATIC:
            if scale != self.loss_scale:
                _log.info(
                    "the saved loss scale %g is ignored; the static scale stays %g", scale, self.loss_scale
                )
            return
        # 2. Gluon's scale has fixed factors and bounds; torch's takes those of the state.
        if self._kind == _GLUON:
            own = self._growth, self._backoff, self._interval
            if tuple(factors) != own:
                raise ConfigurationError(
                    f"a {type(self).__name__} has the growth factor, backoff factor and growth interval {own}, the "
                    f"saved state has {tuple(factors)}; use the Trainer's option amp=dict(...) for these"
                )
            check.integer("a saved count of clean steps", clean_steps, 0, self._interval - 1)
            check.number("a loss scale", scale, SMALLEST, LARGEST)
        elif self.min_scale is None and state.get("min_scale") is not None:
            self._least = self.min_scale = _check_positive_scale("min_scale", state["min_scale"])
        self.loss_scale, self.clean_steps = self._rounded(scale), clean_steps
        self._growth, self._backoff, self._interval = factors

    def _rounded(self, scale: float) -> float:
        return ctypes.c_float(scale).value if self._kind is None else scale


class TorchLossScaler(LossScaler):
    """A scale that adapts as torch.amp.GradScaler's. `min_scale` is a lower bound, by default 2^-24; torch's is 0."""

    _kind, _most = None, math.inf

    def __init__(
        self,
        init_scale: float = FIRST,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = CLEAN_STEPS,
        min_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.loss_scale = self._rounded(_check_positive_scale("init_scale", init_scale))
        self._growth, self._backoff, self._interval = _check_scaler_factors(
            growth_factor, backoff_factor, growth_interval
        )
        if min_scale is not None:
            self._least = self.min_scale = _check_positive_scale("min_scale", min_scale)
            if self.min_scale > init_scale:
                raise ConfigurationError(f"min_scale {min_scale!r} is above init_scale {init_scale!r}")


class StaticLossScaler(LossScaler):
    """A scale that never changes. A step whose gradients overflow is skipped all the same."""

    _kind = _STATIC

    def __init__(self, scale: float = 512.0) -> None:
        super().__init__()
        self.loss_scale = _check_positive_scale("a loss scale", scale)


class Precision(NamedTuple):
    dtype: torch.dtype
    """The dtype in which torch.autocast computes what is safe in it."""
    scaler: LossScaler | None
    """None if losses are not scaled, as with bfloat16."""


def make_precision(amp: Any) -> Precision | None:
    """Read the option `amp`: None, "dynamic", a number (a constant loss scale), or a dict with `dtype` ("float16" by
    default, or "bfloat16"), `loss_scale` ("dynamic" or a number) and the arguments of torch.amp.GradScaler.
    """
    if amp is None:
        return None
    if isinstance(amp, str) and amp in _DTYPES:
        raise ConfigurationError(f"amp={amp!r} is a dtype; give it as amp=dict(dtype={amp!r})")
    amp = check.as_mapping(amp)
    given = dict(amp) if isinstance(amp, Mapping) else {"loss_scale": amp}
    dtype = given.pop("dtype", "float16")
    name = check.one_of("the dtype of amp", str(dtype).removeprefix("torch."), tuple(_DTYPES))
    if name == "bfloat16":
        if given:
            raise ConfigurationError(
                f"bfloat16 has the range of float32, so losses are not scaled; leave out {', '.join(map(repr, given))}"
            )
        return Precision(torch.bfloat16, None)
    scale = given.pop("loss_scale", "dynamic")
    if given and scale != "dynamic":
        raise ConfigurationError(
            f"loss_scale={scale!r} does not change, so {', '.join(map(repr, given))} would do nothing; leave one out"
        )
    return Precision(torch.float16, make_loss_scaler(given or scale))


def make_loss_scaler(amp: Any) -> LossScaler | None:
    """Return the loss scaler for "dynamic", a number (a constant scale), or a dict with arguments of TorchLossScaler
    and `enabled`; MMCV's older names `mode`, `scale_factor` and `scale_window` are accepted. None means none.
    """
    amp = check.as_mapping(amp)
    if amp is None:
        return None
    if isinstance(amp, str) and amp == "dynamic":
        return TorchLossScaler()
    if check.is_number(amp):
        return StaticLossScaler(amp)
    if not isinstance(amp, Mapping):
        raise ConfigurationError(
            f"amp must be 'dynamic', a number (a static loss scale), a dict such as dict(dtype='bfloat16') or "
            f"dict(init_scale=512.0), or None, got {amp!r}"
        )
    # A dict: translate MMCV's names into torch's, then check what is left.
    given = dict(amp)
    is_enabled = check.boolean("enabled of a loss scaler", given.pop("enabled", True))
    mode = check.one_of("mode of a loss scaler", given.pop("mode", "dynamic"), ("dynamic", "static"))
    if "scale_factor" in given:
        factor = _check_positive_scale("scale_factor", given.pop("scale_factor"))
        given = {"growth_factor": factor, "backoff_factor": 1.0 / factor, **given}
    if "scale_window" in given:
        given = {"growth_interval": given.pop("scale_window"), **given}
    check.known("a loss scaler", given, ("init_scale", *_TORCHS[1:4], "min_scale", "enabled"))
    if mode == "static" and set(given) - {"init_scale"}:
        raise ConfigurationError(f"a static loss scale has init_scale only, got {given!r}")
    is_static = mode == "static"
    scaler = StaticLossScaler(given.get("init_scale", FIRST)) if is_static else TorchLossScaler(**given)
    return scaler if is_enabled else None


def loss_scaler_from_state(state: Mapping[str, Any]) -> LossScaler:
    """Return a scaler of the kind that saved this state, with the saved values."""
    names = frozenset(state) if isinstance(state, Mapping) else frozenset()
    kind = state[_KIND] if _KIND in names else _OLD_KINDS.get(names)
    if kind == _STATIC:
        return StaticLossScaler(_read_loss_scaler_state(state)["scale"])
    scaler = LossScaler() if kind == _GLUON else TorchLossScaler()
    scaler.load_state_dict(state)
    return scaler


def check_loss_scaler_state(scaler: LossScaler, state: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless `scaler.load_state_dict` accepts this state."""
    try:
        copy.deepcopy(scaler).load_state_dict(state)
    except ConfigurationError as error:
        raise StateMismatchError(
            f"the saved loss scale does not fit a {type(scaler).__name__}: {error}"
        ) from error


def scaler_of(trainer: object) -> LossScaler:
    """Return the loss scaler of a Trainer."""
    scaler: LossScaler | None = getattr(trainer, "loss_scaler", None)
    if scaler is None:
        raise AmpNotInitializedError(
            "the Trainer has no loss scaler; call kvtrainer.amp.init_trainer(trainer) before the training loop"
        )
    return scaler


@torch.no_grad()
def unscale(trainer: Any) -> None:
    """Divide the Trainer's gradients by the loss scale now, for example to clip them. The step does not do it again.

    With several workers call `trainer.allreduce_grads()` first.

    Raises:
        AmpNotInitializedError: The Trainer has no loss scaler.
    """
    scaler = scaler_of(trainer)
    if scaler.factor != 1.0:
        grads = [p.grad for group in trainer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scaler.factor)
    scaler.mark_unscaled()


PLAIN_SCALING = frozenset({"found_inf", "grad_scale"})
"""The attributes by which a plain torch.amp.GradScaler passes its arguments to an optimizer."""


def plain_scaling(trainer: torch.optim.Optimizer, num_workers: int) -> tuple[bool, float]:
    """Return what a plain torch.amp.GradScaler passes to the step: whether a gradient overflows, and 1 / scale.

    It calls the `step` of any optimizer with `_step_supports_amp_scaling`, and sets the attributes `found_inf` and
    `grad_scale` (None once unscaled), which it removes if the step does not raise. It does not ask other workers, so it
    is refused if there are any.
    """
    scale, found = vars(trainer)["grad_scale"], vars(trainer)["found_inf"]
    refuse_second_loss_scaler(trainer)
    if num_workers > 1:
        raise ConfigurationError(
            f"a torch.amp.GradScaler decides locally, but {num_workers} workers must skip a step together and keep the "
            "same scale; use kvtrainer.amp.GradScaler instead, or the Trainer's option amp='dynamic'"
        )
    return bool(found), 1.0 if scale is None else 1.0 / float(scale)


def refuse_second_loss_scaler(trainer: Any) -> None:
    """Raise ConfigurationError if the Trainer's options exclude a scaler in the training loop."""
    if getattr(trainer, "loss_scaler", None) is not None:
        raise ConfigurationError(
            "the Trainer scales losses itself, because of amp=... or amp.init_trainer; leave out that or the GradScaler"
        )
    accumulation = getattr(trainer, "accumulation", None)
    if accumulation is not None and accumulation.counts > 1:
        raise ConfigurationError(
            f"the Trainer accumulates {accumulation.counts} backward passes, but a GradScaler cannot account for that; "
            "build it with amp='dynamic', or without accumulate and call scaler.step(trainer) after as many passes"
        )


def _read_loss_scaler_state(state: Any) -> dict[str, Any]:
    """Return the checked values of a saved state under torch's names; `scale` is always present."""
    names = frozenset(state) if isinstance(state, Mapping) else frozenset()
    factors: Any = ()
    # 1. Ours or torch's; a static scale has no factors.
    if names - {"min_scale", _KIND} == set(_TORCHS):
        kind = check.one_of("kind of a saved loss scaler", state.get(_KIND), (None, _GLUON, _STATIC))
        scale, clean = state["scale"], state["_growth_tracker"]
        if kind != _STATIC:
            factors = _check_scaler_factors(
                state["growth_factor"], state["backoff_factor"], state["growth_interval"]
            )
    # 2. MMCV's. It saves the last overflow instead of a count of clean steps.
    elif names == _MMCVS and state["mode"] == "static":
        scale, clean = state["cur_scale"], 0
    elif names == _MMCVS:
        factor = _check_positive_scale("the saved scale_factor", state["scale_factor"])
        factors = _check_scaler_factors(factor, 1.0 / factor, state["scale_window"])
        # If there was no overflow yet, last_overflow_iter is -1.
        scale, done, overflow = state["cur_scale"], state["cur_iter"], state["last_overflow_iter"]
        if not check.is_integer(done) or not check.is_integer(overflow, -1, max(done, 1) - 1):
            raise ConfigurationError(f"iteration {overflow!r} of {done!r} cannot have been the last overflow")
        clean = (int(done) - int(overflow) - 1) % factors[2]
    # 3. Written by an old version of this library.
    elif names in _OLD_KINDS:
        scale, clean = state["loss_scale"], state.get("clean_steps", 0)
    else:
        raise ConfigurationError(f"this is not the state of a loss scaler: {state!r:.200}")
    return {
        "scale": _check_positive_scale("the saved scale", scale),
        "_growth_tracker": check.integer("a saved count of clean steps", clean, 0),
        **dict(zip(_TORCHS[1:4], factors, strict=False)),
    }


def _check_scaler_factors(growth: Any, backoff: Any, interval: Any) -> tuple[float, float, int]:
    growth, backoff = (
        _check_positive_scale("growth_factor", growth),
        _check_positive_scale("backoff_factor", backoff),
    )
    if growth <= 1 or backoff >= 1:
        raise ConfigurationError(
            f"a loss scale grows by a growth_factor above 1 and backs off by a backoff_factor below 1, got {growth!r} "
            f"and {backoff!r}"
        )
    return growth, backoff, check.integer("growth_interval", interval, 1)


def _check_positive_scale(name: str, value: Any) -> float:
    return check.number(name, value, above=0, most=_FLOAT32_MAX)
