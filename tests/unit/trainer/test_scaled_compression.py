"""Gradients of scaled losses that are compressed: threshold and residual are those of the gradient itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer

TWO_BIT = {"type": "2bit", "threshold": 0.5}


def trainer_of(copies: list[Parameter], **options: Any) -> Trainer:
    return Trainer({"p": copies}, "sgd", {"learning_rate": 1.0}, "device", TWO_BIT, **options)


def losses(copies: list[Parameter], slope: float) -> list[torch.Tensor]:
    return [(p * slope).sum() for p in copies]


def zeros() -> list[Parameter]:
    return [Parameter(torch.zeros(1)) for _ in range(2)]


def test_what_is_held_back_survives_a_change_of_the_loss_scale() -> None:
    copies = zeros()
    trainer = trainer_of(copies, amp={"init_scale": 8.0})
    for slope in (0.7, math.inf, 0.3):
        result = trainer.update_params(losses(copies, slope))
    assert result.loss_scale == 4.0
    # 0.7 is said as 0.5, and the 0.2 held back with 0.3 as 0.5 once more.
    assert copies[0].item() == pytest.approx(-1.0)


def test_halves_of_a_step_compress_the_gradient_without_its_loss_scale() -> None:
    copies = zeros()
    trainer = trainer_of(copies, amp=8, update_on_kvstore=False)
    for _ in range(2):
        trainer.backward(losses(copies, 0.7))
        trainer.allreduce_grads()
        assert copies[0].grad is not None
        assert copies[0].grad.item() == pytest.approx(2 * 8 * 0.5)  # still scaled, for amp.unscale
        trainer.update()
    assert copies[0].item() == pytest.approx(-1.0)
