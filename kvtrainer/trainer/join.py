"""`Trainer.join`: a worker without data takes part in the rounds of the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_server.engine.agreed import unpack_hypers
from kvtrainer.errors import ConfigurationError
from kvtrainer.sync.exchange import RoundResult
from kvtrainer.trainer.step import StepPipeline

_log = logging.getLogger(__name__)


@contextmanager
def join(pipeline: StepPipeline) -> Iterator[None]:
    """Let workers take different numbers of steps in the block; errors as of `Trainer.join`."""
    if pipeline.is_in_join:
        raise ConfigurationError("this Trainer is in a join() block already; leave it first")
    _check_joinable(pipeline)
    pipeline.is_in_join = True
    try:
        yield
        _follow_others(pipeline)
    finally:
        pipeline.is_in_join = False


def _check_joinable(pipeline: StepPipeline) -> None:
    """Raise ConfigurationError if the store does not know workers without data."""
    exchange = pipeline.link.exchange
    if exchange is not None and not exchange.is_ours:
        raise ConfigurationError(
            f"kvstore {pipeline.link.describe()!r} does not know workers without data, so join() is not possible; "
            "give every worker the same number of batches"
        )


def _follow_others(pipeline: StepPipeline) -> None:
    """Take part in the others' rounds with nothing until no worker has more data."""
    pipeline.ready()
    pipeline.prepare()
    _check_joinable(pipeline)
    link, memory, exchange = pipeline.link, pipeline.memory, pipeline.link.exchange
    link.check_whole()
    if exchange is None:
        return
    # Gradients that no step took are left behind: the loss scale that they carry may be another one afterwards.
    passes = pipeline.accumulation.end_early()
    if passes and pipeline.accumulation.counts > 1:
        _log.warning(
            "a join() block ends within a window of accumulation: the gradients of %d backward passes are dropped",
            passes,
        )
    fresh = memory.fresh()
    for device in memory.devices:
        device.tracker.consume(fresh)
    pipeline.is_bad, pipeline.bad_loss = False, ""
    is_over = False
    while not is_over:
        link.step_incomplete = True
        try:
            joined = link.run_without_data(memory.arena)
        except BaseException as error:
            link.step_incomplete = not isinstance(error, Exception)
            raise
        is_over = joined.is_over
        # Without rounds every worker's schedules go by its own updates, and have gone on since it gave its last.
        if joined.hyper and not (is_over if exchange.is_sync else pipeline.schedules):
            # Go on with the options that were in force last.
            has_scheduler = pipeline.groups.optimizer.lr_scheduler is not None
            groups = unpack_hypers(joined.hyper)["groups"]
            for group, values in zip(pipeline.groups.live, groups, strict=True):
                group.update({**values, "lr": group["lr"]} if has_scheduler else values)
        if not is_over:
            _follow_round(pipeline, joined.hyper, joined.outcome)
        link.step_incomplete = False
    memory.share_weights()
    memory.accept_writes(link.has_weights)


def _follow_round(pipeline: StepPipeline, hyper: bytes, outcome: RoundResult) -> None:
    """Do here what a round has done elsewhere, with the options that are in force."""
    exchange, memory = pipeline.link.exchange, pipeline.memory
    assert exchange is not None
    updated = None
    if not outcome.skipped:
        updated = [i not in outcome.left_out for i in range(len(memory.names))]
    memory.devices[0].rows = dict(outcome.rows or {})
    said = unpack_hypers(hyper) if hyper else {}
    # A scaler that a loop drives is known to workers only while they have data.
    pipeline.voting = 1.0 if (said.get("limits") or {}).get("checks_finite", False) else None
    try:
        if updated is not None and not exchange.updates_weights:
            scale = 1.0 / pipeline.kept_scale(1.0)
            if pipeline.update_here(updated, scale, options=said).decision.skip:
                updated = None
        pipeline.conclude(updated)
    finally:
        pipeline.voting = None
