"""Selects what synchronises a Trainer: which store, and whether the optimizer runs in it.

`select_store` checks the Trainer's arguments against what the store can do and returns a `Selection`; nothing is
opened. `kvtrainer.kvstore.capabilities()` lists what stores can do; here is what a Trainer makes of it:

- no store for a single process, unless one is asked for: then there is nothing to exchange;
- ranks of torch.distributed if there are any and the store sums over them: every rank updates;
- a store in this process for replicas, or for an update in the store;
- servers otherwise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kvstore_server import check
from kvstore_server.codec import Codec, OneBit, make_codec
from kvtrainer.common.env import workers_from_env
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.jobs.topology import serve_role
from kvtrainer.kvstore.base import (
    ASYNCHRONOUS,
    COMPRESSION,
    OPTIMIZER,
    SPARSE_WEIGHTS,
    KVStoreBase,
    factory_of,
)
from kvtrainer.kvstore.device import DeviceKVStore, LocalKVStore, is_nccl
from kvtrainer.kvstore.dist import DistKVStore
from kvtrainer.kvstore.values import check_on_cuda
from kvtrainer.kvstore.verbs import KVStoreVerbs
from kvtrainer.parallel.replicas import AUTO, LISTS, ReplicaPolicy, is_left_fold, make_replica_reducer
from kvtrainer.ranks.process_group import RankGroup, current_group

_log = logging.getLogger(__name__)

UPDATE_ON_KVSTORE = "MXNET_UPDATE_ON_KVSTORE"
"""The environment variable with the default of `update_on_kvstore`: 0 or 1."""
PULL = "pull"
"""The entry of `compression_params` for new weights."""
LARGE = 16 * 1024 * 1024
"""Elements. With a parameter that has more, 'local' leaves the update to the Trainer, as in MXNet."""
_ALONE = (
    "kvstore %r keeps gradients in this process, although the job has %d workers (%s); to train together use "
    "'dist_sync', or 'device' after torch.distributed.init_process_group()"
)


class StoreTraits(NamedTuple):
    name: str
    """The name under which it was, or will be, created."""
    is_in_process: bool
    """Keeps its keys in this process."""
    is_on_servers: bool
    takes_ranks: bool
    """Sums over the ranks of torch.distributed if there are any."""
    over_ranks: bool
    """There are ranks of torch.distributed, and it sums over them."""
    capabilities: Collection[str]
    """What a Trainer can use of it; empty for a third-party store."""


def store_traits_of(kvstore: str | KVStoreBase) -> StoreTraits:
    """Describe a store, or the one that a name stands for.

    Raises:
        UnknownNameError: no store has that name.
        ConfigurationError: the store was created before the process group that it would have needed.
    """
    by_name = isinstance(kvstore, str)
    name = kvstore if isinstance(kvstore, str) else kvstore.type
    made_by = factory_of(kvstore) if isinstance(kvstore, str) else type(kvstore)
    kind: type = made_by if isinstance(made_by, type) else object
    is_in_process, is_on_servers = (
        issubclass(kind, LocalKVStore | DeviceKVStore),
        issubclass(kind, DistKVStore),
    )
    takes_ranks = issubclass(kind, DeviceKVStore)
    over_ranks = takes_ranks and current_group() is not None
    if over_ranks and not by_name and isinstance(kvstore, DeviceKVStore) and kvstore.group is None:
        raise group_too_late("the kvstore was created")
    capabilities = kind.capabilities_as(name) if issubclass(kind, KVStoreVerbs) else ()
    return StoreTraits(name, is_in_process, is_on_servers, takes_ranks, over_ranks, capabilities)


@dataclass(frozen=True)
class Selection:
    """The store that was selected for a Trainer, and how it is used.

    Args:
        kvstore: A name or a store; None means that none is needed.
        updates_weights: Whether the optimizer runs in the store.
        allows_halves: Whether `allreduce_grads` and `update` may be called.
        is_open: The first gradients decide whether the optimizer runs in the store: not with row-sparse ones.
        codec: How gradients are compressed on their way to the store; None means not at all.
        pull_codec: How new weights come back: rounded with 'bf16', otherwise as changes; None means as they are.
        replica_codec: How each replica is compressed before they are summed here; None means not at all.
        reducer: How replicas are summed here, out of reducers.REDUCERS.
        over_ranks: Whether gradients are summed over the ranks of torch.distributed.
        is_alone_by_name: Whether there is no store only because the one that was named serves a single process.
        overlaps: Whether gradients go to the store during the backward pass.
        is_hierarchical: Whether workers of one host sum their gradients before one of them gives the sum to the store.
    """

    kvstore: str | KVStoreBase | None
    updates_weights: bool
    allows_halves: bool
    is_open: bool = False
    codec: Codec | None = None
    replica_codec: Codec | None = None
    reducer: str = AUTO
    over_ranks: bool = False
    is_alone_by_name: bool = False
    pull_codec: Codec | None = None
    overlaps: bool = False
    is_hierarchical: bool = False


def select_store(
    kvstore: Any,
    update_on_kvstore: bool | None = None,
    compression_params: dict[str, Any] | None = None,
    aggregate_num: float = 1,
    largest: int = 0,
    has_row_sparse: bool = False,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    replicas: ReplicaPolicy = LISTS,
    is_joint: bool = False,
    overlap: bool = False,
    hierarchy: bool = False,
) -> Selection:
    """Check the Trainer's arguments about its store and select one; opens nothing.

    If `update_on_kvstore` is None, the optimizer runs in the store if the store can run it, unless it aggregates,
    'local' has a large parameter, or MXNET_UPDATE_ON_KVSTORE is 0. Without synchronous rounds it always runs there.

    Args:
        kvstore, update_on_kvstore, compression_params, overlap, hierarchy: Those of the Trainer.
        aggregate_num: That of the optimizer.
        largest: Elements of the largest parameter.
        has_row_sparse: Whether there are row-sparse parameters, which live in a store that updates them.
        devices: Of the replicas of every parameter; with several there is always a store, unless it is None.
        replicas: How they are to be treated.
        is_joint: Whether the optimizer may keep state for all parameters together, which a store cannot.

    Raises:
        ArgumentTypeError: `kvstore` or `update_on_kvstore` has the wrong type.
        UnknownNameError: no store, or no kind of compression, has that name.
        ConfigurationError: two arguments contradict each other, or the store cannot do what they ask for.
    """
    # 1. What does not depend on how the store is used.
    _check_selected_arguments(kvstore, update_on_kvstore, aggregate_num)
    store, asked = None if kvstore is None else store_traits_of(kvstore), update_on_kvstore
    _check_selected_ways(store, devices, overlap, hierarchy)
    if has_row_sparse:
        _check_selected_for_rows(store, asked)
        asked = True
    # 2. How gradients and weights travel.
    compression_params, pull_codec = _split_selected_compression(compression_params)
    wanted = Selection(
        kvstore,
        updates_weights=False,
        allows_halves=True,
        codec=_select_codec(store, compression_params),
        reducer=_select_reducer(kvstore, replicas, devices),
        pull_codec=pull_codec,
        overlaps=overlap,
        is_hierarchical=hierarchy,
    )
    _check_selected_pull(wanted, store, asked)
    if store is None:
        return _select_without_kvstore(wanted, asked)
    if is_nccl(store.name):
        check_on_cuda(devices, "the Trainer's parameters")
    if store.over_ranks:
        # Every rank updates; to ask for an update in the store only forbids the two halves of a step.
        return replace(wanted, allows_halves=not asked, over_ranks=True)
    if store.is_in_process:
        asked = False if is_joint and asked is None else asked
        return _select_in_process(wanted, store, asked, aggregate_num, largest, len(devices))
    if store.is_on_servers and isinstance(kvstore, str):
        serve_role(os.environ)
    return _select_who_updates(wanted, store, asked, aggregate_num, largest)


def _select_without_kvstore(wanted: Selection, asked: bool | None) -> Selection:
    if asked:
        raise ConfigurationError("update_on_kvstore=True needs a kvstore, but kvstore=None")
    return _deselect_store(wanted)


def _select_in_process(
    wanted: Selection,
    store: StoreTraits,
    asked: bool | None,
    aggregate_num: float,
    largest: int,
    num_devices: int,
) -> Selection:
    """Use a store of this process. A named one is not even made if there is nothing for it to do."""
    _warn_of_workers(store)
    if isinstance(wanted.kvstore, str) and num_devices == 1 and not asked:
        return _deselect_store(wanted, is_alone_by_name=store.takes_ranks)
    chosen = _select_who_updates(wanted, store, asked, aggregate_num, largest)
    return chosen if num_devices == 1 else _select_for_replicas(chosen, asked)


def _select_who_updates(
    wanted: Selection, store: StoreTraits, asked: bool | None, aggregate_num: float, largest: int
) -> Selection:
    updates = _does_selected_store_update(store, asked, aggregate_num, largest)
    _check_selected_pull(wanted, store, updates)
    return replace(wanted, updates_weights=updates, allows_halves=not updates)


def _deselect_store(chosen: Selection, is_alone_by_name: bool = False) -> Selection:
    if chosen.codec is not None:
        _log.warning(
            "compression_params %r have no effect: one process needs no store, so no gradient travels",
            chosen.codec.spec(),
        )
    return replace(chosen, kvstore=None, codec=None, is_alone_by_name=is_alone_by_name)


def _select_for_replicas(chosen: Selection, asked: bool | None) -> Selection:
    """Use an in-process store for replicas on several devices, each compressed on its own."""
    if chosen.codec is not None and not is_left_fold(chosen.reducer):
        raise ConfigurationError(
            f"reducer={chosen.reducer!r} would have no effect: replicas that are compressed are decoded and added from "
            "left to right; leave the reducer or the compression out"
        )
    return replace(chosen, is_open=asked is None, codec=None, replica_codec=chosen.codec)


def _warn_of_workers(store: StoreTraits) -> None:
    """Warn if a job has several workers but the store serves one process, which is rarely intended."""
    found = workers_from_env(os.environ)
    if found is not None and found[0] > 1:
        _log.warning(_ALONE, store.name, *found)


def group_too_late(when: str) -> ConfigurationError:
    return ConfigurationError(
        f"torch.distributed was initialised after {when}, which therefore knows this process alone; call "
        "init_process_group first"
    )


def _check_selected_arguments(kvstore: Any, update_on_kvstore: Any, aggregate_num: float) -> None:
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ArgumentTypeError(f"kvstore must be a name, a kvstore or None, got {type(kvstore).__name__}")
    if update_on_kvstore is not None and not isinstance(update_on_kvstore, bool):
        raise ArgumentTypeError(f"update_on_kvstore must be True, False or None, got {update_on_kvstore!r}")
    if update_on_kvstore and aggregate_num > 1:
        raise ConfigurationError(
            f"cannot set update_on_kvstore=True when the optimizer's aggregate_num is above 1, got {aggregate_num}; "
            "leave one of the two out"
        )


def _check_selected_ways(
    store: StoreTraits | None,
    devices: Sequence[torch.device],
    overlap: bool,
    hierarchy: bool,
) -> None:
    """Raise ConfigurationError unless the store can overlap and sum over hosts as asked.

    Both take servers and synchronous rounds; overlap also works over ranks of torch.distributed.
    """
    group = current_group() if store is not None and store.over_ranks else None
    if check.boolean("overlap", overlap) and group is not None:
        _check_selected_overlap(group, devices)
    elif overlap:
        lack = "nothing that could be sent during the backward pass and still be changed before step()"
        _check_selected_rounds(store, "overlap", ", or several ranks of torch.distributed", lack)
        _check_one_cpu(devices)
    if not check.boolean("hierarchy", hierarchy):
        return
    _check_selected_rounds(
        store, "hierarchy", "", "no round to which the workers of a host could give one gradient together"
    )
    if overlap:
        raise ConfigurationError(
            "overlap=True sends every worker's gradient before a step could sum it with those of its host; give "
            "hierarchy=True or overlap=True"
        )


def _check_selected_rounds(store: StoreTraits | None, option: str, others: str, lack: str) -> None:
    if store is None or not store.is_on_servers or ASYNCHRONOUS in store.capabilities:
        raise ConfigurationError(
            f"{option}=True needs servers and synchronous rounds, as of 'dist_sync'{others}; kvstore "
            f"{store and store.name!r} has {lack}"
        )


def _check_one_cpu(devices: Sequence[torch.device]) -> None:
    if [device.type for device in devices] != ["cpu"]:
        names = ", ".join(map(str, devices))
        raise ConfigurationError(f"overlap=True needs all parameters on one CPU device, they are on {names}")


def _check_selected_overlap(group: RankGroup, devices: Sequence[torch.device]) -> None:
    if len(devices) > 1 or not group.can_overlap(devices[0]):
        names = ", ".join(map(str, devices))
        raise ConfigurationError(
            "overlap=True needs all parameters on one device, and a process group with gloo for the CPU and, if "
            "they are on CUDA, NCCL for that, as of init_process_group('cpu:gloo,cuda:nccl'); they are on "
            f"{names}, and the group has {dist.get_backend_config()}"
        )


def _check_selected_for_rows(store: StoreTraits | None, update_on_kvstore: bool | None) -> None:
    if store is None:
        raise ArgumentTypeError(
            "cannot train row_sparse parameters without a kvstore, in which their values live; kvstore must be a name "
            "or a kvstore"
        )
    if update_on_kvstore is False:
        raise ConfigurationError("cannot set update_on_kvstore=False when sparse weights are present")
    if SPARSE_WEIGHTS not in store.capabilities or store.over_ranks:
        way_out = " for several ranks; use a dist" if store.takes_ranks else "; use 'local' or a dist"
        raise ConfigurationError(f"kvstore {store.name!r} cannot hold row_sparse parameters{way_out} kvstore")


def _split_selected_compression(params: Any) -> tuple[Any, Codec | None]:
    """Split `compression_params` into the part for gradients and that for new weights.

    Raises:
        UnknownNameError, ConfigurationError: as `make_codec`; or the codec always changes all weights.
    """
    params = check.as_mapping(params)
    if not isinstance(params, Mapping) or PULL not in params:
        return params, None
    given = params[PULL]
    codec = make_codec(given if isinstance(given, Mapping) else {"type": given})
    if isinstance(codec, OneBit):
        raise ConfigurationError(
            f"compression_params[{PULL!r}]='1bit' would change every weight by 1 in each update; use 'ternary', whose "
            "scale is that of the changes"
        )
    others = {name: value for name, value in params.items() if name != PULL} or None
    return others, None if codec.name == "none" else codec


def _check_selected_pull(wanted: Selection, store: StoreTraits | None, updates_weights: bool | None) -> None:
    if wanted.pull_codec is None:
        return
    if store is None or not store.is_on_servers or updates_weights is False:
        where = "kvstore=None" if store is None else f"kvstore {store.name!r}"
        where += ", update_on_kvstore=False" if updates_weights is False else ""
        raise ConfigurationError(
            f"{PULL!r} in compression_params compresses weights on their way back from servers that update and keep "
            f"them; with {where} none come back. Leave it out, or use a dist kvstore with update_on_kvstore=True"
        )


def _select_codec(store: StoreTraits | None, params: dict[str, Any] | None) -> Codec | None:
    codec = make_codec(params)
    if params is None or codec.name == "none":
        return None
    if store is not None and COMPRESSION not in store.capabilities:
        raise ConfigurationError(
            f"gradient compression is not supported for this type of kvstore: {store.name!r}; use 'device' "
            "or 'dist_sync', or leave compression_params out"
        )
    if store is not None and store.over_ranks:
        raise ConfigurationError(
            f"kvstore {store.name!r} does not compress what the ranks of torch.distributed exchange; leave "
            "compression_params out, or use 'dist_sync'"
        )
    return codec


def _select_reducer(
    kvstore: str | KVStoreBase | None, replicas: ReplicaPolicy, devices: Sequence[torch.device]
) -> str:
    # The parameters and the store may both name a reducer.
    own = kvstore.reducer if isinstance(kvstore, DeviceKVStore) else AUTO
    if AUTO not in (own, replicas.reducer) and own != replicas.reducer:
        raise ConfigurationError(
            f"the DataParallel has reducer={replicas.reducer!r} and the kvstore reducer={own!r}; give one of them alone"
        )
    if kvstore is None and replicas.must_agree and len(devices) > 1:
        raise ConfigurationError(
            f"without a kvstore the {len(devices)} replicas of a DataParallel would each go their own way; use "
            "kvstore='device'"
        )
    reducer = own if own != AUTO else replicas.reducer
    if reducer != AUTO and len(devices) == 1:
        raise ConfigurationError(
            f"reducer={reducer!r} would have no effect: it sums replicas, and every parameter is on one device of this "
            "process only; leave it out, or give the Trainer replicas"
        )
    make_replica_reducer(reducer, devices)
    return reducer


def _does_selected_store_update(
    store: StoreTraits, asked: bool | None, aggregate_num: float, largest: int
) -> bool:
    # 1. Without rounds only servers can update.
    if ASYNCHRONOUS in store.capabilities:
        if asked is False or aggregate_num > 1:
            wrong = "update_on_kvstore=False" if asked is False else f"aggregate_num={aggregate_num}"
            raise ConfigurationError(
                f"please set update_on_kvstore=True when training in async mode, and leave {wrong} out: only the "
                f"servers can apply contributions that come one by one (kvstore {store.name!r})"
            )
        return True
    # 2. As asked.
    can_update = OPTIMIZER in store.capabilities
    if asked and not can_update:
        raise ConfigurationError(
            f"kvstore {store.name!r} cannot run a Trainer's optimizer; build the Trainer with "
            "update_on_kvstore=False"
        )
    if asked is not None:
        return asked
    # 3. By MXNet's defaults.
    given = os.environ.get(UPDATE_ON_KVSTORE, "1")
    if given not in ("0", "1"):
        raise ConfigurationError(
            f"the environment variable {UPDATE_ON_KVSTORE} must be 0 or 1, got {given!r}"
        )
    is_large = store.name.lower() == "local" and largest > LARGE
    return can_update and given == "1" and aggregate_num <= 1 and not is_large
