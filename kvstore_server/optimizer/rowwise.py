"""Optimizers of rows that Gluon does not have: RowAdam.

Tensors are changed as in layerwise.py, so a row has the same bits whatever rows are updated beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer.base import Hyper, Optimizer, Values
from kvstore_server.optimizer.gluon import adam_bias_corrections
from kvstore_server.optimizer.layerwise import check_is_matrix


class RowAdam(Optimizer):
    """Adam that counts the updates of each row.

    `w -= lr * sqrt(1 - beta2**t) / (1 - beta1**t) * m / (sqrt(v) + epsilon)`. With `adam` and
    lazy_update=True t counts the updates of the whole key, so averages that a rare row has just begun are not
    corrected, and its first steps have wrong lengths. Here t is the row's own (Kingma and Ba, 2015, algorithm 1, for
    each row alone). For keys of two dimensions. A row-sparse gradient updates only its rows, weight decay included. On
    servers that can be restarted, each update of a parameter with a fixed number of rows copies the state of all rows;
    one of `kvtrainer.Embedding` does not.

    Options: learning_rate 0.001, beta1 0.9, beta2 0.999, epsilon 1e-8. State: 'exp_avg' m, 'exp_avg_sq' v, and
    'row_step' t, of shape (rows, 1).
    """

    defaults: ClassVar[Hyper] = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8}
    elementwise = False
    may_raise = False

    def check_key(self, key: str, shape: Sequence[int], hyper: Hyper) -> None:
        """Raise ConfigurationError for a key that is not a matrix."""
        check_is_matrix(self.registered_name, key, shape)

    def updates_rows(self, hyper: Hyper) -> bool:
        return True

    def create_state(self, weight: Tensor) -> Values:
        averages: Values = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        return {**averages, "row_step": weight.new_zeros(weight.shape[0], 1)}

    def update(self, weight: Tensor, grad: Tensor, state: Values, hyper: Hyper) -> None:
        mean, square, steps = state["exp_avg"], state["exp_avg_sq"], state["row_step"]
        assert isinstance(mean, Tensor)
        assert isinstance(square, Tensor)
        assert isinstance(steps, Tensor)
        (beta1, beta2), lr = hyper["betas"], hyper["lr"]
        if hyper["weight_decay"]:
            grad = grad + weight * hyper["weight_decay"]
        mean.mul_(beta1).add_(grad * (1.0 - beta1))
        square.mul_(beta2).add_((grad * grad).mul_(1.0 - beta2))
        # Powers by Python, once for each count: torch's vector loops round some of them differently.
        counts, places = torch.unique(steps.add_(1.0), return_inverse=True)
        rates = []
        for count in counts.tolist():
            correction, root = adam_bias_corrections((beta1, beta2), count)
            rates.append(lr * root / correction)
        rate = torch.tensor(rates, dtype=weight.dtype, device=weight.device)[places]
        weight.sub_(square.sqrt().add_(hyper["eps"]).reciprocal_().mul_(mean).mul_(rate))
