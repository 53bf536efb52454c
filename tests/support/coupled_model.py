"""The problem that a distributed job and a plain float64 loop both solve; plain torch, nothing of ours.

A small network in which every key acts on the gradient of every other: W2 is used twice, in both directions, and b1
in two layers. W2 is big enough to lie on several servers. Learning rate and multipliers change while it trains.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

STEPS = 25
BATCH = 4
"""Examples of one worker in one step."""
BIAS_RATE = 0.5
"""The learning rate of the biases' group, as a part of that of the weights' group."""

SHAPES = {"W1": (6, 96), "b1": (96,), "W2": (96, 96), "b2": (96,), "W3": (96, 3)}
BIASES = ("b1", "b2")

MULTIPLIERS: dict[int, dict[str, dict[str, float]]] = {
    0: {"lr_mult": {"W1": 0.5}, "wd_mult": {"b1": 0.0, "b2": 0.0}},
    10: {"lr_mult": {"W2": 1.5}, "wd_mult": {"W1": 3.0, "b2": 0.5}},
    17: {"lr_mult": {"W1": 1.0, "b1": 0.0}},
}
"""From which step on which parameter has which multiplier; others have 1."""


@dataclass(frozen=True)
class Case:
    """One optimizer: its name for the Trainer, its learning rate, and its other options under its own names."""

    optimizer: str
    lr: float
    options: dict[str, Any]


CASES = {
    "sgd": Case("sgd", 0.05, {"momentum": 0.9, "wd": 0.01, "clip_gradient": 0.02, "rescale_grad": 0.5}),
    "adam": Case("adam", 0.01, {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-6, "wd": 0.01}),
    "SGD": Case("torch:SGD", 0.05, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD nesterov": Case("torch:SGD", 0.02, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": Case("torch:Adam", 0.01, {"betas": (0.8, 0.95), "amsgrad": True, "weight_decay": 0.01}),
    "AdamW": Case("torch:AdamW", 0.01, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    "Adagrad": Case(
        "torch:Adagrad", 0.05, {"lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": 0.01}
    ),
    "Adadelta": Case("torch:Adadelta", 0.5, {"rho": 0.8, "eps": 1e-5, "weight_decay": 0.01}),
    "Adamax": Case("torch:Adamax", 0.01, {"betas": (0.8, 0.95), "weight_decay": 0.01}),
    "NAdam": Case(
        "torch:NAdam", 0.01, {"momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}
    ),
    "RAdam": Case(
        "torch:RAdam", 0.01, {"betas": (0.8, 0.9), "decoupled_weight_decay": True, "weight_decay": 0.1}
    ),
    "RMSprop": Case(
        "torch:RMSprop", 0.005, {"alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.01}
    ),
    "Rprop": Case("torch:Rprop", 0.01, {"etas": (0.6, 1.3), "step_sizes": (1e-5, 0.05)}),
    "ASGD": Case("torch:ASGD", 0.05, {"lambd": 0.01, "alpha": 0.7, "t0": 5.0, "weight_decay": 0.01}),
}


def rate_factor(step: int) -> float:
    """The schedule: what the learning rate of every group is multiplied by."""
    return 1.0 / (1.0 + 0.05 * step) if step % 7 else 1.2


def start_weights() -> dict[str, Tensor]:
    """What training starts from, float64."""
    weights = {}
    for name, shape in SHAPES.items():
        scale = float(shape[0]) ** -0.5 if name not in BIASES else 0.1
        weights[name] = scale * torch.randn(shape, dtype=torch.float64, generator=_generator(name))
    return weights


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The examples (BATCH, 6) and targets (BATCH, 3) of one worker in one step, float64."""
    generator = _generator(f"batch {step} {rank}")
    x = torch.randn(BATCH, 6, dtype=torch.float64, generator=generator)
    return x, torch.sin(x[:, :3]) + 0.1 * torch.randn(BATCH, 3, dtype=torch.float64, generator=generator)


def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """The squared error, summed over the batch."""
    hidden = torch.tanh(x @ weights["W1"] + weights["b1"])
    hidden = torch.tanh(hidden @ weights["W2"] + weights["b2"])
    hidden = torch.tanh(hidden @ weights["W2"].T + weights["b1"])
    return (hidden @ weights["W3"] - y).square().sum()


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
