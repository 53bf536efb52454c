"""A precision that a Trainer was asked for is not ignored in silence."""

from __future__ import annotations

import pytest
import torch

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError


def test_bfloat16_without_the_context_raises_and_changes_nothing() -> None:
    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    trainer = Trainer(layer, "torch:SGD", {"lr": 0.1}, None, amp={"dtype": "bfloat16"})
    loss = layer(torch.ones(1, 2)).sum()
    with pytest.raises(ConfigurationError, match=r"trainer\.context\(\), which was never entered"):
        trainer.update_params(loss)
    with pytest.raises(ConfigurationError, match=r"trainer\.context\(\), which was never entered"):
        trainer.step(1)
    assert torch.equal(layer.weight, before)


def test_own_backward_pass_of_a_loss_in_bfloat16_needs_the_context_only() -> None:
    layer = torch.nn.Linear(2, 1)
    trainer = Trainer(layer, "torch:SGD", {"lr": 0.1}, None, amp={"dtype": "bfloat16"})
    with trainer.context():
        loss = layer(torch.ones(1, 2)).sum()
    loss.backward()
    result = trainer.step(1)
    assert result is not None
    assert result.updated


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_in_place_of_the_options_says_where_it_belongs(dtype: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"give it as amp=dict\(dtype='{dtype}'\)"):
        Trainer(torch.nn.Linear(2, 1), "torch:SGD", {"lr": 0.1}, None, amp=dtype)
