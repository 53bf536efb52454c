"""Which store a Trainer uses, and whether the optimizer runs in it: decided at once, opened at the first step."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvstore_server.codec import Codec, make_codec
from kvtrainer.comm.client import Client
from kvtrainer.env import workers_of_job
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import Factory, KVStoreBase, create, factory_of
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.dist_modes import ASYNC_NAMES, SSP_NAMES
from kvtrainer.kvstore.local import LocalKVStore, refuse_process_group
from kvtrainer.roles import serve_role

_log = logging.getLogger(__name__)

UPDATE_ON_KVSTORE = "MXNET_UPDATE_ON_KVSTORE"
"""The environment variable with the default of `update_on_kvstore`: 0 or 1."""
LARGE = 16 * 1024 * 1024
"""Elements. With a parameter that has more, 'local' leaves the update to the Trainer, as in MXNet."""


class StoreChoice:
    """A Trainer's store.

    Args:
        kvstore: A name or a store; None means that none is needed.
        updates_weights: Whether the optimizer runs in the store.
        codec: How gradients are compressed on their way there; None means not at all.
    """

    def __init__(
        self, kvstore: str | KVStoreBase | None, updates_weights: bool, codec: Codec | None = None
    ) -> None:
        self.updates_weights = updates_weights
        self.codec = codec
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
    kvstore: Any,
    update_on_kvstore: bool | None = None,
    compression_params: dict[str, Any] | None = None,
    aggregate_num: float = 1,
    largest: int = 0,
) -> StoreChoice:
    """Check the Trainer's arguments about its store and decide whether one is needed; opens nothing.

    Where `update_on_kvstore` is None, the optimizer runs in the store if that can run it; unless it aggregates, or
    'local' has a large parameter, or the environment's MXNET_UPDATE_ON_KVSTORE is 0.

    Args:
        kvstore, update_on_kvstore, compression_params: as of the Trainer.
        aggregate_num: of the optimizer.
        largest: elements of the largest parameter.

    Raises:
        ArgumentTypeError: `kvstore` or `update_on_kvstore` has the wrong type.
        UnknownNameError: no store, or no kind of compression, has that name.
        ConfigurationError: two arguments contradict each other, or the store cannot do what they ask for.
    """
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ArgumentTypeError(f"kvstore must be a name, a kvstore or None, got {type(kvstore).__name__}")
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ArgumentTypeError(f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}")
    if update_on_kvstore and aggregate_num > 1 and not _is_asynchronous(kvstore):
        raise ConfigurationError(
            f"cannot set update_on_kvstore=True when the optimizer's aggregate_num is above 1, got {aggregate_num}; "
            "leave one of the two out"
        )
    codec = _checked_codec(kvstore, compression_params)
    if kvstore is None and update_on_kvstore:
        raise ConfigurationError("update_on_kvstore=True needs a kvstore, but kvstore=None")
    if isinstance(kvstore, str) and _is_in_process(kvstore):
        _warn_if_alone(kvstore)
    if kvstore is None or (isinstance(kvstore, str) and _is_in_process(kvstore) and not update_on_kvstore):
        if codec is not None:
            _log.warning(
                "compression_params %r have no effect: one process needs no store, so no gradient travels",
                compression_params,
            )
        return StoreChoice(None, False)
    if update_on_kvstore is not True and _is_asynchronous(kvstore):
        if update_on_kvstore is False or not _environment_lets_store_update():
            raise ConfigurationError(
                "please set update_on_kvstore=True when training in async mode: only the servers can apply "
                f"contributions that come one by one (kvstore {_type_of(kvstore)!r}; {UPDATE_ON_KVSTORE} is "
                f"{os.environ.get(UPDATE_ON_KVSTORE, 'not set')})"
            )
        update_on_kvstore = True
    if isinstance(kvstore, str) and issubclass(_kind_of(kvstore), DistKVStore):
        serve_role(os.environ)
    can_update = issubclass(_kind_of(kvstore), LocalKVStore | DistKVStore)
    if update_on_kvstore and not can_update:
        raise ConfigurationError(
            f"kvstore {_type_of(kvstore)!r} cannot run a Trainer's optimizer; build the Trainer with "
            "update_on_kvstore=False"
        )
    if update_on_kvstore is None:
        update_on_kvstore = _default_of_update(_type_of(kvstore), aggregate_num, largest)
    return StoreChoice(kvstore, can_update and update_on_kvstore, codec)


def _default_of_update(type: str, aggregate_num: float, largest: int) -> bool:
    """Whether an optimizer runs in a store that can run it, where the argument does not say so."""
    return (
        _environment_lets_store_update()
        and aggregate_num <= 1
        and not (type.lower() == "local" and largest > LARGE)
    )


def _environment_lets_store_update() -> bool:
    given = os.environ.get(UPDATE_ON_KVSTORE, "1")
    if given not in ("0", "1"):
        raise ConfigurationError(
            f"the environment variable {UPDATE_ON_KVSTORE} must be 0 or 1, got {given!r}"
        )
    return given == "1"


def _is_asynchronous(kvstore: str | KVStoreBase | None) -> bool:
    """Whether contributions to such a store count one by one. Raises UnknownNameError."""
    if isinstance(kvstore, DistKVStore):
        return not kvstore.mode.is_sync
    if not isinstance(kvstore, str) or _kind_of(kvstore) is not DistKVStore:
        return False
    return kvstore.lower() in ASYNC_NAMES + SSP_NAMES


def _checked_codec(kvstore: str | KVStoreBase | None, params: dict[str, Any] | None) -> Codec | None:
    """The codec that is asked for; None for none at all. Raises as `choose_store`."""
    codec = make_codec(params)
    if params is None or codec.name == "none":
        return None
    if kvstore is not None:
        kind = _kind_of(kvstore)
        is_device = issubclass(kind, LocalKVStore) and "device" in _type_of(kvstore).lower()
        if not is_device and not issubclass(kind, DistKVStore):
            raise ConfigurationError(
                f"gradient compression is not supported for this type of kvstore: {_type_of(kvstore)!r}; use 'device' "
                "or 'dist_sync', or leave compression_params out"
            )
    return codec


def _warn_if_alone(name: str) -> None:
    """Say so when one of several workers is about to train by itself, which is seldom what was meant."""
    found = workers_of_job(os.environ)
    if found is not None and found[0] > 1:
        _log.warning(
            "kvstore %r keeps gradients in this process, although the job has %d workers (%s); use 'dist_sync' to "
            "train together",
            name,
            *found,
        )


def _type_of(kvstore: str | KVStoreBase) -> str:
    return kvstore if isinstance(kvstore, str) else kvstore.type


def _kind_of(kvstore: str | KVStoreBase) -> type:
    """The store's class; `object` for a name that stands for a function. Raises UnknownNameError."""
    kind: type[KVStoreBase] | Factory = (
        type(kvstore) if isinstance(kvstore, KVStoreBase) else factory_of(kvstore)
    )
    return kind if isinstance(kind, type) else object


def _is_in_process(name: str) -> bool:
    """Whether a store of this name would only serve this process. Raises as `choose_store`."""
    if factory_of(name) is not LocalKVStore:
        return False
    if "device" in name.lower():
        refuse_process_group(name)
    return True
