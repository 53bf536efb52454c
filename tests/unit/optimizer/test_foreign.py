"""Optimizers of torch's kind that nothing here knows: in process they do what torch lets them do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from kvtrainer import DataParallel, Trainer
from kvtrainer.errors import (
    ConfigurationError,
    OptimizerError,
    StateFileError,
    StateMismatchError,
    UnknownNameError,
)
from kvtrainer.registry import OPTIMIZERS
from tests.support.foreign_optimizers import (
    LR,
    Averaged,
    Averaging,
    Composing,
    Configured,
    Fixed,
    Forgetting,
    Hidden,
    LateCount,
    Momentum,
    OwnAdagrad,
    OwnAdam,
    Passing,
    Plain,
    Remembered,
    Renamed,
    Sharing,
    Sharpness,
    Stateless,
    TensorRate,
)
from tests.support.pairwise import pairwise
from tests.support.saved_training import by_checkpoint, by_file, by_state_dict


def net(dtype: torch.dtype = torch.float64) -> nn.Linear:
    made = nn.Linear(2, 2).to(dtype)
    for p in made.parameters():
        nn.init.ones_(p)
    return made


def two_groups(model: nn.Linear) -> list[dict[str, Any]]:
    return [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}]


def loss_of(model: nn.Module, at: int = 0) -> Tensor:
    inputs = torch.tensor([[1.0, -2.0], [0.5, 3.0 + at]], dtype=next(model.parameters()).dtype)
    loss: Tensor = (model(inputs) - 1).square().mean()
    return loss


def evaluates(model: nn.Module, optimizer: Any, at: int = 0) -> Callable[[], Tensor]:
    """A closure: the loss, with its gradients."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, at)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained_by_torch(make: Callable[[nn.Linear], torch.optim.Optimizer], steps: int) -> list[Tensor]:
    model = net()
    go(model, make(model), *range(steps))
    return weights(model)


def go(model: nn.Module, optimizer: Any, *steps: int) -> None:
    """Steps of torch's optimizer, or of a Trainer, whose losses depend on their number alone."""
    for at in steps:
        closure = evaluates(model, optimizer, at)
        optimizer.step(closure) if isinstance(optimizer, AGAIN) else (closure(), optimizer.step())


AGAIN = (Sharpness, torch.optim.LBFGS)


@pytest.mark.parametrize("way", ["type", "class", "instance"])
def test_the_optimizer_of_mmcvs_documentation_trains(way: str) -> None:
    model, options = net(), {"a": 0.25, "b": 1, "c": 0}
    if way == "type":
        OPTIMIZERS.register_module()(Plain)
        trainer = Trainer.from_config(model, {"optimizer": {"type": "Plain", **options}})
    elif way == "class":
        trainer = Trainer(model, Plain, options)
    else:
        trainer = Trainer(model, Plain(model.parameters(), **options))
    for _ in range(2):
        (3 * model.weight.sum() + model.bias.sum()).backward()
        trainer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 - 2 * 0.25 * 4))
    assert torch.equal(model.bias, torch.full_like(model.bias, 1 - 2 * 0.25 * 2))
    assert trainer.last is not None
    assert trainer.last.lr is None
    assert trainer.get_lr() == {"lr": []}


def test_what_needs_a_learning_rate_says_that_there_is_none() -> None:
    model = net()
    trainer = Trainer(model, Plain, {"a": 0.25, "b": 1, "c": "text"})
    for ask in (lambda: trainer.learning_rate, lambda: trainer.set_learning_rate(0.1)):
        with pytest.raises(ConfigurationError, match="learning rate"):
            ask()
    model.bias.lr_mult = 2.0  # type: ignore[assignment]
    loss_of(model).backward()
    with pytest.raises(ConfigurationError, match=r"lr_mult.*'bias'"):
        trainer.step()


@pytest.mark.parametrize("way", ["class", "instance"])
def test_what_a_class_keeps_for_all_parameters_is_kept_as_in_torch(way: str) -> None:
    expected = trained_by_torch(lambda model: Sharing(two_groups(model), mode="sum"), 4)
    model = net()
    if way == "class":
        trainer = Trainer(two_groups(model), Sharing, {"mode": "sum"})
    else:
        trainer = Trainer(model, Sharing(two_groups(model), mode="sum"))
    for at in range(4):
        trainer.update_params(loss_of(model, at))
    assert all(map(torch.equal, weights(model), expected))
    assert [group["k"] for group in trainer.param_groups] == [4, 4]


def test_state_that_the_class_refuses_changes_nothing() -> None:
    model = net()
    trainer = Trainer(model, Sharing)
    trainer.update_params(loss_of(model))
    before = trainer.state_dict()
    with pytest.raises(StateMismatchError, match="'total'"):
        trainer.load_state_dict({"state": {}, "param_groups": before["param_groups"]})
    assert trainer.state_dict()["total"] == before["total"]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.LBFGS(model.parameters(), lr=0.5),
        lambda model: Sharpness(model.parameters()),
    ],
    ids=["LBFGS", "SAM"],
)
def test_a_step_may_evaluate_the_loss_again(make: Any) -> None:
    expected = trained_by_torch(make, 3)
    model = net()
    trainer = Trainer(model, make(model))
    for at in range(3):
        trainer.step(evaluates(model, trainer, at))
    assert all(map(torch.equal, weights(model), expected))


def test_evaluating_the_loss_again_is_refused_beside_clipping() -> None:
    model = net()
    trainer = Trainer(model, torch.optim.LBFGS, {"lr": 0.5}, clip_grad={"max_norm": 1.0})
    before = weights(model)
    with pytest.raises(ConfigurationError, match="clip_grad"):
        trainer.step(evaluates(model, trainer))
    assert all(map(torch.equal, weights(model), before))


def failing(base: Any, kind: type[BaseException]) -> Any:
    """A class like `base` whose steps, while `fails` is true, raise `kind` when they have changed everything."""

    class Failing(base):  # type: ignore[misc]
        fails = False

        def step(self, closure: Any = None) -> None:
            super().step()
            if self.fails:
                raise kind("no")

    return Failing


def test_what_raises_in_the_middle_leaves_everything_as_it_was() -> None:
    Failing = failing(Sharing, RuntimeError)
    model = net()
    trainer = Trainer(model, Failing(model.parameters()))
    trainer.update_params(loss_of(model))
    before, state = weights(model), trainer.state_dict()
    Failing.fails = True
    with pytest.raises(OptimizerError, match="RuntimeError"):
        trainer.update_params(loss_of(model))
    assert all(map(torch.equal, weights(model), before))
    assert trainer.state_dict()["total"] == state["total"]
    assert trainer.param_groups[0]["k"] == 1


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_what_breaks_off_after_the_update_is_undone(kind: type[BaseException], dtype: torch.dtype) -> None:
    Failing = failing(Plain, kind)
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    options = {"a": 2.0**-12, "b": 0.0, "c": None, "multi_precision": dtype is torch.float16}
    trainer = Trainer([weight], Failing, options, kvstore=None)
    for Failing.fails in (False, True, False):
        weight.grad = torch.ones_like(weight)
        if Failing.fails:
            with pytest.raises((OptimizerError, kind)):
                trainer.step()
        else:
            trainer.step()
    assert weight.tolist() == [1 - 2 * 2.0**-12] * 3


def test_multipliers_of_parameters_divide_a_group_for_the_step_alone() -> None:
    model = net()
    model.bias.lr_mult = 0.5  # type: ignore[assignment]
    trainer = Trainer(model, Sharing)
    (model.weight.sum() + model.bias.sum()).backward()
    trainer.step()
    # The weight's four elements come first, then the bias's two.
    assert torch.allclose(model.weight, torch.full_like(model.weight, 1 - 0.1 * (1 + 0.01 * 4)))
    assert torch.allclose(model.bias, torch.full_like(model.bias, 1 - 0.05 * (1 + 0.01 * 6)))
    assert [len(group["params"]) for group in trainer.param_groups] == [2]
    assert trainer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("store", ["device", "local"])
def test_replicas_are_updated_by_one_optimizer(store: str) -> None:
    expected = trained_by_torch(lambda model: Sharing(model.parameters()), 3)
    model = DataParallel(net(), ["cpu", "cpu"])
    trainer = Trainer(model, Sharing, kvstore=store)
    for at in range(3):
        for replica in model.replicas:
            (loss_of(replica, at) / 2).backward()
        trainer.step()
    for replica in model.replicas:
        assert all(map(torch.equal, weights(replica), expected))
    assert trainer.param_groups[0]["k"] == 3


def test_replicas_without_a_store_have_optimizers_that_share_nothing() -> None:
    twins = [net(), net()]
    pairs = [list(pair) for pair in zip(*(twin.parameters() for twin in twins), strict=True)]
    trainer = Trainer(pairs, Plain, {"a": 0.5, "b": 1.0, "c": 0}, kvstore=None)
    for twin, factor in zip(twins, (1.0, 3.0), strict=True):
        (factor * (twin.weight.sum() + twin.bias.sum())).backward()
    trainer.step()
    assert [twin.weight[0, 0].item() for twin in twins] == [1 - 0.5 * 2, 1 - 0.5 * 4]


@pytest.mark.parametrize("has_masters", [False, True])
def test_half_precision_is_updated_in_float32(has_masters: bool) -> None:
    model = net(torch.float16)
    trainer = Trainer(model, Plain, {"a": 1e-4, "b": 0, "c": 0, "multi_precision": has_masters})
    for _ in range(10):
        (model.weight.sum() + model.bias.sum()).backward()
        trainer.step()
    # The oracle is arithmetic: 1 - 1e-4 rounds to 1 in float16.
    expected = torch.tensor(1 - 10e-4 if has_masters else 1.0, dtype=torch.float16)
    assert torch.equal(model.weight, expected.expand(2, 2))


@pytest.mark.parametrize(
    ("cls", "options"),
    [(Renamed, {"learning_rate": 0.5, "wd": 0.25}), (Passing, {"lr": 0.5, "weight_decay": 0.25})],
)
def test_any_signature_of_a_constructor_will_do(cls: Any, options: dict[str, Any]) -> None:
    model = net()
    trainer = Trainer(model, cls, options)
    (model.weight.sum() + model.bias.sum()).backward()
    trainer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 - 0.5 * 1.25))


def test_a_store_refuses_what_it_could_not_build_when_the_trainer_is_made() -> None:
    model = net()
    cases: list[tuple[Any, dict[str, Any] | None, type[Exception], str]] = [
        (Plain, {"a": 1.0, "b": 0, "c": 0}, UnknownNameError, "--import"),
        (torch.optim.LBFGS, {}, ConfigurationError, "whole model"),
    ]
    for optimizer, options, error, match in cases:
        with pytest.raises(error, match=match):
            Trainer(model, optimizer, options, kvstore="local", update_on_kvstore=True)
    OPTIMIZERS.register_module()(Hidden)
    instance = Hidden(model.parameters(), 1.0, 0, 0, hidden=0.5)
    instance.note = object()  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match=r"'note'.*update_on_kvstore=False"):
        Trainer(model, instance, kvstore="local", update_on_kvstore=True)
    with pytest.raises(ConfigurationError):
        Trainer(model, Hidden, {"a": 1.0, "b": 0, "c": object()}, kvstore="local", update_on_kvstore=True)


@pytest.mark.parametrize("way", ["class", "instance"])
def test_a_store_runs_what_it_can_build_with_the_groups_of_the_trainer(way: str) -> None:
    OPTIMIZERS.register_module()(Remembered)
    model, options = net(), {"a": 0.5, "b": 1.0, "c": "text", "extra": 3.0}
    groups: list[dict[str, Any]] = [
        {"params": [model.weight]},
        {"params": [model.bias], "a": 0.25, "note": "of my own"},
    ]
    given: Any = model if way == "instance" else groups
    optimizer: Any = Remembered(groups, **options) if way == "instance" else Remembered
    with Trainer(
        given, optimizer, None if way == "instance" else options, kvstore="local", update_on_kvstore=True
    ) as trainer:
        (model.weight.sum() + model.bias.sum()).backward()
        trainer.step()
    assert torch.equal(model.weight, torch.full_like(model.weight, 1 - 0.5 * 2))
    assert torch.equal(model.bias, torch.full_like(model.bias, 1 - 0.25 * 2))


@pytest.mark.parametrize(
    ("cls", "mark"),
    [(torch.optim.AdamW, {"decoupled_weight_decay": True}), (torch.optim.SGD, {"lr_scale": 0.5})],
)
def test_what_torch_or_a_script_puts_into_groups_is_resumed(cls: Any, mark: dict[str, Any]) -> None:
    first, resumed = (
        Trainer(model, cls([{"params": list(model.parameters()), **mark}], lr=0.1))
        for model in (net(), net())
    )
    resumed.adopt_saved_states(first.export_saved_states())
    assert mark.items() <= resumed.param_groups[0].items()


FOREIGN = [Averaging, Stateless, OwnAdam, OwnAdagrad, LateCount]


def by_entry(trainer: Any, other: Trainer, path: Path) -> None:
    for mine, theirs in zip(*(one._pipeline.memory.parameters for one in (other, trainer)), strict=True):
        other.state[mine] = dict(trainer.state[theirs])


IN_STORE = {"kvstore": "local", "update_on_kvstore": True}


@pytest.mark.parametrize(
    ("cls", "store", "way"), pairwise(FOREIGN, [{}, IN_STORE], [by_file, by_state_dict, by_entry])
)
def test_a_foreign_class_resumes_as_in_torch(
    cls: Any, store: dict[str, Any], way: Any, tmp_path: Path
) -> None:
    OPTIMIZERS.register_module(force=True)(cls)
    first, second = net(), net()
    with (
        Trainer(first, cls, {"lr": LR}, **store) as trainer,
        Trainer(second, cls, {"lr": LR}, **store) as other,
    ):
        go(first, trainer, *range(3))
        second.load_state_dict(first.state_dict())
        way(trainer, other, tmp_path / "states")
        go(second, other, *range(3, 6))
    expected = trained_by_torch(lambda model: cls(model.parameters(), lr=LR), 6)
    torch.testing.assert_close(weights(second), expected)


@pytest.mark.parametrize("cls", [OwnAdam, OwnAdagrad])
def test_a_store_goes_on_from_the_state_dict_of_a_foreign_class_itself(cls: Any) -> None:
    OPTIMIZERS.register_module(force=True)(cls)
    expected, model = net(), net()
    oracle = cls(expected.parameters(), lr=LR)
    go(expected, oracle, 0)
    model.load_state_dict(expected.state_dict())
    with Trainer(model, cls, {"lr": LR}, **IN_STORE) as trainer:
        trainer.load_state_dict(oracle.state_dict())
        go(model, trainer, 1)
    go(expected, oracle, 1)
    torch.testing.assert_close(weights(model), weights(expected))


def test_what_a_class_takes_out_of_its_groups_stays_out() -> None:
    model = net()
    trainer = Trainer(model, Forgetting, {"a": 0.5, "b": 0.0, "c": "once"})
    found = []
    for _ in range(2):
        (model.weight.sum() + model.bias.sum()).backward()
        trainer.step()
        found.append("c" in trainer.param_groups[0])
        trainer.zero_grad()
    assert found == [False, False]


MODES: list[dict[str, Any]] = [
    {"kvstore": None},
    {"kvstore": "local"},
    {"kvstore": "device"},
    {"optimizer_params": {"multi_precision": True}},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_class", [True, False], ids=["class", "instance"])
def test_modes_are_those_of_the_trainer(options: dict[str, Any], dtype: torch.dtype, is_class: bool) -> None:
    w = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    if not is_class:  # it brings its own options
        options = {name: value for name, value in options.items() if name != "optimizer_params"}
    trainer = Trainer([w], Averaged if is_class else Averaged([w]), **options)
    seen = []
    for step in range(4):
        trainer.train()
        w.grad = torch.ones_like(w)
        trainer.step(1)
        trainer.eval()
        trainer.eval()
        seen.append(w[0].item())
        if step == 2:
            trainer.train()
            seen.append(w[0].item())
    # The weights are -1, -2 and so on; evaluated is their mean.
    assert seen == [-1.0, -1.5, -2.0, -3.0, -2.5]


def test_modes_of_replicas_are_those_of_one() -> None:
    replicas = [[torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]]
    trainer = Trainer(replicas, Averaged, kvstore="device")
    for _ in range(3):
        trainer.train()
        for w in replicas[0]:
            w.grad = torch.ones_like(w)
        trainer.step(2)
        trainer.eval()
    assert [w[0].item() for w in replicas[0]] == [-2.0, -2.0]


def test_what_a_mode_raises_leaves_all_as_it_was_and_other_optimizers_have_none() -> None:
    class Failing(Averaged):
        def _swap(self, is_training: bool) -> None:
            super()._swap(is_training)
            if not is_training:
                raise ValueError("no")

    w = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer([w], Failing)
    trainer.train()
    for _ in range(2):
        w.grad = torch.ones_like(w)
        trainer.step(1)
    with pytest.raises(OptimizerError):
        trainer.eval()
    assert w[0].item() == -2.0
    assert trainer.param_groups[0]["is_training"]
    plain = Trainer([torch.nn.Parameter(torch.zeros(3))], "torch:SGD", {"lr": 1.0})
    plain.train()
    plain.eval()


def test_modes_in_a_store_are_refused() -> None:
    OPTIMIZERS.register_module(force=True)(Averaged)
    w = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer([w], Averaged, kvstore="local", update_on_kvstore=True)
    with trainer, pytest.raises(ConfigurationError):
        trainer.train()


@pytest.mark.parametrize("way", ["class", "instance"])
def test_a_class_that_keeps_options_as_tensors_is_given_tensors_and_may_change_them(way: str) -> None:
    expected, model = net(), net()
    oracle = TensorRate(expected.parameters(), lr=LR)
    trainer = (
        Trainer(model, TensorRate, {"lr": LR})
        if way == "class"
        else Trainer(model, TensorRate(model.parameters(), LR))
    )
    for rate in (LR, LR, LR / 2):
        oracle.param_groups[0]["lr"].fill_(rate)
        trainer.set_learning_rate(rate)
        for one, step in ((expected, oracle.step), (model, trainer.step)):
            one.zero_grad()
            loss_of(one).backward()
            step()
    assert all(map(torch.equal, weights(model), weights(expected)))
    assert trainer.param_groups[0]["scale"] == 1 / 8
    TensorRate(net().parameters()).load_state_dict(trainer.state_dict())
    assert all(isinstance(trainer.state_dict()["param_groups"][0][name], Tensor) for name in ("lr", "scale"))


def test_a_store_gives_a_class_the_tensors_that_it_keeps_as_options() -> None:
    OPTIMIZERS.register_module(force=True)(Fixed)
    model = net()
    before = weights(model)
    with Trainer(model, Fixed, {"lr": 0.5}, kvstore="local", update_on_kvstore=True) as trainer:
        (model.weight.sum() + model.bias.sum()).backward()
        trainer.step()
    assert all(torch.equal(now, former - 0.5) for now, former in zip(weights(model), before, strict=True))


RESUMED: dict[str, tuple[Any, Any, torch.dtype]] = {
    "a state_dict of its own": (lambda model: Trainer(two_groups(model), Sharing), by_state_dict, torch.float64),
    "a state_dict of its own, in a checkpoint": (
        lambda model: Trainer(model, Sharing(two_groups(model))), by_checkpoint, torch.float64,
    ),
    "half precision": (lambda model: Trainer(model, Averaging), by_file, torch.float16),
    "masters": (lambda model: Trainer(model, Averaging, {"multi_precision": True}), by_file, torch.float16),
    "an argument that is no plain value": (
        lambda model: Trainer(model, Configured(model.parameters(), LR)), by_file, torch.float64,
    ),
    "tensors made of others": (lambda model: Trainer(model, Composing), by_state_dict, torch.float64),
}  # fmt: skip


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_has_the_same_bits(case: str, tmp_path: Path) -> None:
    make, way, dtype = RESUMED[case]
    first, second = net(dtype), net(dtype)
    trainer, other = make(first), make(second)
    go(first, trainer, *range(3))
    second.load_state_dict(first.state_dict())
    way(trainer, other, tmp_path / "states")
    for model, one in ((first, trainer), (second, other)):
        go(model, one, *range(3, 6))
    assert all(map(torch.equal, weights(first), weights(second)))


def test_state_in_tensors_made_of_others_goes_into_no_file_and_to_no_store(tmp_path: Path) -> None:
    OPTIMIZERS.register_module(force=True)(Composing)
    model = net()
    trainer = Trainer(model, Composing)
    go(model, trainer, 0)
    with pytest.raises(StateFileError, match="Halves"):
        trainer.save_states(tmp_path / "states")
    other = net()
    with Trainer(other, Composing, {"lr": LR}, **IN_STORE) as stored:
        loss_of(other).backward()
        with pytest.raises(OptimizerError, match="Halves"):
            stored.step()


@pytest.mark.parametrize("trains_on", ["the one that saved", "the one that loaded"])
def test_training_on_leaves_a_state_dict_as_it_was(trains_on: str) -> None:
    model, again = net(), net()
    trainer, other = (Trainer(one, Averaging, {"lr": LR}) for one in (model, again))
    go(model, trainer, 0)
    saved, before = trainer.state_dict(), copy.deepcopy(trainer.state_dict())
    other.load_state_dict(saved)
    go(model, trainer, 1) if trains_on == "the one that saved" else go(again, other, 1)
    torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)


NEW = [Averaging, Stateless, OwnAdam, OwnAdagrad, Momentum]
"""Classes whose first step makes their state, or part of it."""


@pytest.mark.parametrize("cls", NEW)
@pytest.mark.parametrize("writer", ["torch", "trainer"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_new_trainer_loads_a_distributed_checkpoint(cls: Any, writer: str, tmp_path: Path) -> None:
    first, second = net(), net()
    source: Any = (
        cls(first.parameters(), lr=LR) if writer == "torch" else Trainer(first.parameters(), cls, {"lr": LR})
    )
    trainer: Any = Trainer(second.parameters(), cls, {"lr": LR})
    go(first, source, 0, 1)
    source.zero_grad()
    save({"state": get_optimizer_state_dict(first, source)}, checkpoint_id=tmp_path, no_dist=True)
    second.load_state_dict(first.state_dict())
    room = {"state": get_optimizer_state_dict(second, trainer)}
    load(room, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(second, trainer, room["state"])
    for model, optimizer in ((first, source), (second, trainer)):
        go(model, optimizer, 2, 3)
    assert all(map(torch.equal, weights(second), weights(first)))


@pytest.mark.parametrize("way", [by_state_dict, by_file])
@pytest.mark.parametrize("cls", [*NEW, Composing])
def test_states_of_a_new_trainer_leave_what_constructors_made(cls: Any, way: Any, tmp_path: Path) -> None:
    expected, model = net(), net()
    oracle, trainer = cls(expected.parameters(), lr=LR), Trainer(model, cls, {"lr": LR})
    way(Trainer(net(), cls, {"lr": LR}), trainer, tmp_path / "states")
    for one, optimizer in ((expected, oracle), (model, trainer)):
        go(one, optimizer, 0, 1)
    assert all(map(torch.equal, weights(model), weights(expected)))
    for mine, theirs in zip(trainer.state.values(), oracle.state.values(), strict=True):
        assert "step" not in theirs or mine["step"] == theirs["step"]
