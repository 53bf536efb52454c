"""The update in the trainer's own process: the servers' arithmetic over the trainer's own arenas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore_server.optimizer import Optimizer, SliceState, update_slice
from kvstore_server.plan import Plan, Slice
from kvtrainer.errors import OptimizerError


class LocalUpdate:
    """Applies one optimizer to all slices of a plan, with the bits that a server would give.

    Args:
        plan: The layout of the arenas.
        optimizer: Its state is kept here, one SliceState per slice.
    """

    def __init__(self, plan: Plan, optimizer: Optimizer) -> None:
        self.plan = plan
        self.optimizer = optimizer
        self.states: dict[int, SliceState] = {piece.index: SliceState.empty(piece) for piece in plan.slices}

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
        """
        if not self.optimizer.may_raise:
            self._apply(weights, grads, scale, present, hypers)
            return
        former = {dtype: flat.clone() for dtype, flat in weights.items()}
        states = {index: state.copy() for index, state in self.states.items()}
        try:
            self._apply(weights, grads, scale, present, hypers)
        except Exception as error:
            for dtype, flat in weights.items():
                flat.copy_(former[dtype])
            self.states = states
            raise OptimizerError(
                f"optimizer {self.optimizer.registered_name!r} raised {type(error).__name__}: {error}; "
                "the step was not applied"
            ) from error

    def get_state(self, piece: Slice) -> SliceState:
        return self.states[piece.index]

    def put_state(self, piece: Slice, state: SliceState) -> None:
        self.states[piece.index] = state

    @torch.no_grad()
    def _apply(
        self,
        weights: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        scale: float,
        present: Sequence[bool],
        hypers: Sequence[Mapping[str, Any]],
    ) -> None:
        for piece in self.plan.slices:
            here = [present[segment.key] for segment in piece.segments]
            if any(here):
                part = slice(piece.offset, piece.offset + piece.length)
                grad = _computed_in(grads[piece.dtype][part])
                if scale != 1.0:
                    grad.mul_(scale)
                rows = [hypers[segment.key] for segment in piece.segments]
                weight = weights[piece.dtype][part]
                update_slice(self.optimizer, piece, weight, grad, self.states[piece.index], rows, here)


def _computed_in(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype.itemsize < 4 else grad
