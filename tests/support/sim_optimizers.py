"""The optimizers of the simulation, and the tiny slices that its tables are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from torch import Tensor

from kvstore_server import namespace
from kvstore_server import plan as plan_module
from kvstore_server.optimizer import gluon, register
from kvstore_server.optimizer.base import StateValue
from kvstore_server.optimizer.kernels import state_tensor
from kvstore_server.plan import Plan, TensorSpec, make_plan


@register
class Remembering(gluon.Test):
    """`m = m / 2 + grad; w -= lr * m`: the state shows in the weights of later rounds."""

    __test__ = False
    name = "sim_remembering"

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        memory = state_tensor(state, "memory", weight)
        weight.sub_(memory.mul_(0.5).add_(grad), alpha=hyper["lr"])


@register
class Cautious(Remembering):
    """The same, with the last round kept so that it can be taken back."""

    name = "sim_cautious"
    may_raise = True


@register
class Lazy(Remembering):
    """The same, except that rows alone touch those rows alone."""

    name = "sim_lazy"

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        return True


@register
class Adding(gluon.Test):
    """`w += grad`; with integers any order of contributions gives the same sum."""

    __test__ = False
    name = "sim_adding"

    def update(
        self, weight: Tensor, grad: Tensor, state: dict[str, StateValue], hyper: Mapping[str, Any]
    ) -> None:
        weight.add_(grad)

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        return True


@register
class CautiousAdding(Adding):
    """The same, with the last contribution kept so that it can be taken back."""

    name = "sim_cautious_adding"
    may_raise = True

    def updates_rows(self, hyper: Mapping[str, Any]) -> bool:
        return False


@contextmanager
def small_slices() -> Iterator[None]:
    """Cut tables into slices of 64 bytes, so that tiny keys lie on both servers; make each plan only once."""

    @cache
    def plan_once(specs: tuple[TensorSpec, ...], *how: Any) -> Plan:
        return make_plan(specs, *how)

    def planned(specs: Sequence[TensorSpec], *how: Any) -> Plan:
        return plan_once(tuple(specs), *how)

    with (
        mock.patch.object(plan_module, "MIN_SLICE", 64),
        mock.patch.object(plan_module, "make_plan", planned),
        mock.patch.object(namespace, "make_plan", planned),
    ):
        yield
