"""New weights as encoded changes.

The server keeps a copy of the weights that workers have. It encodes the difference between its own weights and that
copy, sends it, and applies the encoded change to the copy as workers do. What the codec loses is part of the next
difference, so it is only delayed (error feedback in both directions; Tang et al., DoubleSqueeze, 2019). All workers
have bit-identical weights.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import Codec, compute_dtype
from kvstore_server.errors import NonFiniteGradientError, ProtocolError
from kvstore_server.plan import ITEM_SIZE
from kvstore_server.shard.storage import Storage, Unit

STEPS_KEPT = 64
"""How many changes are stored for workers that lack several."""


class _DeltaStep(NamedTuple):
    before: int
    changes: dict[int, Tensor | None]
    """Slot → the encoded change; None if it could not be encoded."""
    nbytes: int


class Deltas:
    """The weights that workers have of one table, by slot, and the latest changes.

    Args:
        codec: How changes are encoded.
        storage: Contains the server's own weights.
        unit: The slices of the table; integers are not sent as changes.
    """

    def __init__(self, codec: Codec, storage: Storage, unit: Unit) -> None:
        self.version = -1
        """The version of the table that `weights` follows."""
        self.codec, self._storage = codec, storage
        self.weights: dict[int, Tensor] = {}
        """Slot → the weights of workers, with padding, if its changes are sent."""
        slices = [slice_ for own in unit.key_slices.values() for slice_ in own if slice_.dtype in ITEM_SIZE]
        self._slices = {unit.slots[slice_.index]: slice_ for slice_ in slices}
        self._still: frozenset[int] | None = None
        """Keys (by index) that no round has updated since the last change; None if there was no round."""
        self._exact: dict[int, int] = {}
        """Slot that is sent exactly → the version from which on workers have it so."""
        self._steps: deque[_DeltaStep] = deque()
        self._is_reset = True
        self._zeros = self._left = torch.empty(0, device="cpu")

    def __contains__(self, slot: int) -> bool:
        return slot in self.weights

    def reset(self) -> None:
        """Send whole weights next, because they were replaced."""
        self._is_reset = True

    def record_round(self, left_out: Iterable[int]) -> None:
        """Record a round that updated all keys except those (by index) that were left out.

        The stored difference of a left-out key is not sent before its next update: a frozen key keeps the weights that
        workers last saw.
        """
        self._still = frozenset(left_out) if self._still is None else self._still.intersection(left_out)

    def leave(self, slots: Iterable[int], version: int) -> None:
        """From a version on, send some slots exactly (as rows or whole) instead of as changes."""
        for slot in slots:
            del self.weights[slot]
            self._exact[slot] = version

    def has_exact(self, slot: int, held: int) -> bool:
        """Return whether a worker at version `held` has the exact weights of a slot, as far as rows have been sent."""
        return slot not in self.weights and held >= self._exact.get(slot, -1)

    def follow(self, version: int) -> None:
        """Bring workers' weights as close to the server's current ones as one change can."""
        if version == self.version:
            return
        if self._is_reset:
            own = [slot for slot in self._slices if slot not in self._exact]
            self.weights = {slot: self._copy_of(slot) for slot in own}
            self._steps.clear()
            self._is_reset = False
        else:
            changes = {slot: self._change(slot, weights) for slot, weights in self.weights.items()}
            nbytes = sum([one.nbytes for one in changes.values() if one is not None])
            self._steps.append(_DeltaStep(self.version, changes, nbytes))
            # Half precision is encoded as float32. One byte for each element is then half as long as its weights.
            numbers = [
                (len(one), compute_dtype(_delta_dtype_name(one)).itemsize) for one in self.weights.values()
            ]
            most = sum([numel * itemsize for numel, itemsize in numbers]) // 2
            while len(self._steps) > STEPS_KEPT or sum([step.nbytes for step in self._steps]) > most:
                self._steps.popleft()
        self.version, self._still = version, None

    def _copy_of(self, slot: int) -> Tensor:
        kept = self._storage.durable_copy("deltas", slot)
        return self._storage.padded[slot].clone() if kept is None else kept

    def _change(self, slot: int, weights: Tensor) -> Tensor | None:
        """Encode a slot's difference and apply it to the workers' weights; None if they had to be copied instead."""
        given, dtype = self._storage.padded[slot], compute_dtype(_delta_dtype_name(weights))
        segments, keys = self._slices[slot].segments, self._still or ()
        still = [slice(one.start, one.start + one.numel) for one in segments if one.key in keys]
        if len(still) == len(segments) or torch.equal(given, weights):  # stops at the first difference
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        numel = len(weights)
        if len(self._zeros) < numel or self._zeros.dtype != dtype:
            self._zeros, self._left = (
                torch.zeros(numel, dtype=dtype, device="cpu"),
                torch.empty(numel, dtype=dtype, device="cpu"),
            )
        change = torch.empty(
            self.codec.encoded_nbytes(numel, _delta_dtype_name(self._zeros)), dtype=torch.uint8, device="cpu"
        )
        try:
            # Keys without an update keep their weights, in both branches.
            if self._storage.journal is not None:
                self._storage.journal.protect([weights])
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
        add_delta_changes(self.codec, change, weights)
        return change

    def parts(self, slot: int, held: int) -> tuple[Tensor, bool]:
        """Return what a worker at version `held` lacks of a slot, and whether that is changes rather than a copy."""
        steps = list(itertools.dropwhile(lambda step: step.before != held, self._steps))
        changes = [step.changes.get(slot) for step in steps]
        if held == self.version:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), True
        found = [one for one in changes if one is not None]
        if steps and len(found) == len(steps):
            return found[0] if len(found) == 1 else torch.cat(found), True
        return self.weights[slot].clone(), False

    def values(self, known: int | None) -> tuple[list[Any], list[_DeltaStep]]:
        """Return all but the weights, as plain values, and the changes since version `known`; None: all of them."""
        still = None if self._still is None else sorted(self._still)
        values = [self.version, still, self._exact, self._is_reset, sorted(self.weights)]
        new_steps = [step for step in self._steps if known is None or step.before >= known]
        return [*values, [step.before for step in self._steps]], new_steps

    def restore(
        self, values: Sequence[Any], new_steps: Iterable[tuple[int, dict[int, Tensor | None], int]]
    ) -> None:
        """Set what `values` has returned; the weights of workers are in memory that outlives the process."""
        self.version, still, exact, self._is_reset, slots, befores = values
        self._still, self._exact = None if still is None else frozenset(still), dict(exact)
        self.weights = {slot: self._storage.durable_part("deltas", slot) for slot in slots}
        steps = [*self._steps, *(_DeltaStep(*one) for one in new_steps)]
        latest = {step.before: step for step in steps}
        self._steps = deque(latest[before] for before in befores)


def add_delta_changes(codec: Codec, changes: Tensor, weights: Tensor) -> None:
    """Add encoded changes of some weights to them, in order. Raises ProtocolError unless these are whole changes."""
    dtype = _delta_dtype_name(torch.empty(0, dtype=compute_dtype(_delta_dtype_name(weights)), device="cpu"))
    size = codec.encoded_nbytes(len(weights), dtype)
    if len(changes) % size:
        raise ProtocolError(
            f"{len(changes)} bytes of changes of {len(weights)} weights arrived; each change has {size} bytes as "
            f"{codec.name!r}"
        )
    for start in range(0, len(changes), size):
        one = changes[start : start + size]
        codec.check_payload(one, dtype, len(weights))
        if dtype == _delta_dtype_name(weights):
            codec.decode_add(one, dtype, weights)
        else:
            # Finite weights stay finite, although the codec may have rounded beyond the range of half precision.
            most, is_inf = torch.finfo(weights.dtype).max, weights.isinf()
            codec.decode_add(one, dtype, weights)
            weights.copy_(torch.where(is_inf, weights, weights.clamp(-most, most)))


def _delta_dtype_name(numbers: Tensor) -> str:
    return str(numbers.dtype).removeprefix("torch.")
