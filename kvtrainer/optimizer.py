"""The optimizers of a training script: make one with `create`, or define your own.

A user-defined optimizer names its options in `defaults`, defines `update`, and is registered so that it can be asked
for by name. It sees flat, arbitrary pieces of the model; with `elementwise = False` it gets whole keys in their shape::

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

On parameter servers the module that defines it is loaded with `kvstore-server --import MODULE`.

Gluon's own are here under MXNet's names of their classes: `SGD(momentum=0.9)` is `create("sgd", momentum=0.9)`.
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
    "Signum",
    "Test",
    "create",
    "register",
]

_TORCHS_WORDS = {"rho": "alpha"}
"""Gluon's word for an option -> torch's, in the classes that have it and not Gluon's."""


def create(optimizer: Any, /, **options: Any) -> Optimizer:
    """Return the optimizer that a name (in any case), a class or an instance means.

    A plain name is Gluon's; 'torch:SGD', a torch.optim class or an instance of one is torch's. An instance brings its
    own options. A plain name that is spelled as a class of torch.optim is warned of, by TorchNameWarning, where
    numbers that were not given differ from torch's.

    Gluon's have the numbers of MXNet 2.x, with `compat="mxnet1"` those of MXNet 1.9.1. The argument comes before the
    environment variable KVSTORE_COMPAT; `compat="mxnet2"` asks for 2.x's where that is set.

    Raises:
        UnknownNameError: no optimizer of that name; lists the valid ones.
        ConfigurationError: a bad option, options beside an instance, or a class that no store can run.
    """
    built = _create(optimizer, **options)
    if isinstance(optimizer, str) and options.get("compat") is None and not built.is_mxnet1:
        _compare_with_torchs(optimizer, type(built), options)
    return built


def _compare_with_torchs(name: str, kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    theirs = getattr(torch.optim, name, None)
    is_ours = kind.__module__.startswith("kvstore_server.")  # and not a user's, under the same name
    if not is_ours or not isinstance(theirs, type) or not issubclass(theirs, torch.optim.Optimizer):
        return
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
            f"optimizer {name!r} is Gluon's, which has other numbers than torch.optim.{name}: {', '.join(differing)}. "
            f"Write 'torch:{name}' for torch's, and {name.lower()!r} or these numbers for Gluon's",
            TorchNameWarning,
            stacklevel=level_of_user(),
        )
