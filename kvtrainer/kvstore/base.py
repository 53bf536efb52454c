"""The abstract kvstore, the registry of stores, and the capabilities of the built-in ones."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from kvstore_server import check
from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean
from kvtrainer.common.uncompiled import uncompiled

_log = logging.getLogger(__name__)

Key: TypeAlias = int | str

OPTIMIZER = "optimizer"
COMPRESSION = "gradient_compression"
SPARSE_GRADIENTS = "row_sparse_gradients"
SPARSE_WEIGHTS = "row_sparse_weights"
ASYNCHRONOUS = "asynchronous"
SEVERAL_WORKERS = "several_workers"
CAPABILITIES = (OPTIMIZER, COMPRESSION, SPARSE_GRADIENTS, SPARSE_WEIGHTS, ASYNCHRONOUS, SEVERAL_WORKERS)
"""What a store may support, in this order: running the optimizer; compressing gradients in transit; row-sparse
gradients; row-sparse weights whose rows can be pulled; applying contributions as they arrive; several processes."""

LOCAL_NAMES = ("local", "local_update_cpu", "local_allreduce_cpu")
NCCL = "nccl"
DEVICE_NAMES = ("device", "local_allreduce_device", NCCL)
P3 = "p3"
SYNC_NAMES = ("dist_sync", "dist", "dist_sync_device", "dist_device_sync", P3)
ASYNC_NAMES = ("dist_async", "dist_async_device", "dist_device_async")
SSP_NAMES = ("dist_ssp", "dist_ssp_device", "dist_device_ssp")

_ROWS = (OPTIMIZER, SPARSE_GRADIENTS, SPARSE_WEIGHTS)
BUILT_IN: Mapping[str, Collection[str]] = {
    **dict.fromkeys(LOCAL_NAMES, _ROWS),
    **dict.fromkeys(DEVICE_NAMES, (*_ROWS, SEVERAL_WORKERS, COMPRESSION)),
    NCCL: (OPTIMIZER, SEVERAL_WORKERS),
    **dict.fromkeys(SYNC_NAMES, (*_ROWS, SEVERAL_WORKERS, COMPRESSION)),
    **dict.fromkeys((*ASYNC_NAMES, *SSP_NAMES), (*_ROWS, SEVERAL_WORKERS, COMPRESSION, ASYNCHRONOUS)),
}
"""Name of a built-in store → its capabilities. Other stores declare theirs when they are registered."""


@uncompiled
class KVStoreBase(ABC):
    """The interface that a store must implement to serve a Trainer. Third-party stores derive from it.

    A Trainer calls `broadcast` once per parameter, with its position as the key, and `pushpull` with each gradient at
    every step. It applies the optimizer itself.
    """

    OPTIMIZER: ClassVar[str] = OPTIMIZER
    """Name of a capability, for `is_capable`."""
    capabilities: ClassVar[Collection[str]] = ()
    """The capabilities of this class, out of CAPABILITIES. Third-party classes override it."""

    @property
    @abstractmethod
    def type(self) -> str:
        """The name under which the store was created."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this worker, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of workers."""

    @abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and write them to `out` on every worker."""

    @abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum `value` over all workers and write the result to `out`, or back to `value`."""

    @classmethod
    def capabilities_as(cls, type: str) -> Collection[str]:
        """Return the capabilities of this class under a registered name. The default is `capabilities`."""
        return cls.capabilities

    def is_capable(self, capability: str) -> bool:
        """Return whether the store has a capability out of CAPABILITIES. Case-insensitive.

        Raises:
            ConfigurationError: No such capability exists.
        """
        name = capability.lower() if isinstance(capability, str) else capability
        return check.one_of("a capability", name, CAPABILITIES) in _check_store_capabilities(
            self.capabilities_as(self.type), self.__class__
        )

    def close(self) -> None:
        """Release the store's resources. Idempotent. The base class has none."""
        return None

    @staticmethod
    def register(cls: _ClassT) -> _ClassT:
        """Register a store under its lower-case class name, as MXNet's plug-ins do.

            @kvtrainer.kvstore.KVStoreBase.register
            class MyStore(kvtrainer.kvstore.KVStoreBase): ...   # kvstore="mystore"

        Use the module's `register` to choose other names.
        """
        if not isinstance(cls, type) or not issubclass(cls, KVStoreBase):
            raise ConfigurationError(
                f"KVStoreBase.register decorates a subclass of KVStoreBase, got {cls!r:.80}; to give a store another "
                'name use kvtrainer.kvstore.register("name")'
            )
        return register(cls.__name__)(cls)


Factory = Callable[..., KVStoreBase]
_FactoryT = TypeVar("_FactoryT", bound=Factory)
_ClassT = TypeVar("_ClassT", bound=type[KVStoreBase])

_registry: dict[str, Factory] = {}


def register(*names: str) -> Callable[[_FactoryT], _FactoryT]:
    """Register a store for `create` under one or more case-insensitive names.

    The factory is called as `cls(type=name, **options)`, without `type` if it does not accept it. Replacing a
    registered name logs a warning.

        @kvtrainer.kvstore.register("mystore")
        class MyStore(kvtrainer.kvstore.KVStoreBase): ...
    """

    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(
            f'register takes the names of the store, as in @register("mystore"), got {names!r}'
        )

    def add(factory: _FactoryT) -> _FactoryT:
        if isinstance(factory, type):
            _check_store_capabilities(getattr(factory, "capabilities", ()), factory)
        for name in names:
            if name.lower() in _registry:
                _log.warning("kvstore %r is replaced by %r", name, factory)
            _registry[name.lower()] = factory
        return factory

    return add


def capabilities() -> dict[str, dict[str, bool]]:
    """Return the capabilities of every registered store, as name → capability → bool, sorted by name.

    A class declares them in `capabilities`, or in `capabilities_as` if they depend on the name. A factory function
    declares them in an attribute `capabilities`.
    """
    table = {}
    for name, factory in sorted(_registry.items()):
        if isinstance(factory, type) and issubclass(factory, KVStoreBase):
            able = _check_store_capabilities(factory.capabilities_as(name), factory)
        else:
            able = _check_store_capabilities(getattr(factory, "capabilities", ()), factory)
        table[name] = {capability: capability in able for capability in CAPABILITIES}
    return table


def _check_store_capabilities(capabilities: Collection[str], owner: object) -> frozenset[str]:
    if isinstance(capabilities, str) or not set(capabilities) <= set(CAPABILITIES):
        raise ConfigurationError(
            f"{owner!r} claims the capabilities {capabilities!r:.200}; give a collection out of: "
            f"{', '.join(CAPABILITIES)}"
        )
    return frozenset(capabilities)


def factory_of(type: str) -> Factory:
    if not isinstance(type, str):
        raise ConfigurationError(f"the type of a kvstore must be a string, got {type!r}")
    factory = _registry.get(type.lower())
    if factory is None:
        raise UnknownNameError(
            f"no kvstore is named {type!r}; known ones: {', '.join(sorted(_registry))}{did_you_mean(type, _registry)}"
        )
    return factory
