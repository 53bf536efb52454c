"""The update in the trainer's process: which keys move, by how much, and what an error leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.dense import Addend, DenseTable
from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.errors import OptimizerError
from kvtrainer.local_update import LocalUpdate

SHAPES = {"a": (3, 5), "b": (), "c": (170, 301)}


def plan_of(dtype: str = "float32") -> Plan:
    return make_plan([TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()], 1)


def arenas(plan: Plan, seed: int) -> dict[str, Tensor]:
    """Random values where the plan has keys, zeros in between."""
    generator = torch.Generator().manual_seed(seed)
    result = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in plan.arena_sizes.items()}
    for spec, at in zip(plan.specs, plan.key_offsets, strict=True):
        flat = result[spec.dtype]
        flat[at : at + spec.numel] = torch.randn(spec.numel, generator=generator).to(flat.dtype)
    return result


def part(plan: Plan, arena: dict[str, Tensor], key: int) -> Tensor:
    spec, at = plan.specs[key], plan.key_offsets[key]
    return arena[spec.dtype][at : at + spec.numel].clone()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_present_keys_move_by_scale_times_gradient_and_absent_ones_stay(dtype: str) -> None:
    plan, optimizer = plan_of(dtype), create("test", learning_rate=2.0)
    weights, grads = arenas(plan, 1), arenas(plan, 2)
    expected = [part(plan, weights, key) - 2.0 * (part(plan, grads, key) * 0.25) for key in range(3)]
    expected[1] = part(plan, weights, 1)
    LocalUpdate(plan, optimizer).apply(weights, grads, 0.25, [True, False, True], [optimizer.hyper] * 3)
    for key, value in enumerate(expected):
        torch.testing.assert_close(part(plan, weights, key), value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["sgd", "adam", "torch:AdamW"])
def test_bits_are_those_of_a_servers_table(name: str, dtype: str) -> None:
    plan = plan_of(dtype)
    optimizer = create(name, **({"momentum": 0.9} if name == "sgd" else {}))
    here, there = LocalUpdate(plan, optimizer), DenseTable(plan, 0)
    weights = arenas(plan, 1)
    there.assign({p.index: weights[dtype][p.offset : p.offset + p.used] for p in plan.slices})
    for step, present in enumerate([[True] * 3, [False, True, True], [True, True, False]]):
        grads = arenas(plan, 10 + step)
        absent = frozenset(key for key in range(3) if not present[key])
        for key in absent:
            begin = plan.key_offsets[key]
            grads[dtype][begin : begin + plan.specs[key].numel] = 0
        slices = {p.index: grads[dtype][p.offset : p.offset + p.used].clone() for p in plan.slices}
        there.update([Addend(slices, 1 / 3, absent)], optimizer, [optimizer.hyper] * 3)
        here.apply(weights, grads, 1 / 3, present, [optimizer.hyper] * 3)
    assert torch.equal(weights[dtype], there.arenas[dtype])


class FailsAtLast(Optimizer):
    """Changes what it is given and raises at the slice that holds the end of key c."""

    def create_state(self, weight: Tensor) -> dict[str, Any]:
        return {"seen": torch.zeros_like(weight)}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        state["seen"] += grad
        weight -= grad
        if hyper["step"] == 2 and (grad == 7).any():
            raise ArithmeticError("seven")


def test_error_of_a_users_optimizer_takes_the_whole_step_back() -> None:
    plan, optimizer = plan_of(), FailsAtLast()
    update = LocalUpdate(plan, optimizer)
    weights, grads = arenas(plan, 1), arenas(plan, 2)
    update.apply(weights, grads, 1.0, [True] * 3, [optimizer.hyper] * 3)
    before = weights["float32"].clone()
    seen = {index: state.copy() for index, state in update.states.items()}
    grads = {"float32": torch.ones_like(grads["float32"])}
    last = plan.slices[-1]
    grads["float32"][last.offset + last.length - 1] = 7
    with pytest.raises(
        OptimizerError, match="'failsatlast' raised ArithmeticError: seven; the step was not applied"
    ):
        update.apply(weights, grads, 1.0, [True] * 3, [optimizer.hyper] * 3)
    assert weights["float32"].equal(before)
    for index, state in update.states.items():
        assert state.steps == seen[index].steps
        assert state.tensors["seen"].equal(seen[index].tensors["seen"])


def test_state_can_be_taken_out_and_put_back() -> None:
    plan, optimizer = plan_of(), create("sgd", learning_rate=1.0, momentum=0.5)
    update, fresh = LocalUpdate(plan, optimizer), LocalUpdate(plan, optimizer)
    weights, grads = arenas(plan, 1), arenas(plan, 2)
    update.apply(weights, grads, 1.0, [True] * 3, [optimizer.hyper] * 3)
    for piece in plan.slices:
        fresh.put_state(piece, update.get_state(piece).copy())
    copies = {"float32": weights["float32"].clone()}
    for one, flat in ((update, weights), (fresh, copies)):
        one.apply(flat, arenas(plan, 3), 1.0, [True] * 3, [optimizer.hyper] * 3)
    assert torch.equal(weights["float32"], copies["float32"])
