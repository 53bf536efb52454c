"""Gradients born where servers read them, so that a step copies none of them.

A server makes a tray for each worker, once a backward pass has made a gradient anew; a loop that assigns `.grad` has no
use for one. The worker maps parts of the trays of all servers side by side, so that each long
gradient is one piece of memory, and the backward pass puts it there. A page that two servers share belongs to the first
one; what the other one has of it is copied before it is sent.
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

from kvstore_server.channel import Channel, Tray
from kvstore_server.codec import torch_dtype
from kvstore_server.memory import return_free_memory
from kvstore_server.plan import PAGE, SIZES, Plan, Slice
from kvtrainer.comm.mapped import put_pages

_log = logging.getLogger(__name__)

LEAST = 256 << 10
"""Bytes of a gradient from which on it is born in shared memory."""


class _Run(NamedTuple):
    """Neighbouring slices of a key on one server."""

    pieces: tuple[Slice, ...]
    begin: int
    """In the key, in bytes."""
    end: int
    place: int
    """Where it begins in its server's tray."""

    @property
    def key(self) -> int:
        return self.pieces[0].segments[0].key

    @property
    def own(self) -> int:
        """Where, in the key, the pages begin that are its own."""
        return min(-(-self.begin // PAGE) * PAGE, self.end)


class _Home(NamedTuple):
    """Where the gradient of a key is born."""

    begin: int
    """In bytes, from where all of them begin."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: dict[int, Tensor]
    """Slice (by index) → the memory of its server."""


class BornGradients:
    """The long gradients of one worker, in the memory of servers of its host; `take` may be called by any thread.

    Args:
        plan: Of the only table.
        keys: Those (by index) that a round may send from where they are; each has its slices for itself.
        channel: Server → the channel to it.
    """

    def __init__(self, plan: Plan, keys: Collection[int], channel: Callable[[int], Channel | None]) -> None:
        self._plan = plan
        near = {server: own for server in plan.servers if (own := channel(server)) is not None}
        long = [key for key in keys if plan.specs[key].nbytes >= LEAST]
        here = {key for key in long if all([piece.server in near for piece in plan.slices_with(key)])}
        sizes: dict[int, int] = {}
        self._runs = list(_runs_of(plan, here, sizes))
        self._sizes = sizes
        self._channels = {server: near[server] for server in sizes}
        """Of the servers that have slices of these gradients."""
        self._is_wanted = False
        """Whether a gradient came that could have been born here."""
        self.is_coming = False
        """Whether servers were asked for trays that are not mapped yet."""
        self._trays: dict[int, Tray] = {}
        self._memory: Any = np.zeros(0, np.uint8)
        self._homes: dict[int, _Home] = {}
        self._last: dict[int, Callable[[], object]] = {}
        """Key → the memory of its last gradient, if somebody has it still; not there while one is being born."""
        self._edges: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Key → what is copied, in front of pages of its runs, and to where."""
        self._has_trimmed = False

    def open(self) -> None:
        """Map the trays, once a round of servers that were asked is over; without them steps copy gradients."""
        self.is_coming = False
        trays = {server: channel.tray for server, channel in self._channels.items()}
        found = {server: tray for server, tray in trays.items() if tray is not None}
        if len(found) < len(trays):
            _log.warning("gradients are copied to servers: %d of %d have no memory for them to be born in",
                         len(trays) - len(found), len(trays))  # fmt: skip
        elif found:
            try:
                self._map(found)
            except OSError as error:
                _log.warning("gradients are copied to servers, not born in their memory: %s", error)
            else:
                os.register_at_fork(after_in_child=partial(_part, weakref.ref(self)))

    def births(self) -> dict[int, Callable[[Tensor], Tensor | None]]:
        """Return for each key that can have a place here its `take`."""
        return {run.key: partial(self.take, run.key) for run in self._runs}

    def take(self, key: int, grad: Tensor) -> Tensor | None:
        """Return a new gradient, of a parameter that has none, in its place; None if it has to stay where it is.

        That is so while somebody has the former one, or a part of it, or a server has not read it yet.
        """
        last = self._last.pop(key, None)
        if last is None:
            self._is_wanted = True
            return None
        try:
            home = self._homes[key]
            is_plain = type(grad) is Tensor and grad.layout is torch.strided and grad.is_cpu
            is_like = is_plain and grad.dtype == home.dtype and grad.shape == home.shape
            if not is_like or torch.is_grad_enabled() or last() is not None:
                return None
            if not all([tray.is_free for tray in self._trays.values()]):
                return None
            memory = self._memory[home.begin : home.begin + home.nbytes]
            last = weakref.ref(memory)
            # The storage has the memory as long as anybody has the storage.
            return torch.frombuffer(memory, dtype=home.dtype).resize_(home.shape).copy_(grad)
        finally:
            self._last[key] = last

    def places(self, without: Collection[int]) -> dict[int, Tensor]:
        """Return the memory for gradients that are copied from a device, flat, by key.

        There is none before servers were asked for it, nor while one of them still reads.

        Args:
            without: Keys that are left out.
        """
        self._is_wanted = True
        if not all([tray.is_free for tray in self._trays.values()]):
            return {}
        return {
            key: torch.frombuffer(
                self._memory, dtype=home.dtype, offset=home.begin, count=math.prod(home.shape)
            )
            for key, home in self._homes.items()
            if key not in without
        }

    @property
    def memory(self) -> Tensor:
        """All memory that gradients are born in; empty before it is there."""
        return torch.from_numpy(self._memory)

    def in_place(self, lent: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """List slices (by index) of gradients (flat, by key) left where they were born. Servers see them there."""
        if self._is_wanted and self._sizes:
            self._ask()
        base = self._memory.ctypes.data
        here = [key for key, flat in lent.items() if self._is_home(key, flat.data_ptr() - base)]
        edges = [pair for key in here for pair in self._edges.get(key, ())]
        if edges:
            targets, sources = zip(*edges, strict=True)
            torch._foreach_copy_(targets, sources)
        if here and not self._has_trimmed:
            # The first gradients came before, and went as messages.
            self._has_trimmed = True
            return_free_memory()
            for channel in self._channels.values():
                channel.trim()
        return {index: own for key in here for index, own in self._homes[key].slices.items()}

    def _ask(self) -> None:
        """Have servers make trays; they do before they answer to the round that comes."""
        for server, nbytes in self._sizes.items():
            self._channels[server].ask_for_tray(nbytes)
        self._sizes, self.is_coming = {}, True

    def _is_home(self, key: int, begin: int) -> bool:
        return key in self._last and self._homes[key].begin == begin

    def _map(self, trays: Mapping[int, Tray]) -> None:
        plan = self._plan
        keys = list(dict.fromkeys([run.key for run in self._runs]))
        sizes = [-(-plan.specs[key].nbytes // PAGE) * PAGE for key in keys]
        pages = mmap.mmap(-1, sum(sizes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(pages, np.uint8)
        numbers = torch.from_numpy(self._memory)
        for key, end in zip(keys, itertools.accumulate(sizes), strict=True):
            spec, begin = plan.specs[key], end - -(-plan.specs[key].nbytes // PAGE) * PAGE
            self._homes[key] = _Home(begin, spec.nbytes, spec.shape, torch_dtype(spec.dtype), {})
        for run in self._runs:
            home, tray = self._homes[run.key], trays[run.pieces[0].server]
            self._map_run(run, home, tray, is_shared=True)
            shared, at = tray.arena.numbers, run.place
            for piece in run.pieces:
                home.slices[piece.index] = shared[at : at + piece.nbytes].view(home.dtype)
                at += piece.nbytes
            if run.own > run.begin:
                front = numbers[home.begin + run.begin : home.begin + run.own]
                pair = (shared[run.place : run.place + len(front)], front)
                self._edges.setdefault(run.key, []).append(pair)
        self._trays = dict(trays)
        self._last = dict.fromkeys(self._homes, _nobody)

    def _map_run(self, run: _Run, home: _Home, tray: Tray, is_shared: bool) -> None:
        address = self._memory.ctypes.data + home.begin + run.own
        if run.own < run.end:
            nbytes, offset = -(-run.end // PAGE) * PAGE - run.own, run.place + run.own - run.begin
            put_pages(address, nbytes, tray.fd, offset, mmap.PROT_READ | mmap.PROT_WRITE, is_shared)

    def part(self) -> None:
        """Part from the parent in a forked process: writes to gradients are seen here alone, and none are born."""
        self._last = {}
        for run in self._runs:
            self._map_run(run, self._homes[run.key], self._trays[run.pieces[0].server], is_shared=False)


def _runs_of(plan: Plan, keys: Collection[int], sizes: dict[int, int]) -> Iterator[_Run]:
    """Yield the slices of keys, neighbours of one server together, with their places.

    Args:
        sizes: Server → the bytes of its tray; added to.
    """
    pieces = [piece for piece in plan.slices if piece.segments[0].key in keys]
    for (_, server), own in itertools.groupby(pieces, lambda p: (p.segments[0].key, p.server)):
        run = tuple(own)
        begin = run[0].segments[0].key_start * SIZES[run[0].dtype]
        end = begin + sum([piece.nbytes for piece in run])
        place = sizes.get(server, 0) + begin % PAGE
        sizes[server] = -(-(place + end - begin) // PAGE) * PAGE
        yield _Run(run, begin, end, place)


def _nobody() -> None:
    """Stand for memory that nobody has."""


def _part(gradients: weakref.ref[BornGradients]) -> None:
    """Run in a child after a fork."""
    found = gradients()
    if found is not None:
        found.part()
