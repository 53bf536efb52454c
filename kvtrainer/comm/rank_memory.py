"""Numbers between the ranks of one host, through memory that all of them map.

Rank 0 makes the memory, whose size nobody can change, and gives its descriptor to the others over Unix sockets. It has
no name in a file system, so nothing is left behind however a process ends.

The memory has three rooms, which are used in turn, and each of them a place for every rank. To exchange something, all
ranks write to their places of a room and *meet*: everyone sends a message to everyone else and waits for theirs. Then
all may read the places of that room, and write to them what others do not read, until the next meeting; and read until
the one after that: a rank that writes to this room again knows that all others have come to it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server.channel import Arena, make_memory
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvtrainer import env
from kvtrainer.errors import ConfigurationError, ProtocolError

_log = logging.getLogger(__name__)

PLACE = 4 << 20
"""Bytes of a rank's place in a room."""
SMALL = 64 << 10
"""Bytes up to which every rank sums all that there is, not a share of it; of two ranks each always does."""
_ROOMS = 3
_CONNECT_TIMEOUT = 5.0
_MEETING = struct.Struct("<QQ")
"""Number of the meeting; what is exchanged there."""
_GREETING = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GATHER, _BROADCAST, _SUM, _SUMMED = range(4)

Piece = tuple[Tensor, Tensor]
"""Addends of this rank, and where their sum goes: two flat tensors of one size, or the same one twice."""


class _Peer(NamedTuple):
    """Another rank: the socket to it, and what tells that it has said something or has ended."""

    rank: int
    end: socket.socket
    process: int
    """A descriptor that can be read when the process has ended, whoever has the socket open still."""
    poll: select.poll


class RankMemory:
    """Sums and exchanges between all ranks of a job, which are on this host. One thread of each rank may use it.

    Every rank makes the same calls in the same order. After an error it cannot be used any more.

    Args:
        rank: of this process.
        peers: all other ranks.
        arena: the memory.
        seconds: tells how long a wait may take.
    """

    def __init__(self, rank: int, peers: Sequence[_Peer], arena: Arena, seconds: Callable[[], float]) -> None:
        self._rank, self._size = rank, len(peers) + 1
        self._peers = peers
        self._seconds = seconds
        self._num_meetings = 0
        places = torch.from_numpy(arena.bytes).view(_ROOMS, self._size, PLACE)
        self._rooms = [list(room) for room in places]

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank; contiguous ones on the CPU, of one shape and dtype."""
        found = [torch.empty_like(mine) for _ in range(self._size)]
        for part, *parts in zip(*(_cut(one) for one in (mine, *found)), strict=True):
            places = self._exchange([part], torch.uint8, part.numel(), _GATHER)
            torch._foreach_copy_(parts, places)
        return found

    def broadcast(self, flat: Tensor) -> None:
        """Replace the elements of a contiguous tensor on the CPU by rank 0's."""
        for part in _cut(flat):
            places = self._exchange(() if self._rank else [part], torch.uint8, part.numel(), _BROADCAST)
            if self._rank:
                part.copy_(places[0])

    def sum(
        self, pieces: Iterable[Piece], dtype: torch.dtype, before: float = 1.0, after: float = 1.0
    ) -> None:
        """Write after · Σ over ranks of before · element to where the sums go, computed in `dtype` from left to right.

        Pieces have the same sizes on all ranks.
        """
        last: tuple[Sequence[Tensor], Tensor] = (), torch.empty(0)
        for window in _windows(pieces, PLACE // dtype.itemsize):
            addends, targets = zip(*window, strict=True)
            numel = sum([one.numel() for one in addends])
            places = self._exchange(addends, dtype, numel, _SUM, before)
            _take(*last)
            last = (), places[0]
            if self._size == 2 or numel * dtype.itemsize <= SMALL:
                _fold_to(targets, places, after)
            else:
                last = targets, places[0]
                share = slice(numel * self._rank // self._size, numel * (self._rank + 1) // self._size)
                _fold([place[share] for place in places], places[0][share], after)
        if last[0]:
            self._meet(_SUMMED)
            _take(*last)

    def _exchange(
        self, given: Sequence[Tensor], dtype: torch.dtype, numel: int, what: int, factor: float = 1.0
    ) -> list[Tensor]:
        """Write flat tensors, one behind the other and multiplied, to the own place; return the places of all ranks."""
        places = [
            place[: numel * dtype.itemsize].view(dtype) for place in self._rooms[self._num_meetings % _ROOMS]
        ]
        own = places[self._rank]
        at = 0
        for tensor in given:
            own[at : at + tensor.numel()].copy_(tensor)
            at += tensor.numel()
        if factor != 1.0:
            own.mul_(factor)
        self._meet(numel * dtype.itemsize << 3 | what)
        return places

    def _meet(self, what: int) -> None:
        """Wait until all ranks have come here.

        Raises:
            ConnectionError: a rank has ended.
            TimeoutError: a rank did not come in time.
            ProtocolError: a rank came with something else.
        """
        self._num_meetings += 1
        mine = _MEETING.pack(self._num_meetings, what)
        for peer in self._peers:
            peer.end.send(mine)
        for peer in self._peers:
            if self._hear(peer) != mine:
                raise ProtocolError(
                    f"rank {self._rank} and rank {peer.rank} came to one exchange with different calls; call "
                    "collective methods in the same order on every rank"
                )

    def _hear(self, peer: _Peer) -> bytes:
        deadline, has_ended = 0.0, False
        while True:
            try:
                if said := peer.end.recv(_MEETING.size):
                    return said
                has_ended = True
            except BlockingIOError:
                pass
            if has_ended:
                raise ConnectionResetError(f"the process of rank {peer.rank} has ended")
            now = time.monotonic()
            deadline = deadline or now + self._seconds()
            if now >= deadline:
                raise TimeoutError(f"the wait for rank {peer.rank} timed out")
            # What it has said before it ended is read first.
            has_ended = any([fd == peer.process for fd, _ in peer.poll.poll(1000 * (deadline - now))])


def open_memory(
    rank: int, size: int, tell: Callable[[bytes], list[bytes]], seconds: Callable[[], float]
) -> RankMemory | None:
    """Open the memory of all ranks, if they are on one host and none has KVSTORE_TRANSPORT=tcp; all get it, or none.

    Args:
        tell: gives the bytes of all ranks, by rank; collective.
        seconds: as of RankMemory.

    Raises:
        ConfigurationError: there is none, and a rank has KVSTORE_TRANSPORT=shm; or an unknown word. On every rank.
    """
    with ExitStack() as opened:
        listener, host, trouble = None, "", ""
        address = b"\0kvtrainer-" + uuid.uuid4().hex.encode()
        try:
            host = _BOOT_ID.read_text()
            listener = opened.enter_context(_socket())
            listener.bind(address)
            listener.listen(size)
        except OSError as error:
            trouble = f"rank {rank}: {error}"
        transport = env.text_of(os.environ, env.TRANSPORT)
        said = {"host": host, "address": address, "transport": transport, "trouble": trouble}
        heard = [unpack_control(one) for one in tell(pack_control(said))]
        transports = [env.transport_of({env.TRANSPORT: one["transport"]}) for one in heard]
        is_one_host = len({one["host"] for one in heard}) == 1
        if "tcp" in transports:
            trouble = f"rank {transports.index('tcp')} has {env.TRANSPORT}=tcp"
        elif not is_one_host:
            trouble = "they are on several hosts"
        else:
            trouble = "; ".join(one["trouble"] for one in heard if one["trouble"])
        memory = None
        if listener is not None and not trouble:
            try:
                peers = _connect(listener, rank, [one["address"] for one in heard], opened)
                memory = RankMemory(rank, peers, _share(rank, peers), seconds)
            except (OSError, struct.error) as error:
                trouble = f"rank {rank}: {error}"
                opened.close()  # others that wait for this rank notice it
            trouble = "; ".join(one.decode() for one in tell(trouble.encode()) if one)
        if memory is not None and not trouble:
            weakref.finalize(memory, opened.pop_all().close)
            return memory
    if "shm" in transports:
        raise ConfigurationError(
            f"the ranks of torch.distributed cannot share memory: {trouble} ({env.TRANSPORT}=auto goes without it)"
        )
    if rank == 0:
        level = logging.WARNING if is_one_host and "tcp" not in transports else logging.DEBUG
        _log.log(level, "ranks exchange numbers by torch.distributed, not through memory: %s", trouble)
    return None


def _socket() -> socket.socket:
    """Return a new socket. Raises OSError on systems other than Linux, which lack what else is used here."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no memory without a name")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(_CONNECT_TIMEOUT)
    return end


def _connect(
    listener: socket.socket, rank: int, addresses: Sequence[bytes], opened: ExitStack
) -> list[_Peer]:
    """Connect to all other ranks, by rank. Raises OSError or struct.error where that fails or takes too long."""
    ends: dict[int, socket.socket] = {}
    for other, address in enumerate(addresses[:rank]):
        ends[other] = opened.enter_context(_socket())
        ends[other].connect(address)
        ends[other].send(_GREETING.pack(rank))
    for _ in addresses[rank + 1 :]:
        end = opened.enter_context(listener.accept()[0])
        end.settimeout(_CONNECT_TIMEOUT)
        [other] = _GREETING.unpack(end.recv(_GREETING.size))
        ends[other] = end
    listener.close()
    peers = []
    for other, end in sorted(ends.items()):
        pid, user, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            raise PermissionError(f"rank {other} belongs to user {user}")
        process = os.pidfd_open(pid)
        opened.callback(os.close, process)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(process, select.POLLIN)
        peers.append(_Peer(other, end, process, poll))
    return peers


def _share(rank: int, peers: Sequence[_Peer]) -> Arena:
    """Make the memory and hand it over, on rank 0, or take it; sockets no longer block. Raises OSError without any."""
    if rank == 0:
        fd = make_memory(_ROOMS * (len(peers) + 1) * PLACE)
        for peer in peers:
            socket.send_fds(peer.end, [_GREETING.pack(rank)], [fd])
    else:
        _, fds, _, _ = socket.recv_fds(peers[0].end, _GREETING.size, 1)
        if not fds:
            raise ConnectionError("rank 0 has no memory for the others")
        [fd] = fds
    for peer in peers:
        peer.end.setblocking(False)
    return Arena(fd)


def _cut(tensor: Tensor) -> Iterator[Tensor]:
    """Cut the bytes of a contiguous tensor into parts that have room in a place."""
    flat = tensor.view(-1).view(torch.uint8)
    for at in range(0, flat.numel(), PLACE):
        yield flat[at : at + PLACE]


def _windows(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Cut pieces into lists of so many elements each; the last one may have fewer."""
    window: list[Piece] = []
    room = size
    for addends, target in pieces:
        at = 0
        while at < addends.numel():
            numel = min(room, addends.numel() - at)
            window.append((addends[at : at + numel], target[at : at + numel]))
            at, room = at + numel, room - numel
            if not room:
                yield window
                window, room = [], size
    if window:
        yield window


def _fold(places: Sequence[Tensor], total: Tensor, after: float) -> None:
    """Sum from left to right; the sum may take the first place."""
    torch.add(places[0], places[1], out=total)
    for place in places[2:]:
        total.add_(place)
    if after != 1.0:
        total.mul_(after)


def _fold_to(targets: Sequence[Tensor], places: Sequence[Tensor], after: float) -> None:
    """Sum places from left to right into targets, which may be on another device and of another dtype."""
    at = 0
    for target in targets:
        addends = [place[at : at + target.numel()] for place in places]
        is_direct = target.is_cpu and target.dtype == addends[0].dtype
        total = target if is_direct else torch.empty_like(addends[0])
        _fold(addends, total, after)
        if not is_direct:
            target.copy_(total)
        at += target.numel()


def _take(targets: Sequence[Tensor], total: Tensor) -> None:
    """Copy a sum that lies in the memory to where it goes."""
    at = 0
    for target in targets:
        target.copy_(total[at : at + target.numel()])
        at += target.numel()
