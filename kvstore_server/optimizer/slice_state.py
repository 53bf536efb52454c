"""The optimizer state of one slice: flat tensors beside the weights, and per segment its scalars and its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore_server.errors import ShapeMismatchError
from kvstore_server.optimizer.base import StateValue
from kvstore_server.plan import Slice

RESERVED = ("step", "master")
"""Names that `SliceState.state_of` gives to what is no state of the optimizer's own."""


@dataclass
class SliceState:
    """Optimizer state of one slice; `empty` makes the state before the first update."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Flat, one element per element of the slice, in the dtype that the update computes in."""
    scalars: list[dict[str, StateValue]] = field(default_factory=list)
    """Per segment: 0-d values. A dict may be shared by segments and is replaced, never changed."""
    steps: list[int] = field(default_factory=list)
    """Per segment: the number of updates applied."""
    master: Tensor | None = None
    """float32 weights of a half-precision slice (multi_precision); they follow weights that are replaced."""

    @classmethod
    def empty(cls, piece: Slice) -> SliceState:
        """The state of a slice that was never updated."""
        count = len(piece.segments)
        return cls(scalars=[{}] * count, steps=[0] * count)

    def copy(self) -> SliceState:
        """A deep copy, to roll back to."""
        return SliceState(
            {name: tensor.clone() for name, tensor in self.tensors.items()},
            [cloned(scalars) for scalars in self.scalars],
            list(self.steps),
            None if self.master is None else self.master.clone(),
        )

    def state_of(self, piece: Slice, index: int) -> dict[str, StateValue]:
        """Copy out the state of one segment: 'step', its scalars, its flat tensors and, if kept, 'master'.

        A segment that was never updated has only 'step' (0.0), and 'master' if kept.
        """
        segment = piece.segments[index]
        part = slice(segment.start, segment.start + segment.numel)
        state: dict[str, StateValue] = {"step": float(self.steps[index])}
        if self.steps[index]:
            state.update(cloned(self.scalars[index]))
            state.update({name: tensor[part].clone() for name, tensor in self.tensors.items()})
        if self.master is not None:
            state["master"] = self.master[part].clone()
        return state

    def set_state(self, piece: Slice, index: int, values: Mapping[str, StateValue]) -> None:
        """Replace the state of one segment by what `state_of` returned, there or elsewhere.

        Tensors are flattened, and belong on the device of the weights; a 0-d tensor or a number is a scalar,
        unless the slice has a tensor of that name. Without 'step' the segment counts as never updated.

        Raises:
            ShapeMismatchError: a tensor has another number of elements than the segment.
        """
        segment = piece.segments[index]
        part = slice(segment.start, segment.start + segment.numel)
        for tensor in self.tensors.values():
            tensor[part].zero_()
        scalars: dict[str, StateValue] = {}
        self.steps[index] = int(values.get("step", 0))
        for name, value in values.items():
            if name == "step":
                continue
            if name not in self.tensors and (not isinstance(value, Tensor) or value.dim() == 0):
                scalars[name] = value.clone() if isinstance(value, Tensor) else float(value)
            else:
                flat = torch.as_tensor(value).detach().reshape(-1)
                if flat.numel() != segment.numel:
                    raise ShapeMismatchError(
                        f"state {name!r} has {flat.numel()} elements, but its segment has {segment.numel}; "
                        "load the state of the same model"
                    )
                self.tensor(name, piece, flat)[part].copy_(flat)
        self.scalars[index] = scalars

    def tensor(self, name: str, piece: Slice, like: Tensor) -> Tensor:
        """The slice's tensor of that name; a missing one is made, zero, in the dtype to compute in."""
        compute = torch.float64 if piece.dtype == "float64" else torch.float32
        dtype = compute if like.is_floating_point() else like.dtype
        if name == "master":
            if self.master is None:
                self.master = torch.zeros(piece.length, dtype=dtype, device=like.device)
            return self.master
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(piece.length, dtype=dtype, device=like.device)
        return self.tensors[name]


def cloned(values: Mapping[str, StateValue]) -> dict[str, StateValue]:
    """A copy that shares no tensor with `values`."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}
