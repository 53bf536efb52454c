"""The states of mmengine's schedulers: taken without functions, and loaded into ones that may go on for longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtrainer.errors import StateMismatchError
from kvtrainer.trainer_dict import check_names

_HORIZON = ("end", "total_iters", "total_steps", "T_max", "_schedule_phases")
"""What a scheduler knows of how long it goes, which is for the configuration to say."""


def states_of(schedulers: Any) -> Any:
    """The states of a list of schedulers, or of a dict of lists by optimizer."""
    if isinstance(schedulers, Mapping):
        return {name: states_of(its) for name, its in schedulers.items()}
    return [
        {name: value for name, value in one.state_dict().items() if not callable(value)} for one in schedulers
    ]


def load_states(schedulers: Any, states: Any) -> None:
    """Take over what `states_of` gave.

    A scheduler that was past its end, and now has a later one, makes up for the steps that it has missed.

    Raises:
        StateMismatchError: as `paired`; nothing has changed then.
    """
    for scheduler, state in paired(schedulers, states):
        _go_on(scheduler, state)


def paired(schedulers: Any, states: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Every scheduler with its state.

    Raises:
        StateMismatchError: there are other optimizers, or another number of schedulers.
    """
    if isinstance(schedulers, Mapping) != isinstance(states, Mapping):
        raise StateMismatchError(
            "the states of the schedulers of several optimizers are a dict by name, those of one are a list"
        )
    if not isinstance(schedulers, Mapping):
        schedulers, states = {"": schedulers}, {"": states}
    check_names(states, schedulers)
    for name, its in schedulers.items():
        if len(its) != len(states[name]):
            raise StateMismatchError(
                f"there are {len(states[name])} states for {len(its)} schedulers{name and f' of {name}'}; build the "
                "same ones, or resume without them"
            )
    return [row for name, its in schedulers.items() for row in zip(its, states[name], strict=True)]


def _go_on(scheduler: Any, state: Mapping[str, Any]) -> None:
    scheduler.load_state_dict({name: value for name, value in state.items() if name not in _HORIZON})
    ended, passed = state.get("end", scheduler.end), scheduler._global_step
    if ended < scheduler.end and passed >= ended and not getattr(scheduler, "need_val_args", False):
        scheduler._global_step = ended - 1
        for _ in range(ended, passed + 1):
            scheduler.step()
