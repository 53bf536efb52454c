"""Numbers between the ranks of one host, through memory that all of them map.

The lowest rank makes the memory, whose size nobody can change, and gives its descriptor to the others over Unix
sockets. It has no name in a file system, so nothing is left behind however a process ends.

The memory has three rooms, which are used in turn, and each of them a place for every rank. To exchange something, all
ranks write to their places of a room and *meet*: everyone sends a message to everyone else and waits for theirs. Then
all may read the places of that room, and write to them what others do not read, until the next meeting; and read until
the one after that: a rank that writes to this room again knows that all others have come to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.transport.arena import SharedArena, make_memory
from kvstore_server.transport.channel import process_at
from kvtrainer.common import env
from kvtrainer.errors import ConfigurationError, ProtocolError

_log = logging.getLogger(__name__)

PLACE = 4 << 20
"""Bytes of a rank's place in a room."""
SMALL = 64 << 10
"""Bytes up to which every rank sums all that there is, not a share of it; of two ranks each always does."""
_ROOMS = 3
_CONNECT_TIMEOUT = 5.0
# Number of the meeting; what is exchanged there.
_MEETING = struct.Struct("<QQ")
_GREETING = struct.Struct("<I")
_GATHER, _BROADCAST, _SUM, _SUMMED = range(4)

Piece = tuple[Tensor, Tensor]
"""Addends of this rank, and where their sum goes: two flat tensors of one size, or the same one twice."""


class _Peer(NamedTuple):
    """Another rank: the socket to it, and what tells that it has said something or has ended."""

    rank: int
    end: socket.socket
    # A descriptor that can be read when the process has ended, whoever has the socket open still.
    process: int
    poll: select.poll


class RankMemory:
    """Sums and exchanges between some ranks of a job, which are on this host. One thread of each rank may use it.

    Every rank makes the same calls in the same order. After an error it cannot be used any more.

    Args:
        rank: of this process.
        peers: all others that share the memory, by rank.
        arena: the memory.
        seconds: tells how long a wait may take.
        opened: what is closed with it.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[_Peer],
        arena: SharedArena,
        seconds: Callable[[], float],
        opened: ExitStack,
    ) -> None:
        self._rank, self._size = rank, len(peers) + 1
        # The position of this rank among them.
        self._at = sum([peer.rank < rank for peer in peers])
        self._peers = peers
        self._seconds = seconds
        self._give_back = weakref.finalize(self, opened.close)
        self._num_meetings = 0
        places = torch.from_numpy(arena.bytes).view(_ROOMS, self._size, PLACE)
        self._rooms = [list(room) for room in places]

    def close(self) -> None:
        """Leave the others, which notice it if they wait for this rank; idempotent."""
        if self._give_back.alive:
            for peer in self._peers:
                with suppress(OSError):  # a forked child may have the socket open still
                    peer.end.shutdown(socket.SHUT_RDWR)
        self._give_back()

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank; contiguous ones on the CPU, of one shape and dtype."""
        found = [torch.empty_like(mine) for _ in range(self._size)]
        for part, *parts in zip(*(_cut(one) for one in (mine, *found)), strict=True):
            places = self._exchange([part], torch.uint8, part.numel(), _GATHER)
            torch._foreach_copy_(parts, places)
        return found

    def broadcast(self, flat: Tensor) -> None:
        """Replace the elements of a contiguous tensor on the CPU by the lowest rank's."""
        for part in _cut(flat):
            places = self._exchange(() if self._at else [part], torch.uint8, part.numel(), _BROADCAST)
            if self._at:
                part.copy_(places[0])

    def sum(
        self,
        pieces: Iterable[Piece],
        dtype: torch.dtype,
        before: float = 1.0,
        after: float = 1.0,
        for_all: bool = True,
    ) -> None:
        """Write after · Σ over ranks of before · element to the targets. Computes in `dtype`, left to right.

        Pieces have the same sizes on all ranks. With `for_all` false the lowest rank alone gets the sums.
        """
        last: tuple[Sequence[Tensor], Tensor] = (), torch.empty(0, device="cpu")
        takes = for_all or not self._at
        for window in _windows(pieces, PLACE // dtype.itemsize):
            addends, targets = zip(*window, strict=True)
            numel = sum([one.numel() for one in addends])
            places = self._exchange(addends, dtype, numel, _SUM, before)
            if takes:
                _take(*last)
            last = (), places[0]
            if self._size == 2 or numel * dtype.itemsize <= SMALL:
                _fold_to(targets if takes else (), places, after)
            else:
                last = targets, places[0]
                share = slice(numel * self._at // self._size, numel * (self._at + 1) // self._size)
                _fold([place[share] for place in places], places[0][share], after)
        if last[0]:
            self._meet(_SUMMED)
            _take(*last if takes else ((), places[0]))

    def _exchange(
        self, given: Sequence[Tensor], dtype: torch.dtype, numel: int, what: int, factor: float = 1.0
    ) -> list[Tensor]:
        """Write flat tensors, one behind the other and multiplied, to the own place; return the places of all ranks."""
        places = [
            place[: numel * dtype.itemsize].view(dtype) for place in self._rooms[self._num_meetings % _ROOMS]
        ]
        own = places[self._at]
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
            with suppress(ConnectionError):  # it has ended; what it has said before says whether that matters
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
            except ConnectionResetError:
                continue  # the system says it once, and before what was said
            if has_ended:
                raise ConnectionResetError(f"the process of rank {peer.rank} has ended, or left the job")
            now = time.monotonic()
            deadline = deadline or now + self._seconds()
            if now >= deadline:
                raise TimeoutError(f"the wait for rank {peer.rank} timed out")
            # What it has said before it ended is read first.
            has_ended = any([fd == peer.process for fd, _ in peer.poll.poll(1000 * (deadline - now))])


class Shared(NamedTuple):
    """What came of it that ranks wanted to share memory."""

    memory: RankMemory | None
    ranks: Sequence[int]
    """Those that wanted to share it with this one, itself among them."""
    heard: Sequence[Mapping[str, Any]]
    """What every rank has said."""
    trouble: str
    """Why there is none."""


Heard = Sequence[Mapping[str, Any]]


def open_memory(
    rank: int, tell: Callable[[bytes], list[bytes]], seconds: Callable[[], float]
) -> RankMemory | None:
    """Open the memory of all ranks, if on one host and without KVSTORE_TRANSPORT=tcp; all get it, or none.

    Args:
        tell: gives the bytes of all ranks, by rank; collective.
        seconds: as of RankMemory.

    Raises:
        ConfigurationError: there is none, and a rank has KVSTORE_TRANSPORT=shm; or an unknown word. On every rank.
    """
    said = {"transport": env.text_of(os.environ, env.TRANSPORT)}
    memory, _, heard, trouble = share_memory(
        rank, env.BOOT_ID.read_text, said, _all_of_one_host, tell, seconds
    )
    if memory is not None:
        return memory
    transports = [one["transport"] for one in heard]
    trouble = trouble or _why_apart(heard)
    if "shm" in transports:
        raise ConfigurationError(
            f"the ranks of torch.distributed cannot share memory: {trouble} ({env.TRANSPORT}=auto goes without it)"
        )
    if rank == 0:
        is_meant = "tcp" in transports or len({one["host"] for one in heard}) > 1
        level = logging.DEBUG if is_meant else logging.WARNING
        _log.log(level, "ranks exchange numbers by torch.distributed, not through memory: %s", trouble)
    return None


def _all_of_one_host(heard: Heard) -> list[Sequence[int]]:
    """Put all ranks together, unless something keeps them apart."""
    return [] if _why_apart(heard) else [range(len(heard))]


def _why_apart(heard: Heard) -> str:
    """Say why all ranks cannot share memory; empty where they can. Raises as `open_memory`."""
    transports = [env.transport_of({env.TRANSPORT: one["transport"]}) for one in heard]
    if "tcp" in transports:
        return f"rank {transports.index('tcp')} has {env.TRANSPORT}=tcp"
    if len({one["host"] for one in heard}) > 1:
        return "they are on several hosts"
    return "; ".join(one["trouble"] for one in heard if one["trouble"])


def share_memory(
    rank: int,
    host: Callable[[], str],
    said: Mapping[str, Any],
    choose: Callable[[Heard], Sequence[Sequence[int]]],
    tell: Callable[[bytes], list[bytes]],
    seconds: Callable[[], float],
) -> Shared:
    """Open memory between ranks of one host; collective over all ranks of the job.

    Args:
        host: names the host, or raises OSError.
        said: what every rank is to hear of this one, beside its "host", and its "trouble" if it cannot share memory.
        choose: says which ranks, in ascending order, share memory with each other, by what all have said; a rank that
            has trouble is not to be among them.
        tell, seconds: as of `open_memory`.
    """
    with ExitStack() as opened:
        listener, name, trouble = None, "", ""
        address = b"\0kvtrainer-" + uuid.uuid4().hex.encode()
        try:
            name = host()
            listener = opened.enter_context(_socket())
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            trouble = f"rank {rank}: {error}"
        mine = {"host": name, "address": address, "trouble": trouble, **said}
        heard = [unpack_control(one) for one in tell(pack_control(mine))]
        groups = choose(heard)
        ranks = next((group for group in groups if rank in group), [rank])
        if not groups:
            return Shared(None, ranks, heard, trouble)
        peers, arena = list[_Peer](), None
        if listener is not None and len(ranks) > 1:
            try:
                peers = _connect(listener, rank, {other: heard[other]["address"] for other in ranks}, opened)
                arena = _share(rank, peers)
            except (OSError, struct.error) as error:
                trouble = f"rank {rank}: {error}"
                opened.close()  # others that wait for this rank notice it
        troubles = tell(trouble.encode())
        trouble = "; ".join([troubles[other].decode() for other in ranks if troubles[other]])
        if arena is None or trouble:
            return Shared(None, ranks, heard, trouble)
        return Shared(RankMemory(rank, peers, arena, seconds, opened.pop_all()), ranks, heard, "")


def _socket() -> socket.socket:
    """Return a new socket. Raises OSError on systems other than Linux, which lack what else is used here."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no memory without a name")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(_CONNECT_TIMEOUT)
    return end


def _connect(
    listener: socket.socket, rank: int, addresses: Mapping[int, bytes], opened: ExitStack
) -> list[_Peer]:
    """Connect to all other ranks, by rank. Raises OSError or struct.error where that fails or takes too long."""
    ends: dict[int, socket.socket] = {}
    for other in [other for other in addresses if other < rank]:
        ends[other] = opened.enter_context(_socket())
        ends[other].connect(addresses[other])
        ends[other].send(_GREETING.pack(rank))
    for _ in [other for other in addresses if other > rank]:
        end = opened.enter_context(listener.accept()[0])
        end.settimeout(_CONNECT_TIMEOUT)
        [other] = _GREETING.unpack(end.recv(_GREETING.size))
        ends[other] = end
    listener.close()
    peers = []
    for other, end in sorted(ends.items()):
        process = os.pidfd_open(process_at(end))
        opened.callback(os.close, process)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(process, select.POLLIN)
        peers.append(_Peer(other, end, process, poll))
    return peers


def _share(rank: int, peers: Sequence[_Peer]) -> SharedArena:
    """Make the memory and hand it over, on the lowest rank, or take it; sockets no longer block.

    Raises OSError without any, or if it may become shorter, which would kill whoever reads it.
    """
    nbytes = _ROOMS * (len(peers) + 1) * PLACE
    if rank < peers[0].rank:
        fd = make_memory(nbytes)
        for peer in peers:
            socket.send_fds(peer.end, [_GREETING.pack(rank)], [fd])
    else:
        _, fds, _, _ = socket.recv_fds(peers[0].end, _GREETING.size, 1)
        if not fds:
            raise ConnectionError(f"rank {peers[0].rank} has no memory for the others")
        [fd] = fds
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if os.fstat(fd).st_size != nbytes or not seals & fcntl.F_SEAL_SHRINK:
            size = os.fstat(fd).st_size
            os.close(fd)
            raise ConnectionError(
                f"rank {peers[0].rank} gave memory of {size} bytes with seals {seals}, not of {nbytes} that stay"
            )
    for peer in peers:
        peer.end.setblocking(False)
    return SharedArena(fd)


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
    """Sum places from left to right into targets. Their device and dtype may be others."""
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
