"""A Gluon-style trainer for PyTorch over local and parameter-server stores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore_server import __version__

if TYPE_CHECKING:
    from kvtrainer import (
        amp,
        anomalies,
        config,
        detectron,
        errors,
        hooks,
        kvstore,
        log_buffer,
        lr_scheduler,
        metrics,
        optimizer,
        parallel,
        precision,
        registry,
        schedules,
        strategy,
        utils,
    )
    from kvtrainer import kvstore as kv
    from kvtrainer.embedding import Embedding, EmbeddingBag, EmbeddingBagCollection
    from kvtrainer.jobs.cluster import local_cluster
    from kvtrainer.memory.row_sparse import RowSparseParameter
    from kvtrainer.options.paramwise import Rule
    from kvtrainer.parallel import DataParallel, build_data_parallel_model
    from kvtrainer.schedules import ParamSchedule
    from kvtrainer.states.delta import merge_states
    from kvtrainer.states.row_file import RowFile, lookup
    from kvtrainer.strategy import Strategy
    from kvtrainer.trainer.trainer import Trainer
    from kvtrainer.trainer.trainer_dict import TrainerDict

__all__ = [
    "DataParallel",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "ParamSchedule",
    "RowFile",
    "RowSparseParameter",
    "Rule",
    "Strategy",
    "Trainer",
    "TrainerDict",
    "__version__",
    "amp",
    "anomalies",
    "build_data_parallel_model",
    "config",
    "detectron",
    "errors",
    "hooks",
    "kv",
    "kvstore",
    "local_cluster",
    "log_buffer",
    "lookup",
    "lr_scheduler",
    "merge_states",
    "metrics",
    "optimizer",
    "parallel",
    "precision",
    "registry",
    "schedules",
    "strategy",
    "utils",
]

_CLASSES = {
    "DataParallel": "parallel",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "EmbeddingBagCollection": "embedding",
    "ParamSchedule": "schedules",
    "RowFile": "states.row_file",
    "RowSparseParameter": "memory.row_sparse",
    "Rule": "options.paramwise",
    "Strategy": "strategy",
    "Trainer": "trainer",
    "TrainerDict": "trainer.trainer_dict",
    "build_data_parallel_model": "parallel",
    "local_cluster": "jobs.cluster",
    "lookup": "states.row_file",
    "merge_states": "states.delta",
}
"""Class or function → its module."""
_MODULES = {"kv": "kvstore"}
"""Other name of a module → its own. `kv` is MXNet's name."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Modules are loaded on first use, because kvlaunch does not need torch, whose import takes longer than all it does.
    if name in _CLASSES:
        return getattr(importlib.import_module(f"kvtrainer.{_CLASSES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"kvtrainer.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'kvtrainer' has no attribute {name!r}")
