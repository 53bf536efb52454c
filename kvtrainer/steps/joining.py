"""Training with uneven numbers of batches: a worker without data keeps the others company until all are done."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_server.hyper import effective_hypers, unpack_hypers
from kvstore_server.norms import Decision
from kvtrainer.errors import ConfigurationError
from kvtrainer.steps.pipeline import Pipeline
from kvtrainer.sync.contract import Outcome
from kvtrainer.types import StepResult

_log = logging.getLogger(__name__)


class JoiningPipeline(Pipeline):
    """A pipeline whose workers may take different numbers of steps. Arguments as of Pipeline."""

    _is_in_join = False

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let workers take different numbers of steps in the block; collective, and it ends on all workers together.

            with trainer.join():
                for x, y in my_batches:
                    loss_fn(net(x), y).backward()
                    trainer.step(batch_size)

        A worker that leaves the block takes part in the others' rounds with nothing, until all have left it; then all
        have the same weights, update counts and options (those of the lowest rank that had data last) and go on
        together. `step()` goes on dividing by the number of all workers, joined ones too. Gradients that were not given
        when the block is left are dropped, and windows of accumulation begin anew. The block needs no
        other call that all workers make together; `allreduce_grads` and `update` are refused in it, because what the
        loop does between them cannot be repeated on a worker that has left. With an exception the block is left
        without waiting, and the others fail when this worker goes.

        Raises:
            ConfigurationError: the store cannot do that, or blocks are nested.
            KVStoreError: as `step`.
        """
        if self._is_in_join:
            raise ConfigurationError("this Trainer is in a join() block already; leave it first")
        self._refuse_join()
        self._is_in_join = True
        try:
            yield
            self._settle()
            self._prepare()
            self._refuse_join()
            self._keep_company()
        finally:
            self._is_in_join = False

    def allreduce_grads(self) -> None:
        self._refuse_in_join("allreduce_grads()")
        super().allreduce_grads()

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> StepResult:
        self._refuse_in_join("update()")
        return super().update(batch_size, ignore_stale_grad)

    def _can_grow(self) -> bool:
        self._refuse_in_join("add_param_group()")
        return super()._can_grow()

    allreduce_grads.__doc__ = Pipeline.allreduce_grads.__doc__
    update.__doc__ = Pipeline.update.__doc__

    def _refuse_in_join(self, method: str) -> None:
        if self._is_in_join:
            raise ConfigurationError(
                f"{method} is not possible in a join() block: workers that have left it cannot take part; use step() "
                "in the block, and the rest outside"
            )

    def _refuse_join(self) -> None:
        exchange = self._link.exchange
        if exchange is not None and not exchange.can_shadow:
            raise ConfigurationError(
                f"kvstore {self._link.describe()!r} does not know workers without data, so join() is not possible; "
                "give every worker the same number of batches"
            )

    def _keep_company(self) -> None:
        """Take part with nothing, round by round, until all workers do."""
        exchange = self._link.exchange
        if exchange is None:
            return
        self._drop_ungiven()
        is_over = False
        while not is_over:
            shadowed = self._link.shadow(self._layout.arena)
            is_over = shadowed.is_over
            # Without rounds every worker's schedules go by its own updates, and have gone on since it gave its last.
            if shadowed.hyper and not (is_over if exchange.is_sync else self._schedules):
                self._adopt_options(shadowed.hyper)
            if not is_over:
                self._follow_round(shadowed.hyper, shadowed.outcome)
        self._share_weights()
        self._layout.accept_writes(self._link.has_weights)

    def _drop_ungiven(self) -> None:
        """Leave gradients behind that no step took: the loss scale that they carry may be another one afterwards."""
        passes = self._accumulation.end_early()
        if passes and self._accumulation.counts > 1:
            _log.warning(
                "a join() block ends within a window of accumulation: the gradients of %d backward passes are dropped",
                passes,
            )
        fresh = self._fresh(is_strict=False)
        self._layout.consume(fresh)
        self._is_bad, self._bad_loss = False, ""

    def _follow_round(self, hyper: bytes, outcome: Outcome) -> None:
        """Do here what a round has done elsewhere, with the options that are in force."""
        # A scaler that a loop drives is known to workers only while they have data.
        limits = unpack_hypers(hyper).get("limits", {}) if hyper else {}
        self._is_voting = limits.get("checks_finite", False)
        try:
            self._repeat(hyper, outcome)
        finally:
            self._is_voting = False

    def _repeat(self, hyper: bytes, outcome: Outcome) -> None:
        updated = None
        if not outcome.skipped:
            updated = [i not in outcome.left_out for i in range(len(self._layout.names))]
        self._layout.rows = dict(outcome.rows or {})
        in_store = self._link.exchange is not None and self._link.exchange.updates_weights
        if updated is not None and not in_store:
            scale = 1.0 / self._kept_scale(1.0)
            verdict = self._judge(self._layout.devices[0], updated, scale)
            if verdict.decision.skip:
                updated = None
            else:
                self._apply_here(updated, hyper, scale, verdict.decision)
        self._count_step(updated)

    def _apply_here(self, updated: list[bool], hyper: bytes, scale: float, decision: Decision) -> None:
        arena = self._layout.arena
        hypers = effective_hypers(self._layout.plan, self._optimizer, unpack_hypers(hyper))
        self._local.apply(arena.grads, scale, updated, hypers, self._layout.rows, decision)
        arena.mark_updated(updated)
        self._share_weights(updated)

    def _adopt_options(self, hyper: bytes) -> None:
        """Go on with the options that were in force last."""
        for group, values in zip(self.param_groups, unpack_hypers(hyper)["groups"], strict=True):
            kept = {"lr": group["lr"]} if self._optimizer.lr_scheduler is not None else {}
            group.update({**values, **kept})
