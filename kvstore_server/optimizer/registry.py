"""Find or create the optimizer that a name, a class or an instance means, and register users' classes.

The dictionary of names and the set of declared classes are the only state; only `register` changes them.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from kvstore_server.errors import ConfigurationError, UnknownNameError, did_you_mean
from kvstore_server.optimizer import gluon, layerwise, lr_scheduler, rowwise, torch_family
from kvstore_server.optimizer.base import Optimizer
from kvstore_server.optimizer.compat import MXNET2, split_compat_prefix
from kvstore_server.optimizer.torch_family import TorchClass, TorchOptimizer

_log = logging.getLogger(__name__)

AnyClass = type[Optimizer] | TorchClass
_Registered = TypeVar("_Registered", bound=AnyClass)

_registry: dict[str, AnyClass] = {
    **{cls.name: cls for cls in (*gluon.FAMILY, *layerwise.FAMILY)},
    "rowwise_adagrad": layerwise.GroupAdaGrad,
    rowwise.RowAdam.name: rowwise.RowAdam,
    **{torch_family.torch_name(cls).lower(): cls for cls in torch_family.ELEMENTWISE + torch_family.WHOLE},
}
_declared: set[TorchClass] = set()
"""Foreign torch classes that a user has declared elementwise."""


def register(cls: _Registered, *, elementwise: bool | None = None) -> _Registered:
    """Register an optimizer class by name; a decorator.

    A subclass of `Optimizer` gets its `name`, or else its class name in lower case; a subclass of
    torch.optim.Optimizer gets 'torch:ClassName'. An existing name is replaced, which is logged as a warning. A server
    needs the same registration: start it with --import MODULE.

    Args:
        cls: The class.
        elementwise: For a torch class, whether an element's update only needs that element's weight, gradient and
            state. By default registering declares that it does; with False the class gets whole keys, each in its
            shape. A subclass of `Optimizer` declares it itself.

    Raises:
        ConfigurationError: `elementwise` contradicts what is known of the class, or no store can run it.
    """
    if issubclass(cls, Optimizer):
        if elementwise not in (None, cls.elementwise):
            raise ConfigurationError(
                f"{_qualified_optimizer_name(cls)} has elementwise={cls.elementwise}, so register cannot take "
                f"elementwise={elementwise}; change the class"
            )
        name = cls.name
    else:
        name = torch_family.torch_name(cls)
        _register_as_elementwise(cls, elementwise)
    known = _registry.get(name.lower())
    if known is not None and known is not cls:
        _log.warning(
            "optimizer %r is now %s; it was %s",
            name.lower(),
            _qualified_optimizer_name(cls),
            _qualified_optimizer_name(known),
        )
    _registry[name.lower()] = cls
    return cls


def registered_optimizers() -> Mapping[str, AnyClass]:
    """Return the classes that `create` finds by name, under their names in lower case."""
    return MappingProxyType(_registry)


def create(optimizer: str | AnyClass | Optimizer | torch.optim.Optimizer, /, **options: Any) -> Optimizer:
    """Return the optimizer that a name (in any case), a class or an instance means.

    A plain name is Gluon's, 'mxnet1:sgd' is sgd with compat='mxnet1'; 'torch:SGD', a torch.optim class or an instance
    of one is torch's. An instance brings its own options.

    Raises:
        UnknownNameError: There is no optimizer of that name; lists the valid ones.
        ConfigurationError: An option is wrong, options are given with an instance, or no store can run the class.
    """
    if isinstance(optimizer, Optimizer | torch.optim.Optimizer):
        if options:
            raise ConfigurationError(
                "optimizer_params must be None if optimizer is an instance, which brings its own options; "
                f"got {', '.join(options)} beside a {type(optimizer).__name__}"
            )
        if isinstance(optimizer, Optimizer):
            return optimizer
        return TorchOptimizer.from_instance(optimizer, type(optimizer) in _declared)
    if isinstance(optimizer, str):
        name, release = split_compat_prefix(optimizer)
        if release is not None:
            if options.get("compat") not in (None, release):
                raise ConfigurationError(
                    f"{optimizer!r} contradicts compat={options['compat']!r}; give one of the two"
                )
            options["compat"] = release
        optimizer = _find_registered_class(name)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer | torch.optim.Optimizer):
        # A trial update now, so that impossible options fail here and not on a server.
        made = _create_from_class(optimizer, options)
        made.try_out(made.hyper)
        return made
    raise ConfigurationError(
        "an optimizer is a name, a class (Optimizer or torch.optim.Optimizer) or an instance of one, got "
        f"{optimizer!r}"
    )


def create_optimizer_from_spec(spec: Mapping[str, Any]) -> Optimizer:
    """Rebuild the optimizer that `Optimizer.spec` described.

    Raises:
        UnknownNameError: The name is not known in this process.
        ConfigurationError: The description is malformed or has a bad value.
    """
    name, hyper = spec.get("name"), spec.get("hyper")
    if (
        not isinstance(name, str)
        or not isinstance(hyper, Mapping)
        or not all(isinstance(key, str) for key in hyper)
    ):
        raise ConfigurationError(
            f"an optimizer's description needs a name and its numbers, got {dict(spec)!r}"
        )
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in hyper.items()}
    for key in ("rescale_grad", "multi_precision", "begin_num_update", "aggregate_num", "param_idx2name"):
        if key in spec:
            options[key] = spec[key]
    plain, release = split_compat_prefix(name)
    cls = _find_registered_class(plain)
    if release is not None or (issubclass(cls, Optimizer) and cls.mxnet1 is not None):
        # Explicit, because the environment variable of this process may differ from the describing one's.
        options["compat"] = release or MXNET2
    optimizer = _create_from_class(cls, options)
    if spec.get("lr_scheduler") is not None:
        # Not as an option, because 'lr' would then replace the scheduler's base_lr.
        optimizer.lr_scheduler = lr_scheduler.create_scheduler_from_spec(spec["lr_scheduler"])
    return optimizer


def checked_optimizer_spec(optimizer: Optimizer) -> dict[str, Any]:
    """Return `Optimizer.spec` for a store, which finds the class only by its name.

    Raises:
        UnknownNameError: The class is not registered in this process, so probably not on the servers either.
        ConfigurationError: The name means another class in this process, a torch instance cannot be rebuilt from its
            options, or as by `Optimizer.spec`.
    """
    cls = optimizer.cls if isinstance(optimizer, TorchOptimizer) else type(optimizer)
    name = optimizer.registered_name
    known = _registry.get(split_compat_prefix(name)[0].lower(), cls)
    if known is not cls:
        raise ConfigurationError(
            f"a store would take {name!r} for {_qualified_optimizer_name(known)}, and not for "
            f"{_qualified_optimizer_name(cls)}; give update_on_kvstore=False, which updates in the workers, "
            "or give the class a name of its own and register it"
        )
    if isinstance(optimizer, TorchOptimizer) and optimizer.is_foreign:
        torch_family.check_torch_class_supported(optimizer.cls)
        _find_registered_class(name)
        if optimizer.unbuildable:
            raise ConfigurationError(
                f"a store cannot rebuild {_qualified_optimizer_name(cls)}: {optimizer.unbuildable}. Give the class "
                "and its options instead of the instance, or update_on_kvstore=False, which updates in this process"
            )
    return optimizer.spec()


def preload_optimizers() -> None:
    """Import now what torch would import on an optimizer's first use, or avoid the import.

    torch's optimizers exclude some of their methods from torch.compile, for which they import the whole compiler on
    first use: more than a second of CPU time in which a server would not answer. A server compiles nothing, so the one
    method of torch's own classes that it calls is registered as already excluded. Foreign classes may use any of the
    others.
    """
    if not all(issubclass(cls, Optimizer) or torch_family.is_torchs_own(cls) for cls in _registry.values()):
        importlib.import_module("torch._dynamo")
    method = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    setattr(method, "__dynamo_disable", method)  # where torch._disable_dynamo caches its result
    create("torch:SGD", lr=0.1)  # if torch caches it elsewhere, the compiler is imported now


def _create_from_class(cls: AnyClass, options: dict[str, Any]) -> Optimizer:
    if issubclass(cls, Optimizer):
        return cls(**options)
    if options.get("compat", ...) is None:
        del options["compat"]
    if "compat" in options and torch_family.is_torchs_own(cls):
        raise ConfigurationError(
            f"compat={options['compat']!r} chooses between MXNet's formulas, and {torch_family.torch_name(cls)} has "
            "torch's; leave it out, or name one of Gluon's optimizers, such as 'sgd'"
        )
    return TorchOptimizer(cls, cls in _declared, **options)


def _find_registered_class(name: str) -> AnyClass:
    cls = _registry.get(name.lower())
    if cls is None:
        # A name such as 'torch:LBFGS' is a torch class nevertheless.
        prefix, _, own = name.partition(":")
        known = getattr(torch.optim, own, None) if prefix.lower() == "torch" else None
        if isinstance(known, type) and issubclass(known, torch.optim.Optimizer):
            return known
        raise UnknownNameError(
            f"there is no optimizer {name!r} in this process. A user-defined one must be registered in every process: "
            "call kvtrainer.optimizer.register in a module, import that here and start the servers with --import "
            "MODULE; or give update_on_kvstore=False, which updates in the workers. Known are "
            f"{', '.join(sorted(_registry))}{did_you_mean(name, _registry)}"
        )
    return cls


def _register_as_elementwise(cls: TorchClass, elementwise: bool | None) -> None:
    """Record whether a foreign torch class is elementwise; that of torch's own is known."""
    torch_family.check_torch_class_supported(cls)
    if torch_family.is_torchs_own(cls):
        is_elementwise = cls in torch_family.ELEMENTWISE
        if elementwise not in (None, is_elementwise):
            raise ConfigurationError(
                f"{torch_family.torch_name(cls)} is known to be {'' if is_elementwise else 'not '}elementwise, so "
                f"register cannot take elementwise={elementwise}; leave it out"
            )
    elif elementwise is False:
        _declared.discard(cls)
    else:
        _declared.add(cls)


def _qualified_optimizer_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
