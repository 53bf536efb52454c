"""Gluon's gradient descent and its variants, numerically those of MXNet 2.x.

In the formulas g = grad + wd * w, and grad has been rescaled and clipped on entry: MXNet's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.correction import correct_momentum, read_correction
from kvstore_server.optimizer.kernels import fused_momentum, fused_sgd, state_tensor
from kvstore_server.optimizer.noise import normal
from kvstore_server.optimizer.options import checked_count


class _Momentum(Optimizer):
    """Descent with a momentum that has the learning rate inside.

    State: 'momentum_buffer', the negative of MXNet's m; none while momentum is 0.
    """

    may_raise = False
    verified = True
    nesterov: ClassVar[bool] = False

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        lr, wd, momentum = hyper["lr"], hyper["weight_decay"], hyper["momentum"]
        if momentum == 0.0:
            fused_sgd(weight, grad, lr=lr, wd=wd)
            return
        buffer = state_tensor(state, "momentum_buffer", weight)
        self._before_momentum(buffer, state, hyper)
        fused_momentum(weight, grad, buffer, lr=lr, wd=wd, momentum=momentum, nesterov=self.nesterov)

    def _before_momentum(
        self, buffer: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """What is to be done to the momentum before it is used."""


class SGD(_Momentum):
    """`m = momentum * m - lr * g; w += m`; unlike torch's, lr is inside m.

    Options: learning_rate 0.1, momentum 0.0, lazy_update False (True: of a row-sparse gradient only the rows),
    momentum_correction None (True, or {"threshold": 1.1, "min_lr": 1e-7}: when the learning rate of a key changes by
    more than that factor, m is multiplied by new / old, as in Detectron, so that m has the new rate inside; not if the
    old one was min_lr or less). With it the state also has 'last_lr', the learning rate of the last update.
    """

    name = "sgd"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 0.1,
        "momentum": 0.0,
        "lazy_update": False,
        "momentum_correction": None,
    }

    def __init__(self, learning_rate: float | None = None, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        if self.hyper["lazy_update"] and self.hyper["momentum_correction"] is not None:
            raise ConfigurationError(
                "sgd cannot correct the momentum of lazy updates, because rows that an update leaves out keep the "
                "momentum of an older learning rate; leave out momentum_correction or lazy_update"
            )

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        if name == "momentum_correction":
            found = read_correction(value)
            # Saved with a group it is then read back by torch.load(weights_only=True).
            return None if found is None else tuple(found)
        return super()._checked(name, value, default)

    def _before_momentum(
        self, buffer: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        given = hyper.get("momentum_correction")
        if given is None or given is False:
            # Were it turned on again, a rate that m has left behind would be corrected for.
            state.pop("last_lr", None)
            return
        correct_momentum(buffer, state, hyper["lr"], read_correction(given))

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        """Whether `lazy_update` is on; see `Optimizer.updates_rows`."""
        return bool(hyper["lazy_update"])


class NAG(_Momentum):
    """Nesterov's: `m = momentum * m - lr * g; w += momentum * m - lr * g`.

    Options: learning_rate 0.1, momentum 0.9.
    """

    name = "nag"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "momentum": 0.9}
    nesterov = True


class SGLD(Optimizer):
    """Langevin dynamics: `w -= lr / 2 * g; w += N(0, sqrt(lr))`.

    The noise of an element is a function of seed, name of the key, place in the key and number of the update, so it
    depends neither on how keys are cut nor on any order. Where lr is 0 or, through a multiplier, below, there is none.

    Options: learning_rate 0.1, at least 0; seed 0. No state.
    """

    name = "sgld"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "seed": 0}
    never_negative = frozenset({"lr"})
    may_raise = False
    positioned = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        lr = hyper["lr"]
        fused_sgd(weight, grad, lr=lr / 2, wd=hyper["weight_decay"])
        if lr > 0.0:
            stream = (hyper["seed"], hyper["key"], hyper["step"])
            noise = normal(stream, hyper["first"], weight.numel(), weight.device)
            weight.add_(noise.mul_(math.sqrt(lr)).to(weight.dtype))

    def _checked(self, name: str, value: Any, default: Any) -> Any:
        if name == "seed":
            return checked_count(self.registered_name, name, value, 0)
        return super()._checked(name, value, default)


class Signum(Optimizer):
    """`m = momentum * m - (1 - momentum) * g; w = (1 - lr * wd_lh) * w + lr * sign(m)`.

    Without momentum `w = (1 - lr * (wd + wd_lh)) * w - lr * sign(grad)`.

    Options: learning_rate 0.01, momentum 0.9, wd_lh 0.0. State: 'momentum_buffer', the negative of m.
    """

    name = "signum"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.01, "momentum": 0.9, "wd_lh": 0.0}
    never_negative = frozenset({"wd_lh"})
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        lr, wd, momentum, decay = hyper["lr"], hyper["weight_decay"], hyper["momentum"], hyper["wd_lh"]
        if momentum == 0.0:
            decay += wd
            direction = grad
        else:
            buffer = state_tensor(state, "momentum_buffer", weight)
            direction = buffer.lerp_(grad.add_(weight, alpha=wd), 1.0 - momentum)
        weight.mul_(1.0 - lr * decay).sub_(torch.sign(direction), alpha=lr)


class DCASGD(Optimizer):
    """Delay-compensated: `d = g + lamda * g**2 * (w - w'); m = momentum * m - lr * d; w' = w; w += m`.

    w' is the weight before the last update, so the term is about what other workers changed since. On a server that
    applies contributions one by one it is the weight that the contributing worker was sent last.

    Options: learning_rate 0.1, momentum 0.0, lamda 0.04. State: 'previous_weight' w', 'momentum_buffer' -m.
    """

    name = "dcasgd"
    delay_state = "previous_weight"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 0.1, "momentum": 0.0, "lamda": 0.04}
    may_raise = False
    verified = True

    def create_state(self, weight: Tensor) -> dict[str, StateValue]:
        """Return the weight itself as the previous one."""
        return {"previous_weight": weight.clone()}

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        previous = state["previous_weight"]
        assert isinstance(previous, Tensor)
        grad.add_(weight, alpha=hyper["weight_decay"])
        drift = (weight - previous).mul_(grad).mul_(grad)
        grad.add_(drift, alpha=hyper["lamda"])
        previous.copy_(weight)
        if hyper["momentum"] == 0.0:
            fused_sgd(weight, grad, lr=hyper["lr"], wd=0.0)
            return
        buffer = state_tensor(state, "momentum_buffer", weight)
        fused_momentum(
            weight, grad, buffer, lr=hyper["lr"], wd=0.0, momentum=hyper["momentum"], nesterov=False
        )


class Test(Optimizer):
    """`w -= lr * (grad + wd * w)`: MXNet's optimizer for tests, which ignores clip_gradient.

    Options: learning_rate 0.01. No state.
    """

    __test__ = False  # keeps pytest from collecting a class of this name
    clips = False
    name = "test"
    may_raise = False
    verified = True

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        """Apply one update in place; see `Optimizer.update`."""
        fused_sgd(weight, grad, lr=hyper["lr"], wd=hyper["weight_decay"])
