"""Collectives between the ranks of one host, through shared memory.

The lowest rank creates a sealed memory file without a name and sends its descriptor to the others over Unix sockets.
Nothing is left behind in a file system, however a process ends.

The memory has three *rooms*, which are used in turn, each with one *place* for every rank. For an exchange, all ranks
write to their places of a room and *meet*: each sends a message to all others and waits for theirs. Until the next
meeting, a rank may write to parts of these places that no other rank reads, and until the one after that it may read
all of them. Three rooms are enough: a rank that gets to the same room again knows that all others have finished
reading.

`share_memory` opens the memory between ranks of one host, which the caller chooses. `open_rank_memory` uses it for all
ranks of a job. Both are collective over the whole job, and both succeed on all of these ranks or on none. After an
error in an exchange the memory is unusable.
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
from kvstore_server.transport.arena import SharedArena, make_shared_memory
from kvstore_server.transport.channel import process_at_channel_end
from kvtrainer.common import env
from kvtrainer.errors import ConfigurationError, ProtocolError

_log = logging.getLogger(__name__)

PLACE = 4 << 20
"""Size in bytes of a rank's place in a room."""
SMALL = 64 << 10
"""Up to this many bytes every rank computes the whole sum instead of a share. Two ranks always do."""
_ROOMS = 3
_CONNECT_TIMEOUT = 5.0
# A meeting's number, and a code for what is exchanged.
_MEETING = struct.Struct("<QQ")
_GREETING = struct.Struct("<I")
_GATHER, _BROADCAST, _SUM, _SUMMED = range(4)

Piece = tuple[Tensor, Tensor]
"""This rank's addends and the target of the sum: two flat tensors of equal size, or the same tensor twice."""


class _MemoryPeer(NamedTuple):
    """Another rank of this host."""

    rank: int
    end: socket.socket
    # A pidfd. It becomes readable when the process ends, even if a child still has the socket open.
    process: int
    poll: select.poll


class RankMemory:
    """Sums and exchanges between ranks on this host, which all make the same calls in the same order.

    Used by one thread of each rank. `seconds` returns the timeout of a wait, and `opened` is closed with the memory.
    """

    def __init__(
        self,
        rank: int,
        peers: Sequence[_MemoryPeer],
        arena: SharedArena,
        seconds: Callable[[], float],
        opened: ExitStack,
    ) -> None:
        self._rank, self._size = rank, len(peers) + 1
        # This rank's position among the ranks of this memory.
        self._at = sum([peer.rank < rank for peer in peers])
        self._peers = peers
        self._seconds = seconds
        self._give_back = weakref.finalize(self, opened.close)
        self._num_meetings = 0
        places = torch.from_numpy(arena.bytes).view(_ROOMS, self._size, PLACE)
        self._rooms = [list(room) for room in places]

    def close(self) -> None:
        """Leave. Ranks that wait for this one notice it. Idempotent."""
        if self._give_back.alive:
            for peer in self._peers:
                # shutdown(), because a forked child may still have the socket open.
                with suppress(OSError):
                    peer.end.shutdown(socket.SHUT_RDWR)
        self._give_back()

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, by rank: contiguous CPU tensors of equal shape and dtype."""
        found = [torch.empty_like(mine) for _ in range(self._size)]
        for part, *parts in zip(*(_split_into_shared_places(one) for one in (mine, *found)), strict=True):
            places = self._exchange([part], torch.uint8, part.numel(), _GATHER)
            torch._foreach_copy_(parts, places)
        return found

    def broadcast(self, flat: Tensor) -> None:
        for part in _split_into_shared_places(flat):
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
        """Write after · Σ over ranks of before · element to the targets, computed in `dtype`, from left to right.

        Pieces have the same sizes on all ranks. Unless `for_all`, only the lowest rank gets the sums.
        """
        last: tuple[Sequence[Tensor], Tensor] = (), torch.empty(0, device="cpu")
        takes = for_all or not self._at
        for window in _split_into_shared_windows(pieces, PLACE // dtype.itemsize):
            # 1. Write this rank's addends of one window, and meet.
            addends, targets = zip(*window, strict=True)
            numel = sum([one.numel() for one in addends])
            places = self._exchange(addends, dtype, numel, _SUM, before)
            # 2. The meeting also shows that all shares of the window before are summed: copy them to the targets.
            if takes:
                _copy_shared_total_to(*last)
            last = (), places[0]
            # 3. Sum small windows completely on each rank, and only a share of large ones.
            if self._size == 2 or numel * dtype.itemsize <= SMALL:
                _sum_shared_places_into(targets if takes else (), places, after)
            else:
                last = targets, places[0]
                share = slice(numel * self._at // self._size, numel * (self._at + 1) // self._size)
                _sum_shared_places([place[share] for place in places], places[0][share], after)
        # 4. The last shares need a meeting of their own.
        if last[0]:
            self._meet(_SUMMED)
            _copy_shared_total_to(*last if takes else ((), places[0]))

    def _exchange(
        self, given: Sequence[Tensor], dtype: torch.dtype, numel: int, what: int, factor: float = 1.0
    ) -> list[Tensor]:
        """Write flat tensors consecutively to this rank's place, scaled, and meet. Return the places of all ranks."""
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
        """Wait for all ranks. Raises ConnectionError, TimeoutError, or ProtocolError if one made a different call."""
        self._num_meetings += 1
        mine = _MEETING.pack(self._num_meetings, what)
        for peer in self._peers:
            # If a rank has ended, the messages that it sent before decide whether that matters.
            with suppress(ConnectionError):
                peer.end.send(mine)
        for peer in self._peers:
            if self._receive(peer) != mine:
                raise ProtocolError(
                    f"rank {self._rank} and rank {peer.rank} made different calls; call collective methods in the same "
                    "order on every rank"
                )

    def _receive(self, peer: _MemoryPeer) -> bytes:
        deadline, has_ended = 0.0, False
        while True:
            try:
                if said := peer.end.recv(_MEETING.size):
                    return said
                has_ended = True
            except BlockingIOError:
                pass
            except ConnectionResetError:
                continue  # Linux reports a reset once, before the remaining messages
            if has_ended:
                raise ConnectionResetError(f"the process of rank {peer.rank} has ended, or left the job")
            now = time.monotonic()
            deadline = deadline or now + self._seconds()
            if now >= deadline:
                raise TimeoutError(f"the wait for rank {peer.rank} timed out")
            # Messages that were sent before the process ended are read first.
            has_ended = any([fd == peer.process for fd, _ in peer.poll.poll(1000 * (deadline - now))])


class SharedRanks(NamedTuple):
    """The result of `share_memory`."""

    memory: RankMemory | None
    ranks: Sequence[int]
    """The ranks that were to share memory with this one, including itself."""
    heard: Sequence[Mapping[str, Any]]
    """What every rank has said."""
    trouble: str
    """Why there is no memory; empty if there is no reason to report."""


Heard = Sequence[Mapping[str, Any]]


def open_rank_memory(
    rank: int, tell: Callable[[bytes], list[bytes]], seconds: Callable[[], float]
) -> RankMemory | None:
    """Open shared memory of all ranks if they are on one host and KVSTORE_TRANSPORT allows it. Collective.

    Args:
        tell: Collective; returns the bytes of all ranks, by rank.
        seconds: Returns the timeout of a wait.

    Raises:
        ConfigurationError: A rank has KVSTORE_TRANSPORT=shm and memory cannot be shared, or it has an unknown value.
            Raised on every rank.
    """
    said = {"transport": env.text_of(os.environ, env.TRANSPORT)}
    memory, _, heard, trouble = share_memory(
        rank, env.BOOT_ID.read_text, said, _ranks_of_one_host, tell, seconds
    )
    if memory is not None:
        return memory
    transports = [one["transport"] for one in heard]
    trouble = trouble or _why_memory_is_not_shared(heard)
    if "shm" in transports:
        raise ConfigurationError(
            f"the ranks of torch.distributed cannot share memory: {trouble} ({env.TRANSPORT}=auto goes without it)"
        )
    if rank == 0:
        is_meant = "tcp" in transports or len({one["host"] for one in heard}) > 1
        level = logging.DEBUG if is_meant else logging.WARNING
        _log.log(level, "ranks exchange data over torch.distributed instead of shared memory: %s", trouble)
    return None


def _ranks_of_one_host(heard: Heard) -> list[Sequence[int]]:
    return [] if _why_memory_is_not_shared(heard) else [range(len(heard))]


def _why_memory_is_not_shared(heard: Heard) -> str:
    """Return why the ranks cannot share memory, or an empty string. Raises as `open_rank_memory`."""
    transports = [env.transport_from_env({env.TRANSPORT: one["transport"]}) for one in heard]
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
) -> SharedRanks:
    """Open shared memory between ranks of one host. Collective over all ranks of the job.

    Args:
        host: Returns the name of the host, or raises OSError.
        said: What the other ranks are to know about this one, besides its "host" and "trouble".
        choose: Returns the groups of ranks, in ascending order, that share memory, given what all ranks said. A rank
            with "trouble" must not be in a group.
        tell, seconds: As in `open_rank_memory`.
    """
    with ExitStack() as opened:
        # 1. Listen before the others learn the address.
        listener, name, trouble = None, "", ""
        address = b"\0kvtrainer-" + uuid.uuid4().hex.encode()
        try:
            name = host()
            listener = opened.enter_context(_make_memory_socket())
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            trouble = f"rank {rank}: {error}"
        # 2. Exchange host names and addresses, and choose the groups.
        mine = {"host": name, "address": address, "trouble": trouble, **said}
        heard = [unpack_control(one) for one in tell(pack_control(mine))]
        groups = choose(heard)
        ranks = next((group for group in groups if rank in group), [rank])
        if not groups:
            return SharedRanks(None, ranks, heard, trouble)
        # 3. Connect and pass the memory on.
        peers, arena = list[_MemoryPeer](), None
        if listener is not None and len(ranks) > 1:
            try:
                peers = _connect_memory_peers(
                    listener, rank, {other: heard[other]["address"] for other in ranks}, opened
                )
                arena = _share_memory_arena(rank, peers)
            except (OSError, struct.error) as error:
                trouble = f"rank {rank}: {error}"
                opened.close()  # tells ranks that wait for this one
        # 4. Use the memory only if all ranks of the group have it.
        troubles = tell(trouble.encode())
        trouble = "; ".join([troubles[other].decode() for other in ranks if troubles[other]])
        if arena is None or trouble:
            return SharedRanks(None, ranks, heard, trouble)
        return SharedRanks(RankMemory(rank, peers, arena, seconds, opened.pop_all()), ranks, heard, "")


def _make_memory_socket() -> socket.socket:
    """Return a new socket. Raises OSError on systems other than Linux, which lack pidfd and sealed memory."""
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no pidfd and no sealed memory")
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(_CONNECT_TIMEOUT)
    return end


def _connect_memory_peers(
    listener: socket.socket, rank: int, addresses: Mapping[int, bytes], opened: ExitStack
) -> list[_MemoryPeer]:
    """Connect to all other ranks, by rank. Raises OSError or struct.error if that fails or takes too long."""
    ends: dict[int, socket.socket] = {}
    for other in [other for other in addresses if other < rank]:
        ends[other] = opened.enter_context(_make_memory_socket())
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
        process = os.pidfd_open(process_at_channel_end(end))
        opened.callback(os.close, process)
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.register(process, select.POLLIN)
        peers.append(_MemoryPeer(other, end, process, poll))
    return peers


def _share_memory_arena(rank: int, peers: Sequence[_MemoryPeer]) -> SharedArena:
    """Create and send the memory, on the lowest rank, or receive it. Raises OSError if it could be truncated."""
    nbytes = _ROOMS * (len(peers) + 1) * PLACE
    if rank < peers[0].rank:
        fd = make_shared_memory(nbytes)
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
                f"rank {peers[0].rank} sent memory of {size} bytes with seals {seals}, expected {nbytes} sealed bytes"
            )
    for peer in peers:
        peer.end.setblocking(False)
    return SharedArena(fd)


def _split_into_shared_places(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.view(-1).view(torch.uint8)
    for at in range(0, flat.numel(), PLACE):
        yield flat[at : at + PLACE]


def _split_into_shared_windows(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    """Split pieces into windows of `size` elements. The last one may be shorter."""
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


def _sum_shared_places(places: Sequence[Tensor], total: Tensor, after: float) -> None:
    torch.add(places[0], places[1], out=total)
    for place in places[2:]:
        total.add_(place)
    if after != 1.0:
        total.mul_(after)


def _sum_shared_places_into(targets: Sequence[Tensor], places: Sequence[Tensor], after: float) -> None:
    """Sum places from left to right into targets, which may differ in device and dtype."""
    at = 0
    for target in targets:
        addends = [place[at : at + target.numel()] for place in places]
        is_direct = target.is_cpu and target.dtype == addends[0].dtype
        total = target if is_direct else torch.empty_like(addends[0])
        _sum_shared_places(addends, total, after)
        if not is_direct:
            target.copy_(total)
        at += target.numel()


def _copy_shared_total_to(targets: Sequence[Tensor], total: Tensor) -> None:
    at = 0
    for target in targets:
        target.copy_(total[at : at + target.numel()])
        at += target.numel()
