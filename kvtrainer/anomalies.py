"""Faults of a loss before its backward pass: parameters that it does not depend on, and values such as NaN."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parameter import is_lazy

from kvstore_server import check
from kvtrainer.errors import (
    AnomalousParametersError,
    ArgumentTypeError,
    ConfigurationError,
    NonFiniteLossError,
)

_log = logging.getLogger(__name__)

_REENTRANT = "CheckpointFunctionBackward"
"""The node of torch.utils.checkpoint with use_reentrant=True, which hides what was computed inside it."""


class Unused(NamedTuple):
    """A parameter that a loss does not depend on."""

    name: str
    shape: tuple[int, ...]


def find_unused_parameters(loss: Any, named_parameters: Any) -> list[Unused]:
    """Find parameters that get no gradient from a loss: unused in the forward pass, or with no way from there to it.

    Walks over the graph that autograd has recorded, before the backward pass frees it; no gradient is computed, and
    nothing is waited for. Frozen parameters, and those of lazy modules that have no shape yet, are left out.

    Parameters that were used only inside `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` are reported
    although they get a gradient, because that records nothing of what happens inside; use_reentrant=False does.
    A region that torch.compile made counts as using all parameters that it was given.

    Args:
        loss: a tensor, or losses in sequences or mappings: that of each replica, say.
        named_parameters: (name, parameter) pairs, a mapping, or a Module. For a parameter there may be a sequence of
            its replicas; it is used if one of them is.

    Returns:
        Names and shapes, in the order of the parameters.
    """
    return _search(losses_of(loss), named_parameters)[0]


def report_anomalies(
    loss: Any, named_parameters: Any, mode: bool | str = "log", logger: logging.Logger | None = None
) -> list[Unused]:
    """Log the parameters that `find_unused_parameters` finds, or raise if any.

    Args:
        loss, named_parameters: as of `find_unused_parameters`.
        mode: "log" or True writes a line at level ERROR for each; "raise" raises; False looks for nothing.
        logger: where to; this module's by default.

    Raises:
        AnomalousParametersError: `mode` is "raise" and there is one; names all of them.
        ConfigurationError: `mode` is something else.
    """
    what = checked_mode(mode)
    if what is False:
        return []
    unused, is_hidden = _search(losses_of(loss), named_parameters)
    if not unused:
        return []
    hint = (
        " The loss depends on a reentrant activation checkpoint, which hides what is used inside it: these may be "
        "false alarms, which use_reentrant=False avoids."
        if is_hidden
        else ""
    )
    if what == "raise":
        listed = ", ".join(f"{name} with shape {list(shape)}" for name, shape in unused)
        raise AnomalousParametersError(
            f"{len(unused)} parameters are not in the computational graph of the loss, so they would get no gradient: "
            f"{listed}. Freeze them (requires_grad=False), or let the loss depend on them.{hint}"
        )
    to = _log if logger is None else logger
    for name, shape in unused:
        # MMCV's own call and line: a runner's logger may be something that has only this.
        text = f"{name} with shape {torch.Size(shape)} is not in the computational graph"
        to.log(level=logging.ERROR, msg=text)
    if hint:
        to.warning("%s", hint.strip())
    return unused


def checked_mode(mode: Any) -> Literal[False, "log", "raise"]:
    """Read the option `detect_anomalous_params` as False, "log" or "raise".

    Raises:
        ConfigurationError: it is nothing of the kind.
    """
    if mode is False or mode is None:
        return False
    if mode is True or mode == "log":
        return "log"
    if mode == "raise":
        return "raise"
    raise ConfigurationError(f"detect_anomalous_params must be False, True ('log') or 'raise', got {mode!r}")


def check_loss(loss: Any, on_nonfinite: str = "raise") -> bool:
    """Return whether a loss may be used: whether all of it is finite, as far as that matters. Waits for its value.

    Args:
        loss: a tensor, or losses in sequences or mappings.
        on_nonfinite: "raise"; "skip", which leaves the consequence to the caller; "ignore", which does not even look.

    Raises:
        NonFiniteLossError: it is infinite or not a number, and `on_nonfinite` is "raise".
        ConfigurationError: `on_nonfinite` is something else.
    """
    check.one_of("on_nonfinite", on_nonfinite, ("raise", "skip", "ignore"))
    if on_nonfinite == "ignore":
        return True
    problem = describe_nonfinite(loss)
    if problem is None:
        return True
    if on_nonfinite == "raise":
        _log.critical("%s", problem)
        raise NonFiniteLossError(
            f"{problem}; look at the data and the learning rate, or go on without such steps by on_nonfinite='skip'"
        )
    return False


def describe_nonfinite(loss: Any) -> str | None:
    """Return 'Loss is NaN' or 'Loss is infinite'; None if all of it is finite. Waits for its value."""
    losses = [one.detach() for one in losses_of(loss)]
    if all(bool(torch.isfinite(one).all()) for one in losses):
        return None
    is_nan = any(bool(torch.isnan(one).any()) for one in losses)
    return "Loss is NaN" if is_nan else "Loss is infinite"


def losses_of(loss: Any) -> list[Tensor]:
    """List the tensors in a loss, which may be nested in sequences and mappings.

    Raises:
        ArgumentTypeError: there is something else in it.
    """
    if isinstance(loss, Tensor):
        return [loss]
    parts: Iterable[Any]
    if isinstance(loss, Mapping):
        parts = loss.values()
    elif isinstance(loss, Sequence) and not isinstance(loss, str):
        parts = loss
    else:
        raise ArgumentTypeError(
            f"a loss is a tensor, or a list or dict of them, got {type(loss).__name__}: {loss!r:.80}"
        )
    return [tensor for part in parts for tensor in losses_of(part)]


def _search(losses: Sequence[Tensor], named_parameters: Any) -> tuple[list[Unused], bool]:
    """Find the unused parameters, and whether a part of the graph cannot be seen."""
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    places: list[tuple[Unused, list[Node]]] = []
    for name, given in pairs:
        replicas = [given] if isinstance(given, Tensor) else list(given)
        trained = [p for p in replicas if p.requires_grad and not is_lazy(p)]
        if trained:
            # Where a gradient would be added up. Holding the node keeps its identity.
            nodes = [get_gradient_edge(p).node for p in trained]
            places.append((Unused(name, tuple(trained[0].shape)), nodes))
    reached = _reached([get_gradient_edge(loss).node for loss in losses if loss.requires_grad])
    unused = [found for found, nodes in places if not any(node in reached for node in nodes)]
    return unused, any(type(node).__name__ == _REENTRANT for node in reached)


def _reached(roots: Iterable[Node]) -> set[Node]:
    """Collect all nodes of the graph; without recursion, because graphs are deeper than Python's stack."""
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen
