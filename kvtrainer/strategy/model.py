"""Build a model, look inside of its wrappers, and take, load and share its weights."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvtrainer.errors import ArgumentTypeError, ConfigurationError, StateMismatchError
from kvtrainer.parallel import DataParallel
from kvtrainer.registry import MODELS
from kvtrainer.strategy.agreement import Agreement
from kvtrainer.strategy.checkpoint import pack_tree, unpack_tree

ReviseKeys = Sequence[tuple[str, str]]
WITHOUT_WRAPPER: ReviseKeys = ((r"^module\.", ""),)
"""Takes away what DistributedDataParallel puts before every name."""
_INSIDE = ("_orig_mod", "module")
"""Names under which wrappers keep the model: torch.compile, and DistributedDataParallel and its like."""


class LoadReport(NamedTuple):
    """Names that a model and a checkpoint do not have in common."""

    missing: list[str]
    """In the model only: these have the values that they had before."""
    unexpected: list[str]
    """In the checkpoint only."""
    mismatched: list[str]
    """In both, with other shapes, or no tensor in the checkpoint; they were not loaded. Each says which."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = zip(("missing", "unexpected", "of another shape"), self, strict=True)
        return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names) or "everything fits"


def build_model(model: nn.Module | Mapping[str, Any]) -> nn.Module:
    """Return the model itself, or build it from a dict with the `type` of a registered one.

    Raises:
        ArgumentTypeError: it is neither.
        UnregisteredNameError: there is no such model.
    """
    built = MODELS.build(model) if isinstance(model, Mapping) else model
    if not isinstance(built, nn.Module):
        raise ArgumentTypeError(
            f"model should be a nn.Module object or dict, but got {type(built).__name__}: {built!r:.80}"
        )
    return built


def compile_model(
    model: nn.Module, compile: bool | Mapping[str, Any] | None, log: logging.Logger
) -> nn.Module:
    """Let torch.compile compile a method of the model, in place; the names of its weights stay as they are.

    Args:
        compile: False or None leaves the model as it is, and so does disable=True; a dict has the method, `target`
            ('forward'), and options of torch.compile.

    Raises:
        ConfigurationError: the model has no such method, or `compile` is something else.
    """
    if compile is None or compile is False:
        return model
    if compile is not True and not isinstance(compile, Mapping):
        raise ArgumentTypeError(f"compile must be a bool or a dict, got {compile!r:.80}")
    options = {} if compile is True else dict(compile)
    target = options.pop("target", "forward")
    if options.get("disable", False):
        return model
    if not callable(getattr(model, target, None)):
        raise ConfigurationError(f"{type(model).__name__} has no method {target!r} to compile")
    if target == "forward":
        model.compile(**options)
    else:
        setattr(model, target, torch.compile(getattr(model, target), **options))
    log.info("%s of the model is compiled: the first iterations will be slow", target)
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers; of replicas the first."""
    *_, inner = _wrappers(model)
    return inner


def trained(model: nn.Module) -> nn.Module:
    """Return what a Trainer is given of a model: all its replicas, else what is inside of wrappers."""
    return next((one for one in _wrappers(model) if isinstance(one, DataParallel)), unwrapped(model))


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over a model, what is inside of it if it is a wrapper, and so on."""
    inner: nn.Module | None = model
    while inner is not None:
        yield inner
        name = next((name for name in _INSIDE if _is_wrapper(inner, name)), None)
        inner = None if name is None else getattr(inner, name)


def take_weights(model: nn.Module) -> dict[str, Any]:
    """Return the weights and buffers of a model, by name, on the CPU."""
    state = unwrapped(model).state_dict()
    return {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in state.items()}


def load_weights(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = False,
    revise_keys: ReviseKeys = WITHOUT_WRAPPER,
) -> LoadReport:
    """Load weights into a model, what fits of them; a report of the rest.

    Args:
        strict: Raise if anything does not fit.
        revise_keys: Pairs of a regular expression and its replacement, applied to every name in order.

    Raises:
        StateMismatchError: `strict`, and something does not fit; nothing has been loaded then.
        ConfigurationError: two names of the checkpoint become the same one, or a pattern is malformed.
    """
    given = _revised(state_dict, revise_keys)
    inner = unwrapped(model)
    own = inner.state_dict()
    mismatched = {
        name: f"{name} ({_shape(value)} in the checkpoint, {_shape(own[name])} in the model)"
        for name, value in given.items()
        if isinstance(own.get(name), Tensor) and _differ(own[name], value)
    }
    report = LoadReport(
        [name for name in own if name not in given],
        [name for name in given if name not in own],
        list(mismatched.values()),
    )
    if strict and report:
        raise StateMismatchError(
            f"the checkpoint does not fit the model, which is unchanged: {report}. Load it with strict=False to take "
            "what fits"
        )
    inner.load_state_dict({name: v for name, v in given.items() if name not in mismatched}, strict=False)
    for wrapper in _wrappers(model):
        if isinstance(wrapper, DataParallel):
            wrapper.broadcast()
    return report


@torch.no_grad()
def share_weights(model: nn.Module, agreement: Agreement) -> None:
    """Give every worker rank 0's weights and buffers, where they differ; collective."""
    if agreement.size == 1:
        return
    own = {name: v for name, v in unwrapped(model).state_dict().items() if _has_values(v)}
    mine = pack_tree(own)
    # Weights that were drawn with the same seed need not travel.
    marks = agreement.all_gather(_mark(mine))
    if all(mark == marks[0] for mark in marks):
        return
    found = unpack_tree(agreement.broadcast(mine))
    with agreement.all_or_none("take over the weights of rank 0"):
        if agreement.rank != 0:
            # What has no values yet gets them at the first step.
            load_weights(model, {**unwrapped(model).state_dict(), **found}, strict=True, revise_keys=())


def _has_values(value: Any) -> bool:
    return isinstance(value, Tensor) and not nn.parameter.is_lazy(value)


def _mark(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _differ(own: Tensor, value: Any) -> bool:
    if not isinstance(value, Tensor):
        return True
    return not nn.parameter.is_lazy(own) and own.shape != value.shape


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "no shape yet" if nn.parameter.is_lazy(value) else str(list(value.shape))


def _is_wrapper(model: nn.Module, name: str) -> bool:
    """Check if all that a module has is one inner module of this name."""
    inner = model._modules.get(name)
    return inner is not None and len(model._modules) == 1 and not model._parameters and not model._buffers


def _revised(state_dict: Mapping[str, Any], revise_keys: ReviseKeys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, value in state_dict.items():
        revised = name
        try:
            for pattern, replacement in revise_keys:
                revised = re.sub(pattern, replacement, revised)
        except (re.error, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"revise_keys must be pairs of a pattern and a replacement, got {revise_keys!r:.200} ({error})"
            ) from error
        if revised in found:
            raise ConfigurationError(
                f"revise_keys makes {revised!r} out of both {origin[revised]!r} and {name!r}; give other patterns"
            )
        found[revised], origin[revised] = value, name
    return found
