"""Several Trainers under names, for models with several optimizers, such as a GAN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import (
    ArgumentTypeError,
    ConfigurationError,
    JointStepError,
    KeyNotFoundError,
    StateMismatchError,
)
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.types import Group


@uncompiled
class TrainerDict(Mapping[str, Trainer]):
    """Trainers by name, which step one by one; a checkpoint contains the states of all of them.

    They may share a store, in which each has its own tables and optimizer. Every worker must use them for the first
    time in the same order.

    Raises:
        ConfigurationError: There are no Trainers.
        ArgumentTypeError: A value is not a Trainer.

        trainers = kvtrainer.TrainerDict(generator=Trainer(...), discriminator=Trainer(...))
        trainers["generator"].update_params(loss)
    """

    def __init__(self, **trainers: Trainer) -> None:
        if not trainers:
            raise ConfigurationError("a TrainerDict needs a Trainer, as in TrainerDict(generator=trainer)")
        for name, trainer in trainers.items():
            if not isinstance(trainer, Trainer):
                raise ArgumentTypeError(f"a TrainerDict holds Trainers, got {name}={type(trainer).__name__}")
        self._trainers = trainers

    def __repr__(self) -> str:
        return "\n".join(
            f"name: {name}\ntype: {type(one).__name__}\noptimizer: {one.optimizer.registered_name}\n{one!r}"
            for name, one in self._trainers.items()
        )

    def __getitem__(self, name: str) -> Trainer:
        try:
            return self._trainers[name]
        except KeyError:
            raise KeyNotFoundError(f"no Trainer is named {name!r}, only {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainers)

    def __len__(self) -> int:
        return len(self._trainers)

    def update_params(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, since one loss cannot be for all. Raises JointStepError, a NotImplementedError."""
        raise self._joint_step_error("update_params")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, since loss scales may differ. Raises JointStepError, a NotImplementedError."""
        raise self._joint_step_error("backward")

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, like `backward`. Raises JointStepError, a NotImplementedError."""
        raise self._joint_step_error("step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters of all Trainers."""
        for trainer in self._trainers.values():
            trainer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> dict[str, list[Group]]:
        """The parameter groups of every Trainer, by its name."""
        return {name: trainer.param_groups for name, trainer in self._trainers.items()}

    def get_lr(self) -> dict[str, list[float]]:
        """Return the learning rates of every Trainer's groups: {"generator.lr": [...], ...}."""
        return {f"{name}.lr": one.get_lr()["lr"] for name, one in self._trainers.items()}

    def get_momentum(self) -> dict[str, list[float]]:
        """Return the momentum of every Trainer's groups: {"generator.momentum": [...], ...}."""
        return {f"{name}.momentum": one.get_momentum()["momentum"] for name, one in self._trainers.items()}

    def end_epoch(self, metric: float | None = None) -> None:
        """Advance the schedules of all Trainers that count epochs, or that depend on this metric.

        Raises:
            ConfigurationError: A schedule needs a metric, but none was given; nothing has changed then.
        """
        waiting = [name for name, one in self.items() if any(s.by == "metric" for s in one.schedules)]
        if metric is None and waiting:
            raise ConfigurationError(
                f"a schedule of {', '.join(waiting)} needs a metric; call end_epoch(metric)"
            )
        for trainer in self._trainers.values():
            trainer.end_epoch(metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of every Trainer, by its name. Blocks while state is fetched from servers."""
        return {name: trainer.state_dict() for name, trainer in self._trainers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`; call it on every worker.

        Raises:
            StateMismatchError: The names differ, in which case nothing has changed; or a Trainer's state does not fit.
        """
        check_names(state_dict, self._trainers)
        for name, trainer in self._trainers.items():
            trainer.load_state_dict(state_dict[name])

    def close(self) -> None:
        """Close all Trainers, even if one of them raises. Idempotent."""
        with ExitStack() as stack:
            for trainer in reversed(self._trainers.values()):
                stack.callback(trainer.close)

    def _joint_step_error(self, method: str) -> JointStepError:
        return JointStepError(
            f"You should access the Trainer of the TrainerDict and call its `{method}`; it has {', '.join(self)}"
        )


def check_names(given: Mapping[str, Any], trainers: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless the states of several Trainers have the Trainers' names."""
    if set(given) != set(trainers):
        saved, here = (", ".join(sorted(map(str, names))) for names in (given, trainers))
        raise StateMismatchError(f"the state is for Trainers named {saved}, but the names here are {here}")
