"""Freshness of gradients, and when used ones are dropped; every expected gradient is a closed form."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from kvtrainer.errors import ConfigurationError
from kvtrainer.memory import gradients
from kvtrainer.memory.gradients import GradientTracker
from tests.support.limits import SOON
from tests.support.processes import together


def watch(*parameters: Parameter) -> GradientTracker:
    tracker = GradientTracker(parameters, [f"p{i}" for i in range(len(parameters))])
    tracker.attach()
    return tracker


def ones(**attributes: str) -> Parameter:
    parameter = Parameter(torch.ones(2))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def backward(parameter: Parameter, slope: float = 1.0) -> None:
    """One backward pass whose gradient is `slope` in every element."""
    (parameter * slope).sum().backward()


def is_fresh(tracker: GradientTracker) -> bool:
    """Tell it of the first parameter."""
    return tracker.fresh(tracker.participating())[0]


def stale(tracker: GradientTracker) -> list[int]:
    """The positions of the parameters that take part and have no new gradient."""
    takes_part = tracker.participating()
    rows = zip(takes_part, tracker.fresh(takes_part), strict=True)
    return [at for at, (takes, has_new) in enumerate(rows) if takes and not has_new]


def slopes(parameter: Parameter) -> list[float] | None:
    return None if parameter.grad is None else parameter.grad.tolist()


def test_who_listens_is_called_when_a_backward_pass_has_added_to_a_gradient() -> None:
    p, q, frozen = ones(), ones(), ones()
    frozen.requires_grad_(False)
    tracker = watch(p, q, frozen)
    seen: list[tuple[int, list[float] | None]] = []
    parameters = [p, q, frozen]
    tracker.listen(lambda at: seen.append((at, slopes(parameters[at]))))
    backward(p)
    backward(p)
    torch.autograd.grad((q * 2).sum(), q)
    assert seen == [(0, [1, 1]), (0, [2, 2])]
    frozen.requires_grad_()
    tracker.participating()
    backward(frozen)
    assert seen[2:] == [(2, [1, 1])]
    tracker.close()
    backward(q)
    tracker.attach()
    backward(q)
    assert len(seen) == 3


def test_listeners_are_not_called_where_a_function_gives_no_gradient() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> None:
            return None

    p, q = ones(), ones()
    tracker = watch(p, q)
    seen: list[int] = []
    tracker.listen(seen.append)
    made: Tensor = Nothing.apply(p)
    (made + q).sum().backward()
    assert seen == [1]


def test_retained_graph_and_a_parameter_used_twice_accumulate_as_in_torch() -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 100)
    tracker.consume([True])
    loss = (p * 2).sum() + (p * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert slopes(p) == [10, 10]


def test_backward_drops_consumed_gradients_that_it_does_not_reach_and_no_others() -> None:
    p, q, left_out = ones(), ones(), ones()
    tracker = watch(p, q, left_out)
    for parameter in (p, q, left_out):
        backward(parameter, 2)
    tracker.consume([True])
    tracker.consume([False, True])
    backward(p, 4)
    assert [slopes(p), slopes(q), slopes(left_out)] == [[4, 4], None, [2, 2]]
    assert stale(tracker) == [1]


def test_gradient_assigned_by_the_caller_is_fresh_and_is_not_dropped() -> None:
    p, q = ones(), ones()
    tracker = watch(p, q)
    backward(p)
    tracker.consume([True])
    p.grad = torch.full((2,), 9.0)
    assert is_fresh(tracker)
    backward(q)
    assert slopes(p) == [9, 9]


def clip(p: Parameter) -> None:
    nn.utils.clip_grad_norm_([p], 0.1)


def zero_in_place(p: Parameter) -> None:
    torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False)


def unscale(p: Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@pytest.mark.parametrize("edit", [clip, zero_in_place, unscale])
def test_edits_in_place_make_a_gradient_neither_fresh_nor_stale(edit: Callable[[Parameter], None]) -> None:
    p = ones()
    tracker = watch(p)
    backward(p)
    edit(p)
    assert is_fresh(tracker)
    tracker.consume([True])
    edit(p)
    assert not is_fresh(tracker)


@pytest.mark.parametrize("edit", [zero_in_place, unscale])
def test_of_consumed_gradients_backward_leaves_those_alone_that_were_written_in_place_and_it_does_not_reach(
    edit: Callable[[Parameter], None],
) -> None:
    p, q = ones(), ones()
    tracker = watch(p, q)
    for parameter in (p, q):
        backward(parameter, 2)
    tracker.consume([True, True])
    for parameter in (p, q):
        edit(parameter)
    for _ in range(2):
        backward(p, 4)
    zeroed = edit is zero_in_place
    assert (slopes(p), slopes(q)) == ([8, 8], [0, 0] if zeroed else [1, 1])
    assert tracker.fresh([True, True]) == [True, False]
    assert tracker.fresh([True, True], with_edits=True) == [True, True]
    assert (tracker.written, tracker.overwritten) == (([], set()) if zeroed else ([1], {0}))
    tracker.consume([True, True])
    backward(p, 4)
    assert (slopes(p), slopes(q)) == ([4, 4], None)


def test_zero_grad_to_none_makes_a_gradient_stale_and_frees_its_memory() -> None:
    p = ones()
    tracker = watch(p)
    backward(p)
    tracker.consume([True])
    assert p.grad is not None
    # torch keeps the Python object of a gradient alive for as long as the gradient itself.
    gradient = weakref.ref(p.grad)
    p.grad = None
    assert gradient() is None
    assert not is_fresh(tracker)


def test_gradients_stay_those_that_were_seen_until_a_backward_pass_or_forget() -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 3)
    assert is_fresh(tracker)
    tracker.consume([True])
    assert is_fresh(tracker) is False
    backward(p, 5)
    assert [grad.tolist() for grad in tracker.gradients() if grad is not None] == [[5, 5]]
    assert is_fresh(tracker)
    p.grad = torch.full((2,), 7.0)
    tracker.forget()
    assert [grad.tolist() for grad in tracker.gradients() if grad is not None] == [[7, 7]]


def test_autograd_grad_neither_freshens_nor_drops() -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 3)
    tracker.consume([True])
    torch.autograd.grad((p * 5).sum(), p)
    assert slopes(p) == [3, 3]
    assert not is_fresh(tracker)


def test_gradient_penalty_starts_afresh_and_adds_both_terms() -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 3)
    tracker.consume([True])
    (grad,) = torch.autograd.grad((p**3).sum(), p, create_graph=True)
    (grad**2).sum().backward()
    # d/dp (3 p^2)^2 = 36 p^3
    assert slopes(p) == [36, 36]


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_over_a_shared_parameter_adds_all_segments(reentrant: bool) -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 100)
    tracker.consume([True])
    x = torch.ones(2, requires_grad=True)

    def segment(value: Tensor) -> Tensor:
        return value + 2 * p

    out = checkpoint(segment, checkpoint(segment, x, use_reentrant=reentrant), use_reentrant=reentrant)
    out.sum().backward()
    assert slopes(p) == [4, 4]


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


def test_custom_function_that_returns_no_gradient_does_not_freshen() -> None:
    p = ones(grad_req="add")
    tracker = watch(p)
    backward(p)
    tracker.consume([True])
    NoGradient.apply(p).sum().backward()
    assert slopes(p) == [1, 1]
    assert not is_fresh(tracker)


def test_write_overwrites_at_every_backward() -> None:
    p = ones(grad_req="write")
    watch_kept = watch(p)
    backward(p, 3)
    (p * 2 + p * 3).sum().backward()
    assert slopes(p) == [5, 5]
    assert is_fresh(watch_kept)


def test_grad_req_is_read_when_it_matters() -> None:
    p = ones()
    tracker = watch(p)
    backward(p, 3)
    tracker.consume([True])
    p.grad_req = "add"
    backward(p, 4)
    assert slopes(p) == [7, 7]
    assert tracker.participating() == [True]
    p.grad_req = "null"
    assert tracker.participating() == [False]
    del p.grad_req
    p.requires_grad_(False)
    assert tracker.participating() == [False]
    assert stale(tracker) == []


def test_unknown_grad_req_is_refused_by_name() -> None:
    tracker = watch(ones(), ones(grad_req="wirte"))
    with pytest.raises(ConfigurationError, match=r"'p1' .*grad_req='wirte'.*'write', 'add'"):
        tracker.participating()


def test_a_graph_that_outlives_the_tracker_finds_its_hooks_dead() -> None:
    p = ones()
    tracker = watch(p)
    backward(p)
    tracker.consume([True])
    used, loss = p.grad, (2 * p).sum()
    tracker.close()
    loss.backward()
    assert p.grad is used
    assert slopes(p) == [3, 3]


def test_a_lazy_parameter_is_hooked_once_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, other, meeting = nn.LazyLinear(1), nn.Linear(1, 1), threading.Barrier(2)
    parameters, seen = list(lazy.parameters()), list[int]()
    tracker = watch(*parameters)
    tracker.listen(seen.append)
    lazy.initialize_parameters(torch.ones(1, 1))
    nodes_of = gradients._gradient_nodes_of

    def met(ready: Sequence[Parameter]) -> list[Node]:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(SOON)
        return nodes_of(ready)

    monkeypatch.setattr(gradients, "_gradient_nodes_of", met)
    assert [type(one) for one in together(*[lambda: other(torch.ones(1, 1))] * 2)] == [Tensor, Tensor]
    torch.stack([p.sum() for p in parameters]).sum().backward()
    assert sorted(seen) == [0, 1]


@pytest.mark.parametrize("end", ["close", "delete"])
def test_closed_or_deleted_tracker_acts_no_more(end: str) -> None:
    p = ones()
    tracker = watch(p)
    graph = (p * 4).sum()
    backward(p, 3)
    tracker.consume([True])
    if end == "close":
        tracker.close()
    else:
        del tracker
    graph.backward()
    assert slopes(p) == [7, 7]


@pytest.mark.parametrize("end", ["close", "delete"])
def test_a_closed_tracker_leaves_no_hooks_for_the_others(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, ran = ones(), list[str]()

    class Noting(gradients._BeforeGradientAccumulation):
        def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
            ran.append("before")
            return super().__call__(grads)

    monkeypatch.setattr(gradients, "_BeforeGradientAccumulation", Noting)
    monkeypatch.setattr(gradients, "_after_gradient_accumulation", lambda *_: ran.append("after"))
    stays, goes = watch(p), watch(p)
    goes.listen(lambda at: None)
    if end == "close":
        goes.close()
    else:
        del goes
    backward(p)
    assert ran == ["before"]
    assert is_fresh(stays)
