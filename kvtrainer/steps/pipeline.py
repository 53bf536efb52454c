"""The one fixed pipeline of a Trainer, over any kvstore.

    fresh gradients? → gather → reduce over workers → norm, finite? → skip, or clip and update, here or in the store
    → new weights → loss scale → schedules

Every feature is an option of one of these stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvstore_server.norms import Decision
from kvtrainer.clipping import Verdict
from kvtrainer.errors import ConfigurationError, NonFiniteGradientError
from kvtrainer.one_thread import by_one_thread
from kvtrainer.scaling import plain_scaling
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.steps.stages import Stages
from kvtrainer.types import StepResult


class Pipeline(Stages):
    """From gradients to new weights: `step`, or `allreduce_grads` and `update`. Arguments as of Stages."""

    _reduced: list[bool] | None = None
    """Between `allreduce_grads` and `update`: which gradients have been summed."""
    _carried = 1.0
    """The loss scale of a scaler that the script drives, while that makes a step."""
    _is_vetoed = False
    """Between `allreduce_grads` and `update`: whether a gradient overflowed on any worker."""
    _schedules: Sequence[BoundSchedule] = ()
    last: StepResult | None = None
    """How the last step ended; None before the first one."""

    @by_one_thread
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
        update and state. Where backward passes are accumulated, it does nothing until there were enough of them.

        Returns the closure's result if there is a closure, and otherwise the StepResult, which is also `last`.

        Args:
            batch_size: A positive number; or the closure, as torch's optimizers take it.
            ignore_stale_grad: Leave out parameters without a new gradient instead of raising. Without a batch
                size they are always left out, save those that `zero_grad(set_to_none=False)` gave zeros.
            closure: Called first, with gradients enabled.

        Raises:
            StaleGradientError: a parameter got no gradient since the last step; nothing has changed then.
            NotInitializedError: a parameter has no shape yet; nothing has changed then.
            ParameterMovedError: the data of a parameter were replaced; nothing has changed then.
            WeightsWrittenError: the loop has written weights that the store would replace; see `set_data`.
            NonFiniteGradientError: a gradient is not finite on any worker, and `on_nonfinite` is "raise"; on every
                worker, and nothing has changed.
            KVStoreError: the round failed on every worker; weights and optimizer state are as before.
        """
        if callable(batch_size):
            batch_size, closure = None, batch_size
        scale = self._scale(batch_size)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._is_accumulating():
            self.last = StepResult(lr=self._lr_of_step, loss_scale=self._loss_scale, updated=False)
            return loss if closure is not None else self.last
        undone = self._loss_factor()
        is_torchs = batch_size is None and not ignore_stale_grad
        fresh = self._fresh(batch_size is not None and not ignore_stale_grad, with_zeros=is_torchs)
        self._check_backward(fresh)
        if not ignore_stale_grad and not any(fresh):
            self._warn_of_no_gradient()
        self._prepare()
        plain = plain_scaling(self, self._link.num_workers)
        with self._lending(closure, loss, scale):
            if plain is None:
                self._step(fresh, scale, undone, batch_size is None)
            else:
                with self._knowing(plain.overflows):
                    self._step(fresh, scale, undone * plain.factor, batch_size is None)
        return loss if closure is not None else self.last

    @contextmanager
    def _lending(self, closure: Callable[[], Any] | None, loss: Any, scale: float) -> Iterator[None]:
        """While it is open a torch optimizer that evaluates the loss again may do so.

        Args:
            closure: The script's.
            loss: What it gave already.
            scale: What gradients are multiplied by.
        """
        joint = self._joint()
        if joint is None or closure is None:
            yield
            return
        is_alone = (
            self._link.exchange is None and not self._layout.has_replicas and self._accumulation.counts == 1
        )
        is_plain = is_alone and not self._active_limits.is_needed and self.loss_scaler is None
        had = [loss]

        def again() -> Any:
            if had:
                return had.pop()
            if not is_plain:
                raise ConfigurationError(
                    f"{type(joint.instance).__name__} evaluates the loss again within a step, which goes only in one "
                    "process, on one device and without clip_grad, amp, on_nonfinite and accumulation"
                )
            with torch.enable_grad():
                found = closure()
            for parameter in self._layout.parameters:
                if parameter.grad is not None and scale != 1.0:
                    parameter.grad.mul_(scale)
            return found

        joint.closure = again
        try:
            yield
        finally:
            joint.closure = None

    def _step(self, fresh: list[bool], scale: float, undone: float, is_mean: bool) -> None:
        """Reduce and use these gradients.

        Args:
            undone: the factor that takes out the loss scale that they carry.
            is_mean: whether they are averaged over all that are summed.
        """
        scale *= undone / self._gather(fresh)
        if self._link.exchange is None:
            verdict = self._update_here(fresh, scale)
            self._finish(fresh, None if verdict.decision.skip else fresh, verdict)
            return
        kept = self._kept_scale(undone)
        scale *= kept
        updated, verdict = self._reduce(fresh, scale / self._num_averaged() if is_mean else scale)
        if updated is not None and not self._link.exchange.updates_weights:
            verdict = self._update_here(updated, 1.0 / kept)
            updated = None if verdict.decision.skip else updated
        elif updated is not None:
            self._share_weights()
        self._finish(fresh, updated, verdict)

    _step_supports_amp_scaling = True
    """Tells torch.amp.GradScaler to call `step` in any case: it is for all workers together to skip it."""

    def _step_voting(self, overflows: bool, carried: float, *args: Any, **kwargs: Any) -> StepResult:
        """A step that all workers skip if gradients overflow on any; `overflows` says so of this one's.

        `carried` is the factor of its loss, which has been taken out of the gradients.
        """
        self._is_voting, self._carried = True, carried
        try:
            with self._knowing(overflows):
                self.step(*args, **kwargs)
        finally:
            self._is_voting = False
        assert self.last is not None
        return self.last

    @by_one_thread
    def allreduce_grads(self) -> None:
        """Replace every gradient by its sum over workers and replicas, to be changed before `update`; blocks.

        With a loss scaler, gradients that overflow on any worker stay as they are, and `update` skips the step. The
        gradient is limited by `update`. While backward passes are accumulated it does nothing.

        Raises:
            ConfigurationError: the optimizer runs in the store, which leaves nothing to do in between.
        """
        self._refuse_in_store("allreduce_grads()")
        if self._is_accumulating():
            return
        fresh = self._fresh(is_strict=False)
        self._check_backward(fresh)
        self._prepare()
        if self._link.exchange is not None:
            summed, _ = self._reduce(fresh, 1.0 / self._gather(fresh))
            if summed is not None and self._overflows():
                summed = None
            self._is_vetoed, self._reduced = summed is None, summed or fresh
            if summed is not None:
                if self.loss_scaler is not None and any(summed) and not any(fresh):
                    self.loss_scaler.mark_scaled()  # the others' losses were, and so is the sum
                # Rows of a single gradient are their own sum.
                self._layout.scatter(summed, self._link.num_workers > 1 or self._layout.has_replicas)

    @by_one_thread
    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> StepResult:
        """Update the weights from the present gradients, after `allreduce_grads`; arguments as of `step`.

        Of replicas the gradients on the first device count. Returns how the step ended, which is also `last`.

        Raises:
            ConfigurationError: the optimizer runs in the store; or there are replicas that were not summed.
            StaleGradientError: as `step`.
        """
        self._refuse_in_store("update()")
        if self._is_accumulating():
            self.last = StepResult(lr=self._lr_of_step, loss_scale=self._loss_scale, updated=False)
            return self.last
        scale = self._scale(batch_size) * self._loss_factor()
        is_strict = batch_size is not None and not ignore_stale_grad
        if self._reduced is None:
            present = self._fresh(is_strict, with_zeros=batch_size is None and not ignore_stale_grad)
            self._check_backward(present)
        else:
            # Sums count as fresh, also where only other workers had a gradient; unless dropped since.
            rows = zip(self._reduced, self._layout.parameters, strict=True)
            present = self._fresh(is_strict, [has_sum and p.grad is not None for has_sum, p in rows])
        self._prepare()
        if self._reduced is not None and batch_size is None:
            scale /= self._num_averaged()
        if self._reduced is not None and not self._is_vetoed:
            self._layout.gather_sums(present)
        elif self._reduced is None:
            self._refuse_unsummed()
            self._layout.gather(present)
        self._is_bad = self._is_bad or self._is_vetoed
        verdict = self._update_here(present, scale)
        return self._finish(present, None if verdict.decision.skip else present, verdict)

    def _reduce(self, fresh: list[bool], scale: float) -> tuple[list[bool] | None, Verdict]:
        """One round of the gradients in the arena. Returns which keys any worker contributed to, and the verdict.

        The keys are None, on all workers, if nothing may be updated. Where workers update, only a veto is known yet.
        Raises before or after the round, never in the middle.
        """
        exchange = self._link.exchange
        assert exchange is not None
        absent = frozenset(i for i, is_fresh in enumerate(fresh) if not is_fresh)
        own = Verdict()
        if exchange.updates_weights and not exchange.is_sync:
            # Every contribution is an update of its own.
            own = self._judge(self._layout.devices[0], fresh, scale)
            scale = self._limit_own(own.decision, scale)
        veto = own.decision.skip or self._overflows()
        outcome = self._link.round(
            self._layout, self._agreed_options(fresh), scale, absent, veto, self._active_limits
        )
        if outcome.skipped:
            return None, Verdict(own.measured or outcome.measured, Decision(skip=True))
        if not exchange.updates_weights:
            if outcome.rows is None:
                self._layout.devices[0].scale_rows(
                    scale
                )  # those did not travel; what did has come back scaled
            else:
                self._layout.rows = dict(outcome.rows)
        verdict = Verdict(outcome.measured, outcome.decision) if exchange.is_sync else own
        if not exchange.knows_left_out:
            takes_part = self._layout.participating()
            return [takes and i not in outcome.left_out for i, takes in enumerate(takes_part)], verdict
        # What is frozen here may not be so elsewhere, and weights must stay equal: the sum is what counts.
        return [i not in outcome.left_out for i in range(len(fresh))], verdict

    def _finish(self, used: Sequence[bool], updated: Sequence[bool] | None, verdict: Verdict) -> StepResult:
        """End a step: these gradients are used up; these keys were updated, or None if the step was skipped.

        Raises:
            NonFiniteGradientError: the step was skipped, and the script wants to stop then.
        """
        scale, limits = self._loss_scale, self._active_limits
        self._layout.consume(used)
        self._reduced, self._is_vetoed, self._is_bad = None, False, False
        self._accumulation.end()
        is_skipped, norm = updated is None, None
        if limits.reports_norm:
            # Not all workers have measured it where one knew before that the step is skipped.
            norm = math.inf if is_skipped or verdict.measured is None else verdict.measured.norm
        self.last = StepResult(
            norm,
            verdict.decision.coef,
            is_skipped,
            scale,
            self._lr_of_step,
            updated=updated is not None and any(updated),
        )
        self._count_step(updated)
        if self._instance is not None:
            # Schedulers bound to the instance warn unless they see it step.
            self._instance._opt_called = True  # type: ignore[attr-defined]
        if is_skipped and limits.on_nonfinite == "raise":
            said, self._bad_loss = self._bad_loss, ""
            raise NonFiniteGradientError(
                f"{said}a gradient or the loss is infinite or not a number, on this worker or another, so nothing was "
                "updated; torch.autograd.detect_anomaly finds the operation, and on_nonfinite='skip' goes on without "
                "such steps"
            )
        self._bad_loss = ""
        return self.last

    @property
    def _lr_of_step(self) -> float | None:
        """What the step has been made with; a lr_scheduler, too, writes it there before the update."""
        lr = self.param_groups[0].get("lr")
        return None if lr is None else float(lr)

    _bad_loss = ""
    """What to say of a loss that was not finite here."""

    @property
    def _loss_scale(self) -> float:
        """The factor that the loss of this step carries, on other workers if not here."""
        own = self._carried if self._is_voting else 1.0
        return own if self.loss_scaler is None else self.loss_scaler.loss_scale

    def _count_step(self, updated: Sequence[bool] | None) -> None:
        """Note that these keys were updated, or None if the step was skipped."""
        if updated is not None:
            self._schedule.count(updated)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=updated is None)
        if updated is not None and any(updated):
            for schedule in self._schedules:
                if schedule.by == "step":
                    schedule.step()
