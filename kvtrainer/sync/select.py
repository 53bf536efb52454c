"""Which store a Trainer uses, and whether the optimizer runs in it: decided at once, opened at the first step."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch

from kvstore_server.codec import Codec, make_codec
from kvtrainer.env import workers_of_job
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.kvstore.device import DeviceKVStore, check_on_cuda, is_nccl
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.local import LocalKVStore
from kvtrainer.parallel.policy import LISTS, ReplicaPolicy
from kvtrainer.roles import serve_role
from kvtrainer.sync.chosen import StoreChoice
from kvtrainer.sync.kinds import is_asynchronous, is_over_ranks, kind_of, type_of
from kvtrainer.sync.replica_choice import check_order, choose_reducer

_log = logging.getLogger(__name__)

UPDATE_ON_KVSTORE = "MXNET_UPDATE_ON_KVSTORE"
"""The environment variable with the default of `update_on_kvstore`: 0 or 1."""
LARGE = 16 * 1024 * 1024
"""Elements. With a parameter that has more, 'local' leaves the update to the Trainer, as in MXNet."""


def choose_store(
    kvstore: Any,
    update_on_kvstore: bool | None = None,
    compression_params: dict[str, Any] | None = None,
    aggregate_num: float = 1,
    largest: int = 0,
    has_row_sparse: bool = False,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    replicas: ReplicaPolicy = LISTS,
    is_joint: bool = False,
) -> StoreChoice:
    """Check the Trainer's arguments about its store and decide whether one is needed; opens nothing.

    Where `update_on_kvstore` is None, the optimizer runs in the store if that can run it; unless it aggregates, or
    'local' has a large parameter, or the environment's MXNET_UPDATE_ON_KVSTORE is 0. Without synchronous rounds it
    always runs there, whatever the environment says.

    Args:
        kvstore, update_on_kvstore, compression_params: as of the Trainer.
        aggregate_num: of the optimizer.
        largest: elements of the largest parameter.
        has_row_sparse: whether there are row-sparse parameters, which live in a store that updates them.
        devices: of the replicas of every parameter; on more than one there is always a store, unless it is None.
        replicas: how they are to be treated.
        is_joint: whether the optimizer may keep things for all parameters together, which a store does not let it.

    Raises:
        ArgumentTypeError: `kvstore` or `update_on_kvstore` has the wrong type.
        UnknownNameError: no store, or no kind of compression, has that name.
        ConfigurationError: two arguments contradict each other, or the store cannot do what they ask for.
    """
    _check_arguments(kvstore, update_on_kvstore, aggregate_num)
    if has_row_sparse:
        _check_for_rows(kvstore, update_on_kvstore)
        update_on_kvstore = True
    is_local = kvstore is not None and issubclass(kind_of(kvstore), LocalKVStore)
    if is_joint and update_on_kvstore is None and is_local:
        update_on_kvstore = False
    codec = _checked_codec(kvstore, compression_params)
    reducer = choose_reducer(kvstore, replicas, devices)
    choice = _choose(kvstore, update_on_kvstore, compression_params, aggregate_num, largest, devices, codec)
    choice.reducer = reducer
    check_order(reducer, is_compressing=choice.replica_codec is not None)
    return choice


def _choose(
    kvstore: Any,
    update_on_kvstore: bool | None,
    compression_params: dict[str, Any] | None,
    aggregate_num: float,
    largest: int,
    devices: Sequence[torch.device],
    codec: Codec | None,
) -> StoreChoice:
    """As `choose_store`, of arguments that were checked one by one."""
    if kvstore is None and update_on_kvstore:
        raise ConfigurationError("update_on_kvstore=True needs a kvstore, but kvstore=None")
    if kvstore is not None and is_nccl(type_of(kvstore)):
        check_on_cuda(devices, "the Trainer's parameters")
    if is_over_ranks(kvstore):
        return _over_ranks(kvstore, update_on_kvstore, codec)
    if kvstore is not None and issubclass(kind_of(kvstore), LocalKVStore):
        _warn_if_alone(type_of(kvstore))
        if isinstance(kvstore, str) and not update_on_kvstore and len(devices) == 1:
            return _without_store(kvstore, compression_params if codec is not None else None)
    if kvstore is None:
        return _without_store(kvstore, compression_params if codec is not None else None)
    if is_asynchronous(kvstore):
        if update_on_kvstore is False or aggregate_num > 1:
            wrong = (
                "update_on_kvstore=False" if update_on_kvstore is False else f"aggregate_num={aggregate_num}"
            )
            raise ConfigurationError(
                f"please set update_on_kvstore=True when training in async mode, and leave {wrong} out: only the "
                f"servers can apply contributions that come one by one (kvstore {type_of(kvstore)!r})"
            )
        update_on_kvstore = True
    if isinstance(kvstore, str) and issubclass(kind_of(kvstore), DistKVStore):
        serve_role(os.environ)
    can_update = issubclass(kind_of(kvstore), LocalKVStore | DistKVStore)
    if update_on_kvstore and not can_update:
        raise ConfigurationError(
            f"kvstore {type_of(kvstore)!r} cannot run a Trainer's optimizer; build the Trainer with "
            "update_on_kvstore=False"
        )
    sums_replicas = issubclass(kind_of(kvstore), LocalKVStore) and len(devices) > 1
    is_open = update_on_kvstore is None and sums_replicas
    if update_on_kvstore is None:
        update_on_kvstore = _default_of_update(type_of(kvstore), aggregate_num, largest)
    if not sums_replicas:
        return StoreChoice(kvstore, can_update and update_on_kvstore, codec)
    choice = StoreChoice(kvstore, update_on_kvstore, is_open=is_open)
    choice.replica_codec = codec
    return choice


def _check_arguments(kvstore: Any, update_on_kvstore: Any, aggregate_num: float) -> None:
    """Raise as `choose_store` if the arguments are wrong whatever the store is."""
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ArgumentTypeError(f"kvstore must be a name, a kvstore or None, got {type(kvstore).__name__}")
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ArgumentTypeError(f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}")
    if update_on_kvstore and aggregate_num > 1:
        raise ConfigurationError(
            f"cannot set update_on_kvstore=True when the optimizer's aggregate_num is above 1, got {aggregate_num}; "
            "leave one of the two out"
        )


def _without_store(kvstore: str | None, unused: dict[str, Any] | None) -> StoreChoice:
    if unused is not None:
        _log.warning(
            "compression_params %r have no effect: one process needs no store, so no gradient travels",
            unused,
        )
    choice = StoreChoice(None, False)
    choice.is_alone_by_name = kvstore is not None and issubclass(kind_of(kvstore), DeviceKVStore)
    return choice


def _over_ranks(
    kvstore: str | KVStoreBase, update_on_kvstore: bool | None, codec: Codec | None
) -> StoreChoice:
    """Every rank updates; to ask for an update in the store only forbids the two halves of a step."""
    if codec is not None:
        raise ConfigurationError(
            f"kvstore {type_of(kvstore)!r} does not compress what the ranks of torch.distributed exchange; leave "
            "compression_params out, or use 'dist_sync'"
        )
    return StoreChoice(kvstore, False, allows_halves=not update_on_kvstore)


def _check_for_rows(kvstore: str | KVStoreBase | None, update_on_kvstore: bool | None) -> None:
    """Raise ConfigurationError unless row-sparse parameters can live in such a store."""
    if kvstore is None:
        raise ArgumentTypeError(
            "cannot train row_sparse parameters without a kvstore, in which their values live; kvstore must be a name "
            "or a kvstore"
        )
    if update_on_kvstore is False:
        raise ConfigurationError("cannot set update_on_kvstore=False when sparse weights are present")
    if not issubclass(kind_of(kvstore), LocalKVStore | DistKVStore):
        raise ConfigurationError(
            f"kvstore {type_of(kvstore)!r} cannot hold row_sparse parameters; use 'local' or a dist kvstore"
        )
    if is_nccl(type_of(kvstore)) or is_over_ranks(kvstore):
        raise ConfigurationError(
            f"kvstore {type_of(kvstore)!r} cannot hold row_sparse parameters for several ranks; use a dist kvstore"
        )


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


def _checked_codec(kvstore: str | KVStoreBase | None, params: dict[str, Any] | None) -> Codec | None:
    """The codec that is asked for; None for none at all. Raises as `choose_store`."""
    codec = make_codec(params)
    if params is None or codec.name == "none":
        return None
    if kvstore is not None:
        kind = kind_of(kvstore)
        is_device = issubclass(kind, DeviceKVStore) and not is_nccl(type_of(kvstore))
        if not is_device and not issubclass(kind, DistKVStore):
            raise ConfigurationError(
                f"gradient compression is not supported for this type of kvstore: {type_of(kvstore)!r}; use 'device' "
                "or 'dist_sync', or leave compression_params out"
            )
    return codec


def _warn_if_alone(name: str) -> None:
    """Say so when one of several workers is about to train by itself, which is seldom what was meant."""
    found = workers_of_job(os.environ)
    if found is not None and found[0] > 1:
        _log.warning(
            "kvstore %r keeps gradients in this process, although the job has %d workers (%s); to train together use "
            "'dist_sync', or 'device' after torch.distributed.init_process_group()",
            name,
            *found,
        )
