"""Key-value stores: hold weights under keys and sum the gradients of all workers.

kv = kvtrainer.kvstore.create("local")
kv.init("w", torch.zeros(3))
kv.push("w", torch.ones(3))
kv.pull("w", out=w)
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, overload

from kvstore_server.errors import ConfigurationError
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.kvstore.base import CAPABILITIES as CAPABILITIES
from kvtrainer.kvstore.base import KVStoreBase as KVStoreBase
from kvtrainer.kvstore.base import capabilities as capabilities
from kvtrainer.kvstore.base import factory_of
from kvtrainer.kvstore.base import register as register
from kvtrainer.kvstore.device import DeviceKVStore as DeviceKVStore
from kvtrainer.kvstore.device import LocalKVStore as LocalKVStore
from kvtrainer.kvstore.dist import DistKVStore as DistKVStore

LocalName = Literal["local", "local_update_cpu", "local_allreduce_cpu"]
DeviceName = Literal["device", "local_allreduce_device", "nccl"]
DistName = Literal[
    "dist", "dist_sync", "dist_sync_device", "dist_device_sync", "p3",
    "dist_async", "dist_async_device", "dist_device_async", "dist_ssp", "dist_ssp_device", "dist_device_ssp",
]  # fmt: skip
"""These aliases let type checkers infer the class of a built-in store from its name."""


@overload
def create(type: LocalName = "local", **options: Any) -> LocalKVStore: ...
@overload
def create(type: DeviceName, **options: Any) -> DeviceKVStore: ...
@overload
def create(type: DistName, **options: Any) -> DistKVStore: ...
@overload
def create(type: str, **options: Any) -> KVStoreBase: ...
@uncompiled
def create(type: str = "local", **options: Any) -> KVStoreBase:
    """Create a store.

    Args:
        type: A registered name; case does not matter. "local" keeps everything in this process; "dist_sync" joins the
            job's servers and blocks until they answer.
        **options: Passed to the store. "dist_sync" takes `rank`, `num_workers`, `servers` and `namespace` (read from
            the environment when absent), and `timeout`, `connect_timeout`, `dead_after`, `slow_after` in seconds.

    Raises:
        UnknownNameError: No store has that name. The message lists the known ones.
        ConfigurationError: An option is wrong.
    """
    factory = factory_of(type)
    signature = inspect.signature(factory)
    taken = signature.parameters.values()
    if "type" in signature.parameters or any(one.kind is one.VAR_KEYWORD for one in taken):
        options["type"] = type
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigurationError(f"kvstore {type!r} does not take these options: {error}") from None
    return factory(**options)
