"""Gluon's learning-rate schedulers, for an optimizer's option `lr_scheduler`::

    schedule = kvtrainer.lr_scheduler.CosineScheduler(10_000, base_lr=0.1, warmup_steps=500)
    trainer = kvtrainer.Trainer(net.parameters(), "sgd", {"lr_scheduler": schedule})

Your own scheduler is a subclass of `LRScheduler` that defines `after_warmup`. If it is registered, it can also be
saved, and sent to servers that load its module with `kvstore-server --import MODULE`::

    @kvtrainer.lr_scheduler.register
    class InverseRoot(kvtrainer.lr_scheduler.LRScheduler):
        def after_warmup(self, num_update):
            return self.base_lr / max(num_update, 1) ** 0.5
"""

from __future__ import annotations

from kvstore_server.optimizer.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    register,
)

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "register",
]
