"""Which store a Trainer uses, and whether the optimizer runs in it: decided at once, opened at the first step."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvtrainer.comm.client import Client
from kvtrainer.env import NUM_WORKERS
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase, create, factory_of
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.local import LocalKVStore, refuse_process_group

_log = logging.getLogger(__name__)


class StoreChoice:
    """A Trainer's store.

    Args:
        kvstore: A name or a store; None means that none is needed.
        updates_weights: Whether the optimizer runs in the store.
    """

    def __init__(self, kvstore: str | KVStoreBase | None, updates_weights: bool) -> None:
        self.updates_weights = updates_weights
        self.store: KVStoreBase | None = kvstore if isinstance(kvstore, KVStoreBase) else None
        self.client: Client | None = None
        """The Trainer's own connection; None for a third-party store, which is used through its methods."""
        self._name = kvstore if isinstance(kvstore, str) else None

    def open(self) -> None:
        """Make the store and the connection if there are to be any; blocks until the servers answer. Idempotent."""
        if self.store is None and self._name is not None:
            self.store = create(self._name)
        if self.client is None and isinstance(self.store, LocalKVStore | DistKVStore):
            self.client = self.store.open_client()

    def close(self, error: BaseException | None) -> None:
        """Close the connection, and the store if this Trainer made it; other workers are told of the error."""
        if self.client is not None:
            self.client.close(error)
        if self.store is not None and self._name is not None:
            self.store.close()


def choose_store(
    kvstore: Any, update_on_kvstore: bool | None, compression_params: dict[str, Any] | None
) -> StoreChoice:
    """Check the Trainer's arguments about its store and decide whether one is needed; opens nothing.

    Raises:
        ConfigurationError: an argument has the wrong type, or two of them contradict each other.
        UnknownNameError: no store has that name.
    """
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ConfigurationError(f"kvstore must be a name, a kvstore or None, got {type(kvstore).__name__}")
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ConfigurationError(f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}")
    if compression_params is not None:
        raise ConfigurationError(
            f"kvstore {getattr(kvstore, 'type', kvstore)!r} does not compress gradients; leave compression_params out"
        )
    if kvstore is None:
        if update_on_kvstore:
            raise ConfigurationError("update_on_kvstore=True needs a kvstore, but kvstore=None")
        return StoreChoice(None, False)
    if isinstance(kvstore, str) and _is_in_process(kvstore):
        _warn_if_alone(kvstore)
    if isinstance(kvstore, str) and _is_in_process(kvstore) and not update_on_kvstore:
        return StoreChoice(None, False)
    can_update = _runs_optimizers(kvstore)
    if update_on_kvstore and not can_update:
        raise ConfigurationError(
            f"kvstore {getattr(kvstore, 'type', kvstore)!r} cannot run a Trainer's optimizer; build the Trainer with "
            "update_on_kvstore=False"
        )
    return StoreChoice(kvstore, can_update and update_on_kvstore is not False)


def _warn_if_alone(name: str) -> None:
    """Say so when one of several workers is about to train by itself, which is seldom what was meant."""
    workers = os.environ.get(NUM_WORKERS, "")
    if workers.isdigit() and int(workers) > 1:
        _log.warning(
            "kvstore %r keeps gradients in this process, although the job has %s workers; use 'dist_sync' to train "
            "together",
            name,
            workers,
        )


def _runs_optimizers(kvstore: str | KVStoreBase) -> bool:
    kind = type(kvstore) if isinstance(kvstore, KVStoreBase) else factory_of(kvstore)
    return isinstance(kind, type) and issubclass(kind, LocalKVStore | DistKVStore)


def _is_in_process(name: str) -> bool:
    """Whether a store of this name would only serve this process. Raises as `choose_store`."""
    if factory_of(name) is not LocalKVStore:
        return False
    if "device" in name.lower():
        refuse_process_group(name)
    return True
