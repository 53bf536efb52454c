"""The hook for training in half precision: autocast, loss scaling, and its state in every checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kvtrainer.comm.rank_group import Buckets
from kvtrainer.errors import ConfigurationError
from kvtrainer.hooks.optimizer_hook import Cumulative, OptimizerHook, trainer_of
from kvtrainer.parallel import DataParallel
from kvtrainer.precision.master_weights import copy_grads_to_fp32, copy_params_to_fp16
from kvtrainer.precision.options import make_precision


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
        if loss_scale is None:
            raise ConfigurationError("loss_scale must be 'dynamic', a number or a dict; got None")
        make_precision(loss_scale)
        self.loss_scale = loss_scale
        self.distributed = bool(distributed)
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

    def _options(self) -> dict[str, Any]:
        buckets: dict[str, Any] = {}
        if not self.coalesce:
            buckets = {"coalesce": False}
        elif self.bucket_size_mb != -1:
            buckets = {"bucket_size_mb": self.bucket_size_mb}
        return {**super()._options(), "amp": self.loss_scale, **buckets}


class GradientCumulativeFp16OptimizerHook(Cumulative, Fp16OptimizerHook):
    """A Fp16OptimizerHook that updates every `cumulative_iters` batches; arguments as of Cumulative and it."""


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
