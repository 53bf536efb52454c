"""The update in the trainer's own process: the servers' arithmetic over the trainer's own arenas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore_server.optimizer import KeyState, Optimizer, SliceState, update_key, update_slice
from kvstore_server.plan import Plan, Slice
from kvtrainer.errors import OptimizerError


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
    ) -> None:
        """Update the weights of the keys that are `present` with scale · gradient; `grads` is used as scratch.

        Raises:
            OptimizerError: a user-defined optimizer raised; weights and state are as before.
            ConfigurationError: the optimizer cannot update a key of this shape; nothing has changed.
        """
        if not self.optimizer.may_raise:
            self._apply(weights, grads, scale, present, hypers)
            return
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        states = {index: state.copy() for index, state in self.states.items()}
        key_states = [state.copy() for state in self.key_states]
        try:
            self._apply(weights, grads, scale, present, hypers)
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
    def _apply(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
    ) -> None:
        if not self.optimizer.elementwise:
            self._apply_to_keys(weights, grads, scale, present, hypers)
            return
        for piece in self.plan.slices:
            here = [present[segment.key] for segment in piece.segments]
            if any(here):
                part = slice(piece.offset, piece.offset + piece.length)
                grad = _scaled(grads[piece.dtype][part], scale)
                rows = [hypers[segment.key] for segment in piece.segments]
                names = self._names(piece) if self.optimizer.positioned else None
                state, weight = self.states[piece.index], weights[piece.dtype][part]
                update_slice(self.optimizer, piece, weight, grad, state, rows, here, names)

    def _names(self, piece: Slice) -> list[str]:
        return [self.plan.specs[segment.key].key for segment in piece.segments]

    def _apply_to_keys(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
    ) -> None:
        keys = [key for key, is_present in enumerate(present) if is_present]
        specs = self.plan.specs
        for key in keys:
            self.optimizer.check_key(specs[key].key, specs[key].shape, hypers[key])
        for key in keys:
            spec, begin = specs[key], self.plan.key_offsets[key]
            part = slice(begin, begin + spec.numel)
            weight = weights[spec.dtype][part].view(spec.shape)
            grad = _scaled(grads[spec.dtype][part], scale).view(spec.shape)
            hyper = {**hypers[key], "key": spec.key}
            update_key(self.optimizer, weight, grad, self.key_states[key], hyper)


def _scaled(grad: Tensor, scale: float) -> Tensor:
    """In the dtype that the update computes in; `grad` itself where it has that."""
    grad = grad.float() if grad.dtype.itemsize < 4 else grad
    return grad.mul_(scale) if scale != 1.0 else grad
