"""Training goes on from a file of states or a checkpoint of torch as if it had never been interrupted.

Also what compression holds back of a worker's gradients; all of it within one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn import Parameter

from kvstore_server.optimizer import Optimizer
from kvtrainer import Trainer, kvstore
from kvtrainer.errors import StateMismatchError
from kvtrainer.states.format import SavedStates, read_state_file, write_state_file
from kvtrainer.trainer.saving import saved_residuals
from tests.support.one_in import one_in
from tests.support.pairwise import pairwise
from tests.support.saved_training import (
    ELEMENTWISE,
    MATRICES_ONLY,
    PLACES,
    WHOLE,
    Net,
    same,
    train,
    trainer_of,
    weights,
)


@PLACES
def test_half_precision_key_without_updates_is_saved(uok: bool | None, tmp_path: Path) -> None:
    """It shares a slice with them, and so has a master."""
    net = Net(dtype=torch.float16)
    net.outer.bias.requires_grad_(False)
    trainer = Trainer(
        net,
        "adam",
        {"multi_precision": True},
        kvstore=None if uok is None else kvstore.create("local"),
        update_on_kvstore=uok,
    )
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    assert read_state_file(tmp_path / "states").parameters["outer.bias"].state == {}
    trainer.load_states(tmp_path / "states")
    assert set(trainer.state_dict()["state"]) == {0, 1, 2, 3}


def test_states_of_half_precision_weights_go_on_in_float32(tmp_path: Path) -> None:
    net, again = Net(dtype=torch.bfloat16), Net()
    trainer = trainer_of(net, "adam", multi_precision=True)
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    other = trainer_of(again, "adam")
    other.load_states(tmp_path / "states")
    shown, expected = other.state_dict()["state"][1], trainer.state_dict()["state"][1]
    assert shown.keys() == expected.keys() - {"master"}
    assert shown["exp_avg"].equal(expected["exp_avg"])
    train(again, other, 2, 1)
    assert other.state_dict()["state"][1]["step"] == 3


def test_order_of_parameters_does_not_matter(tmp_path: Path) -> None:
    net = Net()
    trainer = Trainer(dict(net.named_parameters()), "adam")
    train(net, trainer, 0, 2)
    trainer.save_states(tmp_path / "states")
    again = Net()
    again.load_state_dict(net.state_dict())
    other = Trainer(list(again.named_parameters())[::-1], "adam")
    other.load_states(tmp_path / "states")
    train(net, trainer, 2, 2)
    train(again, other, 2, 2)
    assert same(weights(again), weights(net))


def test_optimizer_that_cannot_be_tried_on_zeros_is_saved_all_the_same(tmp_path: Path) -> None:
    class Picky(Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            if not grad.any():
                raise ArithmeticError("nothing to do")
            state["seen"] = state.get("seen", torch.zeros_like(grad)) + grad
            weight.sub_(state["seen"])

    runs = []
    for is_interrupted in (False, True):
        net = nn.Linear(2, 1)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        trainer = Trainer(net, Picky())
        for i in range(4):
            if is_interrupted and i == 2:
                trainer.save_states(tmp_path / "states")
                trainer = Trainer(net, Picky())
                trainer.load_states(tmp_path / "states")
            trainer.zero_grad()
            net(torch.full((1, 2), 1.0 + i)).sum().backward()
            trainer.step()
        runs.append(weights(net))
    assert same(*runs)


QUIET = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
"""torch.distributed warns that there is no process group, and of its own use of deprecated functions."""


def by_file(net: Net, trainer: Trainer, again: Net, other: Trainer, folder: Path) -> None:
    trainer.save_states(folder / "states")
    again.load_state_dict(net.state_dict())
    other.load_states(folder / "states")


def by_state_dict(net: Net, trainer: Trainer, again: Net, other: Trainer, folder: Path) -> None:
    torch.save(trainer.state_dict(), folder / "states")
    again.load_state_dict(net.state_dict())
    other.load_state_dict(torch.load(folder / "states", weights_only=True))


def by_checkpoint(net: Net, trainer: Trainer, again: Net, other: Trainer, folder: Path) -> None:
    save({"net": net.state_dict(), "trainer": trainer.state_dict()}, checkpoint_id=folder)
    content = {"net": again.state_dict(), "trainer": other.state_dict()}
    load(content, checkpoint_id=folder)
    other.load_state_dict(content["trainer"])


def by_checkpoint_of_objects(net: Net, trainer: Trainer, again: Net, other: Trainer, folder: Path) -> None:
    save({"net": net, "trainer": trainer}, checkpoint_id=folder)
    load({"net": again, "trainer": other}, checkpoint_id=folder)


def by_checkpoint_with_names(net: Net, trainer: Trainer, again: Net, other: Trainer, folder: Path) -> None:
    save({"net": net.state_dict(), "trainer": get_optimizer_state_dict(net, trainer)}, checkpoint_id=folder)
    content: dict[str, Any] = {"net": again.state_dict(), "trainer": get_optimizer_state_dict(again, other)}
    load(content, checkpoint_id=folder)
    set_optimizer_state_dict(again, other, content["trainer"])


WAYS = [by_file, by_state_dict, by_checkpoint, by_checkpoint_of_objects, by_checkpoint_with_names]
UPDATES = [None, False, True]
"""update_on_kvstore; None stands for no store."""


def resumed(
    kind: str, way: Any, source: bool | None, target: bool | None, folder: Path, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The weights after six steps, and after three of them and three of another Trainer that took over."""
    dtype = options.pop("dtype", torch.float32)
    net, again = (Net(kind not in MATRICES_ONLY, dtype) for _ in range(2))
    with torch.no_grad():
        for p in again.parameters():
            p.add_(1.0)
    trainer, other = trainer_of(net, kind, source, **options), trainer_of(again, kind, target, **options)
    train(net, trainer, 0, 3)
    trainer.zero_grad()
    way(net, trainer, again, other, folder)
    train(net, trainer, 3, 3)
    train(again, other, 3, 3)
    return weights(net), weights(again)


GRID = [
    (kind, way, *places) for kind, way, *places in pairwise([*ELEMENTWISE, *WHOLE], WAYS, UPDATES, UPDATES)
]


@QUIET
@pytest.mark.parametrize(("kind", "way", "source", "target"), one_in(2, GRID))
def test_training_goes_on_bit_for_bit_with_or_without_a_store(
    kind: str, way: Any, source: bool | None, target: bool | None, tmp_path: Path
) -> None:
    assert same(*resumed(kind, way, source, target, tmp_path))


@pytest.mark.parametrize(
    ("kind", "dtype", "way", "uok"),
    pairwise(["adam", "lamb"], [torch.float16, torch.bfloat16], [by_file, by_state_dict], UPDATES),
)
def test_float32_masters_of_half_precision_weights_are_saved(
    kind: str, dtype: torch.dtype, way: Any, uok: bool | None, tmp_path: Path
) -> None:
    assert same(*resumed(kind, way, uok, uok, tmp_path, dtype=dtype, multi_precision=True))
    if way is by_file:
        master = read_state_file(tmp_path / "states").parameters["inner.weight"].state["master"]
        assert (master.dtype, master.shape) == (torch.float32, (900, 7))


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_loaded_room_is_not_saved_as_state(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(Net(), kind)
    trainer.load_state_dict(trainer.state_dict())
    trainer.save_states(tmp_path / "states")
    assert not any(row.state for row in read_state_file(tmp_path / "states").parameters.values())


def test_parameters_that_are_frozen_get_no_room() -> None:
    net = Net()
    net.inner.weight.requires_grad_(False)
    trainer = Trainer(net, "adam")
    assert set(trainer.state_dict()["state"]) == {0, 2, 3, 4}


def zeros() -> dict[str, Parameter]:
    return {"a": Parameter(torch.zeros(3)), "b": Parameter(torch.zeros(170, 301))}


def compressing(parameters: dict[str, Parameter], kind: str | None = "2bit") -> Trainer:
    params = None if kind is None else {"type": kind}
    return Trainer(
        parameters, "sgd", {"lr": 1.0}, "device", compression_params=params, update_on_kvstore=True
    )


def step(trainer: Trainer, parameters: dict[str, Parameter], gradient: float) -> None:
    for p in parameters.values():
        p.grad = torch.full_like(p, gradient)
    trainer.step(1)


def values(parameters: dict[str, Parameter]) -> list[list[float]]:
    return [p.unique().tolist() for p in parameters.values()]


def replaced(path: Path, **changes: Any) -> None:
    saved = read_state_file(path)
    write_state_file(path, SavedStates(**{**vars(saved), **changes}))


@pytest.mark.parametrize("is_new", [True, False])
def test_residual_goes_on_in_the_trainer_that_loads(is_new: bool, tmp_path: Path) -> None:
    """2bit sends .5 of .75 and keeps .25; with .25 more the next round sends .5 again."""
    parameters, others = zeros(), zeros()
    trainer, other = compressing(parameters), compressing(others)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    if not is_new:
        step(other, others, 0.45)
    other.load_states(tmp_path / "states")
    other.save_states(tmp_path / "again")
    step(other, others, 0.25)
    assert values(others) == [[-0.5], [-0.5]]
    for name in ("states", "again"):
        found = saved_residuals(read_state_file(tmp_path / name), list(parameters))
        assert found is not None
        assert (found.rank, found.num_workers) == (0, 1)
        assert [found.values[0][key].unique().tolist() for key in range(2)] == [[0.25], [0.25]]
        assert [found.values[0][key].shape for key in range(2)] == [p.shape for p in parameters.values()]


@pytest.mark.parametrize("is_new", [True, False])
def test_residual_of_another_rank_is_dropped(
    is_new: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters, others = zeros(), zeros()
    trainer, other = compressing(parameters), compressing(others)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    replaced(tmp_path / "states", extra={"residuals": {"rank": 1, "num_workers": 2}})
    if not is_new:
        step(other, others, 0.45)
    other.load_states(tmp_path / "states")
    step(other, others, 0.25)
    assert "on rank 1 of 2; rank 0 of 1 starts with nothing kept back" in caplog.text
    assert values(others) == [[0.0], [0.0]]


def test_states_without_residuals_leave_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters, plain = zeros(), zeros()
    trainer, uncompressed = compressing(parameters), compressing(plain, None)
    step(uncompressed, plain, 1.0)
    uncompressed.save_states(tmp_path / "states")
    step(trainer, parameters, 0.45)
    trainer.load_states(tmp_path / "states")
    step(trainer, parameters, 0.25)
    assert values(parameters) == [[0.0], [0.0]]
    assert "kept back" not in caplog.text


def test_residuals_are_of_no_use_to_a_trainer_that_does_not_compress(tmp_path: Path) -> None:
    parameters, plain = zeros(), zeros()
    trainer, uncompressed = compressing(parameters), compressing(plain, None)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    uncompressed.load_states(tmp_path / "states")
    step(uncompressed, plain, 0.25)
    assert values(plain) == [[-0.25], [-0.25]]


def test_residual_that_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    parameters = zeros()
    trainer = compressing(parameters)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    tensors = {"residuals": {"a": torch.zeros(4), "c": torch.zeros(1)}}
    replaced(tmp_path / "states", tensors=tensors, extra={"residuals": {"rank": 1}})
    with pytest.raises(
        StateMismatchError,
        match=r"has {'rank': 1}.*residual of 'a' has shape \[4\].*\[3\] here.*residual of 'c'",
    ):
        trainer.load_states(tmp_path / "states")
    step(trainer, parameters, 0.25)
    assert values(parameters) == [[-1.0], [-1.0]]
