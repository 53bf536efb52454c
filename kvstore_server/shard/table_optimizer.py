"""Which optimizer updates a hash table: one of its own, described as text in its options, or that of all keys."""

from __future__ import annotations

import functools
import json
import math

from kvstore_server.errors import ConfigurationError
from kvstore_server.optimizer.apply import leaves_other_rows
from kvstore_server.optimizer.base import Hyper, Optimizer
from kvstore_server.optimizer.gluon import SGD
from kvstore_server.optimizer.registry import checked_optimizer_spec, create_optimizer_from_spec
from kvstore_server.plan import HashTableOptions


def describe_table_optimizer(optimizer: Optimizer, has_rate: bool) -> str:
    """Describe the optimizer of a single table as text, for `HashTableOptions.optimizer`.

    Args:
        has_rate: Whether it has a learning rate of its own; otherwise it has that of the parameter's group.

    Raises:
        ConfigurationError: It has an option that means nothing for a table.
    """
    described = checked_optimizer_spec(optimizer)
    others = sorted(described.keys() - {"name", "hyper", "rescale_grad", "multi_precision"})
    if others or described.pop("rescale_grad") != 1.0:
        raise ConfigurationError(
            f"the optimizer of a table has no {', '.join(others) or 'rescale_grad'}; give that to the Trainer's"
        )
    if not has_rate:
        described["hyper"].pop("lr", None)
    return json.dumps(described, sort_keys=True)


def table_optimizer_name(described: str) -> str | None:
    """Return the name of an optimizer that `describe_table_optimizer` has described, if there is one."""
    try:
        spec = json.loads(described) if described else {}
    except (ValueError, RecursionError):
        return described
    return spec.get("name") if isinstance(spec, dict) else described


@functools.lru_cache(maxsize=256)
def own_table_optimizer(described: str) -> tuple[Optimizer, bool]:
    """Rebuild an optimizer; return it and whether it has a learning rate of its own."""
    try:
        spec = json.loads(described)
    except (ValueError, RecursionError):
        spec = None
    if not isinstance(spec, dict) or spec.keys() - {"name", "hyper", "multi_precision"}:
        raise ConfigurationError(f"this does not describe the optimizer of a table: {described!r:.80}")
    optimizer = create_optimizer_from_spec(spec)
    optimizer.try_out(optimizer.hyper)
    return optimizer, "lr" in spec["hyper"]


def table_optimizer(options: HashTableOptions | None, default: Optimizer) -> tuple[Optimizer, bool]:
    """Return the optimizer of a key, and whether it has a learning rate of its own.

    Args:
        options: Those of the hash table; None for another key.
        default: The optimizer of keys that have none of their own.

    Raises:
        ConfigurationError, UnknownNameError: The table's own optimizer cannot be rebuilt here.
    """
    return (
        (default, False)
        if options is None or not options.optimizer
        else own_table_optimizer(options.optimizer)
    )


def row_momentum(optimizer: Optimizer, hyper: Hyper) -> float:
    """Return mu if an update without a gradient is `m *= mu; w -= m`, m being the state 'momentum_buffer'; else 0.

    Rows without gradient are then moved when they are read or trained next.
    """
    if type(optimizer) is not SGD or hyper["lazy_update"] or hyper["weight_decay"]:
        return 0.0
    mu = float(hyper["momentum"])
    return mu if hyper["momentum_correction"] in (None, False) and 0.0 < mu < 1.0 else 0.0


def check_hash_table(what: str, options: HashTableOptions, optimizer: Optimizer, hyper: Hyper) -> None:
    """Raise ConfigurationError if an optimizer does not update rows one by one, without knowing the others, or if its
    options do not fit the table's `weight_decay` or `max_norm`.
    """
    if options.weight_decay and not 0 <= hyper.get("lr", math.inf) * options.weight_decay < 1:
        raise ConfigurationError(
            f"{what} has weight_decay={options.weight_decay:g} and a learning rate of "
            f"{hyper.get('lr')}; their product must be below 1, and not negative"
        )
    moves_all = row_momentum(optimizer, hyper) > 0.0
    if moves_all and options.max_norm:
        raise ConfigurationError(
            f"{what} has max_norm={options.max_norm:g}, and momentum={hyper['momentum']:g} that moves "
            "rows without gradient, too, whose norms would not be limited; use lazy_update=True, or leave out max_norm"
        )
    needs_all = type(optimizer).hyper_for_rows is not Optimizer.hyper_for_rows or optimizer.positioned
    fits = moves_all or leaves_other_rows(optimizer, hyper)
    if needs_all or optimizer.may_raise or not fits:
        given = [f"{one}={hyper[one]}" for one in ("momentum", "weight_decay", "lazy_update") if one in hyper]
        raise ConfigurationError(
            f"optimizer {optimizer.registered_name} with {', '.join(given) or 'these options'} cannot update "
            f"{what}: it changes rows that have no gradient, needs to see all rows, or may raise in the middle "
            "of an update; use sgd, adagrad, groupadagrad, rowadam, ftrl, or adam with lazy_update=True, and "
            "weight_decay of the table in place of the optimizer's"
        )
