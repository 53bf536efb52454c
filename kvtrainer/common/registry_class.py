"""The registries behind `kvtrainer.registry`, without their built-in entries.

Each module registers the hooks or constructors that it defines when it is imported. `kvtrainer.registry` imports these
modules, so that users find every name. torch's optimizers and entry points of plugins are looked up on demand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar

import torch.optim

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvstore_server.optimizer import Optimizer, register
from kvstore_server.optimizer.registry import registered_optimizers
from kvtrainer.errors import ArgumentTypeError, RegistryError, UnregisteredNameError

_log = logging.getLogger(__name__)
_Entry = TypeVar("_Entry", bound=Callable[..., Any])


class Registry:
    """Names of classes and functions that configurations refer to by `type`.

    Args:
        name: What the registry contains, for messages.
        entry_point_group: The group of entry points through which installed packages add to it. They are loaded when a
            name is not found.
        fallback: Returns further entries by name, which are used if nothing is registered under a name.
        on_register: Called with every entry that is registered.

        @OPTIMIZERS.register()
        class MyOptimizer(torch.optim.Optimizer): ...

        OPTIMIZERS.build({"type": "MyOptimizer", "lr": 0.1}, params=model.parameters())
    """

    def __init__(
        self,
        name: str,
        entry_point_group: str | None = None,
        *,
        fallback: Callable[[], Mapping[str, Any]] = dict,
        on_register: Callable[[Any], object] | None = None,
    ) -> None:
        self.name = name
        self._group = entry_point_group
        self._fallback = fallback
        self._on_register = on_register
        self._entries: dict[str, Any] = {}
        self._broken: dict[str, str] = {}
        """Entry points that could not be loaded → why."""

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, {sorted(self._entries)})"

    def __contains__(self, name: object) -> bool:
        known = isinstance(name, str) and self._find(name) is not None
        return known or any(point.name == name for point in self._entry_points())

    def register(
        self, name: str | Sequence[str] | None = None, force: bool = False
    ) -> Callable[[_Entry], _Entry]:
        """Return a decorator that registers a class or function under `name`, which may be several; by default its own.

        Args:
            force: Whether it may replace another entry of that name.

        Raises:
            RegistryError: The name is taken; also a KeyError.
            ArgumentTypeError: It is used without parentheses, or with something that is not a name.
        """
        names = [name] if isinstance(name, str) else name
        if names is not None and (
            not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names)
        ):
            raise ArgumentTypeError(
                f"the name of a {self.name} must be a str, got {name!r:.80}; write @….register()"
            )

        def add(entry: _Entry) -> _Entry:
            if not callable(entry) or (names is None and not hasattr(entry, "__name__")):
                raise ArgumentTypeError(
                    f"a {self.name} must be a class or function with a name, got {entry!r:.80}"
                )
            own = [entry.__name__] if names is None else names
            for one in () if force else own:
                present = self._entries.get(one, self._fallback().get(one))
                if present not in (None, entry):
                    raise RegistryError(
                        f"the {self.name} {one!r} is already {_qualified_registry_name(present)}; register "
                        f"{_qualified_registry_name(entry)} under another name, or replace the entry with force=True"
                    )
            for one in own:
                self._add(one, entry)
            return entry

        return add

    def register_module(
        self,
        name: str | Sequence[str] | None = None,
        force: bool = False,
        module: _Entry | None = None,
    ) -> Any:
        """`register` with MMCV's ways to call it: `@R.register_module()` or `R.register_module(module=Class)`."""
        add = self.register(name, force)
        return add if module is None else add(module)

    def get(self, name: str) -> Any:
        """Return the entry of that name or, failing that, one whose name differs only in case.

        Raises:
            UnregisteredNameError: Nothing is registered under it; also a KeyError. The message suggests similar names.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a {self.name} must be a str, got {name!r:.80}")
        found = self._find(name)
        if found is None:
            # Plugins are only imported when nothing else has the name.
            self._load_entry_points(name)
            found = self._find(name)
        if found is not None:
            return found
        known = [*self._entries.items(), *self._fallback().items()]
        names = {id(entry): other for other, entry in reversed(known)}  # the first name of each entry
        others = sorted(names.values(), key=str.casefold)
        broken = "; ".join(f"entry point {point}: {reason}" for point, reason in self._broken.items())
        raise UnregisteredNameError(
            f"{name!r} is not in the {self.name} registry{did_you_mean(name, others) or '.'} Registered are "
            f"{', '.join(others) or 'none'}; custom_imports may name the module that registers it. {broken}".rstrip()
        )

    def build(self, cfg: Mapping[str, Any], **default_args: Any) -> Any:
        """Call the entry that `cfg["type"]` names (or is) with the other items of `cfg`; `default_args` fill in.

        Raises:
            ArgumentTypeError: `cfg` is not a dict, or its type is neither a name nor callable.
            RegistryError: It has no "type".
            UnregisteredNameError: Nothing is registered under the name.
        """
        kind, options = self.split(cfg)
        return kind(**{**default_args, **options})

    def split(self, cfg: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the entry that `cfg["type"]` names, and the other items of `cfg`. Raises as `build` does."""
        cfg = check.mapping(f"the configuration of a {self.name}", cfg, error=ArgumentTypeError)
        if "type" not in cfg:
            raise RegistryError(f"the configuration of a {self.name} needs a 'type', got {dict(cfg)!r:.200}")
        kind = cfg["type"]
        if not isinstance(kind, str) and not callable(kind):
            raise ArgumentTypeError(
                f"the type of a {self.name} must be a name, a class or a function, got {kind!r:.80}"
            )
        found = self.get(kind) if isinstance(kind, str) else kind
        return found, {str(key): value for key, value in cfg.items() if key != "type"}

    def _add(self, name: str, entry: Any) -> None:
        if self._on_register is not None:
            self._on_register(entry)
        self._entries[name] = entry

    def _find(self, name: str) -> Any:
        """Return the entry of a name: an exact match, else one in any case. Registered entries precede the fallback."""
        tables = (self._entries, self._fallback())
        for same in (str, str.casefold):
            for table in tables:
                for key, entry in table.items():
                    if same(key) == same(name):
                        return entry
        return None

    def _entry_points(self) -> Sequence[metadata.EntryPoint]:
        return [] if self._group is None else list(metadata.entry_points(group=self._group))

    def _load_entry_points(self, name: str) -> None:
        """Load the entry point of that name or, failing that, all of them, since modules may register any names."""
        points = self._entry_points()
        for point in [point for point in points if point.name == name] or points:
            try:
                loaded = point.load()
            except Exception as error:
                # A broken plugin must not break others. The error of a missing name mentions it.
                self._broken[point.name] = f"{type(error).__name__}: {error}"
                _log.warning("entry point %r of %s cannot be loaded: %s", point.name, self._group, error)
                continue
            if callable(loaded) and self._find(point.name) is None:
                self._add(point.name, loaded)


def _qualified_registry_name(entry: Any) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"


_MMENGINES: dict[str, Any] = {"TorchAdafactor": torch.optim.Adafactor}
"""mmengine's names of torch classes, where they differ: there, "Adafactor" is the one of transformers."""


def _optimizers_outside_registry() -> dict[str, Any]:
    """Return torch's optimizers by class name, and those that stores know by their names.

    Gluon's are available as "gluon:NAME" too, because torch has classes of the same names.
    """
    kinds = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    base = torch.optim.Optimizer
    found: dict[str, Any] = {n: cls for n, cls in kinds.items() if issubclass(cls, base) and cls is not base}
    of_torch = {name.casefold() for name in found}
    others = {
        name: cls
        for name, cls in registered_optimizers().items()
        if name.removeprefix("torch:") not in of_torch
    }
    found |= {cls.__name__ if name.startswith("torch:") else name: cls for name, cls in others.items()}
    found |= {name: cls for name, cls in _MMENGINES.items() if name not in found}
    found |= {f"gluon:{name}": cls for name, cls in registered_optimizers().items() if ":" not in name}
    return found | {name: cls for name, cls in registered_optimizers().items() if name.startswith("torch:")}


def _register_with_stores(cls: Any) -> None:
    """Register an optimizer class for stores and servers, too; a server imports the same module.

    An unknown torch class gets whole keys, which is right for every class that treats parameters independently.
    """
    if not isinstance(cls, type) or cls in registered_optimizers().values():
        return
    if issubclass(cls, Optimizer):
        register(cls)
    elif issubclass(cls, torch.optim.Optimizer) and not issubclass(cls, torch.optim.LBFGS):
        register(cls, elementwise=False)


OPTIMIZERS = Registry(
    "optimizer",
    "kvtrainer.optimizers",
    fallback=_optimizers_outside_registry,
    on_register=_register_with_stores,
)
"""Every class of torch.optim by its name, and Gluon's by theirs; with the prefix "gluon:" where both have one."""
OPTIMIZER_CONSTRUCTORS = Registry("optimizer constructor", "kvtrainer.optimizer_constructors")
"""Called with (optimizer_cfg, paramwise_cfg); the result is called with a model and returns a torch optimizer."""
OPTIMIZER_BUILDERS = OPTIMIZER_CONSTRUCTORS
"""MMCV's name for the same registry."""
HOOKS = Registry("hook", "kvtrainer.hooks")
"""The hooks of this package that update weights, or write values of parameter groups."""
MODELS = Registry("model", "kvtrainer.models")
"""Models that a Strategy builds from a dict; only those that scripts and plugins register."""
SCHEDULES = Registry("schedule", "kvtrainer.schedules")
"""Called with an optimizer and options; returns a schedule, which a dict can name beside the built-in ones."""
OPTIM_WRAPPERS = Registry("optimizer wrapper", "kvtrainer.optim_wrappers")
"""Subclasses of Trainer that the type of an `optim_wrapper` can name beside the built-in ones."""
