"""The registries behind `kvtrainer.registry`, without what they hold.

A module registers its own hooks or constructors here when it is imported. `kvtrainer.registry` imports all of these
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
from kvstore_server.optimizer.registry import known
from kvtrainer.errors import ArgumentTypeError, RegistryError, UnregisteredNameError

_log = logging.getLogger(__name__)
_Entry = TypeVar("_Entry", bound=Callable[..., Any])


class Registry:
    """Names of classes and functions that configurations ask for by `type`.

    Args:
        name: What it holds, for messages.
        entry_point_group: The group of the entry points by which installed packages add to it; they are looked at when
            a name is not found.
        fallback: Gives what else is known, by name, where nothing of that name was registered.
        on_register: Called with everything that is registered.

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
        """Entry points that could not be loaded, and why."""

    def __repr__(self) -> str:
        return f"Registry({self.name!r}, {sorted(self._entries)})"

    def __contains__(self, name: object) -> bool:
        known = isinstance(name, str) and self._find(name) is not None
        return known or any(point.name == name for point in self._entry_points())

    def register(
        self, name: str | Sequence[str] | None = None, force: bool = False
    ) -> Callable[[_Entry], _Entry]:
        """Return a decorator that registers a class or function. Its name is `name`, or several, or its own.

        Args:
            force: Whether it may replace another one of that name.

        Raises:
            RegistryError: the name is taken; also a KeyError.
            ArgumentTypeError: it is used without parentheses, or with something that is no name.
        """
        names = [name] if isinstance(name, str) else name
        if names is not None and (
            not isinstance(names, Sequence) or not all(isinstance(one, str) for one in names)
        ):
            raise ArgumentTypeError(f"a {self.name} is named by a str, got {name!r:.80}; write @….register()")

        def add(entry: _Entry) -> _Entry:
            """Register a class or function under the names."""
            if not callable(entry) or (names is None and not hasattr(entry, "__name__")):
                raise ArgumentTypeError(
                    f"a {self.name} is a class or function with a name, got {entry!r:.80}"
                )
            own = [entry.__name__] if names is None else names
            for one in () if force else own:
                present = self._entries.get(one, self._fallback().get(one))
                if present not in (None, entry):
                    raise RegistryError(
                        f"the {self.name} {one!r} is {_where(present)} already; name {_where(entry)} otherwise, or "
                        "replace it with force=True"
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
        """`register` in the call forms of MMCV: `@R.register_module()`, `R.register_module(module=Class)`."""
        add = self.register(name, force)
        return add if module is None else add(module)

    def get(self, name: str) -> Any:
        """Return the class or function of that name; if there is none, that of the name in another case.

        Raises:
            UnregisteredNameError: there is none; also a KeyError. Its message has names that are similar.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(f"the name of a {self.name} is a str, got {name!r:.80}")
        found = self._find(name)
        if found is None:
            self._load_entry_points(name)
            found = self._find(name)
        if found is not None:
            return found
        known = [*self._entries.items(), *self._fallback().items()]
        names = {id(entry): other for other, entry in reversed(known)}  # of several the first
        others = sorted(names.values(), key=str.casefold)
        broken = "; ".join(f"entry point {point}: {reason}" for point, reason in self._broken.items())
        raise UnregisteredNameError(
            f"{name!r} is not in the {self.name} registry{did_you_mean(name, others) or '.'} Registered are "
            f"{', '.join(others) or 'none'}; custom_imports may name the module that registers it. {broken}".rstrip()
        )

    def build(self, cfg: Mapping[str, Any], **default_args: Any) -> Any:
        """Call what `cfg["type"]` names, or is, with the other entries of `cfg`; `default_args` fill in.

        Raises:
            ArgumentTypeError: `cfg` is no dict, or its type neither a name nor something to call.
            RegistryError: it has no "type".
            UnregisteredNameError: nothing of that name is registered.
        """
        kind, options = self.split(cfg)
        return kind(**{**default_args, **options})

    def split(self, cfg: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what `cfg["type"]` means, and the other entries. Raises as `build` does."""
        cfg = check.mapping(f"the configuration of a {self.name}", cfg, error=ArgumentTypeError)
        if "type" not in cfg:
            raise RegistryError(f"the configuration of a {self.name} needs a 'type', got {dict(cfg)!r:.200}")
        kind = cfg["type"]
        if not isinstance(kind, str) and not callable(kind):
            raise ArgumentTypeError(
                f"type of a {self.name} is a name, a class or a function, got {kind!r:.80}"
            )
        found = self.get(kind) if isinstance(kind, str) else kind
        return found, {str(key): value for key, value in cfg.items() if key != "type"}

    def _add(self, name: str, entry: Any) -> None:
        if self._on_register is not None:
            self._on_register(entry)
        self._entries[name] = entry

    def _find(self, name: str) -> Any:
        """Find what is known under a name: exactly, else in any case. What was registered comes first."""
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
        """Load the entry point of that name; if there is none, all, because modules may register any names."""
        points = self._entry_points()
        for point in [point for point in points if point.name == name] or points:
            try:
                loaded = point.load()
            except Exception as error:
                # What a plugin lacks must not keep others from working; whoever misses a name is told.
                self._broken[point.name] = f"{type(error).__name__}: {error}"
                _log.warning("entry point %r of %s cannot be loaded: %s", point.name, self._group, error)
                continue
            if callable(loaded) and self._find(point.name) is None:
                self._add(point.name, loaded)


def _where(entry: Any) -> str:
    return f"{getattr(entry, '__module__', '?')}.{getattr(entry, '__qualname__', entry)}"


_MMENGINES: dict[str, Any] = {"TorchAdafactor": torch.optim.Adafactor}
"""mmengine's names of torch's classes, where they differ: there "Adafactor" is that of transformers."""


def _other_optimizers() -> dict[str, Any]:
    """Collect torch's optimizers by class name, and those that stores know by theirs. Gluon's are "gluon:NAME", too."""
    kinds = {name: cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    base = torch.optim.Optimizer
    found: dict[str, Any] = {n: cls for n, cls in kinds.items() if issubclass(cls, base) and cls is not base}
    of_torch = {name.casefold() for name in found}
    others = {name: cls for name, cls in known().items() if name.removeprefix("torch:") not in of_torch}
    found |= {cls.__name__ if name.startswith("torch:") else name: cls for name, cls in others.items()}
    found |= {name: cls for name, cls in _MMENGINES.items() if name not in found}
    found |= {f"gluon:{name}": cls for name, cls in known().items() if ":" not in name}
    return found | {name: cls for name, cls in known().items() if name.startswith("torch:")}


def _tell_stores(cls: Any) -> None:
    """Register an optimizer class for servers, which import the same module.

    A torch class of which nothing is known is given whole keys, which is right for every class that treats its
    parameters one by one.
    """
    if not isinstance(cls, type) or cls in known().values():
        return
    if issubclass(cls, Optimizer):
        register(cls)
    elif issubclass(cls, torch.optim.Optimizer) and not issubclass(cls, torch.optim.LBFGS):
        register(cls, elementwise=False)


OPTIMIZERS = Registry(
    "optimizer", "kvtrainer.optimizers", fallback=_other_optimizers, on_register=_tell_stores
)
"""Knows every class of torch.optim by its name, and Gluon's by theirs: with "gluon:" before it where both have one."""
OPTIMIZER_CONSTRUCTORS = Registry("optimizer constructor", "kvtrainer.optimizer_constructors")
"""Takes (optimizer_cfg, paramwise_cfg); what it makes takes a model and returns a torch optimizer."""
OPTIMIZER_BUILDERS = OPTIMIZER_CONSTRUCTORS
"""MMCV's name of the same registry."""
HOOKS = Registry("hook", "kvtrainer.hooks")
"""Knows the hooks of this package that update, or write values of parameter groups."""
MODELS = Registry("model", "kvtrainer.models")
"""Modules that a Strategy builds from a dict; there are none but those that scripts and plug-ins register."""
SCHEDULES = Registry("schedule", "kvtrainer.schedules")
"""Takes an optimizer and options; makes a schedule that a dict can name beside the built-in ones."""
OPTIM_WRAPPERS = Registry("optimizer wrapper", "kvtrainer.optim_wrappers")
"""Classes derived from Trainer that the type of an `optim_wrapper` can name beside the built-in ones."""
