"""A Trainer in a loop for optimizer wrappers: values by group, one call for a step, dropped gradients."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from kvtrainer import Trainer


def test_rates_and_momenta_are_listed_by_group() -> None:
    p, q = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    groups = [{"params": [p]}, {"params": [q], "lr": 0.5, "momentum": 0.3}]
    trainer = Trainer(groups, "torch:SGD", {"lr": 0.1, "momentum": 0.9}, None)
    assert trainer.get_lr() == {"lr": [0.1, 0.5]}
    assert trainer.get_momentum() == {"momentum": [0.9, 0.3]}
    assert trainer.defaults["lr"] == 0.1
    assert Trainer([p], "torch:Adam", {"betas": (0.7, 0.9)}, None).get_momentum() == {"momentum": [0.7]}
    assert Trainer([p], "torch:Adagrad", None, None).get_momentum() == {"momentum": [0.0]}


def test_one_call_does_what_backward_and_step_do() -> None:
    p, q, plain = (Parameter(torch.tensor([1.0, -2.0])) for _ in range(3))
    one, other = (Trainer([each], "torch:SGD", {"lr": 0.1, "momentum": 0.9}, None) for each in (p, q))
    torchs = torch.optim.SGD([plain], lr=0.1, momentum=0.9)
    for _ in range(3):
        one.update_params(p.square().sum())
        other.backward(q.square().sum())
        other.step()
        torchs.zero_grad()
        plain.square().sum().backward()  # type: ignore[no-untyped-call]
        torchs.step()
    assert torch.equal(p, q)
    torch.testing.assert_close(p, plain)
