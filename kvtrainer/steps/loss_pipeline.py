"""The front of the pipeline, for loops that give the Trainer their loss: precision, accumulation, backward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvtrainer.anomalies import describe_nonfinite, losses_of, report_anomalies
from kvtrainer.errors import ConfigurationError
from kvtrainer.parallel.batch import ReplicaLosses
from kvtrainer.schedules.binding import bind_schedules
from kvtrainer.schedules.param_schedule import BoundSchedule
from kvtrainer.steps.accumulation import Accumulation
from kvtrainer.steps.joining import JoiningPipeline
from kvtrainer.steps.options import StageOptions
from kvtrainer.sync.binding import BUCKETS
from kvtrainer.types import StepResult

_log = logging.getLogger(__name__)


class LossPipeline(JoiningPipeline):
    """A pipeline with options for its stages, which begins at the loss. Arguments as of Pipeline.

    Args:
        stages: what the stages do beside the plain step.
    """

    _has_context = False
    """Whether `context` was ever asked for."""
    _has_warned_of_zeros = False

    def __init__(self, *args: Any, stages: StageOptions) -> None:
        self._stage_options = stages
        self._accumulation = Accumulation(stages.accumulate)
        super().__init__(*args)
        self._take_stage_options(stages)

    def configure(self, **options: Any) -> None:
        """Change options before the first step: those of the constructor, by its names, and two more.

        Args:
            clip_grad, amp, accumulate, detect_anomalous_params, on_nonfinite: as of the constructor.
            schedules: are added to those that there are.
            bucket_size_mb: how much one reduction over torch.distributed takes, in MiB; -1: all of a dtype.
            coalesce: False reduces every parameter by itself there.

        Raises:
            ConfigurationError: an option is unknown or wrong, or there was a step; nothing has changed then.
        """
        if self._link.is_started:
            raise ConfigurationError(
                f"{', '.join(options)} cannot change after the first step; call configure() before it"
            )
        buckets = {name: options.pop(name) for name in BUCKETS if name in options}
        stages = self._stage_options.changed(options)
        if buckets:
            self._link.check_buckets(buckets)
        self._take_stage_options(stages, options)
        if buckets:
            self._link.set_buckets(buckets)

    def context(self) -> AbstractContextManager[Any]:
        """What the forward pass and the loss belong in: torch.autocast as `amp` says, else nothing."""
        self._has_context = True
        if self._precision is None:
            return nullcontext()
        device = next(p for group in self.param_groups for p in group["params"]).device
        return torch.autocast(device.type, self._precision.dtype)

    def backward(self, loss: Any) -> None:
        """Run a backward pass of the loss, or of those in a list or dict, as of several replicas, as the options say.

        The loss is multiplied by the loss scale, and divided by the number of backward passes that make one update.
        `step` undoes the former.

        Raises:
            ConfigurationError: there is no loss.
            BackwardTwiceError: these losses of replicas had their backward pass.
            AnomalousParametersError: a parameter does not contribute to the loss, and that is to raise; nothing has
                happened then.
        """
        losses = losses_of(loss)
        if not losses:
            raise ConfigurationError(f"there is no loss in {loss!r:.80}, so there is nothing to learn from")
        if self._stage_options.detect_anomalous_params:
            self.report_anomalies(losses, self._stage_options.detect_anomalous_params)
        if isinstance(loss, ReplicaLosses):
            loss.mark_used()
        if self._limits.on_nonfinite in ("raise", "skip") and (problem := describe_nonfinite(losses)):
            # All workers have to know, and the round tells them.
            self._is_bad, self._bad_loss = True, f"{problem}: "
        factor = 1.0 / self._accumulation.divisor
        if self.loss_scaler is not None:
            self.loss_scaler.mark_scaled()
            factor *= self.loss_scaler.loss_scale
        if factor != 1.0:
            losses = [one * factor for one in losses]
        self._layout.attach()
        torch.autograd.backward(losses)
        self._accumulation.count()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self._accumulation.pending and not self._has_warned_of_zeros:
            self._has_warned_of_zeros = True
            _log.warning(
                "zero_grad() drops the gradients of %d backward passes of a window of %d, which reach no weight; call "
                "it after an update only, or not at all: the Trainer drops gradients that were used. This is said once",
                self._accumulation.pending,
                self._accumulation.counts,
            )
        self._is_bad, self._bad_loss = False, ""
        if self.loss_scaler is not None:
            self.loss_scaler.mark_dropped()

    zero_grad.__doc__ = JoiningPipeline.zero_grad.__doc__

    def update_params(self, loss: Any, batch_size: float | None = None) -> StepResult:
        """`backward(loss)`, then `step(batch_size)`, which does nothing until a window of accumulation is full.

        Without a batch size gradients are averaged over workers; `ignore_stale_grad` holds then. Raises as both do.
        """
        self.backward(loss)
        self.step(batch_size)
        assert self.last is not None
        return self.last

    def set_progress(self, iteration: int, max_iterations: int | None = None) -> None:
        """Say how many backward passes were made before, and how many there will be in all.

        With accumulation a last window that is shorter then counts in full, and the last pass of all ends in an update.

        Raises:
            ConfigurationError: the numbers are impossible.
        """
        self._accumulation.set_progress(iteration, max_iterations)

    def end_epoch(self, metric: float | None = None) -> None:
        """Advance the schedules that go by epoch, and those that go by a metric, such as ReduceLROnPlateau.

        Raises:
            ConfigurationError: one goes by a metric, and there is none; nothing has changed then.
        """
        if metric is None and any(schedule.by == "metric" for schedule in self._schedules):
            raise ConfigurationError(
                "a schedule goes by a metric, such as the loss on validation data; call end_epoch(metric)"
            )
        for schedule in self._schedules:
            if schedule.by == "epoch":
                schedule.step()
            elif schedule.by == "metric":
                schedule.step(metric)  # type: ignore[call-arg]

    def _warn_of_what_had_no_effect(self) -> None:
        """Training ends: log what was asked for and never came to anything."""
        passes = self._accumulation.pending
        if passes:
            _log.warning(
                "the gradients of the last %d backward passes reached no weight: %d make an update; set_progress() "
                "with the number of all lets a shorter window count",
                passes,
                self._accumulation.counts,
            )
        waiting = [one for one in self._schedules if one.by == "epoch" and not _has_moved(one)]
        if waiting and self.last is not None:
            _log.warning(
                "no epoch was ended, so %d schedules that go by epoch never moved; call end_epoch() after each epoch",
                len(waiting),
            )

    def get_lr(self) -> dict[str, list[float]]:
        """{"lr": the learning rate of every group}; an empty list of an optimizer without any."""
        return {"lr": [float(group["lr"]) for group in self.param_groups if "lr" in group]}

    def get_momentum(self) -> dict[str, list[float]]:
        """{"momentum": that of every group}: betas[0] of the Adams, 0 where there is none."""
        return {"momentum": [_momentum(group) for group in self.param_groups]}

    def _take_stage_options(self, stages: StageOptions, changed: Mapping[str, Any] | None = None) -> None:
        """Hold these from now on; where only some have `changed`, what belongs to the others goes on as it is."""
        added = stages.schedules if changed is None else changed.get("schedules", ())
        bound = bind_schedules(added, self, None, self._schedules)
        if changed is None or "accumulate" in changed:
            self._accumulation = Accumulation(stages.accumulate)
        scaler = None if stages.precision is None else stages.precision.scaler
        if changed is None or "amp" in changed:
            self.loss_scaler = scaler
        self._needs_backward = "" if scaler is None else "amp"
        if stages.detect_anomalous_params:
            self._needs_backward = "detect_anomalous_params"
        self._stage_options, self._limits, self._precision = stages, stages.limits, stages.precision
        self._schedules = [*self._schedules, *bound]

    def _check_backward(self, fresh: Sequence[bool]) -> None:
        super()._check_backward(fresh)
        is_unscaled = self._precision is not None and self._precision.scaler is None
        if is_unscaled and any(fresh) and not self._has_context:
            raise ConfigurationError(
                "amp with dtype 'bfloat16' works in trainer.context(), which was never entered; compute the forward "
                "pass and the loss in it, or leave amp out"
            )

    def report_anomalies(
        self, loss: Any, mode: bool | str = "log", logger: logging.Logger | None = None
    ) -> None:
        """Log parameters that a loss does not depend on, or raise; see `kvtrainer.anomalies.report_anomalies`."""
        layouts = self._layout.devices
        replicas = zip(*(layout.parameters for layout in layouts), strict=True)
        named = dict(zip(self._layout.names, map(list, replicas), strict=True))
        report_anomalies(loss, named, mode, logger)


def _has_moved(schedule: BoundSchedule) -> bool:
    """Whether a schedule was ever advanced, as far as its state says so."""
    state = schedule.state_dict()
    return bool(state.get("count", state.get("last_epoch", 1)))


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))
