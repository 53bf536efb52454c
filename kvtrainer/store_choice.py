"""Which store a Trainer uses, and whether the optimizer runs in it: the decision, and its late execution."""

from __future__ import annotations

from typing import Any

from kvtrainer.comm.client import Client
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import OPTIMIZER, KVStoreBase, create, factory_of
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.local import LocalKVStore, refuse_process_group


class StoreChoice:
    """A Trainer's store: named at construction, opened at the first step.

    Args:
        kvstore: A name, a store, or None.
        update_on_kvstore: True, False, or None for "where the store can".
        needs_store: False where the name stands for something that one process does itself.
    """

    def __init__(self, kvstore: str | KVStoreBase | None, update_on_kvstore: bool | None, needs_store: bool) -> None:
        self._given = kvstore
        self._update_on_kvstore = update_on_kvstore
        self._needs_store = needs_store
        self.store: KVStoreBase | None = kvstore if isinstance(kvstore, KVStoreBase) else None
        self.client: Client | None = None
        self.updates_weights = False

    @property
    def is_in_store(self) -> bool:
        """Whether optimizer state will be in the store, as far as one can tell before it is opened."""
        return self._needs_store and self._update_on_kvstore is not False

    def open(self) -> StoreChoice:
        """Make the store if there is to be one; blocks until its servers answer.

        Raises:
            ConfigurationError: the store cannot run the optimizer, but was asked to.
        """
        if not self._needs_store:
            return self
        if self.store is None:
            assert isinstance(self._given, str)
            self.store = create(self._given)
        can_update = self.store.is_capable(OPTIMIZER)
        if self._update_on_kvstore and not can_update:
            raise ConfigurationError(
                f"kvstore {self.store.type!r} cannot run the optimizer; build the Trainer with update_on_kvstore=False"
            )
        self.updates_weights = can_update if self._update_on_kvstore is None else self._update_on_kvstore
        if isinstance(self.store, LocalKVStore | DistKVStore):
            self.client = self.store.open_client()
        return self

    def close(self) -> None:
        """Close the store if this Trainer made it."""
        if self.store is not None and isinstance(self._given, str):
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
    if update_on_kvstore not in (None, True, False):
        raise ConfigurationError(f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}")
    if kvstore is None and update_on_kvstore:
        raise ConfigurationError("update_on_kvstore=True needs a kvstore, but kvstore=None")
    if compression_params is not None:
        raise ConfigurationError(
            f"kvstore {getattr(kvstore, 'type', kvstore)!r} does not compress gradients; leave compression_params out"
        )
    is_in_process = kvstore is None or (isinstance(kvstore, str) and _is_in_process(kvstore))
    return StoreChoice(kvstore, update_on_kvstore, not is_in_process or bool(update_on_kvstore))


def _is_in_process(name: str) -> bool:
    """Whether a store of this name would only serve this process. Raises as `choose_store`."""
    if factory_of(name) is not LocalKVStore:
        return False
    if "device" in name.lower():
        refuse_process_group(name)
    return True

