"""Zero-copy gradients: large ones are allocated in memory that servers read; small ones are copied there once.

Each server on this host provides a staging buffer for each worker. Small gradients lie in slices, and a step gathers
them in the slices of the buffer. A large gradient gets a place in it once a backward pass has allocated a new one; a
loop that assigns `.grad` itself has no use for that.

The worker maps the staging buffers of all servers next to each other, so that a large gradient whose slices are on
several servers is still one contiguous tensor, and autograd writes it in place. A page that two servers share
belongs to the first one; the part of the other is copied before it is sent (`_edges`).

A place is used again only when no tensor or view refers to the gradient before, and when all servers have read it.
Buffers are requested in the first or second round, when it is known whether backward passes allocate gradients, and
are mapped after that round. If a server has no memory to share, or the system refuses, gradients are copied. So they
are from the time when a server is gone until it is restarted and has made another buffer.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.engine.memory import return_free_memory
from kvstore_server.plan import PAGE, SIZES, Plan, Slice
from kvstore_server.transport.channel import Channel
from kvstore_server.transport.exports import ExportedStagingBuffer, ExportedStagingRequest
from kvstore_server.transport.pages import put_pages
from kvtrainer.types import NO_TARGETS

_log = logging.getLogger(__name__)

_MIN_SHARED = 256 << 10
"""Gradients of at least this many bytes are allocated in shared memory."""
_WORTH_A_PLACE = 4 << 10
"""Small gradients are gathered in shared memory if all of them have at least this many bytes."""


class _SharedGradientRange(NamedTuple):
    """Neighbouring slices of a key on one server."""

    slices: tuple[Slice, ...]
    begin: int
    """In the key, in bytes."""
    end: int
    """With the padding of the last one."""
    place: int
    """Where it begins in its server's staging buffer, in bytes."""

    @property
    def key(self) -> int:
        return self.slices[0].segments[0].key

    @property
    def own(self) -> int:
        """Where in the key its own pages begin."""
        return min(_whole_gradient_pages(self.begin), self.end)


class _SharedGradientPart(NamedTuple):
    begin: int
    """In bytes, in the memory of all."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: dict[int, Tensor]
    """Slice (by index) → its part of the server's buffer."""


class SharedGradients:
    """The gradients of one worker in memory of servers on its host. Any thread may call `take`.

    Args:
        plan: Of the only table.
        keys: Those (by index) that a round may send from where they are; none shares a slice.
        channel: Server → the channel to it.
        allocates: Whether the large ones of those are allocated here.
        gathers: Whether all others are gathered here.
    """

    def __init__(
        self,
        plan: Plan,
        keys: Collection[int],
        channel: Callable[[int], Channel | None],
        allocates: bool = True,
        gathers: bool = True,
    ) -> None:
        # 1. Keys whose slices are all on servers of this host.
        self._plan = plan
        self._channel = channel
        near = {server: own for server in plan.servers if (own := channel(server)) is not None}
        far = _keys_of_shared_gradients([slice_ for slice_ in plan.slices if slice_.server not in near])
        here = [
            slice_
            for slice_ in plan.slices
            if plan.is_resident(slice_) and far.isdisjoint(_keys_of_shared_gradients([slice_]))
        ]
        # 2. Large ones are allocated, all others gathered.
        borrowed = _keys_of_shared_gradients(here).intersection(keys)
        long = {key for key in borrowed if allocates and plan.specs[key].nbytes >= _MIN_SHARED}
        others = [slice_ for slice_ in here if gathers and slice_.segments[0].key not in keys]
        if sum([slice_.nbytes for slice_ in others]) < _WORTH_A_PLACE:
            others = []
        spread = {
            key
            for key in _keys_of_shared_gradients(others)
            if len({one.server for one in plan.slices_with(key)}) > 1
        }
        # 3. Places in the staging buffers: first those that are needed in any case.
        self._gathered = [slice_ for slice_ in others if slice_.segments[0].key not in spread]
        """Slices that follow each other in their server's staging buffer."""
        self._sizes: dict[int, int] = {}
        """Server → the bytes of its staging buffer without places for large gradients."""
        for slice_ in self._gathered:
            self._sizes[slice_.server] = self._sizes.get(slice_.server, 0) + _shared_gradient_nbytes(slice_)
        self._sizes = {server: _whole_gradient_pages(size) for server, size in self._sizes.items()}
        self._spread = list(_shared_gradient_ranges(plan, spread, self._sizes))
        """The slices of small keys that are on several servers."""
        self._all_sizes = self._sizes.copy()
        self._long = list(_shared_gradient_ranges(plan, long, self._all_sizes))
        self._channels = {server: near[server] for server in self._all_sizes}
        """Server → its channel, if it holds slices of these gradients."""
        self.has_some = bool(self._channels)
        """Whether any gradients have a place here."""
        # 4. What rounds have requested, and what is mapped.
        self._is_wanted = False
        """Whether a backward pass has allocated a gradient that could have been here."""
        self._asked: Mapping[int, int] | None = None
        """The sizes that servers were asked for last, by server; None before that, and after a server was restarted."""
        self._requests: dict[int, ExportedStagingRequest] = {}
        """Server → the request for its buffer."""
        self._num_rounds = 0
        self.is_coming = False
        """Whether requested staging buffers are not mapped yet."""
        self._runs: list[_SharedGradientRange] = []
        """Ranges of slices that are mapped."""
        self._staging_buffers: dict[int, ExportedStagingBuffer] = {}
        self._memory: Any = np.zeros(0, np.uint8)
        self._buffer_parts: dict[int, _SharedGradientPart] = {}
        self._last: dict[int, Callable[[], object]] = {}
        """Key → a reference to the memory of its last gradient. Missing while a thread allocates a gradient there."""
        self._edges: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Key → (target, source) of the bytes on pages that it shares with another server."""
        self._targets: Mapping[int, Tensor] = NO_TARGETS
        """Key → where its gradient is gathered, flat."""
        self._filled: dict[int, Tensor] = {}
        """Slice (by index) of those → its part of the server's buffer."""
        self._has_trimmed = self._has_forks = False

    def open(self) -> None:
        """Map the requested buffers, after a round of the servers that made them. Until then steps copy."""
        if not self._has_channels() or self._asked is None:
            self._asked, self.is_coming = None, False  # what was requested was lost with a server
            return
        staging_buffers = {server: asked.staging_buffer for server, asked in self._requests.items()}
        found = {
            server: staging_buffer
            for server, staging_buffer in staging_buffers.items()
            if staging_buffer is not None and not staging_buffer.is_lost
        }
        try:
            if len(found) < len(staging_buffers):
                raise OSError(f"{len(staging_buffers) - len(found)} of {len(staging_buffers)} have made none")
            self._map(found)
            if not self._has_forks:
                self._has_forks = True
                os.register_at_fork(
                    after_in_child=partial(_detach_shared_gradients_in_child, weakref.ref(self))
                )
        except OSError as error:
            _log.warning("gradients are copied to servers, not made in their memory: %s", error)
            if self._asked is self._all_sizes and self._sizes:
                self._long, self._all_sizes = [], self._sizes  # there may be memory for less
                self._asked = None
        self.is_coming = False

    def grad_allocators(self) -> dict[int, Callable[[Tensor], Tensor | None]]:
        return {run.key: partial(self.take, run.key) for run in self._long}

    def take(self, key: int, grad: Tensor) -> Tensor | None:
        """Return a copy of a new gradient in its place; None if it has to stay where it is.

        It stays if the gradient before, or a view of it, is still in use, or if a server has not read that yet. The
        parameter must have no gradient.
        """
        # Removed while it is checked, so that another thread does not use the same place.
        last = self._last.pop(key, None)
        if last is None:
            self._is_wanted = True
            return None
        try:
            part = self._buffer_parts[key]
            is_plain = type(grad) is Tensor and grad.layout is torch.strided and grad.is_cpu
            is_like = is_plain and grad.dtype == part.dtype and grad.shape == part.shape
            if not is_like or torch.is_grad_enabled() or last() is not None:
                return None
            if not all([staging_buffer.is_free for staging_buffer in self._staging_buffers.values()]):
                return None
            memory = self._memory[part.begin : part.begin + part.nbytes]
            last = weakref.ref(memory)
            # The storage has the memory as long as anybody has the storage.
            return torch.frombuffer(memory, dtype=part.dtype).resize_(part.shape).copy_(grad)
        finally:
            self._last[key] = last

    def places(self, without: Collection[int]) -> dict[int, Tensor]:
        """Return the memory, flat, by key, for gradients from a device, except for keys that are left out.

        Empty before the first buffers are mapped, and while a server still reads.
        """
        self._is_wanted = True
        if not all([staging_buffer.is_free for staging_buffer in self._staging_buffers.values()]):
            return {}
        return {
            key: torch.frombuffer(
                self._memory, dtype=part.dtype, offset=part.begin, count=math.prod(part.shape)
            )
            for key, part in self._buffer_parts.items()
            if key not in without
        }

    @property
    def memory(self) -> Tensor:
        """The memory of all gradients that are allocated here; empty before it is mapped."""
        return torch.from_numpy(self._memory)

    def targets(self) -> Mapping[int, Tensor]:
        """Return where to gather small gradients, flat, by key; empty without buffers, or while a server reads."""
        are_free = all([staging_buffer.is_free for staging_buffer in self._staging_buffers.values()])
        return self._targets if are_free else NO_TARGETS

    def in_place(self, borrowed: Mapping[int, Tensor], are_gathered: bool) -> dict[int, Tensor]:
        """Return the slices (by index) that servers read where they are; called once for each round.

        `borrowed` are the gradients, flat, by key, that were left where they are; with `are_gathered` all others
        were copied to `targets`.
        """
        self._num_rounds += 1
        has_channels = self._has_channels()
        sizes = self._all_sizes if self._is_wanted else self._sizes
        # 1. Ask for buffers. By the second round it is known whether backward passes allocate new gradients.
        is_known = self._is_wanted or self._num_rounds > 1 or not self._long
        is_news = sizes != self._asked and self._asked is not self._all_sizes
        if sizes and is_news and is_known and has_channels:
            self._request_buffers(sizes)
        # 2. Copy what lies on pages of other servers.
        base = self._memory.ctypes.data
        here = [key for key, flat in borrowed.items() if self._is_home(key, flat.data_ptr() - base)]
        edges = [pair for key in here for pair in self._edges.get(key, ())]
        if are_gathered:
            edges += [pair for key in {run.key for run in self._spread} for pair in self._edges.get(key, ())]
        if edges:
            targets, sources = zip(*edges, strict=True)
            torch._foreach_copy_(targets, sources)
        if (here or are_gathered) and not self._has_trimmed:
            # 3. The first gradients went as messages, whose memory is not needed any more.
            self._has_trimmed = True
            return_free_memory()
            for channel in self._channels.values():
                channel.trim()
        found = {index: own for key in here for index, own in self._buffer_parts[key].slices.items()}
        return found | self._filled if are_gathered else found

    def _has_channels(self) -> bool:
        """Return whether all servers share memory now; if a server was restarted, its buffer has to be made again."""
        found = {server: self._channel(server) for server in self._channels}
        channels = {server: channel for server, channel in found.items() if channel is not None}
        if len(channels) < len(self._channels):
            return False
        if channels != self._channels:
            self._channels, self._asked = channels, None
        return True

    def _request_buffers(self, sizes: Mapping[int, int]) -> None:
        """Request buffers, which servers make before they answer the next round."""
        asked = {
            server: self._channels[server].ask_for_staging_buffer(nbytes) for server, nbytes in sizes.items()
        }
        if all([one.is_sent for one in asked.values()]):
            self._asked, self._requests, self.is_coming = sizes, asked, True

    def _is_home(self, key: int, begin: int) -> bool:
        return key in self._last and self._buffer_parts[key].begin == begin

    def _map(self, staging_buffers: Mapping[int, ExportedStagingBuffer]) -> None:
        """Map the buffers. An interrupt leaves no gradient here."""
        self._last, self._targets = {}, NO_TARGETS
        plan = self._plan
        # 1. Reserve addresses for all keys.
        self._runs = self._spread + (self._long if self._asked is self._all_sizes else [])
        keys = list(dict.fromkeys([run.key for run in self._runs]))
        sizes = [_whole_gradient_pages(plan.specs[key].nbytes) for key in keys]
        pages = mmap.mmap(-1, max(sum(sizes), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory, self._edges, self._staging_buffers = (
            np.frombuffer(pages, np.uint8)[: sum(sizes)],
            {},
            dict(staging_buffers),
        )
        flat = torch.from_numpy(self._memory)
        for key, size, end in zip(keys, sizes, itertools.accumulate(sizes), strict=True):
            spec = plan.specs[key]
            self._buffer_parts[key] = _SharedGradientPart(
                end - size, spec.nbytes, spec.shape, torch_dtype(spec.dtype), {}
            )
        for run in self._runs:
            part, staging_buffer = self._buffer_parts[run.key], staging_buffers[run.slices[0].server]
            self._map_run(run, part, staging_buffer, is_shared=True)
            shared, at = staging_buffer.arena.data, run.place
            for slice_ in run.slices:
                part.slices[slice_.index] = shared[at : at + _shared_gradient_nbytes(slice_)].view(part.dtype)
                at += _shared_gradient_nbytes(slice_)
            if run.own > run.begin:
                front = flat[part.begin + run.begin : part.begin + run.own]
                pair = (shared[run.place : run.place + len(front)], front)
                self._edges.setdefault(run.key, []).append(pair)
        # 3. Only now may gradients be here.
        targets, self._filled = self._lay_out(staging_buffers)
        self._last = dict.fromkeys(
            {run.key for run in self._runs[len(self._spread) :]}, _dead_gradient_reference
        )
        self._targets = targets

    def _lay_out(
        self, staging_buffers: Mapping[int, ExportedStagingBuffer]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        targets, filled, flat = dict[int, Tensor](), dict[int, Tensor](), torch.from_numpy(self._memory)
        for key in {run.key for run in self._spread}:
            part = self._buffer_parts[key]
            targets[key] = flat[part.begin : part.begin + part.nbytes].view(part.dtype)
            filled |= part.slices
        ends: dict[int, int] = {}
        for slice_ in self._gathered:
            shared, begin = staging_buffers[slice_.server].arena.data, ends.get(slice_.server, 0)
            end = ends[slice_.server] = begin + _shared_gradient_nbytes(slice_)
            filled[slice_.index] = shared[begin:end].view(torch_dtype(slice_.dtype))
            for segment in slice_.segments:
                if not segment.key_start:  # further slices of the key come next
                    spec, first = self._plan.specs[segment.key], begin + segment.start * SIZES[slice_.dtype]
                    targets[segment.key] = shared[first : first + spec.nbytes].view(torch_dtype(spec.dtype))
        return targets, filled

    def _map_run(
        self,
        run: _SharedGradientRange,
        part: _SharedGradientPart,
        staging_buffer: ExportedStagingBuffer,
        is_shared: bool,
    ) -> None:
        address = self._memory.ctypes.data + part.begin + run.own
        if run.own < run.end:
            nbytes, offset = _whole_gradient_pages(run.end) - run.own, run.place + run.own - run.begin
            put_pages(address, nbytes, staging_buffer.fd, offset, mmap.PROT_READ | mmap.PROT_WRITE, is_shared)

    def part(self) -> None:
        """In a forked child: map gradients privately, and allocate none here."""
        self._last, self._targets = {}, NO_TARGETS
        for run in self._runs:
            self._map_run(
                run, self._buffer_parts[run.key], self._staging_buffers[run.slices[0].server], is_shared=False
            )


def _shared_gradient_ranges(
    plan: Plan, keys: Collection[int], sizes: dict[int, int]
) -> Iterator[_SharedGradientRange]:
    """Yield the slices of keys, neighbours on one server together, with places that are added to `sizes`."""
    slices = [slice_ for slice_ in plan.slices if slice_.segments[0].key in keys]
    for (_, server), own in itertools.groupby(slices, lambda p: (p.segments[0].key, p.server)):
        run = tuple(own)
        begin = run[0].segments[0].key_start * SIZES[run[0].dtype]
        end = begin + sum(map(_shared_gradient_nbytes, run))
        place = sizes.get(server, 0) + begin % PAGE
        sizes[server] = _whole_gradient_pages(place + end - begin)
        yield _SharedGradientRange(run, begin, end, place)


def _keys_of_shared_gradients(slices: Collection[Slice]) -> set[int]:
    return {segment.key for slice_ in slices for segment in slice_.segments}


def _shared_gradient_nbytes(slice_: Slice) -> int:
    return slice_.length * SIZES[slice_.dtype]


def _whole_gradient_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _dead_gradient_reference() -> None:
    """A reference to memory that is not in use."""


def _detach_shared_gradients_in_child(gradients: weakref.ref[SharedGradients]) -> None:
    found = gradients()
    if found is not None:
        found.part()
