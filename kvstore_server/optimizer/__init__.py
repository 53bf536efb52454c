"""Optimizers of a store: Gluon's family, torch's, user-defined ones, and their application to slices."""

from kvstore_server.optimizer.base import Optimizer
from kvstore_server.optimizer.registry import create, create_from_spec, register
from kvstore_server.optimizer.slices import SliceState, update_slice

__all__ = ["Optimizer", "SliceState", "create", "create_from_spec", "register", "update_slice"]
