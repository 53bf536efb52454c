"""Turn the states of Trainers and schedules into plain values that a checkpoint holds, and fit them to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvtrainer.errors import KVStoreError, StateMismatchError
from kvtrainer.states.saved import SavedParameter, SavedStates
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import check_names

_SCHEDULES = "schedules"
"""The part of a Trainer's states that a checkpoint has in a place of its own."""


def own_states(trainer: Trainer) -> dict[str, Any]:
    """Return what only this worker has of a Trainer's states, without its schedules."""
    mine = trainer.export_own_states()
    extra = {name: value for name, value in mine.extra.items() if name != _SCHEDULES}
    return {"extra": extra, "tensors": mine.tensors}


def common_states(trainer: Trainer) -> dict[str, Any]:
    """Return what all workers have in common of a Trainer's states; blocks while a store is asked."""
    saved, mine = trainer.export_saved_states(), trainer.export_own_states()
    extra = {name: value for name, value in saved.extra.items() if name not in mine.extra}
    tensors = {name: value for name, value in saved.tensors.items() if name not in mine.tensors}
    return {
        "optimizer": saved.optimizer,
        "num_update": saved.num_update,
        "groups": saved.groups,
        "parameters": {
            name: {"shape": list(one.shape), "dtype": one.dtype, "group": one.group, "state": one.state}
            for name, one in saved.parameters.items()
        },
        **({"extra": extra} if extra else {}),
        **({"tensors": tensors} if tensors else {}),
    }


def fit_states(trainer: Trainer, common: Mapping[str, Any], own: Mapping[str, Any]) -> Callable[[], None]:
    """Check that a Trainer can take states over, and return what lets it do so.

    Args:
        common: As of `common_states`; or the state_dict of torch's optimizer of the same kind.
        own: As of `own_states`.

    Raises:
        StateMismatchError: they belong to another model or optimizer; says how. Nothing has changed.
    """
    if "param_groups" in common and "state" in common:
        trainer.check_state_dict(common)
        return lambda: trainer.load_state_dict(dict(common))
    saved = SavedStates(
        dict(common["optimizer"]),
        common["num_update"],
        [{name: _tupled(value) for name, value in group.items()} for group in common["groups"]],
        {
            name: SavedParameter(tuple(one["shape"]), one["dtype"], one["group"], dict(one["state"]))
            for name, one in common["parameters"].items()
        },
        {**common.get("extra", {}), **own.get("extra", {})},
        {
            part: dict(members)
            for part, members in {**common.get("tensors", {}), **own.get("tensors", {})}.items()
        },
    )
    trainer.check_saved_states(saved)
    return lambda: trainer.adopt_saved_states(saved)


def pair_schedules(schedules: Any, states: Any) -> list[tuple[Any, Mapping[str, Any]]]:
    """Pair schedules with their states: lists of both, or dicts of lists by the names of several optimizers.

    Raises:
        StateMismatchError: there are other optimizers, or another number of schedules.
    """
    if not isinstance(states, Mapping if isinstance(schedules, Mapping) else list | tuple):
        raise StateMismatchError(
            "the states of schedules of several optimizers are a dict by their names, those of one are a list, got "
            f"{states!r:.80}"
        )
    if not isinstance(schedules, Mapping):
        schedules, states = {"": schedules}, {"": states}
    check_names(states, schedules)
    for name, its in schedules.items():
        if len(its) != len(states[name]):
            raise StateMismatchError(
                f"there are {len(states[name])} states for {len(its)} schedules{name and f' of {name}'}; build the "
                "same ones, or resume without them"
            )
    return [row for name, its in schedules.items() for row in zip(its, states[name], strict=True)]


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Let a part of a checkpoint be looked at; that it is something else is a StateMismatchError, which names it."""
    try:
        yield
    except KVStoreError:
        raise
    except Exception as error:  # what others wrote, or a callback made, may be anything
        raise StateMismatchError(
            f"the checkpoint does not fit: {what} makes no sense ({type(error).__name__}: {error}), and nothing has "
            "changed. It is neither what save_checkpoint wrote, nor, of an optimizer, the state_dict of one of torch"
        ) from error


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
