"""float32 copies of half-precision parameters that a script updates by itself.

A Trainer needs none of this: with the option multi_precision=True of any optimizer, whoever updates keeps the float32
weights, a server too. This is for loops that drive one of torch's optimizers themselves, as MMCV's hooks did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtrainer.errors import ArgumentTypeError, ConfigurationError, ShapeMismatchError

Weights = Mapping[str, Tensor] | Iterable[Tensor]


def copy_grads_to_fp32(fp16_net: Any, fp32_weights: Weights) -> None:
    """Give the float32 weights the gradients of the parameters, converted; dense or sparse.

    A weight whose parameter has no gradient has none afterwards either, so an optimizer leaves it out.

    Args:
        fp16_net: a Module, or a mapping of parameters by name.
        fp32_weights: by name; or in the order of the parameters, as many as there are.

    Raises:
        ConfigurationError: names or numbers differ; nothing has changed then.
        ShapeMismatchError: shapes differ; nothing has changed then.
    """
    for parameter, weight in _pairs(fp16_net, fp32_weights):
        grad = parameter.grad
        if grad is None:
            weight.grad = None
        elif weight.grad is None or grad.is_sparse or weight.grad.is_sparse:
            weight.grad = grad.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
        else:
            weight.grad.detach().copy_(grad)


@torch.no_grad()
def copy_params_to_fp16(fp16_net: Any, fp32_weights: Weights) -> None:
    """Give the parameters the float32 weights, rounded; arguments and errors as of `copy_grads_to_fp32`."""
    for parameter, weight in _pairs(fp16_net, fp32_weights):
        parameter.copy_(weight)


def _pairs(net: Any, weights: Weights) -> list[tuple[Tensor, Tensor]]:
    parameters = dict(net.named_parameters() if isinstance(net, torch.nn.Module) else net)
    if isinstance(weights, Mapping):
        if set(weights) != set(parameters):
            missing, unknown = sorted(set(parameters) - set(weights)), sorted(set(weights) - set(parameters))
            raise ConfigurationError(
                f"float32 weights must have the names of the parameters: missing {missing}, unknown {unknown}"
            )
        by_name = dict(weights)
    else:
        listed = list(weights)
        if len(listed) != len(parameters):
            raise ConfigurationError(
                f"{len(listed)} float32 weights were given for {len(parameters)} parameters; give one for each, in "
                "their order, or a dict by name"
            )
        by_name = dict(zip(parameters, listed, strict=True))
    for name, parameter in parameters.items():
        weight = by_name[name]
        if not isinstance(weight, Tensor):
            raise ArgumentTypeError(
                f"the float32 weight of {name!r} is a {type(weight).__name__}, not a tensor"
            )
        if weight.shape != parameter.shape:
            raise ShapeMismatchError(
                f"{name!r} has shape {list(parameter.shape)}, and its float32 weight {list(weight.shape)}"
            )
    return [(parameter, by_name[name]) for name, parameter in parameters.items()]
