"""MMCV 1.x runners with a Trainer. Importing this registers our hooks with MMCV, as KVOptimizerHook and so on.

    import kvtrainer.integrations.mmcv
    runner = EpochBasedRunner(model, optimizer=kvtrainer.Trainer(model, ...), ...)
    runner.register_training_hooks(None, optimizer_config=dict(type="KVOptimizerHook", grad_clip=dict(max_norm=35)))

In a configuration file: custom_imports = dict(imports=["kvtrainer.integrations.mmcv"]). The module also has the classes
under these names, for subclasses.
"""

from __future__ import annotations

from typing import Any

from kvtrainer import hooks
from kvtrainer.integrations import guard_import

with guard_import("mmcv", install="mmcv<2"):
    from mmcv.runner import HOOKS, Hook


class _ReservedMMCVPriority:
    """Hides a hook's own priority: MMCV refuses hooks that have one, and sets it itself."""

    def __get__(self, hook: object, kind: type | None = None) -> Any:
        raise AttributeError("priority")


for _name, _cls in vars(hooks).items():
    if _name.endswith(("OptimizerHook", "UpdaterHook")):
        _made = type(
            f"KV{_name}", (_cls, Hook), {"priority": _ReservedMMCVPriority(), "__module__": __name__}
        )
        globals()[_made.__name__] = HOOKS.register_module(module=_made, force=True) or _made
