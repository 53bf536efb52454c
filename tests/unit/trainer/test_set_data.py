"""Weights that are set, written or replaced behind the Trainer's back, or published."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from kvtrainer import DataParallel, Trainer, kvstore
from kvtrainer.errors import (
    ConfigurationError,
    KVStoreError,
    NoGradientWarning,
    ParameterMovedError,
    StaleGradientError,
    WeightsWrittenError,
)
from tests.support.pairwise import pairwise
from tests.support.ways_to_train import STORES


def trainer_of(parameters: Any, uok: bool | None = None, kind: str = "sgd", **options: Any) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    return Trainer(parameters, kind, options, kvstore=store, update_on_kvstore=uok)


def step(trainer: Trainer, *parameters: Parameter) -> None:
    for p in parameters:
        p.grad = torch.ones_like(p)
    trainer.step(1)


def zeros(*shape: int) -> Parameter:
    return Parameter(torch.zeros(*shape or (1,)))


@pytest.mark.parametrize("uok", STORES)
def test_momentum_of_all_parameters_survives(uok: bool | None) -> None:
    """MXNet forgets it: after set_data(10) its next step gives 8 and not 7."""
    a, b = zeros(), zeros()
    trainer = trainer_of([a, b], uok, learning_rate=2.0, momentum=0.5)
    step(trainer, a, b)
    with torch.no_grad():
        a.fill_(10)
    trainer.set_data()
    assert (a.item(), b.item()) == (10, -2)
    step(trainer, a, b)
    assert (a.item(), b.item()) == (10 - 1 - 2, -2 - 1 - 2)
    assert [float(state["step"]) for state in trainer.state_dict()["state"].values()] == [2, 2]


@pytest.mark.parametrize("uok", STORES)
def test_values_may_be_given_by_name(uok: bool | None) -> None:
    net = nn.Linear(2, 1)
    trainer = trainer_of(net.named_parameters(), uok, "test", learning_rate=1.0)
    step(trainer, net.weight, net.bias)
    trainer.set_data({"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([5.0], dtype=torch.float64)})
    step(trainer, net.weight, net.bias)
    assert (net.weight.tolist(), net.bias.tolist()) == ([[2, 3]], [4])


@pytest.mark.parametrize("uok", STORES)
def test_float32_masters_follow_the_new_weights(uok: bool | None) -> None:
    p = Parameter(torch.ones(4, dtype=torch.float16))
    trainer = trainer_of([p], uok, learning_rate=1.0, momentum=0.5, multi_precision=True)
    step(trainer, p)
    with torch.no_grad():
        p.fill_(8)
    trainer.set_data()
    step(trainer, p)
    assert p.tolist() == [8 - 1.5] * 4


@pytest.mark.parametrize("uok", STORES)
def test_before_the_first_step_it_makes_the_store_and_changes_nothing_else(uok: bool | None) -> None:
    p = zeros()
    trainer = trainer_of([p], uok, learning_rate=1.0)
    with torch.no_grad():
        p.fill_(4)
    trainer.set_data()
    step(trainer, p)
    assert p.item() == 3


class Leader(kvstore.KVStoreBase):
    """Two workers of which this one is the second; the first one's weights are 5 and its gradients 0."""

    type = "leader"
    rank = 1
    num_workers = 2

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        out.fill_(5)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        if not value.any():  # what a worker that is not the first contributes to new weights
            (value if out is None else out).fill_(7)


def test_weights_of_rank_0_win_over_a_third_party_store() -> None:
    p = zeros()
    trainer = Trainer([p], "sgd", {"lr": 1.0}, kvstore=Leader())
    step(trainer, p)
    assert p.item() == 4
    with torch.no_grad():
        p.fill_(100)
    saved = (p * p).sum()
    trainer.set_data()
    assert p.item() == 7
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weigth": torch.zeros(1, 2)}, r"no parameter 'weigth'; its parameters are weight, bias"),
        (
            {"bias": torch.ones(1), "weight": torch.zeros(2, 1)},
            r"'weight' has shape \[1, 2\], its new value \[2, 1\]",
        ),
        ({"bias": 1.0}, r"'bias' has shape \[1\], its new value float"),
    ],
)
def test_values_that_do_not_fit_are_named_and_nothing_changes(values: Any, message: str) -> None:
    net = nn.Linear(2, 1)
    trainer = trainer_of(net.named_parameters())
    before = [p.tolist() for p in net.parameters()]
    with pytest.raises(ConfigurationError, match=message):
        trainer.set_data(values)
    assert [p.tolist() for p in net.parameters()] == before


def test_data_that_were_replaced_instead_of_written_are_noticed() -> None:
    p = zeros()
    trainer = trainer_of([p], True)
    step(trainer, p)
    p.data = torch.ones(1)
    with pytest.raises(ParameterMovedError):
        trainer.set_data()


def test_closed_trainer_publishes_nothing() -> None:
    trainer = trainer_of([zeros()], True)
    trainer.close()
    with pytest.raises(KVStoreError, match="closed"):
        trainer.set_data()


def trainer_for(net: nn.Module, uok: bool | None) -> Trainer:
    store = None if uok is None else kvstore.create("local")
    return Trainer(net, "sgd", {"lr": 0.1}, kvstore=store, update_on_kvstore=uok)


def backward(net: nn.Module) -> None:
    dtype = next(net.parameters()).dtype
    net(torch.ones(1, 3, dtype=dtype)).sum().backward()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "double": lambda net: net.double(),
    "half and back": lambda net: net.half().float(),
    "new data": lambda net: [setattr(p, "data", p.data.clone()) for p in net.parameters()],
}
STEPS: dict[str, Callable[[Trainer], object]] = {
    "step()": lambda trainer: trainer.step(),
    "step(1)": lambda trainer: trainer.step(1),
    "ignoring": lambda trainer: trainer.step(1, ignore_stale_grad=True),
}


@pytest.mark.parametrize(
    ("move", "how", "uok", "is_late"), pairwise(MOVES, STEPS, [None, False, True], [False, True])
)
def test_moved_data_are_named_in_any_case(move: str, how: str, uok: bool | None, is_late: bool) -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_for(net, uok)
    if is_late:
        backward(net)
        trainer.step()
    MOVES[move](net)
    for _ in range(2):
        backward(net)
        with pytest.raises(ParameterMovedError, match=r"2 of 2 parameters were replaced .*: weight, bias"):
            STEPS[how](trainer)


def replace(net: nn.Module) -> None:
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)


@pytest.mark.parametrize("uok", STORES)
def test_replaced_parameters_are_hinted_at_once_where_nothing_gets_a_gradient(uok: bool | None) -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_for(net, uok)
    replace(net)
    backward(net)
    with pytest.warns(NoGradientWarning, match=r"of the 2 .* load_state_dict\(assign=True\)") as caught:
        trainer.step()
    assert caught[0].filename == __file__
    trainer.step()  # a second warning would be an error here


def test_replaced_parameters_are_hinted_at_by_a_strict_step() -> None:
    net = nn.Linear(3, 2)
    trainer = trainer_for(net, None)
    replace(net)
    backward(net)
    with pytest.raises(StaleGradientError, match=r"2 of 2 .*load_state_dict\(assign=True\)"):
        trainer.step(1)


def test_a_single_stale_parameter_is_not_taken_for_a_replaced_one() -> None:
    net = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    trainer = trainer_for(net, None)
    backward(net[0])
    with pytest.raises(StaleGradientError, match=r"since the last step: 1\.weight, 1\.bias\. If the"):
        trainer.step(1)


def test_a_step_without_gradients_that_is_meant_says_nothing() -> None:
    trainer = trainer_for(nn.Linear(3, 2), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(ignore_stale_grad=True)
        trainer.step(4, ignore_stale_grad=True)
    assert trainer.optimizer.num_update == 0


@pytest.mark.parametrize("count", [1, 2])
def test_two_trainers_take_turns_with_a_parameter_as_in_mxnet(count: int) -> None:
    """Of MXNet 1.9.1 and 2.0.0b1: gradients of 1, learning rates 1 and 0.5."""
    copies = [nn.Parameter(torch.zeros(3)) for _ in range(count)]
    first, second = (
        Trainer([copies], "sgd", {"learning_rate": lr}, update_on_kvstore=False) for lr in (1.0, 0.5)
    )
    seen = []
    for trainer in (first, second, first, first, second):
        for copy_ in copies:
            (copy_ + 1).sum().backward()
        trainer.step(1)
        assert all(torch.equal(copy_, copies[0]) for copy_ in copies)
        seen.append(copies[0][1].item() / count)
    assert seen == [-1, -1.5, -2.5, -3.5, -4]


def test_trainers_of_overlapping_models_train_as_torchs_optimizers_do() -> None:
    """Each has its own order, dtypes and momentum; what both have moves by both."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = copy.deepcopy(net)
    whole = Trainer(net, "torch:SGD", {"lr": 0.1, "momentum": 0.9})
    head = Trainer([net[1].bias, net[0].weight], "torch:Adam", {"lr": 0.01})
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    head_oracle = torch.optim.Adam([plain[1].bias, plain[0].weight], lr=0.01)
    for step in range(6):
        for model in (net, plain):
            model.zero_grad()
            model(torch.ones(1, 3) * step).square().sum().backward()
        (whole if step % 2 else head).step()
        (oracle if step % 2 else head_oracle).step()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)


def test_one_backward_pass_is_fresh_for_each_of_two_trainers() -> None:
    p = nn.Parameter(torch.zeros(1))
    trainers = [Trainer([p], "sgd", {"lr": lr}) for lr in (1.0, 0.5)]
    for _ in range(2):
        (p * 3).sum().backward()
        for trainer in trainers:
            trainer.step(1)
        with pytest.raises(StaleGradientError):
            trainers[0].step(1)
    assert p.item() == -9


def test_a_trainer_goes_on_where_one_that_is_gone_has_left_the_weights() -> None:
    p = nn.Parameter(torch.zeros(2))
    trainer = Trainer([p], "sgd", {"lr": 1.0})
    other = Trainer([p], "sgd", {"lr": 0.5})
    p.sum().backward()
    other.step(1)
    del other
    gc.collect()
    p.grad = None  # whose trainer is gone, so nobody else drops it
    p.sum().backward()
    trainer.step(1)
    assert p.tolist() == [-1.5, -1.5]


def test_no_more_parameters_were_written_to_than_there_are_on_all_devices() -> None:
    model = DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])
    stored = Trainer(model, "sgd", {"lr": 1.0}, kvstore="device", update_on_kvstore=True)
    other = Trainer(model, "sgd", {"lr": 0.5}, kvstore="device")

    def backward() -> None:
        for replica in model.replicas:
            sum(p.sum() for p in replica.parameters()).backward()  # type: ignore[union-attr]

    for trainer in (stored, other):
        backward()
        trainer.step(1)
    backward()
    with pytest.raises(WeightsWrittenError, match=r"^4 of 4 parameters"):
        stored.step(1)


def test_weights_in_a_store_are_not_replaced_by_another_trainers_until_they_are_published() -> None:
    """MXNet lets the store's own weights win, and what the other Trainer did is lost without a word."""
    p = nn.Parameter(torch.zeros(2))
    stored = Trainer([p], "sgd", {"lr": 1.0}, kvstore="local", update_on_kvstore=True)
    other = Trainer([p], "sgd", {"lr": 0.5})
    for trainer in (stored, other):
        p.sum().backward()
        trainer.step(1)
    p.sum().backward()
    with pytest.raises(WeightsWrittenError, match="1 of 1 parameters were written"):
        stored.step(1)
    assert p.tolist() == [-1.5, -1.5]
    stored.set_data()
    stored.step(1)
    assert p.tolist() == [-2.5, -2.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_keep_all_their_bits(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    p = Parameter(bits.clone().view(dtype))
    Trainer([p], "sgd", {"learning_rate": 1.0}, "local", update_on_kvstore=True).set_data()
    assert torch.equal(p.detach().view(torch.int16), bits)
