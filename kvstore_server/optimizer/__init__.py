"""Optimizers of a store: Gluon's family, torch's, user-defined ones, applied to elements, keys and rows."""

from kvstore_server.optimizer.apply import apply_update, coalesce_rows, update_rows
from kvstore_server.optimizer.base import Optimizer
from kvstore_server.optimizer.registry import create, create_from_spec, register, spec_for_store
from kvstore_server.optimizer.state import State, States

__all__ = [
    "Optimizer",
    "State",
    "States",
    "apply_update",
    "coalesce_rows",
    "create",
    "create_from_spec",
    "register",
    "spec_for_store",
    "update_rows",
]
