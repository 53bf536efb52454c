"""State that is a tree of tensors and plain values, as optimizers of other libraries keep it, survives to the bit."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer.state import States, pack_states, unpack_states
from kvstore_server.optimizer.trees import (
    decode_tree_entry,
    encode_tree_entry,
    flatten_trees,
    unflatten_trees,
)
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer import Trainer
from kvtrainer.errors import OptimizerError, StateFileError
from kvtrainer.optimizer import register
from kvtrainer.states.format import (
    SavedParameter,
    SavedStates,
    pack_state_file,
    read_state_file,
    unpack_state_file,
)
from tests.support.saved_training import by_checkpoint, by_file, by_state_dict, random_steps, weights

TREE = {
    "mode": "fast",
    "empty": "",
    "note": b"\x00\xff",
    "off": None,
    "is_on": True,
    "big": 2**70,
    "inf": -math.inf,
    "zero": -0.0,
    "pair": (1, 2.0, "three"),
    "quant": {"absmax": torch.tensor([1.5, -0.0]), 7: [torch.arange(3), ()], "mode": "slow"},
    "ordered": OrderedDict([("b", torch.tensor(2, dtype=torch.int64)), ("a", {})]),
    "history": [torch.tensor([[True]]), [torch.zeros(0)], torch.tensor(3.0, dtype=torch.bfloat16)],
}
[SLICE] = make_plan([TensorSpec("w", (16,), "float32")], 1).slices


def is_same(one: Any, other: Any) -> bool:
    """Whether two trees are equal to the bit, with the same kinds of containers in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)


@partial(register, elementwise=False)
class Quantised(torch.optim.Optimizer):
    """SGD with a momentum in eighths, whose scale, history and mode lie in trees; `step` counts nothing."""

    def __init__(self, params: Any, lr: float = 0.125, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.direction(p, group["momentum"]), alpha=group["lr"])

    def direction(self, p: Any, momentum: float) -> Tensor:
        state = self.state[p]
        if not state:
            quant = {"code": torch.zeros_like(p, dtype=torch.int8), "absmax": [torch.zeros_like(p)]}
            state.update(quant=quant, mode="fast", seen=((), b"\x01"), count={"n": 0})
        assert (state["mode"], type(state["seen"])) == ("fast", tuple), state
        quant = state["quant"]
        value = quant["code"].float() / 8 * quant["absmax"][0] * momentum + p.grad
        scale = value.abs().clamp(min=2.0**-20)
        quant["code"].copy_((value / scale * 8).round())
        quant["absmax"][0].copy_(scale)
        state["seen"] = (*state["seen"], float(value.sum() > 0))
        state["count"]["n"] += 1
        return value


@partial(register, elementwise=True)
class Elementwise(Quantised):
    """The same, without what depends on neighbours, and declared to be so."""

    def direction(self, p: Any, momentum: float) -> Tensor:
        found = super().direction(p, momentum)
        self.state[p]["seen"] = ()
        return found


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 30), nn.Linear(30, 1)).to(dtype)


IN_STORE = {"kvstore": "local", "update_on_kvstore": True}


@pytest.mark.parametrize("way", [by_file, by_state_dict, by_checkpoint])
@pytest.mark.parametrize("where", [{}, IN_STORE], ids=["here", "in a store"])
@pytest.mark.parametrize("cls", [Quantised, Elementwise])
def test_training_goes_on_from_trees(
    cls: Any, where: dict[str, Any], way: Callable[..., None], tmp_path: Path
) -> None:
    expected = net()
    random_steps(expected, cls(expected.parameters()), *range(5))

    first, second = net(), net()
    with Trainer(first, cls, {}, **where) as trainer, Trainer(second, cls, {}, **where) as other:
        random_steps(first, trainer, 0, 1, 2)
        second.load_state_dict(first.state_dict())
        way(trainer, other, tmp_path / "states")
        there, here = trainer.state_dict()["state"], other.state_dict()["state"]
        assert all(is_same(one, here[at][name]) for at in there for name, one in there[at].items())
        assert (here[0]["mode"], type(here[0]["seen"])) == ("fast", tuple)
        assert here[0]["quant"]["code"].shape == (30, 7)
        random_steps(second, other, 3, 4)
    assert all(map(torch.equal, weights(second), weights(expected)))


def test_half_precision_weights_keep_float32_in_their_trees(tmp_path: Path) -> None:
    model, again = net(torch.bfloat16), net(torch.bfloat16)
    trainer, other = Trainer(model, Quantised, {}), Trainer(again, Quantised, {})
    random_steps(model, trainer, 0, 1)
    by_file(trainer, other, tmp_path / "states")
    there, here = (one.state_dict()["state"][0]["quant"]["absmax"] for one in (trainer, other))
    assert is_same(there, here)
    assert here[0].dtype == torch.float32


class Narrow(torch.optim.Optimizer):
    """Keeps its momentum in bfloat16 beside float32 weights, and says so in text."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(buffer=torch.zeros_like(p, dtype=torch.bfloat16), mode="fast")
            assert (state["buffer"].dtype, state["mode"]) == (torch.bfloat16, "fast")
            p.sub_(state["buffer"].mul_(0.5).add_(p.grad), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("way", [by_file, by_state_dict])
def test_text_and_dtypes_come_back_as_they_were(way: Callable[..., None], tmp_path: Path) -> None:
    first, second = net(), net()
    trainer, other = Trainer(first, Narrow, {}), Trainer(second, Narrow, {})
    random_steps(first, trainer, 0, 1)
    second.load_state_dict(first.state_dict())
    way(trainer, other, tmp_path / "states")
    assert other.state_dict()["state"][0]["mode"] == "fast"
    random_steps(first, trainer, 2)
    random_steps(second, other, 2)
    assert all(map(torch.equal, weights(first), weights(second)))


class Slow(torch.optim.SGD):
    """Like Lookahead: keeps slow weights in attributes and in its own state_dict, by parameter."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.by_name = {"first": torch.arange(3.0), "ids": (1, torch.arange(4))}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "by_name": self.by_name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow, self.by_name = state_dict["slow"], state_dict["by_name"]
        super().load_state_dict({n: v for n, v in state_dict.items() if n in ("state", "param_groups")})


def test_an_instances_own_tensors_are_saved_with_its_state_dict(tmp_path: Path) -> None:
    first, second = net(), net()
    mine, theirs = Slow(first.parameters()), Slow(second.parameters())
    trainer, other = Trainer(first, mine), Trainer(second, theirs)
    random_steps(first, trainer, 0)
    with torch.no_grad():
        mine.slow[0][0].fill_(3.0)
    by_file(trainer, other, tmp_path / "states")
    assert is_same(theirs.slow, mine.slow)
    assert is_same(theirs.by_name, mine.by_name)


@partial(register, elementwise=False)
class Maps(torch.optim.SGD):
    """Like an 8-bit Adam: has lookup tables in a dict, equal in every instance."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr)
        self.name2qmap = {"signed": torch.linspace(-1, 1, 256), "unsigned": torch.linspace(0, 1, 256)}


@pytest.mark.parametrize("where", [{}, IN_STORE], ids=["here", "in a store"])
def test_an_instance_with_lookup_tables_is_saved_as_a_class(where: dict[str, Any], tmp_path: Path) -> None:
    model, again = net(), net()
    with (
        Trainer(model, Maps(model.parameters()), **where) as trainer,
        Trainer(again, Maps, {"lr": 0.5}, **where) as other,
    ):
        random_steps(model, trainer, 0)
        random_steps(again, other, 0)
        trainer.save_states(tmp_path / "instance")
        other.save_states(tmp_path / "class")
    assert all(map(torch.equal, weights(model), weights(again)))
    assert read_state_file(tmp_path / "instance").optimizer == read_state_file(tmp_path / "class").optimizer


def test_a_tree_goes_through_a_file_to_the_bit() -> None:
    states = SavedStates({"name": "x"}, 0, [{}], {"w": SavedParameter((2,), "float32", 0, TREE)})
    found = unpack_state_file(*pack_state_file(states)).parameters["w"].state
    assert all(is_same(found[name], value) for name, value in TREE.items())
    assert set(found) == set(TREE)


def test_a_tree_goes_to_a_server_and_back_to_the_bit() -> None:
    states = States.of_slice(SLICE)
    states.entries[0], states.steps[0] = flatten_trees(TREE), 1
    found = unflatten_trees(unpack_states(SLICE, *pack_states(states)).entries[0])
    assert all(is_same(found[name], value) for name, value in TREE.items())
    assert set(found) == set(TREE)


@pytest.mark.parametrize(
    "text",
    [
        '{"$tree": ["list", [["tensor", "elsewhere"]]]}',
        '{"$tree": ["list", [["tensor", "a"], ["tensor", "a"]]]}',
        '{"$tree": ["set", []]}',
        '{"$tree": ["dict", [[["list", []], 1]]]}',
        '{"$tree": [1]}',
        '{"$bytes": "0g"}',
        "nothing",
        "[" * 100_000,
    ],
)
def test_a_tree_that_makes_no_sense_is_refused_before_anything_uses_it(text: str) -> None:
    summary = {"steps": [1], "entries": [{"t": [text, "json"], "a": [1, "int64"]}], "tensors": []}
    with pytest.raises(ProtocolError):
        unpack_states(SLICE, summary, b"")


def test_names_that_are_taken_are_no_obstacle() -> None:
    tree = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(1), "a.b'": 5, "a.": [torch.arange(2)]}
    assert is_same(dict(sorted(unflatten_trees(flatten_trees(tree)).items())), dict(sorted(tree.items())))


def test_what_is_no_tree_stays_as_it_is() -> None:
    assert [decode_tree_entry(encode_tree_entry(value)) for value in (1, 1.5, "x", None, True, b"y")] == [
        1,
        1.5,
        "x",
        None,
        True,
        b"y",
    ]
    assert decode_tree_entry([1, 2]) == [1, 2]  # as files of earlier releases have it


@partial(register, elementwise=False)
class Odd(torch.optim.SGD):
    """Keeps what is neither a tensor nor plain."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["odd"] = [object()]


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    model = net()
    trainer = Trainer(model, Odd, {"lr": 0.5})
    random_steps(model, trainer, 0)
    with pytest.raises(StateFileError, match=r"'odd' of '0\.weight'.*builtins\.object"):
        trainer.save_states(tmp_path / "states")
    assert not list(tmp_path.iterdir())


def test_a_store_refuses_what_it_could_not_send() -> None:
    model = net()
    with Trainer(model, Odd, {"lr": 0.5}, **IN_STORE) as trainer, pytest.raises(OptimizerError, match="odd"):
        random_steps(model, trainer, 0)
