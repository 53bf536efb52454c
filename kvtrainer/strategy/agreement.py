"""What workers tell each other beside gradients: bytes, from one to all or from all to all, over any store.

Every call is collective: all workers make it, in the same order, and it blocks. Where there are several workers it goes
the way that the store goes: over the process group, over the servers, or by a third-party store's own verbs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import describe
from kvstore_server.plan import TensorSpec
from kvtrainer.comm.rank_group import RankGroup
from kvtrainer.comm.round import RoundItem
from kvtrainer.comm.tables import RemoteTable
from kvtrainer.errors import RoundAbortedError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.kvstore.dist import DistKVStore

_HEAD = 8
"""Bytes before a message that say how long it is."""
_SMALL, _LARGE = 4096, 256 * 1024
"""Numbers in the two tables through which bytes travel; a message begins in the small one."""
_PER_NUMBER = 3
"""Bytes in a float32 number: so many that it holds them exactly."""


class Agreement(ABC):
    """The workers of a job as one that talks: who this one is, and what they exchange."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every worker; what the others give does not count."""

    @abstractmethod
    def all_gather(self, mine: bytes) -> list[bytes]:
        """The bytes of all workers, by rank; they may differ in length."""

    def gather(self, mine: bytes) -> list[bytes] | None:
        """The bytes of all workers, by rank, on rank 0; None on the others."""
        found = self.all_gather(mine)
        return found if self.rank == 0 else None

    def barrier(self) -> None:
        """Block until every worker has come here."""
        self.all_gather(b"")

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
        """Give up what the exchange needs; idempotent. The base class needs nothing."""
        return None


class Alone(Agreement):
    """One worker, which agrees with itself."""

    def broadcast(self, data: bytes) -> bytes:
        return data

    def all_gather(self, mine: bytes) -> list[bytes]:
        return [mine]


class OverRanks(Agreement):
    """The ranks of a torch.distributed group."""

    def __init__(self, group: RankGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group

    def broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        self._group.broadcast(length)
        flat = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else flat
        if flat.numel():
            self._group.broadcast(flat)
        return flat.numpy().tobytes()

    def all_gather(self, mine: bytes) -> list[bytes]:
        return self._group.all_gather_bytes(mine)


class _InRounds(Agreement):
    """Over a store that sums: in every round one worker gives a piece of its bytes, the others nothing or zeros."""

    def broadcast(self, data: bytes) -> bytes:
        found = self._from(0, data)
        assert found is not None
        return found

    def all_gather(self, mine: bytes) -> list[bytes]:
        found = [self._from(rank, mine) for rank in range(self.size)]
        return [one for one in found if one is not None]

    def gather(self, mine: bytes) -> list[bytes] | None:
        found = [self._from(rank, mine, only_first_reads=True) for rank in range(self.size)]
        return [one for one in found if one is not None] if self.rank == 0 else None

    def _from(self, root: int, data: bytes, only_first_reads: bool = False) -> bytes | None:
        """The bytes of one rank; None where they are not read."""
        is_mine, reads = self.rank == root, self.rank == 0 or not only_first_reads
        message = len(data).to_bytes(_HEAD, "little") + data if is_mine else b""
        start = self._piece(_SMALL, message, is_mine, True)
        length = int.from_bytes(start[:_HEAD], "little")
        parts = [start]
        step = _LARGE * _PER_NUMBER
        for at in range(len(start), _HEAD + length, step):
            parts.append(self._piece(_LARGE, message[at : at + step], is_mine, reads))
        return b"".join(parts)[_HEAD : _HEAD + length] if reads else None

    def _piece(self, count: int, data: bytes, is_mine: bool, reads: bool) -> bytes:
        given = _as_numbers(data[: count * _PER_NUMBER], count) if is_mine else None
        out = torch.zeros(count) if reads else None
        self._round(count, given, out)
        return b"" if out is None else _as_bytes(out)

    @abstractmethod
    def _round(self, count: int, given: Tensor | None, out: Tensor | None) -> None:
        """One round of the table with so many numbers; the sum of what is given goes to `out`."""


class OverServers(_InRounds):
    """The workers of parameter servers, over rounds in a namespace that no keys of the store are in.

    The rounds are synchronous whatever the store's mode is.
    """

    def __init__(self, store: DistKVStore) -> None:
        self.rank, self.size = store.rank, store.num_workers
        self._client = store.open_side_client()
        self._tables: dict[int, RemoteTable] = {}

    def barrier(self) -> None:
        self._client.barrier()

    def close(self) -> None:
        self._client.close()

    def _round(self, count: int, given: Tensor | None, out: Tensor | None) -> None:
        table = self._tables.get(count)
        if table is None:
            specs = [TensorSpec("bytes", (count,), "float32")]
            [table] = self._client.register({f"bytes {count}": specs})
            first = {"float32": torch.zeros(count)} if self.rank == 0 else None
            self._client.rounds.initialise([RoundItem(table, first, None)])
            self._tables[count] = table
        item = RoundItem(
            table,
            None if given is None else {"float32": given},
            None if out is None else {"float32": out},
        )
        self._client.rounds.wait(self._client.rounds.start([item]))


class OverVerbs(_InRounds):
    """The workers of a third-party store, over two keys of its own: 'kvtrainer agreement' and a number."""

    def __init__(self, store: KVStoreBase) -> None:
        self.rank, self.size = store.rank, store.num_workers
        self._store = store
        self._known: set[int] = set()

    def _round(self, count: int, given: Tensor | None, out: Tensor | None) -> None:
        key = f"kvtrainer agreement {count}"
        if count not in self._known:
            self._store.broadcast(key, torch.zeros(count), torch.zeros(count))
            self._known.add(count)
        value = torch.zeros(count) if given is None else given
        self._store.pushpull(key, value, torch.zeros(count) if out is None else out)


def agreement_of(store: KVStoreBase | None) -> Agreement:
    """How the workers of a store come to agree; of a store that has one, or None, this process alone."""
    if store is None or store.num_workers == 1:
        return Alone()
    if isinstance(store, DeviceKVStore) and store.group is not None:
        return OverRanks(store.group)
    return OverServers(store) if isinstance(store, DistKVStore) else OverVerbs(store)


def _as_numbers(data: bytes, count: int) -> Tensor:
    padded = np.zeros(count * _PER_NUMBER, dtype=np.uint8)
    padded[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    low, middle, high = padded.reshape(-1, _PER_NUMBER).astype(np.float32).T
    return torch.from_numpy(low + 256.0 * middle + 65536.0 * high).float()


def _as_bytes(numbers: Tensor) -> bytes:
    whole = numbers.numpy().astype(np.uint32)
    parts = np.stack([whole & 255, whole >> 8 & 255, whole >> 16], axis=1)
    return parts.astype(np.uint8).tobytes()
