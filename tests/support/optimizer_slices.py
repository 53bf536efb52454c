"""Slices, and optimizers to update them with: every built-in one, and one of a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, States, create
from kvstore_server.optimizer.gluon import FAMILY
from kvstore_server.optimizer.state import joined, spread_state
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import Plan, Segment, Slice, TensorSpec, make_plan
from kvstore_server.protocol.rows import Payload, RowSet
from kvstore_server.shard.reduction import RankContribution, Run
from kvstore_server.shard.shard import Shard
from tests.support.gluon_cases import MXNET1

SHAPES = [(30,), (0,), (5, 7), (1,), (64,)]
GLUONS = [cls.name for cls in FAMILY if not cls.positioned]
GLUONS += [case.name for case in MXNET1.values() if case.name.removeprefix("mxnet1:") in GLUONS]
BUILT_IN: list[Any] = [*GLUONS, *(f"torch:{cls.__name__}" for cls in ELEMENTWISE)]


class Curved(Optimizer):
    """A user's optimizer out of operations whose vectorised and scalar versions round differently."""

    defaults: ClassVar[dict[str, Any]] = {"power": 0.33}

    def create_state(self, weight: Tensor) -> dict[str, Any]:
        return {"seen": torch.zeros_like(weight), "count": 0.0}

    def update(self, weight: Tensor, grad: Tensor, state: dict[str, Any], hyper: Any) -> None:
        state["count"] += 1.0
        state["seen"] = (state["seen"] + grad.abs() + state["count"]) ** hyper["power"]
        weight.copy_(torch.atan2(weight, state["seen"]).sigmoid())


def make(name: str | type[Optimizer], **options: Any) -> Optimizer:
    """An optimizer with momentum and weight decay where there is an option for it."""
    rate = 5.0 if name in ("adadelta", "torch:Adadelta") else 0.05
    extra = {"momentum": 0.9} if name == "groupadagrad" else {"momentum": 0.9, "weight_decay": 0.01}
    if name == "mxnet1:adadelta":  # which has no learning rate to make its steps longer
        options = {"eps": 1e-3, **options}
    return create(name, lr=rate, **{k: v for k, v in extra.items() if k in create(name).hyper}, **options)


def small_slice(dtype: str = "float32") -> Slice:
    return make_plan([TensorSpec(str(i), shape, dtype) for i, shape in enumerate(SHAPES)], 1).slices[0]


def big_slice(numel: int) -> Slice:
    length = -(-numel // 16) * 16
    return Slice(0, "float32", 0, length, numel, (Segment(0, 0, 0, numel),), 0)


def filled(slice_: Slice, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers in the segments, zero in the padding."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(slice_.length, dtype=dtype)
    for s in slice_.segments:
        flat[s.start : s.start + s.numel] = torch.randn(s.numel, generator=generator, dtype=dtype)
    return flat


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding(slice_: Slice, flat: Tensor) -> Tensor:
    used = torch.zeros(slice_.length, dtype=torch.bool)
    for s in slice_.segments:
        used[s.start : s.start + s.numel] = True
    return flat[~used]


def same_bits(a: States, b: States) -> bool:
    return (
        a.steps.tolist() == b.steps.tolist()
        and a.entries == b.entries
        and all(map(torch.equal, a.tensors.values(), b.tensors.values()))
    )


def given_to(
    shard: Shard, payloads: Mapping[int, Payload], scale: float = 1.0, absent: frozenset[int] = frozenset()
) -> RankContribution:
    """What a rank gives to the slices of the last unit of a Shard, each by itself."""
    unit = shard.units[-1]
    slots = [(unit.slots[index], payload) for index, payload in sorted(payloads.items())]
    without = frozenset(unit.first_key + key for key in absent)
    return shard.contribution_of([Run(slot, slot + 1, payload) for slot, payload in slots], scale, without)


def plan_of(slice_: Slice, names: Sequence[str] | None = None) -> Plan:
    """A plan of this slice alone, whose keys have its segments."""
    count = max(s.key for s in slice_.segments) + 1
    specs = [TensorSpec(str(key), (0,), slice_.dtype) for key in range(count)]
    for at, s in enumerate(slice_.segments):
        specs[s.key] = TensorSpec(names[at] if names else str(s.key), (s.numel,), slice_.dtype)
    sizes = {slice_.dtype: slice_.length}
    numels = tuple([spec.numel for spec in specs])
    return Plan(tuple(specs), 1, (slice_,), sizes, sizes, (0,) * count, numels, False)


def update_slice(
    optimizer: Optimizer,
    slice_: Slice,
    weight: Tensor,
    grad: Tensor,
    state: States,
    hypers: Sequence[Any],
    present: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Let a Shard over `weight` update the segments of a slice that are present; `state` is that of the slice."""
    shard = Shard()
    plan = plan_of(slice_, names)
    unit = shard.add(plan, slice_.server, {slice_.dtype: weight})
    shard.put_state(unit, slice_.index, state)
    own = dict(zip([s.key for s in slice_.segments], hypers, strict=True))
    absent = frozenset(
        s.key for s, here in zip(slice_.segments, present or [True] * len(hypers), strict=True) if not here
    )
    numbers = [own.get(key, {}) for key in range(len(plan.specs))]
    shard.update([RankContribution([Run(0, 1, grad)], 1.0, absent)], optimizer, [numbers])
    vars(state).update(vars(shard.get_state(unit, slice_.index)))


def empty(slice_: Slice) -> States:
    return States.of_slice(slice_)


def state_of(state: States, index: int) -> dict[str, Any]:
    """Copy out the state of one segment: 'step' and its entries."""
    return dict(joined([(state, index)], None))


def replace_state(state: States, index: int, values: Any) -> None:
    """Replace the state of one segment, of an elementwise optimizer."""
    spread_state(
        [(state, index)], values, [n for n, v in values.items() if isinstance(v, Tensor) and v.dim()]
    )


class Key:
    """One key in a Shard of its own, updated by an optimizer; `weight` is a view of its memory, in its shape."""

    def __init__(self, optimizer: Optimizer, weight: Tensor, name: str = "w") -> None:
        dtype = str(weight.dtype).removeprefix("torch.")
        self.optimizer = optimizer
        self.shape = weight.shape
        self.plan = make_plan([TensorSpec(name, tuple(weight.shape), dtype)], 1, not optimizer.elementwise)
        memory = torch.zeros(self.plan.arena_sizes[dtype], dtype=weight.dtype)
        self.shard = Shard()
        self.unit = self.shard.add(self.plan, 0, {dtype: memory})
        self.weight = memory[: weight.numel()].view(weight.shape)
        self.weight.copy_(weight)
        self.padding = memory[weight.numel() :]
        self.row = weight[:1].numel() if weight.dim() else 1

    def update(self, grad: Tensor, **changed: Any) -> None:
        """Update by a gradient of the key's shape, with some numbers of the optimizer changed."""
        compute = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        flat = torch.zeros(self.plan.arena_sizes[self.plan.specs[0].dtype], dtype=compute)
        flat[: grad.numel()] = grad.reshape(-1)
        self._update(RankContribution([Run(0, self.unit.end, flat)]), changed)

    def update_rows(self, ids: Sequence[int], rows: Tensor, **changed: Any) -> None:
        """Update by a gradient that has only some rows."""
        given = RowSet(torch.tensor(ids, dtype=torch.int64), rows.reshape(len(ids), self.row))
        self._update(RankContribution([], rows={0: given}), changed)

    def _update(self, given: RankContribution, changed: dict[str, Any]) -> None:
        self.shard.update([given], self.optimizer, [[{**self.optimizer.hyper, **changed}]])

    @property
    def state(self) -> dict[str, Any]:
        """A copy of the state, as a checkpoint has it."""
        return dict(joined(self._parts(), self.shape))

    @state.setter
    def state(self, values: dict[str, Any]) -> None:
        tensors = [n for n, v in values.items() if isinstance(v, Tensor) and v.dim()]
        spread_state(self._parts(), values, ["master", *(tensors if self.optimizer.elementwise else ())])

    def _parts(self) -> list[tuple[States, int]]:
        [block] = self.shard.storage.blocks
        return [(block.states, at) for at in range(len(block.keys))]
