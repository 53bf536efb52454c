"""Build Trainers and their schedules from a configuration, and scale their learning rates.

    lr ← lr · (workers · batch of one worker · its replicas [· accumulated passes]) / base batch size

Goyal et al.: Accurate, Large Minibatch SGD, 2017, section 2.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvstore_server import check
from kvtrainer.config.optimizers import construct, instance_arguments, read_wrapper
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.schedules.binding import build_param_schedules
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.strategy.model import trained, unwrapped
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import TrainerDict

Schedules = list[BoundSchedule] | dict[str, list[BoundSchedule]]
_LR_NOTES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")


class ScheduledTooEarlyError(ConfigurationError, RuntimeError):
    """The learning rate is to be scaled after schedules have begun with it."""


def in_updates(run: Mapping[str, Any], passes: int) -> dict[str, Any]:
    """Convert max_iters and epoch_length from backward passes to updates, of so many passes each.

    An epoch that does not end with an update has no length.
    """
    counted = dict(run)
    if passes > 1 and isinstance(run.get("max_iters"), int):
        counted["max_iters"] = -(-run["max_iters"] // passes)  # a last, shorter window is an update, too
    if passes > 1 and isinstance(run.get("epoch_length"), int):
        whole, rest = divmod(run["epoch_length"], passes)
        counted["epoch_length"] = None if rest else whole
    return counted


def devices_of(trainers: Mapping[str, Trainer]) -> list[torch.device]:
    """Return the devices of all parameters, each once."""
    found = {
        p.device: None for one in trainers.values() for group in one.param_groups for p in group["params"]
    }
    return list(found)


def build_trainers(
    cfg: Any, model: nn.Module | None, kvstore: str | KVStoreBase | None
) -> Trainer | TrainerDict:
    """Build a Trainer over a store, or several by name.

    Args:
        cfg: A Trainer or TrainerDict, which is returned; a torch optimizer; a dict with `optimizer` (a torch
            optimizer, or a dict with `type`) or `constructor`, and options of the Trainer, of which
            `paramwise_cfg`, `accumulative_counts` and, with type='AmpOptimWrapper', `loss_scale` and `dtype`
            have mmengine's names; or a dict of such things by name. There a dict is for the part of the model that
            has this name.

    Raises:
        ConfigurationError, ArgumentTypeError: `cfg` is something else, or lacks something.
    """
    if isinstance(cfg, Trainer | TrainerDict):
        return cfg
    if isinstance(cfg, torch.optim.Optimizer):
        return build_trainers({"optimizer": cfg}, model, kvstore)
    if not isinstance(cfg, Mapping):
        raise ArgumentTypeError(
            f"optimizer wrapper should be a Trainer, a torch optimizer or a dict, but got {cfg!r:.200}"
        )
    if cfg.get("optimizer") is None and "constructor" not in cfg:
        return TrainerDict(**{str(name): _build_part(name, cfg[name], model, kvstore) for name in cfg})
    wrapper = read_wrapper({**cfg, "type": None} if cfg.get("type") is Trainer else cfg)
    if model is None and isinstance(wrapper.optimizer, Mapping):
        raise ConfigurationError("an optimizer that is described by a dict needs the model that it trains")
    make: Callable[..., Trainer] = wrapper.kind or Trainer
    whole = None if model is None else trained(model)

    def over(optimizer: torch.optim.Optimizer) -> Trainer:
        if isinstance(optimizer, Trainer):
            return optimizer
        return make(**{"kvstore": kvstore, **instance_arguments(whole, optimizer), **wrapper.options})

    if wrapper.constructor is None or not isinstance(wrapper.optimizer, Mapping):
        return make(**{"kvstore": kvstore, **wrapper.arguments(whole)})
    assert model is not None
    made = construct(wrapper.constructor, wrapper.optimizer, wrapper.paramwise, unwrapped(model))
    if not isinstance(made, Mapping):
        return over(made)
    return made if isinstance(made, TrainerDict) else TrainerDict(**{str(n): over(made[n]) for n in made})


def _build_part(name: str, cfg: Any, model: nn.Module | None, kvstore: str | KVStoreBase | None) -> Trainer:
    """Build one of several Trainers; a configuration is for the part of the model that has its name."""
    if isinstance(cfg, Mapping) and cfg.get("optimizer") is not None:
        if model is None:
            raise ConfigurationError(
                f"the optimizer {name!r} that is described by a dict needs the model that it trains"
            )
        parts = unwrapped(model)._modules
        if parts.get(name) is None:
            raise ConfigurationError(
                f"there is an optimizer for {name!r}, but the model has no part of that name; it has "
                f"{', '.join(parts) or 'none'}. Name the optimizers after the parts that they train, or give a "
                "constructor"
            )
        model = parts[name]
    elif not isinstance(cfg, torch.optim.Optimizer):
        raise ConfigurationError(
            'each item must be an optimizer object when "type" and "constructor" are not in optimizer, but got '
            f"{name}={cfg!r:.200}. One optimizer is given as dict(optimizer=dict(type='SGD', lr=0.1))"
        )
    built = build_trainers(cfg, model, kvstore)
    if not isinstance(built, Trainer):
        raise ConfigurationError(f"the constructor of the optimizer {name!r} made several, where one belongs")
    return built


def build_schedules(
    cfg: Any, trainer: Trainer | TrainerDict, default_args: Mapping[str, Any], log: logging.Logger
) -> Schedules:
    """Make schedules and let the Trainer, or each of several, advance them.

    Args:
        cfg: One or a list, as a Trainer's `schedules`. With several Trainers also a dict by their names.
        default_args: max_epochs, max_iters and epoch_length, for those that do not say where they end; read only.

    Returns:
        The schedules of the Trainer, or of each by name.
    """
    if not isinstance(trainer, Trainer | TrainerDict):
        raise ArgumentTypeError(
            "schedules need the Trainer whose values they change, so build that first, and give it: got "
            f"{type(trainer).__name__}"
        )
    for one in cfg if isinstance(cfg, list | tuple) else [cfg]:
        if one is None or isinstance(one, str | int | float):
            raise ArgumentTypeError(f"scheduler should be a schedule or a dict, but got {one!r:.200}")
    made = build_param_schedules(cfg, trainer, default_args)
    log.debug("schedules that do not say their end have that of %s", dict(default_args))
    for name, its in made.items() if isinstance(made, dict) else [("", made)]:
        (trainer if isinstance(trainer, Trainer) else trainer[name]).configure(schedules=its)
    return made


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
    known = ("enable", "base_batch_size", "count_accumulation")
    unknown = sorted(set(cfg) - set(known))
    if unknown:
        raise ConfigurationError(f"auto_scale_lr has no {', '.join(unknown)}; it takes {', '.join(known)}")
    if not cfg.get("enable", False):
        return 1.0
    base = check.integer("base_batch_size of auto_scale_lr", cfg.get("base_batch_size"), 1)
    needed = "train_micro_batch_size_per_gpu of dispatch_kwargs, which auto_scale_lr needs,"
    micro = check.integer(needed, micro_batch, 1)
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
        of = name and f" of {name}"
        log.info("learning rate%s · %g: batch size %s = %d, base %d", of, factor, parts, real, base)
        _scale(trainer, factor, scaled)
    return factor


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
