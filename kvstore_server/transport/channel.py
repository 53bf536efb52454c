"""Shared-memory transport between a worker and a server on one host.

Message data is in shared memory; a Unix socket (SEQPACKET) carries message descriptors, small frames and the file
descriptors of memory. The server allocates and seals the memory of both directions, so neither side can shrink it
while the other reads. It is anonymous (memfd), so nothing is left behind however a process ends.

How a message travels: the sender copies each large frame into a free range of its arena and sends (length, location)
for it. The receiver reads it there without a copy, and returns the location with one of its own messages once the last
reference is gone. If the arena is full, the server allocates a larger one, on its own or at the worker's request. A
receiver that borrows half of an arena copies further frames, so that the other half stays free.

Two kinds of memory are read in place without any copy: exported weights of the server, and staging buffers in which a
worker puts its gradients (see `exports`). A *location* is an offset, with the number of its memory in the upper bits.

Invariants: neither end blocks. Lengths and locations from the peer are checked before use, because it may be broken or
hostile. A full socket or arena makes `send` return False, and the caller tries again. A peer that is gone raises
OSError, after the messages it had sent were received.
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
from kvstore_server.protocol.frames import MAX_FRAME, MAX_FRAMES, MAX_PAYLOAD, SENT_ALONE, Frame
from kvstore_server.transport.arena import (
    PORTION,
    ArenaPlaces,
    Bytes,
    Leases,
    SharedArena,
    make_shared_memory,
)
from kvstore_server.transport.exports import (
    ARENA_SHIFT,
    FIRST_WEIGHTS,
    ExportedStagingBuffer,
    ExportedStagingRequest,
    WeightExports,
)

_log = logging.getLogger(__name__)


MIN_MEMORY = 4 << 20
"""Initial size of each direction in bytes. Pages take no memory before they are written."""
_INLINE = 2048
"""Frames up to this size are sent through the socket."""
_HEAD = struct.Struct("<HHIQ")
"""Kind, number of frames, number of returned locations, and a value that depends on the kind."""
_MESSAGE, _ATTACH, _ROOM, _REQUESTS, _REPLIES, _WEIGHTS, _STAGING_BUFFER, _WATCH = range(8)
"""Kinds of datagrams: frames; a worker's session; a worker wants this much room; new memory for requests; for replies;
memory of weights; a staging buffer is wanted (bytes) or was made; a worker's session without memory, only to exchange
process ids.
"""
_MAX_RELEASED = 1024
_DATAGRAM = 8 * _MAX_RELEASED + (MAX_FRAMES + 1) * (16 + _INLINE)
_BURST = 64
"""Messages received from one worker before it is another one's turn."""
_nbytes_of: Callable[[Tensor], int] = attrgetter("nbytes")
_PENDING_PEERS = 128
_CONNECT_TIMEOUT = 5.0
_ONE_FD = socket.CMSG_SPACE(4)
_CREDENTIALS = struct.Struct("iII")


class Channel:
    """One end of the connection between a worker and a server. Never blocks; not thread-safe.

    Args:
        end: A connected Unix socket that preserves message boundaries.
        sends: Memory for what this end sends.
        reads: Memory for what this end receives.
        make: On the server, allocates memory of some size with a number; see `Listener.make`.
        exports: On the server, weights that the worker may read in place.
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
        # 1. The socket and the two directions.
        self._end = end
        self._sends, self._places = sends, ArenaPlaces(sends.nbytes)
        self._reads = {reads.number: reads}
        self._make = make
        self.is_usable = True
        """False: messages cannot be sent any more, but those of the peer may still be received."""
        self.is_full = False
        """The last message failed because the socket was full, although its memory had room; until it is tried
        again.
        """
        self._has_asked = False
        self.is_tight = False
        """There is no memory for a larger arena."""
        self.portion = PORTION
        """The most data in one message, in bytes."""
        # 2. Memory that is read in place: exported weights and staging buffers.
        self._exports = exports
        self._weights: dict[int, SharedArena] = {}
        """Number → memory of weights that the worker knows; on the server, the worker's staging buffer."""
        self.staging_buffer: ExportedStagingBuffer | None = None
        """The worker's staging buffer, once the server has made the last one that was requested."""
        self._asked_staging_buffers: deque[ExportedStagingRequest] = deque()
        """Requests that are not answered yet."""
        self._last_staging_buffer = FIRST_WEIGHTS
        """On the server, the number of the worker's last staging buffer."""
        self._shown: set[int] = set()
        """Numbers of the memories whose descriptors the worker has."""
        self._read: dict[int, list[Sequence[Tensor]]] = {}
        """Location → what the peer reads there, once for each message: weights, or the contents of a staging buffer."""
        # 3. Frames that are borrowed from the peer's memory, and locations to return to it.
        self._num_borrowed = 0
        self._borrowed: dict[int, weakref.ref[Bytes]] = {}
        """Borrowed frames that are still referenced."""
        self._borrowed_bytes = 0
        """Bytes borrowed from the current memory."""
        self._returned: list[int] = []
        """Locations that were read, to be returned with the next message."""
        self._returned_bytes = 0
        self._enough = MIN_MEMORY // 8
        """From this many bytes on, locations are returned in a message of their own."""
        self._wish = 0
        """Bytes that a worker requested when its socket was full."""
        self._was_reset = False
        self._buffer = memoryview(bytearray(_DATAGRAM))

    def fileno(self) -> int:
        return self._end.fileno()

    def process(self) -> Process:
        """Return the process at the other end. Raises OSError if it is not visible."""
        return Process(process_at_channel_end(self._end))

    @property
    def nbytes(self) -> int:
        """Bytes of all memory that the server shares with the worker."""
        return sum([arena.nbytes for arena in (self._sends, *self._reads.values(), *self._weights.values())])

    def close(self) -> None:
        """Close the connection; frames that are still referenced stay readable."""
        if self.staging_buffer is not None:
            self.staging_buffer.is_lost = True
        for location in list(self._read):
            while location in self._read:
                self._reclaim(location)
        self._borrowed.clear()  # they refer to this channel, which would keep its memory
        with suppress(OSError):  # the other end may be gone
            self._end.shutdown(socket.SHUT_RDWR)  # a forked child may still hold the descriptor
        self._end.close()

    def send(
        self, frames: Sequence[Frame], payloads: Sequence[Tensor] | None = None, zero_copy: bool = False
    ) -> bool:
        """Send a message if there is room for it; return whether it was sent.

        Args:
            payloads: The last frame, in pieces.
            zero_copy: The receiver may read the payloads in place, if they are exported weights (held until it has
                read them) or in the worker's staging buffer.

        Raises:
            OSError: The peer is gone.
        """
        # 1. Can the payloads be read in place? It does not pay for small ones.
        pieces = payloads or ()
        data = sum(map(_nbytes_of, pieces))
        least = len(pieces) * SENT_ALONE if self.staging_buffer is None else _INLINE + 1
        stays = self._location_of(pieces) if zero_copy and pieces and data >= least else None
        # 2. Build the table of (length, location), and copy frames: small ones into the datagram, large ones into the
        # arena.
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
                table += nbytes, begin | self._sends.number << ARENA_SHIFT
                if frame is None:
                    _copy_into_channel(pieces, self._sends.data[begin : begin + nbytes])
                else:
                    self._sends.bytes[begin : begin + nbytes] = np.frombuffer(frame, np.uint8)
        # 3. Send it, or give all ranges back. What is read in place is kept until the peer returns it.
        else:
            is_sent = self._put(_MESSAGE, table, inline)
        for begin in () if is_sent else taken:
            self._places.release(begin)
        if is_sent and stays is not None:
            self._read.setdefault(stays, []).append(pieces)
            if self._exports is not None:
                for piece in pieces:
                    self._exports.leases.hold(piece)
        return is_sent

    def _location_of(self, pieces: Sequence[Tensor]) -> int | None:
        """Return the location of payloads that the peer can read in place; None if it cannot."""
        if self.staging_buffer is not None:
            return self.staging_buffer.find(pieces)
        location = None if self._exports is None else self._exports.find(pieces)
        return location if location is not None and self.show(np.array([location])) else None

    def show(self, locations: npt.NDArray[np.int64]) -> bool:
        """Send the worker descriptors of the weights at these locations; return whether it has all of them."""
        assert self._exports is not None
        for number in set((locations[locations >= 0] >> ARENA_SHIFT).tolist()) - self._shown:
            fd = self._exports.fds.get(number)  # missing if the table has ended since
            if fd is not None and not self._put(_WEIGHTS, (), (), number, fd):
                return False
            self._shown.add(number)
        return True

    def weights_at(self, location: int) -> tuple[SharedArena, int] | None:
        """Return the server's memory that contains a location, and the offset there; None if it is unknown."""
        arena = self._weights.get(location >> ARENA_SHIFT)
        return None if arena is None else (arena, location & ~(-1 << ARENA_SHIFT))

    def _reclaim(self, location: int) -> None:
        found = self._read.pop(location, None)
        if found is not None:
            pieces = found.pop()
            if self._exports is not None:
                for piece in pieces:
                    self._exports.leases.release(piece)
            if found:
                self._read[location] = found

    def receive(self) -> list[Frame] | None:
        """Return the frames of the next message; None if nothing has arrived.

        The last data frame is a view of the peer's memory, which is returned with the last reference; others are
        copies.

        Raises:
            OSError: The peer is gone.
            ProtocolError: The message cannot be understood.
        """
        while True:
            # 1. Read a datagram.
            fds: list[int] = []
            try:
                if self._make is not None:  # no descriptors are accepted from a worker
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
                continue  # it closed with unread messages of ours; its own messages follow
            if not size:
                raise ConnectionResetError("the other end was closed")
            # 2. Take back the locations that the peer has read.
            data = self._buffer[:size]
            try:
                kind, num_frames, num_returned, value = _HEAD.unpack_from(data)
                numbers = struct.unpack_from(f"<{num_returned + 2 * num_frames}q", data, _HEAD.size)
                for location in numbers[:num_returned]:
                    if location >> ARENA_SHIFT == self._sends.number:
                        self._places.release(location & ~(-1 << ARENA_SHIFT))
                    elif location >> ARENA_SHIFT > FIRST_WEIGHTS:
                        self._reclaim(location)
                # 3. Handle messages about memory, and continue; return the frames of any other.
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
        """Send what was postponed: returned locations, and memory that was requested."""
        with suppress(OSError):  # `receive` reports it, after the peer's last messages
            if self._wish and self._takes_more():
                self._grant(self._wish)
            if self._returned_bytes >= self._enough:
                self._put(_MESSAGE, (), ())

    def _takes_more(self) -> bool:
        poll = select.poll()  # `select` only handles descriptors below 1024
        poll.register(self._end, select.POLLOUT)
        return any([event & select.POLLOUT for _, event in poll.poll(0)])

    def make_room(self, nbytes: int) -> bool:
        """Make room for `nbytes` more, or request it from the server; return whether there is room now."""
        wanted = max(2 * (self._places.used + nbytes), self._sends.nbytes)
        if self.is_tight or self._has_asked or self.is_full:
            return False
        with suppress(OSError):  # `receive` reports it
            if self._make is None:
                self._has_asked = self._put(_ROOM, (), (), wanted)
                return False
            arena, is_told = self._made(wanted, _REPLIES, self._sends.number + 1)
            self._set_tight(arena is None)
            if arena is not None and is_told:
                self._sends, self._places = arena, ArenaPlaces(arena.nbytes)
                return True
        return False

    def _set_tight(self, is_tight: bool) -> None:
        if is_tight and not self.is_tight and self._make is not None:
            _log.warning(
                "answers to a worker of this host go through %d bytes, some at a time: there is no memory for more",
                self._sends.nbytes,
            )
        self.is_tight = is_tight
        self.portion = max(self._sends.nbytes // 4, MAX_PAYLOAD) if is_tight else PORTION

    def ask_for_staging_buffer(self, nbytes: int) -> ExportedStagingRequest:
        """Request a staging buffer from the server. Any former one is lost."""
        if self.staging_buffer is not None:
            self.staging_buffer.is_lost, self.staging_buffer = True, None
        asked = ExportedStagingRequest()
        self._asked_staging_buffers.append(asked)  # before it is sent, so that the answer finds it
        with suppress(OSError):  # `receive` reports it
            asked.is_sent = self._put(_STAGING_BUFFER, (), (), nbytes)
        if not asked.is_sent:
            self._asked_staging_buffers.pop()
        return asked

    def trim(self) -> None:
        """Return the pages of this end's arena to the system if it is empty."""
        if not self._places.used:
            self._sends.trim()

    def _made(self, nbytes: int, kind: int, number: int) -> tuple[SharedArena | None, bool]:
        """Allocate memory and send it to the worker; return it, and whether the socket accepted the message."""
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
        """Send a datagram, with locations to return; return whether the socket accepted it."""
        returned = self._returned[:_MAX_RELEASED]
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
        """Handle a message about memory; descriptors that are used are removed from `fds`."""
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
                self._sends.populate()  # in the worker, because the server has other clients
                self._places = ArenaPlaces(self._sends.nbytes)
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
                self.staging_buffer = asked.staging_buffer = ExportedStagingBuffer(
                    fds.pop(), value, self._read
                )
                self.staging_buffer.arena.populate()
        else:
            raise ValueError(f"a datagram of kind {kind}")

    def _grant(self, nbytes: int) -> None:
        """Give a worker new memory for its requests, or tell it that it gets no more; later if its socket is full."""
        number = max(self._reads) + 1
        arena, is_told = self._made(nbytes, _REQUESTS, number)
        self._wish = 0 if is_told else nbytes
        if arena is not None and is_told:
            self._reads[number] = arena

    def _frames(self, table: Sequence[int], inline: memoryview) -> list[Frame]:
        frames: list[Frame] = []
        copy, begin = memoryview(bytearray(inline)), 0  # the buffer is reused for the next datagram
        left, last = len(copy), len(table) // 2 - 1
        for at in range(last + 1):
            nbytes, location = table[2 * at : 2 * at + 2]
            # Only the last data frame may be borrowed, since it contains numbers. Other frames are validated and then
            # used, and the peer could change them in between, so they are copied.
            is_numbers = at == last > 0
            most = left if location < 0 else PORTION + MAX_FRAME if is_numbers else MAX_FRAME
            if not 0 <= nbytes <= most:
                raise ValueError(f"a frame of {nbytes} bytes")
            if location < 0:
                frames.append(copy[begin : begin + nbytes])
                begin, left = begin + nbytes, left - nbytes
            else:
                frames.append(self._take_location(nbytes, location, is_numbers))
        return frames

    def _take_location(self, nbytes: int, location: int, may_borrow: bool) -> Frame:
        number, begin = location >> ARENA_SHIFT, location & ~(-1 << ARENA_SHIFT)
        weights = self._weights.get(number)
        arena = self._reads[number] if weights is None else weights
        if begin + nbytes > arena.nbytes:
            raise ValueError(f"a frame of {nbytes} bytes at {begin} of {arena.nbytes}")
        if len(self._reads) > 1 and number == max(self._reads):
            # The peer no longer uses its former memory.
            self._reads, self._borrowed_bytes = {number: arena}, 0
        found = arena.bytes[begin : begin + nbytes]
        if may_borrow and (weights is not None or self._borrowed_bytes + nbytes <= arena.nbytes // 2):
            self._num_borrowed += 1
            self._borrowed[self._num_borrowed] = weakref.ref(
                found, partial(self._release, self._num_borrowed, location, nbytes)
            )
            self._borrowed_bytes += 0 if weights is not None else nbytes
            return found
        self._returned.append(location)
        self._returned_bytes += nbytes
        return bytearray(found)

    def _release(self, number: int, location: int, nbytes: int, _: weakref.ref[Bytes]) -> None:
        self._borrowed.pop(number, None)
        self._returned.append(location)
        self._returned_bytes += nbytes
        if location >> ARENA_SHIFT in self._reads:
            self._borrowed_bytes -= nbytes


def _copy_into_channel(pieces: Sequence[Tensor], target: Tensor) -> None:
    dtypes = {piece.dtype for piece in pieces}
    if len(dtypes) == 1:  # viewing each of many small pieces as bytes costs more than copying them
        torch.cat(list(pieces), out=target.view(dtypes.pop()))
    else:
        torch.cat([piece.view(torch.uint8) for piece in pieces], out=target)


def connect_channel(run_id: int, token: int, own: bytes) -> Channel:
    """Open a channel to the server with a run id, if it is on this host. Blocks for a few seconds at most.

    Args:
        token: The token of the worker's session.
        own: The routing id of the worker's socket, which the session knows.

    Raises:
        OSError: There is no such server on this host, or it does not know the session.
    """
    end = _make_channel_socket()
    try:
        _send_channel_identity(end, run_id, _ATTACH, token, own)
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


def watch_over_channel(run_id: int, token: int, own: bytes) -> Process:
    """Let the server with a run id watch this process, and return its process; otherwise like `connect_channel`."""
    with _make_channel_socket() as end:
        _send_channel_identity(end, run_id, _WATCH, token, own)
        if not end.recv(_HEAD.size):
            raise ConnectionRefusedError("the server does not know this process")
        return Process(process_at_channel_end(end))


def _send_channel_identity(end: socket.socket, run_id: int, kind: int, token: int, own: bytes) -> None:
    end.settimeout(_CONNECT_TIMEOUT)
    end.connect(_channel_socket_name(run_id))
    process_at_channel_end(end)
    end.sendmsg([_HEAD.pack(kind, 0, 0, token), own])


class ChannelListener:
    """The server's side of all its channels. Never blocks.

    Args:
        run_id: Identifies the server; workers find it by this number.
        admits: Returns whether a routing id belongs to the session of a token.
        budget: Memory of channels is claimed from it before it is allocated, until it is unmapped.
        leases: Is told which weights are being read, and gets an allocator for weights that workers can map.
        check_processes: Called with the processes and the time by `reap_and_flush`.

    Attributes:
        processes: Processes of workers on this host that have a channel or asked to be watched.

    Raises:
        OSError: The system lacks such sockets.
    """

    def __init__(
        self,
        run_id: int,
        admits: Callable[[bytes, int], bool],
        budget: Budget,
        leases: Leases,
        check_processes: Callable[[Processes, float], object] = lambda _processes, _now: None,
    ) -> None:
        self._admits = admits
        self._check_processes = check_processes
        self._budget = budget
        self._exports = WeightExports(leases)
        self.channels: dict[bytes, Channel] = {}
        """Routing id → the channel of its worker."""
        self._peers: dict[int, tuple[bytes, int]] = {}
        """Descriptor → (routing id, token)."""
        self.processes = Processes()
        self._pending_peers: dict[int, socket.socket] = {}
        """Connections that have not been authenticated yet."""
        self._end = _make_channel_socket()
        try:
            self._end.setblocking(False)
            self._end.bind(_channel_socket_name(run_id))
            self._end.listen(_PENDING_PEERS)
        except OSError:
            self._end.close()
            raise
        self._ready = select.epoll()
        self._ready.register(self._end, select.EPOLLIN)
        leases.shared, leases.export = self._exports.make, self._exports.add
        leases.location_of = lambda weights: self._exports.find([weights])

    def fileno(self) -> int:
        """Return a descriptor that is readable when something has arrived."""
        return self._ready.fileno()

    def close(self) -> None:
        for fd in list(self._peers):
            self._drop(fd)
        for end in (*self._pending_peers.values(), self._end):
            end.close()
        self._ready.close()
        self._exports.close()
        self.processes.close()

    def receive(self, answer: Callable[[bytes, list[Frame]], object]) -> None:
        """Pass the messages that have arrived, a few of each worker, to `answer` with the sender's routing id."""
        for fd, _ in self._ready.poll(0):
            if fd in self._pending_peers:
                self._attach(fd)
            elif fd not in self._peers:
                self._accept()  # or a stale event of a closed connection: then there is nothing to accept
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
                    del frames  # a reference would keep the place in use

    def reap_and_flush(self, now: float) -> None:
        """Close ended channels, and others if memory is needed; flush the rest; pass processes to `check_processes`."""
        self._ready.modify(self._end, select.EPOLLIN)
        for channel in self.channels.values():
            channel.tell()
        ended = self.processes.ended()
        for fd, key in list(self._peers.items()):
            # An ended process' socket may still be open in a child. Its last messages are received first.
            if (key in ended and not _is_channel_readable(fd)) or not self._admits(*key):
                self._drop(fd)
        for key in self.processes:
            if not self._admits(*key):
                self.processes.remove(key)
        self._check_processes(self.processes, now)
        self._make_way()

    def _make_way(self) -> None:
        """Close the largest channels while tables need their memory. Frames of closed channels may still be in use."""
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
        """Close the channel of a worker; later messages to it are sent over ZeroMQ."""
        self._drop(self.channels[peer].fileno())

    def _drop(self, fd: int) -> None:
        peer, _ = self._peers.pop(fd)
        self._ready.unregister(fd)
        self.channels.pop(peer).close()  # its `receive` raises OSError from now on

    def _accept(self) -> None:
        try:
            end, _ = self._end.accept()
        except OSError as error:
            # Stop accepting until `reap_and_flush`; otherwise the event would repeat forever.
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._ready.modify(self._end, 0)
            return
        with suppress(OSError):  # it may be gone
            end.setblocking(False)
            try:
                process_at_channel_end(end)
            except PermissionError:
                end.close()
                return
            if len(self._pending_peers) == _PENDING_PEERS:
                self._pending_peers.pop(next(iter(self._pending_peers))).close()
            self._pending_peers[end.fileno()] = end
            self._ready.register(end, select.EPOLLIN)

    def _attach(self, pending_peer: int) -> None:
        """Give memory to a worker that has authenticated itself, or only watch its process; refuse others."""
        arenas: list[SharedArena] = []
        fds: list[int] = []
        end = self._pending_peers.pop(pending_peer)
        # 1. Authenticate: the first message must name an open session.
        try:
            data = end.recv(_HEAD.size + 256)
            kind, _, _, token = _HEAD.unpack_from(data)
            peer = data[_HEAD.size :]
            if kind not in (_ATTACH, _WATCH) or not self._admits(peer, token):
                raise ConnectionRefusedError("it does not belong to a session of this server")
            self.processes.add((peer, token), process_at_channel_end(end))
            if kind == _WATCH:
                end.send(_HEAD.pack(_WATCH, 0, 0, 0))
                self._ready.unregister(end)
                end.close()
                return
            # 2. Allocate both arenas, and send their descriptors.
            for _ in range(2):
                made = self._share(MIN_MEMORY, 0)
                if made is None:
                    end.send(_HEAD.pack(_ATTACH, 0, 0, 0))
                    raise ConnectionRefusedError("--max-memory leaves no memory for it")
                arenas.append(made[0])
                fds.append(made[1])
            socket.send_fds(end, [_HEAD.pack(_ATTACH, 0, 0, 0)], fds)
        except BlockingIOError:
            # A stale event of another connection that had this descriptor.
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
        # 3. Replace the worker's former channel.
        if peer in self.channels:
            self.drop(peer)
        requests, replies = arenas
        self.channels[peer] = Channel(end, replies, requests, self.make, self._exports)
        self._peers[end.fileno()] = peer, token

    def make(self, nbytes: int, number: int) -> tuple[SharedArena, int] | None:
        """Allocate memory for a channel, with a descriptor that the caller must close; None if there is too little."""
        # Twice what will be written soon, its first half, must be available. The writer faults these pages in.
        with suppress(OSError):
            return self._share(nbytes, number) if nbytes < self._budget.available() else None
        return None

    def _share(self, nbytes: int, number: int) -> tuple[SharedArena, int] | None:
        """Allocate memory that is claimed while it is mapped here; None if that exceeds the server's limit."""
        if not self._budget.claim_shared(nbytes):
            return None
        try:
            fd = make_shared_memory(nbytes)
            try:
                arena = SharedArena(os.dup(fd), number)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            self._budget.release_shared(nbytes)
            raise
        # Frames that are still referenced keep the mapping, and so the claim.
        weakref.finalize(arena.bytes, self._budget.release_shared, nbytes).atexit = False
        return arena, fd


def _make_channel_socket() -> socket.socket:
    """Return a new socket. Raises OSError on systems other than Linux, which lack the calls used here."""
    if not (hasattr(os, "memfd_create") and hasattr(select, "epoll")):
        raise OSError(errno.ENOSYS, "this system has no anonymous shared memory (memfd)")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _is_channel_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _channel_socket_name(run_id: int) -> bytes:
    return b"\0kvstore-%016x" % run_id


def process_at_channel_end(end: socket.socket) -> int:
    """Return the pid of the process at the other end. Raises PermissionError if it belongs to another user."""
    pid, user, _ = _CREDENTIALS.unpack(
        end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if user != os.geteuid():
        raise PermissionError(f"process {pid} at the other end belongs to user {user}")
    return int(pid)
