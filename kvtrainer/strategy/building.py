"""From what a configuration says of a model and its optimizers to a Module, to Trainers and to schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kvtrainer.config.sections import (
    OF_WRAPPER,
    WRAPPER_OPTIONS,
    instance_arguments,
    optimizer_arguments,
    wrapper_options,
)
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.registry import MODELS, OPTIMIZER_CONSTRUCTORS
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


class TrainerBuilder:
    """Builds Trainers over one store.

    Args:
        kvstore: What the Trainers are given.
    """

    def __init__(self, kvstore: str | KVStoreBase | None) -> None:
        self._kvstore = kvstore

    def build(self, cfg: Any, model: nn.Module | None = None) -> Trainer | TrainerDict:
        """A Trainer, or several by name.

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
            return self._of_instance(cfg, model, Trainer, {})
        if not isinstance(cfg, Mapping):
            raise ArgumentTypeError(
                f"optimizer wrapper should be a Trainer, a torch optimizer or a dict, but got {cfg!r:.200}"
            )
        if cfg.get("optimizer") is not None or "constructor" in cfg:
            return self._of_config(cfg, model)
        return self._of_several(cfg, model)

    def _of_several(self, cfg: Mapping[str, Any], model: nn.Module | None) -> TrainerDict:
        trainers = {}
        for name, one in cfg.items():
            is_config = isinstance(one, Mapping) and one.get("optimizer") is not None
            if not is_config and not isinstance(one, Trainer | torch.optim.Optimizer):
                raise ConfigurationError(
                    'each item must be an optimizer object when "type" and "constructor" are not in optimizer, but got '
                    f"{name}={one!r:.200}. One optimizer is given as dict(optimizer=dict(type='SGD', lr=0.1))"
                )
            part = _part_of(model, name) if is_config else model
            built = self.build(one, part)
            assert isinstance(built, Trainer)
            trainers[str(name)] = built
        return TrainerDict(**trainers)

    def _of_config(self, cfg: Mapping[str, Any], model: nn.Module | None) -> Trainer | TrainerDict:
        optimizer, has_constructor = cfg.get("optimizer"), cfg.get("constructor") is not None
        # Without one it is the constructor that knows what the other entries are.
        several = (
            {}
            if optimizer is not None
            else {n: v for n, v in cfg.items() if n not in (*OF_WRAPPER, *WRAPPER_OPTIONS)}
        )
        said = {name: v for name, v in cfg.items() if name not in several}
        make, options = wrapper_options({**said, "type": None} if cfg.get("type") is Trainer else said)
        make = make or Trainer
        if isinstance(optimizer, torch.optim.Optimizer):
            if has_constructor:
                raise ConfigurationError(
                    "a constructor makes the optimizer, so give it the optimizer's configuration, not a built one"
                )
            return self._of_instance(optimizer, model, make, options)
        if model is None:
            raise ConfigurationError(
                "an optimizer that is described by a dict needs the model that it trains"
            )
        if has_constructor:
            return self._constructed(cfg["constructor"], optimizer or several, model, make, options)
        arguments = optimizer_arguments(trained(model), optimizer, options.pop("paramwise", None))
        return make(**{"kvstore": self._kvstore, **arguments, **options})

    def _constructed(
        self,
        constructor: Any,
        optimizer: Mapping[str, Any],
        model: nn.Module,
        make: Callable[..., Trainer],
        options: dict[str, Any],
    ) -> Trainer | TrainerDict:
        kind, _ = OPTIMIZER_CONSTRUCTORS.split({"type": constructor})
        made = kind(dict(optimizer), options.pop("paramwise", None))(unwrapped(model))
        if isinstance(made, Trainer | TrainerDict):
            return made
        if isinstance(made, torch.optim.Optimizer):
            return self._of_instance(made, model, make, options)
        if not isinstance(made, Mapping):
            raise ArgumentTypeError(
                f"the optimizer constructor {constructor!r} must return a torch optimizer, a Trainer or a dict of "
                f"these, got {made!r:.80}"
            )
        for name, one in made.items():
            if not isinstance(one, torch.optim.Optimizer | Trainer):
                raise ArgumentTypeError(f"the optimizer constructor {constructor!r} made {name}={one!r:.80}")
        return TrainerDict(
            **{
                str(name): one if isinstance(one, Trainer) else self._of_instance(one, model, make, options)
                for name, one in made.items()
            }
        )

    def _of_instance(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None,
        make: Callable[..., Trainer],
        options: Mapping[str, Any],
    ) -> Trainer:
        """Over the parameters of the optimizer, under the names that they have in the model."""
        if options.get("paramwise") is not None:
            raise ConfigurationError(
                f"the {type(optimizer).__name__} instance has its groups already, so paramwise_cfg would have no "
                "effect; give the optimizer as a dict with its type"
            )
        whole = None if model is None else trained(model)
        return make(**{"kvstore": self._kvstore, **instance_arguments(whole, optimizer), **options})


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


def _part_of(model: nn.Module | None, name: str) -> nn.Module:
    if model is None:
        raise ConfigurationError(
            f"the optimizer {name!r} that is described by a dict needs the model that it trains"
        )
    part = unwrapped(model)._modules.get(name)
    if part is None:
        has = ", ".join(unwrapped(model)._modules) or "none"
        raise ConfigurationError(
            f"there is an optimizer for {name!r}, but the model has no part of that name; it has {has}. Name the "
            "optimizers after the parts that they train, or give a constructor"
        )
    return part
