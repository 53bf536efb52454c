"""Optimizers of a store: Gluon's family, torch's, user-defined ones, and their application to slices, keys and rows."""

from kvstore_server.optimizer.base import Optimizer
from kvstore_server.optimizer.registry import create, create_from_spec, register, spec_for_store
from kvstore_server.optimizer.rows import coalesce_rows, update_rows
from kvstore_server.optimizer.slices import SliceState, update_slice
from kvstore_server.optimizer.whole import KeyState, update_key

__all__ = [
    "KeyState",
    "Optimizer",
    "SliceState",
    "coalesce_rows",
    "create",
    "create_from_spec",
    "register",
    "spec_for_store",
    "update_key",
    "update_rows",
    "update_slice",
]
