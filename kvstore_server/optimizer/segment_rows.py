"""A row-sparse update of the part of a key that lies in one slice, whose state lies in the slice's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.optimizer.base import Optimizer, StateValue
from kvstore_server.optimizer.rows import update_rows
from kvstore_server.optimizer.slice_state import SliceState, cloned
from kvstore_server.optimizer.whole import KeyState
from kvstore_server.plan import Slice, TensorSpec


class SegmentPlace(NamedTuple):
    """A segment: its slice, its position there, and its key, of which it holds whole rows."""

    piece: Slice
    position: int
    spec: TensorSpec

    @property
    def part(self) -> slice:
        segment = self.piece.segments[self.position]
        return slice(segment.start, segment.start + segment.numel)


def takes_rows(optimizer: Optimizer, hyper: Mapping[str, Any]) -> bool:
    """Whether an update by some rows differs from one by a gradient that is zero elsewhere."""
    return optimizer.takes_sparse(hyper) or (optimizer.updates_rows(hyper) and not optimizer.positioned)


@torch.no_grad()
def update_segment_rows(
    optimizer: Optimizer,
    place: SegmentPlace,
    weight: Tensor,
    rows: Tensor,
    grad_rows: Tensor,
    state: SliceState,
    hyper: Mapping[str, Any],
) -> None:
    """Apply one update to some rows of a segment; the optimizer is elementwise and `takes_rows`.

    Args:
        weight: the slice, as for `update_slice`.
        rows, grad_rows: as for `update_rows`, counted from the segment's first row.
        state: of the slice; also what `update_slice` uses, so the two may alternate.

    Raises:
        OptimizerError, Exception: as `update_rows` does.
    """
    part, (piece, position, spec) = place.part, place
    shaped = weight[part].view(-1, *spec.shape[1:])
    held: dict[str, Tensor] = {}
    if state.steps[position]:
        held = {name: tensor[part].view(shaped.shape) for name, tensor in state.tensors.items()}
    master = None if state.master is None else state.master[part].view(shaped.shape)
    key = KeyState({**cloned(state.scalars[position]), **held}, state.steps[position], master)
    update_rows(optimizer, shaped, rows, grad_rows, key, {**hyper, "key": spec.key})
    scalars: dict[str, StateValue] = {}
    for name, value in key.values.items():
        if not isinstance(value, Tensor) or not value.dim():
            scalars[name] = value
        elif name not in held or value.data_ptr() != held[name].data_ptr():
            state.tensor(name, piece, value)[part].copy_(value.reshape(-1))
    state.scalars[position], state.steps[position] = scalars, key.step
    if key.master is not None:
        if state.master is None:
            state.master = weight.float()
        state.master[part].copy_(key.master.reshape(-1))
