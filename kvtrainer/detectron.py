"""Detectron's optimizer: its rules for parameters, its configuration keys, and its recipe for several GPUs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from torch.nn import GroupNorm

from kvstore_server import check
from kvtrainer.config import joined
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.options.paramwise import ModuleParameter, Rule
from kvtrainer.schedules.config import SOLVER, detectron_schedule

_log = logging.getLogger(__name__)

_SOLVER: Mapping[str, Any] = {
    **SOLVER, "MOMENTUM": 0.9, "WEIGHT_DECAY": 0.0005, "WEIGHT_DECAY_GN": 0.0, "SCALE_MOMENTUM": True,
    "SCALE_MOMENTUM_THRESHOLD": 1.1, "LOG_LR_CHANGE_THRESHOLD": 1.1,
}  # fmt: skip
_DEFAULTS = {**{f"SOLVER.{name}": value for name, value in _SOLVER.items()}, "NUM_GPUS": 1, "USE_NCCL": False}
"""Detectron's keys about the optimizer, and their defaults."""
_SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in _DEFAULTS))
_LEAST_RATE = 1e-7
"""Below it Detectron does not correct the momentum: a rate as small was a placeholder."""


def detectron_rules(weight_decay_gn: float = 0.0, bias_lr_mult: float = 2.0) -> list[Rule]:
    """Detectron's rules: biases learn at twice the rate without decay, scales of GroupNorm decay by themselves.

    Every bias counts, those of GroupNorm and of affine layers too. All else is as the optimizer says.

    Args:
        weight_decay_gn: The weight decay of GroupNorm scales, absolute.
        bias_lr_mult: The learning rate of biases is that of the optimizer times this.
    """
    return [
        Rule(_is_bias, name="bias", lr_mult=bias_lr_mult, weight_decay=0.0, warn_unmatched=False),
        Rule(_is_group_norm, name="GroupNorm scale", weight_decay=weight_decay_gn, warn_unmatched=False),
    ]


class Recipe(NamedTuple):
    """A schedule for a number of devices."""

    base_lr: float
    steps: list[int]
    max_iter: int


def linear_scaling(base_lr: float, steps: Sequence[int], max_iter: int, n: float) -> Recipe:
    """Scale a schedule to `n` times as many images in each iteration: n times the rate, an n-th of the iterations.

    `n` is the new number of devices over the one that the arguments are for; 1 / 8 goes from eight to one. Iterations
    are rounded to the nearest.

    Raises:
        ConfigurationError: `n` is not above 0, or a number is none.
    """
    check.number("base_lr", base_lr)
    check.number("max_iter", max_iter)
    factor = Fraction(check.number("n", n, above=0)).limit_denominator(10**6)
    scaled = [round(step / factor) for step in steps]
    return Recipe(base_lr * float(n), scaled, max(1, round(max_iter / factor)))


def detectron_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments to train as Detectron does with a configuration.

    The optimizer is Gluon's 'sgd', which has the learning rate inside its momentum as caffe2 has. SCALE_MOMENTUM
    becomes its `momentum_correction`; changes of the rate are not logged. Policy and warm-up are a schedule by step.
    Sections of other parts of a training program are left alone, and named once in the log.

    Args:
        model: What the Trainer is to train: with several NUM_GPUS a DataParallel with as many replicas.
        cfg: SOLVER.*, NUM_GPUS and USE_NCCL, nested ({"SOLVER": {"BASE_LR": 0.02}}) or flat ({"SOLVER.BASE_LR": 0.02}).
            What is missing has Detectron's default. NUM_GPUS and USE_NCCL are for `detectron_devices`.

    Raises:
        ArgumentTypeError: `cfg` is no dict.
        ConfigurationError: a key of SOLVER is unknown, or given twice with different values, or a number is none; or
            the model has not NUM_GPUS replicas.
    """
    count, reducer = detectron_devices(cfg)
    read = _read(cfg)
    cfg = check.mapping("Detectron's configuration", cfg)
    solver = {name: read[f"SOLVER.{name}"] for name in _SOLVER}
    replicas = len(getattr(model, "replicas", (model,)))
    if "NUM_GPUS" in cfg and replicas != count:
        raise ConfigurationError(
            f"NUM_GPUS is {count}, but the model has {replicas} replicas; give kvtrainer.DataParallel(model, devices, "
            f"reducer={reducer!r}) with {count} devices, or NUM_GPUS={replicas}"
        )
    if others := _others(cfg):
        _log.warning("not for the Trainer, and so not read: %s", ", ".join(others))
    options = {
        "learning_rate": solver["BASE_LR"],
        "momentum": solver["MOMENTUM"],
        "wd": solver["WEIGHT_DECAY"],
    }
    if solver["SCALE_MOMENTUM"]:
        threshold = solver["SCALE_MOMENTUM_THRESHOLD"]
        options["momentum_correction"] = {"threshold": threshold, "min_lr": _LEAST_RATE}
    return {
        "params": model,
        "optimizer": "sgd",
        "optimizer_params": options,
        "paramwise": detectron_rules(solver["WEIGHT_DECAY_GN"]),
        "schedules": [detectron_schedule(solver)],
    }


def detectron_devices(cfg: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many devices train, and the reducer of their gradients: "nccl", or "tree" as Detectron's own.

    They are for `kvtrainer.DataParallel`. One device alone has "auto".

    Raises as `detectron_arguments` does.
    """
    read = _read(cfg)
    count = check.integer("NUM_GPUS", read["NUM_GPUS"], 1)
    use_nccl = check.boolean("USE_NCCL", read["USE_NCCL"])
    return count, "auto" if count == 1 else "nccl" if use_nccl else "tree"


def _read(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all keys, flat."""
    cfg = check.mapping("Detectron's configuration", cfg, error=ArgumentTypeError)
    others = set(_others(cfg))
    own = {
        key: check.as_mapping(value) for key, value in cfg.items() if str(key).partition(".")[0] not in others
    }
    nested = {key: value for key, value in own.items() if isinstance(value, Mapping)}
    rows = [{f"{key}.{name}": one for name, one in its.items()} for key, its in nested.items()]
    flat = joined([*rows, {key: value for key, value in own.items() if key not in nested}])
    check.known("the part of Detectron's configuration that is about the optimizer", flat, _DEFAULTS)
    for name, value in flat.items():
        if isinstance(_DEFAULTS[name], float):
            check.number(name, value)
    read = {**_DEFAULTS, **flat}
    check.boolean("SOLVER.SCALE_MOMENTUM", read["SOLVER.SCALE_MOMENTUM"])
    log_threshold = "SOLVER.LOG_LR_CHANGE_THRESHOLD"
    if read[log_threshold] != _DEFAULTS[log_threshold]:
        raise ConfigurationError(f"{log_threshold} would have no effect: changes of the rate are not logged")
    return read


def _others(cfg: Mapping[str, Any]) -> list[str]:
    """Return the sections that are of other parts of a training program. Raises ConfigurationError of misspelt ones."""
    sections = dict.fromkeys(str(key).partition(".")[0] for key in cfg)
    return check.others("Detectron's configuration", sections, _SECTIONS)


def _is_bias(place: ModuleParameter) -> bool:
    # Torch also has in_proj_bias (attention) and bias_ih_l0 (recurrent layers).
    name = place.own_name
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")


def _is_group_norm(place: ModuleParameter) -> bool:
    return isinstance(place.module, GroupNorm) and place.own_name == "weight"
