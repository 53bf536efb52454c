"""Gluon's learning-rate schedulers, as closed forms that can be asked, stored and sent."""

from kvstore_server.lr_scheduler.base import LRScheduler, create_from_spec, register
from kvstore_server.lr_scheduler.function import FunctionScheduler, as_scheduler
from kvstore_server.lr_scheduler.gluon import (
    CosineScheduler,
    FactorScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "FunctionScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "as_scheduler",
    "create_from_spec",
    "register",
]
