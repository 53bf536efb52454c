"""From what a configuration says of a model and its optimizers to a Module, to Trainers and to schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kvtrainer.config.optimizers import construct, instance_arguments, read_wrapper
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.registry import MODELS
from kvtrainer.schedules.config import build_param_schedules
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.strategy.weights import trained, unwrapped
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import TrainerDict

Schedules = list[BoundSchedule] | dict[str, list[BoundSchedule]]


def build_model(model: nn.Module | Mapping[str, Any]) -> nn.Module:
    """The model itself, or what a dict with the `type` of a registered one describes.

    Raises:
        ArgumentTypeError: it is neither.
        UnregisteredNameError: there is no such model.
    """
    built = MODELS.build(model) if isinstance(model, Mapping) else model
    if not isinstance(built, nn.Module):
        raise ArgumentTypeError(
            f"model should be a nn.Module object or dict, but got {type(built).__name__}: {built!r:.80}"
        )
    return built


def compile_model(
    model: nn.Module, compile: bool | Mapping[str, Any] | None, log: logging.Logger
) -> nn.Module:
    """Let torch.compile compile a method of the model, in place; the names of its weights stay as they are.

    Args:
        compile: False or None leaves the model as it is, and so does disable=True; a dict has the method, `target`
            ('forward'), and options of torch.compile.

    Raises:
        ConfigurationError: the model has no such method, or `compile` is something else.
    """
    if compile is None or compile is False:
        return model
    if compile is not True and not isinstance(compile, Mapping):
        raise ArgumentTypeError(f"compile must be a bool or a dict, got {compile!r:.80}")
    options = {} if compile is True else dict(compile)
    target = options.pop("target", "forward")
    if options.get("disable", False):
        return model
    if not callable(getattr(model, target, None)):
        raise ConfigurationError(f"{type(model).__name__} has no method {target!r} to compile")
    if target == "forward":
        model.compile(**options)
    else:
        setattr(model, target, torch.compile(getattr(model, target), **options))
    log.info("%s of the model is compiled: the first iterations will be slow", target)
    return model


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
    _refuse_others(cfg)
    made = build_param_schedules(cfg, trainer, default_args)
    by_trainer = [(trainer, made)] if isinstance(trainer, Trainer) else _pairs(trainer, made)
    for one, its in by_trainer:
        log.debug(
            "%d schedules; where they do not say their end, it is that of %s", len(its), dict(default_args)
        )
        one.configure(schedules=its)
    return made


def _pairs(trainers: TrainerDict, made: Any) -> list[tuple[Trainer, list[BoundSchedule]]]:
    return [(trainers[name], its) for name, its in made.items()]


def _refuse_others(cfg: Any) -> None:
    for one in cfg if isinstance(cfg, list | tuple) else [cfg]:
        if one is None or isinstance(one, str | int | float):
            raise ArgumentTypeError(f"scheduler should be a schedule or a dict, but got {one!r:.200}")
