"""The state of a whole key: taken out and put back, checked, and shared with nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvstore_server.errors import OptimizerError, ShapeMismatchError
from kvstore_server.optimizer import Optimizer, State, States, create, update_key, update_run
from kvstore_server.plan import TensorSpec, make_plan
from tests.support.optimizer_slices import empty, moved, replace_state, update_slice

CASES: list[tuple[str, dict[str, Any]]] = [
    ("lamb", {"wd": 0.1}),
    ("lans", {"wd": 0.1}),
    ("lars", {"wd": 0.1, "momentum": 0.9}),
    ("groupadagrad", {}),
    ("torch:Muon", {"lr": 0.1}),
    ("torch:Adafactor", {"lr": 0.1}),
    ("adam", {"wd": 0.1}),
    ("torch:NAdam", {"lr": 0.1}),
]


def filled(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer: Optimizer, weight: Tensor, state: State, steps: range) -> None:
    for step in steps:
        update_key(optimizer, weight, filled(3, 5, seed=step), state, {**optimizer.hyper, "key": "w"})


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_the_state_had_never_been_moved(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    optimizer = create(name, multi_precision=True, **options)
    weight, state = filled(3, 5, seed=99).to(dtype), State()
    train(optimizer, weight, state, range(3))
    copy, other = weight.clone(), moved(optimizer, state, weight)
    train(optimizer, weight, state, range(3, 6))
    train(optimizer, copy, other, range(3, 6))
    assert torch.equal(weight, copy)
    assert state.step == other.step == 6
    assert (state.master is None) == (dtype == torch.float32)


def test_a_master_of_another_size_is_refused_and_nothing_changes() -> None:
    [piece] = make_plan([TensorSpec("w", (2, 2), "float16")], 1).slices
    states = States.of_slice(piece)
    with pytest.raises(ShapeMismatchError, match="'master' has 3 elements"):
        replace_state(states, 0, {"step": 5.0, "master": torch.zeros(3)})
    assert states.state_of(0) == {"step": 0.0}


class Keeping(Optimizer):
    """A user's optimizer that keeps what it is told to keep."""

    elementwise = False
    defaults: ClassVar[dict[str, Any]] = {"name": "kept", "what": "shape"}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        values = {
            "shape": torch.ones(2, 3, 4), "number": 2, "grad": grad, "view": weight.view(-1)[:2], "text": "two",
            "sparse": torch.eye(2).to_sparse(),
        }  # fmt: skip
        state[hyper["name"]] = values[hyper["what"]]


@pytest.mark.parametrize("what", ["shape", "number"])
def test_a_users_entry_may_be_a_number_or_have_any_shape(what: str) -> None:
    optimizer, state = Keeping(what=what), State()
    update_key(optimizer, torch.ones(2), torch.ones(2), state, optimizer.hyper)
    assert torch.equal(
        torch.as_tensor(state.values["kept"]), torch.ones(2, 3, 4) if what == "shape" else torch.tensor(2)
    )


@pytest.mark.parametrize(
    ("name", "what", "match"),
    [
        ("kept", "text", "a str into its state as 'kept'"),
        ("kept", "sparse", "a sparse tensor"),
        ("step", "number", "'step'"),
    ],
)
def test_an_entry_that_no_state_can_have_is_refused_with_its_name(name: str, what: str, match: str) -> None:
    optimizer = Keeping(name=name, what=what)
    with pytest.raises(OptimizerError, match=match):
        update_key(optimizer, torch.ones(2), torch.ones(2), State(), optimizer.hyper)


@pytest.mark.parametrize("what", ["grad", "view"])
def test_an_entry_in_the_memory_of_the_gradient_or_of_the_weights_is_copied(what: str) -> None:
    optimizer, state = Keeping(what=what), State()
    weight, grad = torch.ones(4), torch.ones(4)
    update_key(optimizer, weight, grad, state, optimizer.hyper)
    weight.zero_()
    grad.zero_()
    assert torch.as_tensor(state.values["kept"]).bool().all()


def test_update_sees_the_shape_the_name_and_the_number_of_the_update() -> None:
    seen: list[Any] = []

    class Looking(Optimizer):
        elementwise = False

        def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
            seen.append(
                (
                    tuple(weight.shape),
                    weight.dtype,
                    tuple(grad.shape),
                    hyper["key"],
                    hyper["step"],
                    grad.max(),
                )
            )

    optimizer, state = Looking(clip_gradient=0.5, begin_num_update=10), State()
    for _ in range(2):
        update_key(
            optimizer, torch.ones(2, 3).half(), torch.ones(2, 3), state, {**optimizer.hyper, "key": "fc"}
        )
    assert seen == [((2, 3), torch.float32, (2, 3), "fc", step, 0.5) for step in (11, 12)]


@pytest.mark.parametrize("name", ["sgd", "adam", "torch:NAdam"])
@pytest.mark.parametrize("shape", [(3, 5), (4, 8), (), (0, 3)])
def test_an_elementwise_optimizer_has_the_bits_it_has_on_a_slice(name: str, shape: tuple[int, ...]) -> None:
    optimizer = create(name, lr=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    piece = make_plan([TensorSpec("w", shape, "float32")], 1).slices[0] if 0 not in shape else None
    weight, state = filled(*shape, seed=9), State()
    flat, other = (
        torch.zeros(piece.length if piece else 0),
        empty(piece) if piece else None,
    )
    flat[: weight.numel()] = weight.reshape(-1)
    for step in range(3):
        grad = filled(*shape, seed=step)
        padded = torch.zeros_like(flat)
        padded[: weight.numel()] = grad.reshape(-1)
        update_key(optimizer, weight, grad, state, optimizer.hyper)
        if piece and other:
            update_slice(optimizer, piece, flat, padded, other, [optimizer.hyper])
    assert torch.equal(weight.reshape(-1), flat[: weight.numel()])
    assert state.step == 3


def test_a_run_is_refused_to_an_optimizer_that_needs_whole_keys() -> None:
    optimizer = create("lamb")
    with pytest.raises(AssertionError, match="lamb needs whole keys"):
        update_run(optimizer, torch.ones(16), torch.ones(16), State(), optimizer.hyper)
