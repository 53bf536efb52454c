"""Compression of one rank's contributions to one table, with error feedback.

What a compressed gradient does not say stays behind as a residual and is added to the next one. A residual moves
only when the round was applied: of one that failed nothing was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.frames import pack_control


class Compressor:
    """Codec and residuals of one table, slice by slice.

    Args:
        codec: How gradients are compressed.
        plan: The table's layout; residuals start at zero.
    """

    def __init__(self, codec: Codec, plan: Plan) -> None:
        self.codec = codec
        self.packed_codec = pack_control(codec.spec())
        self._plan = plan
        self._residuals: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}

    def encode(
        self, values: Mapping[str, Tensor], slices: Sequence[Slice], absent: frozenset[int]
    ) -> dict[int, Tensor]:
        """Compress some slices of flat arenas; residuals stay as they are until `accept`.

        The residual of a key that is `absent` does not move at all.

        Raises:
            NonFiniteGradientError: a gradient is infinite or not a number; nothing has changed.
        """
        self._next = {}
        return {piece.index: self._encode(values, piece, absent) for piece in slices}

    def accept(self) -> None:
        """The round was applied: what it did not say is left for the next one."""
        self._residuals |= self._next
        self._next = {}

    def residuals(self) -> dict[int, Tensor]:
        """The residual of every key (by index) that has one, in the key's shape; copies."""
        found: dict[int, Tensor] = {}
        for piece in self._plan.slices:
            kept = self._residuals.get(piece.index)
            if kept is None:
                continue
            for segment in piece.segments:
                spec = self._plan.specs[segment.key]
                whole = found.setdefault(segment.key, torch.zeros(spec.numel, dtype=kept.dtype))
                part = kept[segment.start : segment.start + segment.numel]
                whole[segment.key_start : segment.key_start + segment.numel] = part
        return {key: whole.view(self._plan.specs[key].shape) for key, whole in found.items()}

    def set_residuals(self, residuals: Mapping[int, Tensor]) -> None:
        """Replace all residuals; a key without an entry starts at zero."""
        self._residuals, self._next = {}, {}
        for piece in self._plan.slices:
            kept = self._residual_of(piece) if self._plan.is_resident(piece) else None
            if kept is None:
                continue
            kept = kept.clone()
            for segment in piece.segments:
                whole = residuals.get(segment.key)
                if whole is not None:
                    part = whole.reshape(-1)[segment.key_start : segment.key_start + segment.numel]
                    kept[segment.start : segment.start + segment.numel] = part
            self._residuals[piece.index] = kept

    def _encode(self, values: Mapping[str, Tensor], piece: Slice, absent: frozenset[int]) -> Tensor:
        grad = values[piece.dtype][piece.offset : piece.offset + piece.used]
        out = torch.empty(self.codec.encoded_nbytes(piece.used, piece.dtype), dtype=torch.uint8)
        residual = self._residual_of(piece)
        if residual is None:
            self.codec.encode(grad, None, out)
            return out
        following = torch.empty_like(residual)
        self.codec.encode(grad, residual, out, following)
        for segment in piece.segments:
            if segment.key in absent:
                part = slice(segment.start, segment.start + segment.numel)
                following[part] = residual[part]
        self._next[piece.index] = following
        return out

    def _residual_of(self, piece: Slice) -> Tensor | None:
        return residual_of(self.codec, self._residuals.get(piece.index), piece.used, piece.dtype)


def residual_of(codec: Codec, kept: Tensor | None, numel: int, dtype: str) -> Tensor | None:
    """Find what earlier rounds left of a gradient, zeros at first; None where nothing is ever lost."""
    kind = codec.residual_dtype(dtype)
    if kind is None:
        return None
    return torch.zeros(numel, dtype=kind) if kept is None else kept
