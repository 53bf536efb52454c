"""What every kvstore offers, the registry of stores, and `create`."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, overload

from torch import Tensor

from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from kvtrainer.kvstore.device import DeviceKVStore
    from kvtrainer.kvstore.dist import DistKVStore
    from kvtrainer.kvstore.local import LocalKVStore

_log = logging.getLogger(__name__)

LocalName = Literal["local", "local_update_cpu", "local_allreduce_cpu"]
DeviceName = Literal["device", "local_allreduce_device", "nccl"]
DistName = Literal[
    "dist", "dist_sync", "dist_sync_device", "dist_device_sync", "p3",
    "dist_async", "dist_async_device", "dist_device_async", "dist_ssp", "dist_ssp_device", "dist_device_ssp",
]  # fmt: skip
"""So type checkers know the class of a store that is created by the name of a built-in one."""
Key: TypeAlias = int | str
Value: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or one per device: replicas, which are summed."""

OPTIMIZER = "optimizer"
COMPRESSION = "gradient_compression"
SPARSE_GRADIENTS = "row_sparse_gradients"
SPARSE_WEIGHTS = "row_sparse_weights"
ASYNCHRONOUS = "asynchronous"
SEVERAL_WORKERS = "several_workers"
CAPABILITIES = (OPTIMIZER, COMPRESSION, SPARSE_GRADIENTS, SPARSE_WEIGHTS, ASYNCHRONOUS, SEVERAL_WORKERS)
"""What a store may be able to do: run the optimizer; compress gradients on their way; take row-sparse gradients; hold
row-sparse weights, of which single rows are pulled; apply contributions as they come; join several processes."""


class KVStoreBase(ABC):
    """The least that a store must offer to serve a Trainer; third-party stores derive from this.

    A Trainer calls `broadcast` once per parameter with its position as key, and `pushpull` with the gradient at
    every step; it applies the optimizer itself.
    """

    OPTIMIZER: ClassVar[str] = OPTIMIZER
    """The name of a capability, for `is_capable`."""
    capabilities: ClassVar[Collection[str]] = ()
    """What stores of this class can do, out of CAPABILITIES; a third-party class says so here."""

    @property
    @abstractmethod
    def type(self) -> str:
        """The name under which the store was created."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """How many workers take part."""

    @abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and write them to `out` on every worker."""

    @abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum `value` over all workers and write the result to `out`, or back to `value`."""

    @classmethod
    def capabilities_as(cls, type: str) -> Collection[str]:
        """What stores of this class can do when created under a name; by default `capabilities`, whatever the name."""
        return cls.capabilities

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something; the names are in CAPABILITIES, case does not matter.

        Raises:
            ConfigurationError: no such capability exists.
        """
        return self._capability(capability) in _checked(self.capabilities_as(self.type), self.__class__)

    def close(self) -> None:
        """Give up the store's resources; idempotent. The base class has none."""
        return None

    @staticmethod
    def register(cls: _ClassT) -> _ClassT:
        """Make a store known to `create` under its class name in lower case, as MXNet's plug-ins do it.

            @kvtrainer.kvstore.KVStoreBase.register
            class MyStore(kvtrainer.kvstore.KVStoreBase): ...   # kvstore="mystore"

        The module's `register` gives it other names.
        """
        if not isinstance(cls, type) or not issubclass(cls, KVStoreBase):
            raise ConfigurationError(
                f"KVStoreBase.register decorates a subclass of KVStoreBase, got {cls!r:.80}; to give a store another "
                'name use kvtrainer.kvstore.register("name")'
            )
        return register(cls.__name__)(cls)

    @staticmethod
    def _capability(name: str) -> str:
        if not isinstance(name, str) or name.lower() not in CAPABILITIES:
            raise ConfigurationError(
                f"unknown capability {name!r}; known ones: {', '.join(CAPABILITIES)}{did_you_mean(name, CAPABILITIES)}"
            )
        return name.lower()


Factory = Callable[..., KVStoreBase]
_FactoryT = TypeVar("_FactoryT", bound=Factory)
_ClassT = TypeVar("_ClassT", bound=type[KVStoreBase])

_registry: dict[str, Factory] = {}


def register(*names: str) -> Callable[[_FactoryT], _FactoryT]:
    """Make a store known to `create` under one or more names (case does not matter).

    The class is called as `cls(type=name, **options)`; without `type` if it does not take that. Taking over a name that
    is in use is logged.

        @kvtrainer.kvstore.register("mystore")
        class MyStore(kvtrainer.kvstore.KVStoreBase): ...
    """

    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(
            f'register takes the names of the store, as in @register("mystore"), got {names!r}'
        )

    def add(factory: _FactoryT) -> _FactoryT:
        if isinstance(factory, type):
            _checked(getattr(factory, "capabilities", ()), factory)
        for name in names:
            if name.lower() in _registry:
                _log.warning("kvstore %r is replaced by %r", name, factory)
            _registry[name.lower()] = factory
        return factory

    return add


def capabilities() -> dict[str, dict[str, bool]]:
    """What the store of every registered name can do: name → capability → whether.

    A class says so by its `capabilities`, or by `capabilities_as` where it depends on the name; a function that makes
    stores by an attribute `capabilities`. Names are in alphabetical order.
    """
    table = {}
    for name, factory in sorted(_registry.items()):
        if isinstance(factory, type) and issubclass(factory, KVStoreBase):
            able = _checked(factory.capabilities_as(name), factory)
        else:
            able = _checked(getattr(factory, "capabilities", ()), factory)
        table[name] = {capability: capability in able for capability in CAPABILITIES}
    return table


def _checked(capabilities: Collection[str], owner: object) -> frozenset[str]:
    """Raise ConfigurationError if a store claims what is not a capability."""
    if isinstance(capabilities, str) or not set(capabilities) <= set(CAPABILITIES):
        raise ConfigurationError(
            f"{owner!r} claims the capabilities {capabilities!r:.200}; give a collection out of: "
            f"{', '.join(CAPABILITIES)}"
        )
    return frozenset(capabilities)


def factory_of(type: str) -> Factory:
    """What makes stores of that name. Raises as `create`."""
    if not isinstance(type, str):
        raise ConfigurationError(f"the type of a kvstore must be a string, got {type!r}")
    factory = _registry.get(type.lower())
    if factory is None:
        raise UnknownNameError(
            f"no kvstore is named {type!r}; known ones: {', '.join(sorted(_registry))}{did_you_mean(type, _registry)}"
        )
    return factory


@overload
def create(type: LocalName = "local", **options: Any) -> LocalKVStore: ...
@overload
def create(type: DeviceName, **options: Any) -> DeviceKVStore: ...
@overload
def create(type: DistName, **options: Any) -> DistKVStore: ...
@overload
def create(type: str, **options: Any) -> KVStoreBase: ...
def create(type: str = "local", **options: Any) -> KVStoreBase:
    """Create a store.

    Args:
        type: One of the registered names; case does not matter. "local" keeps everything in this process,
            "dist_sync" joins the job's servers and blocks until they answer.
        **options: Passed to the store. For "dist_sync": `rank`, `num_workers`, `servers` (each read from the
            environment when absent), `namespace`; `timeout`, `connect_timeout`, `dead_after`, `slow_after` in
            seconds.

    Raises:
        UnknownNameError: no store has that name; lists those that there are.
        ConfigurationError: an option is wrong.
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
