"""What the cases of `mmengine_cases.py` are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, OPTIM_WRAPPERS
from mmengine_training import Net
from torch import nn

from kvtrainer.integrations.mmengine import MMEngineStrategy

SGD = {"type": "SGD", "lr": 0.1, "momentum": 0.9}
LOOP = {"epoch_length": 4, "max_epochs": 2, "max_iters": 8}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class ByPart:
    """A wrapper for every part of the model that the configuration names."""

    def __init__(self, optim_wrapper_cfg: dict[str, Any], paramwise_cfg: Any = None) -> None:
        self.cfg = optim_wrapper_cfg

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        made = {name: build_optim_wrapper(getattr(model, name), cfg) for name, cfg in self.cfg.items()}
        return OptimWrapperDict(**made)


@OPTIM_WRAPPERS.register_module()
class Foreign(OptimWrapper):  # type: ignore[misc]
    """A wrapper that updates by itself."""


def strategy(folder: Path, **options: Any) -> MMEngineStrategy:
    options = {"env_kwargs": {"launcher": "none", "randomness": {"seed": 1}}, **options}
    return MMEngineStrategy(work_dir=str(folder), log_kwargs={"log_level": "ERROR"}, **options)


def prepared(
    folder: Path, wrapper: Any, schedules: Any = None, loop: Any = LOOP, **options: Any
) -> MMEngineStrategy:
    one = strategy(folder, **options)
    one.prepare(Net(0.0), optim_wrapper=wrapper, param_scheduler=schedules, dispatch_kwargs=loop)
    return one


def update(wrapper: Any, value: float = 1.0) -> None:
    """One update with a gradient of this value everywhere."""
    params = [p for group in wrapper.optimizer.param_groups for p in group["params"]]
    with wrapper.optim_context(None):
        loss = sum((p * value).sum() for p in params)
    wrapper.update_params(loss)


def refused(error: type[Exception], call: Any, *words: str) -> None:
    try:
        call()
    except error as found:
        said = str(found)
    else:
        raise AssertionError(f"no {error.__name__}")
    assert all(word in said for word in words), said
