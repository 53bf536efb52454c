"""How a worker that updates its weights itself (`update_on_kvstore=False`) resumes after a restart.

Servers have the sum of a round, and the worker has weights and the optimizer's state. Before each round the worker
stores all of that where it outlives the process (`SurvivingMemory`), marked with the number of the round. If the round
counts, the successor takes the sum from the servers and repeats the update here; otherwise it repeats the round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvstore_server.protocol.frames import pack_control, unpack_control
from kvtrainer.errors import WorkerLostError
from kvtrainer.states.format import SavedStates, pack, unpack
from kvtrainer.states.surviving_memory import Versions
from kvtrainer.sync.binding import ResumedRounds
from kvtrainer.sync.client_state import ASSIGNED
from kvtrainer.trainer.saving import export_trainer_states
from kvtrainer.trainer.step import StepPipeline

_WEIGHTS, _STATES = "weights ", "states "


def store_update(pipeline: StepPipeline) -> None:
    """Let weights and all states, with which the coming round begins, outlive this process."""
    section, holder = _section(pipeline), pipeline.binding.holder
    assert holder is not None
    tensors, metadata = pack(export_trainer_states(pipeline))
    found = {_WEIGHTS + dtype: flat for dtype, flat in pipeline.memory.arena.weights.items()}
    found |= {_STATES + name: tensor for name, tensor in tensors.items()}
    section.write(holder.round - 1, found, pack_control(metadata))
    section.accept()


def repeat_update(
    pipeline: StepPipeline, resumed: ResumedRounds, adopt: Callable[[SavedStates], None]
) -> None:
    """Take what the earlier process has stored, and repeat the update of its last round, whose sum is here.

    If that was a round of assigned weights, these are here already.

    Raises:
        WorkerLostError: It is not there any more.
    """
    holder, records = pipeline.binding.holder, resumed.records
    assert holder is not None
    was_applied = resumed.outcome is not None
    wanted = holder.round - was_applied
    found = _section(pipeline).find(wanted)
    if found is None or found.mark != wanted:
        raise WorkerLostError(
            f"the former process of this rank updated its weights itself, and what it had before round {wanted} is not "
            "there any more. Restart the job from its last saved states"
        )
    # 1. All that the earlier process had before the round.
    assigned = was_applied and records.last is not None and records.last.kind == ASSIGNED
    states = {
        name.removeprefix(_STATES): value for name, value in found.tensors.items() if name.startswith(_STATES)
    }
    adopt(unpack(states, unpack_control(found.extra)))
    with torch.no_grad():
        for dtype, flat in pipeline.memory.arena.weights.items() if not assigned else ():
            flat.copy_(found.tensors[_WEIGHTS + dtype])
    pipeline.memory.arena.mark_updated(None)
    # 2. The update of the round, if it counts.
    if was_applied and not assigned:
        outcome, names = resumed.outcome, pipeline.memory.names
        assert outcome is not None
        updated: list[bool] | None = [i not in outcome.left_out for i in range(len(names))]
        if outcome.skipped:
            updated = None
        elif updated is not None:
            scaler = pipeline.loss_scaler
            kept = pipeline.kept_scale(1.0 if scaler is None else scaler.factor)
            if pipeline.update_here(updated, 1.0 / kept).decision.skip:
                updated = None
        pipeline.conclude(updated)
    pipeline.memory.share_weights()
    pipeline.memory.accept_writes(pipeline.binding.has_weights)


def _section(pipeline: StepPipeline) -> Versions:
    survivors = pipeline.binding.survivors
    assert survivors is not None
    return survivors.sections[1]
