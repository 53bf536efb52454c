"""Messages between a worker and a server of one host: bytes in shared memory, and a Unix socket that says where.

The server makes and seals the memory of both directions, so that no peer can make it shrink while the other reads it,
and gives the worker its descriptors. Nothing has a name in a file system, so nothing is left behind however a process
ends.

A frame of some size is copied into the sender's memory, and lies there until the receiver has told, with a message of
its own, that nobody reads it any more. Where there is no place left, the server makes more memory, by itself or because
the worker asks for it. A receiver that keeps half of the memory copies what comes then, so that the rest stays free.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.budget import Budget
from kvstore_server.errors import ProtocolError
from kvstore_server.processes import Process, Processes
from kvstore_server.protocol.frames import MAX_FRAME, MAX_PAYLOAD, MOST_FRAMES, SENT_ALONE, Frame
from kvstore_server.transport.arena import _PORTION, Bytes, Leases, Places, SharedArena, make_memory
from kvstore_server.transport.exports import (
    _FIRST_WEIGHTS,
    _NUMBER,
    StagingBuffer,
    StagingBufferRequest,
    WeightExports,
)

_log = logging.getLogger(__name__)


LEAST_MEMORY = 4 << 20
"""Bytes of each direction at first. Pages take no memory before they are written."""
_INLINE = 2048
"""Frames of up to so many bytes go through the socket."""
_HEAD = struct.Struct("<HHIQ")
"""Kind; numbers of frames and of places given back; another number."""
_MESSAGE, _ATTACH, _ROOM, _REQUESTS, _REPLIES, _WEIGHTS, _STAGING_BUFFER, _WATCH = range(8)
"""Frames; a worker's session; room for so many bytes is wanted; memory for requests from now on; for replies; memory
of weights; a staging buffer of so many bytes is wanted, or is there; a worker's session, which wants no memory, but
that both sides know each other's process."""
_MOST_GIVEN_BACK = 1024
_DATAGRAM = 8 * _MOST_GIVEN_BACK + (MOST_FRAMES + 1) * (16 + _INLINE)
_BURST = 64
"""Messages that are taken from one worker before it is another one's turn."""
_nbytes_of: Callable[[Tensor], int] = attrgetter("nbytes")
_PENDING_PEERS = 128
_CONNECT_TIMEOUT = 5.0
_ONE_FD = socket.CMSG_SPACE(4)
_CREDENTIALS = struct.Struct("iII")


class Channel:
    """One end of the connection between a worker and a server. Never blocks; not thread-safe.

    Args:
        end: A connected Unix socket that keeps the boundaries of messages.
        sends: Memory for what this end sends.
        reads: Memory of what it gets.
        make: On the server, makes memory of so many bytes and that number; see `Listener.make`.
        exports: On the server, weights that the worker may read where they lie.
    """

    def __init__(
        self,
        end: socket.socket,
        sends: SharedArena,
        reads: SharedArena,
        make: Callable[[int, int], tuple[SharedArena, int] | None] | None = None,
        exports: WeightExports | None = None,
    ) -> None:
        end.setblocking(False)
        self._end = end
        self._sends, self._places = sends, Places(sends.nbytes)
        self._reads = {reads.number: reads}
        self._make = make
        self.is_usable = True
        """There is, or will be, room for what is sent; if not, the peer may still have said something."""
        self.is_full = False
        """The message that could not be sent last had a place, but the socket took no more; until it is tried again."""
        self._has_asked = False
        self.is_tight = False
        """There is no more memory."""
        self.portion = _PORTION
        """Bytes of data that a message may bring."""
        self._exports = exports
        self._weights: dict[int, SharedArena] = {}
        """Memory of weights that the worker knows, by its number; on the server the worker's staging buffer."""
        self.staging_buffer: StagingBuffer | None = None
        """Of the worker, once the server has made the one that was asked for last."""
        self._asked_staging_buffers: deque[StagingBufferRequest] = deque()
        """Those that have not come."""
        self._last_staging_buffer = _FIRST_WEIGHTS
        """On the server, the number of the worker's last staging buffer."""
        self._shown: set[int] = set()
        """The numbers that the server has told."""
        self._read: dict[int, list[Sequence[Tensor]]] = {}
        """Place → what the peer reads there, as often as it was sent that: weights, or what is in a staging buffer."""
        self._num_borrowed = 0
        self._borrowed: dict[int, weakref.ref[Bytes]] = {}
        """The frames that somebody still reads."""
        self._borrowed_bytes = 0
        """In the memory that is read now."""
        self._returned: list[int] = []
        """Places that nobody reads any more, of which the peer has yet to be told."""
        self._returned_bytes = 0
        self._enough = LEAST_MEMORY // 8
        """From so many bytes on the peer is told even if there is nothing else to say."""
        self._wish = 0
        """Bytes that a worker asked for when nothing could be sent to it."""
        self._was_reset = False
        self._buffer = memoryview(bytearray(_DATAGRAM))

    def fileno(self) -> int:
        return self._end.fileno()

    def process(self) -> Process:
        """Return the process at the other end. Raises OSError where it cannot be seen."""
        return Process(process_at(self._end))

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that a server has made for a worker."""
        return sum([arena.nbytes for arena in (self._sends, *self._reads.values(), *self._weights.values())])

    def close(self) -> None:
        """End the connection; frames that somebody has stay readable."""
        if self.staging_buffer is not None:
            self.staging_buffer.is_lost = True
        for place in list(self._read):
            while place in self._read:
                self._take_back(place)
        self._borrowed.clear()  # which refers to this channel, so that its memory would be kept
        with suppress(OSError):  # the other end is gone
            self._end.shutdown(socket.SHUT_RDWR)  # a forked child may have it open still
        self._end.close()

    def send(
        self, frames: Sequence[Frame], payloads: Sequence[Tensor] | None = None, zero_copy: bool = False
    ) -> bool:
        """Send a message, if there is room for it now; return whether there was.

        Args:
            payloads: Its last frame, in pieces.
            zero_copy: They may be read where they lie; exported weights are, and held until that is over. A worker's
                are where they lie in its staging buffer.

        Raises:
            OSError: the peer is gone.
        """
        pieces = payloads or ()
        data = sum(map(_nbytes_of, pieces))
        least = len(pieces) * SENT_ALONE if self.staging_buffer is None else _INLINE + 1
        stays = self._place_of(pieces) if zero_copy and pieces and data >= least else None
        table: list[int] = []
        inline: list[Frame] = []
        taken: list[int] = []
        is_sent = self.is_full = False
        for frame in frames if payloads is None else (*frames, None):
            nbytes = data if frame is None else len(frame)
            if frame is None and stays is not None:
                table += nbytes, stays
            elif nbytes <= _INLINE:
                for piece in pieces if frame is None else ():
                    inline.append(piece.view(torch.uint8).numpy())
                if frame is not None:
                    inline.append(frame)
                table += nbytes, -1
            else:
                begin = self._places.take(nbytes)
                if begin is None:
                    break
                taken.append(begin)
                table += nbytes, begin | self._sends.number << _NUMBER
                if frame is None:
                    _join(pieces, self._sends.numbers[begin : begin + nbytes])
                else:
                    self._sends.bytes[begin : begin + nbytes] = np.frombuffer(frame, np.uint8)
        else:
            is_sent = self._put(_MESSAGE, table, inline)
        for begin in () if is_sent else taken:
            self._places.give_back(begin)
        if is_sent and stays is not None:
            self._read.setdefault(stays, []).append(pieces)
            if self._exports is not None:
                for piece in pieces:
                    self._exports.leases.hold(piece)
        return is_sent

    def _place_of(self, pieces: Sequence[Tensor]) -> int | None:
        """Return where the peer can read data that need not be copied; None where it cannot."""
        if self.staging_buffer is not None:
            return self.staging_buffer.find(pieces)
        place = None if self._exports is None else self._exports.find(pieces)
        return place if place is not None and self.show(np.array([place])) else None

    def show(self, places: npt.NDArray[np.int64]) -> bool:
        """Give the worker the memories of the exported weights in which places are; return whether it has them."""
        assert self._exports is not None
        for number in set((places[places >= 0] >> _NUMBER).tolist()) - self._shown:
            fd = self._exports.fds.get(number)  # none where the table has ended since
            if fd is not None and not self._put(_WEIGHTS, (), (), number, fd):
                return False
            self._shown.add(number)
        return True

    def weights_at(self, place: int) -> tuple[SharedArena, int] | None:
        """Find the server's memory in which a place is, and where it begins there; None where it was not shown."""
        arena = self._weights.get(place >> _NUMBER)
        return None if arena is None else (arena, place & ~(-1 << _NUMBER))

    def _take_back(self, place: int) -> None:
        """Note that the peer has read what is in a place."""
        found = self._read.pop(place, None)
        if found is not None:
            pieces = found.pop()
            if self._exports is not None:
                for piece in pieces:
                    self._exports.leases.release(piece)
            if found:
                self._read[place] = found

    def receive(self) -> list[Frame] | None:
        """Return the frames of the next message; None where none has come.

        The last frame of data is the peer's memory until the last reference to it is gone; the others are copies.

        Raises:
            OSError: the peer is gone.
            ProtocolError: it has sent what cannot be understood.
        """
        while True:
            fds: list[int] = []
            try:
                if self._make is not None:  # no descriptors are taken from a worker
                    size = self._end.recv_into(self._buffer)
                else:
                    size, ancillary, _, _ = self._end.recvmsg_into([self._buffer], _ONE_FD)
                    for _, _, packed in ancillary:
                        fds += struct.unpack(f"{len(packed) // 4}i", packed)
            except BlockingIOError:
                if self._returned_bytes >= self._enough:
                    self.tell()
                return None
            except ConnectionResetError:
                if self._was_reset:
                    raise
                self._was_reset = True
                continue  # it left without reading all of ours; what it has said itself comes now
            if not size:
                raise ConnectionResetError("the other end was closed")
            data = self._buffer[:size]
            try:
                kind, num_frames, num_returned, value = _HEAD.unpack_from(data)
                numbers = struct.unpack_from(f"<{num_returned + 2 * num_frames}q", data, _HEAD.size)
                for place in numbers[:num_returned]:
                    if place >> _NUMBER == self._sends.number:
                        self._places.give_back(place & ~(-1 << _NUMBER))
                    elif place >> _NUMBER > _FIRST_WEIGHTS:
                        self._take_back(place)
                if kind != _MESSAGE:
                    self._change_memory(kind, value, fds)
                elif num_frames:
                    return self._frames(numbers[num_returned:], data[_HEAD.size + 8 * len(numbers) :])
            except (struct.error, ValueError, KeyError) as error:
                raise ProtocolError(f"a message in shared memory cannot be read: {error!r}") from None
            finally:
                for fd in fds:
                    os.close(fd)

    def tell(self) -> None:
        """Send what was left for later: places that nobody reads any more, and memory that was asked for."""
        with suppress(OSError):  # found out by `receive`, after what the peer has said
            if self._wish and self._takes_more():
                self._grant(self._wish)
            if self._returned_bytes >= self._enough:
                self._put(_MESSAGE, (), ())

    def _takes_more(self) -> bool:
        """Say whether the socket has room for a message."""
        poll = select.poll()  # not `select`, which knows the first 1024 descriptors alone
        poll.register(self._end, select.POLLOUT)
        return any([event & select.POLLOUT for _, event in poll.poll(0)])

    def make_room(self, nbytes: int) -> bool:
        """Make room for so many bytes more, or ask the server for it; return whether there is some now."""
        wanted = max(2 * (self._places.used + nbytes), self._sends.nbytes)
        if self.is_tight or self._has_asked or self.is_full:
            return False
        with suppress(OSError):  # found out by `receive`
            if self._make is None:
                self._has_asked = self._put(_ROOM, (), (), wanted)
                return False
            arena, is_told = self._made(wanted, _REPLIES, self._sends.number + 1)
            self._set_tight(arena is None)
            if arena is not None and is_told:
                self._sends, self._places = arena, Places(arena.nbytes)
                return True
        return False

    def _set_tight(self, is_tight: bool) -> None:
        if is_tight and not self.is_tight and self._make is not None:
            _log.warning(
                "answers to a worker of this host go through %d bytes, some at a time: there is no memory for more",
                self._sends.nbytes,
            )
        self.is_tight = is_tight
        self.portion = max(self._sends.nbytes // 4, MAX_PAYLOAD) if is_tight else _PORTION

    def ask_for_staging_buffer(self, nbytes: int) -> StagingBufferRequest:
        """Have the server make a staging buffer of so many bytes.

        A former one is lost, whoever asked for that.
        """
        if self.staging_buffer is not None:
            self.staging_buffer.is_lost, self.staging_buffer = True, None
        asked = StagingBufferRequest()
        self._asked_staging_buffers.append(asked)  # first, so that whatever comes has somebody who asked
        with suppress(OSError):  # found out by `receive`
            asked.is_sent = self._put(_STAGING_BUFFER, (), (), nbytes)
        if not asked.is_sent:
            self._asked_staging_buffers.pop()
        return asked

    def trim(self) -> None:
        """Give back the pages of this end's memory, if nothing is in it; they come again as they are written."""
        if not self._places.used:
            self._sends.trim()

    def _made(self, nbytes: int, kind: int, number: int) -> tuple[SharedArena | None, bool]:
        """Make memory, if there is some, and tell the worker; return it, and whether the socket took the message."""
        assert self._make is not None
        made = self._make(nbytes, number)
        if made is None:
            return None, kind == _REPLIES or self._put(kind, (), (), number)
        arena, fd = made
        try:
            return arena, self._put(kind, (), (), number, fd)
        finally:
            os.close(fd)

    def _put(
        self, kind: int, table: Sequence[int], inline: Sequence[Frame], value: int = 0, fd: int | None = None
    ) -> bool:
        """Send a datagram, with what the peer may use again; return whether the socket took it."""
        returned = self._returned[:_MOST_GIVEN_BACK]
        words = [*returned, *table]
        head = _HEAD.pack(kind, len(table) // 2, len(returned), value)
        numbers = struct.pack(f"<{len(words)}q", *words)
        try:
            if fd is None:
                self._end.sendmsg([head, numbers, *inline])
            else:
                socket.send_fds(self._end, [head, numbers], [fd])
        except BlockingIOError:
            self.is_full = True
            return False
        except OSError:
            self.is_usable = False
            raise
        if returned:
            del self._returned[: len(returned)]
        if not self._returned:
            self._returned_bytes = 0
        return True

    def _change_memory(self, kind: int, value: int, fds: list[int]) -> None:
        """Do what the peer says about memory; descriptors that are used are taken out of `fds`."""
        if kind == _ROOM and self._make is not None and value:
            if len(self._reads) > 1:
                raise ValueError("a worker that asks for more memory and has not used what it got")
            self._grant(value)
        elif kind == _REQUESTS and self._make is None:
            self._has_asked = False
            self._set_tight(not fds)
            self.is_usable &= bool(fds)
            if fds:
                self._sends = SharedArena(fds.pop(), value)
                self._sends.populate()  # here, for the server has others to serve
                self._places = Places(self._sends.nbytes)
        elif kind == _REPLIES and self._make is None and fds:
            self._reads, self._borrowed_bytes = {value: SharedArena(fds.pop(), value)}, 0
        elif kind == _WEIGHTS and self._make is None and fds:
            self._weights[value] = SharedArena(fds.pop(), value, is_ours=False)
        elif kind == _STAGING_BUFFER and self._make is not None and value:
            self._last_staging_buffer += 1
            arena, is_told = self._made(value, _STAGING_BUFFER, self._last_staging_buffer)
            self._weights = {} if arena is None or not is_told else {arena.number: arena}
        elif kind == _STAGING_BUFFER and self._make is None and self._asked_staging_buffers:
            asked = self._asked_staging_buffers.popleft()
            if fds and not self._asked_staging_buffers:
                self.staging_buffer = asked.staging_buffer = StagingBuffer(fds.pop(), value, self._read)
                self.staging_buffer.arena.populate()
        else:
            raise ValueError(f"a datagram of kind {kind}")

    def _grant(self, nbytes: int) -> None:
        """Give a worker other memory for its requests, or tell it that there is none; later, if it does not read."""
        number = max(self._reads) + 1
        arena, is_told = self._made(nbytes, _REQUESTS, number)
        self._wish = 0 if is_told else nbytes
        if arena is not None and is_told:
            self._reads[number] = arena

    def _frames(self, table: Sequence[int], inline: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        copy, begin = memoryview(bytearray(inline)), 0  # the next datagram takes the place of this one
        left, last = len(copy), len(table) // 2 - 1
        for at in range(last + 1):
            nbytes, place = table[2 * at : 2 * at + 2]
            # The last frame of data holds numbers alone. All others are checked first, and then used: by then
            # the peer could have changed them.
            is_numbers = at == last > 0
            most = left if place < 0 else _PORTION + MAX_FRAME if is_numbers else MAX_FRAME
            if not 0 <= nbytes <= most:
                raise ValueError(f"a frame of {nbytes} bytes")
            if place < 0:
                frames.append(copy[begin : begin + nbytes])
                begin, left = begin + nbytes, left - nbytes
            else:
                frames.append(self._take_place(nbytes, place, is_numbers))
        return frames

    def _take_place(self, nbytes: int, place: int, may_borrow: bool) -> Frame:
        """Return the bytes of a place: a copy, or its memory, as long as somebody refers to it."""
        number, begin = place >> _NUMBER, place & ~(-1 << _NUMBER)
        weights = self._weights.get(number)
        arena = self._reads[number] if weights is None else weights
        if begin + nbytes > arena.nbytes:
            raise ValueError(f"a frame of {nbytes} bytes at {begin} of {arena.nbytes}")
        if len(self._reads) > 1 and number == max(self._reads):
            self._reads, self._borrowed_bytes = {number: arena}, 0  # the peer will not use what it had before
        found = arena.bytes[begin : begin + nbytes]
        if may_borrow and (weights is not None or self._borrowed_bytes + nbytes <= arena.nbytes // 2):
            self._num_borrowed += 1
            self._borrowed[self._num_borrowed] = weakref.ref(
                found, partial(self._give_back, self._num_borrowed, place, nbytes)
            )
            self._borrowed_bytes += 0 if weights is not None else nbytes
            return found
        self._returned.append(place)
        self._returned_bytes += nbytes
        return bytearray(found)

    def _give_back(self, number: int, place: int, nbytes: int, _: weakref.ref[Bytes]) -> None:
        self._borrowed.pop(number, None)
        self._returned.append(place)
        self._returned_bytes += nbytes
        if place >> _NUMBER in self._reads:
            self._borrowed_bytes -= nbytes


def _join(pieces: Sequence[Tensor], place: Tensor) -> None:
    """Copy pieces of bytes to a place, one behind the other."""
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) == 1:  # asking each of many small ones for its bytes would cost more than to copy them
        torch.cat(list(pieces), out=place.view(dtypes.pop()))
    else:
        torch.cat([piece.view(torch.uint8) for piece in pieces], out=place)


def connect(run: int, token: int, own: bytes) -> Channel:
    """Open a channel to the server of a run, if it is on this host. `token` is the session's.

    Blocks for a few seconds at most.

    Args:
        own: The routing id of the worker's socket, which the session knows.

    Raises:
        OSError: there is no such server here, or it does not know the session.
    """
    end = _socket()
    try:
        _introduce(end, run, _ATTACH, token, own)
        answer, fds, _, _ = socket.recv_fds(end, _HEAD.size, 2)
        try:
            if len(fds) != 2:
                why = (
                    "the server has no memory to share" if answer else "the server does not know this process"
                )
                raise ConnectionRefusedError(why)
            return Channel(end, SharedArena(os.dup(fds[0])), SharedArena(os.dup(fds[1])))
        finally:
            for fd in fds:
                os.close(fd)
    except OSError:
        end.close()
        raise


def watch(run: int, token: int, own: bytes) -> Process:
    """Have the server of a run, if it is on this host, watch this process; return the server's. Else as `connect`."""
    with _socket() as end:
        _introduce(end, run, _WATCH, token, own)
        if not end.recv(_HEAD.size):
            raise ConnectionRefusedError("the server does not know this process")
        return Process(process_at(end))


def _introduce(end: socket.socket, run: int, kind: int, token: int, own: bytes) -> None:
    """Connect to the server of a run and say who this is."""
    end.settimeout(_CONNECT_TIMEOUT)
    end.connect(_name(run))
    process_at(end)
    end.sendmsg([_HEAD.pack(kind, 0, 0, token), own])


class Listener:
    """The server's side of all its channels. Does not block.

    Args:
        run: Of the server; a channel is found by it.
        admits: Whether a routing id belongs to the session of a token.
        budget: The memory of channels is claimed there before it is made, and given back when it is unmapped.
        leases: Is told which weights are read; has new ones made where workers can read them.
        look_at: Is shown the processes, with the time, whenever they are looked after.

    Attributes:
        processes: Those of workers of this host that have a channel, or have asked to be watched.

    Raises:
        OSError: the system has no such sockets.
    """

    def __init__(
        self,
        run: int,
        admits: Callable[[bytes, int], bool],
        budget: Budget,
        leases: Leases,
        look_at: Callable[[Processes, float], object] = lambda _processes, _now: None,
    ) -> None:
        self._admits = admits
        self._look_at = look_at
        self._budget = budget
        self._exports = WeightExports(leases)
        self.channels: dict[bytes, Channel] = {}
        """Routing id → the channel of its worker."""
        self._peers: dict[int, tuple[bytes, int]] = {}
        """Descriptor → routing id and token."""
        self.processes = Processes()
        self._pending_peers: dict[int, socket.socket] = {}
        """Those that have not said yet who they are."""
        self._end = _socket()
        try:
            self._end.setblocking(False)
            self._end.bind(_name(run))
            self._end.listen(_PENDING_PEERS)
        except OSError:
            self._end.close()
            raise
        self._ready = select.epoll()
        self._ready.register(self._end, select.EPOLLIN)
        leases.shared = self._exports.make
        leases.place_of = lambda weights: self._exports.find([weights])

    def fileno(self) -> int:
        """Return a descriptor that can be read where something has come."""
        return self._ready.fileno()

    def close(self) -> None:
        """End all channels."""
        for fd in list(self._peers):
            self._drop(fd)
        for end in (*self._pending_peers.values(), self._end):
            end.close()
        self._ready.close()
        self._exports.close()
        self.processes.close()

    def receive(self, answer: Callable[[bytes, list[Frame]], object]) -> None:
        """Have messages that have come answered, of each worker a few; each is given its sender's routing id, too."""
        for fd, _ in self._ready.poll(0):
            if fd in self._pending_peers:
                self._attach(fd)
            elif fd not in self._peers:
                self._accept()  # or one that is gone by now: then nobody is there
            else:
                peer, _ = self._peers[fd]
                channel = self.channels[peer]
                for _ in range(_BURST):
                    try:
                        frames = channel.receive()
                    except (OSError, ProtocolError) as error:
                        if isinstance(error, ProtocolError):
                            _log.warning("ended a channel: %s", error)
                        if self.channels.get(peer) is channel:
                            self._drop(fd)
                        break
                    if frames is None:
                        break
                    answer(peer, frames)
                    del frames  # it would keep the place in use

    def reap_and_flush(self, now: float) -> None:
        """Close channels that have ended, or whose memory tables need.

        Those of ended sessions and processes have ended. Send what others could not take.

        Processes are watched until their sessions end; `look_at` is told about them at this time.

        To be called from time to time.
        """
        self._ready.modify(self._end, select.EPOLLIN)
        for channel in self.channels.values():
            channel.tell()
        ended = self.processes.ended()
        for fd, key in list(self._peers.items()):
            # A process may be gone, whoever has its end open still; what it said is heard first.
            if (key in ended and not _can_be_read(fd)) or not self._admits(*key):
                self._drop(fd)
        for key in self.processes:
            if not self._admits(*key):
                self.processes.remove(key)
        self._look_at(self.processes, now)
        self._make_way()

    def _make_way(self) -> None:
        """Close the largest channels while tables need what they have. (Of closed ones something may still be read.)"""
        if self._budget.excess(self._budget.shared) <= 0:
            return
        sizes = sorted([(channel.nbytes, peer) for peer, channel in self.channels.items()])
        while sizes and self._budget.excess(sum([nbytes for nbytes, _ in sizes])) > 0:
            nbytes, peer = sizes.pop()
            _log.warning(
                "a worker of this host goes on over tcp: tables need the %d bytes that it shared (--max-memory)",
                nbytes,
            )
            self.drop(peer)

    def drop(self, peer: bytes) -> None:
        """Close the channel of a worker; what is sent to it goes over ZeroMQ."""
        self._drop(self.channels[peer].fileno())

    def _drop(self, fd: int) -> None:
        peer, _ = self._peers.pop(fd)
        self._ready.unregister(fd)
        self.channels.pop(peer).close()  # from now on its `receive` raises OSError

    def _accept(self) -> None:
        try:
            end, _ = self._end.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._ready.modify(self._end, 0)  # until the next `reap_and_flush`
            return
        with suppress(OSError):  # it is gone by now
            end.setblocking(False)
            try:
                process_at(end)
            except PermissionError:
                end.close()
                return
            if len(self._pending_peers) == _PENDING_PEERS:
                self._pending_peers.pop(next(iter(self._pending_peers))).close()
            self._pending_peers[end.fileno()] = end
            self._ready.register(end, select.EPOLLIN)

    def _attach(self, pending_peer: int) -> None:
        """Give memory to a worker that has said who it is, if it is one of ours; end the connection if not.

        One that wants none is told that its process is watched, and the connection has served its purpose.
        """
        arenas: list[SharedArena] = []
        fds: list[int] = []
        end = self._pending_peers.pop(pending_peer)
        try:
            data = end.recv(_HEAD.size + 256)
            kind, _, _, token = _HEAD.unpack_from(data)
            peer = data[_HEAD.size :]
            if kind not in (_ATTACH, _WATCH) or not self._admits(peer, token):
                raise ConnectionRefusedError("no session of ours")
            self.processes.add((peer, token), process_at(end))
            if kind == _WATCH:
                end.send(_HEAD.pack(_WATCH, 0, 0, 0))
                self._ready.unregister(end)
                end.close()
                return
            for _ in range(2):
                made = self._share(LEAST_MEMORY, 0)
                if made is None:
                    end.send(_HEAD.pack(_ATTACH, 0, 0, 0))
                    raise ConnectionRefusedError("no memory is left of --max-memory")
                arenas.append(made[0])
                fds.append(made[1])
            socket.send_fds(end, [_HEAD.pack(_ATTACH, 0, 0, 0)], fds)
        except BlockingIOError:  # another one's event, who had the same number
            self._pending_peers[pending_peer] = end
            return
        except (OSError, struct.error) as error:
            _log.info("refused a channel: %s", error)
            self._ready.unregister(end)
            end.close()
            return
        finally:
            for fd in fds:
                os.close(fd)
        if peer in self.channels:
            self.drop(peer)
        requests, replies = arenas
        self.channels[peer] = Channel(end, replies, requests, self.make, self._exports)
        self._peers[end.fileno()] = peer, token

    def make(self, nbytes: int, number: int) -> tuple[SharedArena, int] | None:
        """Make memory for a channel; return it, and a descriptor of it that is the caller's.

        There is none unless there is twice as much as will be written: the first half. Whoever writes takes its pages.
        """
        with suppress(OSError):
            return self._share(nbytes, number) if nbytes < self._budget.available() else None
        return None

    def _share(self, nbytes: int, number: int) -> tuple[SharedArena, int] | None:
        """Make memory that is claimed as long as it is mapped here; None where that is more than the server may use."""
        if not self._budget.claim_shared(nbytes):
            return None
        try:
            fd = make_memory(nbytes)
            try:
                arena = SharedArena(os.dup(fd), number)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            self._budget.give_back_shared(nbytes)
            raise
        # Frames that somebody still reads are part of these bytes.
        weakref.finalize(arena.bytes, self._budget.give_back_shared, nbytes).atexit = False
        return arena, fd


def _socket() -> socket.socket:
    """Return a new socket. Raises OSError on systems other than Linux, which lack what else is used here."""
    if not (hasattr(os, "memfd_create") and hasattr(select, "epoll")):
        raise OSError(errno.ENOSYS, "this system has no memory without a name")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _can_be_read(fd: int) -> bool:
    """Say whether something has come to a descriptor."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _name(run: int) -> bytes:
    return b"\0kvstore-%016x" % run


def process_at(end: socket.socket) -> int:
    """Return the number of the process at the other end. Raises PermissionError if it belongs to another user."""
    pid, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise PermissionError(f"process {pid} at the other end belongs to user {user}")
    return int(pid)
