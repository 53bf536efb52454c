"""Detectron's optimizer: its rules for parameters, its configuration keys, and linear scaling over several GPUs."""

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
"""Detectron's keys that concern the optimizer, with its defaults."""
_SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in _DEFAULTS))
_MIN_RATE = 1e-7
"""Detectron does not correct the momentum below this learning rate, which it takes for a placeholder."""


def detectron_rules(weight_decay_gn: float = 0.0, bias_lr_mult: float = 2.0) -> list[Rule]:
    """Return Detectron's rules: biases learn at a multiple of the rate without decay, GroupNorm scales have their own
    decay.

    Every bias counts, also those of GroupNorm and of affine layers. Other parameters keep the optimizer's options.

    Args:
        weight_decay_gn: The weight decay of GroupNorm scales; not multiplied by the optimizer's.
        bias_lr_mult: The learning rate of biases, as a multiple of the optimizer's.
    """
    return [
        Rule(_is_detectron_bias, name="bias", lr_mult=bias_lr_mult, weight_decay=0.0, warn_unmatched=False),
        Rule(
            _is_detectron_group_norm,
            name="GroupNorm scale",
            weight_decay=weight_decay_gn,
            warn_unmatched=False,
        ),
    ]


class Recipe(NamedTuple):
    """A schedule for some number of devices."""

    base_lr: float
    steps: list[int]
    max_iter: int


def linear_scaling(base_lr: float, steps: Sequence[int], max_iter: int, n: float) -> Recipe:
    """Scale a schedule to `n` times as many images per iteration: `n` times the learning rate, 1/n of the iterations.

    This is the linear scaling rule of Goyal et al. (https://arxiv.org/abs/1706.02677), as Detectron applies it.

    Args:
        n: The new number of devices divided by the number that the schedule is for: 1 / 8 goes from eight to one.

    Returns:
        The scaled schedule, with iterations rounded to the nearest integer.

    Raises:
        ConfigurationError: `n` is not above 0, or an argument is not a number.
    """
    check.number("base_lr", base_lr)
    check.number("max_iter", max_iter)
    factor = Fraction(check.number("n", n, above=0)).limit_denominator(10**6)
    scaled = [round(step / factor) for step in steps]
    return Recipe(base_lr * float(n), scaled, max(1, round(max_iter / factor)))


def detectron_arguments(model: Any, cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Trainer arguments that train a model as Detectron does with a configuration.

    The optimizer is Gluon's 'sgd', which applies the learning rate inside the momentum, as caffe2 does. SCALE_MOMENTUM
    becomes its `momentum_correction`. Policy and warm-up become a schedule that counts steps. Sections for other parts
    of a training program are ignored and named in one log line.

    Args:
        model: The model to train. With NUM_GPUS above 1, a DataParallel with that many replicas.
        cfg: SOLVER.*, NUM_GPUS and USE_NCCL, nested ({"SOLVER": {"BASE_LR": 0.02}}) or flat ({"SOLVER.BASE_LR": 0.02}).
            Missing keys have Detectron's defaults. NUM_GPUS and USE_NCCL are for `detectron_devices`.

    Raises:
        ArgumentTypeError: `cfg` is not a dict.
        ConfigurationError: A key of SOLVER is unknown, is given twice with different values, or is not a number; or the
            model does not have NUM_GPUS replicas.
    """
    # 1. Read the keys, and compare the number of devices with the model.
    count, reducer = detectron_devices(cfg)
    read = _read_detectron_config(cfg)
    cfg = check.mapping("Detectron's configuration", cfg)
    solver = {name: read[f"SOLVER.{name}"] for name in _SOLVER}
    replicas = len(getattr(model, "replicas", (model,)))
    if "NUM_GPUS" in cfg and replicas != count:
        raise ConfigurationError(
            f"NUM_GPUS is {count}, but the model has {replicas} replicas; pass kvtrainer.DataParallel(model, devices, "
            f"reducer={reducer!r}) with {count} devices, or set NUM_GPUS={replicas}"
        )
    # 2. Name what is ignored.
    if others := _unread_detectron_sections(cfg):
        _log.warning("ignored, because they are not for the Trainer: %s", ", ".join(others))
    # 3. Translate caffe2's options into those of Gluon's sgd.
    options = {
        "learning_rate": solver["BASE_LR"],
        "momentum": solver["MOMENTUM"],
        "wd": solver["WEIGHT_DECAY"],
    }
    if solver["SCALE_MOMENTUM"]:
        threshold = solver["SCALE_MOMENTUM_THRESHOLD"]
        options["momentum_correction"] = {"threshold": threshold, "min_lr": _MIN_RATE}
    return {
        "params": model,
        "optimizer": "sgd",
        "optimizer_params": options,
        "paramwise": detectron_rules(solver["WEIGHT_DECAY_GN"]),
        "schedules": [detectron_schedule(solver)],
    }


def detectron_devices(cfg: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of devices, and how `kvtrainer.DataParallel` should reduce their gradients.

    The reducer is "nccl" with USE_NCCL, otherwise "tree", which is Detectron's own; for a single device it is "auto".
    Raises as `detectron_arguments` does.
    """
    read = _read_detectron_config(cfg)
    count = check.integer("NUM_GPUS", read["NUM_GPUS"], 1)
    use_nccl = check.boolean("USE_NCCL", read["USE_NCCL"])
    return count, "auto" if count == 1 else "nccl" if use_nccl else "tree"


def _read_detectron_config(cfg: Mapping[str, Any]) -> dict[str, Any]:
    cfg = check.mapping("Detectron's configuration", cfg, error=ArgumentTypeError)
    others = set(_unread_detectron_sections(cfg))
    # Mappings become flat keys, so that SOLVER.BASE_LR given in both forms is noticed.
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
        raise ConfigurationError(f"{log_threshold} has no effect: changes of the rate are not logged")
    return read


def _unread_detectron_sections(cfg: Mapping[str, Any]) -> list[str]:
    sections = dict.fromkeys(str(key).partition(".")[0] for key in cfg)
    return check.others("Detectron's configuration", sections, _SECTIONS)


def _is_detectron_bias(place: ModuleParameter) -> bool:
    # Torch also has in_proj_bias (attention) and bias_ih_l0 (recurrent layers).
    name = place.own_name
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")


def _is_detectron_group_norm(place: ModuleParameter) -> bool:
    return isinstance(place.module, GroupNorm) and place.own_name == "weight"
