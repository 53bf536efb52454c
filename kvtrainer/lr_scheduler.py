"""Gluon's learning-rate schedulers, for `lr_scheduler` among an optimizer's options::

    schedule = kvtrainer.lr_scheduler.CosineScheduler(10_000, base_lr=0.1, warmup_steps=500)
    trainer = kvtrainer.Trainer(net.parameters(), "sgd", {"lr_scheduler": schedule})

A scheduler of your own is a subclass of `LRScheduler` that defines `after_warmup`. Registered, it can also be saved,
and sent to servers that load its module with `kvstore-server --import MODULE`::

    @kvtrainer.lr_scheduler.register
    class InverseRoot(kvtrainer.lr_scheduler.LRScheduler):
        def after_warmup(self, num_update):
            return self.base_lr / max(num_update, 1) ** 0.5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore_server.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    register,
)
from kvstore_server.optimizer import Optimizer
from kvtrainer.errors import SchedulerInUseError
from kvtrainer.types import Group

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "register",
]


class UpdateCounter:
    """Count updates and, where the optimizer has a lr_scheduler, set the learning rate of all groups.

    As in MXNet, the learning rate of an update is `lr_scheduler(n)`, where n counts from `begin_num_update` and is the
    greatest update count of all keys. Every worker evaluates the scheduler; the counts, and so the rates, are equal.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        optimizer.num_update = optimizer.begin_num_update
        self._behind: dict[int, int] = {}
        """By how many updates a key is behind the one with most; keys that are not are left out."""
        self._set: float | None = None

    def apply(self, groups: Sequence[Group], coming: Sequence[bool] | None) -> None:
        """Set the learning rate for the update that comes.

        Args:
            groups: of all parameters.
            coming: which keys will be updated; None where other workers decide that too, and every key may be.

        Raises:
            SchedulerInUseError: somebody else has set the learning rate of a group since the last update.
        """
        scheduler = self._optimizer.lr_scheduler
        if scheduler is None:
            return
        foreign = [group["lr"] for group in groups if self._set is not None and group["lr"] != self._set]
        if foreign:
            raise SchedulerInUseError(
                f"the learning rate of a parameter group was set to {foreign[0]!r}, but {scheduler!r} decides it; set "
                "the scheduler's base_lr or a parameter's lr_mult, or build the Trainer without lr_scheduler"
            )
        leads = coming is None or any(is_in and key not in self._behind for key, is_in in enumerate(coming))
        rate = float(scheduler(self._optimizer.num_update + leads))
        for group in groups:
            group["lr"] = rate
        self._set = rate

    def count(self, updated: Sequence[bool]) -> None:
        """Note that an update of these keys happened."""
        if all(updated):
            self._optimizer.num_update += 1
        elif any(updated):
            for key, was_in in enumerate(updated):
                if not was_in:
                    self._behind[key] = self._behind.get(key, 0) + 1
            # Where all are behind, none of them leads: the one with most updates was not among these.
            least = min(self._behind.values()) if len(self._behind) == len(updated) else 0
            if least:
                self._behind = {key: count - least for key, count in self._behind.items() if count > least}
            self._optimizer.num_update += 1 - least

    def restore_one(self, key: int, updates: int, num_keys: int) -> None:
        """As `restore`, for a key alone."""
        most = self._optimizer.num_update - self._optimizer.begin_num_update
        counts = {one: most - self._behind.get(one, 0) for one in range(num_keys)}
        if counts[key] != updates:
            self.restore({**counts, key: updates}, num_keys)

    def restore(self, updates: Mapping[int, int], num_keys: int) -> None:
        """Go on after `updates` of each key, without `begin_num_update`; a key that is not there had none."""
        counts = [updates.get(key, 0) for key in range(num_keys)]
        most = max(counts)
        self._optimizer.num_update = self._optimizer.begin_num_update + most
        self._behind = {key: most - count for key, count in enumerate(counts) if count < most}
        # The learning rates of the groups come from the state that was loaded.
        self._set = None
