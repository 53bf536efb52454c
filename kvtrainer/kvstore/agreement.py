"""Exchange bytes between the workers of a store: broadcast, gather and all-gather.

Every call is collective: all workers make the same calls in the same order, and each call blocks. The bytes travel the
way the store's gradients do: over the process group or over a server.
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

# Size in bytes of the length that precedes a message.
_HEAD = 8
# Size in bytes of the first chunk sent to servers. Most messages fit into it.
_FIRST = 4096


class Agreement:
    """A group of workers that exchange bytes. The base class is a group of one."""

    rank: int = 0
    size: int = 1

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes on every worker. The bytes of other ranks are ignored."""
        return data

    def all_gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all workers, ordered by rank. Lengths may differ."""
        return [mine]

    def gather(self, mine: bytes) -> list[bytes] | None:
        """Return the bytes of all workers on rank 0, ordered by rank, and None on the others."""
        found = self.all_gather(mine)
        return found if self.rank == 0 else None

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Run a local, non-collective action on every worker, and raise on all of them if it fails on one.

        Raises:
            RoundAbortedError: The action failed on another worker. The message has its rank and error.
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
        """Release what the exchange uses. Idempotent."""


class RankAgreement(Agreement):
    """Exchange over the ranks of a torch.distributed group."""

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


class ServerAgreement(Agreement):
    """Exchange over parameter servers, with data attached to barriers. Owns its client."""

    def __init__(self, client: Client) -> None:
        self.rank, self.size = client.options.rank, client.options.num_workers
        self._client = client

    def broadcast(self, data: bytes) -> bytes:
        return self._exchange(_with_agreement_length(data) if self.rank == 0 else b"", MAX_PAYLOAD)[0]

    def all_gather(self, mine: bytes) -> list[bytes]:
        return self._exchange(_with_agreement_length(mine), MAX_PAYLOAD // self.size)

    def gather(self, mine: bytes) -> list[bytes] | None:
        found = self._exchange(_with_agreement_length(mine), MAX_PAYLOAD // self.size, self.rank == 0)
        return found if self.rank == 0 else None

    def close(self) -> None:
        self._client.close()

    def _exchange(self, message: bytes, limit: int, reads: bool = True) -> list[bytes]:
        """Send a message in chunks of at most `limit` bytes. Return all messages if `reads`, else nothing."""
        first = min(_FIRST, limit)
        pieces = [self._client.gather(message[:first])]
        # The first chunk carries every message's length, so all ranks know how many more rounds follow.
        longest = max(_HEAD + int.from_bytes(piece[:_HEAD], "little") for piece in pieces[0])
        pieces += [
            self._client.gather(message[at : at + limit], reads) for at in range(first, longest, limit)
        ]
        return [b"".join(its)[_HEAD:] for its in zip(*pieces, strict=True)] if reads else []


def _with_agreement_length(data: bytes) -> bytes:
    return len(data).to_bytes(_HEAD, "little") + data
