"""What Gluon's optimizers are made of: torch's fused kernels, state made when first needed, and noise by counters."""

from __future__ import annotations

import hashlib
import math
import platform

import torch
from torch import Tensor

from kvstore_server.optimizer.base import StateValue


def capability() -> str:
    """Name the instruction set of these kernels, as `x86_64/AVX2`; results have the same bits only on equal ones."""
    return f"{platform.machine()}/{torch.backends.cpu.get_cpu_capability()}"


def state_tensor(state: dict[str, StateValue], name: str, weight: Tensor) -> Tensor:
    """The entry `name` of the state; zeros like `weight` where it has none yet."""
    value = state.get(name)
    if not isinstance(value, Tensor):
        value = state[name] = torch.zeros_like(weight)
    return value


def fused_sgd(
    weight: Tensor,
    grad: Tensor,
    *,
    lr: float,
    wd: float,
    buffer: Tensor | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> None:
    """`w -= lr * (grad + wd * w)`.

    With a buffer and g = lr * (grad + wd * w): `b = momentum * b + g`, then `w -= b`, or Nesterov's
    `w -= momentum * b + g`. The learning rate is inside the buffer, as in MXNet; in torch's kernel it is outside, so it
    goes into the gradient, which is overwritten, and into the weight decay.
    """
    buffers = []
    if buffer is not None:
        grad.mul_(lr)
        lr, wd, buffers = 1.0, lr * wd, [buffer]
    torch._fused_sgd_(
        [weight],
        [grad],
        buffers,
        weight_decay=wd,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
    )


def fused_adam(
    weight: Tensor,
    grad: Tensor,
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
    """torch's Adam, or with `decoupled` its AdamW; `step` counts from 1, and math.inf corrects no bias."""
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        [weight],
        [grad],
        [mean],
        [square],
        [],
        [torch.scalar_tensor(step, device=weight.device)],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=wd,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def fused_scaled(
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

    Adam whose average of gradients forgets at once. A `step` of math.inf corrects no bias.
    """
    mean = torch.zeros_like(weight)
    fused_adam(weight, grad, mean, square, lr=lr, betas=(0.0, beta), eps=eps, wd=wd, step=step)


def bias_corrections(betas: tuple[float, float], step: float) -> tuple[float, float]:
    """`1 - beta1**step` and `sqrt(1 - beta2**step)`, by which Adam's averages must be divided."""
    return 1.0 - betas[0] ** step, math.sqrt(1.0 - betas[1] ** step)


_BLOCK = 16384
"""Elements drawn at once: torch does not share so few among threads, and they stay in the cache."""
_UNIT = 64
"""Every draw is of a multiple of so many, since the ends of other vectors may be rounded differently."""


def normal(stream: tuple[object, ...], first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw from N(0, 1) the elements `first` to `first + count` of a stream: a function of its name and a counter.

    So its parts can be drawn anywhere, in any order. Each element gets one 64-bit word: its counter, taken twice
    through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), with 128 key bits from a hash of the stream's
    name. 40 bits of the word are the radius and 24 the angle of the Box-Muller transform, in float64; so no value is
    above 7.5.

    Args:
        stream: its name: plain values such as numbers and strings. Different names give independent noise.

    Returns:
        float64[count]; any part of a stream has the same bits whichever way it is drawn (on one kind of device).
    """
    name = repr(stream).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    keys = (_signed(int.from_bytes(digest[:8], "little")), _signed(int.from_bytes(digest[8:], "little")))
    begin, end = first - first % _UNIT, first + count + -(first + count) % _UNIT
    drawn = torch.empty(end - begin, dtype=torch.float64, device=device)
    for start in range(begin, end, _BLOCK):
        block = drawn[start - begin : start - begin + _BLOCK]
        block.copy_(_block(keys, start, block.numel(), device))
    return drawn[first - begin : first - begin + count]


def _block(keys: tuple[int, int], start: int, count: int, device: torch.device | str) -> Tensor:
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    words = _mixed(_mixed(counters.mul_(_signed(0x9E3779B97F4A7C15)).add_(keys[0])).add_(keys[1]))
    angle = (words & 0xFFFFFF).double().mul_(2.0 * math.pi / 2**24)
    radius = _shifted(words, 24).add_(1).double().mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle.cos_())


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place; int64 products wrap as unsigned ones do."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return word - 2**64 if word >= 2**63 else word
