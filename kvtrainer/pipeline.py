"""The one fixed pipeline of a Trainer, over any kvstore.

    fresh gradients? → gather → finite? → reduce over workers → update, here or in the store → new weights

Every feature is an option of one of these stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvtrainer.stages import Stages


class Pipeline(Stages):
    """From gradients to new weights: `step`, or `allreduce_grads` and `update`. Arguments as of Stages."""

    _reduced: list[bool] | None = None
    """Between `allreduce_grads` and `update`: which gradients have been summed."""
    _is_vetoed = False
    """Between `allreduce_grads` and `update`: whether a gradient overflowed on any worker."""

    def step(  # type: ignore[override]
        self,
        batch_size: float | Callable[[], Any] | None = None,
        ignore_stale_grad: bool = False,
        *,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Reduce gradients over workers and update the weights; blocks until the new weights are here.

        With a batch size b, gradients are summed over workers, each divided by the b of its worker: pass the
        global batch size for a mean. It may differ from step to step and from worker to worker. Without one they are
        averaged over workers, as DistributedDataParallel does. Gradients stay readable until the next backward pass.
        Replicas are summed or averaged as workers are, and are equal afterwards; with kvstore=None each has its own
        update and state.

        Args:
            batch_size: A positive number; or the closure, as torch's optimizers take it.
            ignore_stale_grad: Leave out parameters without a new gradient instead of raising. Without a batch
                size they are always left out.
            closure: Called first, with gradients enabled; its result is returned.

        Raises:
            StaleGradientError: a parameter got no gradient since the last step; nothing has changed then.
            NotInitializedError: a parameter has no shape yet; nothing has changed then.
            ParameterMovedError: the data of a parameter were replaced; nothing has changed then.
            WeightsWrittenError: the loop has written weights that the store would replace; see `set_data`.
            KVStoreError: the round failed on every worker; weights and optimizer state are as before.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        scale = self._scale(batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale *= self._loss_factor()
        fresh = self._fresh(is_strict=batch_size is not None and not ignore_stale_grad)
        if not ignore_stale_grad and not any(fresh):
            self._warn_of_no_gradient()
        self._prepare()
        self._gather(fresh)
        if self._link.exchange is None:
            if not (is_skipped := self._overflows()):
                self._update_here(fresh, scale)
            self._finish(fresh, None if is_skipped else fresh)
            return loss
        mean = 1.0 if batch_size is not None else 1.0 / self._num_addends()
        updated = self._reduce(fresh, scale * mean)
        if updated is not None and not self._link.exchange.updates_weights:
            self._update_here(updated, 1.0)
        elif updated is not None:
            self._share_weights()
        self._finish(fresh, updated)
        return loss

    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers and replicas, to be changed before `update`; blocks.

        With a loss scaler, gradients that overflow on any worker stay as they are, and `update` skips the step.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        self._refuse_in_store("allreduce_grads()")
        fresh = self._fresh(is_strict=False)
        self._prepare()
        if self._link.exchange is not None:
            self._gather(fresh)
            summed = self._reduce(fresh, 1.0)
            self._is_vetoed, self._reduced = summed is None, summed or fresh
            if summed is not None:
                # Rows of a single gradient are their own sum.
                self._layout.scatter_grads(summed, with_rows=self._num_addends() > 1)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Of replicas the gradients on the first device count.

        Raises:
            ConfigurationError: the optimizer runs in the store; or there are replicas that were not summed.
            StaleGradientError: as `step`.
        """
        self._refuse_in_store("update()")
        scale = self._scale(batch_size) * self._loss_factor()
        is_strict = batch_size is not None and not ignore_stale_grad
        if self._reduced is None:
            present = self._fresh(is_strict)
        else:
            # Sums count as fresh, also where only other workers had a gradient; unless dropped since.
            rows = zip(self._reduced, self._layout.parameters, strict=True)
            present = self._fresh(is_strict, [has_sum and p.grad is not None for has_sum, p in rows])
        self._prepare()
        if self._reduced is not None and batch_size is None:
            scale /= self._num_addends()
        if self._reduced is not None and not self._is_vetoed:
            self._layout.gather_sums(present)
        elif self._reduced is None:
            self._refuse_unsummed()
            self._layout.gather_grads(present)
        if not (is_skipped := self._is_vetoed or self._overflows()):
            self._update_here(present, scale)
        self._finish(present, None if is_skipped else present)

    def _reduce(self, fresh: list[bool], scale: float) -> list[bool] | None:
        """One round of the gradients in the arena. Returns which keys any worker contributed to.

        With a loss scaler it returns None on all workers if a gradient, or a sum that comes back, overflows.
        Raises before or after the round, never in the middle.
        """
        exchange = self._link.exchange
        assert exchange is not None
        absent = frozenset(i for i, is_fresh in enumerate(fresh) if not is_fresh)
        outcome = self._link.round(self._layout, self._options(fresh), scale, absent, veto=self._overflows())
        if outcome.skipped:
            return None
        if not exchange.updates_weights:
            if outcome.rows is None:
                self._layout.scale_rows(scale)  # those did not travel; what did has come back scaled
            else:
                self._layout.rows = dict(outcome.rows)
            if self._overflows():
                return None
        if not exchange.knows_left_out:
            takes_part = self._layout.tracker.participating()
            return [takes and i not in outcome.left_out for i, takes in enumerate(takes_part)]
        # What is frozen here may not be so elsewhere, and weights must stay equal: the sum is what counts.
        return [i not in outcome.left_out for i in range(len(fresh))]

    def _finish(self, used: Sequence[bool], updated: Sequence[bool] | None) -> None:
        """End a step: these gradients are used up; these keys were updated, or None if the step was skipped."""
        self._layout.tracker.consume(i for i, is_used in enumerate(used) if is_used)
        self._reduced, self._is_vetoed = None, False
        self._count_step(updated)
        if self._instance is not None:
            # Schedulers bound to the instance warn unless they see it step.
            self._instance._opt_called = True  # type: ignore[attr-defined]

    def _count_step(self, updated: Sequence[bool] | None) -> None:
        """Note that these keys were updated, or None if the step was skipped."""
        if updated is not None:
            self._schedule.count(updated)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=updated is None)
