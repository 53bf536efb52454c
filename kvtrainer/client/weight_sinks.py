"""Where new weights of a table arrive on a worker: `WeightSink`, and what it maps instead of copying.

`MappedWeightSink` maps the servers' memory privately over the parameters' own. A clean page shows what the server
writes; a page that the loop writes to becomes private to this process, and the system's page map tells which pages are.
So `written` finds what the loop has changed: pages with the same bytes as the server's are given back, and all others
are reported. A slice begins at the same offset in its page as on the server. Pages at its ends, which it may share
with a slice of another server, are not mapped but copied.

`PrivateWeightSink` does the same with a file of this process to which rounds write weights that come in messages.
`CopyWeightSink` is for asynchronous rounds where pages do not tell. Weights of a CUDA device arrive in a `StagingSink`
(`kvtrainer/sync/device_staging.py`).

Servers count the beginning and the end of each write in counters behind the weights (a seqlock). After a round that
failed these tell which slices some servers have begun to write and others not.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.engine.memory import available_memory
from kvstore_server.plan import LONG, PAGE, SIZES, Plan, Slice
from kvstore_server.shard.storage import write_counters_in
from kvstore_server.transport.arena import SharedArena
from kvstore_server.transport.pages import MOVED_AT_ONCE, PageSystem, split_neighbouring_pages
from kvtrainer.types import Arenas

_FEW_PAGES = 16
"""Checking this many unmapped pages costs less than another system call."""


class WeightSink:
    """Where new weights of a table arrive on this worker; this one: where rounds are told to write them.

    When a round has ended everywhere, the client names each slice: `map` for one that can be read in its server's
    memory, `unmap` for one that came as bytes and was written to `outs`. Then it calls `commit`, or `roll_back` if
    the round failed. Between rounds `written` finds the weights that the loop has changed, if the system tells.

    No sink is thread-safe.
    """

    maps = False
    """Whether servers may answer with the location of weights in their memory, instead of the weights."""
    holds_all = True
    """Whether memory that rounds write to holds all weights of the last round."""
    problem: OSError | None = None
    """Why some slice could not be mapped, so that its present weights are not here."""
    changes = 0
    """How often `unwatched` has changed."""

    def outs(self, weights: Arenas) -> Arenas:
        """Return where rounds write new weights."""
        return weights

    def is_mapped(self, slice_: Slice, server: int, location: int, memory: SharedArena | None) -> bool:
        """Return whether a slice is read from there already.

        Args:
            memory: The memory with this location; None if the channel to its server was lost. A server that was
                restarted may number its memory in another way.
        """
        raise AssertionError("nothing is mapped here")

    def map(self, slice_: Slice, server: int, location: int, memory: SharedArena, begin: int) -> None:
        """Read a slice from where it begins in a server's memory. Raises OSError if that is impossible."""
        raise AssertionError("nothing is mapped here")

    def unmap(self, slice_: Slice) -> None:
        """Record that a slice was written to `outs`: its server's memory does not show it now."""

    def commit(self) -> None:
        """End a round that was applied."""

    def roll_back(self) -> set[int]:
        """End a round that failed; returns slices (by index) that some servers have begun to write, and others not."""
        return set()

    def deliver(self, weights: Arenas, outs: Arenas) -> None:
        """Copy what a round has written to `outs` to where it was to arrive, if that is another memory."""

    def written(self) -> set[int]:
        """Return the slices (by index) that the loop has changed since the last round, where pages tell."""
        return set()

    def unwatched(self) -> dict[str, list[tuple[int, int]]]:
        """Return the parts that `written` does not watch, as (begin, end) in bytes, whole lines, by dtype."""
        raise AssertionError("nothing is watched here")

    def accept(self, weights: Arenas) -> None:
        """Take the weights as they are now for what rounds have brought."""

    def attach(self) -> None:
        """Show what rounds have brought everywhere, whatever the loop has changed."""

    def release(self) -> None:
        """Make all weights private memory of this process, as they are now. Nothing is mapped afterwards."""


IN_PLACE = WeightSink()


class CopyWeightSink(WeightSink):
    """Rounds write to a copy, so that it is known what came last while the store may have newer weights."""

    def __init__(self, weights: Arenas) -> None:
        self._copies = {dtype: flat.clone() for dtype, flat in weights.items()}

    def outs(self, weights: Arenas) -> Arenas:
        return self._copies

    def deliver(self, weights: Arenas, outs: Arenas) -> None:
        for dtype, copy in outs.items():
            weights[dtype].copy_(copy)

    def accept(self, weights: Arenas) -> None:
        for dtype, copy in self._copies.items():
            copy.copy_(weights[dtype])


class _Mapped(NamedTuple):
    slice_: Slice
    server: int
    location: int
    source: Tensor
    """The server's bytes of it; all of them."""
    memory: int
    """The address of all its memory."""
    lines: slice
    """Its write counters there."""
    first: int
    """Where its own pages begin, and end, in bytes of the arena of its dtype."""
    end: int


class MappedWeightSink(WeightSink):
    """Maps the servers' memory in place of the parameters' where it can.

    Args:
        flats: Dtype → where a worker reads its weights; pages of their own, which can be replaced.

    Raises:
        OSError: this system cannot do it, or does not tell which pages are this process's own.
    """

    def __init__(self, flats: Mapping[str, Tensor]) -> None:
        self._system = PageSystem()
        self._flats = {dtype: flat.view(torch.uint8) for dtype, flat in flats.items()}
        self._slices: dict[int, _Mapped] = {}
        self._edges: tuple[list[Tensor], list[Tensor]] | None = None
        """(target, source) of the bytes on pages that are not mapped."""
        self._counters: dict[int, tuple[Any, Any]] = {}
        """Address of a server's memory → its write counters, and their values after the last applied round."""
        self._runs: list[tuple[str, int, int]] | None = None
        """(dtype, begin, end) of mapped pages, in bytes; neighbours with few other pages between them are one."""
        self._is_page_mapped: dict[str, Any] = {}
        """Dtype → for each page of its arena, whether it is mapped."""
        self.maps = True

    def is_mapped(self, slice_: Slice, server: int, location: int, memory: SharedArena | None) -> bool:
        found = self._slices.get(slice_.index)
        if found is None or (found.server, found.location) != (server, location):
            return False
        return memory is None or found.memory == memory.data.data_ptr()

    def map(self, slice_: Slice, server: int, location: int, memory: SharedArena, begin: int) -> None:
        """Map the pages of a slice onto a server's memory in place of the arena's.

        Args:
            location: Where the server says that the slice is; compared by `is_mapped`.
            begin: The byte of the slice in `memory`.

        Raises:
            OSError: The pages do not lie alike in both, the slice exceeds one of them, or the kernel refuses.
        """
        size = SIZES[slice_.dtype]
        flat, at, nbytes = self._flats[slice_.dtype], slice_.offset * size, slice_.used * size
        first, end = -(-at // PAGE) * PAGE, (at + nbytes) // PAGE * PAGE
        if (at - begin) % PAGE or begin + nbytes > memory.nbytes or at + nbytes > len(flat):
            raise OSError(f"slice {slice_.index} is at {begin} of {memory.nbytes} bytes")
        self._system.map(flat.data_ptr() + first, end - first, memory.fd, begin + first - at)
        source, base = memory.data[begin : begin + nbytes], memory.data.data_ptr()
        lines = slice(begin // LONG, -(-(begin + nbytes) // LONG))
        self._slices[slice_.index] = _Mapped(slice_, server, location, source, base, lines, first, end)
        counters = write_counters_in(memory.data)
        self._counters.setdefault(base, (counters, counters.copy()))
        self._record_change()

    def unmap(self, slice_: Slice) -> None:
        if self._slices.pop(slice_.index, None) is not None:
            self._record_change()

    def commit(self) -> None:
        self._copy_ends()
        if self._runs is None:  # some memory may have no slices any more: that of a server that was restarted
            used = {one.memory for one in self._slices.values()}
            self._counters = {base: own for base, own in self._counters.items() if base in used}
        self._counters = {base: (counters, counters.copy()) for base, (counters, _) in self._counters.items()}

    def _copy_ends(self) -> None:
        """Copy the bytes of slices on pages that are not mapped."""
        targets, sources = self._edges_now()
        if targets:
            torch._foreach_copy_(targets, sources)

    def roll_back(self) -> set[int]:
        self._copy_ends()  # or they would seem to have been written by the loop
        changed, written = set[int](), set[int]()
        # A slice has changed if a write has begun. If all were written to the end, they are of one round.
        for index, one in self._slices.items():
            counters, before = self._counters[one.memory]
            begun, ended = counters[:, one.lines]
            if (begun != before[0, one.lines]).any():
                changed.add(index)
                written |= {index} if (begun == ended).all() else set()
        return set() if len(written) == len(self._slices) else changed

    def attach(self) -> None:
        for dtype, own in self._own_pages():
            for some in split_neighbouring_pages(own):
                address = self._flats[dtype].data_ptr() + int(some[0]) * PAGE
                self._system.forget(address, len(some) * PAGE)
        self.commit()

    def written(self) -> set[int]:
        """See `WeightSink`; pages that hold the servers' bytes again are given back to these."""
        found: set[int] = set()
        for dtype, own in self._own_pages():
            found |= self._differing_slices(dtype, own * PAGE)
        targets, sources = self._edges_now()
        if targets and not torch.equal(torch.cat(targets), torch.cat(sources)):
            found.update(at for at, one in self._slices.items() if self._ends_differ(one))
        return found

    def unwatched(self) -> dict[str, list[tuple[int, int]]]:
        found = {}
        for dtype, flat in self._flats.items():
            slices = [one.slice_ for one in self._slices.values() if one.slice_.dtype == dtype]
            size = SIZES[dtype]
            parts = sorted(
                (one.offset * size, min((one.offset + one.length) * size, len(flat))) for one in slices
            )
            begins, ends = [0, *(end for _, end in parts)], [*(begin for begin, _ in parts), len(flat)]
            found[dtype] = [(a, b) for a, b in zip(begins, ends, strict=True) if a < b]
        return found

    def release(self) -> None:
        for one in self._slices.values():
            address = self._flats[one.slice_.dtype].data_ptr() + one.first
            kept = self._flats[one.slice_.dtype][one.first : one.end].clone()
            self._system.map(address, one.end - one.first, -1, 0)
            self._flats[one.slice_.dtype][one.first : one.end].copy_(kept)
        self._slices.clear()
        self.maps, self.problem = False, None
        self._record_change()

    def _own_pages(self) -> Iterator[tuple[str, Any]]:
        for dtype, begin, end in self._runs_now():
            own = self._system.own_pages(self._flats[dtype].data_ptr() + begin, end - begin) + begin // PAGE
            own = own[self._is_page_mapped[dtype][own]]
            if len(own):
                yield dtype, own

    def _record_change(self) -> None:
        self._edges = self._runs = None
        self.changes += 1

    def _ends_of(self, one: _Mapped) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a slice's bytes in front of its mapped pages and behind, here and at its server."""
        at = one.slice_.offset * SIZES[one.slice_.dtype]
        here = self._flats[one.slice_.dtype][at : at + len(one.source)]
        for part in (slice(0, one.first - at), slice(one.end - at, len(here))):
            if len(here[part]):
                yield here[part], one.source[part]

    def _ends_differ(self, one: _Mapped) -> bool:
        return not all(torch.equal(here, there) for here, there in self._ends_of(one))

    def _edges_now(self) -> tuple[list[Tensor], list[Tensor]]:
        if self._edges is None:
            pairs = [pair for one in self._slices.values() for pair in self._ends_of(one)]
            self._edges = [here for here, _ in pairs], [there for _, there in pairs]
        return self._edges

    def _runs_now(self) -> list[tuple[str, int, int]]:
        if self._runs is None:
            runs: list[tuple[str, int, int]] = []
            self._is_page_mapped = {
                dtype: np.zeros(len(flat) // PAGE, np.bool_) for dtype, flat in self._flats.items()
            }
            for one in sorted(self._slices.values(), key=lambda one: (one.slice_.dtype, one.first)):
                if one.first >= one.end:
                    continue
                self._is_page_mapped[one.slice_.dtype][one.first // PAGE : one.end // PAGE] = True
                if runs and runs[-1][0] == one.slice_.dtype and one.first <= runs[-1][2] + _FEW_PAGES * PAGE:
                    runs[-1] = (one.slice_.dtype, runs[-1][1], one.end)
                else:
                    runs.append((one.slice_.dtype, one.first, one.end))
            self._runs = runs
        return self._runs

    def _differing_slices(self, dtype: str, pages: Any) -> set[int]:
        """Return the slices whose private pages differ from the server's; pages that are equal are given back."""
        found: set[int] = set()
        flat = self._flats[dtype]
        for one in self._slices.values():
            mine = pages[(pages >= one.first) & (pages < one.end)] if one.slice_.dtype == dtype else pages[:0]
            at = one.slice_.offset * SIZES[dtype]
            for some in split_neighbouring_pages(mine // PAGE):
                begin, end = int(some[0]) * PAGE, int(some[-1]) * PAGE + PAGE
                if torch.equal(flat[begin:end], one.source[begin - at : end - at]):
                    self._system.forget(flat.data_ptr() + begin, end - begin)
                else:
                    found.add(one.slice_.index)
        return found


class PrivateWeightSink(WeightSink):
    """Rounds write weights that come in messages to a file, which the parameters' memory maps privately.

    A clean page of the parameters shows the file, so `written` works as that of `MappedWeightSink`, wherever the
    servers are.

    Args:
        flats: Dtype → the parameters' memory: whole pages, which are replaced.
        plan: The layout.

    Raises:
        OSError: this system cannot do it, does not tell which pages are private, or lacks the memory. `flats` may be
            used.
    """

    changes = 1
    """All are watched from the start."""

    @torch.inference_mode(False)
    def __init__(self, flats: Mapping[str, Tensor], plan: Plan) -> None:
        self._system = PageSystem()
        self._flats = {dtype: flat.view(torch.uint8) for dtype, flat in flats.items()}
        self._plan = plan
        needed, available = sum([flat.nbytes for flat in flats.values()]), available_memory()
        if needed > available:  # otherwise the system may kill a process when the pages fill
            raise OSError(errno.ENOMEM, f"{needed} bytes are needed for that, {available} are available")
        self._files = {dtype: self._replace(flat) for dtype, flat in flats.items()}
        """Dtype → the file's memory."""

    def outs(self, weights: Arenas) -> Arenas:
        return self._files

    def _replace(self, flat: Tensor) -> Tensor:
        """Replace a tensor's pages by those of a new file with the same values; returns the file's memory."""
        if not flat.numel():
            return flat
        nbytes = -(-flat.nbytes // PAGE) * PAGE
        fd = os.memfd_create("kvtrainer-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)[: flat.nbytes]
            there, here = torch.from_numpy(memory), flat.view(torch.uint8)
            for at in range(0, nbytes, MOVED_AT_ONCE):  # in steps, so that not all of it exists twice
                there[at : at + MOVED_AT_ONCE].copy_(here[at : at + MOVED_AT_ONCE])
                self._system.map(flat.data_ptr() + at, min(MOVED_AT_ONCE, nbytes - at), fd, at)
        finally:
            os.close(fd)
        return there.view(flat.dtype)

    def written(self) -> set[int]:
        """Return the slices (by index) that differ from what was received; pages that do not are dropped."""
        found: set[int] = set()
        for dtype, shown in self._flats.items():
            there, size = self._files[dtype].view(torch.uint8), SIZES[dtype]
            for begin, end in self._private_ranges(shown):
                if torch.equal(shown[begin:end], there[begin:end]):
                    self._system.forget(shown.data_ptr() + begin, -(-(end - begin) // PAGE) * PAGE)
                    continue
                found.update(
                    one.index
                    for one in self._plan.slices
                    if one.dtype == dtype
                    and one.offset * size < end
                    and (one.offset + one.length) * size > begin
                )
        return found

    def attach(self) -> None:
        for shown in self._flats.values():
            for begin, end in self._private_ranges(shown):
                self._system.forget(shown.data_ptr() + begin, -(-(end - begin) // PAGE) * PAGE)

    def accept(self, weights: Arenas) -> None:
        for dtype, shown in self._flats.items():
            for begin, end in self._private_ranges(shown):
                self._files[dtype].view(torch.uint8)[begin:end].copy_(shown[begin:end])
        self.attach()

    def release(self) -> None:
        for shown in self._flats.values():
            for at in range(0, len(shown), MOVED_AT_ONCE):
                part = shown[at : at + MOVED_AT_ONCE]
                kept = part.clone()
                self._system.map(part.data_ptr(), -(-len(part) // PAGE) * PAGE, -1, 0)
                part.copy_(kept)
        self._flats, self._files = {}, {}

    def unwatched(self) -> dict[str, list[tuple[int, int]]]:
        return {dtype: [] for dtype in self._flats}

    def _private_ranges(self, shown: Tensor) -> Iterator[tuple[int, int]]:
        if len(shown):
            pages = self._system.own_pages(shown.data_ptr(), -(-len(shown) // PAGE) * PAGE)
            for some in split_neighbouring_pages(pages):
                yield int(some[0]) * PAGE, min(int(some[-1]) * PAGE + PAGE, len(shown))
