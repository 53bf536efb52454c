"""New weights as encoded changes: the weights that workers have, and what they are sent to have newer ones.

The server encodes by how much its weights differ from those that workers have, and changes its copy of theirs by what
it sends, as they do. What the codec leaves out is so part of the next difference: nothing is lost, it only comes later
(error feedback in both directions; Tang et al., DoubleSqueeze, 2019). All workers have the same weights, to the bit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import Codec, compute_dtype
from kvstore_server.errors import NonFiniteGradientError, ProtocolError
from kvstore_server.plan import ITEM_SIZE
from kvstore_server.shard.storage import Storage, Unit

STEPS_KEPT = 64
"""Changes that are kept for workers that lack several of them."""


class _Step(NamedTuple):
    """How the weights of workers changed once."""

    before: int
    """The version before."""
    changes: dict[int, Tensor | None]
    """Slot → the change, encoded; None where it could not be."""
    nbytes: int


class Deltas:
    """The weights that workers have of one table, by slot, and how these came about.

    Args:
        codec: How changes are encoded.
        storage: Where the server's own weights are.
        unit: The slices of the table; of integers there are no changes.
    """

    def __init__(self, codec: Codec, storage: Storage, unit: Unit) -> None:
        self.version = -1
        """The version of the table which the weights of workers follow."""
        self.codec, self._storage = codec, storage
        self.weights: dict[int, Tensor] = {}
        """Slot → those of workers, with padding, if changes of it are sent."""
        pieces = [piece for own in unit.stacks.values() for piece in own if piece.dtype in ITEM_SIZE]
        self._pieces = {unit.slots[piece.index]: piece for piece in pieces}
        self._still: frozenset[int] | None = None
        """The keys (by index) that no round since the last change has updated; None where there was no round."""
        self._exact: dict[int, int] = {}
        """Slot that is sent as it is → the version from which on workers have it so."""
        self._steps: deque[_Step] = deque()
        self._is_reset = True
        self._zeros = self._left = torch.empty(0, device="cpu")

    def __contains__(self, slot: int) -> bool:
        """Tell whether changes of a slot are sent."""
        return slot in self.weights

    def reset(self) -> None:
        """Give workers the next weights as they are, for they were replaced."""
        self._is_reset = True

    def note_round(self, left_out: Iterable[int]) -> None:
        """Note that a round has updated all keys but those (by index) that were left out.

        What was kept back of these comes when they are updated again: a key that was frozen has the weights that
        workers saw last.
        """
        self._still = frozenset(left_out) if self._still is None else self._still.intersection(left_out)

    def leave(self, slots: Iterable[int], version: int) -> None:
        """Send some slots as they are from a version on, and rows of them."""
        for slot in slots:
            del self.weights[slot]
            self._exact[slot] = version

    def has_exact(self, slot: int, held: int) -> bool:
        """Tell whether weights of version `held` equal the server's, as far as rows say."""
        return slot not in self.weights and held >= self._exact.get(slot, -1)

    def follow(self, version: int) -> None:
        """Bring workers' weights as near to the server's at a version as one change can."""
        if version == self.version:
            return
        if self._is_reset:
            own = [slot for slot in self._pieces if slot not in self._exact]
            self.weights = {slot: self._storage.padded[slot].clone() for slot in own}
            self._steps.clear()
            self._is_reset = False
        else:
            changes = {slot: self._change(slot, weights) for slot, weights in self.weights.items()}
            nbytes = sum([one.nbytes for one in changes.values() if one is not None])
            self._steps.append(_Step(self.version, changes, nbytes))
            # Half precision is encoded as float32, so a byte for each number is as much as half of its weights there.
            numbers = [(len(one), compute_dtype(_name(one)).itemsize) for one in self.weights.values()]
            most = sum([numel * itemsize for numel, itemsize in numbers]) // 2
            while len(self._steps) > STEPS_KEPT or sum([step.nbytes for step in self._steps]) > most:
                self._steps.popleft()
        self.version, self._still = version, None

    def _change(self, slot: int, weights: Tensor) -> Tensor | None:
        """Encode the difference of a slot, and change the weights of workers by it; None where they are copied.

        It is nothing where there is no difference: a zero that has another sign is none. Keys that no round has updated
        since the last change stay as they are.
        """
        given, dtype = self._storage.padded[slot], compute_dtype(_name(weights))
        segments, keys = self._pieces[slot].segments, self._still or ()
        still = [slice(one.start, one.start + one.numel) for one in segments if one.key in keys]
        if len(still) == len(segments) or torch.equal(given, weights):  # at the first difference it is over
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        numel = len(weights)
        if len(self._zeros) < numel or self._zeros.dtype != dtype:
            self._zeros, self._left = (
                torch.zeros(numel, dtype=dtype, device="cpu"),
                torch.empty(numel, dtype=dtype, device="cpu"),
            )
        change = torch.empty(
            self.codec.encoded_nbytes(numel, _name(self._zeros)), dtype=torch.uint8, device="cpu"
        )
        try:
            difference = given.to(dtype) - weights.to(dtype)
            for part in still:
                difference[part] = 0
            self.codec.encode(difference, self._zeros[:numel], change, self._left[:numel])
        except NonFiniteGradientError:
            kept = [weights[part].clone() for part in still]
            weights.copy_(given)
            for part, numbers in zip(still, kept, strict=True):
                weights[part] = numbers
            return None
        add_changes(self.codec, change, weights)
        return change

    def parts(self, slot: int, held: int) -> tuple[Tensor, bool]:
        """Return what a worker of version `held` lacks of a slot. Also tell whether that is changes.

        Otherwise it is a copy of all weights.
        """
        steps = list(itertools.dropwhile(lambda step: step.before != held, self._steps))
        changes = [step.changes.get(slot) for step in steps]
        if held == self.version:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), True
        found = [one for one in changes if one is not None]
        if steps and len(found) == len(steps):
            return found[0] if len(found) == 1 else torch.cat(found), True
        return self.weights[slot].clone(), False


def add_changes(codec: Codec, changes: Tensor, weights: Tensor) -> None:
    """Add encoded changes of some weights to them, one after the other.

    Raises:
        ProtocolError: they are not whole changes of so many weights.
    """
    dtype = _name(torch.empty(0, dtype=compute_dtype(_name(weights)), device="cpu"))
    size = codec.encoded_nbytes(len(weights), dtype)
    if len(changes) % size:
        raise ProtocolError(
            f"{len(changes)} bytes of changes of {len(weights)} weights came; they have {size} bytes each as "
            f"{codec.name!r}"
        )
    for start in range(0, len(changes), size):
        one = changes[start : start + size]
        codec.check_payload(one, dtype, len(weights))
        if dtype == _name(weights):
            codec.decode_add(one, dtype, weights)
        else:
            # What was finite stays so, although what the codec has rounded up may have no room in half precision.
            most, is_inf = torch.finfo(weights.dtype).max, weights.isinf()
            codec.decode_add(one, dtype, weights)
            weights.copy_(torch.where(is_inf, weights, weights.clamp(-most, most)))


def _name(numbers: Tensor) -> str:
    return str(numbers.dtype).removeprefix("torch.")
