"""Parameter groups that a script edits in place; the oracle is torch's optimizer, edited alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import DataParallel, RowSparseParameter, Trainer
from kvtrainer.errors import ConfigurationError, WeightsWrittenError
from kvtrainer.kvstore import create
from tests.support.capabilities import SumStore
from tests.support.scalar_training import IN_STORE, trainer_of, values

Edit = Callable[[Any, list[Parameter]], None]
"""Edits an optimizer, which has the first two of four parameters, in a group each."""


def append(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(given[2])


def insert_in_front(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups[1]["params"].insert(0, given[2])


def replace_list(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups[1]["params"] = [given[3], given[1]]


def replace_parameter(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"][0] = given[2]


def remove(optimizer: Any, given: list[Parameter]) -> None:
    del optimizer.param_groups[1]["params"][0]


def remove_group(optimizer: Any, given: list[Parameter]) -> None:
    del optimizer.param_groups[0]


def move(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())


def swap_groups(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups.reverse()


def add_group(optimizer: Any, given: list[Parameter]) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [given[2], given[3]], "lr": 0.125})


def assign_groups(optimizer: Any, given: list[Parameter]) -> None:
    first, second = optimizer.param_groups
    optimizer.param_groups = [second, {**first, "params": [given[3]]}]


def edit_many(optimizer: Any, given: list[Parameter]) -> None:
    move(optimizer, given)
    append(optimizer, given)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [given[3]], "lr": 0.125})
    optimizer.param_groups[0]["params"].reverse()


EDITS: list[Edit] = [
    append, insert_in_front, replace_list, replace_parameter, remove, remove_group, move, swap_groups, add_group,
    assign_groups, edit_many,
]  # fmt: skip


def parameters() -> list[Parameter]:
    return [Parameter(torch.full((size,), float(size))) for size in (1, 2, 3, 4)]


def groups_of(given: Sequence[Parameter]) -> list[dict[str, Any]]:
    return [{"params": [given[0]]}, {"params": [given[1]], "lr": 0.25}]


def train(optimizer: Any, given: Sequence[Parameter], slope: float) -> None:
    optimizer.zero_grad()
    # Some of the parameters are in no group, and have a gradient all the same.
    torch.stack([(p * p).sum() * slope for p in given]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for p in given:
        p.grad = None


@IN_STORE
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_edited_groups_are_trained_as_torch_does(kind: str, edit: Edit, in_store: bool) -> None:
    mine, twins = parameters(), parameters()
    options = {"SGD": {"lr": 0.5, "momentum": 0.5}, "Adam": {"lr": 0.5}}[kind]
    trainer = trainer_of(groups_of(mine), f"torch:{kind}", options, in_store)
    oracle = getattr(torch.optim, kind)(groups_of(twins), **options)
    for optimizer, given in ((trainer, mine), (oracle, twins)):
        for slope in (0.25, 0.125):
            train(optimizer, given, slope)
        edit(optimizer, given)
        for slope in (0.25, -0.125):
            train(optimizer, given, slope)
    for got, expected in zip(mine, twins, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert len(trainer.state_dict()["state"]) == sum(len(group["params"]) for group in trainer.param_groups)
    trained = [p for group in trainer.param_groups for p in group["params"]]
    counts = [int(saved.state["step"]) for saved in trainer.export_saved_states().parameters.values()]
    assert sorted(counts) == sorted(4 if any(p is one for one in mine[:2]) else 2 for p in trained)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.state_dict(),
        lambda trainer: trainer.describe_params(),
        lambda trainer: trainer.export_saved_states(),
        lambda trainer: dict(trainer.state),
        lambda trainer: trainer.set_data(),
        lambda trainer: trainer.load_state_dict(trainer.state_dict()),
        lambda trainer: trainer.update(),
        lambda trainer: trainer.allreduce_grads(),
        lambda trainer: trainer.add_param_group({"params": [Parameter(torch.zeros(1))]}),
    ],
)
def test_every_call_that_needs_the_groups_follows_an_edit(call: Callable[[Trainer], Any]) -> None:
    a, b, c, _ = parameters()
    trainer = Trainer([a, b], "torch:SGD", {"lr": 1.0, "momentum": 0.5}, kvstore=None)
    trainer.param_groups[0]["params"][:] = [c, a]
    call(trainer)
    assert [p.tolist() for p in trainer.param_groups[0]["params"][:2]] == [[3.0, 3.0, 3.0], [1.0]]
    c.sum().backward()  # type: ignore[no-untyped-call]
    trainer.step()
    assert values([c[:1]]) == [2.0]
    assert b.tolist() == [2.0, 2.0]


def test_names_stay_with_parameters_and_one_that_replaces_another_has_its_name() -> None:
    a, b, c, d = parameters()
    trainer = Trainer([("a", a), ("b", b)], "sgd", kvstore=None)
    trainer.param_groups[0]["params"] = [c, b, d]  # c is where a was
    trainer.state_dict()
    assert trainer.param_groups[0]["param_names"] == ["a", "b", "2"]
    del trainer.param_groups[0]["params"][1]
    trainer.add_param_group({"params": [b]})
    assert [group["param_names"] for group in trainer.param_groups] == [["a", "2"], ["3"]]


def test_names_that_the_script_edits_too_are_taken() -> None:
    a, b, c, _ = parameters()
    trainer = Trainer([("a", a), ("b", b)], "sgd", kvstore=None)
    group = trainer.param_groups[0]
    group["params"][:], group["param_names"] = [b, c], ["b", "c"]
    assert trainer.state_dict()["param_groups"][0]["param_names"] == ["b", "c"]
    trainer.param_groups.append({"params": [("again", a)]})
    assert trainer.state_dict()["param_groups"][1]["param_names"] == ["again"]


def test_new_group_gets_the_defaults_and_gluons_spellings() -> None:
    a, b, c, _ = parameters()
    trainer = Trainer([a], "sgd", {"learning_rate": 1.0, "momentum": 0.5}, kvstore=None)
    trainer.param_groups += [{"params": b, "learning_rate": 0.5}, {"params": (p for p in [c])}]
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    trainer.step(1)
    assert [p[0].item() for p in (a, b, c)] == [0.0, 1.5, 2.0]
    assert [group["lr"] for group in trainer.param_groups] == [1.0, 0.5, 1.0]
    assert [group["momentum"] for group in trainer.param_groups] == [0.5] * 3


@IN_STORE
def test_parameter_that_was_taken_out_keeps_its_value_and_its_state_if_it_comes_back(in_store: bool) -> None:
    given, twins = parameters(), parameters()
    trainer = trainer_of(given[:2], "torch:SGD", {"lr": 0.5, "momentum": 0.5}, in_store)
    oracle = torch.optim.SGD(twins[:2], lr=0.5, momentum=0.5)
    for optimizer, its in ((trainer, given), (oracle, twins)):
        train(optimizer, its, 0.25)
        a = optimizer.param_groups[0]["params"].pop(0)
        train(optimizer, its, 0.25)
        optimizer.param_groups[0]["params"].append(a)
        train(optimizer, its, 0.25)
    assert [p.tolist() for p in given] == [p.tolist() for p in twins]


def test_parameter_that_was_taken_out_does_not_hold_the_memory_of_the_others() -> None:
    a, b, *_ = parameters()
    trainer = Trainer([a, b], "sgd", kvstore=None)
    flat = trainer._pipeline.memory.arena.weights["float32"]
    trainer.param_groups[0]["params"].pop(0)
    trainer.state_dict()
    flat.fill_(7.0)
    assert (a.tolist(), b.tolist()) == ([1.0], [2.0, 2.0])


def test_parameter_that_another_trainer_has_as_well_stays_there_when_it_is_taken_out() -> None:
    a, b, *_ = parameters()
    first = Trainer([a, b], "sgd", {"learning_rate": 1.0}, kvstore=None)
    second = Trainer([a], "sgd", {"learning_rate": 1.0}, kvstore=None)
    first.param_groups[0]["params"].pop(0)
    first.state_dict()
    a.grad = torch.ones(1)
    second.step(1)
    assert a.tolist() == [0.0]


def test_gradient_that_was_used_stays_used_and_a_new_one_stays_new() -> None:
    a, b, c, _ = parameters()
    trainer = Trainer([a, b], "sgd", {"learning_rate": 1.0}, kvstore=None)
    a.grad, b.grad = torch.ones(1), torch.ones(2)
    trainer.step(1)
    b.sum().backward()  # type: ignore[no-untyped-call]
    trainer.param_groups[0]["params"].insert(0, c)
    trainer.step()
    assert (a.tolist(), b.tolist(), c.tolist()) == ([0.0], [0.0, 0.0], [3.0, 3.0, 3.0])


MISUSES: dict[str, Callable[[list[Any], list[Parameter]], object]] = {
    "a parameter twice": lambda groups, given: groups[1]["params"].append(given[0]),
    "the result of a computation": lambda groups, given: groups[1]["params"].append(given[0] * 2),
    "a number for a parameter": lambda groups, given: groups[1]["params"].append(3),
    "no list": lambda groups, given: groups[1].update(params=None),
    "no groups": lambda groups, given: groups.clear(),
    "no params": lambda groups, given: groups[0].pop("params"),
    "no rate": lambda groups, given: groups[0].pop("lr"),
    "no dict": lambda groups, given: groups.append([given[2]]),
    "an unknown option": lambda groups, given: groups.append({"params": [given[2]], "learning_rat": 1.0}),
    "a dtype": lambda groups, given: groups[0]["params"].append(
        Parameter(torch.zeros(1, dtype=torch.complex64))
    ),
    "a device": lambda groups, given: groups[0]["params"].append(Parameter(torch.zeros(1, device="meta"))),
    "rows": lambda groups, given: groups[0]["params"].append(RowSparseParameter((2, 2))),
}


@pytest.mark.parametrize("misuse", MISUSES.values(), ids=MISUSES)
def test_groups_that_cannot_be_trained_are_one_typed_error_until_they_are_put_back(misuse: Any) -> None:
    given = parameters()
    trainer = Trainer(groups_of(given), "sgd", {"learning_rate": 0.5}, kvstore=None)
    sound = [{**group, "params": list(group["params"])} for group in trainer.param_groups]
    misuse(trainer.param_groups, given)
    for p in given:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            trainer.step(1)
    assert [p[0].item() for p in given] == [1.0, 2.0, 3.0, 4.0]
    trainer.param_groups[:] = sound
    trainer.step(1)
    assert [p[0].item() for p in given] == [0.5, 1.75, 3.0, 4.0]


def test_edit_is_refused_where_a_store_cannot_lay_out_its_table_again() -> None:
    a, b, *_ = parameters()
    trainer = Trainer([a], "sgd", {"learning_rate": 1.0}, kvstore=SumStore())
    trainer.param_groups[0]["params"].append(b)  # before the first step it goes everywhere
    a.grad, b.grad = torch.ones(1), torch.ones(2)
    trainer.step(1)
    trainer.param_groups[0]["params"].pop()
    with pytest.raises(ConfigurationError):
        trainer.step(1)


def test_weights_that_were_written_are_published_before_groups_are_edited() -> None:
    a, b, *_ = parameters()
    trainer = Trainer([a], "sgd", kvstore=create("local"), update_on_kvstore=True)
    a.grad = torch.ones(1)
    trainer.step(1)
    with torch.no_grad():
        a.zero_()
    trainer.param_groups[0]["params"].append(b)
    with pytest.raises(WeightsWrittenError):
        trainer.step(1)


def test_lists_of_replicas_are_not_edited() -> None:
    net = DataParallel(torch.nn.Linear(2, 1), ["cpu", "cpu"])
    trainer = Trainer(net, "sgd", kvstore="device")
    trainer.param_groups[0]["params"].append(Parameter(torch.zeros(1)))
    with pytest.raises(ConfigurationError):
        trainer.state_dict()


def densify(optimizer: Any, at: int, rows: torch.Tensor) -> None:
    """Append rows to a parameter as implementations of 3D Gaussian splatting do: a new one, and its state by hand."""
    group = optimizer.param_groups[at]
    old = group["params"][0]
    stored = optimizer.state.get(old, None)
    grown = Parameter(torch.cat([old.detach(), rows]))
    if stored:
        for name in ("exp_avg", "exp_avg_sq"):
            stored[name] = torch.cat([stored[name], torch.zeros_like(rows)])
        del optimizer.state[old]
    group["params"][0] = grown
    if stored:
        optimizer.state[grown] = stored


def prune(optimizer: Any, at: int, mask: torch.Tensor) -> None:
    """Keep some rows, as gsplat does: the group first, then the state of the former parameter."""
    group = optimizer.param_groups[at]
    old = group["params"][0]
    kept = Parameter(old.detach()[mask])
    group["params"] = [kept]
    state = optimizer.state[old]
    del optimizer.state[old]
    optimizer.state[kept] = {n: v if n == "step" else v[mask] for n, v in state.items()}


# As in torch, a step right after all parameters were replaced has no gradients.
@pytest.mark.filterwarnings("ignore::kvtrainer.errors.NoGradientWarning")
@IN_STORE
def test_densification_and_pruning_of_point_clouds_train_as_in_torch(in_store: bool) -> None:
    def run(make: Callable[[list[dict[str, Any]]], Any]) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(3)
        groups = [
            {"params": [Parameter(torch.randn(5, 3, generator=draw))], "lr": 0.25, "name": "xyz"},
            {"params": [Parameter(torch.randn(5, 1, generator=draw))], "lr": 0.125, "name": "opacity"},
        ]
        optimizer = make(groups)
        for number in range(1, 9):
            xyz, opacity = (group["params"][0] for group in optimizer.param_groups)
            ((xyz - 1).pow(2).sum() + (opacity * xyz.sum(-1, keepdim=True)).pow(2).sum()).backward()
            if number % 2 == 0:
                for at, width in enumerate((3, 1)):
                    densify(optimizer, at, torch.randn(2, width, generator=draw))
            if number % 4 == 0:
                mask = torch.arange(len(optimizer.param_groups[0]["params"][0])) % 3 > 0
                for at in range(2):
                    prune(optimizer, at, mask)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return [group["params"][0].detach() for group in optimizer.param_groups]

    options = {"lr": 0.0, "eps": 1e-8}
    got = run(lambda groups: trainer_of(groups, "torch:Adam", options, in_store))
    expected = run(lambda groups: torch.optim.Adam(groups, **options))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_appended_to_the_groups_of_a_torch_instance_are_trained() -> None:
    a, b, c, _ = parameters()
    instance = torch.optim.SGD([a], lr=1.0)
    trainer = Trainer([a], instance, kvstore=None)
    instance.param_groups[0]["params"].append(b)
    instance.add_param_group({"params": [c], "lr": 0.5})
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    trainer.step()
    assert [p[0].item() for p in (a, b, c)] == [0.0, 1.0, 2.5]


def test_groups_of_a_class_that_is_updated_as_a_whole_are_followed() -> None:
    class Halving(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1.0) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        state = self.state[p]
                        state["n"] = state.get("n", 0) + 1
                        p.data -= group["lr"] * p.grad / state["n"]

    given, twins = parameters(), parameters()
    trainer = Trainer(groups_of(given), Halving, {"lr": 0.5}, kvstore=None)
    oracle = Halving(groups_of(twins), lr=0.5)
    for optimizer, its in ((trainer, given), (oracle, twins)):
        train(optimizer, its, 0.25)
        move(optimizer, its)
        append(optimizer, its)
        train(optimizer, its, 0.25)
        del optimizer.param_groups[0]["params"][0]
        train(optimizer, its, 0.25)
    assert [p.tolist() for p in given] == [p.tolist() for p in twins]
    assert len(trainer.state_dict()["state"]) == 2
