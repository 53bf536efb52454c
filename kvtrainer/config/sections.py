"""Configurations as dicts, in the forms of MMCV and mmengine, and the arguments of a Trainer that they stand for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.optim

from kvstore_server.optimizer import Optimizer
from kvtrainer.config.constructors import DefaultOptimizerConstructor, construct
from kvtrainer.config.dicts import check_keys, copied, joined, merge_config, section
from kvtrainer.config.imports import import_modules
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.param_options.places import unwrapped
from kvtrainer.registry import OPTIMIZER_CONSTRUCTORS, OPTIMIZERS

__all__ = [
    "SECTIONS", "check_overrides", "merge_config", "optimizer_arguments", "trainer_arguments", "wrapper_arguments",
]  # fmt: skip

SECTIONS = (
    "custom_imports", "optimizer", "optimizer_config", "fp16", "lr_config", "momentum_config", "optim_wrapper",
    "runner", "max_epochs", "max_iters", "epoch_length",
)  # fmt: skip
"""What `trainer_arguments` reads of a configuration, beside arguments of a Trainer by their own names."""

_RUN = ("max_epochs", "max_iters", "epoch_length")
_ARGUMENTS = (
    "kvstore", "compression_params", "update_on_kvstore", "paramwise", "clip_grad", "amp", "accumulate", "schedules",
    "detect_anomalous_params", "on_nonfinite", "bucket_size_mb", "coalesce",
)  # fmt: skip
_HOOK = {"type", "grad_clip", "detect_anomalous_params"}
_FP16 = {"loss_scale", "coalesce", "bucket_size_mb", "distributed"}
_HOOKS = {
    "OptimizerHook": _HOOK,
    "Fp16OptimizerHook": _HOOK | _FP16,
    "GradientCumulativeOptimizerHook": _HOOK | {"cumulative_iters"},
    "GradientCumulativeFp16OptimizerHook": _HOOK | _FP16 | {"cumulative_iters"},
}
"""Hooks whose options a Trainer has, and those options."""
_WRAPPER = {"type", "optimizer", "constructor", "paramwise_cfg", "clip_grad", "accumulative_counts", "amp"}
_WRAPPERS = {"OptimWrapper": _WRAPPER, "AmpOptimWrapper": _WRAPPER | {"loss_scale", "dtype"}}


def trainer_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a Trainer for a model and a configuration.

    Args:
        model: What is to be trained.
        cfg: The sections of `SECTIONS`, each as in MMCV (optim_wrapper as in mmengine), and arguments of the Trainer by
            their own names. An optimizer's type is torch's; Gluon's 'sgd' is "gluon:sgd". `fp16` and `optimizer_config`
            together are those of a Fp16OptimizerHook. lr_config and momentum_config become `schedules`; those that lead
            to an end take it from max_epochs or max_iters, which may also be in `runner`.

    Raises:
        ArgumentTypeError: a section has a wrong type.
        ConfigurationError: a key is unknown, or two of them say the same thing.
        UnregisteredNameError: a type or a constructor is not registered.
        CustomImportError: a module of custom_imports cannot be imported.
    """
    cfg = copied(cfg.to_dict() if hasattr(cfg, "to_dict") else cfg, "the configuration")
    check_keys("the configuration", cfg, (*SECTIONS, *_ARGUMENTS))
    if cfg.get("custom_imports") is not None:
        imports = section(cfg, "custom_imports")
        check_keys("custom_imports", imports, ("imports", "allow_failed_imports"))
        import_modules(imports.get("imports", ()), imports.get("allow_failed_imports", False))
    parts = [{key: cfg[key] for key in _ARGUMENTS if key in cfg and key != "schedules"}]
    if cfg.get("optim_wrapper") is not None:
        _refuse_beside_wrapper(cfg)
        parts.append(wrapper_arguments(model, cfg["optim_wrapper"]))
    elif cfg.get("optimizer") is not None:
        parts.append(optimizer_arguments(model, cfg["optimizer"]))
    else:
        raise ConfigurationError("the configuration needs an 'optimizer', such as dict(type='SGD', lr=0.01)")
    parts.append(_hook_arguments(section(cfg, "optimizer_config"), cfg.get("fp16")))
    arguments = joined(parts)
    schedules = [*_given_schedules(cfg), *_schedules(cfg)]
    return {**arguments, "schedules": schedules} if schedules else arguments


def check_overrides(trainer: type, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, naming them, if there are arguments that this class of Trainers does not take."""
    takes = inspect.signature(trainer).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        check_keys("from_config", overrides, {*takes, *_ARGUMENTS} - {"params"})


def optimizer_arguments(
    model: Any, cfg: Any, paramwise_cfg: Any = None, constructor: Any = None
) -> dict[str, Any]:
    """The Trainer's arguments for an optimizer's configuration, or for one that is built already.

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
        return _of_instance(model, cfg)
    if not isinstance(cfg, Mapping):
        raise ArgumentTypeError(
            "an optimizer is configured by a dict such as dict(type='SGD', lr=0.01), got "
            f"{type(cfg).__name__}: {cfg!r:.80}"
        )
    given = dict(cfg)
    own = {key: given.pop(key) for key in ("paramwise_cfg", "constructor") if key in given}
    outer = {"paramwise_cfg": paramwise_cfg, "constructor": constructor}
    choice = joined([own, {key: value for key, value in outer.items() if value is not None}])
    paramwise, maker = choice.get("paramwise_cfg"), choice.get("constructor") or DefaultOptimizerConstructor
    if isinstance(maker, str):
        maker = OPTIMIZER_CONSTRUCTORS.get(maker)
    kind, options = OPTIMIZERS.split(given)
    if maker is not DefaultOptimizerConstructor or not isinstance(kind, type):
        return _of_instance(model, construct(maker, given, paramwise, unwrapped(model)))
    DefaultOptimizerConstructor(given, paramwise)
    arguments = {"params": model, "optimizer": kind, "optimizer_params": options}
    return arguments if paramwise is None else {**arguments, "paramwise": paramwise}


def wrapper_arguments(model: Any, cfg: Any) -> dict[str, Any]:
    """The Trainer's arguments for an `optim_wrapper` of mmengine: OptimWrapper, the default, or AmpOptimWrapper.

    Keys: optimizer (a configuration or an optimizer), constructor, paramwise_cfg, clip_grad, accumulative_counts; of
    AmpOptimWrapper loss_scale ('dynamic') and dtype; and `amp`, which is the Trainer's.

    Raises:
        ArgumentTypeError, ConfigurationError: as `trainer_arguments`.
    """
    given = copied(cfg, "optim_wrapper")
    kind = given.pop("type", "OptimWrapper")
    if kind not in _WRAPPERS:
        raise ConfigurationError(
            f"optim_wrapper of type {kind!r} is none that a Trainer is like; those are {', '.join(_WRAPPERS)}. One of "
            "your own is built by OPTIM_WRAPPERS.build"
        )
    check_keys(kind, given, _WRAPPERS[kind])
    if given.get("optimizer") is None:
        raise ConfigurationError(f"optim_wrapper needs an 'optimizer', got {given!r:.200}")
    parts = [
        optimizer_arguments(model, given["optimizer"], given.get("paramwise_cfg"), given.get("constructor")),
        {"amp": given["amp"]} if given.get("amp") is not None else {},
        {"clip_grad": given["clip_grad"]} if given.get("clip_grad") is not None else {},
        {"accumulate": given["accumulative_counts"]} if "accumulative_counts" in given else {},
    ]
    if kind == "AmpOptimWrapper":
        parts.append({"amp": _amp_of(given)})
    return joined(parts)


def _hook_arguments(hook: dict[str, Any], fp16: Any) -> dict[str, Any]:
    """The Trainer's arguments for optimizer_config and fp16, which together are the options of one hook."""
    if fp16 is not None:
        half = copied(fp16, "fp16")
        check_keys("fp16", half, _FP16)
        hook = joined([hook, half])
    kind = hook.get("type", "OptimizerHook" if fp16 is None else "Fp16OptimizerHook")
    if fp16 is not None and kind in ("OptimizerHook", "GradientCumulativeOptimizerHook"):
        kind = kind.replace("Optimizer", "Fp16Optimizer")
    if kind not in _HOOKS:
        raise ConfigurationError(
            f"optimizer_config of type {kind!r} is no hook whose options a Trainer has; those are {', '.join(_HOOKS)}. "
            "Build another one by HOOKS.build and let your runner call it"
        )
    check_keys(f"optimizer_config ({kind})", hook, _HOOKS[kind])
    arguments: dict[str, Any] = {}
    if hook.get("grad_clip") is not None:
        arguments["clip_grad"] = hook["grad_clip"]
    if "detect_anomalous_params" in hook:
        arguments["detect_anomalous_params"] = hook["detect_anomalous_params"]
    if "cumulative_iters" in hook:
        arguments["accumulate"] = hook["cumulative_iters"]
    return {**arguments, **_fp16_arguments(hook)} if _HOOKS[kind] >= _FP16 else arguments


def _fp16_arguments(hook: Mapping[str, Any]) -> dict[str, Any]:
    scale = hook.get("loss_scale", 512.0)
    if scale is None:
        raise ConfigurationError("loss_scale must be 'dynamic', a number or a dict; got None")
    coalesce = hook.get("coalesce", True)
    if not isinstance(coalesce, bool):
        raise ConfigurationError(f"coalesce must be True or False, got {coalesce!r:.80}")
    arguments: dict[str, Any] = {"amp": scale}
    if not coalesce:
        arguments["coalesce"] = False
    if hook.get("bucket_size_mb", -1) != -1:
        arguments["bucket_size_mb"] = hook["bucket_size_mb"]
    distributed = hook.get("distributed", True)
    if not isinstance(distributed, bool):
        raise ConfigurationError(f"distributed must be True or False, got {distributed!r:.80}")
    return arguments if distributed else {**arguments, "kvstore": None}


def _amp_of(given: Mapping[str, Any]) -> Any:
    """The Trainer's `amp` for an AmpOptimWrapper; bfloat16 needs no scale, so only one that is given counts."""
    dtype, scale = given.get("dtype"), given.get("loss_scale", "dynamic")
    if dtype is None:
        return scale
    if "loss_scale" not in given:
        return {"dtype": dtype}
    return {**(scale if isinstance(scale, Mapping) else {"loss_scale": scale}), "dtype": dtype}


def _given_schedules(cfg: Mapping[str, Any]) -> Sequence[Any]:
    given = cfg.get("schedules")
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    return given or ()


def _schedules(cfg: Mapping[str, Any]) -> list[dict[str, Any]]:
    """lr_config and momentum_config, with what is known of how long training will be."""
    runner = section(cfg, "runner")
    check_keys("runner", runner, ("type", *_RUN[:2]))
    parts = [{key: part[key] for key in _RUN if part.get(key) is not None} for part in (cfg, runner)]
    length = joined(parts)
    return [
        {**length, **section(cfg, source), "name": name}
        for name, source in (("lr", "lr_config"), ("momentum", "momentum_config"))
        if cfg.get(source) is not None
    ]


def _of_instance(model: Any, instance: torch.optim.Optimizer | Optimizer) -> dict[str, Any]:
    """The model's parameters that an optimizer trains, under their names, and it."""
    model = unwrapped(model)
    if isinstance(instance, torch.optim.Optimizer) and hasattr(model, "named_parameters"):
        its = {id(p) for group in instance.param_groups for p in group["params"]}
        model = [(name, p) for name, p in model.named_parameters() if id(p) in its] or model
    return {"params": model, "optimizer": instance}


def _refuse_beside_wrapper(cfg: Mapping[str, Any]) -> None:
    beside = [key for key in ("optimizer", "optimizer_config", "fp16") if cfg.get(key) is not None]
    if beside:
        raise ConfigurationError(
            f"optim_wrapper says what {', '.join(beside)} would say; give one of the two"
        )
