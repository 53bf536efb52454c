"""Checks of a loss before its backward pass: parameters it does not depend on, and NaN or infinite values."""

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
"""The autograd node of torch.utils.checkpoint with use_reentrant=True. It hides what was computed inside."""


class Unused(NamedTuple):
    """A parameter that a loss does not depend on."""

    name: str
    shape: tuple[int, ...]


def find_unused_parameters(loss: Any, named_parameters: Any) -> list[Unused]:
    """Find parameters that would get no gradient from a loss, because it does not depend on them.

    This walks the autograd graph before the backward pass frees it. It computes no gradient and does not synchronize
    with a device. Frozen parameters, and uninitialized ones of lazy modules, are left out.

    Parameters used only inside `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` are reported although they
    get a gradient, because the graph does not record what happens inside; with use_reentrant=False it does. A region
    compiled by torch.compile counts as using all parameters that were passed to it.

    Args:
        loss: A tensor, or losses in sequences or mappings (for example one per replica).
        named_parameters: (name, parameter) pairs, a mapping, or a Module. A sequence of replicas may stand for a
            parameter, which is used if one of them is.

    Returns:
        Names and shapes, in the order of the parameters.
    """
    return _search_unused(losses_of(loss), named_parameters)[0]


def report_anomalies(
    loss: Any, named_parameters: Any, mode: bool | str = "log", logger: logging.Logger | None = None
) -> list[Unused]:
    """Log the parameters that `find_unused_parameters` finds, or raise if there are any.

    Args:
        loss, named_parameters: As in `find_unused_parameters`.
        mode: "log" or True logs a line at level ERROR for each; "raise" raises; False does nothing.
        logger: Where to log; this module's logger by default.

    Raises:
        AnomalousParametersError: `mode` is "raise" and there are unused parameters; names all of them.
        ConfigurationError: `mode` is something else.
    """
    what = checked_mode(mode)
    if what is False:
        return []
    unused, is_hidden = _search_unused(losses_of(loss), named_parameters)
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
        # The same call and text as MMCV: a runner's logger may offer no other method.
        text = f"{name} with shape {torch.Size(shape)} is not in the computational graph"
        to.log(level=logging.ERROR, msg=text)
    if hint:
        to.warning("%s", hint.strip())
    return unused


def checked_mode(mode: Any) -> Literal[False, "log", "raise"]:
    """Return the option `detect_anomalous_params` as False, "log" or "raise".

    Raises:
        ConfigurationError: It is something else. True means "log", None means False.
    """
    if mode is False or mode is None:
        return False
    if mode is True or mode == "log":
        return "log"
    if mode == "raise":
        return "raise"
    raise ConfigurationError(f"detect_anomalous_params must be False, True ('log') or 'raise', got {mode!r}")


def check_loss(loss: Any, on_nonfinite: str = "raise") -> bool:
    """Return whether a loss may be used: it is finite, or need not be. Blocks until its value is known.

    Args:
        loss: A tensor, or losses in sequences or mappings.
        on_nonfinite: "raise"; "skip", where the caller acts on False; "ignore", which always returns True without a
            look.

    Raises:
        NonFiniteLossError: The loss is infinite or NaN, and `on_nonfinite` is "raise".
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
    """Return 'Loss is NaN' or 'Loss is infinite', or None if all of it is finite. Blocks until its value is known."""
    losses = [one.detach() for one in losses_of(loss)]
    if all(bool(torch.isfinite(one).all()) for one in losses):
        return None
    is_nan = any(bool(torch.isnan(one).any()) for one in losses)
    return "Loss is NaN" if is_nan else "Loss is infinite"


def losses_of(loss: Any) -> list[Tensor]:
    """List the tensors of a loss, which may be nested in sequences and mappings.

    Raises:
        ArgumentTypeError: It contains something else.
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


def _search_unused(losses: Sequence[Tensor], named_parameters: Any) -> tuple[list[Unused], bool]:
    """Find the unused parameters. The flag is true if a reentrant checkpoint hides a part of the graph."""
    if isinstance(named_parameters, torch.nn.Module):
        named_parameters = named_parameters.named_parameters()
    pairs = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    places: list[tuple[Unused, list[Node]]] = []
    for name, given in pairs:
        replicas = [given] if isinstance(given, Tensor) else list(given)
        trained = [p for p in replicas if p.requires_grad and not is_lazy(p)]
        if trained:
            # The node that accumulates the gradient. A reference keeps it alive, so its identity stays valid.
            nodes = [get_gradient_edge(p).node for p in trained]
            places.append((Unused(name, tuple(trained[0].shape)), nodes))
    # A parameter is used if the walk from the losses comes to one of its nodes.
    reached = _reachable_graph_nodes([get_gradient_edge(loss).node for loss in losses if loss.requires_grad])
    unused = [found for found, nodes in places if not any(node in reached for node in nodes)]
    return unused, any(type(node).__name__ == _REENTRANT for node in reached)


def _reachable_graph_nodes(roots: Iterable[Node]) -> set[Node]:
    """Return all nodes that can be reached from these. Not recursive: graphs are deeper than Python's stack."""
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen
