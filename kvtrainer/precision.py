"""float32 copies of half-precision parameters, for loops that drive a torch optimizer themselves.

A Trainer does not need this: with the option multi_precision=True the process that updates, which may be a server,
keeps the float32 weights. These functions have the names and arguments of MMCV's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtrainer.errors import ArgumentTypeError, ConfigurationError, ShapeMismatchError

Weights = Mapping[str, Tensor] | Iterable[Tensor]


def copy_grads_to_fp32(fp16_net: Any, fp32_weights: Weights) -> None:
    """Copy the gradients of the parameters, converted, to the float32 weights; dense or sparse.

    A weight whose parameter has no gradient has none afterwards, so an optimizer leaves it out.

    Args:
        fp16_net: A Module, or a mapping of parameters by name.
        fp32_weights: A mapping by the same names, or as many weights as parameters in the same order.

    Raises:
        ConfigurationError: The names or the numbers of tensors differ; nothing has changed then.
        ShapeMismatchError: Shapes differ; nothing has changed then.
    """
    for parameter, weight in _pair_fp32_weights(fp16_net, fp32_weights):
        grad = parameter.grad
        if grad is None:
            weight.grad = None
        elif weight.grad is None or grad.is_sparse or weight.grad.is_sparse:
            weight.grad = grad.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
        else:
            weight.grad.detach().copy_(grad)


@torch.no_grad()
def copy_params_to_fp16(fp16_net: Any, fp32_weights: Weights) -> None:
    """Copy the float32 weights, rounded, to the parameters. Arguments and errors are those of `copy_grads_to_fp32`."""
    for parameter, weight in _pair_fp32_weights(fp16_net, fp32_weights):
        parameter.copy_(weight)


def _pair_fp32_weights(net: Any, weights: Weights) -> list[tuple[Tensor, Tensor]]:
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
