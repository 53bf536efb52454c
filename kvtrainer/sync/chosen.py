"""The store that a Trainer uses, and whether the optimizer runs in it: opened at the first step."""

from __future__ import annotations

from typing import Any

from kvstore_server.codec import Codec
from kvtrainer.comm.client import Client
from kvtrainer.comm.rank_group import Buckets, RankGroup, current_group
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase, create
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.local import LocalKVStore
from kvtrainer.parallel.reducers import AUTO
from kvtrainer.sync.kinds import is_over_ranks, too_late, type_of

BUCKETS = ("bucket_size_mb", "coalesce")
"""What a 'device' store may be told about reductions over the ranks of torch.distributed."""


class StoreChoice:
    """A Trainer's store.

    Args:
        kvstore: A name or a store; None means that none is needed.
        updates_weights: Whether the optimizer runs in the store.
        codec: How gradients are compressed on their way there; None means not at all.
        allows_halves: Whether `allreduce_grads` and `update` may be called; by default where the Trainer updates.
        is_open: Whether `decide` has to be called before the store is opened.
    """

    def __init__(
        self,
        kvstore: str | KVStoreBase | None,
        updates_weights: bool,
        codec: Codec | None = None,
        *,
        allows_halves: bool | None = None,
        is_open: bool = False,
    ) -> None:
        self.updates_weights = updates_weights
        self.allows_halves = not updates_weights if allows_halves is None else allows_halves
        self.is_open = is_open
        self.codec = codec
        self.replica_codec: Codec | None = None
        """How replicas are compressed one by one before they are summed here; None means not at all."""
        self.reducer = AUTO
        """How replicas are summed here, out of reducers.REDUCERS."""
        self.group: RankGroup | None = None
        """The ranks of torch.distributed over which gradients are summed; None where that is not so."""
        self.is_alone_by_name = False
        """Whether there is no store only because the one that was named serves a single process."""
        self.store: KVStoreBase | None = kvstore if isinstance(kvstore, KVStoreBase) else None
        self.client: Client | None = None
        """The Trainer's own connection; None for a third-party store, which is used through its methods."""
        self._name = kvstore if isinstance(kvstore, str) else None
        self._buckets: dict[str, Any] = {}

    @property
    def is_none(self) -> bool:
        """Whether there is no store, and never will be."""
        return self.store is None and self._name is None

    def set_buckets(self, buckets: dict[str, Any]) -> None:
        """Say how a 'device' store reduces over ranks, by the names in BUCKETS.

        Raises:
            ConfigurationError: the store does not reduce so, or a value is wrong; nothing has changed then.
        """
        self.check_buckets(buckets)
        self._buckets = buckets
        if isinstance(self.store, DeviceKVStore):
            self._tell_buckets(self.store)

    def check_buckets(self, buckets: dict[str, Any]) -> None:
        """Raise what `set_buckets` would."""
        given = self.store or self._name
        if not is_over_ranks(given):
            raise ConfigurationError(
                f"{', '.join(buckets)} would have no effect: kvstore {None if given is None else type_of(given)!r} "
                "does not reduce over ranks of torch.distributed"
            )
        Buckets(buckets.get("bucket_size_mb"), buckets.get("coalesce", True))

    def _tell_buckets(self, store: DeviceKVStore) -> None:
        for name, value in self._buckets.items():
            setattr(store, name, value)

    def decide(self, is_sparse: bool) -> None:
        """The first gradients are there: with row-sparse ones the Trainer updates, as in MXNet."""
        if self.is_open and is_sparse:
            self.updates_weights, self.allows_halves = False, True
        self.is_open = False

    def open(self) -> None:
        """Make the store and the connection if there are to be any; blocks until the servers answer. Idempotent.

        Raises:
            ConfigurationError: a torch.distributed group was initialised too late to be used.
        """
        if self.is_alone_by_name and current_group() is not None:
            raise too_late("the Trainer was built")
        if self.store is None and self._name is not None:
            self.store = create(self._name)
            if isinstance(self.store, DeviceKVStore):
                self._tell_buckets(self.store)
        if isinstance(self.store, DeviceKVStore):
            self.group = self.store.group
        if self.group is None and self.client is None and isinstance(self.store, LocalKVStore | DistKVStore):
            self.client = self.store.open_client()

    def close(self, error: BaseException | None) -> None:
        """Close the connection, and the store if this Trainer made it; other workers are told of the error."""
        if self.client is not None:
            self.client.close(error)
        if self.store is not None and self._name is not None:
            self.store.close()
