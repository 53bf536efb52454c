"""Constructors of optimizers: they turn a model and two configurations into a torch optimizer.

One's own is registered and asked for by `constructor` in the optimizer's configuration::

    @OPTIMIZER_CONSTRUCTORS.register()
    class Halving:
        def __init__(self, optimizer_cfg, paramwise_cfg=None): ...
        def __call__(self, model): return torch.optim.SGD(...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.optim
from torch import Tensor
from torch.nn import Module

from kvstore_server.optimizer import create
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.param_options.paramwise import apply_paramwise
from kvtrainer.param_options.places import unwrapped
from kvtrainer.param_options.report import ParamReport, rows_of
from kvtrainer.param_options.rules import ParamGroups
from kvtrainer.registry import OPTIMIZER_CONSTRUCTORS, OPTIMIZERS

__all__ = ["DefaultOptimizerConstructor", "construct", "known_options"]


class DefaultOptimizerConstructor:
    """Makes a torch optimizer whose groups follow from paramwise_cfg.

    For other groups override `param_groups`; or `add_params(params, module)`, as MMCV's subclasses do, which appends
    groups to a list.

    Args:
        optimizer_cfg: "type" and the options of an optimizer of torch's kind.
        paramwise_cfg: As `kvtrainer.param_options.paramwise.apply_paramwise` takes it.

    Raises:
        ArgumentTypeError: `optimizer_cfg` is no dict, or `paramwise_cfg` of no kind that is known.
    """

    def __init__(self, optimizer_cfg: Mapping[str, Any], paramwise_cfg: Any = None) -> None:
        if not isinstance(optimizer_cfg, Mapping):
            raise ArgumentTypeError(
                f"optimizer_cfg should be a dict, but got {type(optimizer_cfg).__name__}: {optimizer_cfg!r:.80}"
            )
        if paramwise_cfg is not None and not isinstance(paramwise_cfg, Mapping):
            raise ArgumentTypeError(
                f"paramwise_cfg should be None or a dict, but got {type(paramwise_cfg).__name__}: {paramwise_cfg!r:.80}"
            )
        self.optimizer_cfg = dict(optimizer_cfg)
        self.paramwise_cfg: dict[str, Any] = {} if paramwise_cfg is None else dict(paramwise_cfg)
        self.base_lr = self.optimizer_cfg.get("lr")
        self.base_wd = self.optimizer_cfg.get("weight_decay")
        self.report: ParamReport | None = None
        """What became of each parameter, after a call."""
        self._validate_cfg()

    def _validate_cfg(self) -> None:
        """Check the configuration; called once it is there. For subclasses: what the rules need is checked by them."""

    def __call__(self, model: Module) -> torch.optim.Optimizer:
        """Make the optimizer.

        Raises:
            ConfigurationError: the optimizer is not of torch's kind, or refuses its options.
        """
        kind, options = OPTIMIZERS.split(self.optimizer_cfg)
        if isinstance(kind, type) and not issubclass(kind, torch.optim.Optimizer):
            raise ConfigurationError(
                f"{self.optimizer_cfg['type']!r} is no torch optimizer, and only those are made of groups; give its "
                "type and options to the Trainer, without a constructor"
            )
        groups, self.report = self.param_groups(model)
        made = kind([dict(group) for group in groups], **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigurationError(f"{kind!r} must make a torch optimizer, got {made!r:.80}")
        return made

    def param_groups(self, model: Module) -> ParamGroups:
        """The groups for a model, and the report of them."""
        if type(self).add_params is not DefaultOptimizerConstructor.add_params:
            params: list[dict[str, Any]] = []
            self.add_params(params, unwrapped(model))
            names = {id(p): name for name, p in model.named_parameters()}
            for group in params:
                its = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
                group.setdefault("param_names", [names.get(id(p), "?") for p in its])
            return ParamGroups(params, ParamReport(tuple(rows_of(params))))
        return self._grouped(model)

    def add_params(
        self, params: list[dict[str, Any]], module: Module, prefix: str = "", is_dcn_module: Any = None
    ) -> None:
        """Append the groups of a module to a list. MMCV's arguments; the names begin at this module.

        Raises:
            ConfigurationError: there is a prefix: the rules are asked of whole models.
        """
        if prefix:
            raise ConfigurationError(
                f"add_params() makes the groups of a whole model, so it has no use for the prefix {prefix!r}; call it "
                "once, with the model"
            )
        params.extend(self._grouped(module).groups)

    def _grouped(self, model: Module) -> ParamGroups:
        kind, options = OPTIMIZERS.split(self.optimizer_cfg)
        return apply_paramwise(model, self.paramwise_cfg or None, options, known_options(kind, options))


def known_options(kind: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """All options that an optimizer has, with their values; None for a function that makes one.

    Raises:
        ConfigurationError: it refuses them.
    """
    if not isinstance(kind, type):
        return None
    return dict(create(kind, **options).hyper)


def construct(
    name: Any, optimizer_cfg: Mapping[str, Any], paramwise_cfg: Any, model: Module
) -> torch.optim.Optimizer:
    """Let a registered constructor make an optimizer.

    Args:
        name: Of the constructor, or the class.

    Raises:
        UnregisteredNameError: there is no constructor of that name.
        ArgumentTypeError: it returned something else.
    """
    constructor = OPTIMIZER_CONSTRUCTORS.build(
        {"type": name}, optimizer_cfg=dict(optimizer_cfg), paramwise_cfg=paramwise_cfg
    )
    made = constructor(model)
    if not isinstance(made, torch.optim.Optimizer):
        raise ArgumentTypeError(
            f"the optimizer constructor {name!r} must return a torch optimizer, got {made!r:.80}"
        )
    return made
