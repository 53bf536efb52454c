"""Gluon's optimizers with options whose effect shows within a few updates; all that a formula needs is named."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """An optimizer and its options, without wd, rescale_grad and clip_gradient."""

    name: str
    options: dict[str, Any]


_BETAS: dict[str, Any] = {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3}
_RMSPROP: dict[str, Any] = {"rho": 0.8, "momentum": 0.7, "clip_weights": None}

ELEMENTWISE: dict[str, Case] = {
    "sgd": Case("sgd", {"momentum": 0.0}),
    "sgd with momentum": Case("sgd", {"momentum": 0.7}),
    "nag": Case("nag", {"momentum": 0.7}),
    "nag without momentum": Case("nag", {"momentum": 0.0}),
    "signum": Case("signum", {"momentum": 0.7, "wd_lh": 0.05}),
    "signum without momentum": Case("signum", {"momentum": 0.0, "wd_lh": 0.05}),
    "dcasgd": Case("dcasgd", {"momentum": 0.7, "lamda": 0.5}),
    "dcasgd without momentum": Case("dcasgd", {"momentum": 0.0, "lamda": 0.5}),
    "ftml": Case("ftml", _BETAS),
    "adam": Case("adam", _BETAS),
    "adamw": Case("adamw", _BETAS),
    "adamw uncorrected": Case("adamw", {**_BETAS, "correct_bias": False}),
    "adabelief": Case("adabelief", _BETAS),
    "adabelief uncorrected": Case("adabelief", {**_BETAS, "correct_bias": False}),
    "adamax": Case("adamax", {"beta1": 0.8, "beta2": 0.95}),
    "nadam": Case("nadam", {**_BETAS, "schedule_decay": 0.3}),
    "adadelta": Case("adadelta", {"rho": 0.8, "epsilon": 1e-3}),
    "adagrad": Case("adagrad", {"epsilon": 1e-3}),
    "rmsprop": Case("rmsprop", {**_RMSPROP, "epsilon": 1e-3, "centered": False, "clip_weights": 1.1}),
    "rmsprop centered": Case("rmsprop", {**_RMSPROP, "epsilon": 1e-2, "centered": True}),
    "ftrl": Case("ftrl", {"lamda1": 0.2, "beta": 0.5}),
    "test": Case("test", {}),
}

WHOLE: dict[str, Case] = {
    "lamb": Case("lamb", _BETAS),
    "lamb within bounds": Case("lamb", {**_BETAS, "lower_bound": 1.5, "upper_bound": 2.5}),
    "lans": Case("lans", _BETAS),
    "lars": Case("lars", {"eta": 0.1, "momentum": 0.7, "epsilon": 0.1}),
    "groupadagrad": Case("groupadagrad", {"epsilon": 0.1}),
}

_CENTERED: dict[str, Any] = {**_RMSPROP, "epsilon": 1e-2, "centered": True}
MXNET1: dict[str, Case] = {
    "mxnet1:nag": Case("mxnet1:nag", {"momentum": 0.7}),
    "mxnet1:dcasgd": Case("mxnet1:dcasgd", {"momentum": 0.7, "lamda": 0.5}),
    "mxnet1:ftml": Case("mxnet1:ftml", _BETAS),
    "mxnet1:adam": Case("mxnet1:adam", _BETAS),
    "mxnet1:adamax": Case("mxnet1:adamax", {"beta1": 0.8, "beta2": 0.95}),
    "mxnet1:nadam": Case("mxnet1:nadam", {**_BETAS, "schedule_decay": 0.3}),
    "mxnet1:adadelta": Case("mxnet1:adadelta", {"rho": 0.8, "epsilon": 1e-3}),
    "mxnet1:adagrad": Case("mxnet1:adagrad", {"epsilon": 1e-2}),
    "mxnet1:rmsprop": Case(
        "mxnet1:rmsprop", {**_RMSPROP, "epsilon": 1e-2, "centered": False, "clip_weights": 1.1}
    ),
    "mxnet1:rmsprop centered": Case("mxnet1:rmsprop", _CENTERED),
    "mxnet1:lars": Case(
        "mxnet1:lars", {"eta": 0.1, "momentum": 0.7, "epsilon": 0.1, "momentum_correction": True}
    ),
    "mxnet1:groupadagrad": Case("mxnet1:groupadagrad", {"epsilon": 0.1}),
    "mxnet1:test": Case("mxnet1:test", {}),
}
"""Those of which MXNet 1.9.1 has a formula of its own."""
SAME_IN_MXNET1 = ("sgd", "signum", "ftrl", "lamb")
"""Those of which it has other defaults at most; SGLD is one, too."""

CASES: dict[str, Case] = {**ELEMENTWISE, **WHOLE, **MXNET1}
"""Every optimizer of Gluon except SGLD, which draws noise."""
