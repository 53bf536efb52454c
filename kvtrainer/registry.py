"""The registries: which class or function a `type` in a configuration names.

Importing this module makes everything built in available by name. torch's optimizers and the entry points of installed
plugins are looked up when a name is asked for. List modules of your own under `custom_imports`; see `kvtrainer.config`.
"""

from __future__ import annotations

# These register the built-in constructor and hooks.
from kvtrainer import config, hooks  # noqa: F401
from kvtrainer.common.registry_class import (
    HOOKS,
    MODELS,
    OPTIM_WRAPPERS,
    OPTIMIZER_BUILDERS,
    OPTIMIZER_CONSTRUCTORS,
    OPTIMIZERS,
    SCHEDULES,
    Registry,
)

__all__ = [
    "HOOKS",
    "MODELS",
    "OPTIMIZERS",
    "OPTIMIZER_BUILDERS",
    "OPTIMIZER_CONSTRUCTORS",
    "OPTIM_WRAPPERS",
    "SCHEDULES",
    "Registry",
]
