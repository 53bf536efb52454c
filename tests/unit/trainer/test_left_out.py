"""Frozen parameters of kinds that an arena cannot hold: they stay where they are, and the others are trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError
from tests.support.ways_to_train import STORES, backward, trainer_of


class Quantised(Tensor):
    """As those of bitsandbytes and torchao: a class of their own."""


KINDS: dict[str, Callable[[], Tensor]] = {
    "int8": lambda: torch.arange(3, dtype=torch.int8),
    "int64": lambda: torch.arange(3),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "class of its own": lambda: torch.ones(3).as_subclass(Quantised),
    "rows alone": lambda: torch.eye(3).to_sparse(),
    "repeated": lambda: torch.ones(1).expand(3),
    "elsewhere": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uok", STORES)
def test_frozen_parameter_of_any_kind_stays_where_it_is_beside_trained_ones(
    uok: bool | None, kind: str
) -> None:
    frozen = Parameter(KINDS[kind](), requires_grad=False)
    data, before = frozen.data, None if frozen.is_meta else frozen.detach().to_dense().tolist()
    trained, last = (Parameter(torch.zeros(2)) for _ in range(2))
    with trainer_of([frozen, trained, last], uok, options={"learning_rate": 1.0, "momentum": 0.5}) as trainer:
        for _ in range(2):
            backward(trained)
            backward(last)
            trainer.step(1)
        trainer.set_data()
        other = trainer_of([frozen, trained, last], uok, options={"learning_rate": 1.0, "momentum": 0.5})
        other.load_state_dict(trainer.state_dict())
        other.close()
        with pytest.raises(ConfigurationError):
            trainer.set_data({"0": data})
    assert [p.tolist() for p in (trained, last)] == [[-2.5, -2.5]] * 2
    assert frozen.layout is data.layout
    assert before is None or frozen.detach().to_dense().tolist() == before


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_parameter_of_another_dtype_is_refused_by_name_when_it_is_to_be_trained(dtype: torch.dtype) -> None:
    other = Parameter(torch.ones(2).to(dtype))
    with pytest.raises(ConfigurationError, match=r"'other' \(.*requires_grad_\(False\)"):
        Trainer({"other": other}, "sgd", kvstore=None)
    a = Parameter(torch.zeros(1))
    trainer = Trainer({"a": a, "other": other.requires_grad_(False)}, "sgd", kvstore=None)
    other.requires_grad_(True)
    backward(a)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="'other'"):
            trainer.step()
    other.requires_grad_(False)
    trainer.step()
    assert a.item() == pytest.approx(-0.1)


def test_frozen_parameter_that_becomes_one_that_can_be_held_is_trained_from_then_on() -> None:
    a, b = Parameter(torch.zeros(1)), Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    trainer = Trainer([b, a], "sgd", {"learning_rate": 1.0}, kvstore=None)
    backward(a)
    trainer.step(1)
    b.data = b.float()
    b.requires_grad_(True)
    for p in (a, b):
        backward(p)
    trainer.step(1)
    assert (a.tolist(), b.tolist()) == ([-2.0], [0.0, 0.0])
