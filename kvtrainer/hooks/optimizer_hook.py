"""The hook that updates the weights after each batch, through a Trainer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvtrainer.anomalies import checked_mode, report_anomalies
from kvtrainer.clipping import make_clipping
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.hooks.base import Hook, Priority
from kvtrainer.parallel import DataParallel
from kvtrainer.precision.loss_scaler import unscale
from kvtrainer.results import StepResult

_log = logging.getLogger(__name__)

_NORMALISING = torch.nn.modules.batchnorm._BatchNorm


class OptimizerHook(Hook):
    """Backward pass, clipping and update, with the loss in `runner.outputs`; the Trainer's own pipeline does it.

    `runner` is any object with `trainer`, or an `optimizer` that is one, and `outputs`: {"loss": tensor, "num_samples":
    int}. With a `log_buffer` it gets "grad_norm", the norm before clipping, weighted by `num_samples`; that of a step
    that was skipped is left out, because an infinity among them would hide all others.

    A subclass may override `clip_grads`, which then limits the reduced gradient in place of the Trainer, and
    `detect_anomalous_parameters`, as MMCV's do.

    Args:
        grad_clip: what the Trainer's `clip_grad` may be; None leaves that option as it is.
        detect_anomalous_params: True or "log" logs parameters that are not in the loss, "raise" raises.

    Raises:
        ConfigurationError: an argument is wrong. `before_run` raises it if the Trainer refuses an option, as it does
            after its first step.
    """

    priority = Priority.ABOVE_NORMAL

    def __init__(
        self, grad_clip: Mapping[str, Any] | None = None, detect_anomalous_params: bool | str = False
    ) -> None:
        make_clipping(grad_clip)
        self.grad_clip = None if grad_clip is None else dict(grad_clip)
        self.detect_anomalous_params = checked_mode(detect_anomalous_params)
        self._configured: weakref.ref[Any] | None = None

    def before_run(self, runner: Any) -> None:
        """Set the Trainer's options; once for a Trainer, so that a runner may run again."""
        trainer = trainer_of(runner)
        if not self._is_configured(trainer):
            options = self._options()
            if options:
                trainer.configure(**options)
            self._configured = weakref.ref(trainer)

    def after_train_iter(self, runner: Any) -> None:
        """Update the weights; they are new when it returns, unless backward passes are being accumulated."""
        outputs = runner.outputs
        if not isinstance(outputs, Mapping) or "loss" not in outputs:
            raise ConfigurationError(
                f"an {type(self).__name__} needs runner.outputs['loss'], got {outputs!r:.120}; let train_step return "
                "dict(loss=..., num_samples=...)"
            )
        if self.detect_anomalous_params:
            self.detect_anomalous_parameters(outputs["loss"], runner)
        norm = self._update(trainer_of(runner), outputs["loss"])
        buffer = getattr(runner, "log_buffer", None)
        if buffer is not None and norm is not None:
            buffer.update({"grad_norm": float(norm)}, outputs.get("num_samples", 1))

    def clip_grads(self, params: Iterable[Tensor]) -> Tensor | None:
        """Limit the gradients of these parameters as `grad_clip` says; return their norm before that, if it is limited.

        The Trainer limits the reduced gradient by itself, wherever that is, and does not call this. One that a subclass
        defines is called between `allreduce_grads()` and `update()`, so not while the optimizer runs in the store.
        """
        given = dict(self.grad_clip or {})
        grads = [p for p in params if p.requires_grad and p.grad is not None]
        if not grads or not given:
            return None
        if given.pop("type", "norm") == "value":
            torch.nn.utils.clip_grad_value_(grads, **given)
            return None
        return torch.nn.utils.clip_grad_norm_(grads, **given)

    def detect_anomalous_parameters(self, loss: Any, runner: Any) -> None:
        """Log, in the runner's log if it has one, every parameter that is not in the loss, or raise."""
        model, logger = getattr(runner, "model", None), getattr(runner, "logger", None)
        if isinstance(model, torch.nn.Module) and not isinstance(model, DataParallel):
            report_anomalies(loss, model, self.detect_anomalous_params, logger)
        else:  # replicas, whose names the Trainer knows
            trainer_of(runner).report_anomalies(loss, self.detect_anomalous_params, logger)

    def _update(self, trainer: Any, loss: Any) -> float | None:
        """Make the step; return the norm that is to be logged."""
        if type(self).clip_grads is OptimizerHook.clip_grads:
            result: StepResult = trainer.update_params(loss)
            return None if result.skipped else result.grad_norm
        trainer.backward(loss)
        trainer.allreduce_grads()
        norm = None
        if trainer.accumulation.is_boundary:
            if trainer.loss_scaler is not None:
                unscale(trainer)
            norm = self.clip_grads(p for group in trainer.param_groups for p in group["params"])
        trainer.update()
        return None if norm is None or trainer.last.skipped else float(norm)

    def _is_configured(self, trainer: Any) -> bool:
        return self._configured is not None and self._configured() is trainer

    def _options(self) -> dict[str, Any]:
        """What the Trainer is to be told."""
        options: dict[str, Any] = {}
        if self.grad_clip is not None and type(self).clip_grads is OptimizerHook.clip_grads:
            options["clip_grad"] = self.grad_clip
        return options


class Cumulative(Hook):
    """Adds to an optimizer hook that the gradients of several batches are summed before an update.

    The loss of a batch is divided by their number. At the end of the run fewer may be left: their losses are divided
    by how many they are, and the last one ends in an update. For that the runner needs `iter` and `max_iters`.

    Args:
        cumulative_iters: batches for each update.
        others: arguments of the hook.
    """

    def __init__(self, cumulative_iters: int = 1, **others: Any) -> None:
        if (
            isinstance(cumulative_iters, bool)
            or not isinstance(cumulative_iters, int)
            or cumulative_iters < 1
        ):
            raise ConfigurationError(
                f"cumulative_iters must be an int of at least 1, got {cumulative_iters!r}"
            )
        super().__init__(**others)
        self.cumulative_iters = cumulative_iters

    def before_run(self, runner: Any) -> None:
        done, total = getattr(runner, "iter", None), getattr(runner, "max_iters", None)
        if done is None or total is None:
            raise ConfigurationError(
                f"a {type(self).__name__} needs runner.iter and runner.max_iters, to know where the run ends"
            )
        super().before_run(runner)
        if self.cumulative_iters > 1:
            model = getattr(runner, "model", None)
            if isinstance(model, torch.nn.Module) and self.has_batch_norm(model):
                _log.warning(
                    "the model has batch normalisation, whose statistics are of single batches, not of the %d that "
                    "make an update",
                    self.cumulative_iters,
                )
        trainer_of(runner).set_progress(done, total)

    def has_batch_norm(self, module: torch.nn.Module) -> bool:
        """Find out if a part of the module normalises with the statistics of a batch."""
        return any(isinstance(part, _NORMALISING) for part in module.modules())

    def _options(self) -> dict[str, Any]:
        own = {"accumulate": self.cumulative_iters} if self.cumulative_iters > 1 else {}
        return {**super()._options(), **own}  # type: ignore[misc]


class GradientCumulativeOptimizerHook(Cumulative, OptimizerHook):
    """An OptimizerHook that updates every `cumulative_iters` batches; arguments as of Cumulative and OptimizerHook."""


def trainer_of(runner: Any) -> Any:
    """The runner's Trainer: `runner.trainer`, or `runner.optimizer` where that is one.

    Raises:
        ArgumentTypeError: it has none.
    """
    for name in ("trainer", "optimizer"):
        found = getattr(runner, name, None)
        if hasattr(found, "update_params") and hasattr(found, "configure"):
            return found
    raise ArgumentTypeError(
        f"{type(runner).__name__} has no kvtrainer.Trainer; hooks need one as runner.trainer or runner.optimizer"
    )
