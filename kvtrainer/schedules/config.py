"""Read schedules from configurations, and bind them to an optimizer.

A configuration describes a schedule by MMCV's `policy`, mmengine's `type`, or Detectron's SOLVER keys. Reading gives a
`ScheduleSpec`, or a function that makes a schedule from an optimizer where the kind needs one (torch's schedulers,
ReduceOnPlateau). `bind_schedules` then binds all of them; if one fails, the optimizer's groups are as before.

Difference from mmengine: there, each scheduler multiplies the current value step by step. Here a schedule computes its
value from its start and its count, and schedules of the same value build on each other. The results are equal if the
schedules' windows do not overlap, or if the schedules are factors. They differ where OneCycle, CosineRestart, or a
minimum other than 0 overlaps another schedule; mmengine's values then depend on the order of the steps, and may exceed
those of either schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.optim
from torch import Tensor
from torch.optim import lr_scheduler

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvtrainer.common.registry_class import SCHEDULES
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    GroupValueError,
    UnknownNameError,
    UnregisteredNameError,
)
from kvtrainer.schedules.formulas import MMENGINE, OF_MMENGINE
from kvtrainer.schedules.param_schedule import BoundSchedule, ParamSchedule, ScheduleSpec
from kvtrainer.schedules.torch_schedule import (
    PlateauSchedule,
    TorchSchedule,
    bind_torch_schedule,
    is_torch_scheduler,
)

_RUN = ("max_epochs", "max_iters", "epoch_length")
_WARMUP = ("warmup", "warmup_iters", "warmup_ratio", "warmup_by_epoch")
WARMUP_OF_MOMENTUM = 0.9
"""Default warmup_ratio for momentum."""
_STEPWISE = ("cyclic", "onecycle")
_INFINITE = 10**9
"""mmengine's INF, for an end that is never reached."""
_PLATEAU = "ReduceOnPlateau"
_VALUES = {"LR": "lr", "Momentum": "momentum", "ParamScheduler": None}
_TYPES = {
    f"{kind}{ending}": (kind, name) for kind in (*OF_MMENGINE, _PLATEAU) for ending, name in _VALUES.items()
}
"""mmengine's type → (formula, scheduled value). The value is None if the configuration names it."""
_WHEN = (
    "type", "param_name", "begin", "end", "by_epoch", "convert_to_iter_based", "epoch_length", "last_step", "verbose",
    "groups",
)  # fmt: skip
"""Items of a dict with a `type` that are not options of the formula."""
SOLVER: Mapping[str, Any] = {
    "BASE_LR": 0.001, "LR_POLICY": "step", "GAMMA": 0.1, "STEP_SIZE": 30000, "STEPS": [], "LRS": [], "MAX_ITER": 40000,
    "WARM_UP_ITERS": 500, "WARM_UP_FACTOR": 1.0 / 3.0, "WARM_UP_METHOD": "linear",
}  # fmt: skip
"""Detectron's keys for the learning rate, with its defaults."""
_DETECTRON = ("step", "steps_with_decay", "steps_with_lrs", "cosine_decay", "exp_decay")

Maker = Callable[[torch.optim.Optimizer], Any]
"""Makes a schedule, or its spec, from an optimizer."""


def read_schedule(cfg: Mapping[str, Any], default_args: Mapping[str, Any]) -> ScheduleSpec | Maker:
    """Read a dict with 'policy' or 'type': a schedule, or a function that makes it. Its `run` extends default_args."""
    run = {key: default_args.get(key) for key in _RUN} | dict(cfg.get("run", {}))
    cfg = {key: value for key, value in cfg.items() if key != "run"}
    if "policy" in cfg:
        return _schedule_from_policy_config({**run, **cfg})
    if "type" in cfg:
        return _schedule_from_type_config(cfg, run)
    raise ConfigurationError(f"a schedule as a dict has 'policy' or 'type', got {cfg!r:.120}")


def schedule_from_lr_config(
    cfg: Mapping[str, Any],
    *,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    epoch_length: int | None = None,
) -> ScheduleSpec:
    """Read MMCV's lr_config: `policy`, its options, `by_epoch` (True by default), and the warm-up.

    Args:
        cfg: The configuration, which is not changed. `end` in it replaces max_epochs or max_iters.
        max_epochs, max_iters: The length of the training; `by_epoch` decides which one applies.
        epoch_length: Updates per epoch, for `warmup_by_epoch`: the warm-up then progresses within epochs, as in MMCV.
            Without it that warm-up changes once per epoch.

    Raises:
        ConfigurationError: An option is unknown or wrong, or the policy needs an end that is not known.
    """
    run = {"max_epochs": max_epochs, "max_iters": max_iters, "epoch_length": epoch_length}
    return _schedule_from_policy_config({**run, **cfg, "name": "lr"})


def schedule_from_momentum_config(
    cfg: Mapping[str, Any],
    *,
    max_epochs: int | None = None,
    max_iters: int | None = None,
    epoch_length: int | None = None,
) -> ScheduleSpec:
    """Read MMCV's momentum_config. Arguments and errors are those of `schedule_from_lr_config`."""
    run = {"max_epochs": max_epochs, "max_iters": max_iters, "epoch_length": epoch_length}
    return _schedule_from_policy_config({**run, **cfg, "name": "momentum"})


def detectron_schedule(solver: Mapping[str, Any]) -> ScheduleSpec:
    """Read the learning-rate schedule of Detectron's SOLVER keys, which counts steps. Missing keys have its defaults.

    Args:
        solver: LR_POLICY, BASE_LR, GAMMA, STEP_SIZE, STEPS, LRS, MAX_ITER, WARM_UP_ITERS, WARM_UP_FACTOR,
            WARM_UP_METHOD; other keys are ignored.

    Raises:
        UnregisteredNameError: Detectron has no such policy or warm-up.
        ConfigurationError: A value is missing or impossible, such as STEPS that do not begin at 0.
    """
    solver = {**SOLVER, **check.mapping("SOLVER", solver, error=ArgumentTypeError)}
    # 1. Translate the policy and its options.
    policy = check.one_of("LR_POLICY", solver["LR_POLICY"], _DETECTRON, error=UnregisteredNameError)
    gamma, steps = solver["GAMMA"], list(solver["STEPS"])
    if policy in ("steps_with_decay", "steps_with_lrs") and (not steps or steps[0] != 0):
        raise ConfigurationError(f"STEPS must begin at 0, got {steps!r}")
    rates = {"values": list(solver["LRS"]), "reference": solver["BASE_LR"]}
    choices: dict[str, tuple[str, dict[str, Any]]] = {
        "step": ("step", {"every": solver["STEP_SIZE"], "gamma": gamma}),
        "steps_with_decay": ("step", {"every": steps[1:], "gamma": gamma}) if steps[1:] else ("fixed", {}),
        "steps_with_lrs": ("steps_with_lrs", {"steps": steps, **rates}),
        "cosine_decay": ("CosineAnnealing", {"minimum": 0.0}),
        "exp_decay": ("exp_decay", {"gamma": gamma}),
    }
    name, options = choices[policy]
    # 2. Translate the warm-up. Detectron counts it in steps, like everything else.
    method, length, warm = solver["WARM_UP_METHOD"], solver["WARM_UP_ITERS"], {}
    if length:
        check.one_of("WARM_UP_METHOD", method, ("constant", "linear"), error=UnregisteredNameError)
        warm = {"warmup": method, "warmup_iters": length, "warmup_ratio": solver["WARM_UP_FACTOR"]}
    return ParamSchedule.unbound("lr", name, by="step", end=solver["MAX_ITER"], **warm, **options)


def _schedule_from_policy_config(cfg: Mapping[str, Any]) -> ScheduleSpec:
    """Read MMCV's form. Whatever concerns neither the window nor the warm-up is an option of the policy."""
    # 1. Policy and value.
    rest = dict(cfg)
    policy, name = rest.pop("policy", None), rest.pop("name", "lr")
    if not isinstance(policy, str):
        raise ConfigurationError(f"a schedule needs the name of its policy, got {policy!r}")
    # 2. The unit of counting, and the end in that unit.
    max_epochs, max_iters, length = (rest.pop(key, None) for key in _RUN)
    by_epoch = _is_schedule_by_epoch(rest, not is_stepwise_schedule(policy))
    if by_epoch and is_stepwise_schedule(policy):
        raise ConfigurationError(f"the policy {policy!r} goes by step; leave by_epoch out, or give False")
    if max_iters is None and max_epochs and length:
        max_iters = int(max_epochs * length)
    end = rest.pop("end", None)
    if end is None:
        end = max_epochs if by_epoch else max_iters
    # 3. The window and the warm-up.
    when = {key: rest.pop(key) for key in ("begin", "groups") if key in rest}
    warm = {key: rest.pop(key) for key in _WARMUP if key in rest}
    if name == "momentum" and "warmup" in warm:
        warm.setdefault("warmup_ratio", WARMUP_OF_MOMENTUM)
    if length is not None and warm.get("warmup_by_epoch"):
        warm |= {"warmup_iters": warm.get("warmup_iters", 0) * length, "warmup_by_epoch": False}
    # Epochs may differ in length, so an epoch's length is only used where a late warm-up needs it.
    if not (by_epoch and warm.get("warmup") and when.get("begin")):
        length = None
    by = "epoch" if by_epoch else "step"
    return ScheduleSpec(name, policy, by, end=end, epoch_length=length, **when, **warm, options=rest)


def is_stepwise_schedule(policy: str) -> bool:
    """Return whether MMCV defines a policy per iteration only."""
    return policy.replace("_", "").lower() in _STEPWISE


def _is_schedule_by_epoch(cfg: dict[str, Any], default: bool) -> bool:
    by = cfg.pop("by", None)
    by_epoch = cfg.pop("by_epoch", default if by is None else by == "epoch")
    if by not in (None, "epoch" if by_epoch else "step"):
        raise ConfigurationError(f"a schedule goes by='epoch' or by='step', like its by_epoch; got {by!r}")
    return bool(by_epoch)


def _schedule_from_type_config(cfg: Mapping[str, Any], run: Mapping[str, Any]) -> ScheduleSpec | Maker:
    """Read mmengine's form. A class or function as `type`, or one registered in `SCHEDULES`, is called with the
    optimizer and the options. `verbose` has no effect.
    """
    # 1. A schedule that is not ours is only called.
    by_epoch = bool(cfg.get("by_epoch", True))
    if (made := _find_foreign_schedule(cfg["type"])) is not None:
        given = {key: value for key, value in cfg.items() if key not in ("type", "by_epoch")}
        return _schedule_factory(made, given, "epoch" if by_epoch else "step")
    # 2. The value, the options, and the window.
    kind, name = _TYPES[cfg["type"]]
    name = name or cfg.get("param_name")
    if not isinstance(name, str):
        raise ConfigurationError(f"a {cfg['type']} needs param_name, the key of the groups that it schedules")
    last_step = check.integer("last_step", cfg.get("last_step", -1), -1)
    options = {key: value for key, value in cfg.items() if key not in _WHEN}
    begin, end = _begin_and_end_of_schedule(cfg, run, is_optional=kind == _PLATEAU)
    if kind == _PLATEAU:
        return _read_plateau_schedule(cfg, name, begin, end, options)
    # 3. The window in steps, if that is asked for.
    if cfg.get("convert_to_iter_based"):
        begin, end = _schedule_epochs_to_steps(cfg, run, options, begin, end)
        by_epoch = False
    span = (_INFINITE if end is None else end) - begin
    if kind in ("Constant", "Linear") and span == 1:
        end = None  # the value changes after this single step
    options = _schedule_options_with_span(kind, name, options, span)
    # 4. `last_step` resumes: this many steps or epochs have passed.
    passed = 0 if last_step == -1 else begin + last_step + 1
    policy, by = f"{MMENGINE}{kind}", "epoch" if by_epoch else "step"
    spec = ScheduleSpec(
        name, policy, by, begin, end, groups=cfg.get("groups"), passed=passed, options=options
    )
    return spec if last_step == -1 else _require_initial_values(spec)


def _begin_and_end_of_schedule(
    cfg: Mapping[str, Any], run: Mapping[str, Any], is_optional: bool
) -> tuple[Any, Any]:
    begin, end = cfg.get("begin", 0), cfg.get("end")
    if end is None:
        limit = "max_epochs" if cfg.get("by_epoch", True) else "max_iters"
        end = run.get(limit)
        if end is None and not is_optional:
            raise ConfigurationError(
                f"{limit} must be specified in default_args (dispatch_kwargs of a strategy), or `end` in the schedule "
                f"{dict(cfg)!r:.120}"
            )
    end = None if end is None or end >= _INFINITE else end
    if end is not None and end <= begin:
        raise ConfigurationError(f"end should be larger than begin, but got begin={begin}, end={end}")
    return begin, end


def _schedule_options_with_span(kind: str, name: str, options: dict[str, Any], span: int) -> dict[str, Any]:
    if kind == "OneCycle":
        if name != "lr":
            raise ConfigurationError(
                "OneCycle of this form schedules the learning rate only; for momentum use a policy"
            )
        return {"total_steps": span, **options}
    if kind == "CosineAnnealing":
        return {**options, "T_max": options.get("T_max") or span}
    if kind in ("Constant", "Linear", "Poly"):
        if "length" in options:
            raise ConfigurationError(f"a schedule of type {kind!r} has no option 'length'")
        return {**options, "length": max(span - 1, 1)}  # the end is reached in the last step
    return options


def _require_initial_values(spec: ScheduleSpec) -> Maker:
    def checked(optimizer: torch.optim.Optimizer) -> ScheduleSpec:
        for index, group in enumerate(getattr(optimizer, "param_groups", ())):
            if f"initial_{spec.name}" not in group:
                raise GroupValueError(
                    f"last_step goes on from a former run, but parameter group {index} has no 'initial_{spec.name}', "
                    "which it started from; load the optimizer's state before"
                )
        return spec

    return checked


def _find_foreign_schedule(given: object) -> Callable[..., Any] | None:
    """Return a schedule that is not ours: a class or function, a registered one, or torch's. None if it is ours."""
    if callable(given):
        return given
    if not isinstance(given, str):
        raise ConfigurationError(f"the type of a schedule is a name or what makes one, got {given!r:.80}")
    if given in SCHEDULES:
        return SCHEDULES.get(given)  # type: ignore[no-any-return]
    if given in _TYPES:
        return None
    found: Callable[..., Any] | None = getattr(lr_scheduler, given.removeprefix("torch:"), None)
    if found is None:
        known = [one for one in _TYPES if one.endswith("LR")]
        raise UnregisteredNameError(
            f"there is no schedule of type {given!r}; there are {', '.join(known)}, the same with Momentum, torch's "
            f"schedulers, and what is registered in SCHEDULES{did_you_mean(given, known)}"
        )
    return found


def _schedule_factory(made: Callable[..., Any], options: dict[str, Any], by: str) -> Maker:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        try:
            schedule = made(optimizer, **options)
        except (TypeError, ValueError) as error:
            name = getattr(made, "__name__", repr(made))
            raise ConfigurationError(f"the schedule {name} cannot be made: {error}") from error
        return bind_torch_schedule(schedule, by)

    return make


def _schedule_epochs_to_steps(
    cfg: Mapping[str, Any], run: Mapping[str, Any], options: dict[str, Any], begin: Any, end: Any
) -> tuple[int, int | None]:
    if not cfg.get("by_epoch", True):
        raise ConfigurationError("only a schedule with by_epoch=True can be converted to go by step")
    given = cfg.get("epoch_length", run.get("epoch_length"))
    length = check.integer("epoch_length, the updates in an epoch, for convert_to_iter_based", given, 1)
    for key in ("step_size", "T_max", "total_steps"):
        if options.get(key) is not None:
            options[key] = options[key] * length
    for key in ("milestones", "periods"):
        if options.get(key) is not None:
            options[key] = [one * length for one in options[key]]
    return int(begin * length), None if end is None else int(end * length)


def _read_plateau_schedule(
    cfg: Mapping[str, Any], name: str, begin: int, end: int | None, options: dict[str, Any]
) -> Callable[[torch.optim.Optimizer], PlateauSchedule]:
    """Read ReduceOnPlateau with mmengine's options. `monitor` is ignored, since the caller passes the metric."""
    if not cfg.get("by_epoch", True) or cfg.get("convert_to_iter_based"):
        raise ConfigurationError(
            f"{cfg['type']} depends on the metric of end_epoch(metric); leave out by_epoch=False and "
            "convert_to_iter_based"
        )
    # mmengine's options, under the names of torch's ReduceLROnPlateau.
    options.pop("monitor", None)
    rule = check.one_of("rule", options.pop("rule", "less"), ("less", "greater"))
    check.number("threshold", options.get("threshold", 0), 0)
    mode = options.pop("threshold_rule", "rel")
    made = {"threshold_mode": mode, "minimum": options.pop("min_value", 0.0), **options}
    made |= {"mode": "min" if rule == "less" else "max"}
    made |= {"begin": begin, "end": end, "groups": cfg.get("groups")}
    return lambda optimizer: PlateauSchedule(optimizer, name, **made)


def bind_schedules(
    given: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    default_args: Mapping[str, Any] | None = None,
    bound_before: Sequence[BoundSchedule] = (),
) -> list[BoundSchedule]:
    """Bind schedules to an optimizer, in order. Those of the same value build on each other.

    Args:
        given: Each a ScheduleSpec (`ParamSchedule.unbound`), a dict with 'policy' or 'type', a function optimizer →
            scheduler, or something bound to this optimizer: a ParamSchedule, a torch scheduler, or an object with the
            same methods. `dict(scheduler=…, by='epoch')` says that a torch scheduler is advanced per epoch, not per
            step.
        optimizer: A torch.optim.Optimizer, which includes Trainers.
        default_args: max_epochs, max_iters and epoch_length, for dicts that do not contain their end.
        bound_before: Schedules that the optimizer already has; new ones of the same value build on them.

    Returns:
        The schedules to advance. If a schedule counts epochs and its warm-up steps, the clock of the warm-up follows
        it, unless `given` contains the clock, as the result of a former call does.

    Raises:
        ArgumentTypeError: An item is something else.
        ConfigurationError: An item does not fit the optimizer, or would overwrite another one's values. After either
            error the groups are as before.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ArgumentTypeError(f"schedules must be a list of schedules, got {given!r:.80}")
    bound: list[BoundSchedule] = []
    made: list[BoundSchedule] = []
    last = {one.name: one for one in bound_before if isinstance(one, ParamSchedule)}
    with _restore_scheduled_groups_on_error(optimizer, made):
        for one in given:
            schedule = _bind_schedule(one, optimizer, default_args or {}, last)
            if schedule is not one:
                made.append(schedule)
            bound.append(schedule)
            if isinstance(schedule, ParamSchedule):
                last[schedule.name] = schedule
                clock = schedule.warmup_clock
                if clock is not None and not any(other is clock for other in given):
                    bound.append(clock)
        _check_schedule_conflicts([*bound_before, *bound])
    return bound


def build_param_schedules(
    cfg: Any, optimizer: Any, default_args: Mapping[str, Any] | None = None
) -> list[BoundSchedule] | dict[str, list[BoundSchedule]]:
    """Make the schedules of one optimizer, or of several by name; mmengine's build_param_scheduler.

    Args:
        cfg: A schedule or a list, as in `bind_schedules`. For several optimizers it may be a dict of these by the
            optimizers' names; otherwise all optimizers get the same.
        optimizer: A torch.optim.Optimizer, or a mapping of several by name.
        default_args: max_epochs, max_iters, epoch_length; not changed.

    Raises:
        ArgumentTypeError: `optimizer` or a schedule has a wrong type.
        ConfigurationError: An end is given neither by the schedule nor by `default_args`; or as in `bind_schedules`.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        given = list(cfg) if isinstance(cfg, Sequence) and not isinstance(cfg, str) else [cfg]
        return bind_schedules(given, optimizer, default_args, getattr(optimizer, "schedules", ()))
    if not isinstance(optimizer, Mapping) or not optimizer:
        raise ArgumentTypeError(
            f"schedules need an optimizer or a mapping of several by name, got {type(optimizer).__name__}"
        )
    made: dict[str, Any] = {
        name: build_param_schedules(one, optimizer[name], default_args)
        for name, one in schedules_by_optimizer(cfg, optimizer).items()
    }
    return made


def schedules_by_optimizer(cfg: Any, optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """Return each optimizer's schedules: `cfg` is a dict by their names, or anything else, for all of them."""
    found = check.as_mapping(cfg)
    if not isinstance(found, Mapping) or {"type", "policy", "scheduler"} & set(found):
        found = dict.fromkeys(optimizers, found)
    if unknown := sorted(set(found) - set(optimizers)):
        raise UnknownNameError(
            f"there are schedules for {', '.join(map(repr, unknown))}, but the optimizers are "
            f"{', '.join(map(repr, optimizers))}"
        )
    return dict(found)


def _bind_schedule(
    given: Any, optimizer: torch.optim.Optimizer, run: Mapping[str, Any], last: Mapping[str, ParamSchedule]
) -> BoundSchedule:
    # 1. Unpack dict(scheduler=…, by=…).
    given = check.as_mapping(given)
    one, by = given, None
    if isinstance(given, Mapping) and "scheduler" in given:
        one, by = given["scheduler"], given.get("by")
        if set(given) - {"scheduler", "by"} or given.get("by", "step") not in ("step", "epoch"):
            raise ConfigurationError(
                f"a dict with a scheduler has that and by='step' or 'epoch', got {given!r:.120}"
            )
    # 2. Turn any description into a bound schedule: dict → spec or function → schedule.
    if isinstance(one, Mapping):
        one = read_schedule(one, run)
    if callable(one) and not is_torch_scheduler(one):
        one = one(optimizer)
    if isinstance(one, ScheduleSpec):
        one = ParamSchedule(optimizer, one, after=last.get(one.name))
    # 3. Check that it is one, and bound to this optimizer. A Trainer shares its groups with its optimizer.
    if not is_torch_scheduler(one):
        raise ArgumentTypeError(
            "a schedule is a ParamSchedule, a dict with 'policy' or 'type', a scheduler of torch or a function that "
            f"makes one of an optimizer; got {type(one).__name__}"
        )
    kind = type(one.scheduler if isinstance(one, TorchSchedule) else one).__name__
    if one.optimizer is not optimizer and one.optimizer.param_groups is not optimizer.param_groups:
        raise ConfigurationError(
            f"this {kind} is bound to another optimizer, a {type(one.optimizer).__name__}; give a function that makes "
            "it, or bind it to this one"
        )
    bound: BoundSchedule = bind_torch_schedule(one, by or "step")
    if by not in (None, bound.by):
        raise ConfigurationError(f"by={by!r} was given for a {kind}, which is advanced by {bound.by!r}")
    return bound


def _check_schedule_conflicts(schedules: Sequence[BoundSchedule]) -> None:
    """Let schedules by metric scale what other schedules of the same value write."""
    ours = [one for one in schedules if isinstance(one, ParamSchedule)]
    for at, one in enumerate(ours):
        if any(one.conflicts_with(other) for other in ours[:at]):
            raise ConfigurationError(
                f"two schedules of {one.name!r} would overwrite each other's values; give ParamSchedule.unbound(…), or "
                "after=…, so that one builds on the other"
            )
    by_name = {one.name: one for one in reversed(ours)}
    for other in schedules:
        if isinstance(other, PlateauSchedule) and other.name in by_name:
            other.target = by_name[other.name].target
        if isinstance(other, TorchSchedule) and (both := sorted(other.names & set(by_name))):
            raise ConfigurationError(
                f"{type(other.scheduler).__name__} and a ParamSchedule would overwrite each other's values of "
                f"{both[0]!r}; give both as dicts or ParamSchedules, or both as torch schedulers"
            )


@contextmanager
def _restore_scheduled_groups_on_error(
    optimizer: torch.optim.Optimizer, made: Sequence[BoundSchedule]
) -> Iterator[None]:
    """Run a block that binds schedules and appends them to `made`. If it raises, restore the groups and unbind."""
    groups = list(getattr(optimizer, "param_groups", ()))
    before = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in groups
    ]
    try:
        yield
    except BaseException:
        for one in made:
            if isinstance(one, ParamSchedule):
                one.unbind()
        for group, values in zip(groups, before, strict=True):
            for key in set(group) - set(values):
                del group[key]
            for key, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # others may hold a reference to this tensor
                else:
                    group[key] = value
        raise
