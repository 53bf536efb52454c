"""Optimizers of a store: Gluon's family, torch's, user-defined ones, applied to elements, keys and rows."""

from kvstore_server.optimizer.apply import apply_update as apply_update
from kvstore_server.optimizer.apply import apply_update_to_rows as apply_update_to_rows
from kvstore_server.optimizer.base import Optimizer as Optimizer
from kvstore_server.optimizer.registry import checked_optimizer_spec as checked_optimizer_spec
from kvstore_server.optimizer.registry import create as create
from kvstore_server.optimizer.registry import create_optimizer_from_spec as create_optimizer_from_spec
from kvstore_server.optimizer.registry import register as register
from kvstore_server.optimizer.rows import coalesce_rows as coalesce_rows
from kvstore_server.optimizer.state import State as State
from kvstore_server.optimizer.state import States as States
