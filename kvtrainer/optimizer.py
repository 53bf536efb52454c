"""The optimizers for a training script: `create` returns one by name, and subclasses of `Optimizer` define new ones.

A user-defined optimizer lists its options in `defaults`, defines `update`, and is registered so that it can be named.
It gets arbitrary flat slices of the model; with `elementwise = False` it gets whole keys in their shapes::

    @kvtrainer.optimizer.register
    class AveragedSign(kvtrainer.optimizer.Optimizer):
        defaults = {"learning_rate": 0.01, "momentum": 0.9}

        def create_state(self, weight):
            return {"momentum_buffer": torch.zeros_like(weight)}

        def update(self, weight, grad, state, hyper):
            grad.add_(weight, alpha=hyper["weight_decay"])
            state["momentum_buffer"].lerp_(grad, 1 - hyper["momentum"])
            weight.sub_(state["momentum_buffer"].sign(), alpha=hyper["lr"])

    trainer = kvtrainer.Trainer(model.parameters(), "averagedsign", {"learning_rate": 0.02})

Parameter servers load the module that defines it with `kvstore-server --import MODULE`.

Gluon's optimizers are also here under MXNet's class names: `SGD(momentum=0.9)` is `create("sgd", momentum=0.9)`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch.optim

from kvstore_server.optimizer import Optimizer, register
from kvstore_server.optimizer import create as _create
from kvstore_server.optimizer.base import ALIASES
from kvstore_server.optimizer.gluon import (
    DCASGD,
    FTML,
    NAG,
    SGD,
    SGLD,
    AdaBelief,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    Nadam,
    RMSProp,
    Signum,
    Test,
)
from kvstore_server.optimizer.layerwise import LAMB, LANS, LARS, GroupAdaGrad
from kvstore_server.optimizer.rowwise import RowAdam
from kvtrainer.errors import TorchNameWarning, level_of_user

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LANS",
    "LARS",
    "NAG",
    "SGD",
    "SGLD",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupAdaGrad",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "RowAdam",
    "Signum",
    "Test",
    "create",
    "register",
]

_TORCHS_WORDS = {"rho": "alpha"}
"""Gluon's name of an option → torch's, for classes that lack Gluon's."""


def create(optimizer: Any, /, **options: Any) -> Optimizer:
    """Return the optimizer for a name (in any case), a class or an instance.

    A plain name selects Gluon's optimizer; 'torch:SGD', a torch.optim class or an instance of one selects torch's. An
    instance brings its own options. A plain name spelled like a torch.optim class causes a TorchNameWarning if defaults
    that apply here differ from torch's.

    Gluon's optimizers have the defaults and formulas of MXNet 2.x, or with `compat="mxnet1"` those of MXNet 1.9.1. The
    argument takes precedence over the environment variable KVSTORE_COMPAT; `compat="mxnet2"` selects 2.x if that is
    set.

    Raises:
        UnknownNameError: There is no optimizer of that name; lists the valid ones.
        ConfigurationError: An option is wrong, options were given beside an instance, or no store can run the class.
    """
    built = _create(optimizer, **options)
    if isinstance(optimizer, str) and options.get("compat") is None and not built.is_mxnet1:
        _warn_of_optimizer_name(optimizer, type(built), options)
    return built


def _warn_of_optimizer_name(name: str, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    """Warn if a name is spelled like torch's class, but Gluon's optimizer has other defaults."""
    theirs = getattr(torch.optim, name, None)
    is_ours = kind.__module__.startswith("kvstore_server.")  # not a user's class of the same name
    if not is_ours or not isinstance(theirs, type) or not issubclass(theirs, torch.optim.Optimizer):
        return
    # Options that the user gave cannot surprise him.
    given = {ALIASES.get(option, option) for option in options}
    given |= {"betas"} if given >= {"beta1", "beta2"} else set()
    given |= {"lr"} if "lr_scheduler" in given else set()
    parameters = inspect.signature(theirs).parameters
    differing = []
    for key, value in kind().hyper.items():
        word = key if key in parameters else _TORCHS_WORDS.get(key, key)
        if key not in given and word in parameters and parameters[word].default != value:
            theirs_is = (
                f"{parameters[word].default!r}" if word == key else f"{word}={parameters[word].default!r}"
            )
            differing.append(f"{key}={value!r} (torch: {theirs_is})")
    if differing:
        warnings.warn(
            f"optimizer {name!r} is Gluon's, whose defaults differ from torch.optim.{name}: {', '.join(differing)}. "
            f"Write 'torch:{name}' for torch's, and {name.lower()!r} or these values for Gluon's",
            TorchNameWarning,
            stacklevel=level_of_user(),
        )
