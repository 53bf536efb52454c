"""What every kvstore offers, the registry of stores, and `create`."""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from kvstore_server.errors import ConfigurationError, UnknownNameError

_log = logging.getLogger(__name__)

Key: TypeAlias = int | str
Value: TypeAlias = Tensor | Sequence[Tensor]
"""One tensor, or one per device: replicas, which are summed."""

OPTIMIZER = "optimizer"
COMPRESSION = "gradient_compression"
CAPABILITIES = (OPTIMIZER, COMPRESSION)


class KVStoreBase(ABC):
    """The least that a store must offer to serve a Trainer; third-party stores derive from this.

    A Trainer calls `broadcast` once per parameter with its position as key, and `pushpull` with the gradient at
    every step; it applies the optimizer itself.
    """

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

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something; the names are in CAPABILITIES.

        Raises:
            ConfigurationError: no such capability exists.
        """
        self._capability(capability)
        return False

    def close(self) -> None:
        """Give up the store's resources; idempotent. The base class has none."""
        return None

    @staticmethod
    def _capability(name: str) -> str:
        if not isinstance(name, str) or name.lower() not in CAPABILITIES:
            raise ConfigurationError(f"unknown capability {name!r}; known ones: {', '.join(CAPABILITIES)}")
        return name.lower()


Factory = Callable[..., KVStoreBase]
_FactoryT = TypeVar("_FactoryT", bound=Factory)

_registry: dict[str, Factory] = {}


def register(*names: str) -> Callable[[_FactoryT], _FactoryT]:
    """Make a store known to `create` under one or more names (case does not matter).

    The class is called as `cls(type=name, **options)`. Taking over a name that is in use is logged.

        @kvtrainer.kvstore.register("mystore")
        class MyStore(kvtrainer.kvstore.KVStoreBase): ...
    """

    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(
            f'register takes the names of the store, as in @register("mystore"), got {names!r}'
        )

    def add(factory: _FactoryT) -> _FactoryT:
        for name in names:
            if name.lower() in _registry:
                _log.warning("kvstore %r is replaced by %r", name, factory)
            _registry[name.lower()] = factory
        return factory

    return add


def factory_of(type: str) -> Factory:
    """What makes stores of that name. Raises as `create`."""
    if not isinstance(type, str):
        raise ConfigurationError(f"the type of a kvstore must be a string, got {type!r}")
    factory = _registry.get(type.lower())
    if factory is None:
        raise UnknownNameError(f"no kvstore is named {type!r}; known ones: {', '.join(sorted(_registry))}")
    return factory


def create(type: str = "local", **options: Any) -> KVStoreBase:
    """Create a store.

    Args:
        type: One of the registered names; case does not matter. "local" keeps everything in this process,
            "dist_sync" joins the job's servers and blocks until they answer.
        **options: Passed to the store. For "dist_sync": `rank`, `num_workers`, `servers` (each read from the
            environment when absent), `timeout`, `connect_timeout`, `dead_after` in seconds, and `namespace`.

    Raises:
        UnknownNameError: no store has that name; lists those that there are.
        ConfigurationError: an option is wrong.
    """
    factory = factory_of(type)
    try:
        inspect.signature(factory).bind(type=type, **options)
    except TypeError as error:
        raise ConfigurationError(f"kvstore {type!r} does not take these options: {error}") from None
    return factory(type=type, **options)
