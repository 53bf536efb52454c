"""The learning rate in proportion to the batch size.

    lr ← lr · (workers · batch of one worker · its replicas [· accumulated passes]) / base batch size

Goyal et al.: Accurate, Large Minibatch SGD, 2017, section 2.1.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvtrainer.errors import ConfigurationError
from kvtrainer.trainer import Trainer

_LR_NOTES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_KNOWN = ("enable", "base_batch_size", "count_accumulation")


def scale_learning_rates(
    cfg: Mapping[str, Any] | None,
    trainers: Mapping[str, Trainer],
    micro_batch: int | None,
    num_workers: int,
    log: logging.Logger,
) -> float:
    """Scale the learning rates of all groups and what they are based on; return the factor.

    Args:
        cfg: `enable` (False), `base_batch_size`, and `count_accumulation` (False): whether the passes that make one
            update count as well. None: nothing is scaled.
        micro_batch: Samples in a batch of one worker, or of one device where it has replicas.

    Raises:
        ConfigurationError: an option is missing or impossible.
        RuntimeError: a schedule has taken the learning rate already. (Also a ConfigurationError.)
    """
    if cfg is None:
        return 1.0
    unknown = sorted(set(cfg) - set(_KNOWN))
    if unknown:
        raise ConfigurationError(f"auto_scale_lr has no {', '.join(unknown)}; it takes {', '.join(_KNOWN)}")
    if not cfg.get("enable", False):
        return 1.0
    base = _positive("base_batch_size of auto_scale_lr", cfg.get("base_batch_size"))
    micro = _positive(
        "train_micro_batch_size_per_gpu of dispatch_kwargs, which auto_scale_lr needs,", micro_batch
    )
    if any(trainer.schedules for trainer in trainers.values()):
        raise ScheduledTooEarlyError(
            "schedules took their base from the learning rate before it was scaled; build them after it, by "
            "prepare(param_scheduler=...)"
        )
    factor, scaled = 1.0, set[int]()
    for name, trainer in trainers.items():
        replicas = trainer.num_replicas
        passes = trainer.accumulation.counts if cfg.get("count_accumulation", False) else 1
        real = num_workers * micro * replicas * passes
        factor = real / base
        parts = f"{num_workers} workers · {micro}" + (f" · {replicas} replicas" if replicas > 1 else "")
        parts += f" · {passes} accumulated" if passes > 1 else ""
        log.info(
            "learning rate%s · %g: batch size %s = %d, base %d",
            name and f" of {name}",
            factor,
            parts,
            real,
            base,
        )
        _scale(trainer, factor, scaled)
    return factor


class ScheduledTooEarlyError(ConfigurationError, RuntimeError):
    """The learning rate is to be scaled after schedules have begun with it."""


def _scale(trainer: Trainer, factor: float, scaled: set[int]) -> None:
    """Scale what a Trainer has; of schedulers those that are not in `scaled`, because Trainers may share one."""
    scheduler = trainer.optimizer.lr_scheduler
    if scheduler is not None and id(scheduler) not in scaled and hasattr(scheduler, "base_lr"):
        scheduler.base_lr *= factor  # a function that decides alone refuses that
        scaled.add(id(scheduler))
    for options in (*trainer.param_groups, trainer.defaults):
        for name in _LR_NOTES:
            if isinstance(options.get(name), int | float | Tensor):
                options[name] = options[name] * factor


def _positive(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{what} must be a whole number above 0, got {value!r}")
    return value
