"""`Trainer.join`: a worker without data takes part in the others' rounds, as in torch's Join context manager.

A worker that leaves the block sends empty contributions until all workers have left it. It applies what the others'
rounds did: updates, options, schedules and loss scale stay equal on all workers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_server.engine.agreed_options import unpack_hypers
from kvstore_server.failpoints import failpoint
from kvtrainer.errors import ConfigurationError
from kvtrainer.sync.client_state import JOINED
from kvtrainer.sync.exchange import RoundResult
from kvtrainer.trainer.step import StepPipeline

_log = logging.getLogger(__name__)


@contextmanager
def join(pipeline: StepPipeline) -> Iterator[None]:
    """Let workers take different numbers of steps in the block; see `Trainer.join`."""
    if pipeline.is_in_join:
        raise ConfigurationError("this Trainer is already in a join() block; leave it first")
    _check_joinable(pipeline)
    pipeline.is_in_join = True
    try:
        yield
        failpoint("worker.join")
        _follow_others(pipeline)
    finally:
        pipeline.is_in_join = False


def _check_joinable(pipeline: StepPipeline) -> None:
    exchange = pipeline.binding.exchange
    pipeline.refuse_resumable("join()")
    pipeline.binding.refuse_backup("join()")
    if exchange is not None and not exchange.is_ours:
        raise ConfigurationError(
            f"kvstore {pipeline.binding.describe()!r} does not support workers without data, so join() is not "
            "possible; give every worker the same number of batches"
        )


def _follow_others(pipeline: StepPipeline) -> None:
    # 1. Make the store, even if this worker never had data.
    pipeline.ready()
    pipeline.prepare()
    _check_joinable(pipeline)
    binding, memory, exchange = pipeline.binding, pipeline.memory, pipeline.binding.exchange
    binding.check_whole()
    if exchange is None:
        return
    # 2. Drop gradients that no step has used: the loss scale that they carry may change meanwhile.
    passes = pipeline.accumulation.end_early()
    if passes and pipeline.accumulation.counts > 1:
        _log.warning(
            "a join() block ended within a window of accumulation: the gradients of %d backward passes are dropped",
            passes,
        )
    fresh = memory.fresh()
    for device in memory.devices:
        device.tracker.consume(fresh)
    pipeline.is_bad, pipeline.bad_loss = False, ""
    # 3. One round after another, until the servers say that all workers have joined.
    is_over = False
    while not is_over:
        binding.guard.begin()
        with binding.guard.ended_by_errors():
            state = b"" if pipeline.describe_state is None else pipeline.describe_state(JOINED)
            joined = binding.run_without_data(memory.arena, state)
        is_over = joined.is_over
        # In asynchronous modes every worker's schedules count its own updates, so options of others are not adopted.
        if joined.hyper and not (is_over if exchange.is_sync else pipeline.schedules):
            # Adopt the options that were used in this round; a lr_scheduler computes the rate itself.
            has_scheduler = pipeline.groups.optimizer.lr_scheduler is not None
            groups = unpack_hypers(joined.hyper)["groups"]
            for group, values in zip(pipeline.groups.live, groups, strict=True):
                group.update({**values, "lr": group["lr"]} if has_scheduler else values)
        if not is_over:
            _follow_round(pipeline, joined.hyper, joined.outcome)
        binding.guard.end()
    # 4. Afterwards the weights count as unchanged by the loop.
    memory.share_weights()
    memory.accept_writes(binding.has_weights)


def _follow_round(pipeline: StepPipeline, hyper: bytes, outcome: RoundResult) -> None:
    """Repeat locally what a round did on the workers with data, with the options of that round."""
    exchange, memory = pipeline.binding.exchange, pipeline.memory
    assert exchange is not None
    updated = None
    if not outcome.skipped:
        updated = [i not in outcome.left_out for i in range(len(memory.names))]
    memory.devices[0].rows = dict(outcome.rows or {})
    said = unpack_hypers(hyper) if hyper else {}
    # Other workers may use a GradScaler, which this worker only knows of through the round's options.
    pipeline.voting = 1.0 if (said.get("limits") or {}).get("checks_finite", False) else None
    try:
        if updated is not None and not exchange.updates_weights:
            scale = 1.0 / pipeline.kept_scale(1.0)
            if pipeline.update_here(updated, scale, options=said).decision.skip:
                updated = None
        pipeline.conclude(updated)
    finally:
        pipeline.voting = None
