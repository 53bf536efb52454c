"""Exchange bytes between workers, over any store of ours: from one to all, or all to all.

Every call is collective: all workers make it, in the same order, and it blocks. Where there are several workers it goes
the way that the store goes: over the process group, or over a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvstore_server.errors import describe
from kvstore_server.protocol.frames import MAX_PAYLOAD
from kvtrainer.client.client import Client
from kvtrainer.errors import RoundAbortedError
from kvtrainer.ranks.process_group import RankGroup

_HEAD = 8
"""Bytes before a message that say how long it is."""
_FIRST = 4096
"""Bytes of the first piece that is given to servers; most messages are no longer."""


class Agreement:
    """The workers of a job that exchange bytes, and the rank of this one; the base class is one worker alone."""

    rank: int = 0
    size: int = 1

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every worker; what the others give does not count."""
        return data

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all workers, by rank; they may differ in length."""
        return [mine]

    def gather(self, mine: bytes) -> list[bytes] | None:
        """Return the bytes of all workers, by rank, on rank 0; None on the others."""
        found = self.all_gather(mine)
        return found if self.rank == 0 else None

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Let every worker do a thing of its own, and raise on all if one could not; nothing collective is inside.

        Raises:
            RoundAbortedError: another worker raised; says which, and what.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        said = self.all_gather(describe(mine).encode() if mine is not None else b"")
        if mine is not None:
            raise mine
        for rank, text in enumerate(said):
            if text:
                raise RoundAbortedError(f"rank {rank} could not {what}: {text.decode()}")

    def close(self) -> None:
        """Give up what the exchange needs; idempotent."""


class OverRanks(Agreement):
    """The ranks of a torch.distributed group."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device="cpu")
        self._group.broadcast(length)
        flat = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if self.rank == 0:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else flat
        if flat.numel():
            self._group.broadcast(flat)
        return flat.numpy().tobytes()

    def all_gather(self, mine: bytes) -> list[bytes]:
        return self._group.all_gather_bytes(mine)


class OverServers(Agreement):
    """The workers of parameter servers, who exchange bytes at barriers.

    The client is for this alone.
    """

    def __init__(self, client: Client) -> None:
        self.rank, self.size = client.options.rank, client.options.num_workers
        self._client = client

    def broadcast(self, data: bytes) -> bytes:
        return self._exchange(_with_length(data) if self.rank == 0 else b"", MAX_PAYLOAD)[0]

    def all_gather(self, mine: bytes) -> list[bytes]:
        return self._exchange(_with_length(mine), MAX_PAYLOAD // self.size)

    def gather(self, mine: bytes) -> list[bytes] | None:
        found = self._exchange(_with_length(mine), MAX_PAYLOAD // self.size, self.rank == 0)
        return found if self.rank == 0 else None

    def close(self) -> None:
        self._client.close()

    def _exchange(self, message: bytes, limit: int, reads: bool = True) -> list[bytes]:
        """Give a message in pieces of at most `limit` bytes; return the messages of all ranks, if this one reads."""
        first = min(_FIRST, limit)
        pieces = [self._client.gather(message[:first])]
        longest = max(_HEAD + int.from_bytes(piece[:_HEAD], "little") for piece in pieces[0])
        pieces += [
            self._client.gather(message[at : at + limit], reads) for at in range(first, longest, limit)
        ]
        return [b"".join(its)[_HEAD:] for its in zip(*pieces, strict=True)] if reads else []


def _with_length(data: bytes) -> bytes:
    return len(data).to_bytes(_HEAD, "little") + data
