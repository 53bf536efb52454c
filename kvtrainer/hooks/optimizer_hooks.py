"""Hooks that update the weights after each batch through a Trainer, also over several batches or in half precision."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from kvstore_server import check
from kvtrainer.anomalies import checked_mode, report_anomalies
from kvtrainer.clipping import make_clipping
from kvtrainer.comm.rank_group import Buckets
from kvtrainer.config.sections import hook_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.hooks.base import Hook, Priority
from kvtrainer.parallel import DataParallel
from kvtrainer.precision import copy_grads_to_fp32, copy_params_to_fp16
from kvtrainer.scaling import make_precision, unscale
from kvtrainer.types import StepResult

_log = logging.getLogger(__name__)


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
        if self._configured is None or self._configured() is not trainer:
            options = hook_arguments(self._own_options())
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

    def _own_options(self) -> dict[str, Any]:
        """Return what the Trainer is to be told, under MMCV's names."""
        is_trainers = type(self).clip_grads is OptimizerHook.clip_grads
        return {"grad_clip": self.grad_clip} if is_trainers else {}


class Fp16OptimizerHook(OptimizerHook):
    """An OptimizerHook that scales the loss, and lets the model compute in half precision where that is safe.

    While the run lasts, `runner.model` computes its forward pass as `trainer.context()` says: under torch.autocast.
    The scaler's state is in `runner.meta["fp16"]["loss_scaler"]` after every batch, so in every checkpoint, and is
    taken from there by `before_run`.

    Args:
        grad_clip: as of OptimizerHook; the gradient is unscaled first.
        coalesce, bucket_size_mb: as of `Trainer.configure`, which takes them where gradients are reduced over ranks of
            torch.distributed; the defaults, True and -1, leave it to the store, whatever it is.
        loss_scale: "dynamic", a number, or a dict; as the Trainer's option `amp`.
        distributed: False if there is only this worker. It must be true then: the store decides who takes part.
        detect_anomalous_params: as of OptimizerHook.

    Raises:
        ConfigurationError: an argument is wrong; `before_run`: the Trainer refuses an option.
    """

    def __init__(
        self,
        grad_clip: Mapping[str, Any] | None = None,
        coalesce: bool = True,
        bucket_size_mb: float = -1,
        loss_scale: float | str | Mapping[str, Any] = 512.0,
        distributed: bool = True,
        detect_anomalous_params: bool | str = False,
    ) -> None:
        super().__init__(grad_clip, detect_anomalous_params)
        Buckets(bucket_size_mb, coalesce)  # checks them
        self.coalesce, self.bucket_size_mb = coalesce, bucket_size_mb
        self.loss_scale, self.distributed = loss_scale, bool(distributed)
        make_precision(hook_arguments(self._own_options())["amp"])  # checks it
        self._autocast = _Autocast()

    def before_run(self, runner: Any) -> None:
        """Set the Trainer's options, take the scaler's state from `runner.meta`, and switch autocast on."""
        trainer = trainer_of(runner)
        self._check_alone(trainer)
        super().before_run(runner)
        meta = getattr(runner, "meta", None)
        saved = meta.get("fp16", {}).get("loss_scaler") if isinstance(meta, Mapping) else None
        if saved is not None and trainer.loss_scaler is not None:
            trainer.loss_scaler.load_state_dict(saved)
        model = getattr(runner, "model", None)
        if isinstance(model, torch.nn.Module):
            self._autocast.attach(model, trainer)

    def after_train_iter(self, runner: Any) -> None:
        super().after_train_iter(runner)
        self._check_alone(trainer_of(runner))
        scaler, meta = trainer_of(runner).loss_scaler, getattr(runner, "meta", None)
        if scaler is not None and isinstance(meta, dict):
            meta.setdefault("fp16", {})["loss_scaler"] = scaler.state_dict()

    def after_run(self, runner: Any) -> None:
        """Switch autocast off."""
        self._autocast.detach()

    def copy_grads_to_fp32(
        self, fp16_net: Any, fp32_weights: Mapping[str, Tensor] | Iterable[Tensor]
    ) -> None:
        """As `kvtrainer.precision.master_weights.copy_grads_to_fp32`; for subclasses, this hook has no use for it."""
        copy_grads_to_fp32(fp16_net, fp32_weights)

    def copy_params_to_fp16(
        self, fp16_net: Any, fp32_weights: Mapping[str, Tensor] | Iterable[Tensor]
    ) -> None:
        """As `kvtrainer.precision.master_weights.copy_params_to_fp16`; for subclasses, this hook has no use for it."""
        copy_params_to_fp16(fp16_net, fp32_weights)

    def _check_alone(self, trainer: Any) -> None:
        """Raise ConfigurationError if there are workers that should not be; a store is there since the first step."""
        count = getattr(trainer.kvstore, "num_workers", 1)
        if not self.distributed and count > 1:
            raise ConfigurationError(
                f"distributed=False, but the Trainer's kvstore has {count} workers; leave it out, or build the Trainer "
                "with kvstore=None"
            )

    def _own_options(self) -> dict[str, Any]:
        names = ("loss_scale", "coalesce", "bucket_size_mb")
        return {**super()._own_options(), **{name: getattr(self, name) for name in names}}


class GradientCumulativeOptimizerHook(OptimizerHook):
    """An OptimizerHook that sums the gradients of several batches before an update.

    The loss of a batch is divided by their number. At the end of the run fewer may be left: their losses are divided
    by how many they are, and the last one ends in an update. For that the runner needs `iter` and `max_iters`.

    Args:
        cumulative_iters: Batches for each update.
        others: As of OptimizerHook, or of the other class that a subclass derives from.
    """

    def __init__(self, cumulative_iters: int = 1, **others: Any) -> None:
        self.cumulative_iters = check.integer("cumulative_iters", cumulative_iters, 1)
        super().__init__(**others)

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
        return any(isinstance(part, _BatchNorm) for part in module.modules())

    def _own_options(self) -> dict[str, Any]:
        own = {"cumulative_iters": self.cumulative_iters} if self.cumulative_iters > 1 else {}
        return {**super()._own_options(), **own}


class GradientCumulativeFp16OptimizerHook(GradientCumulativeOptimizerHook, Fp16OptimizerHook):
    """A Fp16OptimizerHook that updates every `cumulative_iters` batches; its other arguments are given by name."""


class _Autocast:
    """Surrounds a module's forward pass by a Trainer's context, also where it raises."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._flagged: list[torch.nn.Module] = []
        self._open = threading.local()

    def attach(self, model: torch.nn.Module, trainer: Any) -> None:
        self.detach()

        def enter(*_: Any) -> None:
            context: AbstractContextManager[Any] = trainer.context()
            context.__enter__()
            self._stack().append(context)

        def leave(*_: Any) -> None:
            if self._stack():
                self._stack().pop().__exit__(None, None, None)

        # The losses of replicas do not go through the forward pass of what holds them.
        for one in model.replicas if isinstance(model, DataParallel) else (model,):
            self._handles.append(one.register_forward_pre_hook(enter))
            self._handles.append(one.register_forward_hook(leave, always_call=True))
            for module in one.modules():
                # Models made for MMCV ask this of themselves.
                if getattr(module, "fp16_enabled", None) is False:
                    module.fp16_enabled = True  # type: ignore[assignment]
                    self._flagged.append(module)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module in self._flagged:
            module.fp16_enabled = False  # type: ignore[assignment]
        self._handles, self._flagged = [], []

    def _stack(self) -> list[AbstractContextManager[Any]]:
        stack: list[AbstractContextManager[Any]] = self._open.__dict__.setdefault("contexts", [])
        return stack


def trainer_of(runner: Any) -> Any:
    """Return the runner's Trainer: `runner.trainer`, or `runner.optimizer` where that is one.

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
