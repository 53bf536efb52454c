"""Copies between a CUDA device and the host, for weights and gradients that go to servers.

`StagingStream` makes the copies on a stream of its own, to and from pinned memory. `Staging` holds one pinned buffer
for each flat tensor and orders the copies against the current stream. It also pins memory that servers on this host
share, and lets the device read new weights there.

`StagingSink` is where new weights of a device arrive: in the pinned buffers, or in the servers' memory.

Where memory cannot be pinned, copies are slower, and a warning says so. A forked process has no device: there
nothing is unpinned or waited for.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.plan import ALIGNMENT, PAGE, SIZES, Slice
from kvstore_server.transport.arena import SharedArena as Memory
from kvstore_server.transport.pages import put_pages
from kvtrainer.client.weight_sinks import WeightSink
from kvtrainer.types import Arenas

_log = logging.getLogger(__name__)
BufferOverrides = Sequence[tuple[int, Tensor]]
"""(offset, memory on the host) overrides for parts of a flat tensor that are stored outside its buffer, ascending."""
_NO_OVERRIDES: Mapping[str, BufferOverrides] = MappingProxyType({})
_READ_ONLY = 8
"""cudaHostRegisterReadOnly: the device must not write to the memory, as this process may not."""


class StagingStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def place(self, flat: Tensor) -> Tensor:
        """Allocate pinned memory for a tensor of the device; without pinned memory a warning says that copies block."""
        try:
            return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True, device="cpu")
        except RuntimeError as error:
            self._say_why(error)
            return torch.empty(flat.shape, dtype=flat.dtype, device="cpu")

    def pin(self, memory: Tensor, is_read_only: bool) -> Callable[[], None]:
        """Pin memory that others share, so that the device copies without the CPU; returns what unpins it.

        The returned function keeps the memory alive, because the device would go on to write to these addresses,
        whatever is mapped there then. If memory cannot be pinned, a warning says so.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, flags, process = memory.data_ptr(), _READ_ONLY if is_read_only else 0, os.getpid()
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(address, memory.nbytes, flags)
        if int(code):
            self._say_why(code)
            with suppress(RuntimeError):  # the runtime reports the error again at the next call
                torch.zeros(1, device=self._device)
            return _unpin_nothing

        def unpin() -> None:
            if os.getpid() == process:  # a forked one has no device
                self.wait()
                runtime.cudaHostUnregister(memory.data_ptr())

        return unpin

    def _say_why(self, error: object) -> None:
        _log.warning(
            "copies between %s and the host are slower, without pinned memory: %s", self._device, error
        )

    def after_current(self) -> None:
        """Make later copies wait for what is queued on the current stream now."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        # The allocator must not reuse its memory before the copy is made.
        (target if target.is_cuda else source).record_stream(self._side)

    def before_current(self) -> None:
        """Make what is queued on the current stream from now on wait for all copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def wait(self) -> None:
        self._side.synchronize()


def _unpin_nothing() -> None:
    """Unpin memory that could not be pinned."""


class Staging:
    """Copies flat tensors of a CUDA device to buffers on the host and back.

    Buffers are pinned, allocated once, and copied to and from on a stream beside the current one; memory that
    servers of this host share can be one, too. The host waits when it is going to read what was copied; for what
    comes back only the device waits. Each direction begins when all that was queued on the current stream is done:

        down    gradients are final → copied → the host waits, and then reads its buffers
        up      no kernel reads the old weights any more → copied → what is queued from now on finds the new ones

    A buffer, or a server's memory, is written only after the next `down` or `places`, which come behind the last
    `up` from there on the one stream: servers write new weights when all workers have given gradients.
    """

    def __init__(self, stream: StagingStream) -> None:
        self._stream = stream
        self._places: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """Address, size and dtype of a tensor → its buffer."""
        self._seen: dict[str, list[tuple[int, Tensor]]] = {}
        """By dtype, the parts of the weights that the device reads in the servers' memory."""
        self._num_moves = 0
        self._views: dict[int, _StagedView] = {}
        """Identity of a server's memory → the part that is mapped."""
        self._pins: dict[int, Callable[[], None]] = {}
        """Address of pinned memory → what unpins it."""
        self._process = os.getpid()
        weakref.finalize(self, _call_all, self._pins).atexit = False

    def see(self, weights: StagingSink) -> None:
        """Have the device read the servers' memory where `weights` has it. Raises OSError if it cannot be mapped."""
        if weights.num_moves == self._num_moves:
            return
        # 1. Map and pin what is read of each server's memory, and unpin what is not read any more.
        ranges = weights.ranges()
        views: dict[int, _StagedView] = {}
        for one in ranges:
            own = [other for other in ranges if other.memory is one.memory]
            first = min([other.begin for other in own]) // PAGE * PAGE
            end = max([other.end for other in own])
            if id(one.memory) not in views:
                views[id(one.memory)] = self._view_of(one.memory, first, end)
        kept = {view.pinned.data_ptr() for view in views.values()}
        for former in self._views.values():
            if former.pinned.data_ptr() not in kept:
                self._pins.pop(former.pinned.data_ptr(), _unpin_nothing)()
        # 2. The parts of the weights that are there.
        self._views, self._num_moves, self._seen = views, weights.num_moves, {}
        for one in ranges:
            view = views[id(one.memory)]
            pinned = view.pinned[one.begin - view.first : one.end - view.first].view(torch_dtype(one.dtype))
            self._seen.setdefault(one.dtype, []).append((one.offset, pinned))

    def _view_of(self, memory: Memory, first: int, end: int) -> _StagedView:
        """Map a part of a server's memory, shared and read-only, and pin it."""
        former = self._views.get(id(memory))
        if former is not None and former.first <= first and end <= former.first + former.pinned.numel():
            return former
        # Not mapped privately: to pin a private mapping makes its pages this process's own.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        pinned = torch.from_numpy(np.frombuffer(mmap.mmap(-1, end - first, flags), np.uint8))
        put_pages(pinned.data_ptr(), end - first, memory.fd, first, mmap.PROT_READ, is_shared=True)
        self.pin(pinned, is_read_only=True)
        return _StagedView(memory, first, pinned)

    def wait(self) -> None:
        """Block until the device has read what came back last."""
        self._stream.wait()

    def places(self, arenas: Arenas) -> Arenas:
        """Return the buffers of tensors, which are free now; the same tensor has the same buffer every time."""
        self._stream.wait()
        return {dtype: self._place_of(flat) for dtype, flat in arenas.items()}

    @torch.no_grad()
    def down(self, arenas: Arenas, overrides: Mapping[str, BufferOverrides] = _NO_OVERRIDES) -> Arenas:
        """Copy tensors to their buffers, or parts of them to `overrides`, by dtype; waits and returns the buffers."""
        places = {dtype: self._place_of(flat) for dtype, flat in arenas.items()}
        self._stream.after_current()
        for dtype, flat in arenas.items():
            for part, place in _split_staged_by_overrides(flat, places[dtype], overrides.get(dtype, ())):
                self._stream.copy(place, part)
        self._stream.wait()
        return places

    @torch.no_grad()
    def up(self, arenas: Arenas, places: Arenas) -> None:
        """Copy buffers back; the device waits for it before it computes what is queued from now on."""
        self._stream.after_current()
        for dtype, flat in arenas.items():
            for part, place in _split_staged_by_overrides(flat, places[dtype], self._seen.get(dtype, ())):
                self._stream.copy(part, place)
        self._stream.before_current()

    def pin(self, memory: Tensor, is_read_only: bool = False) -> None:
        if memory.numel() and memory.data_ptr() not in self._pins:
            self._pins[memory.data_ptr()] = self._stream.pin(memory, is_read_only)

    def unpin(self, memory: Tensor) -> None:
        """Wait for all copies, and unpin memory that is not used any more; nothing if it is not pinned."""
        self._pins.pop(memory.data_ptr(), _unpin_nothing)()

    def close(self) -> None:
        """Wait for all copies, and unpin the servers' memory; nothing in a forked process."""
        if os.getpid() != self._process:
            return
        try:
            self._stream.wait()
        finally:
            _call_all(self._pins)
            self._seen, self._views = {}, {}

    def _place_of(self, flat: Tensor) -> Tensor:
        key = flat.data_ptr(), flat.numel(), flat.dtype
        if key not in self._places:
            self._places[key] = self._stream.place(flat)
        return self._places[key]


class _StagedView(NamedTuple):
    memory: Memory
    first: int
    """Where it begins there, in bytes; a page."""
    pinned: Tensor


def _call_all(left: dict[int, Callable[[], None]]) -> None:
    """Call all, even if some raise; raises the error of the last of these."""
    with ExitStack() as stack:
        while left:
            stack.callback(left.popitem()[1])


def _split_staged_by_overrides(
    flat: Tensor, place: Tensor, overrides: BufferOverrides
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts of a flat tensor with their places, without the padding behind parts that lie elsewhere."""
    at, line = 0, ALIGNMENT // flat.element_size()
    for first, other in overrides:
        if first > at:
            yield flat[at:first], place[at:first]
        yield flat[first : first + len(other)], other
        at = -(-(first + len(other)) // line) * line
    if at < len(flat):
        yield flat[at:], place[at:]


class _StagedRange(NamedTuple):
    dtype: str
    offset: int
    """Where they begin in the arena, in elements."""
    numel: int
    """With padding between them, not behind the last."""
    memory: Memory
    begin: int
    """Where they begin there, in bytes."""

    @property
    def end(self) -> int:
        return self.begin + self.numel * SIZES[self.dtype]

    def is_before(self, other: _StagedRange) -> bool:
        size, way = SIZES[self.dtype], other.offset - self.offset
        is_near = self.dtype == other.dtype and (way - self.numel) * size < ALIGNMENT
        return is_near and self.memory is other.memory and other.begin - self.begin == way * size


class StagingSink(WeightSink):
    """New weights of a CUDA device: rounds write to pinned memory, or the device reads the servers' memory.

    What is read in the servers' memory does not come to pinned memory any more.
    """

    def __init__(self, staging: Staging, maps: bool) -> None:
        self._staging = staging
        self._slices: dict[int, tuple[int, int, _StagedRange]] = {}
        """Slice (by index) → its server, its place as that names it, and where it is."""
        self.maps, self.holds_all = maps, not maps
        self.num_moves = 0
        """How often other slices than before, or other places of them, were to be read."""

    def outs(self, weights: Arenas) -> Arenas:
        return self._staging.places(weights)

    def deliver(self, weights: Arenas, outs: Arenas) -> None:
        self._staging.up(weights, outs)

    def is_mapped(self, slice_: Slice, server: int, place: int, memory: Memory | None) -> bool:
        found = self._slices.get(slice_.index)
        if found is None or found[:2] != (server, place):
            return False
        return memory is None or found[2].memory is memory

    def map(self, slice_: Slice, server: int, place: int, memory: Memory, begin: int) -> None:
        one = _StagedRange(slice_.dtype, slice_.offset, slice_.used, memory, begin)
        if one.end > memory.nbytes:
            raise OSError(f"slice {slice_.index} is at {begin} of {memory.nbytes} bytes")
        self._slices[slice_.index] = server, place, one
        self.num_moves += 1

    def unmap(self, slice_: Slice) -> None:
        if self._slices.pop(slice_.index, None) is not None:
            self.num_moves += 1

    def commit(self) -> None:
        try:
            self._staging.see(self)
        except OSError as error:
            self.problem = error

    def ranges(self) -> list[_StagedRange]:
        found: list[_StagedRange] = []
        for _, _, one in sorted(self._slices.values(), key=lambda own: own[2][:2]):
            if found and found[-1].is_before(one):
                found[-1] = found[-1]._replace(numel=one.offset + one.numel - found[-1].offset)
            else:
                found.append(one)
        return found

    def release(self) -> None:
        """See `WeightSink`; all weights come to pinned memory from now on, where they have to be pulled first."""
        if self.maps:
            self._slices.clear()
            self.maps, self.holds_all, self.problem = False, True, None
            self.num_moves += 1
            self._staging.see(self)
