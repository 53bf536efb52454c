"""What may be bound to an optimizer as a schedule, beside which others, and taking back what was bound in vain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.optim
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from kvtrainer.errors import ConfigurationError
from kvtrainer.schedules.bound_torch import PlateauSchedule, TorchSchedule, is_like_torchs
from kvtrainer.schedules.param_schedule import BoundSchedule, ParamSchedule, WarmupClock


def is_bound(one: object) -> bool:
    """Whether it is tied to an optimizer already."""
    return isinstance(one, LRScheduler | ParamSchedule | PlateauSchedule | TorchSchedule | WarmupClock) or (
        is_like_torchs(one)
    )


def check_owner(one: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigurationError unless it is bound to this optimizer, or to one that shares its groups."""
    inner = one.scheduler if isinstance(one, TorchSchedule) else one
    owner = inner.optimizer
    if owner is not optimizer and owner.param_groups is not optimizer.param_groups:
        raise ConfigurationError(
            f"this {type(inner).__name__} is bound to another optimizer, a {type(owner).__name__}; give a function "
            "that makes it, or bind it to this one"
        )


def fit_together(schedules: Sequence[BoundSchedule]) -> None:
    """Let what goes by a metric lower what schedules of the same value write.

    Raises:
        ConfigurationError: two would undo what the other one writes.
    """
    ours = [one for one in schedules if isinstance(one, ParamSchedule)]
    for at, one in enumerate(ours):
        if any(one.writes_beside(other) for other in ours[:at]):
            raise ConfigurationError(
                f"two schedules of {one.name!r} would each undo what the other one writes; give ParamSchedule.unbound("
                "…), or after=…, so that one builds on the other"
            )
    by_name = {one.name: one for one in reversed(ours)}
    for other in schedules:
        if isinstance(other, PlateauSchedule) and other.name in by_name:
            other.build_on(by_name[other.name].target)
        if isinstance(other, TorchSchedule) and (both := sorted(other.names & set(by_name))):
            raise ConfigurationError(
                f"{type(other.scheduler).__name__} and a schedule of ours would each undo what the other one writes "
                f"as {both[0]!r}; give both as dicts or ParamSchedules, or both as schedulers of torch"
            )


@contextmanager
def kept_on_error(optimizer: torch.optim.Optimizer, bound: Sequence[BoundSchedule]) -> Iterator[None]:
    """In the block schedules are bound; if it raises, groups and former schedules are as before.

    Args:
        bound: The schedules that the block makes, which is filled in it.
    """
    groups = list(getattr(optimizer, "param_groups", ()))
    before = [{key: _copied(value) for key, value in group.items()} for group in groups]
    try:
        yield
    except BaseException:
        for one in bound:
            if isinstance(one, ParamSchedule):
                one.unbind()
        for group, values in zip(groups, before, strict=True):
            for key in set(group) - set(values):
                del group[key]
            for key, value in values.items():
                _put_back(group, key, value)
        raise


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _put_back(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
        group[key].copy_(value)  # others may hold on to it
    else:
        group[key] = value
