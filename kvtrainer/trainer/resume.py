"""Resume a rank: what a worker describes with each round, and how another process continues from it.

The servers have the weights and the optimizer's state. What they lack travels with each commit (`ClientRecord`): the
options of the groups, update counts, the loss scale and schedules as they were before the round, and what the script
gave. The process that takes the rank over waits until the last round that its predecessor committed has ended, takes
its weights, and repeats here what that round did to counts, loss scale and schedules.

If the predecessor died between its commits to several servers, its script repeats that step with all that it does
before it. So the process takes the weights from before that round, and the record of the round before that; how that
one ended is in the record of the round to be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtrainer.client.tables import Takeover
from kvtrainer.common.env import WORKER_MEMORY, text_of
from kvtrainer.errors import ConfigurationError, WorkerLostError
from kvtrainer.kvstore.base import ASYNC_NAMES, SSP_NAMES, SYNC_NAMES
from kvtrainer.kvstore.dist import Collectives, DistKVStore, count_collectives, resume_collectives
from kvtrainer.states.format import SavedStates
from kvtrainer.states.surviving_memory import SurvivingMemory
from kvtrainer.sync.binding import ResumedRounds
from kvtrainer.sync.client_state import ASSIGNED, STEP, ClientRecord, find_records, unpack_user_state
from kvtrainer.sync.exchange import RoundResult
from kvtrainer.trainer.groups import kept_entries, plain_number
from kvtrainer.trainer.own_update import EndedRound, repeat_update, store_update
from kvtrainer.trainer.saving import adopt_parts, export_parts
from kvtrainer.trainer.step import StepPipeline


class Resumption(NamedTuple):
    """Where a script continues, as `Trainer.resume` returns it."""

    round: int
    """How many steps of this rank count already: 0 at the first start."""
    client_state: Any
    """The `client_state` that the script had set before the last of these steps; None at the first start."""


def describe_state(pipeline: StepPipeline, kind: str, user: bytes) -> bytes:
    """Pack what a successor needs if the coming round is the last one of this process.

    Raises ConfigurationError if it is too long.
    """
    holder, optimizer = pipeline.binding.holder, pipeline.groups.optimizer
    assert holder is not None
    if not pipeline.binding.updates_weights:
        store_update(pipeline)
    # 1. Options and counts with which a step begins. Before `set_data` they are those of the step before it: a script
    # that repeats it repeats also what it has changed before.
    ended, updated = pipeline.last_ended
    if kind != ASSIGNED:
        num_update, behind = pipeline.groups.counts.export()
        groups = [
            {name: plain_number(value) for name, value in kept_entries(group, optimizer).items()}
            for group in pipeline.groups.live
        ]
        counts = {"num_update": num_update, "behind": behind}
        options = {"parts": export_parts(pipeline), "groups": groups, **counts}
        pipeline.last_described = holder.round, options
    # 2. How the step before it has ended, and what else a successor needs.
    own = {
        "options": list(pipeline.last_described),
        "ended": [ended, _pack_keys(updated)],
        "assigned": 0 if kind == STEP else pipeline.num_assigned + (kind == ASSIGNED),
    }
    if pipeline.binding.survivors is not None:
        own["memory"] = pipeline.binding.survivors.id
    if isinstance(store := pipeline.binding.store, DistKVStore):
        own["collectives"] = list(count_collectives(store))
    return ClientRecord(kind, holder.round, pipeline.num_steps + (kind == STEP), own, user).pack()


def resume(pipeline: StepPipeline, adopt: Callable[[SavedStates], None]) -> Resumption:
    """Open the store, or take this rank over; see `Trainer.resume`. `adopt` is its `adopt_saved_states`."""
    needs_memory = _check_resumable(pipeline)
    pipeline.ready()
    if needs_memory:
        pipeline.binding.survivors = SurvivingMemory(text_of(os.environ, WORKER_MEMORY))
    try:
        pipeline.prepare(resumes=True)
        return _continue(pipeline, pipeline.binding.resumed, adopt)
    except BaseException:
        pipeline.binding.close_survivors()
        raise


def catch_up(pipeline: StepPipeline, late: RoundResult, adopt: Callable[[SavedStates], None]) -> Resumption:
    """Go on where the others are, after rounds without this worker; its weights are those already.

    Counts, loss scale, schedules and options become those of a worker that has taken part in the last of these rounds.
    """
    missed = late.missed
    assert missed is not None
    records = find_records(Takeover({-1: missed.applied}, {-1: missed.client_states}))
    if records.last is None or records.last.round < missed.applied:
        raise WorkerLostError(
            f"no worker that has taken part in round {missed.applied} is left to say with which options the others go "
            "on; restart the job from its last saved states"
        )
    return _continue(pipeline, ResumedRounds(missed.applied, records, late), adopt)


def _continue(
    pipeline: StepPipeline, resumed: ResumedRounds | None, adopt: Callable[[SavedStates], None]
) -> Resumption:
    last = None if resumed is None else resumed.records.last
    if resumed is None or last is None:
        return Resumption(0, None)
    # 1. What the rank was before its last round, and what that did to counts, loss scale and schedules.
    ended, (round_, options) = _find_end(pipeline, last, resumed), last.own["options"]
    pipeline.last_described = round_, options
    if not pipeline.binding.updates_weights:
        repeat_update(pipeline, last, ended, adopt)
    if options is not None and (pipeline.binding.updates_weights or last.kind == ASSIGNED):
        _adopt(pipeline, options)
        if ended is not None:
            pipeline.conclude(ended.updated)
    # 2. The script begins with what stands before its next step, also with barriers and `set_data` that count already.
    if isinstance(store := pipeline.binding.store, DistKVStore):
        resume_collectives(store, Collectives(*last.own["collectives"]))
    pipeline.num_assigned = pipeline.num_assigns_known = last.own["assigned"]
    pipeline.num_steps = last.steps
    return Resumption(last.steps, unpack_user_state(last.user))


def _check_resumable(pipeline: StepPipeline) -> bool:
    """Return whether the worker has something that must outlive it. Raises ConfigurationError."""
    pipeline.refuse_in_join("resume()")
    binding = pipeline.binding
    binding.check_open()
    if binding.is_started:
        raise ConfigurationError(
            "resume() decides with which weights a worker begins, so it has to come before the first step, set_data "
            "or anything else that opens the store"
        )
    # 1. What only this worker will have: residuals of compression, or weights and state.
    selection = binding.selection
    store = selection.kvstore
    keeps_back = selection.codec is not None and binding.is_lossy(pipeline.memory.plan.arena_sizes)
    is_dist = isinstance(store, DistKVStore) or (
        isinstance(store, str) and store.lower() in (*SYNC_NAMES, *ASYNC_NAMES, *SSP_NAMES)
    )
    updates_here = is_dist and not binding.updates_weights
    # 2. Not both, not for optimizers of all parameters, and not without memory that outlives the process.
    if updates_here and keeps_back:
        raise ConfigurationError(
            "resume() is not possible with update_on_kvstore=False and compression that keeps back a part of each "
            "gradient; leave one of them out"
        )
    if updates_here and pipeline.states.joint is not None:
        raise ConfigurationError(
            f"resume() is not possible with update_on_kvstore=False and {pipeline.groups.optimizer.registered_name}, "
            "which updates all parameters together; leave one of them out"
        )
    if (keeps_back or updates_here) and not text_of(os.environ, WORKER_MEMORY):
        why = (
            "update_on_kvstore=False"
            if updates_here
            else "compression that keeps back a part of each gradient"
        )
        raise ConfigurationError(
            f"resume() with {why} needs memory that outlives the process: kvlaunch --restart and "
            f"local_cluster(restart=…) give it to workers of their host, and otherwise {WORKER_MEMORY} names a file of "
            "a tmpfs for each worker. Or leave that option out"
        )
    # 3. What keeps a part of gradients elsewhere.
    if binding.replicas is not None:
        raise ConfigurationError(
            "resume() is not possible with compression of replicas, which keep back a part of each gradient; leave the "
            "type of compression_params out"
        )
    if selection.is_hierarchical:
        raise ConfigurationError(
            "resume() is not possible with hierarchy=True: a worker that dies takes with it what its host has summed; "
            "leave one of them out"
        )
    return keeps_back or updates_here


def _adopt(pipeline: StepPipeline, described: Mapping[str, Any]) -> None:
    for group, options in zip(pipeline.groups.live, described["groups"], strict=True):
        group.update({n: tuple(value) if isinstance(value, list) else value for n, value in options.items()})
    pipeline.groups.counts.adopt(described["num_update"], described["behind"])
    adopt_parts(described["parts"], pipeline)


def _find_end(pipeline: StepPipeline, last: ClientRecord, resumed: ResumedRounds) -> EndedRound | None:
    """Return how the last step of the rank has ended; None if there was none, or it changed nothing."""
    count, outcome, repeated = len(pipeline.memory.names), resumed.outcome, resumed.records.repeated
    exchange = pipeline.binding.exchange
    # 1. The process itself has told it with a later round.
    later = last if last.kind == ASSIGNED else repeated if outcome is None else None
    if later is not None:
        round_, updated = later.own["ended"]
        return EndedRound(_unpack_keys(updated, count)) if round_ == last.own["options"][0] else None
    # 2. The servers tell it.
    if outcome is not None:
        return EndedRound(None if outcome.skipped else [at not in outcome.left_out for at in range(count)])
    if exchange is not None and exchange.is_sync:
        return None  # all workers had joined
    return EndedRound([True] * count)


def _pack_keys(updated: Sequence[bool] | None) -> bytes | None:
    """Pack which keys were updated, as bits; empty for all of them."""
    if updated is None:
        return None
    return b"" if all(updated) else np.packbits(np.asarray(updated, np.bool_)).tobytes()


def _unpack_keys(packed: bytes | None, count: int) -> Sequence[bool] | None:
    if packed is None:
        return None
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count) if packed else np.ones(count)
    return list(map(bool, bits))
