"""Places on the host through which the numbers of a CUDA device go to servers and come back.

They are pinned, made once, and copied to and from on a stream beside the current one. The host waits where it is going
to read what was copied; for what comes back the device alone waits. So that nothing is read too early or written too
soon, each way begins when all that was queued on the current stream is done:

    down    gradients and weights are final → copied → the host waits, and then reads and writes its places
    up      nobody reads the old weights any more → copied → what is queued from now on finds the new ones

The host writes a place after `down` alone, which comes, on the one stream, behind the last `up` from there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

Arenas = Mapping[str, Tensor]
"""Dtype → flat tensor."""


class SideStream:
    """Makes copies between a CUDA device and the host on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def place(self, flat: Tensor) -> Tensor:
        """Make a place on the host for a tensor of the device.

        It is pinned; where there is no such memory, a warning says that it is not, and copies to it block.
        """
        try:
            return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        except RuntimeError as error:
            _log.warning(
                "copies between %s and the host are slower, without pinned memory: %s", flat.device, error
            )
            return torch.empty(flat.shape, dtype=flat.dtype)

    def after_current(self) -> None:
        """Have copies that come wait for all that is queued on the current stream."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy."""
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        # The allocator must not give its memory away before the copy is made.
        (target if target.is_cuda else source).record_stream(self._side)

    def before_current(self) -> None:
        """Have what will be queued on the current stream wait for all copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._side)

    def wait(self) -> None:
        """Block until all copies are made."""
        self._side.synchronize()


class Staging:
    """Copies flat tensors of one device to places on the host, and back."""

    def __init__(self, stream: SideStream) -> None:
        self._stream = stream
        self._places: dict[tuple[int, int, torch.dtype], Tensor] = {}
        """Address, size and dtype of a tensor → its place."""

    @torch.no_grad()
    def down(self, given: Sequence[Arenas]) -> list[Arenas]:
        """Copy tensors to their places, and wait for that; the same tensor has the same place every time."""
        places: list[Arenas] = [
            {dtype: self._place_of(flat) for dtype, flat in arenas.items()} for arenas in given
        ]
        self._stream.after_current()
        copied: set[int] = set()
        for arenas, there in zip(given, places, strict=True):
            for dtype, flat in arenas.items():
                if id(there[dtype]) not in copied:
                    self._stream.copy(there[dtype], flat)
                    copied.add(id(there[dtype]))
        self._stream.wait()
        return places

    @torch.no_grad()
    def up(self, arenas: Arenas, places: Arenas) -> None:
        """Copy what is in places back; the device waits for it before it computes what is queued from now on."""
        self._stream.after_current()
        for dtype, flat in arenas.items():
            self._stream.copy(flat, places[dtype])
        self._stream.before_current()

    def _place_of(self, flat: Tensor) -> Tensor:
        key = flat.data_ptr(), flat.numel(), flat.dtype
        if key not in self._places:
            self._places[key] = self._stream.place(flat)
        return self._places[key]
