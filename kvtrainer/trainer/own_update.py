"""How a worker that updates its weights itself (`update_on_kvstore=False`) resumes after a restart.

Servers have the sum of a round, and the worker has weights and the optimizer's state. Before each round the worker
stores all of that where it outlives the process (`SurvivingMemory`), marked with the number of the round. The successor
takes what its predecessor had before the last round that counts, and the sum of that round from the servers, and
repeats the update here. What a script writes to weights afterwards, it writes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kvstore_server.protocol.frames import pack_control, unpack_control
from kvtrainer.errors import WorkerLostError
from kvtrainer.states.format import SavedStates, pack_state_file, unpack_state_file
from kvtrainer.states.surviving_memory import SurvivingVersions
from kvtrainer.sync.client_state import ASSIGNED, ClientRecord
from kvtrainer.trainer.saving import export_trainer_states
from kvtrainer.trainer.step import StepPipeline

_WEIGHTS, _STATES = "weights ", "states "


class EndedRound(NamedTuple):
    """What a round did."""

    updated: Sequence[bool] | None
    """Which keys it has updated; None if it was skipped."""


def store_update(pipeline: StepPipeline) -> None:
    """Let weights and all states, with which the coming round begins, outlive this process."""
    section, holder = _own_update_section(pipeline), pipeline.binding.holder
    assert holder is not None
    tensors, metadata = pack_state_file(export_trainer_states(pipeline))
    found = {_WEIGHTS + dtype: flat for dtype, flat in pipeline.memory.arena.weights.items()}
    found |= {_STATES + name: tensor for name, tensor in tensors.items()}
    section.write(holder.round - 1, found, pack_control(metadata))
    section.accept()


def repeat_update(
    pipeline: StepPipeline,
    last: ClientRecord,
    ended: EndedRound | None,
    adopt: Callable[[SavedStates], None],
) -> None:
    """Take what the earlier process has stored, and repeat the update of its last round, whose sum is here.

    If that was a round of assigned weights, these are here already, and what the former process had changed in options
    since the last step is not taken away; the caller does that.

    Raises:
        WorkerLostError: It is not there any more.
    """
    holder, assigned = pipeline.binding.holder, last.kind == ASSIGNED
    assert holder is not None
    wanted = holder.round - 1
    found = _own_update_section(pipeline).find(wanted)
    if found is None or found.mark != wanted:
        raise WorkerLostError(
            f"the former process of this rank updated its weights itself, and what it had before round {wanted} is not "
            "there any more. Restart the job from its last saved states"
        )
    # 1. All that the earlier process had before the round.
    states = {
        name.removeprefix(_STATES): value for name, value in found.tensors.items() if name.startswith(_STATES)
    }
    if last.own["options"][1] is not None:  # there was a step
        adopt(unpack_state_file(states, unpack_control(found.extra)))
    with torch.no_grad():
        for dtype, flat in pipeline.memory.arena.weights.items() if not assigned else ():
            flat.copy_(found.tensors[_WEIGHTS + dtype])
    pipeline.memory.arena.mark_updated(None)
    # 2. The update of the round.
    if ended is not None and not assigned:
        updated = ended.updated
        if updated is not None:
            scaler = pipeline.loss_scaler
            kept = pipeline.kept_scale(1.0 if scaler is None else scaler.factor)
            if pipeline.update_here(updated, 1.0 / kept).decision.skip:
                updated = None
        pipeline.conclude(updated)
    pipeline.memory.share_weights()
    pipeline.memory.accept_writes(pipeline.binding.has_weights)


def _own_update_section(pipeline: StepPipeline) -> SurvivingVersions:
    survivors = pipeline.binding.survivors
    assert survivors is not None
    return survivors.sections[1]
