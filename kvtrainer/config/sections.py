"""Read whole configurations in the forms of MMCV and mmengine into a Trainer's arguments."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore_server import check
from kvtrainer.config.dicts import check_keys, copied, import_modules, joined, section
from kvtrainer.config.optimizers import ARGUMENTS, optimizer_arguments, wrapper_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError

_log = logging.getLogger(__name__)

SECTIONS = (
    "custom_imports", "optimizer", "optimizer_config", "fp16", "lr_config", "momentum_config", "optim_wrapper",
    "param_scheduler", "runner", "train_cfg", "total_epochs", "max_epochs", "max_iters", "epoch_length",
)  # fmt: skip
"""Sections that `trainer_arguments` reads, beside arguments of a Trainer by their own names."""
_RUN = ("max_epochs", "max_iters", "epoch_length")
_OF_RUNNER = ("type", *_RUN[:2])
_HOOK = {"type", "grad_clip", "detect_anomalous_params"}
_FP16 = {"loss_scale", "coalesce", "bucket_size_mb", "distributed"}
_HOOKS = {
    "OptimizerHook": _HOOK,
    "Fp16OptimizerHook": _HOOK | _FP16,
    "GradientCumulativeOptimizerHook": _HOOK | {"cumulative_iters"},
    "GradientCumulativeFp16OptimizerHook": _HOOK | _FP16 | {"cumulative_iters"},
}
"""Hooks whose options a Trainer has, and those options."""
_OF_HOOK = {
    "grad_clip": "clip_grad",
    "cumulative_iters": "accumulate",
    "detect_anomalous_params": "detect_anomalous_params",
    "loss_scale": "amp",
}
"""Options of the hooks, and what the Trainer calls them."""


def trainer_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of a Trainer for a model and a configuration.

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
    if cfg.get("optim_wrapper") is not None:
        beside = [key for key in ("optimizer", "optimizer_config", "fp16") if cfg.get(key) is not None]
        if beside:
            raise ConfigurationError(
                f"optim_wrapper says what {', '.join(beside)} would say; give one of the two"
            )
        of_optimizer = wrapper_arguments(model, cfg["optim_wrapper"])
    elif cfg.get("optimizer") is not None:
        of_optimizer = optimizer_arguments(model, cfg["optimizer"])
    else:
        raise ConfigurationError("the configuration needs an 'optimizer', such as dict(type='SGD', lr=0.01)")
    own = {key: cfg[key] for key in ARGUMENTS if key in cfg and key != "schedules"}
    arguments = joined([own, of_optimizer, hook_arguments(_hook_options(cfg))])
    schedules = [*_given_schedules(arguments), *_given_schedules(cfg), *_described_schedules(cfg)]
    return {**arguments, "schedules": schedules} if schedules else arguments


def check_overrides(trainer: type, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigurationError, naming them, if there are arguments that this class of Trainers does not take."""
    takes = inspect.signature(trainer).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        check_keys("from_config", overrides, {*takes, *ARGUMENTS} - {"params"})


def hook_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments for the options of one of MMCV's optimizer hooks.

    Raises:
        ConfigurationError: a switch is neither True nor False, or there is a loss_scale, but it is None.
    """
    found = {_OF_HOOK[name]: value for name, value in options.items() if name in _OF_HOOK}
    if found.get("clip_grad", found) is None:
        del found["clip_grad"]
    if found.get("amp", found) is None:
        raise ConfigurationError("loss_scale must be 'dynamic', a number or a dict; got None")
    # The defaults of these leave it to the store, whatever that is.
    if not check.boolean("coalesce", options.get("coalesce", True)):
        found["coalesce"] = False
    if options.get("bucket_size_mb", -1) != -1:
        found["bucket_size_mb"] = options["bucket_size_mb"]
    if not check.boolean("distributed", options.get("distributed", True)):
        found["kvstore"] = None
    return found


def _hook_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the hook that optimizer_config and fp16 describe together."""
    options = section(cfg, "optimizer_config")
    kind = options.get("type", "OptimizerHook")
    if cfg.get("fp16") is not None:
        half = section(cfg, "fp16")
        check_keys("fp16", half, _FP16)
        options = joined([options, half])
        if kind in ("OptimizerHook", "GradientCumulativeOptimizerHook"):
            kind = kind.replace("Optimizer", "Fp16Optimizer")
    if kind not in _HOOKS:
        raise ConfigurationError(
            f"optimizer_config of type {kind!r} is no hook whose options a Trainer has; those are {', '.join(_HOOKS)}. "
            "Build another one by HOOKS.build and let your runner call it"
        )
    check_keys(f"optimizer_config ({kind})", options, _HOOKS[kind])
    return {"loss_scale": 512.0, **options} if _HOOKS[kind] >= _FP16 else options


def _given_schedules(cfg: Mapping[str, Any]) -> Sequence[Any]:
    given = cfg.get("schedules")
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    return given or ()


def _described_schedules(cfg: Mapping[str, Any]) -> list[Any]:
    """Return lr_config, momentum_config and param_scheduler, each with the length of the training if that is known."""
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
    known = (*SECTIONS, *ARGUMENTS)
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
    """Tell a known name with a slip of the pen from that of a user's own variable.

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
