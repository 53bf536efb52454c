"""The update in the trainer's process: which keys move, by how much, and what an error leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.optimizer import create
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.errors import ConfigurationError
from kvtrainer.optimizer_states import ShardUpdate
from kvtrainer.states.convert import export_states

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
    ShardUpdate(plan, optimizer, weights).apply(grads, 0.25, [True, False, True], [optimizer.hyper] * 3)
    for key, value in enumerate(expected):
        torch.testing.assert_close(part(plan, weights, key), value, rtol=0, atol=1e-6)


def run_whole(
    name: str, scale: float, present: list[bool], **options: Any
) -> tuple[ShardUpdate, list[Tensor], Plan]:
    """Two updates of an optimizer of whole keys; the keys' values after them."""
    plan, optimizer = plan_of(), create(name, **options)
    weights = arenas(plan, 1)
    update = ShardUpdate(plan, optimizer, weights)
    for step in range(2):
        update.apply(arenas(plan, 10 + step), scale, present, [optimizer.hyper] * 3)
    return update, [part(plan, weights, key).view(plan.specs[key].shape) for key in range(3)], plan


def test_optimizer_of_whole_keys_gets_each_key_in_its_shape() -> None:
    """Adafactor's state is per row and per column, and LARS divides by the norm of a key that has several slices."""
    update, values, plan = run_whole("torch:Adafactor", 0.5, [True, True, True], lr=0.1)
    start = arenas(plan, 1)
    for key, value in enumerate(values):
        parameter = torch.nn.Parameter(part(plan, start, key).view(plan.specs[key].shape))
        plain: torch.optim.Optimizer = torch.optim.Adafactor([parameter], lr=0.1)
        for step in range(2):
            parameter.grad = 0.5 * part(plan, arenas(plan, 10 + step), key).view(parameter.shape)
            plain.step()
        torch.testing.assert_close(value, parameter.detach(), rtol=0, atol=1e-6)
    state = export_states(plan, update)[0]
    assert state["step"] == 2
    shapes = {name: tuple(value.shape) for name, value in state.items() if name != "step"}
    assert shapes == {"row_var": (3, 1), "col_var": (1, 5)}


def test_absent_whole_keys_stay_and_get_no_step() -> None:
    update, values, plan = run_whole("lamb", 1.0, [True, False, True])
    assert values[1].flatten().equal(part(plan, arenas(plan, 1), 1))
    states = export_states(plan, update)
    assert [states.get(key, {}).get("step", 0) for key in range(3)] == [2, 0, 2]


def test_key_that_the_optimizer_cannot_update_is_found_before_any_other_is_updated() -> None:
    plan, optimizer = plan_of(), create("groupadagrad")
    weights = arenas(plan, 1)
    update = ShardUpdate(plan, optimizer, weights)
    with pytest.raises(ConfigurationError, match="'b'"):
        update.apply(arenas(plan, 2), 1.0, [True] * 3, [optimizer.hyper] * 3)
    assert weights["float32"].equal(arenas(plan, 1)["float32"])
    update.apply(arenas(plan, 2), 1.0, [True, False, True], [optimizer.hyper] * 3)
    assert not weights["float32"].equal(arenas(plan, 1)["float32"])


def test_noise_depends_on_the_name_of_the_key_and_not_on_its_place() -> None:
    values = []
    for names in (["a", "b", "c"], ["c", "a", "b"]):
        plan = make_plan([TensorSpec(name, SHAPES[name], "float32") for name in names], 1)
        optimizer = create("sgld", learning_rate=0.01)
        weights = {"float32": torch.zeros(plan.arena_sizes["float32"])}
        grads = {"float32": torch.zeros(plan.arena_sizes["float32"])}
        ShardUpdate(plan, optimizer, weights).apply(grads, 1.0, [True] * 3, [optimizer.hyper] * 3)
        values.append({name: part(plan, weights, key) for key, name in enumerate(names)})
    for name in SHAPES:
        assert values[0][name].equal(values[1][name])
    assert not values[0]["a"].equal(values[0]["c"][: values[0]["a"].numel()])
