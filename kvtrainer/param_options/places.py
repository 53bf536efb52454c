"""Where in its model each parameter is: what rules for parameters ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kvtrainer.errors import ConfigurationError


@dataclass(frozen=True)
class Place:
    """A parameter, and where in its model it is.

    `given` is what becomes of it in a group's "params": the parameter, or the list of its replicas.
    """

    name: str
    parameter: Tensor
    given: Any
    holder: Module | None = None
    parent: Module | None = None
    """The module around the one that holds it; None at the top."""

    @property
    def own_name(self) -> str:
        """The last part of the name, such as "bias"."""
        return self.name.rpartition(".")[2]

    @property
    def module_name(self) -> str:
        """The name of the module that holds it; empty at the top."""
        return self.name.rpartition(".")[0]

    @property
    def module(self) -> Module:
        """The module that holds it.

        Raises:
            ConfigurationError: only names and parameters are known.
        """
        if self.holder is None:
            raise ConfigurationError(
                f"a rule asks what kind of module {self.name!r} belongs to, and only names and parameters were given; "
                "give the Module itself"
            )
        return self.holder


def places_in(model: Any) -> list[Place]:
    """The parameters of a model as often as modules hold them, in the model's order.

    Takes a Module, one with replicas (`kvtrainer.DataParallel`), a dict, or pairs of names and parameters; in place of
    a parameter there may be a list of replicas.

    Raises:
        ConfigurationError: it is something else, in which parameters have no names.
    """
    if hasattr(model, "named_replicas"):
        rows_of = {id(replicas[0]): replicas for _, replicas in model.named_replicas()}
        return [replace(place, given=rows_of[id(place.parameter)]) for place in _walk(model.module, "", None)]
    if isinstance(model, Module):
        return list(_walk(model, "", None))
    rows: Iterable[Any] = model.items() if isinstance(model, Mapping) else model
    named: list[Any] = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Tensor) else []
    if not named or not all(
        isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str) for row in named
    ):
        raise ConfigurationError(
            "rules find parameters by name and by the kind of their module; give a Module, named_parameters() or a "
            f"dict of parameters, not {type(model).__name__}"
        )
    if isinstance(model, Mapping):
        named.sort(key=lambda row: str(row[0]))  # as the Trainer takes them
    return [Place(name, given[0] if isinstance(given, Sequence) else given, given) for name, given in named]


def unwrapped(model: Any) -> Any:
    """The module inside a wrapper: DataParallel, DistributedDataParallel, or one that has nothing but `module`."""
    while isinstance(model, Module) and not hasattr(model, "named_replicas"):
        inner = model._modules.get("module")
        is_wrapper = isinstance(model, DataParallel | DistributedDataParallel) or (
            set(model._modules) == {"module"} and not any(True for _ in model.parameters(recurse=False))
        )
        if inner is None or not is_wrapper:
            break
        model = inner
    return model


def _walk(module: Module, prefix: str, parent: Module | None) -> Iterable[Place]:
    for name, parameter in module.named_parameters(recurse=False):
        yield Place(f"{prefix}{name}", parameter, parameter, module, parent)
    for name, child in module.named_children():
        yield from _walk(child, f"{prefix}{name}.", module)
