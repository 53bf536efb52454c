"""Resume a rank: what a worker describes with each round, and how another process continues from it.

The servers have the weights and the optimizer's state. What they lack travels with each commit (`ClientRecord`): the
options of the groups, update counts, the loss scale and schedules as they were before the round, and what the script
gave. The process that takes the rank over waits until the last round that its predecessor committed has ended, takes
its weights, and repeats here what that round did to counts, loss scale and schedules.

If the predecessor died between its commits to several servers, the process gets the weights and counts from before
that round, and its script repeats the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from kvtrainer.common.env import WORKER_MEMORY, text_of
from kvtrainer.errors import ConfigurationError
from kvtrainer.kvstore.base import ASYNC_NAMES, SSP_NAMES, SYNC_NAMES
from kvtrainer.kvstore.dist import Collectives, DistKVStore, count_collectives, resume_collectives
from kvtrainer.states.format import SavedStates
from kvtrainer.states.surviving_memory import SurvivingMemory
from kvtrainer.sync.binding import ResumedRounds
from kvtrainer.sync.client_state import ASSIGNED, STEP, ClientRecord, unpack_user_state
from kvtrainer.trainer.groups import kept_entries, plain_number
from kvtrainer.trainer.own_update import repeat_update, store_update
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
    num_update, behind = pipeline.groups.counts.export()
    own = {
        "parts": export_parts(pipeline),
        "groups": [
            {name: plain_number(value) for name, value in kept_entries(group, optimizer).items()}
            for group in pipeline.groups.live
        ],
        "num_update": num_update,
        "behind": behind,
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
    pipeline.prepare(resumes=True)
    resumed = pipeline.binding.resumed
    if resumed is None:
        return Resumption(0, None)
    records = resumed.records
    # 1. What the rank was before its last round; before the round to be repeated, if there is one.
    last = records.last
    before = records.repeated or last
    updates_here = not pipeline.binding.updates_weights
    if updates_here and last is not None:
        repeat_update(pipeline, resumed, adopt)
    elif before is not None:
        _adopt(pipeline, before)
    if last is not None and isinstance(store := pipeline.binding.store, DistKVStore):
        # The script repeats the barriers that stand before the step to be repeated.
        resume_collectives(store, Collectives(*last.own["collectives"]))
    # 2. What that round did to counts, loss scale and schedules.
    if records.repeated is None and last is not None and last.kind != ASSIGNED and not updates_here:
        _conclude(pipeline, last, resumed)
    if last is None:
        return Resumption(0, None)
    # 3. The script begins with what stands before its next step, also with `set_data` that counts already.
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
    selection = binding.selection
    store = selection.kvstore
    keeps_back = selection.codec is not None and binding.is_lossy(pipeline.memory.plan.arena_sizes)
    is_dist = isinstance(store, DistKVStore) or (
        isinstance(store, str) and store.lower() in (*SYNC_NAMES, *ASYNC_NAMES, *SSP_NAMES)
    )
    updates_here = is_dist and not binding.updates_weights
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
    if binding.replicas is not None:
        raise ConfigurationError(
            "resume() is not possible with compression of replicas, which keep back a part of each gradient; leave the "
            "type of compression_params out"
        )
    if selection.is_hierarchical:
        raise ConfigurationError("resume() is not possible with hierarchy=True; leave one of them out")
    return keeps_back or updates_here


def _adopt(pipeline: StepPipeline, record: ClientRecord) -> None:
    own = record.own
    for group, options in zip(pipeline.groups.live, own["groups"], strict=True):
        group.update({n: tuple(value) if isinstance(value, list) else value for n, value in options.items()})
    pipeline.groups.counts.adopt(own["num_update"], own["behind"])
    adopt_parts(own["parts"], pipeline)


def _conclude(pipeline: StepPipeline, last: ClientRecord, resumed: ResumedRounds) -> None:
    outcome = resumed.outcome
    if outcome is None and pipeline.binding.exchange is not None and pipeline.binding.exchange.is_sync:
        return  # all workers had joined: that changed nothing
    updated: list[bool] | None = [True] * len(pipeline.memory.names)
    if outcome is not None:
        updated = (
            None
            if outcome.skipped
            else [i not in outcome.left_out for i in range(len(pipeline.memory.names))]
        )
    pipeline.conclude(updated)
