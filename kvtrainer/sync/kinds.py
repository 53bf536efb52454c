"""What can be said of a store by its name, or of the store itself, before a Trainer uses it."""

from __future__ import annotations

from kvtrainer.comm.rank_group import current_group
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import Factory, KVStoreBase, factory_of
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.dist_modes import ASYNC_NAMES, SSP_NAMES
from kvtrainer.kvstore.local import LocalKVStore


def is_asynchronous(kvstore: str | KVStoreBase | None) -> bool:
    """Whether contributions to such a store count one by one. Raises UnknownNameError."""
    if isinstance(kvstore, DistKVStore):
        return not kvstore.mode.is_sync
    if not isinstance(kvstore, str) or kind_of(kvstore) is not DistKVStore:
        return False
    return kvstore.lower() in ASYNC_NAMES + SSP_NAMES


def type_of(kvstore: str | KVStoreBase) -> str:
    """The name under which a store was, or will be, created."""
    return kvstore if isinstance(kvstore, str) else kvstore.type


def kind_of(kvstore: str | KVStoreBase) -> type:
    """The store's class; `object` for a name that stands for a function. Raises UnknownNameError."""
    kind: type[KVStoreBase] | Factory = (
        type(kvstore) if isinstance(kvstore, KVStoreBase) else factory_of(kvstore)
    )
    return kind if isinstance(kind, type) else object


def is_in_process(name: str) -> bool:
    """Whether a store of this name would only serve this process, were there no group. Raises UnknownNameError."""
    return issubclass(kind_of(name), LocalKVStore)


def is_over_ranks(kvstore: str | KVStoreBase | None) -> bool:
    """Whether the store sums over the ranks of torch.distributed. Raises UnknownNameError."""
    if kvstore is None or not issubclass(kind_of(kvstore), DeviceKVStore) or current_group() is None:
        return False
    if isinstance(kvstore, DeviceKVStore) and kvstore.group is None:
        raise too_late("the kvstore was created")
    return True


def too_late(when: str) -> ConfigurationError:
    """What to raise when a process group came after something that would have needed it."""
    return ConfigurationError(
        f"torch.distributed was initialised after {when}, which therefore knows this process alone; call "
        "init_process_group first"
    )
