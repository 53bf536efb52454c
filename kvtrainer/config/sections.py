"""Configurations as dicts, in the forms of MMCV and mmengine, and the arguments of a Trainer that they stand for."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.optim

from kvstore_server.optimizer import Optimizer
from kvtrainer.config.constructors import DefaultOptimizerConstructor, construct
from kvtrainer.config.dicts import check_keys, copied, joined, merge_config, section
from kvtrainer.config.imports import import_modules
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.param_options.places import unwrapped
from kvtrainer.registry import OPTIM_WRAPPERS, OPTIMIZER_CONSTRUCTORS, OPTIMIZERS

__all__ = [
    "OF_WRAPPER", "SECTIONS", "WRAPPER_OPTIONS", "check_overrides", "instance_arguments", "merge_config",
    "optimizer_arguments", "trainer_arguments", "wrapper_arguments", "wrapper_options",
]  # fmt: skip

_log = logging.getLogger(__name__)

SECTIONS = (
    "custom_imports", "optimizer", "optimizer_config", "fp16", "lr_config", "momentum_config", "optim_wrapper",
    "param_scheduler", "runner", "train_cfg", "total_epochs", "max_epochs", "max_iters", "epoch_length",
)  # fmt: skip
"""What `trainer_arguments` reads of a configuration, beside arguments of a Trainer by their own names."""
_RUN = ("max_epochs", "max_iters", "epoch_length")
_OF_RUNNER = ("type", *_RUN[:2])
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
_AMP_WRAPPER = "AmpOptimWrapper"
_WRAPPERS = ("OptimWrapper", "Trainer", _AMP_WRAPPER)
"""Types of an optim_wrapper that are a Trainer; so is one without a type."""
_RENAMED = {"paramwise_cfg": "paramwise", "accumulative_counts": "accumulate"}
_SCALING = ("loss_scale", "dtype")
OF_WRAPPER = ("type", "optimizer", "constructor")
WRAPPER_OPTIONS = (*_RENAMED, *(n for n in _ARGUMENTS if n not in ("kvstore", "bucket_size_mb", "coalesce")))
"""What an optim_wrapper may have beside OF_WRAPPER: the Trainer's options, some of them under mmengine's names too."""


def trainer_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a Trainer for a model and a configuration.

    Args:
        model: What is to be trained.
        cfg: The sections of `SECTIONS`, each as in MMCV (optim_wrapper as in mmengine), and arguments of the Trainer by
            their own names. An optimizer's type is torch's; Gluon's 'sgd' is "gluon:sgd". `fp16` and `optimizer_config`
            together are those of a Fp16OptimizerHook. lr_config, momentum_config and param_scheduler become
            `schedules`; those that lead to an end take it from max_epochs or max_iters, which may also be in `runner`
            or `train_cfg`. Sections of other parts of a training program are left alone, and named once in the log.

    Raises:
        ArgumentTypeError: a section has a wrong type.
        ConfigurationError: a key is unknown, or two of them say the same thing.
        UnregisteredNameError: a type or a constructor is not registered.
        CustomImportError: a module of custom_imports cannot be imported.
    """
    cfg = copied(cfg.to_dict() if hasattr(cfg, "to_dict") else cfg, "the configuration")
    _name_others(cfg)
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
    schedules = [*_given_schedules(arguments), *_given_schedules(cfg), *_schedules(cfg)]
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
    paramwise, maker = choice.get("paramwise_cfg"), choice.get("constructor") or DefaultOptimizerConstructor
    if isinstance(maker, str):
        maker = OPTIMIZER_CONSTRUCTORS.get(maker)
    kind, options = OPTIMIZERS.split(given)
    if maker is not DefaultOptimizerConstructor or not isinstance(kind, type):
        return instance_arguments(model, construct(maker, given, paramwise, unwrapped(model)))
    DefaultOptimizerConstructor(given, paramwise)
    arguments = {"params": model, "optimizer": kind, "optimizer_params": options}
    return arguments if paramwise is None else {**arguments, "paramwise": paramwise}


def wrapper_arguments(model: Any, cfg: Any) -> dict[str, Any]:
    """The Trainer's arguments for an `optim_wrapper` of mmengine, as `wrapper_options` reads it.

    Raises:
        ArgumentTypeError, ConfigurationError: as `trainer_arguments`; or the type is that of another wrapper.
    """
    given = copied(cfg, "optim_wrapper")
    kind, options = wrapper_options(given)
    if kind is not None:
        raise ConfigurationError(
            f"optim_wrapper of type {given['type']!r} is none that a Trainer is like; those are "
            f"{', '.join(_WRAPPERS)}. Build one of your own by OPTIM_WRAPPERS.build"
        )
    if given.get("optimizer") is None:
        raise ConfigurationError(f"optim_wrapper needs an 'optimizer', got {given!r:.200}")
    paramwise = options.pop("paramwise", None)
    return joined(
        [optimizer_arguments(model, given["optimizer"], paramwise, given.get("constructor")), options]
    )


def wrapper_options(cfg: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Read what an `optim_wrapper` says beside its optimizer and constructor: the type, and options of the Trainer.

    Args:
        cfg: type, optimizer, constructor; paramwise_cfg, accumulative_counts and other options of the Trainer; of an
            AmpOptimWrapper also loss_scale ('dynamic') and dtype.

    Returns:
        None where the type means the Trainer itself, else what it means; and the options, under the Trainer's names.

    Raises:
        ConfigurationError: an option is unknown, or two say the same.
        UnregisteredNameError: there is no wrapper of this type.
    """
    kind = cfg.get("type") or _WRAPPERS[0]
    twice = [f"{old!r} and {new!r}" for old, new in _RENAMED.items() if old in cfg and new in cfg]
    if kind == _AMP_WRAPPER and "amp" in cfg:
        twice += [f"{name!r} and 'amp'" for name in _SCALING if name in cfg]
    if twice:
        raise ConfigurationError(
            f"an optimizer wrapper is told the same by {', '.join(twice)}; give one of the two"
        )
    found = {n: value for n, value in cfg.items() if n not in OF_WRAPPER and value is not None}
    options = {_RENAMED.get(name, name): value for name, value in found.items()}
    if kind == _AMP_WRAPPER:
        named = {name: options.pop(name) for name in _SCALING if name in options}
        options.setdefault("amp", _amp_of(named))
    elif kind not in _WRAPPERS:
        return (OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind), options
    of_amp = _SCALING if kind == _AMP_WRAPPER else ()
    check_keys(f"optim_wrapper ({kind})", found, (*OF_WRAPPER, *WRAPPER_OPTIONS, *of_amp))
    return None, options


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


def _amp_of(named: Mapping[str, Any]) -> Any:
    """mmengine's loss_scale and dtype as the Trainer's `amp`; bfloat16 needs no scale that adapts."""
    scale, dtype = named.get("loss_scale", "dynamic"), named.get("dtype")
    if isinstance(scale, Mapping):
        return {**scale, **({} if dtype is None else {"dtype": dtype})}
    if dtype is None:
        return scale
    is_wide = str(dtype).removeprefix("torch.") == "bfloat16"
    return {"dtype": dtype} if is_wide and scale == "dynamic" else {"dtype": dtype, "loss_scale": scale}


def _given_schedules(cfg: Mapping[str, Any]) -> Sequence[Any]:
    given = cfg.get("schedules")
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    return given or ()


def _schedules(cfg: Mapping[str, Any]) -> list[Any]:
    """lr_config, momentum_config and param_scheduler, with what is known of how long training will be."""
    runner, loop = section(cfg, "runner"), section(cfg, "train_cfg")
    length: dict[str, Any] = {}
    for part in (cfg, runner, {"max_epochs": cfg.get("total_epochs")}, loop):
        told = {key: part[key] for key in _RUN if part.get(key) is not None}
        # The same number twice is a variable of the configuration that is used again.
        length = joined([{key: value for key, value in length.items() if told.get(key) != value}, told])
    made: list[Any] = [
        {**length, **section(cfg, source), "name": name}
        for name, source in (("lr", "lr_config"), ("momentum", "momentum_config"))
        if cfg.get(source) is not None
    ]
    given = cfg.get("param_scheduler") or []
    for one in [given] if isinstance(given, Mapping) else given:
        made.append({**one, "run": length} if length and isinstance(one, Mapping) else one)
    return made


def _name_others(cfg: Mapping[str, Any]) -> None:
    """Log which sections no Trainer reads; raise UnknownNameError if one is a misspelt one that it does."""
    known = (*SECTIONS, *_ARGUMENTS)
    others = [key for key in cfg if key not in known]
    slips = [key for key in others if _is_slip(str(key), known)]
    if slips:
        check_keys("the configuration", dict.fromkeys(slips), known)
    runner = section(cfg, "runner")
    of_runner = [key for key in runner if key not in _OF_RUNNER]
    if any(_is_slip(str(key), _OF_RUNNER) for key in of_runner):
        check_keys("runner", runner, _OF_RUNNER)
    others += [f"runner.{key}" for key in of_runner]
    if others:
        _log.warning("not for the Trainer, and so not read: %s", ", ".join(map(str, others)))


def _is_slip(name: str, known: Sequence[str]) -> bool:
    """Whether a name is a known one with a slip of the pen, rather than a variable's of a user's own.

    Word by word, because a word more or another one, as in num_epochs, optimizer_g or lr_cfg, is no slip.
    """
    words = name.split("_")
    return any(
        (len(one) > 3 and sorted(name.replace("_", "")) == sorted(one.replace("_", "")))
        or (
            len(words) == len(one.split("_"))
            and all(
                difflib.SequenceMatcher(None, mine, right).ratio() >= 0.75
                for mine, right in zip(words, one.split("_"), strict=True)
            )
        )
        for one in known
    )


def instance_arguments(model: Any, instance: torch.optim.Optimizer | Optimizer) -> dict[str, Any]:
    """The parameters that an optimizer trains, under the names that they have in the model, and it.

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


def _refuse_beside_wrapper(cfg: Mapping[str, Any]) -> None:
    beside = [key for key in ("optimizer", "optimizer_config", "fp16") if cfg.get(key) is not None]
    if beside:
        raise ConfigurationError(
            f"optim_wrapper says what {', '.join(beside)} would say; give one of the two"
        )
