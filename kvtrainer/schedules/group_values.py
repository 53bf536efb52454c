"""One number in every parameter group of an optimizer: where it is, where it started from, and writing it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch.optim
from torch import Tensor

from kvtrainer.errors import ArgumentTypeError, ConfigurationError, GroupValueError, SchedulerInUseError

_REMEMBERED = ("lr", "momentum")
"""Values whose start is kept in the group as well, as torch's schedulers do: 'initial_lr'."""


def refuse_second_scheduler(optimizer: object) -> None:
    """Raise SchedulerInUseError if the optimizer takes its learning rate from a scheduler of its own."""
    own = getattr(getattr(optimizer, "optimizer", None), "lr_scheduler", None)
    if own is not None:
        raise SchedulerInUseError(
            f"{own!r} decides the learning rate of this Trainer; leave out lr_scheduler or the schedule of 'lr'"
        )


class GroupValue:
    """The number called `name` in the groups of an optimizer; 'momentum' is betas[0] where there are betas.

    Groups are looked up anew each time, because loading state replaces them and they may become more.

    Raises:
        ArgumentTypeError: this is no optimizer.
        GroupValueError: a group has no such number; also a KeyError.
        SchedulerInUseError: the optimizer takes its learning rate from a scheduler of its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"a schedule is bound to a torch.optim.Optimizer or a Trainer, got {type(optimizer).__name__}"
            )
        if name == "lr":
            refuse_second_scheduler(optimizer)
        self.optimizer, self.name = optimizer, name
        self._bases: list[float] = []
        self._scheduled: dict[int, float] = {}
        """What schedules wrote last, before it was scaled."""
        self._scales: dict[int, float] = {}
        """What becomes of that, where `overrule` changed it."""
        self._collect_bases()

    def __len__(self) -> int:
        return len(self.optimizer.param_groups)

    def base(self, index: int) -> float:
        """What the value of this group started from."""
        self._collect_bases()
        return self._bases[index]

    def set_bases(self, values: Sequence[float]) -> None:
        """Take these as what the groups started from."""
        self._bases = list(values)

    def read(self, index: int) -> float:
        """The present value in this group."""
        group = self.optimizer.param_groups[index]
        if self._is_beta(group):
            return float(group["betas"][0])
        if not isinstance(group.get(self.name), Real | Tensor) or isinstance(group[self.name], bool):
            numbers = sorted(
                key for key, value in group.items() if isinstance(value, float) or key == "betas"
            )
            raise GroupValueError(
                f"parameter group {index} of this {type(self.optimizer).__name__} has no number {self.name!r} to "
                f"schedule; it has {', '.join(numbers)}"
            )
        return float(group[self.name])

    def write(self, index: int, value: float) -> None:
        """Put a scheduled value into this group, as small as `overrule` has made former ones."""
        self._scheduled[index] = value
        self._put(index, value * self._scales.get(index, 1.0))

    def overrule(self, index: int, value: float) -> None:
        """Put a value into this group in place of the present one; what is written later is in proportion."""
        present = self.read(index)
        if present:
            self._scales[index] = self._scales.get(index, 1.0) * value / present
        self._put(index, value)

    @property
    def scales(self) -> list[float]:
        """What `overrule` has made of one, in every group."""
        return [self._scales.get(index, 1.0) for index in range(len(self))]

    def set_scales(self, scales: Sequence[float]) -> None:
        """Take these over; what schedules have written is written again."""
        self._scales = dict(enumerate(scales))
        for index, value in self._scheduled.items():
            self.write(index, value)

    def _put(self, index: int, value: float) -> None:
        group = self.optimizer.param_groups[index]
        if self._is_beta(group):
            group["betas"] = (value, *tuple(group["betas"])[1:])
        elif isinstance(group[self.name], Tensor):
            group[self.name].fill_(value)
        else:
            group[self.name] = value

    def indices(self, chosen: Sequence[int | str] | None) -> frozenset[int] | None:
        """The groups that are meant by indices or names; None for all.

        Raises:
            ConfigurationError: there is no such group.
        """
        if chosen is None:
            return None
        if isinstance(chosen, str) or not isinstance(chosen, Sequence):
            raise ArgumentTypeError(f"groups must be a list of indices and names, got {chosen!r}")
        names: list[Any] = [group.get("name") for group in self.optimizer.param_groups]
        found = set()
        for one in chosen:
            matches = [
                i for i, name in enumerate(names) if (one == name if isinstance(one, str) else one == i)
            ]
            if not matches:
                known = ", ".join(map(repr, [name for name in names if name is not None])) or "none"
                raise ConfigurationError(
                    f"there is no parameter group {one!r}; there are {len(names)}, with the names {known}"
                )
            found |= set(matches)
        return frozenset(found)

    def _collect_bases(self) -> None:
        for index in range(len(self._bases), len(self)):
            group, present = self.optimizer.param_groups[index], self.read(index)
            key = f"initial_{self.name}"
            self._bases.append(float(group.get(key, present)))
            if self.name in _REMEMBERED:
                group.setdefault(key, present)

    def _is_beta(self, group: dict[str, Any]) -> bool:
        return self.name == "momentum" and "betas" in group and "momentum" not in group
