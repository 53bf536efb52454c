"""Wrong arguments of the Trainer: named, and refused before the model is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, UnknownNameError

WRONG: dict[str, tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = {
    "no such optimizer": (lambda net: {"optimizer": "sdg"}, UnknownNameError, r"'sdg'.*adam"),
    "no such option": (lambda net: {"optimizer_params": {"lrr": 1}}, ConfigurationError, r"'lrr'.*learning_rate"),
    "options beside an instance": (
        lambda net: {"optimizer": torch.optim.SGD(net.parameters()), "optimizer_params": {"lr": 1}},
        ConfigurationError,
        "must be None if optimizer is an instance",
    ),
    "not for a store": (
        lambda net: {"optimizer": torch.optim.LBFGS, "kvstore": "local", "update_on_kvstore": True},
        ConfigurationError,
        "LBFGS",
    ),
    "no such store": (lambda net: {"kvstore": "bogus"}, UnknownNameError, r"'bogus'.*dist_sync.*local"),
    "store of a wrong type": (lambda net: {"kvstore": 3}, ConfigurationError, "a kvstore or None, got int"),
    "update on no store": (lambda net: {"kvstore": None, "update_on_kvstore": True}, ConfigurationError, "needs a kvs"),
    "update on something": (lambda net: {"update_on_kvstore": "yes"}, ConfigurationError, "or None, got 'yes'"),
    "compression": (
        lambda net: {"kvstore": "local", "compression_params": {"type": "2bit"}},
        ConfigurationError,
        "not supported for this type of kvstore",
    ),
    "kind of compression": (lambda net: {"compression_params": {"type": "3bit"}}, UnknownNameError, "'3bit'.*2bit"),
    "parameters of a wrong type": (lambda net: {"params": 3}, ConfigurationError, "list or dict of .*, got int"),
    "parameter of a wrong type": (lambda net: {"params": [3]}, ConfigurationError, "got int for a parameter"),
    "two devices": (
        lambda net: {"params": [*net.parameters(), Parameter(torch.zeros(1, device="meta"))]},
        ConfigurationError,
        "'2' is on meta but '0' is on cpu",
    ),
    "options that are no dict": (lambda net: {"optimizer_params": [("lr", 1)]}, TypeError, "must be a dict of options"),
    "update with aggregation": (
        lambda net: {"optimizer_params": {"aggregate_num": 4}, "update_on_kvstore": True},
        ConfigurationError,
        "aggregate_num is above 1",
    ),
    "scheduler that is none": (
        lambda net: {"optimizer_params": {"lr_scheduler": 0.1}},
        ConfigurationError,
        "must be a scheduler",
    ),
    "no parameters": (lambda net: {"params": []}, ConfigurationError, "no parameters"),
    "option of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentumm": 1}]},
        ConfigurationError,
        "'momentumm'",
    ),
    "value of a group": (
        lambda net: {"params": [{"params": net.parameters(), "momentum": -1}]},
        ConfigurationError,
        "momentum must be .*got -1",
    ),
    "dtype": (
        lambda net: {"params": [*net.parameters(), Parameter(torch.zeros(1, dtype=torch.complex64))]},
        ConfigurationError,
        "'2' has dtype complex64",
    ),
    "overlap": (
        lambda net: {"params": [*net.parameters(), Parameter(net.weight.data[0])]},  # type: ignore[operator, union-attr, index]
        ConfigurationError,
        "'0' shares memory with '2'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_is_named_and_leaves_the_model_as_it_was(case: str) -> None:
    make, error, message = WRONG[case]
    net = nn.Linear(3, 2)
    before = [(p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for p in net.parameters()]
    arguments = {"params": net.parameters(), "optimizer": "sgd", **make(net)}
    with pytest.raises(error, match=message):
        Trainer(**arguments)
    assert [(p.data_ptr(), p.untyped_storage().data_ptr(), p._version) for p in net.parameters()] == before
    for _ in range(2):
        net(torch.ones(1, 3)).sum().backward()
    bias: Tensor | None = net.bias.grad
    # No hook is left behind that would drop a gradient.
    assert bias is not None
    assert bias.tolist() == [2, 2]
