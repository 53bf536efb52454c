"""How the replicas of a Trainer's parameters are summed before the sum goes to a store: what was asked, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.kvstore.device import DeviceKVStore
from kvtrainer.parallel.policy import ReplicaPolicy
from kvtrainer.parallel.reducers import AUTO, is_left_fold, make_reducer


def choose_reducer(
    kvstore: str | KVStoreBase | None, replicas: ReplicaPolicy, devices: Sequence[torch.device]
) -> str:
    """The reducer that the parameters or the store ask for. Raises ConfigurationError where it cannot be used."""
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
    make_reducer(reducer, devices)
    return reducer


def check_order(reducer: str, is_compressing: bool) -> None:
    """Raise ConfigurationError if replicas are compressed one by one and a reducer asks for another order."""
    if is_compressing and not is_left_fold(reducer):
        raise ConfigurationError(
            f"reducer={reducer!r} would have no effect: replicas that are compressed are decoded and added from left "
            "to right; leave the reducer or the compression out"
        )
