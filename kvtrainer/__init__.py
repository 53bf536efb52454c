"""A Gluon-style imperative trainer for PyTorch over local and parameter-server key-value stores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore_server.version import __version__

if TYPE_CHECKING:
    from kvtrainer import amp, errors, kvstore, lr_scheduler, optimizer, utils
    from kvtrainer.row_sparse import RowSparseParameter
    from kvtrainer.trainer import Trainer

__all__ = [
    "RowSparseParameter",
    "Trainer",
    "__version__",
    "amp",
    "errors",
    "kvstore",
    "lr_scheduler",
    "optimizer",
    "utils",
]

_CLASSES = {"RowSparseParameter": "row_sparse", "Trainer": "trainer"}
"""Class → its module."""


def __getattr__(name: str) -> Any:
    # On first use: importing torch takes longer than all that kvlaunch does, and kvlaunch has no use for it.
    if name in _CLASSES:
        return getattr(importlib.import_module(f"kvtrainer.{_CLASSES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"kvtrainer.{name}")
    raise AttributeError(f"module 'kvtrainer' has no attribute {name!r}")
