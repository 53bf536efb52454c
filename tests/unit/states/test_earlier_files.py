"""The format of saved states, and files that an earlier release wrote, which still load.

`tests/data/earlier_files` has the files, and in numbers.json what they hold and where training went on to from there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvtrainer import Trainer, kvstore
from kvtrainer.errors import StateFileError
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.states.format import SavedParameter, SavedStates, pack_state_file, unpack_state_file
from kvtrainer.strategy import Strategy
from tests.support.strategies import Make, make

__all__ = ["make"]
FILES = Path(__file__).parents[2] / "data" / "earlier_files"
STEPS = 4


class Net(nn.Module):
    """A table, of which a step uses some rows, a matrix and a 0-d scale; nothing in it is random."""

    def __init__(self, dtype: torch.dtype = torch.float32, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=sparse, _weight=_line(6, 2).to(dtype))
        self.matrix = nn.Parameter(_line(2, 5).to(dtype))
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))

    def forward(self, step: int) -> Tensor:
        out = self.table(torch.tensor([step % 6, (step + 2) % 6])) @ self.matrix
        return (out * self.scale + 0.1 * step).square().mean()

    def train_step(self, step: int) -> Tensor:
        return self(step)


def _line(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def adam(net: Net) -> Trainer:
    """With clipping, a loss scale that has grown, windows of accumulation and a schedule; in a store."""
    return Trainer(
        net,
        "adam",
        {"learning_rate": 0.05},
        kvstore=kvstore.create("local"),
        clip_grad={"max_norm": 0.3},
        amp={"init_scale": 8.0, "growth_interval": 2},
        accumulate=2,
        schedules=[{"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5}],
    )


def sgd(net: Net) -> Trainer:
    """With rows, a scheduler of Gluon's kind, and two groups."""
    groups = [{"params": net.table}, {"params": {"matrix": net.matrix, "scale": net.scale}, "wd": 0.1}]
    scheduler = FactorScheduler(2, 0.5, base_lr=0.2)
    return Trainer(groups, "sgd", {"momentum": 0.9, "lr_scheduler": scheduler}, kvstore=None)


def lamb(net: Net) -> Trainer:
    """Whole keys, of half precision with float32 masters."""
    return Trainer(net, "lamb", {"learning_rate": 0.05, "multi_precision": True}, kvstore=None)


class Slowing(torch.optim.Optimizer):
    """A class that nobody knows: it steps along a mean of gradients, ever more slowly."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.pace = 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.5)
                p.sub_(mean, alpha=group["lr"] * self.pace)
        self.pace *= 0.75

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pace = state_dict["pace"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "pace"})


def foreign(net: Net) -> Trainer:
    return Trainer(net, Slowing, {"lr": 0.2}, kvstore=None)


def compressed(net: Net) -> Trainer:
    """Two replicas that hold back what 2 bits cannot say; only the matrix is trained."""
    net.table.requires_grad_(False)
    net.scale.requires_grad_(False)
    other = nn.Parameter(net.matrix.detach().clone())
    net.other = [other]  # type: ignore[assignment]
    compression = {"type": "2bit", "threshold": 0.05}
    return Trainer({"matrix": [net.matrix, other]}, "nag", kvstore="device", compression_params=compression)


Kind = Callable[[Net], Trainer]
KINDS: list[Kind] = [adam, sgd, lamb, foreign, compressed]


def net_of(kind: Kind) -> Net:
    return Net(torch.float16 if kind is lamb else torch.float32, sparse=kind is sgd)


def train(net: Net, trainer: Trainer, steps: Iterable[int]) -> None:
    for step in steps:
        if trainer.loss_scaler is not None:
            trainer.update_params(net(step))
            continue
        net(step).backward()
        for other in getattr(net, "other", ()):
            other.grad = net.matrix.grad * 0.7  # type: ignore[operator]
        trainer.step()


def numbers_of(found: Any) -> Any:
    """The same as JSON would give it back."""
    if isinstance(found, Tensor):
        return found.tolist()
    if isinstance(found, dict):
        return {str(name): numbers_of(value) for name, value in found.items() if name != "param_names"}
    return [numbers_of(one) for one in found] if isinstance(found, list | tuple) else found


def weights(net: nn.Module) -> dict[str, Any]:
    return {name: p.tolist() for name, p in net.named_parameters()}


def load(net: nn.Module, values: dict[str, Any]) -> None:
    net.load_state_dict({name: torch.tensor(value) for name, value in values.items()}, strict=False)


def strategy_of(make: Make) -> tuple[Strategy, Any, Trainer]:
    strategy = make(kvstore="local")
    optim = {"optimizer": {"type": "Adam", "lr": 0.1}, "clip_grad": {"max_norm": 0.1}}
    schedule = {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "end": 5}
    model, trainer, _ = strategy.prepare(
        Net(), optim_wrapper=optim, param_scheduler=schedule, dispatch_kwargs={"max_iters": 20}
    )
    assert isinstance(trainer, Trainer)
    return strategy, model, trainer


def store_of() -> tuple[Any, Callable[[], list[float]]]:
    """A store of two keys with an optimizer, and what pushes to it and reads it."""
    kv = kvstore.create("local")
    kv.init(["a", "b"], [_line(3, 2), _line(4)])
    kv.set_optimizer("adam")

    def push() -> list[float]:
        out = [torch.empty(3, 2), torch.empty(4)]
        kv.pushpull(["a", "b"], [torch.full((3, 2), 0.25), _line(4)], out=out)
        return [number for one in out for number in one.flatten().tolist()]

    return kv, push


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FILES / "numbers.json").read_text())
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_trainer_goes_on_from_an_earlier_file(kind: Kind, numbers: dict[str, Any]) -> None:
    expected = numbers[kind.__name__]
    net = net_of(kind)
    load(net, expected["weights"])
    trainer = kind(net)
    trainer.load_states(FILES / f"{kind.__name__}.states")
    assert numbers_of(trainer.state_dict()["state"]) == expected["state"]
    assert numbers_of(trainer.get_lr()) == expected["lr"]
    if trainer.loss_scaler is not None:
        assert trainer.loss_scaler.loss_scale == expected["loss_scale"]
    train(net, trainer, range(STEPS, 2 * STEPS))
    for name, value in weights(net).items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected["after"][name]))


def test_a_store_goes_on_from_an_earlier_file(numbers: dict[str, Any]) -> None:
    kv, push = store_of()
    kv.load_optimizer_states(FILES / "store.states")
    torch.testing.assert_close(torch.tensor(push()), torch.tensor(numbers["store"]["after"]))


def test_a_strategy_goes_on_from_an_earlier_checkpoint(make: Make, numbers: dict[str, Any]) -> None:
    expected = numbers["strategy"]
    strategy, model, trainer = strategy_of(make)
    assert strategy.resume(str(FILES / "strategy.pt"))["meta"]["iter"] == STEPS
    assert weights(model) == expected["weights"]
    assert numbers_of(trainer.state_dict()["state"]) == expected["state"]
    assert numbers_of(trainer.get_lr()) == expected["lr"]
    for step in range(STEPS, 2 * STEPS):
        trainer.update_params(model(step))
    for name, value in weights(model).items():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(expected["after"][name]))


def saved_of(state: dict[str, Any], name: str = "w", **rest: Any) -> SavedStates:
    parameter = SavedParameter((2,), "float32", 0, state)
    return SavedStates({"name": "adam", "hyper": {"lr": 0.1}}, 7, [{"lr": 0.1}], {name: parameter}, **rest)


def there_and_back(saved: SavedStates) -> SavedStates:
    return unpack_state_file(*pack_state_file(saved))


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["layer.0.weight", "a/b", "a%2Fb", "", "ü ☃", '"quoted"', "../up", "state/w/x"]
)
def test_parameters_and_entries_may_have_any_name(name: str) -> None:
    value = torch.arange(2.0)
    back = there_and_back(saved_of({"step": 3, name: value, f"{name}/x": value + 1}, name))
    assert list(back.parameters) == [name]
    state = back.parameters[name].state
    assert state.keys() == {"step", name, f"{name}/x"}
    assert same(state[name], value)
    assert same(state[f"{name}/x"], value + 1)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3, 4)])
def test_tensors_keep_their_dtype_shape_and_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    value = (10 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    assert same(there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"], value)


@pytest.mark.parametrize("value", [0, 3, -1.5, 1 / 3, 5e-324, math.inf, 2**60])
def test_numbers_stay_exactly_the_numbers_they_are(value: float) -> None:
    back = there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"]
    assert back == value
    assert type(back) is type(value)


def test_whatever_is_saved_beside_the_states_comes_back() -> None:
    options: list[dict[str, Any]] = [
        {"lr": 0.1, "betas": (0.9, 0.99), "clip_gradient": None, "amsgrad": True}
    ]
    parameters = {"b": SavedParameter((), "float16", 0), "a": SavedParameter((2, 3), "float64", 0)}
    extra = {"residuals": {"rank": 1, "num_workers": 2}, "loss_scaler": {"scale": 1024.0}}
    tensors = {"residuals": {"a": torch.ones(2, 3)}, "other/part": {"": torch.zeros(1)}}
    back = there_and_back(SavedStates({"name": "adam"}, 12, options, parameters, extra, tensors))
    assert (back.optimizer, back.num_update, back.groups) == ({"name": "adam"}, 12, options)
    assert (back.parameters, list(back.parameters), back.extra) == (parameters, ["b", "a"], extra)
    assert back.tensors.keys() == tensors.keys()
    assert same(back.tensors["residuals"]["a"], torch.ones(2, 3))
    assert same(back.tensors["other/part"][""], torch.zeros(1))


def test_tensors_that_are_no_rows_in_memory_are_saved_as_they_look() -> None:
    value = torch.arange(6.0).view(2, 3).t()
    assert same(there_and_back(saved_of({"entry": value})).parameters["w"].state["entry"], value)


def test_one_scalar_of_two_entries_becomes_two_scalars() -> None:
    shared = torch.tensor(2.0)
    tensors, _ = pack_state_file(saved_of({"a": shared, "b": shared}))
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 2


def test_value_that_is_neither_tensor_nor_plain_is_refused() -> None:
    with pytest.raises(StateFileError, match="neither a tensor nor plain"):
        pack_state_file(saved_of({}, extra={"code": print}))


def test_text_of_another_program_is_not_taken_for_states() -> None:
    for metadata in ({}, {"format": "pt"}):
        with pytest.raises(StateFileError, match="of something else: save_states did not write it"):
            unpack_state_file({}, metadata)


def test_newer_format_is_refused_by_its_number() -> None:
    tensors, metadata = pack_state_file(saved_of({}))
    with pytest.raises(StateFileError, match=r"version '2' of the format, this kvtrainer reads '1'; update"):
        unpack_state_file(tensors, {**metadata, "version": "2"})


@pytest.mark.parametrize("change", ["bit", "name", "shape", "missing", "additional", "text"])
def test_any_change_of_the_contents_is_noticed(change: str) -> None:
    tensors, metadata = pack_state_file(saved_of({"entry": torch.arange(4.0)}))
    [(name, tensor)] = tensors.items()
    if change == "bit":
        tensor.view(torch.uint8)[5] ^= 1
    elif change == "name":
        tensors = {name[:-1] + "z": tensor}
    elif change == "shape":
        tensors = {name: tensor.view(2, 2)}
    elif change == "missing":
        tensors = {}
    elif change == "additional":
        tensors[name + "z"] = tensor
    else:
        metadata["content"] = metadata["content"].replace("0.1", "0.2", 1)
    with pytest.raises(StateFileError, match="do not have the checksum"):
        unpack_state_file(tensors, metadata)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["parameters"], 3),
        (["parameters", 0, "group"], 1),
        (["parameters", 0, "group"], -1),
        (["parameters", 0, "shape"], ["x"]),
        (["optimizer"], {}),
        (["optimizer", "name"], 5),
        (["groups"], [3]),
        (["num_update"], None),
        (["num_update"], math.inf),
    ],
)
def test_description_that_makes_no_sense_is_refused(path: list[Any], value: Any, monkeypatch: Any) -> None:
    tensors, metadata = pack_state_file(saved_of({}))
    content = json.loads(metadata["content"])
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    monkeypatch.setattr("kvtrainer.states.format.checksum_of_state_file", lambda *_: "0")
    with pytest.raises(StateFileError, match="its description makes no sense"):
        unpack_state_file(tensors, {**metadata, "content": json.dumps(content), "checksum": "0"})


@pytest.mark.parametrize("name", ["state/other/entry", "state/w", "w"])
def test_tensor_of_no_known_parameter_is_refused(name: str, monkeypatch: Any) -> None:
    _, metadata = pack_state_file(saved_of({}))
    monkeypatch.setattr("kvtrainer.states.format.checksum_of_state_file", lambda *_: metadata["checksum"])
    with pytest.raises(StateFileError, match="its description makes no sense"):
        unpack_state_file({name: torch.zeros(2)}, metadata)
