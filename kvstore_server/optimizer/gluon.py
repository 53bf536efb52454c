"""Gluon's elementwise optimizers, numerically those of MXNet 2.x.

In the formulas g = grad + wd * w, grad is already rescaled and clipped (MXNet's order), and t is the number of the
key's update. Adam and its relatives have the averages `m = beta1 * m + (1 - beta1) * g` and `v = beta2 * v + (1 -
beta2) * g**2`. MXNet adds epsilon outside the bias correction, torch inside; torch's kernels get an epsilon that
compensates for that.

Where MXNet 1.9.1 differs (`is_mxnet1`), a class says how: `mxnet1` has the defaults, `mxnet1_clips_decay` the order of
clipping and decay, and `update` the formula.

Momentum with the learning rate inside, `m = momentum * m - lr * g`, weights earlier gradients by the rates of their
time. Multiplying m by new / old when the rate changes gives them the new rate, which is what torch's form always does;
Detectron does so at jumps of the rate, and so does `momentum_correction`.

The classes use torch's fused CPU kernels where one computes the same formula, and otherwise separate operations; tests
compare their bits with a reference.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.base import (
    MAX_COUNT,
    Hyper,
    Optimizer,
    StateValue,
    Values,
    optimizer_count_dtype,
)
from kvstore_server.optimizer.rows import Gradient, aligned_fragments, bound_of

_TINY = 1e-10
"""Detectron divides by at least this when it compares two rates."""


def state_tensor(state: dict[str, StateValue], name: str, weight: Tensor) -> Tensor:
    """Return the state entry `name`; zeros like `weight` if it does not exist yet."""
    value = state.get(name)
    if not isinstance(value, Tensor):
        value = state[name] = torch.zeros_like(weight)
    return value


def fused_sgd(
    weight: Tensor,
    grad: Gradient,
    *,
    lr: float,
    wd: float,
    buffer: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> None:
    """`w -= lr * (grad + wd * w)`.

    With a buffer and g = lr * (grad + wd * w): `b = momentum * b + g`, then `w -= b`, or Nesterov's `w -= momentum * b
    + g`. The learning rate is inside the buffer, as in MXNet; torch's kernel has it outside, but inside a dampening,
    `b = momentum * b + (1 - dampening) * (grad + wd * w)`, from which it is built. If rounding would change the rate,
    and for Nesterov, whose g is not dampened, the rate is multiplied into the gradient (in blocks that stay in the
    cache) and the weight decay instead.
    """
    flats, factor, rate, decay, dampening = [weight], 1.0, lr, wd, 0.0
    if buffer is not None:
        flats.append(buffer)
        if nesterov or not _keeps_precision(lr, weight.dtype):
            factor, rate, decay = lr, 1.0, lr * wd
        else:
            rate, dampening = 1.0, 1.0 - lr
    for grads, (weights, *buffers) in aligned_fragments(grad, *flats, factor=factor):
        torch._fused_sgd_(
            weights,
            grads,
            *(buffers or [[]]),
            weight_decay=decay,
            momentum=momentum,
            lr=rate,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=False,
        )


def _keeps_precision(lr: float, dtype: torch.dtype) -> bool:
    """Return whether 1 - (1 - lr), as kernels compute it in double, is `lr` up to rounding in `dtype`."""
    # The error is at most 2**-53 (2**-52 if lr is negative): negligible for float32 from rates of 1e-8; for float64 it
    # is zero from 0.5, but mostly too large below. An eighth of epsilon is a quarter of the rounding error.
    return abs((1.0 - (1.0 - lr)) - lr) <= torch.finfo(dtype).eps / 8 * abs(lr)


def fused_adam(
    weight: Tensor,
    grad: Gradient,
    mean: Tensor,
    square: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    wd: float,
    step: float,
    decoupled: bool = False,
) -> None:
    """torch's Adam, or its AdamW if `decoupled`; `step` counts from 1, and math.inf applies no bias correction."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    count = torch.scalar_tensor(step, device=weight.device, dtype=optimizer_count_dtype())
    for grads, (weights, means, squares) in aligned_fragments(grad, weight, mean, square):
        kernel(
            weights,
            grads,
            means,
            squares,
            [],
            [count] * len(grads),
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=wd,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )


def fused_adam_without_mean(
    weight: Tensor,
    grad: Tensor,
    square: Tensor,
    *,
    lr: float,
    beta: float,
    eps: float,
    wd: float,
    step: float,
) -> None:
    """With g = grad + wd * w: `v = beta * v + (1 - beta) * g**2; w -= lr * g / (sqrt(v / (1 - beta**step)) + eps)`.

    This is Adam with beta1 = 0. A `step` of math.inf applies no bias correction.
    """
    mean = torch.zeros_like(weight)
    fused_adam(weight, grad, mean, square, lr=lr, betas=(0.0, beta), eps=eps, wd=wd, step=step)


def adam_bias_corrections(betas: tuple[float, float], step: float) -> tuple[float, float]:
    """Return `1 - beta1**step` and `sqrt(1 - beta2**step)`, by which Adam's averages are divided."""
    return 1.0 - betas[0] ** step, math.sqrt(1.0 - betas[1] ** step)


class MomentumCorrection(NamedTuple):
    """The conditions for correcting momentum."""

    threshold: float = 1.1
    """The rate must have changed by more than this factor, up or down."""
    min_lr: float = 1e-7
    """The former rate must have been larger than this."""


def read_momentum_correction(value: Any) -> MomentumCorrection | None:
    """Parse the option: None or False, True, a mapping, or the two numbers as which it is sent.

    Raises:
        ConfigurationError: It is something else, or a number is impossible.
    """
    if value is None or value is False:
        return None
    if value is True:
        return MomentumCorrection()
    if isinstance(value, Mapping) and not set(value) - set(MomentumCorrection._fields):
        correction: Any = MomentumCorrection(**value)
    elif isinstance(value, list | tuple) and len(value) == len(MomentumCorrection._fields):
        correction = MomentumCorrection(*value)
    else:
        raise ConfigurationError(
            "momentum_correction must be None, True or a dict of threshold and min_lr, such as "
            f"{MomentumCorrection()._asdict()}, got {value!r:.80}"
        )
    for name, number, least in zip(MomentumCorrection._fields, correction, (1.0, 0.0), strict=True):
        check.number(f"{name} of momentum_correction", number, least)
    return MomentumCorrection(float(correction.threshold), float(correction.min_lr))


class _Elementwise(Optimizer):
    """An optimizer of this file: it never raises on valid input, and tests compare its bits."""

    may_raise = False
    verified = True

    def updates_rows(self, hyper: Hyper) -> bool:
        """Return whether there is an option `lazy_update`, and it is on; see `Optimizer.updates_rows`."""
        return bool(hyper.get("lazy_update"))


class _GluonMomentum(_Elementwise):
    """Gradient descent with momentum that has the learning rate inside.

    State: 'momentum_buffer', the negative of MXNet's m; none while momentum is 0.
    """

    nesterov: ClassVar[bool] = False
    _is_sgd = True

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        """Update by the fused kernel; with `momentum_correction` m is first rescaled to a rate that has changed."""
        lr, wd, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
        if momentum == 0.0:
            fused_sgd(weight, grad, lr=lr, wd=wd)
            return
        buffer = state_tensor(state, "momentum_buffer", weight)
        given = hyper.get("momentum_correction")
        if given is None or given is False:
            # If it were turned on again, a rate that m no longer contains would be corrected for.
            state.pop("last_lr", None)
        else:
            correct_momentum(buffer, state, lr, read_momentum_correction(given) or MomentumCorrection())
        fused_sgd(weight, grad, lr=lr, wd=wd, buffer=buffer, momentum=momentum, nesterov=self.nesterov)

    def updates_rows(self, hyper: Hyper) -> bool:
        """Return whether `lazy_update` is on, or rows without gradient stay anyway (no momentum and no decay)."""
        return bool(hyper.get("lazy_update") or hyper["momentum"] == hyper["weight_decay"] == 0.0)


def correct_momentum(buffer: Tensor, state: Values, lr: float, correction: MomentumCorrection) -> None:
    """Multiply the momentum by new / old rate if these differ enough, and store the new rate."""
    former = float(state.get("last_lr", lr))
    state["last_lr"] = lr
    if former <= correction.min_lr or max(lr / former, former / max(lr, _TINY)) <= correction.threshold:
        return
    # The ratio is 0; `zero_` also clears infinities.
    if lr == 0.0:
        buffer.zero_()
    else:
        buffer.mul_(lr / former)


class SGD(_GluonMomentum):
    """`m = momentum * m - lr * g; w += m`; unlike torch's, lr is inside m.

    Options: learning_rate 0.1, momentum 0.0, lazy_update False (True: a row-sparse gradient updates only its rows, as
    it always does without momentum and weight decay), momentum_correction None (True, or {"threshold": 1.1, "min_lr":
    1e-7}: when the learning rate of a key changes by more than that factor, m is multiplied by new / old, as in
    Detectron, so that m has the new rate inside; not if the old one was min_lr or less). With it the state also has
    'last_lr', the learning rate of the last update.
    """

    takes_pieces = True
    defaults: ClassVar[Hyper] = {
        "lr": 0.1,
        "momentum": 0.0,
        "lazy_update": False,
        "momentum_correction": None,
    }
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01, "lazy_update": True}

    def __init__(self, learning_rate: float | None = None, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        if self.hyper["lazy_update"] and self.hyper["momentum_correction"] is not None:
            raise ConfigurationError(
                "sgd cannot correct the momentum of lazy updates, because rows that an update leaves out keep the "
                "momentum of an older learning rate; leave out momentum_correction or lazy_update"
            )

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        if name == "momentum_correction":
            found = read_momentum_correction(value)
            # A tuple of numbers, so that torch.load(weights_only=True) reads it back from a saved group.
            return None if found is None else tuple(found)
        return super()._checked(name, value, default)


class NAG(_GluonMomentum):
    """Nesterov's momentum: `m = momentum * m - lr * g; w += momentum * m - lr * g`.

    MXNet 1.9.1 stores m with the decay of the weight that it has just updated, `g = grad + wd * w'`.

    Options: learning_rate 0.1, momentum 0.9.
    """

    takes_pieces = True
    defaults: ClassVar[Hyper] = {"lr": 0.1, "momentum": 0.9}
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01, "momentum": 0.0}
    nesterov = True

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        wd = hyper["weight_decay"]
        # The fused kernel has stored m with the decay of the old weight; add the difference to the new one.
        before = weight.clone() if self.is_mxnet1 and wd and hyper["momentum"] else None
        super().update(weight, grad, state, hyper)
        if before is not None:
            moved = torch.sub(weight, before, out=before)
            state_tensor(state, "momentum_buffer", weight).add_(moved, alpha=hyper["lr"] * wd)


class SGLD(_Elementwise):
    """Langevin dynamics: `w -= lr / 2 * g; w += N(0, sqrt(lr))`.

    The noise of an element is a function of seed, name of the key, index in the key and number of the update, so it
    depends neither on how keys are cut nor on any order. There is no noise if lr is 0 or, through a multiplier,
    negative.

    Options: learning_rate 0.1, at least 0; seed 0. No state.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.1, "seed": 0}
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01}
    never_negative = frozenset({"lr"})
    positioned = True
    verified = False

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        lr = hyper["lr"]
        fused_sgd(weight, grad, lr=lr / 2, wd=hyper["weight_decay"])
        if lr > 0.0:
            stream = (hyper["seed"], hyper["key"], hyper["step"])
            noise = gluon_normal(stream, hyper["first"], weight.numel(), weight.device)
            weight.add_(noise.mul_(math.sqrt(lr)).to(weight.dtype))

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        if name == "seed":
            return check.integer(f"{self.registered_name}: {name}", value, 0, MAX_COUNT)
        return super()._checked(name, value, default)


class Signum(_Elementwise):
    """`m = momentum * m - (1 - momentum) * g; w = (1 - lr * wd_lh) * w + lr * sign(m)`.

    Without momentum `w = (1 - lr * (wd + wd_lh)) * w - lr * sign(grad)`.

    Options: learning_rate 0.01, momentum 0.9, wd_lh 0.0. State: 'momentum_buffer', the negative of m.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.01, "momentum": 0.9, "wd_lh": 0.0}
    mxnet1: ClassVar[Hyper | None] = {}
    never_negative = frozenset({"wd_lh"})

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        lr, wd, momentum, decay = hyper["lr"], hyper["weight_decay"], hyper["momentum"], hyper["wd_lh"]
        if momentum == 0.0:
            decay += wd
            direction = grad
        else:
            buffer = state_tensor(state, "momentum_buffer", weight)
            direction = buffer.lerp_(grad.add_(weight, alpha=wd), 1.0 - momentum)
        weight.mul_(1.0 - lr * decay).sub_(torch.sign(direction), alpha=lr)


class DCASGD(_Elementwise):
    """Delay-compensated: `d = g + lamda * g**2 * (w - w'); m = momentum * m - lr * d; w' = w; w += m`.

    w' is the weight before the last update, so the term covers what other workers have changed since. On a server that
    applies contributions one by one, it is the weight that the contributing worker was last sent. MXNet 1.9.1 squares
    only the gradient: `d = g + lamda * grad**2 * (w - w')`.

    Options: learning_rate 0.1, momentum 0.0, lamda 0.04. State: 'previous_weight' w', 'momentum_buffer' -m.
    """

    delay_state = "previous_weight"
    defaults: ClassVar[Hyper] = {"lr": 0.1, "momentum": 0.0, "lamda": 0.04}
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01}

    def create_state(self, weight: Tensor) -> Values:
        return {"previous_weight": weight.clone()}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Update by the delay-compensated gradient, and keep the weights as `previous_weight` for the next one."""
        previous = state["previous_weight"]
        assert isinstance(previous, Tensor)
        drift, wd = weight - previous, hyper["weight_decay"]
        if not self.is_mxnet1:
            grad.add_(weight, alpha=wd)
        # MXNet 2.x squares g, which has weight decay; 1.9.1 squares the gradient alone, and adds decay afterwards.
        drift.mul_(grad).mul_(grad)
        if self.is_mxnet1:
            grad.add_(weight, alpha=wd)
        grad.add_(drift, alpha=hyper["lamda"])
        previous.copy_(weight)
        momentum = hyper["momentum"]
        buffer = state_tensor(state, "momentum_buffer", weight) if momentum else None
        fused_sgd(weight, grad, lr=hyper["lr"], wd=0.0, buffer=buffer, momentum=momentum)


class Test(_Elementwise):
    """`w -= lr * (grad + wd * w)`: MXNet's optimizer for tests, which ignores clip_gradient.

    That of MXNet 1.9.1 is `w += grad`.

    Options: learning_rate 0.01. No state.
    """

    __test__ = False  # keeps pytest from collecting a class of this name
    clips = False
    takes_pieces = True
    mxnet1: ClassVar[Hyper | None] = {}

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        lr, wd = (-1.0, 0.0) if self.is_mxnet1 else (hyper["lr"], hyper["weight_decay"])
        fused_sgd(weight, grad, lr=lr, wd=wd)


class Adam(_Elementwise):
    """`w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)`.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8, lazy_update False (True: a row-sparse gradient
    updates only its rows). State: 'exp_avg' m, 'exp_avg_sq' v.
    """

    takes_pieces = True
    defaults: ClassVar[Hyper] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "lazy_update": False}
    mxnet1: ClassVar[Hyper | None] = {"lazy_update": True}
    mxnet1_clips_decay = True

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        lr, betas, eps, wd, step = (hyper[name] for name in ("lr", "betas", "eps", "weight_decay", "step"))
        # torch corrects v before it adds epsilon, MXNet afterwards: eps / root makes both equal.
        _, root = adam_bias_corrections(betas, step)
        fused_adam(weight, grad, mean, square, lr=lr, betas=betas, eps=eps / root, wd=wd, step=step)


class AdamW(_Elementwise):
    """`w -= lr_t * (m / (sqrt(v) + epsilon) + wd * w)`. g is grad, lr_t Adam's, or lr without `correct_bias`.

    The decay has the corrected learning rate, unlike torch's. This is MXNet's fused kernel, its default; its other
    implementation decays the weight that it has just updated.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-6, correct_bias True. State: as Adam's.
    """

    takes_pieces = True
    defaults: ClassVar[Hyper] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "correct_bias": True}

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        step = hyper["step"] if hyper["correct_bias"] else math.inf
        lr, betas, eps = hyper["lr"], hyper["betas"], hyper["eps"]
        # torch's decay uses the plain learning rate, MXNet's the corrected one: the factor moves into wd.
        correction, root = adam_bias_corrections(betas, step)
        wd = hyper["weight_decay"] * root / correction
        fused_adam(
            weight, grad, mean, square, lr=lr, betas=betas, eps=eps / root, wd=wd, step=step, decoupled=True
        )


class AdaBelief(_Elementwise):
    """`v = beta2 * v + (1 - beta2) * (g - m)**2 + epsilon`, else as Adam; clips grad + wd * w, not grad.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-6, correct_bias True. State: 'exp_avg' m,
    'exp_avg_var' v.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "correct_bias": True}
    clips = False

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Add the weight decay, clip, then update both averages and the weights."""
        mean, variance = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_var", weight)
        (beta1, beta2), eps, bound = hyper["betas"], hyper["eps"], hyper["clip_gradient"]
        correction, root = adam_bias_corrections(
            hyper["betas"], hyper["step"] if hyper["correct_bias"] else math.inf
        )
        # MXNet clips after adding the weight decay, so the caller has not clipped.
        grad.add_(weight, alpha=hyper["weight_decay"])
        if bound is not None:
            bound = bound_of(bound, grad)
            grad.clamp_(-bound, bound)
        mean.lerp_(grad, 1.0 - beta1)
        surprise = grad.sub_(mean)
        variance.mul_(beta2).addcmul_(surprise, surprise, value=1.0 - beta2).add_(eps)
        weight.addcdiv_(mean, variance.sqrt().add_(eps), value=-hyper["lr"] * root / correction)


class Adamax(_Elementwise):
    """`u = max(beta2 * u, |g|); w -= lr / (1 - beta1**t) * m / (u + epsilon)`.

    MXNet 1.9.1 has no epsilon, so it divides by 0 where all gradients were 0; here such weights do not change.

    Options: learning_rate 0.002, beta1 0.9, beta2 0.999, epsilon 1e-8. State: 'exp_avg' m, 'exp_inf' u.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.002, "betas": (0.9, 0.999), "eps": 1e-8}
    mxnet1: ClassVar[Hyper | None] = {"eps": 0.0}
    mxnet1_clips_decay = True

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        mean, largest = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_inf", weight)
        beta1, beta2 = hyper["betas"]
        grad.add_(weight, alpha=hyper["weight_decay"])
        mean.lerp_(grad, 1.0 - beta1)
        torch.maximum(largest.mul_(beta2), grad.abs_(), out=largest)
        correction, _ = adam_bias_corrections(hyper["betas"], hyper["step"])
        scale = largest + hyper["eps"]
        # An infinite divisor leaves weights unchanged whose gradients were all 0.
        if hyper["eps"] == 0.0:
            scale.masked_fill_(largest == 0.0, math.inf)
        weight.addcdiv_(mean, scale, value=-hyper["lr"] / correction)


class Nadam(_Elementwise):
    """Adam with Nesterov's momentum. Its rate `u(t) = beta1 * (1 - 0.96**(t * schedule_decay) / 2)` warms up.

    With p(t) = u(1) * ... * u(t): `w -= lr * (u(t+1) * m / (1 - p(t+1)) + (1 - u(t)) * g / (1 - p(t))) / (sqrt(v / (1
    - beta2**t)) + epsilon)`. MXNet has one p for all keys and so multiplies it once per key and update; here every key
    has its own.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8, schedule_decay 0.004. State: 'exp_avg' m,
    'exp_avg_sq' v, 'mu_product' p.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "schedule_decay": 0.004}
    mxnet1: ClassVar[Hyper | None] = {}
    mxnet1_clips_decay = True
    never_negative = frozenset({"schedule_decay"})

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Update with this step's rate and the next one's, whose product so far is the state entry 'mu_product'."""
        mean, square = state_tensor(state, "exp_avg", weight), state_tensor(state, "exp_avg_sq", weight)
        (beta1, beta2), lr, step = hyper["betas"], hyper["lr"], hyper["step"]
        rate, next_rate = (
            beta1 * (1 - 0.5 * 0.96 ** (t * hyper["schedule_decay"])) for t in (step, step + 1)
        )
        product = float(state.get("mu_product", 1.0)) * rate
        state["mu_product"] = product
        grad.add_(weight, alpha=hyper["weight_decay"])
        mean.lerp_(grad, 1.0 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        _, root = adam_bias_corrections(hyper["betas"], step)
        scale = square.sqrt().div_(root).add_(hyper["eps"])
        weight.addcdiv_(mean, scale, value=-lr * next_rate / (1 - product * next_rate))
        weight.addcdiv_(grad, scale, value=-lr * (1 - rate) / (1 - product))


class FTML(_Elementwise):
    """Follow the moving leader: `d = (1 - beta1**t) / lr * (sqrt(v / (1 - beta2**t)) + epsilon)`, then with the d'
    of the update before `z = beta1 * z + (1 - beta1) * g - (d - beta1 * d') * w; w = -z / d`.

    Before every update z = -d' * w, so this is `w -= (1 - beta1) * g / d`, which needs neither z nor d, loses no
    digits in their difference, and stays as it is where lr is 0. (Only weights that were replaced in between differ:
    MXNet pulls them back to what it remembers in z.)

    Options: learning_rate 0.0025, beta1 0.6, beta2 0.999, epsilon 1e-8. State: 'exp_avg_sq' v.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.0025, "betas": (0.6, 0.999), "eps": 1e-8}
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01}
    mxnet1_clips_decay = True

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        beta1, beta2 = hyper["betas"]
        square = state_tensor(state, "exp_avg_sq", weight)
        eps, wd, step = hyper["eps"], hyper["weight_decay"], hyper["step"]
        # (1 - beta1) / d, written as the learning rate of the kernel, which divides by the rest of d.
        lr = hyper["lr"] * (1.0 - beta1) / (1.0 - beta1**step)
        fused_adam_without_mean(weight, grad, square, lr=lr, beta=beta2, eps=eps, wd=wd, step=step)


class AdaDelta(_Elementwise):
    """`a = rho * a + (1 - rho) * g**2; d = g * sqrt(b + epsilon) / sqrt(a + epsilon);
    b = rho * b + (1 - rho) * d**2; w -= lr * d`.

    MXNet 1.9.1 decays the weight alone, and has no use for a learning rate: with grad for g, `w -= d + wd * w`.

    Options: learning_rate 1.0, rho 0.9, epsilon 1e-6. State: 'square_avg' a, 'acc_delta' b.
    """

    defaults: ClassVar[Hyper] = {"lr": 1.0, "rho": 0.9, "eps": 1e-6}
    mxnet1: ClassVar[Hyper | None] = {"lr": 0.01, "eps": 1e-5}
    fractions = frozenset({"rho"})

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        square, moved = state_tensor(state, "square_avg", weight), state_tensor(state, "acc_delta", weight)
        rho, eps, wd, lr = hyper["rho"], hyper["eps"], hyper["weight_decay"], hyper["lr"]
        if not self.is_mxnet1:
            grad.add_(weight, alpha=wd)
        square.mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
        delta = (moved + eps).sqrt_().div_((square + eps).sqrt_()).mul_(grad)
        moved.mul_(rho).addcmul_(delta, delta, value=1.0 - rho)
        if self.is_mxnet1:
            lr = 1.0
            delta.add_(weight, alpha=wd)
        weight.sub_(delta, alpha=lr)


class AdaGrad(_Elementwise):
    """`h += g**2; w -= lr * g / (sqrt(h) + epsilon)`. A row-sparse gradient updates only its rows while wd is 0.

    MXNet 1.9.1 decays the weight alone: `h += grad**2; w -= lr * (grad / sqrt(h + epsilon) + wd * w)`.

    Options: learning_rate 0.01, epsilon 1e-6. State: 'sum' h.
    """

    takes_pieces = True
    defaults: ClassVar[Hyper] = {"lr": 0.01, "eps": 1e-6}
    mxnet1: ClassVar[Hyper | None] = {"eps": 1e-7}

    def update(self, weight: Tensor, grad: Gradient, state: Values, hyper: Hyper) -> None:
        """Update by torch's fused Adagrad kernel; `compat="mxnet1"` has a formula of its own."""
        if self.is_mxnet1:
            self._update_as_mxnet1(weight, grad, state_tensor(state, "sum", weight), hyper)
            return
        count = torch.scalar_tensor(1.0, device=weight.device)
        for grads, (weights, sums) in aligned_fragments(grad, weight, state_tensor(state, "sum", weight)):
            torch._fused_adagrad_(
                weights,
                grads,
                sums,
                [count] * len(grads),
                lr=hyper["lr"],
                lr_decay=0.0,
                weight_decay=hyper["weight_decay"],
                eps=hyper["eps"],
                maximize=False,
            )

    def _update_as_mxnet1(self, weight: Tensor, grad: Gradient, total: Tensor, hyper: Hyper) -> None:
        lr, wd = hyper["lr"], hyper["weight_decay"]
        for grads, (weights, sums) in aligned_fragments(grad, weight, total):
            for part, its, squares in zip(weights, grads, sums, strict=True):
                squares.addcmul_(its, its)
                part.mul_(1.0 - lr * wd).addcdiv_(its, (squares + hyper["eps"]).sqrt_(), value=-lr)

    def updates_rows(self, hyper: Hyper) -> bool:
        return bool(hyper["weight_decay"] == 0.0)


class RMSProp(_Elementwise):
    """`v = rho * v + (1 - rho) * g**2; w -= lr * g / (sqrt(v) + epsilon)`.

    Centered: besides `n = rho * n + (1 - rho) * g; d = momentum * d - lr * g / sqrt(v - n**2 + epsilon); w += d`,
    where v - n**2, which only rounding makes negative, counts as 0 then. Last, `clip_weights` bounds the weights.
    MXNet 1.9.1 has epsilon in the root, not centered, too, and calls rho gamma1 and momentum gamma2.

    Options: learning_rate 0.001, rho 0.9, momentum 0.9 (if centered), epsilon 1e-8, centered False, clip_weights
    None. State: 'square_avg' v, 'grad_avg' n, 'momentum_buffer' -d.
    """

    defaults: ClassVar[Hyper] = {
        "lr": 0.001,
        "rho": 0.9,
        "momentum": 0.9,
        "eps": 1e-8,
        "centered": False,
        "clip_weights": None,
    }
    mxnet1: ClassVar[Hyper | None] = {}
    mxnet1_aliases: ClassVar[Mapping[str, str]] = {"gamma1": "rho", "gamma2": "momentum"}
    mxnet1_clips_decay = True
    fractions = frozenset({"rho"})
    never_negative = frozenset({"clip_weights"})

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Update by one of three formulas (centered, MXNet 1.9.1's, 2.x's), then clip the weights to `clip_weights`."""
        square, rho, bound = state_tensor(state, "square_avg", weight), hyper["rho"], hyper["clip_weights"]
        lr, eps, wd = hyper["lr"], hyper["eps"], hyper["weight_decay"]
        if hyper["centered"]:
            mean, buffer = (state_tensor(state, name, weight) for name in ("grad_avg", "momentum_buffer"))
            grad.add_(weight, alpha=wd)
            mean.lerp_(grad, 1.0 - rho)
            square.mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
            # v - n**2 is a variance; rounding can make it slightly negative.
            spread = square.addcmul(mean, mean, value=-1.0).clamp_min_(0.0).add_(eps).sqrt_()
            weight.sub_(buffer.mul_(hyper["momentum"]).addcdiv_(grad, spread, value=lr))
        elif self.is_mxnet1:
            grad.add_(weight, alpha=wd)
            square.mul_(rho).addcmul_(grad, grad, value=1.0 - rho)
            weight.addcdiv_(grad, (square + eps).sqrt_(), value=-lr)
        else:
            fused_adam_without_mean(weight, grad, square, lr=lr, beta=rho, eps=eps, wd=wd, step=math.inf)
        if bound is not None:
            bound = bound_of(bound, weight)
            weight.clamp_(-bound, bound)


class Ftrl(_Elementwise):
    """`z += grad - (sqrt(n + grad**2) - sqrt(n)) / lr * w; n += grad**2;
    w = -sign(z) * max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + wd)`.

    A row-sparse gradient updates only its rows. If lr is not positive, or so small that the dtype cannot represent its
    reciprocal, nothing changes, because there is no such weight.

    Options: learning_rate 0.1, at least 0; lamda1 0.01, beta 1.0. State: 'z', 'n'.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.1, "lamda1": 0.01, "beta": 1.0}
    mxnet1: ClassVar[Hyper | None] = {}
    never_negative = frozenset({"lr", "lamda1", "beta"})

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        z, n = state_tensor(state, "z", weight), state_tensor(state, "n", weight)
        lr, threshold = hyper["lr"], bound_of(hyper["lamda1"], z)
        if lr * torch.finfo(z.dtype).max < 1.0:
            return
        growth = n.sqrt().neg_()
        root = n.addcmul_(grad, grad).sqrt()
        z.add_(grad).addcmul_(growth.add_(root), weight, value=-1.0 / lr)
        # Without beta, wd and any gradient so far, divisor and dividend are both 0.
        scale = root.add_(hyper["beta"]).div_(lr).add_(hyper["weight_decay"])
        scale.clamp_min_(torch.finfo(scale.dtype).tiny)
        torch.sub(z.clamp(-threshold, threshold), z, out=weight).div_(scale)

    def updates_rows(self, hyper: Hyper) -> bool:
        return True


FAMILY: tuple[type[Optimizer], ...] = (
    SGD, NAG, SGLD, Signum, DCASGD, Test,
    Adam, AdamW, AdaBelief, Adamax, Nadam, FTML,
    AdaDelta, AdaGrad, RMSProp, Ftrl,
)  # fmt: skip


_BLOCK = 16384
"""Elements drawn at once: they stay in the cache, and torch does not split them between threads."""
_UNIT = 64
"""Draws are aligned to multiples of this, because the ends of other vectors may be rounded differently."""


def gluon_normal(
    stream: tuple[object, ...], first: int, count: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw the elements `first` to `first + count` of a stream of N(0, 1) noise, as a function of its name and a
    counter.

    So parts can be drawn anywhere, in any order. Each element gets one 64-bit word: its counter, passed twice through
    the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), with 128 key bits from a hash of the stream's name. 40
    bits of the word give the radius and 24 the angle of the Box-Muller transform, in float64; so no magnitude exceeds
    7.5.

    Args:
        stream: Its name: plain values such as numbers and strings. Different names give independent noise.

    Returns:
        float64[count]; any part of a stream has the same bits however it is drawn (on one kind of device).
    """
    name = repr(stream).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    keys = (
        _to_signed(int.from_bytes(digest[:8], "little")),
        _to_signed(int.from_bytes(digest[8:], "little")),
    )
    # Draw whole units around the wanted range, and cut it out.
    begin, end = first - first % _UNIT, first + count + -(first + count) % _UNIT
    drawn = torch.empty(end - begin, dtype=torch.float64, device=device)
    for start in range(begin, end, _BLOCK):
        block = drawn[start - begin : start - begin + _BLOCK]
        block.copy_(_draw_gluon_normal(keys, start, block.numel(), device))
    return drawn[first - begin : first - begin + count]


def _draw_gluon_normal(keys: tuple[int, int], start: int, count: int, device: torch.device | str) -> Tensor:
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    words = _mix_normal_words(
        _mix_normal_words(counters.mul_(_to_signed(0x9E3779B97F4A7C15)).add_(keys[0])).add_(keys[1])
    )
    # Box-Muller: 24 bits give the angle, the other 40 the radius; + 1 avoids log(0).
    angle = (words & 0xFFFFFF).double().mul_(2.0 * math.pi / 2**24)
    radius = _shift_normal_words(words, 24).add_(1).double().mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle.cos_())


def _mix_normal_words(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place; int64 products wrap like unsigned ones."""
    words.bitwise_xor_(_shift_normal_words(words, 30)).mul_(_to_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shift_normal_words(words, 27)).mul_(_to_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shift_normal_words(words, 31))


def _shift_normal_words(words: Tensor, bits: int) -> Tensor:
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _to_signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
