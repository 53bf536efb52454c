"""What a strategy asks of a Trainer: its parts, and its states as plain values that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kvtrainer.errors import KVStoreError, StateMismatchError
from kvtrainer.states.saved import SavedParameter, SavedStates
from kvtrainer.trainer import Trainer
from kvtrainer.trainer_dict import TrainerDict

_SCHEDULES = "schedules"
"""The part of a Trainer's states that a checkpoint has in a place of its own."""


def trainers_by_name(trainer: Trainer | TrainerDict | None) -> Mapping[str, Trainer]:
    """All Trainers; a single one has the name ''."""
    if trainer is None:
        return {}
    return {"": trainer} if isinstance(trainer, Trainer) else trainer


def in_updates(run: Mapping[str, Any], passes: int) -> dict[str, Any]:
    """How long a run is in updates, where its max_iters and epoch_length count passes, so many to an update.

    An epoch that does not end with an update has no length.
    """
    counted = dict(run)
    if passes > 1 and isinstance(run.get("max_iters"), int):
        counted["max_iters"] = -(-run["max_iters"] // passes)  # a last, shorter window is an update, too
    if passes > 1 and isinstance(run.get("epoch_length"), int):
        whole, rest = divmod(run["epoch_length"], passes)
        counted["epoch_length"] = None if rest else whole
    return counted


def devices_of(trainers: Mapping[str, Trainer]) -> list[torch.device]:
    """The devices of all parameters, each once."""
    found = {
        p.device: None for one in trainers.values() for group in one.param_groups for p in group["params"]
    }
    return list(found)


def take_states(trainer: Trainer, is_first: bool) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """What all workers have in common, None unless `is_first` (it is fetched from a store), and what is this worker's.

    Schedules are in neither.
    """
    mine = trainer.export_own_states()
    extra = {name: value for name, value in mine.extra.items() if name != _SCHEDULES}
    own = {"extra": extra, "tensors": mine.tensors}
    if not is_first:
        return None, own
    saved = trainer.export_saved_states()
    common = {
        "optimizer": saved.optimizer,
        "num_update": saved.num_update,
        "groups": saved.groups,
        "parameters": {
            name: {"shape": list(one.shape), "dtype": one.dtype, "group": one.group, "state": one.state}
            for name, one in saved.parameters.items()
        },
    }
    return common, own


def check_states(trainer: Trainer, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise StateMismatchError unless `put_states` can take this; nothing changes."""
    saved = _saved_states(common, own)
    if saved is None:
        trainer.check_state_dict(common)
    else:
        trainer.check_saved_states(saved)


def put_states(trainer: Trainer, common: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Take over what `take_states` gave; or the state_dict of torch's optimizer of the same kind.

    Raises:
        StateMismatchError: it belongs to another model or optimizer; says how.
    """
    saved = _saved_states(common, own)
    if saved is None:
        trainer.load_state_dict(dict(common))
    else:
        trainer.adopt_saved_states(saved)


def _saved_states(common: Mapping[str, Any], own: Mapping[str, Any]) -> SavedStates | None:
    """What `take_states` gave; None for the state_dict of an optimizer of torch."""
    if "param_groups" in common and "state" in common:
        return None
    parameters = {
        name: SavedParameter(tuple(one["shape"]), one["dtype"], one["group"], dict(one["state"]))
        for name, one in common["parameters"].items()
    }
    return SavedStates(
        dict(common["optimizer"]),
        common["num_update"],
        [{name: _tupled(value) for name, value in group.items()} for group in common["groups"]],
        parameters,
        dict(own.get("extra", {})),
        {part: dict(members) for part, members in own.get("tensors", {}).items()},
    )


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
