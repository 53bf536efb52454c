"""Gluon's optimizers that need whole keys: LAMB, LANS and LARS use norms, GroupAdaGrad rows.

Numerically those of MXNet 2.x with its fused kernels, but always over the whole key, whereas MXNet's servers take
norms of the part of a key that they hold. Norms are summed in float64. Tensors are changed only by additions,
multiplications, divisions and roots, each rounded separately, so bits do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.base import Hyper, Optimizer, Values
from kvstore_server.optimizer.gluon import MomentumCorrection, correct_momentum, state_tensor

_BLOCK = 16384
"""Elements summed at a time; torch does not split such short sums between threads."""
_NOT_SCALED = ("gamma", "beta", "bias")
"""Endings of the keys that keep the plain learning rate in LARS."""
_ANY_CHANGE = MomentumCorrection(threshold=1.0, min_lr=0.0)
"""When MXNet 1.9.1 corrects the momentum of LARS: whenever the rate has changed from one that is not 0."""


class _LayerwiseTrustRatio(Optimizer):
    """Common to LAMB and LANS: two averages, and a step that is as long as the weights, within bounds."""

    defaults: ClassVar[Hyper] = {
        "lr": 0.001,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "lower_bound": None,
        "upper_bound": None,
    }
    elementwise = False
    may_raise = False
    never_negative = frozenset({"lower_bound", "upper_bound"})

    def _averages(self, grad: Tensor, state: Values, hyper: Hyper) -> tuple[Tensor, Tensor]:
        beta1, beta2 = hyper["betas"]
        mean, square = state_tensor(state, "exp_avg", grad), state_tensor(state, "exp_avg_sq", grad)
        mean.mul_(beta1).add_(grad * (1 - beta1))
        square.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        return mean, square

    def _scaled(self, direction: Tensor, weight: Tensor, length: float, hyper: Hyper) -> Tensor:
        """Add weight decay to `direction` and scale it to the norm `length`; 0 or infinity leaves it unscaled."""
        direction.add_(weight * hyper["weight_decay"])
        return direction.mul_(_layerwise_trust_ratio(length, layerwise_norm(direction)))

    def _length(self, weight: Tensor, hyper: Hyper) -> float:
        """Return the norm of the weights within the bounds; as in MXNet's kernels, a bound of 0 means no bound."""
        length = layerwise_norm(weight)
        if hyper["lower_bound"]:
            length = max(length, hyper["lower_bound"])
        if hyper["upper_bound"]:
            length = min(length, hyper["upper_bound"])
        return length


class LAMB(_LayerwiseTrustRatio):
    """Adam's direction plus weight decay, as long as the weights: `w -= lr * r * u`.

    `u = m / (sqrt(v) + epsilon) + wd * w` with bias-corrected averages m, v and `r = |w| / |u|`, |w| within the
    bounds; r is 1 where a norm is 0. Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-6,
    lower_bound None, upper_bound None, bias_correction True. State: 'exp_avg', 'exp_avg_sq'.
    Source: You et al., Large Batch Optimization for Deep Learning (arXiv:1904.00962), as MXNet 2.x has it.
    """

    defaults: ClassVar[Hyper] = {"bias_correction": True}
    mxnet1: ClassVar[Hyper | None] = {}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        mean, square = self._averages(grad, state, hyper)
        corrections = _layerwise_bias_corrections(hyper) if hyper["bias_correction"] else (1.0, 1.0)
        direction = (mean / corrections[0]).div_(
            _layerwise_corrected_root(square, corrections[1], hyper["eps"])
        )
        step = self._scaled(direction, weight, self._length(weight, hyper), hyper)
        weight.sub_(step.mul_(hyper["lr"]))


class LANS(_LayerwiseTrustRatio):
    """LAMB with a gradient of norm 1 and Nesterov's lookahead: two steps, each as long as the weights.

    The gradient is divided by its norm before it is clipped. The averaged direction `m / (sqrt(v) + epsilon)` is
    weighted by beta1, that of the gradient alone, `g / (sqrt(v) + epsilon)`, by 1 - beta1; weight decay is added to
    both before they are scaled. A zero gradient stays zero. Options: learning_rate 0.001, beta1 0.9, beta2 0.999,
    epsilon 1e-6, lower_bound None, upper_bound None. State: 'exp_avg', 'exp_avg_sq'. Source: Zheng et al., Accelerated
    Large Batch Optimization of BERT (arXiv:2006.13484), as MXNet 2.x has it.
    """

    clips = False

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        """Take two steps, along the averaged and along the newest direction, each as long as the weights."""
        # 1. Normalise the gradient, then clip: the bound applies to the normalised one.
        norm = layerwise_norm(grad)
        if norm:
            grad.div_(norm)
        _clip_layerwise_gradient(grad, hyper)
        # 2. The averages, and their bias correction.
        mean, square = self._averages(grad, state, hyper)
        corrections = _layerwise_bias_corrections(hyper)
        root, length = (
            _layerwise_corrected_root(square, corrections[1], hyper["eps"]),
            self._length(weight, hyper),
        )
        beta1, lr = hyper["betas"][0], hyper["lr"]
        # 3. Two directions, each scaled to the length of the weights.
        averaged = self._scaled((mean / corrections[0]).div_(root), weight, length, hyper)
        newest = self._scaled(grad.div_(root), weight, length, hyper)
        weight.sub_(averaged.mul_(lr * beta1)).sub_(newest.mul_(lr * (1 - beta1)))


class LARS(Optimizer):
    """SGD with momentum whose learning rate is scaled to each key: `lr * eta * |w| / (|g| + wd * |w| + epsilon)`.

    |g| is taken before clipping; the factor is 1 where a norm is 0, and for keys whose names end in gamma, beta
    or bias. Options: learning_rate 0.1, momentum 0.0, eta 0.001, epsilon 1e-8, lazy_update False (True: a
    row-sparse gradient updates only its rows). State: 'momentum_buffer', the negative of MXNet's m.
    In MXNet 1.9.1 only names in param_idx2name keep a key's factor at 1, and momentum_correction True multiplies m by
    new / old when the learning rate of a key changes; the state then has 'last_lr', the rate of the last update, too.
    Source: You et al., Large Batch Training of Convolutional Networks (arXiv:1708.03888), as MXNet 2.x has it.
    """

    defaults: ClassVar[Hyper] = {"lr": 0.1, "momentum": 0.0, "eta": 0.001, "eps": 1e-8, "lazy_update": False}
    mxnet1: ClassVar[Hyper | None] = {
        "lr": 0.01,
        "eps": 0.0,
        "lazy_update": True,
        "momentum_correction": True,
    }
    mxnet1_decayed = ("_weight",)
    elementwise = False
    clips = False
    may_raise = False
    never_negative = frozenset({"eta"})

    def updates_rows(self, hyper: Hyper) -> bool:
        return bool(hyper["lazy_update"])

    def hyper_for_rows(self, weight: Tensor, grad_rows: Tensor, hyper: Hyper) -> Hyper:
        return {**hyper, "layer_factor": self._factor(weight, grad_rows, hyper)}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        # For row-sparse updates the factor was computed from the whole key.
        factor = hyper.get("layer_factor")
        lr = hyper["lr"] * (self._factor(weight, grad, hyper) if factor is None else factor)
        _clip_layerwise_gradient(grad, hyper)
        step = grad.add_(weight * hyper["weight_decay"]).mul_(lr)
        if hyper["momentum"]:
            buffer = state_tensor(state, "momentum_buffer", weight)
            if hyper.get("momentum_correction"):
                correct_momentum(buffer, state, hyper["lr"], _ANY_CHANGE)
            step = buffer.mul_(hyper["momentum"]).add_(step)
        weight.sub_(step)

    def _factor(self, weight: Tensor, grad: Tensor, hyper: Hyper) -> float:
        key = str(hyper.get("key", ""))
        name = self.param_idx2name.get(key, "") if self.is_mxnet1 else key
        if name.endswith(_NOT_SCALED):
            return 1.0
        size, change = layerwise_norm(weight), layerwise_norm(grad)
        if not (0 < size < math.inf and 0 < change < math.inf):
            return 1.0
        factor: float = hyper["eta"] * size / (change + hyper["weight_decay"] * size + hyper["eps"])
        return factor


class GroupAdaGrad(Optimizer):
    """AdaGrad with one history per row of a matrix: `h += mean(g * g); w -= lr * g / (sqrt(h) + epsilon)`.

    Also called row-wise AdaGrad, and found by the name "rowwise_adagrad", too (Naumov et al., 2019, "Deep Learning
    Recommendation Model"). MXNet 1.9.1 has epsilon in the root. For keys of two dimensions, without weight decay. A
    row-sparse gradient updates only its rows, which is the same as updating all.

    Options: learning_rate 0.01, epsilon 1e-6. State: 'history', of shape (rows, 1).
    """

    defaults: ClassVar[Hyper] = {"eps": 1e-6}
    mxnet1: ClassVar[Hyper | None] = {"eps": 1e-5}
    elementwise = False
    may_raise = False

    def __init__(self, learning_rate: float | None = None, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.check_key("any", (1, 1), self.hyper)

    def check_key(self, key: str, shape: Sequence[int], hyper: Hyper) -> None:
        """Raise ConfigurationError for weight decay, and for a key that is not a matrix."""
        if hyper["weight_decay"]:
            raise ConfigurationError(
                f"groupadagrad has no weight decay, but key {key!r} has {hyper['weight_decay']:g}; set wd to 0"
            )
        check_is_matrix(self.registered_name, key, shape)

    def updates_rows(self, hyper: Hyper) -> bool:
        """Return True: a row without a gradient would not change anyway."""
        return True

    def create_state(self, weight: Tensor) -> Values:
        return {"history": weight.new_zeros(weight.shape[0], 1)}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        history = state["history"]
        assert isinstance(history, Tensor)
        norms = torch.linalg.vector_norm(grad, dim=1, keepdim=True, dtype=torch.float64)
        history.add_(norms.square_().div_(grad.shape[1]))
        eps = hyper["eps"]
        root = (history + eps).sqrt_() if self.is_mxnet1 else history.sqrt().add_(eps)
        weight.addcdiv_(grad, root, value=-hyper["lr"])


def check_is_matrix(who: str, key: str, shape: Sequence[int]) -> None:
    """Raise ConfigurationError, naming the key, unless it has two dimensions."""
    if len(shape) != 2:
        raise ConfigurationError(
            f"{who} updates keys of two dimensions, but {key!r} has the shape {tuple(shape)}; give it to another "
            "optimizer, such as adagrad"
        )


def layerwise_norm(tensor: Tensor) -> float:
    """Return the Euclidean norm of all elements, summed in float64 in blocks with fixed bounds."""
    size = _BLOCK if tensor.device.type == "cpu" else max(1, tensor.numel())
    blocks = torch.split(tensor.reshape(-1), size)
    return math.sqrt(math.fsum(block.double().square().sum().item() for block in blocks))


def _layerwise_trust_ratio(wanted: float, length: float) -> float:
    """Return the factor that scales a vector of norm `length` to `wanted`; 1 if either is 0 or not finite."""
    if not (0 < wanted < math.inf and 0 < length < math.inf):
        return 1.0
    return wanted / length


def _layerwise_bias_corrections(hyper: Hyper) -> tuple[float, float]:
    beta1, beta2 = hyper["betas"]
    return 1 - beta1 ** hyper["step"], 1 - beta2 ** hyper["step"]


def _layerwise_corrected_root(square: Tensor, correction: float, eps: float) -> Tensor:
    return (square / correction).sqrt_().add_(eps)


def _clip_layerwise_gradient(grad: Tensor, hyper: Hyper) -> None:
    bound = hyper["clip_gradient"]
    if bound is not None:
        grad.clamp_(-bound, bound)


FAMILY: tuple[type[Optimizer], ...] = (LAMB, LANS, LARS, GroupAdaGrad)
"""The optimizers of this file, for the registry."""
