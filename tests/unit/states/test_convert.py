"""Optimizer state per slice and per parameter: nothing is lost on the way there and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvstore_server.optimizer import Optimizer, create
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.optimizer_states import ShardUpdate
from kvtrainer.states.convert import export_states, import_states, read_states

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "scalar": (), "empty": (0, 2), "big": (170, 301)}
CPU = torch.device("cpu")


def plan_of(shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtype: str = "float32") -> Plan:
    return make_plan([TensorSpec(name, shape, dtype) for name, shape in shapes.items()], 1)


def holder_of(optimizer: Optimizer, plan: Plan | None = None) -> ShardUpdate:
    plan = plan or plan_of()
    weights = {name: torch.zeros(size, dtype=getattr(torch, name)) for name, size in plan.arena_sizes.items()}
    return ShardUpdate(plan, optimizer, weights)


def counted(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[int, dict[str, Any]]:
    """A state of Adam in which every number is another one."""
    state: dict[int, dict[str, Any]] = {}
    for key, shape in enumerate(shapes.values()):
        start, count = 1000 * key, torch.Size(shape).numel()
        numbers = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        state[key] = {"step": torch.tensor(3.0 + key), "exp_avg": numbers, "exp_avg_sq": -numbers}
    return state


def equal(a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]]) -> bool:
    if a.keys() != b.keys() or any(a[key].keys() != b[key].keys() for key in a):
        return False
    return all(torch.equal(torch.as_tensor(a[k][n]), torch.as_tensor(b[k][n])) for k in a for n in a[k])


def as_torch(states: Mapping[int, Any], sizes: list[int], **options: Any) -> dict[str, Any]:
    """A state_dict of torch."""
    ids = iter(range(sum(sizes)))
    groups = [{**options, "params": [next(ids) for _ in range(size)]} for size in sizes]
    return {"state": dict(states), "param_groups": groups}


def groups_of(sizes: list[int]) -> list[dict[str, Any]]:
    return [{"params": [torch.zeros(1)] * size} for size in sizes]


def test_what_is_imported_is_exported_again() -> None:
    assert len(plan_of().slices) > 3
    holder = holder_of(create("adam"))
    import_states(plan_of(), holder, counted(), create("adam"), CPU)
    assert equal(export_states(plan_of(), holder), counted())


def test_keys_without_state_start_afresh() -> None:
    holder = holder_of(create("adam"))
    import_states(plan_of(), holder, counted(), create("adam"), CPU)
    some = {key: state for key, state in counted().items() if key != 0}
    import_states(plan_of(), holder, some, create("adam"), CPU)
    assert equal(export_states(plan_of(), holder), some)
    import_states(plan_of(), holder, {}, create("adam"), CPU)
    assert export_states(plan_of(), holder) == {}


def test_numbers_of_a_0d_parameter_are_not_taken_for_the_optimizers_own() -> None:
    """NAdam keeps both kinds: two averages per element, and one product per parameter."""
    shapes: dict[str, tuple[int, ...]] = {"scalar": ()}
    optimizer, plan = create("torch:NAdam"), plan_of(shapes)
    holder = holder_of(optimizer, plan)
    state = {0: {**counted(shapes)[0], "mu_product": torch.tensor(0.25)}}
    import_states(plan, holder, state, optimizer, CPU)
    kept = holder.get_state(plan.slices[0])
    assert set(kept.tensors) == {"exp_avg", "exp_avg_sq"}
    assert kept.entries[0]["mu_product"] == 0.25
    assert equal(export_states(plan, holder), state)


def test_state_that_torch_keeps_without_a_count_counts_as_updated() -> None:
    optimizer = create("torch:SGD", lr=0.5, momentum=0.5, dampening=0.5)
    plan = plan_of({"w": (2,)})
    holder = holder_of(optimizer, plan)
    plain = as_torch({0: {"momentum_buffer": torch.tensor([4.0, 8.0])}}, [1], **optimizer.hyper)
    import_states(plan, holder, read_states(plain, groups_of([1]), plan, optimizer), optimizer, CPU)
    grads = {"float32": torch.zeros(plan.arena_sizes["float32"])}
    grads["float32"][:2] = 2.0
    holder.apply(grads, 1.0, [True], [optimizer.hyper])
    # A first update would take the gradient as the buffer, without dampening.
    weights = holder.shard.visible(holder.shard.units[0], 0)
    assert weights.tolist() == [-0.5 * (0.5 * 4 + 0.5 * 2), -0.5 * (0.5 * 8 + 0.5 * 2)]


def test_read_states_are_copies_keyed_by_position() -> None:
    given = as_torch({5: {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}, 7: {}}, [2, 1])
    given["param_groups"][0]["params"], given["param_groups"][1]["params"] = [7, 6], [5]
    plan = plan_of({"a": (2,), "b": (2,), "c": (2,)})
    found = read_states(given, groups_of([2, 1]), plan, create("adam"))
    given["state"][5]["exp_avg"].zero_()
    assert equal(found, {2: {"step": 1.0, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}})
