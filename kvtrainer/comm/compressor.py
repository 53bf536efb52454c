"""Compression with error feedback: of one rank's contributions to one table, and what is kept back of anything.

What a compressed gradient does not say stays behind as a residual and is added to the next one. A residual moves
only when the round was applied: of one that failed nothing was said.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kvstore_server.codec import Codec
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.frames import pack_control

Place = TypeVar("Place", bound=Hashable)


class Residuals(Generic[Place]):
    """What rounds left of gradients, each of which has a place, and what the present one leaves.

    Memory is used again: to get fresh memory from the system takes longer than to encode into it.
    """

    def __init__(self, codec: Codec) -> None:
        self.kept: dict[Place, Tensor] = {}
        self.following: dict[Place, Tensor] = {}
        """What takes their place if the round is applied."""
        self._codec = codec
        self._spare: dict[Place, Tensor] = {}

    def pair(self, place: Place, numel: int, dtype: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The residual of a gradient, zeros at first, and memory for the next one; None where nothing is ever lost."""
        kind = self._codec.residual_dtype(dtype)
        if kind is None:
            return None, None
        kept, spare = self.kept.get(place), self._spare.pop(place, None)
        kept = torch.zeros(numel, dtype=kind) if kept is None else kept
        return kept, torch.empty_like(kept) if spare is None else spare

    def accept(self, place: Place) -> None:
        """The round of a gradient was applied."""
        if place in self.kept:
            self._spare[place] = self.kept[place]
        self.kept[place] = self.following.pop(place)

    def forget(self, kept: Collection[Place] = ()) -> None:
        """Drop what would follow, except for some: it did not count."""
        for place in self.following.keys() - kept:
            self._spare[place] = self.following.pop(place)


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
        self._residuals = Residuals[int](codec)
        self._bytes: dict[int, Tensor] = {}
        """What was encoded last."""
        self._read: dict[int, Tensor] = {}
        """What servers have read: memory for what is encoded next."""

    def encode(
        self,
        values: Mapping[str, Tensor],
        slices: Sequence[Slice],
        absent: frozenset[int],
        kept: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """Compress some slices of flat arenas; residuals stay as they are until `accept`.

        The residual of a key that is `absent` does not move at all. The bytes may be overwritten once the round was
        applied, and another one is encoded.

        Args:
            kept: Those (by index) that `encode_ahead` has compressed, and that are as they were then.

        Raises:
            NonFiniteGradientError: a gradient is infinite or not a number; nothing has changed.
        """
        self._residuals.forget(kept)
        found = {place: self._bytes[place] for place in kept}
        for piece in slices:
            if piece.index not in found:
                grad = values[piece.dtype][piece.offset : piece.offset + piece.used]
                found[piece.index] = self._encode(grad, piece, absent)
        self._bytes = found
        return dict(found)

    def encode_ahead(self, grad: Tensor, piece: Slice) -> Tensor:
        """Compress a slice that is complete before the others of its round. Raises as `encode`."""
        self._bytes[piece.index] = self._encode(grad, piece, frozenset())
        return self._bytes[piece.index]

    def has_encoded(self, index: int) -> bool:
        """Tell whether a slice (by index) was compressed since the last round, with the residual that it has now."""
        return index in self._bytes

    def begin(self) -> None:
        """Begin a round: what was encoded for one that was not applied did not count."""
        self._residuals.forget()
        self._bytes = {}

    def accept(self) -> None:
        """The round was applied: what it did not say is left for the next one."""
        for place in list(self._residuals.following):
            self._residuals.accept(place)
        self._read |= self._bytes
        self._bytes = {}

    def residuals(self) -> dict[int, Tensor]:
        """The residual of every key (by index) that has one, in the key's shape; copies."""
        found: dict[int, Tensor] = {}
        for piece in self._plan.slices:
            kept = self._residuals.kept.get(piece.index)
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
        fresh = Residuals[int](self.codec)
        for piece in self._plan.slices:
            kept, _ = fresh.pair(piece.index, piece.used, piece.dtype)
            if kept is None or not self._plan.is_resident(piece):
                continue
            for segment in piece.segments:
                whole = residuals.get(segment.key)
                if whole is not None:
                    part = whole.reshape(-1)[segment.key_start : segment.key_start + segment.numel]
                    kept[segment.start : segment.start + segment.numel] = part
            fresh.kept[piece.index] = kept
        self._residuals, self._bytes = fresh, {}

    def _encode(self, grad: Tensor, piece: Slice, absent: frozenset[int]) -> Tensor:
        out = self._read.pop(piece.index, None)
        if out is None:
            out = torch.empty(self.codec.encoded_nbytes(piece.used, piece.dtype), dtype=torch.uint8)
        residual, following = self._residuals.pair(piece.index, piece.used, piece.dtype)
        self.codec.encode(grad, residual, out, following)
        if residual is None or following is None:
            return out
        for segment in piece.segments:
            if segment.key in absent:
                part = slice(segment.start, segment.start + segment.numel)
                following[part] = residual[part]
        self._residuals.following[piece.index] = following
        return out
