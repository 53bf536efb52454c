"""Flat storage: values, aliasing, views of the former memory, what a model's copies see, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvstore_server.plan import ALIGNMENT, Plan, TensorSpec, make_plan
from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, ParameterMovedError, SharedWeightsWarning
from kvtrainer.memory import arena as arenas
from kvtrainer.memory.arena import Arena
from tests.support.interrupts import Interrupt, lines_of
from tests.support.limits import SOON
from tests.support.processes import Call
from tests.support.ways_to_train import backward

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def plan_for(parameters: list[Parameter]) -> Plan:
    dtypes = [str(p.dtype).removeprefix("torch.") for p in parameters]
    return make_plan([TensorSpec(f"p{i}", tuple(p.shape), dtypes[i]) for i, p in enumerate(parameters)], 1)


def arena_of(parameters: list[Parameter]) -> Arena:
    return Arena(parameters, [f"p{i}" for i in range(len(parameters))], plan_for(parameters))


def small_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))


def mixed_parameters() -> list[Parameter]:
    """Every dtype, odd sizes, a scalar, an empty one and one that is cut into several slices."""
    torch.manual_seed(1)
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0, 4), (17,), (70, 300)]
    return [Parameter(torch.randn(shape).to(dtype)) for dtype in DTYPES for shape in shapes]


def expected_arenas(plan: Plan, values: list[Tensor]) -> dict[str, Tensor]:
    """The arenas that hold `values` in their places and zero everywhere else, written by plain indexing."""
    arenas = {
        dtype: torch.zeros(size, dtype=getattr(torch, dtype)) for dtype, size in plan.arena_sizes.items()
    }
    for spec, offset, value in zip(plan.specs, plan.key_offsets, values, strict=True):
        arenas[spec.dtype][offset : offset + spec.numel] = value.detach().reshape(-1)
    return arenas


def gather(arena: Arena, parameters: Sequence[Parameter], present: Sequence[bool]) -> None:
    arena.gather_grads([p.grad for p in parameters], present)


def test_another_thread_may_build_an_arena_whenever_garbage_is_collected_in_one_that_is_built() -> None:
    first, *others = [[Parameter(torch.zeros(1)) for _ in range(4)] for _ in range(100)]
    kept = [arena_of([Parameter(torch.zeros(1)) for _ in range(3000)])]

    def build(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and others:
            kept.append(arena_of(others.pop()))

    usual = gc.get_threshold()
    gc.callbacks.append(build)
    gc.set_threshold(20)
    try:
        arena_of(first)
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(build)
    assert len(kept) > 1


def test_a_reused_address_stays_known_beside_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    there, calls, me = Parameter(torch.zeros(1)), list[Call](), threading.get_ident()

    class Placed(dict[int, Any]):
        def pop(self, *given: Any) -> Any:
            if threading.get_ident() == me:
                calls.append(Call(lambda: arenas._record_placed_in_arena([64], [there])))
                calls[0].join(SOON)
            return super().pop(*given)

    placed = Placed({64: weakref.ref(Parameter(torch.zeros(1)))})
    monkeypatch.setattr(arenas, "_placed", placed)
    arenas._record_placed_in_arena([128], [there])
    assert calls[0].outcome() is None
    assert placed[64]() is there


def test_values_survive_and_lie_where_the_plan_says_with_zero_padding() -> None:
    parameters = mixed_parameters()
    before = [p.detach().clone() for p in parameters]
    arena = arena_of(parameters)
    expected = expected_arenas(plan_for(parameters), before)
    assert arena.weights.keys() == expected.keys()
    for dtype, flat in expected.items():
        assert torch.equal(arena.weights[dtype], flat)
        assert arena.weights[dtype].data_ptr() % ALIGNMENT == 0
    assert all(torch.equal(p, value) for p, value in zip(parameters, before, strict=True))


def test_parameter_objects_keep_identity_hooks_attributes_and_requires_grad() -> None:
    model = small_model()
    weight = model[0].weight
    weight.grad_req = "add"
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    model[0].bias.requires_grad_(False)
    arena_of(list(model.parameters()))
    model(torch.ones(1, 5)).sum().backward()
    assert model[0].weight is weight
    assert weight.grad_req == "add"
    assert len(seen) == 1
    assert not model[0].bias.requires_grad


def test_noncontiguous_dense_parameters_become_row_major_with_the_same_values() -> None:
    torch.manual_seed(2)
    conv = Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    transposed = Parameter(torch.randn(6, 5).t())
    before = [conv.detach().clone(), transposed.detach().clone()]
    arena_of([conv, transposed])
    assert conv.is_contiguous()
    assert transposed.is_contiguous()
    assert torch.equal(conv, before[0])
    assert torch.equal(transposed, before[1])


def test_each_parameter_has_a_storage_of_exactly_its_own_bytes() -> None:
    parameters = mixed_parameters()
    arena_of(parameters)
    assert [p.untyped_storage().nbytes() for p in parameters] == [p.nbytes for p in parameters]
    assert all(p.storage_offset() == 0 for p in parameters)


def test_gradients_are_gathered_in_row_major_order_and_absent_pieces_are_zero() -> None:
    torch.manual_seed(3)
    parameters = mixed_parameters()
    conv = Parameter(torch.randn(4, 3, 2, 2))
    parameters.append(conv)
    for p in parameters:
        p.grad = torch.randn(p.shape).to(p.dtype)
    conv.grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    arena = arena_of(parameters)
    gather(arena, parameters, [True] * len(parameters))
    present = [i % 3 != 0 for i in range(len(parameters))]
    gather(arena, parameters, present)
    values = [
        p.grad if here and p.grad is not None else torch.zeros_like(p)
        for p, here in zip(parameters, present, strict=True)
    ]
    for dtype, flat in expected_arenas(plan_for(parameters), values).items():
        assert torch.equal(arena.grads[dtype], flat)
        assert arena.grads[dtype].data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("absent", [None, 0, 7, 29])
def test_gradients_of_one_dimension_lie_in_place_with_zeros_between(absent: int | None) -> None:
    torch.manual_seed(3)
    shapes = [*[(1 + at % 19,) for at in range(12)], (2, 3), (), (5,), (0,), *[(5_000,)] * 14]
    dtypes = [torch.float64 if at in (4, 5) else torch.float32 for at in range(len(shapes))]
    parameters = [
        Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for p in parameters:
        p.grad = torch.randn_like(p)
    parameters[3].grad = torch.randn(1).to(torch.float32).expand(4)
    arena = arena_of(parameters)
    for _ in range(2):
        gather(arena, parameters, [at != absent for at in range(len(parameters))])
        values = [torch.zeros_like(p) if at == absent else p.grad for at, p in enumerate(parameters)]
        for dtype, flat in expected_arenas(plan_for(parameters), values).items():  # type: ignore[arg-type]
            assert torch.equal(arena.grads[dtype], flat)


def test_gradients_in_other_buffers_leave_the_arena_and_come_back() -> None:
    parameters = [Parameter(torch.zeros(40, 50)), Parameter(torch.zeros(7))]
    arena, elsewhere = arena_of(parameters), {0: torch.zeros(2000)}
    grads = [torch.full_like(p, 3.0) for p in parameters]
    arena.gather_grads(grads, [True, True])
    arena.gather_grads(grads, [True, True], targets=elsewhere)
    first, second = arena._grad_pieces
    assert (elsewhere[0].unique().tolist(), first.unique().tolist(), second.tolist()) == (
        [3.0],
        [0.0],
        [3.0] * 7,
    )
    arena.gather_grads(grads, [True, True])
    arena.zeros = frozenset({0})  # as after a round in which rows of it came
    arena.gather_grads(grads, [False, True], targets=elsewhere)
    assert elsewhere[0].unique().tolist() == [0.0]


def test_an_interrupt_while_gradients_first_go_into_other_buffers_leaves_them_going_there() -> None:
    def made() -> tuple[Arena, list[Tensor], dict[int, Tensor]]:
        parameters = [Parameter(torch.zeros(40, 50)), Parameter(torch.zeros(7))]
        arena, grads = arena_of(parameters), [torch.ones_like(p) for p in parameters]
        arena.gather_grads(grads, [True, True])
        return arena, grads, {0: torch.zeros(2000)}

    arena, grads, elsewhere = made()
    lines = lines_of(lambda: arena.gather_grads(grads, [True, True], targets=elsewhere))
    assert len(lines) > 10
    for at in range(len(lines)):
        arena, grads, elsewhere = made()
        with pytest.raises(Interrupt):
            lines_of(lambda: arena.gather_grads(grads, [True, True], targets=elsewhere), before=at)  # noqa: B023
        arena.gather_grads(grads, [True, True], targets=elsewhere)
        assert elsewhere[0].unique().tolist() == [1.0], lines[at]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages there are")
def test_gradients_that_are_used_where_they_lie_take_no_memory_also_after_much_was_freed() -> None:
    parameters = [Parameter(torch.zeros(1 << 18)) for _ in range(4)]
    arena = arena_of(parameters)
    del parameters
    freed = [torch.ones(1 << 18) for _ in range(4)]
    del freed
    arena.gather_grads([torch.ones(1 << 18)] * 4, [True] * 4, arena.long)
    [grads] = arena.grads.values()
    pages = ctypes.create_string_buffer(grads.nbytes // mmap.PAGESIZE)
    asked = ctypes.c_void_p(grads.data_ptr()), ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages
    assert ctypes.CDLL(None).mincore(*asked) == 0
    assert bytes(len(pages)) == bytes(page & 1 for page in pages.raw[: len(pages)])


def test_scatter_writes_back_in_place_where_present_and_makes_a_missing_gradient() -> None:
    parameters = [Parameter(torch.zeros(2)), Parameter(torch.zeros(2)), Parameter(torch.zeros(2))]
    arena = arena_of(parameters)
    parameters[0].grad = kept = torch.ones(2)
    parameters[1].grad = torch.ones(2)
    arena.grads["float32"].fill_(4)
    arena.scatter_grads([True, False, True])
    arena.grads["float32"].zero_()
    assert parameters[0].grad is kept
    assert [p.grad.tolist() for p in parameters] == [[4, 4], [1, 1], [4, 4]]


def test_arena_built_in_inference_mode_can_still_be_trained() -> None:
    parameter = Parameter(torch.ones(3))
    with torch.inference_mode():
        arena = arena_of([parameter])
        assert not arena.grads["float32"].any()
        arena.mark_updated(None)
    (parameter * 2).sum().backward()
    gather(arena, [parameter], [True])
    arena.weights["float32"].add_(arena.grads["float32"])
    assert parameter.tolist() == [3, 3, 3]


BASE = torch.arange(10.0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.ones(4, 4)[:, :2]], r"'p0' has shape \[4, 2\] but strides \[4, 1\]"),
        ([torch.ones(1, 3).expand(4, 3)], r"'p0' has shape \[4, 3\] but strides \[0, 1\]"),
        ([BASE[:6], BASE[2:4], BASE[5:]], r"'p1' shares memory with 'p0'.*'p2' shares memory with 'p0'"),
        ([torch.ones(2), torch.ones(2, device="meta")], r"'p1' is on meta but 'p0' is on cpu"),
    ],
)
def test_unsuitable_parameters_are_refused_first(tensors: list[Tensor], message: str) -> None:
    parameters = [Parameter(tensor) for tensor in tensors]
    before = [p.data_ptr() for p in parameters]
    with pytest.raises(ConfigurationError, match=message):
        arena_of(parameters)
    assert [p.data_ptr() for p in parameters] == before


VIEWS: dict[str, Callable[[nn.Module], Any]] = {
    "shared memory": lambda net: net.share_memory(),
    "NumPy": lambda net: net.get_parameter("weight").detach().numpy(),
    "state_dict": lambda net: net.state_dict(),
    "row": lambda net: net.get_parameter("weight").detach()[0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_what_sees_the_former_memory_is_warned_of_with_the_names(view: str) -> None:
    net = nn.Linear(2, 1)
    seen = VIEWS[view](net)
    with pytest.warns(SharedWeightsWarning, match=r"2 of 2 .*'weight', 'bias'|1 of 2 .*'weight'") as caught:
        Trainer(net, "sgd", kvstore=None)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    del seen


def test_views_that_are_gone_and_copies_and_views_of_larger_memory_are_not_warned_of() -> None:
    net, whole = nn.Linear(2, 1), torch.zeros(4)
    copy = {name: value.clone() for name, value in net.state_dict().items()}
    net.weight.detach().numpy()
    cycle: list[Any] = [net.weight.detach()]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        Trainer([*net.parameters(), Parameter(whole[:2])], "sgd", kvstore=None)
    finally:
        gc.enable()
    Trainer(net, "sgd", kvstore=None)  # what another Trainer holds is no view
    net(torch.ones(1, 2)).sum().backward()
    Trainer(net, "sgd", kvstore=None)
    assert len(copy) == 2


def test_parameters_of_one_memory_that_all_move_are_not_warned_of() -> None:
    whole = torch.zeros(4)
    parts = [Parameter(whole[:2]), Parameter(whole[2:])]
    del whole
    Trainer(parts, "sgd", kvstore=None)


def test_share_memory_after_the_trainer_is_refused_with_a_way_out() -> None:
    net = nn.Linear(2, 1)
    trainer = Trainer(net, "sgd", kvstore=None)
    net.share_memory()
    for p in net.parameters():
        backward(p)
    with pytest.raises(ParameterMovedError, match=r"share_memory\(\).*weight, bias.*clone\(\)"):
        trainer.step(1)
