"""A cut: all that a server needs to continue a job from a round's end, as plain values and tensors.

It is *logical*: weights and optimizer state by table and slice, and the rest as an image (`image`) without processes
and places in memory. Slices do not depend on the number of servers, so the slices of a table can be collected from
the snapshots of any number of them.

`make_cut` copies, and is all that training waits for. `tensors_of_cuts` and `read_spaces` convert a cut to the contents
of a file and back; `restore_space` fills a namespace with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.durable.snapshot_folder import StoredSnapshot
from kvstore_server.engine.image import (
    Image,
    apply_image,
    make_common_image,
    pack_image,
    register_of_image,
    unpack_image,
)
from kvstore_server.engine.membership import Sessions
from kvstore_server.engine.namespace import Namespace
from kvstore_server.engine.table import Table
from kvstore_server.errors import RecoveryError
from kvstore_server.optimizer.state import States, bytes_of, describe_states, unpack_states

_LINE = 64
_MIN_CHUNK = 16 << 20


class CutBuffer:
    """Memory for the copies of a cut, which is used again for the next one.

    Args:
        claim: Called with the bytes of new memory before it is allocated, and may raise; with their negative to return
            them.
    """

    def __init__(self, claim: Callable[[int], None] = lambda nbytes: None) -> None:
        self._claim = claim
        self._chunks: list[Tensor] = []
        self._at = 0
        """The chunk in which the next copy goes, and how much of it is taken."""
        self._used = 0

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def reset(self) -> None:
        """Let the memory of all copies be overwritten by the next ones."""
        self._at = self._used = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a contiguous tensor on the CPU."""
        nbytes = -(-tensor.nbytes // _LINE) * _LINE
        while self._at < len(self._chunks) and self._used + nbytes > self._chunks[self._at].nbytes:
            self._at, self._used = self._at + 1, 0
        if self._at == len(self._chunks):
            self._allocate(max(nbytes, _MIN_CHUNK))
        own = self._chunks[self._at][self._used : self._used + tensor.nbytes]
        self._used += nbytes
        return own.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def release(self) -> None:
        """Return the memory; copies that are still in use keep theirs until they are not."""
        self._claim(-self.nbytes)
        self._chunks.clear()
        self.reset()

    def _allocate(self, nbytes: int) -> None:
        self._claim(nbytes)
        try:
            self._chunks.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        except BaseException:
            self._claim(-nbytes)
            raise


@dataclass(frozen=True)
class SpaceCut:
    """The tables of one namespace.

    Args:
        image: As `make_common_image` returns it.
        counts: The update counts of each table's keys.
        weights, states: By table (number) and slice (index).
    """

    image: Image
    counts: Sequence[bytes]
    weights: Mapping[tuple[int, int], Tensor]
    states: Mapping[tuple[int, int], States]


def make_cut(spaces: Iterable[Namespace], buffer: CutBuffer) -> list[SpaceCut]:
    """Copy the present state of some namespaces, which changes in no way until this returns."""
    buffer.reset()
    found = []
    for space in spaces:
        weights, states, counts = {}, {}, []
        shard = space.shard
        for table in space.tables:
            unit = table.unit
            for slice_ in unit.slices:
                place = table.number, slice_.index
                weights[place] = buffer.copy(shard.storage.padded[unit.slots[slice_.index]])
                states[place] = shard.get_state(unit, slice_.index, buffer.copy)
            counts.append(_cut_update_counts(space, table).tobytes())
        found.append(SpaceCut(make_common_image(space), counts, weights, states))
    return found


def tensors_of_cuts(cuts: Sequence[SpaceCut]) -> dict[str, Tensor]:
    """Return a cut as the contents of a file of tensors."""
    found: dict[str, Tensor] = {}
    for number, cut in enumerate(cuts):
        summaries = []
        for (table, index), weights in cut.weights.items():
            name = f"{number}/{table}/{index}"
            found[f"{name}/weights"] = weights
            summary, parts = describe_states(cut.states[table, index])
            summaries.append([table, index, summary])
            found |= {f"{name}/state {at}": part for at, part in enumerate(parts)}
        image = pack_image({**cut.image, "counts": list(cut.counts), "slices": summaries})
        found[f"{number}/image"] = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    return found


@dataclass(frozen=True)
class StoredSlice:
    weights: Tensor
    summary: Mapping[str, Any]
    parts: Sequence[Tensor]


@dataclass(frozen=True)
class StoredSpace:
    """What a snapshot has of one namespace.

    Args:
        slices: By table (number) and slice (index).
    """

    image: Image
    slices: Mapping[tuple[int, int], StoredSlice]

    @property
    def name(self) -> str:
        return str(self.image["space"][0])


def read_spaces(snapshot: StoredSnapshot) -> list[StoredSpace]:
    """Read all of a snapshot. Raises RecoveryError if it is damaged, or contradicts itself."""
    tensors = dict(snapshot.tensors())
    try:
        return [
            _read_cut_space(number, tensors)
            for number in range(sum(one.endswith("/image") for one in tensors))
        ]
    except (LookupError, TypeError, ValueError) as error:
        raise RecoveryError(f"{snapshot.name} in {snapshot.folder} contradicts itself: {error!r}") from error


def _read_cut_space(number: int, tensors: Mapping[str, Tensor]) -> StoredSpace:
    image = unpack_image(bytes_of(tensors[f"{number}/image"]))
    slices = {}
    for table, index, summary in image["slices"]:
        name = f"{number}/{table}/{index}"
        parts = [tensors[f"{name}/state {at}"] for at in range(len(summary["tensors"]))]
        slices[table, index] = StoredSlice(tensors[f"{name}/weights"], summary, parts)
    return StoredSpace(image, slices)


def restore_space(space: Namespace, stored: StoredSpace, sessions: Sessions) -> None:
    """Fill a new namespace: its optimizer, its tables in their order, and what they hold.

    Raises:
        RecoveryError: What was stored does not fit together.
        KVStoreError: As for the requests that have made it, for example because there is no memory.
    """
    image = stored.image
    for rank, spec in image["optimizer"]:
        space.set_optimizer(rank, spec)
    for row in image["declared"]:
        space.register(*register_of_image(row))
    for table, counts in zip(space.tables, image["counts"], strict=True):
        _cut_update_counts(space, table)[:] = np.frombuffer(counts, np.int64)
        for slice_ in table.unit.slices:
            found = stored.slices.get((table.number, slice_.index))
            if found is None:
                raise RecoveryError(f"the snapshot does not have slice {slice_.index} of {table.name!r}")
            put_cut_slice(table, slice_.index, found)
    apply_image(space, sessions, image)
    space.claim_restored()
    for table in space.tables if space.shard.tracks_changes else ():
        table.unit.changes.begin(table.version)


def put_cut_slice(table: Table, index: int, stored: StoredSlice) -> None:
    """Replace the weights and the optimizer's state of a slice. Raises RecoveryError if they do not fit it."""
    slice_ = table.plan.slices[index]
    if tuple(stored.weights.shape) != (slice_.length,) or stored.weights.dtype != torch_dtype(slice_.dtype):
        raise RecoveryError(
            f"slice {index} of {table.name!r} has {slice_.length} numbers of {slice_.dtype}, the snapshot's "
            f"{list(stored.weights.shape)} of {stored.weights.dtype}"
        )
    data = b"".join(map(bytes_of, stored.parts))
    table.shard.put_weights(table.unit, index, stored.weights)
    table.shard.put_state(table.unit, index, unpack_states(slice_, stored.summary, data))


def _cut_update_counts(space: Namespace, table: Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    first = table.unit.first_key
    return space.shard.counts[first : first + len(table.unit.plan.specs)]
