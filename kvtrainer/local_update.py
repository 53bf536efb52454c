"""The update in the trainer's own process: the servers' arithmetic over the trainer's own arenas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.norms import Decision, apply_decision
from kvstore_server.optimizer import KeyState, Optimizer, SliceState, update_key, update_rows, update_slice
from kvstore_server.optimizer.segment_rows import SegmentPlace, takes_rows, update_segment_rows
from kvstore_server.plan import Plan, Slice
from kvstore_server.reduction import RowSet
from kvstore_server.row_payload import split_rows
from kvtrainer.errors import OptimizerError

UNLIMITED = Decision()


class _Step(NamedTuple):
    """The arguments of `LocalUpdate.apply`."""

    weights: Mapping[str, Tensor]
    grads: Mapping[str, Tensor]
    scale: float
    present: Sequence[bool]
    hypers: Sequence[Mapping[str, Any]]
    rows: Mapping[int, RowSet]
    decision: Decision

    def ready(self, grad: Tensor) -> Tensor:
        """A gradient as the update uses it: scaled and limited, in the dtype that the update computes in."""
        ready = _scaled(grad, self.scale)
        apply_decision(ready, self.decision)
        return ready


class LocalUpdate:
    """Applies one optimizer to all slices or, if it is not elementwise, keys of a plan, with the bits of a server.

    Args:
        plan: The layout of the arenas.
        optimizer: Its state is kept here, per slice or per key.
    """

    def __init__(self, plan: Plan, optimizer: Optimizer) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.states: dict[int, SliceState] = {piece.index: SliceState.empty(piece) for piece in plan.slices}
        self.key_states: list[KeyState] = [KeyState() for _ in plan.specs]

    def apply(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
        rows: Mapping[int, RowSet] | None = None,
        decision: Decision = UNLIMITED,
    ) -> None:
        """Update the weights of the keys that are `present` with scale · gradient, limited as `decision` says.

        `grads` is used as scratch.

        Of the keys in `rows` the gradient has only those, and `grads` is zero.

        Raises:
            OptimizerError: a user-defined optimizer raised; weights and state are as before.
            ConfigurationError: the optimizer cannot update a key of this shape; nothing has changed.
        """
        step = _Step(weights, grads, scale, present, hypers, rows or {}, decision)
        if not self.optimizer.may_raise:
            self._apply(step)
            return
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        states = {index: state.copy() for index, state in self.states.items()}
        key_states = [state.copy() for state in self.key_states]
        try:
            self._apply(step)
        except Exception as error:
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            self.states, self.key_states = states, key_states
            raise OptimizerError(
                f"optimizer {self.optimizer.registered_name!r} raised {type(error).__name__}: {error}; "
                "the step was not applied"
            ) from error

    def get_state(self, piece: Slice) -> SliceState:
        return self.states[piece.index]

    def put_state(self, piece: Slice, state: SliceState) -> None:
        self.states[piece.index] = state

    def get_key_state(self, key: int) -> KeyState:
        return self.key_states[key]

    def put_key_state(self, key: int, state: KeyState) -> None:
        self.key_states[key] = state

    @torch.no_grad()
    def _apply(self, step: _Step) -> None:
        if not self.optimizer.elementwise:
            self._apply_to_keys(step)
            return
        rows = self._rows_by_slice(step)
        for piece in self.plan.slices:
            here = [step.present[segment.key] for segment in piece.segments]
            numbers = [step.hypers[segment.key] for segment in piece.segments]
            part = slice(piece.offset, piece.offset + piece.length)
            state, weight = self.states[piece.index], step.weights[piece.dtype][part]
            for position, found in rows.get(piece.index, {}).items():
                here[position] = False
                place = SegmentPlace(piece, position, self.plan.specs[piece.segments[position].key])
                values = step.ready(found.values.clone())
                update_segment_rows(
                    self.optimizer, place, weight, found.ids, values, state, numbers[position]
                )
            if any(here):
                grad = step.ready(step.grads[piece.dtype][part])
                names = self._names(piece) if self.optimizer.positioned else None
                update_slice(self.optimizer, piece, weight, grad, state, numbers, here, names)

    def _rows_by_slice(self, step: _Step) -> dict[int, dict[int, RowSet]]:
        """Slice → position of a segment → its rows; rows that do not count as such go to the dense gradients."""
        found: dict[int, dict[int, RowSet]] = {}
        for key, (ids, values) in step.rows.items():
            if not step.present[key]:
                continue
            spec, begin = self.plan.specs[key], self.plan.key_offsets[key]
            if takes_rows(self.optimizer, step.hypers[key]):
                for index, (position, part) in split_rows(self.plan, key, ids, values).items():
                    found.setdefault(index, {})[position] = part
            else:
                dense = step.grads[spec.dtype][begin : begin + spec.numel].view(-1, values.shape[1])
                dense[ids] = values.to(dense.dtype)
        return found

    def _names(self, piece: Slice) -> list[str]:
        return [self.plan.specs[segment.key].key for segment in piece.segments]

    def _apply_to_keys(self, step: _Step) -> None:
        keys = [key for key, is_present in enumerate(step.present) if is_present]
        specs = self.plan.specs
        for key in keys:
            self.optimizer.check_key(specs[key].key, specs[key].shape, step.hypers[key])
        for key in keys:
            spec, begin = specs[key], self.plan.key_offsets[key]
            part = slice(begin, begin + spec.numel)
            weight = step.weights[spec.dtype][part].view(spec.shape)
            hyper, state = {**step.hypers[key], "key": spec.key}, self.key_states[key]
            if key in step.rows:
                ids, values = step.rows[key]
                update_rows(self.optimizer, weight, ids, step.ready(values.clone()), state, hyper)
            else:
                grad = step.ready(step.grads[spec.dtype][part]).view(spec.shape)
                update_key(self.optimizer, weight, grad, state, hyper)


def _scaled(grad: Tensor, scale: float) -> Tensor:
    """In the dtype that the update computes in; `grad` itself where it has that."""
    grad = grad.float() if grad.dtype.itemsize < 4 else grad
    return grad.mul_(scale) if scale != 1.0 else grad
