"""The base of all hooks: an object with a method for each place of a runner's loop."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from kvstore_server.errors import did_you_mean
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, UnregisteredNameError


class Priority(IntEnum):
    """In which order hooks run at the same place: the smallest first, MMCV's numbers.

    Schedules of the learning rate run at VERY_HIGH, those of the momentum at HIGH, the optimizer at ABOVE_NORMAL.
    """

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority) -> int:
    """Return a priority from 0 (first) to 100, given as a number or by its name in any case.

    Raises:
        UnregisteredNameError: there is none of that name; also a KeyError.
        ArgumentTypeError: it is neither a number nor a name.
        ConfigurationError: it is out of range.
    """
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            raise UnregisteredNameError(
                f"there is no priority {priority!r}; there are {', '.join(Priority.__members__)}"
                f"{did_you_mean(priority, Priority.__members__)}"
            )
        return Priority[priority.upper()].value
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise ArgumentTypeError(
            f"a priority is an int from 0 to 100 or one of {', '.join(Priority.__members__)}, got {priority!r}"
        )
    if not 0 <= priority <= 100:
        raise ConfigurationError(
            f"a priority is an int from 0 to 100 or one of {', '.join(Priority.__members__)}, got {priority!r}"
        )
    return int(priority)


class Hook:
    """Does nothing anywhere. Subclasses override what they need; a runner calls the methods by name.

    Those of training and validation call the general ones by default.
    """

    stages: ClassVar[tuple[str, ...]] = (
        "before_run", "before_train_epoch", "before_train_iter", "after_train_iter", "after_train_epoch",
        "before_val_epoch", "before_val_iter", "after_val_iter", "after_val_epoch", "after_run",
    )  # fmt: skip
    """The places of a runner's loop, in their order."""
    priority: Priority = Priority.NORMAL
    """Where a runner puts the hook unless it is told otherwise."""

    def get_triggered_stages(self) -> list[str]:
        """Return the stages at which the hook does something, in their order."""
        kind = type(self)
        found = {name for name in _PLACES if getattr(kind, name) is not getattr(Hook, name)}
        return [name for name in self.stages if found & {name, _GENERAL.get(name, name)}]

    def before_run(self, runner: Any) -> None:
        """Before the first epoch."""

    def after_run(self, runner: Any) -> None:
        """After the last epoch."""

    def before_epoch(self, runner: Any) -> None:
        """Before any pass over the data."""

    def after_epoch(self, runner: Any) -> None:
        """After any pass over the data."""

    def before_iter(self, runner: Any) -> None:
        """Before any batch."""

    def after_iter(self, runner: Any) -> None:
        """After any batch."""

    def before_train_epoch(self, runner: Any) -> None:
        """Before a pass over the training data."""
        self.before_epoch(runner)

    def after_train_epoch(self, runner: Any) -> None:
        """After a pass over the training data."""
        self.after_epoch(runner)

    def before_train_iter(self, runner: Any) -> None:
        """Before the forward pass of a training batch."""
        self.before_iter(runner)

    def after_train_iter(self, runner: Any) -> None:
        """After the forward pass of a training batch, with `runner.outputs` there."""
        self.after_iter(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Before a pass over the validation data."""
        self.before_epoch(runner)

    def after_val_epoch(self, runner: Any) -> None:
        """After a pass over the validation data."""
        self.after_epoch(runner)

    def before_val_iter(self, runner: Any) -> None:
        """Before a validation batch."""
        self.before_iter(runner)

    def after_val_iter(self, runner: Any) -> None:
        """After a validation batch."""
        self.after_iter(runner)

    def every_n_epochs(self, runner: Any, n: int) -> bool:
        """Tell if the epoch that is running is the last of `n`; never, for n < 1."""
        return n > 0 and (runner.epoch + 1) % n == 0

    def every_n_inner_iters(self, runner: Any, n: int) -> bool:
        """Tell if the batch is the last of `n` within its epoch; never, for n < 1."""
        return n > 0 and (runner.inner_iter + 1) % n == 0

    def every_n_iters(self, runner: Any, n: int) -> bool:
        """Tell if the batch is the last of `n`; never, for n < 1."""
        return n > 0 and (runner.iter + 1) % n == 0

    def end_of_epoch(self, runner: Any) -> bool:
        """Tell if the batch is the last of its epoch."""
        return bool(runner.inner_iter + 1 == len(runner.data_loader))

    def is_last_epoch(self, runner: Any) -> bool:
        """Tell if the epoch is the last of all."""
        return bool(runner.epoch + 1 == runner.max_epochs)

    def is_last_iter(self, runner: Any) -> bool:
        """Tell if the batch is the last of all."""
        return bool(runner.iter + 1 == runner.max_iters)


_GENERAL = {name: name.replace("train_", "").replace("val_", "") for name in Hook.stages}
"""The method that a stage calls by default."""
_PLACES = frozenset({*_GENERAL, *_GENERAL.values()})
