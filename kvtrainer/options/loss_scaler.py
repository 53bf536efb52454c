"""Loss scales: factors of a loss that save small gradients in half precision, how they adapt, and the option `amp`.

`LossScaler` does all of it, with Gluon's numbers; `TorchLossScaler` and `StaticLossScaler` only give it others. Torch's
computes as torch.amp.GradScaler does, in float32. A saved scale may come from torch, MMCV's LossScaler or this library.
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

FIRST, LARGEST, LEAST = 2.0**16, 2.0**24, 2.0**-24
CLEAN_STEPS = 2000
"""So many steps in a row without an overflow double the scale."""

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOAT32_MAX = float(torch.finfo(torch.float32).max)
_TORCHS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""What torch.amp.GradScaler saves."""
_KIND = "kind"
"""What our scalers save beside that, unless they are of torch's kind; torch's own load_state_dict passes over it."""
_GLUON, _STATIC = "gluon", "static"
_MMCVS = {"cur_scale", "cur_iter", "mode", "last_overflow_iter", "scale_factor", "scale_window"}
"""What MMCV's LossScaler saves."""
_OLD_KINDS = {frozenset({"loss_scale"}): _STATIC, frozenset({"loss_scale", "clean_steps"}): _GLUON}
"""What our scalers saved before they saved torch's numbers."""


class LossScaler:
    """A power of two, halved on overflow and doubled after 2000 clean steps in a row.

    MXNet's numbers, except that it halves at once; MXNet halves one step late and so overflows twice.

    Args:
        loss_scale: what to begin with; at most 2^24.
    """

    _kind: str | None = _GLUON
    """`_GLUON`; `_STATIC`; or None, as torch's, of which alone the scale is rounded to float32."""
    _growth, _backoff, _interval = 2.0, 0.5, CLEAN_STEPS
    _least, _most = LEAST, LARGEST

    def __init__(self, loss_scale: float = FIRST) -> None:
        self.loss_scale = check.number("a loss scale", loss_scale, LEAST, LARGEST)
        """The factor of the next loss."""
        self.clean_steps = 0
        """Steps without an overflow since the scale last changed."""
        self.min_scale: float | None = None
        """A floor that was asked for."""
        self._carried: float | None = None
        """The scale that the present gradients carry, which may have been replaced since; None of no scaled loss."""
        self._is_unscaled = False

    @property
    def factor(self) -> float:
        """The factor that undoes the scale in the present gradients; 1 unless they come from a scaled loss."""
        return 1.0 if self._carried is None else 1.0 / self._carried

    @property
    def is_scaled(self) -> bool:
        """Whether the present gradients come from a loss that was scaled; they may have been unscaled since."""
        return self._carried is not None or self._is_unscaled

    def mark_scaled(self) -> None:
        """Note that gradients of a scaled loss follow.

        Raises:
            ConfigurationError: the gradients that they would be added to were unscaled already.
        """
        if self._is_unscaled:
            raise ConfigurationError(
                "the gradients were unscaled already, and a scaled loss would be added to them; call amp.unscale after "
                "the last backward pass before the step"
            )
        self._carried = self.loss_scale

    def mark_unscaled(self) -> None:
        """Note that the present gradients were multiplied by `factor`."""
        self._is_unscaled |= self._carried is not None
        self._carried = None

    def mark_dropped(self) -> None:
        """Note that there are no gradients any more."""
        self._carried, self._is_unscaled = None, False

    def update(self, overflow: bool) -> None:
        """End a step: adapt the scale. `overflow`: whether a gradient was infinite or not a number, on any worker."""
        self.mark_dropped()
        if self._kind == _STATIC:
            return
        self.loss_scale = before = self._rounded(self.loss_scale)
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.loss_scale = max(self._rounded(before * self._backoff), self._rounded(self._least))
            if before > self._least == self.loss_scale:
                _log.warning(
                    "gradients overflow although the loss scale has come down to %g, which is the least; if they still "
                    "do, look for an infinity or a NaN in the data or the loss",
                    self._least,
                )
        elif self.clean_steps == self._interval:
            self.clean_steps = 0
            grown = min(self._rounded(before * self._growth), self._most)
            self.loss_scale = grown if math.isfinite(grown) else before

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers that torch.amp.GradScaler can load, with any floor that was asked for and the kind."""
        values = self.loss_scale, self._growth, self._backoff, self._interval, self.clean_steps
        more = {"min_scale": self.min_scale, _KIND: self._kind}
        numbers = dict(zip(_TORCHS, values, strict=True))
        return numbers | {name: value for name, value in more.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the numbers that a scaler of this library, torch's or MMCV's has saved.

        A LossScaler takes the scale and the count of clean steps, of a scaler that is static or adapts as it does. A
        TorchLossScaler takes the factors too, and a floor unless it has one. The scale of a StaticLossScaler stays: it
        is an option, not something that was learned. Both of these accept an empty state, which torch's scaler saves
        while it is disabled; it changes nothing.

        Raises:
            ConfigurationError: it is something else; nothing has changed then.
        """
        if self._kind != _GLUON and isinstance(state, Mapping) and not state:
            _log.info("the saved state of the loss scaler is empty: it goes on with %g", self.loss_scale)
            return
        numbers = {**self.state_dict(), **_read(state)}
        scale, *factors, clean_steps = (numbers[name] for name in _TORCHS)
        if self._kind == _STATIC:
            if scale != self.loss_scale:
                _log.info("the saved loss scale is %g; the static one of %g stays", scale, self.loss_scale)
            return
        if self._kind == _GLUON:
            own = self._growth, self._backoff, self._interval
            if tuple(factors) != own:
                raise ConfigurationError(
                    f"a {type(self).__name__} has the growth factor, backoff factor and growth interval {own}, the "
                    f"saved state has {tuple(factors)}; use the Trainer's option amp=dict(...) for these"
                )
            check.integer("a saved count of clean steps", clean_steps, 0, self._interval - 1)
            check.number("a loss scale", scale, LEAST, LARGEST)
        elif self.min_scale is None and state.get("min_scale") is not None:
            self._least = self.min_scale = _positive("min_scale", state["min_scale"])
        self.loss_scale, self.clean_steps = self._rounded(scale), clean_steps
        self._growth, self._backoff, self._interval = factors

    def _rounded(self, scale: float) -> float:
        return ctypes.c_float(scale).value if self._kind is None else scale


class TorchLossScaler(LossScaler):
    """A scale that adapts as torch.amp.GradScaler's: it backs off at an overflow, and grows after clean steps.

    Args:
        init_scale: what to begin with.
        growth_factor, backoff_factor, growth_interval: as of torch.amp.GradScaler.
        min_scale: a floor, such as the 1 of MMCV's LossScaler. Without it the floor is 2^-24, below which torch's
            scale would go on to 0.

    Raises:
        ConfigurationError: a number is impossible.
    """

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
        self.loss_scale = self._rounded(_positive("init_scale", init_scale))
        self._growth, self._backoff, self._interval = _factors(growth_factor, backoff_factor, growth_interval)
        if min_scale is not None:
            self._least = self.min_scale = _positive("min_scale", min_scale)
            if self.min_scale > init_scale:
                raise ConfigurationError(f"min_scale {min_scale!r} is above init_scale {init_scale!r}")


class StaticLossScaler(LossScaler):
    """A scale that never changes. A step whose gradients overflow is skipped all the same.

    Raises:
        ConfigurationError: `scale` is not a number above 0.
    """

    _kind = _STATIC

    def __init__(self, scale: float = 512.0) -> None:
        super().__init__()
        self.loss_scale = _positive("a loss scale", scale)


class Precision(NamedTuple):
    """What the option `amp` asks for."""

    dtype: torch.dtype
    """In which torch.autocast computes what is safe in it."""
    scaler: LossScaler | None
    """None where losses are not scaled, as with bfloat16."""


def make_precision(amp: Any) -> Precision | None:
    """Read the option `amp`; None for full precision.

    Args:
        amp: "dynamic", a number (a loss scale that does not change), or a dict of: `dtype`, "float16" (the default) or
            "bfloat16"; `loss_scale`, "dynamic" or a number; and the arguments of torch.amp.GradScaler.

    Raises:
        ConfigurationError: it is something else.
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
    """Make the loss scaler that `amp` asks for; None for none.

    Args:
        amp: "dynamic"; a number, whole or not, for a scale that does not change; None; or a dict with arguments of
            TorchLossScaler and `enabled`. MMCV's older names `mode`, `scale_factor` and `scale_window` are understood.

    Raises:
        ConfigurationError: it is something else.
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
    given = dict(amp)
    is_enabled = check.boolean("enabled of a loss scaler", given.pop("enabled", True))
    mode = check.one_of("mode of a loss scaler", given.pop("mode", "dynamic"), ("dynamic", "static"))
    if "scale_factor" in given:
        factor = _positive("scale_factor", given.pop("scale_factor"))
        given = {"growth_factor": factor, "backoff_factor": 1.0 / factor, **given}
    if "scale_window" in given:
        given = {"growth_interval": given.pop("scale_window"), **given}
    check.known("a loss scaler", given, ("init_scale", *_TORCHS[1:4], "min_scale", "enabled"))
    if mode == "static" and set(given) - {"init_scale"}:
        raise ConfigurationError(f"a static loss scale has init_scale only, got {given!r}")
    is_static = mode == "static"
    scaler = StaticLossScaler(given.get("init_scale", FIRST)) if is_static else TorchLossScaler(**given)
    return scaler if is_enabled else None


def scaler_from_state(state: Mapping[str, Any]) -> LossScaler:
    """Make a scaler of the kind that has saved this, with its numbers.

    Raises:
        ConfigurationError: no scaler saves such a state.
    """
    names = frozenset(state) if isinstance(state, Mapping) else frozenset()
    kind = state[_KIND] if _KIND in names else _OLD_KINDS.get(names)
    if kind == _STATIC:
        return StaticLossScaler(_read(state)["scale"])
    scaler = LossScaler() if kind == _GLUON else TorchLossScaler()
    scaler.load_state_dict(state)
    return scaler


def check_scaler_state(scaler: LossScaler, state: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless `scaler.load_state_dict` takes this."""
    try:
        copy.deepcopy(scaler).load_state_dict(state)
    except ConfigurationError as error:
        raise StateMismatchError(
            f"the saved loss scale does not fit a {type(scaler).__name__}: {error}"
        ) from error


def scaler_of(trainer: object) -> LossScaler:
    """Return the loss scaler of a Trainer.

    Raises:
        AmpNotInitializedError: it has none.
    """
    scaler: LossScaler | None = getattr(trainer, "loss_scaler", None)
    if scaler is None:
        raise AmpNotInitializedError(
            "the Trainer has no loss scaler; call kvtrainer.amp.init_trainer(trainer) before the training loop"
        )
    return scaler


@torch.no_grad()
def unscale(trainer: Any) -> None:
    """Divide the Trainer's gradients by the loss scale now, to clip them. The step will not do it again.

    With several workers call `trainer.allreduce_grads()` before it.

    Raises:
        AmpNotInitializedError: the Trainer has no loss scaler.
    """
    scaler = scaler_of(trainer)
    if scaler.factor != 1.0:
        grads = [p.grad for group in trainer.param_groups for p in group["params"] if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, scaler.factor)
    scaler.mark_unscaled()


def plain_scaling(trainer: torch.optim.Optimizer, num_workers: int) -> tuple[bool, float]:
    """Read what a plain torch.amp.GradScaler wants of the step that it is calling.

    An optimizer with `_step_supports_amp_scaling` is always called, and finds the attributes `found_inf` and
    `grad_scale` (None once unscaled), which the scaler removes afterwards.

    Returns:
        Whether a gradient overflows, and the factor by which the step multiplies the gradients.

    Raises:
        ConfigurationError: there are several workers, which such a scaler does not ask; or the Trainer scales losses.
    """
    scale, found = vars(trainer)["grad_scale"], vars(trainer)["found_inf"]
    try:
        refuse_second_scaler(trainer)
        if num_workers > 1:
            raise ConfigurationError(
                f"a torch.amp.GradScaler decides alone, but {num_workers} workers must skip a step together, and keep "
                "the same scale; use kvtrainer.amp.GradScaler in its place, or the Trainer's option amp='dynamic'"
            )
    except ConfigurationError:
        del trainer.found_inf, trainer.grad_scale  # type: ignore[attr-defined]
        raise
    return bool(found), 1.0 if scale is None else 1.0 / float(scale)


def refuse_second_scaler(trainer: Any) -> None:
    """Raise ConfigurationError if the Trainer's options exclude a scaler of the loop."""
    if getattr(trainer, "loss_scaler", None) is not None:
        raise ConfigurationError(
            "the Trainer scales losses itself, because of amp=... or amp.init_trainer; leave out that or the GradScaler"
        )
    accumulation = getattr(trainer, "accumulation", None)
    if accumulation is not None and accumulation.counts > 1:
        raise ConfigurationError(
            f"the Trainer accumulates {accumulation.counts} backward passes, of which a GradScaler knows nothing; "
            "build it with amp='dynamic', or without accumulate and call scaler.step(trainer) after as many passes"
        )


def _read(state: Any) -> dict[str, Any]:
    """Return the numbers of a saved state, checked, under torch's names; `scale` is always there."""
    names = frozenset(state) if isinstance(state, Mapping) else frozenset()
    factors: Any = ()
    if names - {"min_scale", _KIND} == set(_TORCHS):
        kind = check.one_of("kind of a saved loss scaler", state.get(_KIND), (None, _GLUON, _STATIC))
        scale, clean = state["scale"], state["_growth_tracker"]
        if kind != _STATIC:
            factors = _factors(state["growth_factor"], state["backoff_factor"], state["growth_interval"])
    elif names == _MMCVS and state["mode"] == "static":
        scale, clean = state["cur_scale"], 0
    elif names == _MMCVS:
        factor = _positive("the saved scale_factor", state["scale_factor"])
        factors = _factors(factor, 1.0 / factor, state["scale_window"])
        # Before the first overflow that was in iteration -1.
        scale, done, overflow = state["cur_scale"], state["cur_iter"], state["last_overflow_iter"]
        if not check.is_integer(done) or not check.is_integer(overflow, -1, max(done, 1) - 1):
            raise ConfigurationError(f"iteration {overflow!r} of {done!r} cannot have been the last overflow")
        clean = (int(done) - int(overflow) - 1) % factors[2]
    elif names in _OLD_KINDS:
        scale, clean = state["loss_scale"], state.get("clean_steps", 0)
    else:
        raise ConfigurationError(f"these are no numbers of a loss scaler: {state!r:.200}")
    return {
        "scale": _positive("the saved scale", scale),
        "_growth_tracker": check.integer("a saved count of clean steps", clean, 0),
        **dict(zip(_TORCHS[1:4], factors, strict=False)),
    }


def _factors(growth: Any, backoff: Any, interval: Any) -> tuple[float, float, int]:
    growth, backoff = _positive("growth_factor", growth), _positive("backoff_factor", backoff)
    if growth <= 1 or backoff >= 1:
        raise ConfigurationError(
            f"a loss scale grows by a growth_factor above 1 and backs off by a backoff_factor below 1, got {growth!r} "
            f"and {backoff!r}"
        )
    return growth, backoff, check.integer("growth_interval", interval, 1)


def _positive(name: str, value: Any) -> float:
    return check.number(name, value, above=0, most=_FLOAT32_MAX)
