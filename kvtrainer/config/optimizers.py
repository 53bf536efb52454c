"""Read the configuration of an optimizer, or of mmengine's wrapper around one, into a Trainer's arguments.

A constructor of one's own makes a torch optimizer of a model and two configurations; `constructor` names it::

    @OPTIMIZER_CONSTRUCTORS.register()
    class Halving:
        def __init__(self, optimizer_cfg, paramwise_cfg=None): ...
        def __call__(self, model): return torch.optim.SGD(...)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.optim
from torch import Tensor
from torch.nn import Module

from kvstore_server.optimizer import Optimizer, create
from kvtrainer.config.dicts import check_keys, copied, joined
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.paramwise import ParamGroups, ParamReport, apply_paramwise, rows_of, unwrapped
from kvtrainer.registry import OPTIM_WRAPPERS, OPTIMIZER_CONSTRUCTORS, OPTIMIZERS

ARGUMENTS = (
    "kvstore", "compression_params", "update_on_kvstore", "paramwise", "clip_grad", "amp", "accumulate", "schedules",
    "detect_anomalous_params", "on_nonfinite", "bucket_size_mb", "coalesce",
)  # fmt: skip
"""Options of a Trainer that a configuration may have under their own names."""
_AMP_WRAPPER = "AmpOptimWrapper"
_WRAPPERS = ("OptimWrapper", "Trainer", _AMP_WRAPPER)
"""Types of an optim_wrapper that are a Trainer; so is one without a type."""
_RENAMED = {"paramwise_cfg": "paramwise", "accumulative_counts": "accumulate"}
"""mmengine's names of options of a Trainer, and ours."""
_SCALING = ("loss_scale", "dtype")
_OF_WRAPPER = ("type", "optimizer", "constructor")
_WRAPPER_OPTIONS = (*_RENAMED, *(n for n in ARGUMENTS if n not in ("kvstore", "bucket_size_mb", "coalesce")))


class DefaultOptimizerConstructor:
    """Makes a torch optimizer whose groups follow from paramwise_cfg.

    For other groups override `param_groups`; or `add_params(params, module)`, as MMCV's subclasses do, which appends
    groups to a list.

    Args:
        optimizer_cfg: "type" and the options of an optimizer of torch's kind.
        paramwise_cfg: As `kvtrainer.paramwise.apply_paramwise` takes it.

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
        """Check the configuration, in subclasses; what the rules need is checked by them."""

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
        """Return the groups for a model, and the report of them."""
        if type(self).add_params is DefaultOptimizerConstructor.add_params:
            return self._grouped(model)
        params: list[dict[str, Any]] = []
        self.add_params(params, unwrapped(model))
        names = {id(p): name for name, p in model.named_parameters()}
        for group in params:
            its = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            group.setdefault("param_names", [names.get(id(p), "?") for p in its])
        return ParamGroups(params, ParamReport(tuple(rows_of(params))))

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
        # What a function would make of its options is not known before.
        defaults = dict(create(kind, **options).hyper) if isinstance(kind, type) else None
        return apply_paramwise(model, self.paramwise_cfg or None, options, defaults)


def construct(
    constructor: Any, optimizer_cfg: Mapping[str, Any], paramwise_cfg: Any, model: Module
) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
    """Let a constructor make an optimizer, or several by name.

    Args:
        constructor: The name of a registered one, or the class.

    Raises:
        UnregisteredNameError: there is no constructor of that name.
        ArgumentTypeError: it returned something else.
    """
    kind, _ = OPTIMIZER_CONSTRUCTORS.split({"type": constructor})
    made = kind(dict(optimizer_cfg), paramwise_cfg)(model)
    for one in made.values() if isinstance(made, Mapping) else [made]:
        if not isinstance(one, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"the optimizer constructor {constructor!r} must return a torch optimizer, a Trainer or a dict of "
                f"these, got {made!r:.80}"
            )
    return made  # type: ignore[no-any-return]


def optimizer_arguments(
    model: Any, cfg: Any, paramwise_cfg: Any = None, constructor: Any = None
) -> dict[str, Any]:
    """Return a Trainer's arguments for an optimizer's configuration, or for one that is built already.

    Args:
        cfg: "type" and options, and possibly "constructor" and "paramwise_cfg".
        paramwise_cfg: If `cfg` has none.
        constructor: If `cfg` has none. One of the user's own makes a torch optimizer, whose groups the Trainer takes.

    Raises:
        ArgumentTypeError: `cfg` is no dict and no optimizer, or the constructor made no torch optimizer.
        ConfigurationError: as `trainer_arguments`.
    """
    if isinstance(cfg, torch.optim.Optimizer | Optimizer):
        if paramwise_cfg is not None or constructor is not None:
            raise ConfigurationError(
                f"a {type(cfg).__name__} instance brings its own groups, so paramwise_cfg and constructor would have "
                "no effect; give its type and options instead"
            )
        return instance_arguments(model, cfg)
    if not isinstance(cfg, Mapping):
        raise ArgumentTypeError(
            "an optimizer is configured by a dict such as dict(type='SGD', lr=0.01), got "
            f"{type(cfg).__name__}: {cfg!r:.80}"
        )
    given = dict(cfg)
    own = {key: given.pop(key) for key in ("paramwise_cfg", "constructor") if key in given}
    outer = {"paramwise_cfg": paramwise_cfg, "constructor": constructor}
    choice = joined([own, {key: value for key, value in outer.items() if value is not None}])
    paramwise, maker = choice.get("paramwise_cfg"), own_constructor(choice.get("constructor"))
    kind, options = OPTIMIZERS.split(given)
    if maker is None and isinstance(kind, type):
        DefaultOptimizerConstructor(given, paramwise)  # checks them
        arguments = {"params": model, "optimizer": kind, "optimizer_params": options}
        return arguments if paramwise is None else {**arguments, "paramwise": paramwise}
    made = construct(maker or DefaultOptimizerConstructor, given, paramwise, unwrapped(model))
    if isinstance(made, Mapping):
        raise ArgumentTypeError(
            f"the optimizer constructor {maker!r} made several, {', '.join(made)}, and a Trainer has one; a Strategy "
            "makes a TrainerDict of them"
        )
    return instance_arguments(model, made)


def own_constructor(constructor: Any) -> Any:
    """Return the constructor that is meant by a name or a class; None for the default one, whose work a Trainer does.

    Raises UnregisteredNameError if there is none of that name.
    """
    kind = OPTIMIZER_CONSTRUCTORS.get(constructor) if isinstance(constructor, str) else constructor
    return None if kind is DefaultOptimizerConstructor else kind


def instance_arguments(model: Any, instance: torch.optim.Optimizer | Optimizer) -> dict[str, Any]:
    """Return a Trainer's arguments for an optimizer: its parameters, under their names in the model, and itself.

    Args:
        model: A Module, or replicas; or other parameters, or None, where only the optimizer says what it trains.
    """
    model = unwrapped(model)
    is_named = model is None or (hasattr(model, "named_parameters") and not hasattr(model, "named_replicas"))
    if isinstance(instance, torch.optim.Optimizer) and is_named:
        known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        its = [p for group in instance.param_groups for p in group["params"]]
        model = [(known.get(id(p), f"parameter{at}"), p) for at, p in enumerate(its)]
    return {"params": model, "optimizer": instance}


class Wrapper(NamedTuple):
    """What the configuration of an mmengine optimizer wrapper says."""

    kind: Any
    """What its type means; None for a Trainer itself."""
    optimizer: Any
    """The optimizer's configuration, or an optimizer that is built."""
    constructor: Any
    """A constructor of the user's own, or None."""
    paramwise: Any
    options: dict[str, Any]
    """Of a Trainer, under its own names."""

    def arguments(self, model: Any) -> dict[str, Any]:
        """Return the Trainer's arguments. Raises as `optimizer_arguments`."""
        of_optimizer = optimizer_arguments(model, self.optimizer, self.paramwise, self.constructor)
        return joined([of_optimizer, self.options])


def read_wrapper(cfg: Mapping[str, Any]) -> Wrapper:
    """Read an `optim_wrapper` of mmengine; nothing is built.

    Args:
        cfg: type, optimizer, constructor; paramwise_cfg, accumulative_counts and other options of the Trainer; of an
            AmpOptimWrapper also loss_scale ('dynamic') and dtype. With a constructor and no optimizer all that is no
            option is the constructor's.

    Raises:
        ConfigurationError: an option is unknown, two say the same, or there is no optimizer.
        UnregisteredNameError: there is no wrapper or constructor of this name.
    """
    kind, optimizer = cfg.get("type") or _WRAPPERS[0], cfg.get("optimizer")
    constructor = own_constructor(cfg.get("constructor"))
    others = {n: value for n, value in cfg.items() if n not in _OF_WRAPPER and value is not None}
    if optimizer is None and constructor is not None:
        optimizer = {n: value for n, value in others.items() if n not in (*_WRAPPER_OPTIONS, *_SCALING)}
        others = {n: value for n, value in others.items() if n not in optimizer}
    if optimizer is None:
        raise ConfigurationError(f"optim_wrapper needs an 'optimizer', got {dict(cfg)!r:.200}")
    twice = [f"{old!r} and {new!r}" for old, new in _RENAMED.items() if old in cfg and new in cfg]
    if kind == _AMP_WRAPPER and "amp" in cfg:
        twice += [f"{name!r} and 'amp'" for name in _SCALING if name in cfg]
    if twice:
        raise ConfigurationError(
            f"an optimizer wrapper is told the same by {', '.join(twice)}; give one of the two"
        )
    options = {_RENAMED.get(name, name): value for name, value in others.items()}
    if kind == _AMP_WRAPPER:
        options.setdefault("amp", _amp_of(*(options.pop(name, None) for name in _SCALING)))
    found = None
    if kind in _WRAPPERS:
        of_amp = _SCALING if kind == _AMP_WRAPPER else ()
        check_keys(f"optim_wrapper ({kind})", others, (*_OF_WRAPPER, *_WRAPPER_OPTIONS, *of_amp))
    else:
        found = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    return Wrapper(found, optimizer, constructor, options.pop("paramwise", None), options)


def wrapper_arguments(model: Any, cfg: Any) -> dict[str, Any]:
    """Return a Trainer's arguments for an `optim_wrapper` of mmengine, as `read_wrapper` reads it.

    Raises:
        ArgumentTypeError, ConfigurationError: as `trainer_arguments`; or the type is that of another wrapper.
    """
    wrapper = read_wrapper(copied(cfg, "optim_wrapper"))
    if wrapper.kind is not None:
        raise ConfigurationError(
            f"optim_wrapper of type {cfg['type']!r} is none that a Trainer is like; those are "
            f"{', '.join(_WRAPPERS)}. Build one of your own by OPTIM_WRAPPERS.build"
        )
    return wrapper.arguments(model)


def _amp_of(scale: Any, dtype: Any) -> Any:
    """Return mmengine's loss_scale and dtype as a Trainer's `amp`; bfloat16 needs no scale that adapts."""
    scale = "dynamic" if scale is None else scale
    if isinstance(scale, Mapping):
        return {**scale, **({} if dtype is None else {"dtype": dtype})}
    if dtype is None:
        return scale
    is_wide = str(dtype).removeprefix("torch.") == "bfloat16"
    return {"dtype": dtype} if is_wide and scale == "dynamic" else {"dtype": dtype, "loss_scale": scale}
