"""The one fixed pipeline of a Trainer, over any kvstore.

    fresh gradients? → gather → finite? → reduce over workers → update, here or in the store → new weights

Every feature is an option of one of these stages.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
import torch.optim

from kvstore_server.hyper import effective_hypers
from kvstore_server.optimizer import Optimizer
from kvtrainer.errors import ConfigurationError, NoGradientWarning, StaleGradientError
from kvtrainer.flat_optimizer import FlatOptimizer
from kvtrainer.gradients import REPLACED
from kvtrainer.loss_scaler import LossScaler
from kvtrainer.parameters import Group
from kvtrainer.states import StateHolder
from kvtrainer.store_choice import StoreChoice
from kvtrainer.store_link import StoreLink


class Pipeline(FlatOptimizer):
    """From gradients to new weights: `step`, or `allreduce_grads` and `update`.

    Args:
        groups, optimizer, instance: as of FlatOptimizer.
        choice: the store, and whether the optimizer runs in it.
    """

    loss_scaler: LossScaler | None = None
    """What `kvtrainer.amp.init_trainer` sets. With one, a step in which a gradient overflows on any worker changes
    nothing on any of them."""

    def __init__(
        self,
        groups: list[Group],
        optimizer: Optimizer,
        instance: torch.optim.Optimizer | None,
        choice: StoreChoice,
    ) -> None:
        self._link = StoreLink(choice)
        self._effective: tuple[dict[str, Any], list[Any]] = ({}, [])
        """The options of the last update in this process, and what they mean for each key."""
        self._has_warned = False
        self._reduced: list[bool] | None = None
        """Between `allreduce_grads` and `update`: which gradients have been summed."""
        self._is_vetoed = False
        """Between `allreduce_grads` and `update`: whether a gradient overflowed on any worker."""
        super().__init__(groups, optimizer, instance)

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
        self._layout.gather_grads(fresh)
        if self._link.exchange is None:
            if not (is_skipped := self._overflows()):
                self._update_here(fresh, scale)
            self._finish(fresh, None if is_skipped else fresh)
            return loss
        mean = 1.0 if batch_size is not None else 1.0 / self._link.num_workers
        updated = self._reduce(fresh, scale * mean)
        if updated is not None and not self._link.exchange.updates_weights:
            self._update_here(updated, 1.0)
        self._finish(fresh, updated)
        return loss

    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers, to be changed before `update`; blocks.

        With a loss scaler, gradients that overflow on any worker stay as they are, and `update` skips the step.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        self._refuse_in_store("allreduce_grads()")
        fresh = self._fresh(is_strict=False)
        self._prepare()
        if self._link.exchange is not None:
            self._layout.gather_grads(fresh)
            summed = self._reduce(fresh, 1.0)
            self._is_vetoed, self._reduced = summed is None, summed or fresh
            if summed is not None:
                self._layout.scatter_grads(summed)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Raises:
            ConfigurationError: the optimizer runs in the store.
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
            scale /= self._link.num_workers
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
            self._layout.scale_rows(scale)  # those did not travel; what did has come back scaled
            if self._overflows():
                return None
        if not exchange.knows_left_out:
            takes_part = self._layout.tracker.participating()
            return [takes and i not in outcome.left_out for i, takes in enumerate(takes_part)]
        # What is frozen here may not be so elsewhere, and weights must stay equal: the sum is what counts.
        return [i not in outcome.left_out for i in range(len(fresh))]

    def _update_here(self, present: Sequence[bool], scale: float) -> None:
        options = self._options(present)
        if options != self._effective[0]:
            self._effective = (options, effective_hypers(self._layout.plan, self._optimizer, options))
        arena = self._layout.arena
        self._local.apply(arena.weights, arena.grads, scale, present, self._effective[1], self._layout.rows)
        arena.mark_updated(present)

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

    def _fresh(self, is_strict: bool, summed: list[bool] | None = None) -> list[bool]:
        """Which parameters have a new gradient; after `allreduce_grads`, `summed` says so.

        Raises:
            StaleGradientError: `is_strict`, and one that should has none.
        """
        self._link.check_open()
        self._settle()
        self._follow_instance()
        tracker = self._layout.tracker
        tracker.attach()
        if is_strict:
            try:
                return tracker.fresh_or_raise(summed)
            except StaleGradientError:
                # Gradients do not come back to parameters that were moved, which is then what has to be said.
                self._layout.arena.check_in_place()
                raise
        fresh = tracker.fresh(tracker.participating()) if summed is None else summed
        if not any(fresh):
            self._layout.arena.check_in_place()
        return fresh

    def _warn_of_no_gradient(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"step() gives nothing: none of the {len(self._layout.names)} parameters got a gradient since the "
                f"last step. {REPLACED} If it is meant, pass ignore_stale_grad=True. This is said once",
                NoGradientWarning,
                stacklevel=4,
            )

    def _options(self, coming: Sequence[bool]) -> dict[str, Any]:
        """The numbers of an update of these keys, checked; other workers may add keys to it."""
        self._schedule.apply(self.param_groups, coming if self._link.num_workers == 1 else None)
        return self._checked_options()

    def _overflows(self) -> bool:
        """Whether there is a loss scaler and a gradient in the arena is infinite or not a number."""
        return self.loss_scaler is not None and not self._layout.grads_are_finite()

    def _scale(self, batch_size: float | None) -> float:
        """What gradients are multiplied by, before the mean over workers and without the loss scale."""
        if batch_size is None:
            return self._optimizer.rescale_grad
        is_number = isinstance(batch_size, Real) and not isinstance(batch_size, bool)
        if not is_number or not 0 < batch_size < math.inf:
            raise ConfigurationError(f"the batch size must be a number above 0, got {batch_size!r}")
        return self._optimizer.rescale_grad / float(batch_size)

    def _loss_factor(self) -> float:
        """What undoes the loss scale that the present gradients carry."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.factor

    def _refuse_in_store(self, method: str) -> None:
        if self._link.choice.updates_weights:
            raise ConfigurationError(
                f"{method} has no meaning while the optimizer runs in the kvstore; build the Trainer with "
                "update_on_kvstore=False"
            )

    def _prepare(self) -> bool:
        """Make the store and give every worker rank 0's weights; once, collectively. Returns whether it was now."""
        is_first = self._link.start(self._layout.plan, self._layout.arena, self._optimizer)
        if is_first:
            self._layout.writes.accept()
            self._hand_over_states()
        return is_first

    def _holder(self) -> StateHolder | None:
        if self._link.choice.updates_weights:
            return self._link.holder
        return self._local if self._layout.is_settled else None

    def _can_grow(self) -> bool:
        return self._link.exchange is None
