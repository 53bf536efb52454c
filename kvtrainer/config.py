"""A Trainer's arguments from configurations: dicts in the forms of MMCV and mmengine.

`trainer_arguments` reads a whole configuration, whose optimizer is either MMCV's (`optimizer`, `optimizer_config`,
`fp16`, `lr_config`) or mmengine's (`optim_wrapper`, `param_scheduler`). It works in three steps:

1. Sections are copied, so that the user's dict never changes, and checked for unknown or misspelled keys.
2. Each section is translated into keyword arguments of the Trainer, under the Trainer's own names (`_OF_HOOK`,
   `_RENAMED`). Nothing is built except what a constructor of the user's builds.
3. `joined` merges the results. It refuses two different values for one argument; equal ones are accepted.

Names of classes are looked up in `kvtrainer.registry`. A constructor of your own returns a torch optimizer for a model
and two configurations; `constructor` names it::

    @OPTIMIZER_CONSTRUCTORS.register()
    class Halving:
        def __init__(self, optimizer_cfg, paramwise_cfg=None): ...
        def __call__(self, model): return torch.optim.SGD(...)
"""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.optim
from torch import Tensor
from torch.nn import Module

from kvstore_server import check
from kvstore_server.optimizer import Optimizer, create
from kvtrainer.common.registry_class import OPTIM_WRAPPERS, OPTIMIZER_CONSTRUCTORS, OPTIMIZERS
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    CustomImportError,
    FailedImportWarning,
    UnknownNameError,
)
from kvtrainer.options.paramwise import (
    CFG_KEYS,
    ParamGroups,
    ParamReport,
    apply_paramwise,
    paramwise_rules,
    rows_of,
    unwrap_model,
)

_log = logging.getLogger(__name__)

SECTIONS = (
    "custom_imports", "optimizer", "optimizer_config", "fp16", "lr_config", "momentum_config", "optim_wrapper",
    "param_scheduler", "runner", "train_cfg", "total_epochs", "max_epochs", "max_iters", "epoch_length",
)  # fmt: skip
"""The sections that `trainer_arguments` reads, beside arguments of a Trainer under their own names."""
_RUN = ("max_epochs", "max_iters", "epoch_length")
_OF_RUNNER = ("type", *_RUN[:2])
_HOOK = ("type", "grad_clip", "detect_anomalous_params")
_FP16 = ("loss_scale", "coalesce", "bucket_size_mb", "distributed")
_HOOKS = {
    "OptimizerHook": _HOOK,
    "Fp16OptimizerHook": (*_HOOK, *_FP16),
    "GradientCumulativeOptimizerHook": (*_HOOK, "cumulative_iters"),
    "GradientCumulativeFp16OptimizerHook": (*_HOOK, *_FP16, "cumulative_iters"),
}
"""MMCV's optimizer hooks whose work a Trainer does, and the options of each."""
_OF_HOOK = {
    "grad_clip": "clip_grad",
    "cumulative_iters": "accumulate",
    "detect_anomalous_params": "detect_anomalous_params",
    "loss_scale": "amp",
}
"""Option of a hook → the Trainer's name for it."""
ARGUMENTS = (
    "kvstore", "compression_params", "update_on_kvstore", "paramwise", "clip_grad", "amp", "accumulate", "schedules",
    "detect_anomalous_params", "on_nonfinite", "overlap", "overlap_pull", "hierarchy", "bucket_size_mb", "coalesce",
)  # fmt: skip
"""Options of a Trainer that a configuration may contain under their own names."""
_AMP_WRAPPER = "AmpOptimWrapper"
_WRAPPERS = ("OptimWrapper", "Trainer", _AMP_WRAPPER)
"""Types of an optim_wrapper that mean a Trainer; no type means one, too."""
_RENAMED = {"paramwise_cfg": "paramwise", "accumulative_counts": "accumulate"}
"""mmengine's name of an option → the Trainer's."""
_SCALING = ("loss_scale", "dtype")
_OF_WRAPPER = ("type", "optimizer", "constructor")
_WRAPPER_OPTIONS = (*_RENAMED, *(n for n in ARGUMENTS if n not in ("kvstore", "bucket_size_mb", "coalesce")))
_DELETE = "_delete_"


def trainer_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a Trainer for a model and a configuration.

    lr_config, momentum_config and param_scheduler become `schedules`. Those that depend on the length of the training
    take it from max_epochs or max_iters, which may also be in `runner` or `train_cfg`. Sections for other parts of a
    training program are ignored and named in one log line.

    Args:
        model: The model to train.
        cfg: The sections of `SECTIONS`, each as in MMCV (optim_wrapper as in mmengine), and arguments of the Trainer
            under their own names. The optimizer's type is torch's; Gluon's 'sgd' is "gluon:sgd". `fp16` and
            `optimizer_config` together are those of an Fp16OptimizerHook.

    Raises:
        ArgumentTypeError: A section has a wrong type.
        ConfigurationError: A key is unknown, or two keys mean the same.
        UnregisteredNameError: A type or a constructor is not registered.
        CustomImportError: A module of custom_imports cannot be imported.
    """
    # 1. Copy, look for misspelled sections, and import what registers names.
    cfg = copied(cfg, "the configuration")
    _log_unread_config(cfg)
    if cfg.get("custom_imports") is not None:
        imports = section(cfg, "custom_imports")
        check.known("custom_imports", imports, ("imports", "allow_failed_imports"), error=UnknownNameError)
        import_modules(imports.get("imports", ()), imports.get("allow_failed_imports", False))
    # 2. The optimizer, in mmengine's or in MMCV's form.
    if cfg.get("optim_wrapper") is not None:
        if doubled := [key for key in ("optimizer", "optimizer_config", "fp16") if cfg.get(key) is not None]:
            raise ConfigurationError(
                f"optim_wrapper replaces {', '.join(doubled)}; leave one or the other out"
            )
        of_optimizer = wrapper_arguments(model, cfg["optim_wrapper"])
    elif cfg.get("optimizer") is not None:
        of_optimizer = optimizer_arguments(model, cfg["optimizer"])
    else:
        raise ConfigurationError("the configuration needs an 'optimizer', such as dict(type='SGD', lr=0.01)")
    # 3. Merge with options that have the Trainer's names, and with the schedules.
    own = {key: cfg[key] for key in ARGUMENTS if key in cfg and key != "schedules"}
    arguments = joined([own, of_optimizer, hook_arguments(_configured_hook_options(cfg))])
    schedules = [*_configured_schedules(arguments), *_configured_schedules(cfg), *_schedules_of_config(cfg)]
    return {**arguments, "schedules": schedules} if schedules else arguments


def check_overrides(trainer: type, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if this class of Trainers does not take one of the arguments, with the valid names."""
    takes = inspect.signature(trainer).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        names = [name for name in dict.fromkeys([*takes, *ARGUMENTS]) if name != "params"]
        check.known("from_config", overrides, names, error=UnknownNameError)


def hook_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments for the options of one of MMCV's optimizer hooks.

    Raises:
        ConfigurationError: A switch is not a bool, or loss_scale is None.
    """
    found = {_OF_HOOK[name]: value for name, value in options.items() if name in _OF_HOOK}
    if found.get("clip_grad", found) is None:
        del found["clip_grad"]
    if found.get("amp", found) is None:
        raise ConfigurationError("loss_scale must be 'dynamic', a number or a dict; got None")
    # The defaults of the next options mean whatever the store does, so they are not passed on.
    if not check.boolean("coalesce", options.get("coalesce", True)):
        found["coalesce"] = False
    if options.get("bucket_size_mb", -1) != -1:
        found["bucket_size_mb"] = options["bucket_size_mb"]
    if not check.boolean("distributed", options.get("distributed", True)):
        found["kvstore"] = None
    return found


def _configured_hook_options(cfg: Mapping[str, Any]) -> dict[str, Any]:
    options = section(cfg, "optimizer_config")
    kind = options.get("type", "OptimizerHook")
    if cfg.get("fp16") is not None:
        half = section(cfg, "fp16")
        check.known("fp16", half, _FP16, error=UnknownNameError)
        options = joined([options, half])
        if kind in ("OptimizerHook", "GradientCumulativeOptimizerHook"):
            kind = kind.replace("Optimizer", "Fp16Optimizer")
    if kind not in _HOOKS:
        raise ConfigurationError(
            f"optimizer_config of type {kind!r} is not supported by a Trainer; supported are {', '.join(_HOOKS)}"
        )
    check.known(f"optimizer_config ({kind})", options, _HOOKS[kind], error=UnknownNameError)
    return {"loss_scale": 512.0, **options} if "loss_scale" in _HOOKS[kind] else options


def _configured_schedules(cfg: Mapping[str, Any]) -> Sequence[Any]:
    given = cfg.get("schedules")
    if given is not None and (not isinstance(given, Sequence) or isinstance(given, str)):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    return given or ()


def _schedules_of_config(cfg: Mapping[str, Any]) -> list[Any]:
    """Return lr_config, momentum_config and param_scheduler, each with the training's length if that is known."""
    runner, loop = section(cfg, "runner"), section(cfg, "train_cfg")
    length: dict[str, Any] = {}
    # The length may be given in several places, if they agree.
    for part in (cfg, runner, {"max_epochs": cfg.get("total_epochs")}, loop):
        told = {key: part[key] for key in _RUN if part.get(key) is not None}
        length = joined([length, told])
    made: list[Any] = [
        {**length, **section(cfg, source), "name": name}
        for name, source in (("lr", "lr_config"), ("momentum", "momentum_config"))
        if cfg.get(source) is not None
    ]
    given = check.as_mapping(cfg.get("param_scheduler")) or []
    for one in [given] if isinstance(given, Mapping) else given:
        made.append({**one, "run": length} if length and isinstance(one, Mapping) else one)
    return made


def _log_unread_config(cfg: Mapping[str, Any]) -> None:
    """Log which sections no Trainer reads. Raise UnknownNameError if one looks like a misspelled name."""
    others = check.others("the configuration", cfg, (*SECTIONS, *ARGUMENTS), error=UnknownNameError)
    of_runner = check.others("runner", section(cfg, "runner"), _OF_RUNNER, error=UnknownNameError)
    others += [f"runner.{key}" for key in of_runner]
    if others:
        _log.warning("ignored, because they are not for the Trainer: %s", ", ".join(others))


def optimizer_arguments(
    model: Any, cfg: Any, paramwise_cfg: Any = None, constructor: Any = None
) -> dict[str, Any]:
    """Return a Trainer's arguments for an optimizer's configuration, which may also be a built optimizer.

    Args:
        cfg: "type" and options, and optionally "constructor" and "paramwise_cfg".
        paramwise_cfg: Used if `cfg` has none.
        constructor: Used if `cfg` has none. The user's own returns a torch optimizer, whose groups the Trainer uses.

    Raises:
        ArgumentTypeError: `cfg` is not a dict or an optimizer, or the constructor did not return a torch optimizer.
        ConfigurationError: As in `trainer_arguments`.
    """
    return _single_optimizer_config(
        _arguments_by_configured_optimizer(model, cfg, paramwise_cfg, constructor)
    )


def wrapper_arguments(model: Any, cfg: Any) -> dict[str, Any]:
    """Return a Trainer's arguments for an `optim_wrapper` of mmengine. `read_wrapper` reads it.

    Raises:
        ArgumentTypeError, ConfigurationError: As in `trainer_arguments`; or the type is that of another wrapper.
    """
    cfg = copied(cfg, "optim_wrapper")
    kind, each = read_wrapper(model, cfg)
    if kind is not None:
        those = ", ".join(_WRAPPERS)
        text = f"optim_wrapper of type {cfg['type']!r} is not supported by a Trainer; supported are {those}"
        raise ConfigurationError(text)
    return _single_optimizer_config(each)


def _single_optimizer_config(each: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if "" not in each:
        several = ", ".join(each)
        raise ArgumentTypeError(
            f"a Trainer has one optimizer, but the constructor returned {several}; use a Strategy"
        )
    return each[""]


def _arguments_by_configured_optimizer(
    model: Any, cfg: Any, paramwise_cfg: Any, constructor: Any
) -> dict[str, dict[str, Any]]:
    """Return the result of `optimizer_arguments` by name of each optimizer; the name of a single one is ''."""
    # 1. A built optimizer has its groups already.
    if isinstance(cfg, torch.optim.Optimizer | Optimizer):
        if paramwise_cfg is not None or constructor is not None:
            raise ConfigurationError(
                f"a {type(cfg).__name__} instance has its own groups; to use paramwise_cfg or a constructor, give its "
                "type and options instead"
            )
        return {"": _configured_instance_arguments(model, cfg)}
    # 2. The inner dict and the arguments may both name a constructor, but not different ones.
    given = dict(check.mapping("optimizer, as in dict(type='SGD', lr=0.01),", cfg, error=ArgumentTypeError))
    own = {key: given.pop(key) for key in ("paramwise_cfg", "constructor") if key in given}
    outer = {"paramwise_cfg": paramwise_cfg, "constructor": constructor}
    choice = joined([own, {key: value for key, value in outer.items() if value is not None}])
    paramwise, maker = choice.get("paramwise_cfg"), _configured_constructor(choice.get("constructor"))
    # 3. Without a constructor the Trainer builds the optimizer, on servers too.
    if maker is None:
        kind, options = OPTIMIZERS.split(given)
        if isinstance(kind, type):
            DefaultOptimizerConstructor(given, paramwise)  # checks the options
            arguments = {"params": model, "optimizer": kind, "optimizer_params": options}
            return {"": arguments if paramwise is None else {**arguments, "paramwise": paramwise}}
    # 4. A constructor sees the plain model. It may return one optimizer or a dict of several.
    inner = unwrap_model(model)
    made = (maker or DefaultOptimizerConstructor)(given, paramwise)(
        inner.module if hasattr(inner, "named_replicas") else inner
    )
    each = made if isinstance(made, Mapping) else {"": made}
    for one in each.values():
        if not isinstance(one, torch.optim.Optimizer):
            text = f"the constructor {maker!r} must return a torch optimizer or a dict of these, got {made!r:.80}"
            raise ArgumentTypeError(text)
    return {str(name): _configured_instance_arguments(model, one) for name, one in each.items()}


def _configured_constructor(constructor: Any) -> Any:
    """Return the constructor for a name or class; None for the default one, whose work the Trainer does itself."""
    kind = OPTIMIZER_CONSTRUCTORS.get(constructor) if isinstance(constructor, str) else constructor
    return None if kind is DefaultOptimizerConstructor else kind


def _configured_instance_arguments(model: Any, instance: torch.optim.Optimizer | Optimizer) -> dict[str, Any]:
    model = unwrap_model(model)
    is_named = model is None or (hasattr(model, "named_parameters") and not hasattr(model, "named_replicas"))
    if isinstance(instance, torch.optim.Optimizer) and is_named:
        known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        its = [p for group in instance.param_groups for p in group["params"]]
        model = [(known.get(id(p), f"parameter{at}"), p) for at, p in enumerate(its)]
    return {"params": model, "optimizer": instance}


def read_wrapper(model: Any, cfg: Mapping[str, Any]) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Read an `optim_wrapper` of mmengine.

    Args:
        cfg: type, optimizer, constructor; paramwise_cfg, accumulative_counts and other options of the Trainer; for an
            AmpOptimWrapper also loss_scale ('dynamic') and dtype. With a constructor and no optimizer, all items that
            are not options are for the constructor.

    Returns:
        The class that its type names, None for a Trainer; and the Trainer's arguments for each optimizer, by name. The
        name of a single optimizer is ''.

    Raises:
        ConfigurationError: An option is unknown, two options mean the same, or there is no optimizer.
        UnregisteredNameError: There is no wrapper or constructor of this name.
    """
    # 1. Separate the optimizer's items from the Trainer's options.
    kind, optimizer = cfg.get("type") or _WRAPPERS[0], cfg.get("optimizer")
    constructor = _configured_constructor(cfg.get("constructor"))
    others = {n: value for n, value in cfg.items() if n not in _OF_WRAPPER and value is not None}
    if optimizer is None and constructor is not None:
        optimizer = {n: value for n, value in others.items() if n not in (*_WRAPPER_OPTIONS, *_SCALING)}
        others = {n: value for n, value in others.items() if n not in optimizer}
    if optimizer is None:
        raise ConfigurationError(f"optim_wrapper needs an 'optimizer', got {dict(cfg)!r:.200}")
    # 2. Use the Trainer's names, and combine what concerns mixed precision.
    options = joined([{_RENAMED.get(name, name): value} for name, value in others.items()])
    if kind == _AMP_WRAPPER and ("amp" not in options or set(_SCALING) & set(options)):
        scaling = _configured_amp(*(options.pop(name, None) for name in _SCALING))
        options = joined([options, {"amp": scaling}])
    # 3. A wrapper of the user's may take any options, so only ours are checked.
    found = None
    if kind in _WRAPPERS:
        known = (*_OF_WRAPPER, *_WRAPPER_OPTIONS, *(_SCALING if kind == _AMP_WRAPPER else ()))
        check.known(f"optim_wrapper ({kind})", others, known, error=UnknownNameError)
    else:
        found = OPTIM_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    each = _arguments_by_configured_optimizer(model, optimizer, options.pop("paramwise", None), constructor)
    return found, {name: joined([arguments, options]) for name, arguments in each.items()}


def _configured_amp(scale: Any, dtype: Any) -> Any:
    """Return mmengine's loss_scale and dtype as a Trainer's `amp`. bfloat16 needs no dynamic scale."""
    scale = "dynamic" if scale is None else check.as_mapping(scale)
    if isinstance(scale, Mapping):
        return {**scale, **({} if dtype is None else {"dtype": dtype})}
    if dtype is None:
        return scale
    is_wide = str(dtype).removeprefix("torch.") == "bfloat16"
    return {"dtype": dtype} if is_wide and scale == "dynamic" else {"dtype": dtype, "loss_scale": scale}


@OPTIMIZER_CONSTRUCTORS.register()
class DefaultOptimizerConstructor:
    """Builds a torch optimizer whose groups follow from paramwise_cfg.

    For other groups override `param_groups`; or, as MMCV's subclasses do, `add_params(params, module)`, which appends
    groups to a list.

    Args:
        optimizer_cfg: "type" and the options of a torch optimizer.
        paramwise_cfg: As in `kvtrainer.options.paramwise.apply_paramwise`.

    Raises:
        ArgumentTypeError: `optimizer_cfg`, `paramwise_cfg` or its custom_keys is not a dict.
        ConfigurationError: `paramwise_cfg` has an unknown key, or multiplies a weight_decay that is not given.
    """

    def __init__(self, optimizer_cfg: Mapping[str, Any], paramwise_cfg: Any = None) -> None:
        self.optimizer_cfg = dict(check.mapping("optimizer_cfg", optimizer_cfg, error=ArgumentTypeError))
        given = {} if paramwise_cfg is None else paramwise_cfg
        self.paramwise_cfg: dict[str, Any] = dict(
            check.mapping("paramwise_cfg", given, error=ArgumentTypeError)
        )
        self.base_lr = self.optimizer_cfg.get("lr")
        self.base_wd = self.optimizer_cfg.get("weight_decay")
        self.report: ParamReport | None = None
        """The options of each parameter, after a call."""
        self._validate_cfg()

    def _validate_cfg(self) -> None:
        """Check `paramwise_cfg`. Subclasses that build their own groups may have additional keys."""
        kind, default, cfg = type(self), DefaultOptimizerConstructor, self.paramwise_cfg
        if kind.add_params is not default.add_params or kind.param_groups is not default.param_groups:
            cfg = {name: value for name, value in cfg.items() if name in CFG_KEYS}
        paramwise_rules(cfg, self.optimizer_cfg)

    def __call__(self, model: Module) -> torch.optim.Optimizer:
        """Build the optimizer."""
        kind, options = OPTIMIZERS.split(self.optimizer_cfg)
        if isinstance(kind, type) and not issubclass(kind, torch.optim.Optimizer):
            name = self.optimizer_cfg["type"]
            raise ConfigurationError(f"{name!r} is not a torch optimizer; use it without a constructor")
        groups, self.report = self.param_groups(model)
        made = kind([dict(group) for group in groups], **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigurationError(f"{kind!r} must return a torch optimizer, got {made!r:.80}")
        return made

    def param_groups(self, model: Module) -> ParamGroups:
        """Return the groups for a model, and a report of them."""
        if type(self).add_params is DefaultOptimizerConstructor.add_params:
            return self._group_parameters(model)
        # A subclass that overrides `add_params` builds the groups; names are for the report.
        params: list[dict[str, Any]] = []
        self.add_params(params, unwrap_model(model))
        names = {id(p): name for name, p in model.named_parameters()}
        for group in params:
            its = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            group.setdefault("param_names", [names.get(id(p), "?") for p in its])
        return ParamGroups(params, ParamReport(tuple(rows_of(params))))

    def add_params(
        self, params: list[dict[str, Any]], module: Module, prefix: str = "", is_dcn_module: Any = None
    ) -> None:
        """Append a model's groups to a list. Arguments are MMCV's; a prefix is refused with a ConfigurationError."""
        if prefix:
            raise ConfigurationError(f"add_params() takes a whole model and no prefix, got prefix {prefix!r}")
        params.extend(self._group_parameters(module).groups)

    def _group_parameters(self, model: Module) -> ParamGroups:
        kind, options = OPTIMIZERS.split(self.optimizer_cfg)
        # The defaults of a function's optimizer are not known before it is called.
        defaults = dict(create(kind, **options).hyper) if isinstance(kind, type) else None
        return apply_paramwise(model, self.paramwise_cfg or None, options, defaults)


def merge_config(base: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` overlaid with `new`, recursively in nested dicts; neither is changed.

    A dict in `new` with `_delete_=True` replaces the value in `base`. It is required if that value is
    neither a dict nor None.

    Raises:
        ArgumentTypeError: A dict would be laid over a value of another type.
    """
    merged = copied(base, "the base configuration")
    for key, value in check.mapping("the new configuration", new, error=ArgumentTypeError).items():
        if key == _DELETE:
            continue
        before, value = merged.get(key), check.as_mapping(value)
        if not isinstance(value, Mapping):
            merged[key] = value
        elif before is None or value.get(_DELETE, False):
            merged[key] = copied(value, key)
        elif isinstance(before, Mapping):
            merged[key] = merge_config(before, value)
        else:
            kind = type(before).__name__
            raise ArgumentTypeError(
                f"{key} is a dict, but {kind} in the base; to replace that, add {_DELETE}=True"
            )
    return merged


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several dicts. Raises ConfigurationError if two have different values for a key."""
    entries: dict[str, Any] = {}
    for part in parts:
        twice = [name for name in part if name in entries and not check.is_same(part[name], entries[name])]
        if twice:
            values = (
                f"{name}: given twice, as {entries[name]!r:.80} and {part[name]!r:.80}" for name in twice
            )
            raise ConfigurationError(f"{'; '.join(values)}; give one value")
        entries |= part
    return entries


def section(cfg: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a copy of the dict under a key, empty if missing. Raises ArgumentTypeError if it is not a dict."""
    return {} if cfg.get(name) is None else copied(cfg[name], name)


def check_arguments(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise ArgumentTypeError unless `given` is a dict of arguments of the function; the message suggests names."""
    given = check.mapping(what, given, error=ArgumentTypeError)
    takes = inspect.signature(function).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in takes):
        names = [one.name for one in takes if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        check.known(what, given, names, error=ArgumentTypeError)


def copied(given: Any, what: str) -> dict[str, Any]:
    """Copy a dict, recursively, without `_delete_` marks. ArgumentTypeError names `what` if it is not a dict."""

    def copy(value: Any) -> Any:
        value = check.as_mapping(value)
        if isinstance(value, Mapping):
            return {key: copy(inner) for key, inner in value.items() if key != _DELETE}
        return [copy(inner) for inner in value] if type(value) is list else value

    return {**copy(check.mapping(what, given, error=ArgumentTypeError))}


def import_modules(imports: str | Sequence[str], allow_failed_imports: bool = False) -> None:
    """Import one module by name, or several.

    Raises:
        ArgumentTypeError: A name is not a str.
        CustomImportError: An import failed; also an ImportError. With allow_failed_imports a FailedImportWarning
            instead.
    """
    names = [imports] if isinstance(imports, str) else imports
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"custom_imports takes a list of module names, got {imports!r:.80}")
    check.boolean("allow_failed_imports", allow_failed_imports, error=ArgumentTypeError)
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            text = f"module {name!r} of custom_imports cannot be imported: {error}"
            if not allow_failed_imports:
                raise CustomImportError(f"{text}; is its folder on PYTHONPATH?") from error
            warnings.warn(text, FailedImportWarning, stacklevel=2)
