"""Gluon's loss scaling, for half-precision gradients, as of `torch.autocast`::

    kvtrainer.amp.init_trainer(trainer)
    ...
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(net(x), y)
    with kvtrainer.amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    trainer.step(batch_size)

A step in which a gradient overflows on any worker is skipped by all of them, wherever the optimizer runs: no weight, no
optimizer state and no update count changes, the gradients are used up, and the scale is halved for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.amp
import torch.optim
from torch import Tensor
from torch.amp.grad_scaler import OptState

from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, NonFiniteGradientError
from kvtrainer.options.loss_scaler import LossScaler, refuse_second_scaler, scaler_of, unscale
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.types import StepResult

__all__ = ["GradScaler", "LossScaler", "init_trainer", "scale_loss", "unscale"]

_Loss = TypeVar("_Loss", bound=Tensor | Sequence[Tensor])


@uncompiled
def init_trainer(trainer: Trainer, scaler: LossScaler | None = None) -> None:
    """Give a Trainer a loss scaler; call it on every worker, with equal scalers.

    Args:
        trainer: one that has a scaler, from saved states say, keeps it unless another is given.
        scaler: by default a new LossScaler, which begins at 2^16.

    Raises:
        ArgumentTypeError: `trainer` is no Trainer.
    """
    if not isinstance(trainer, Trainer):
        got = f"{type(trainer).__name__}: {trainer!r:.80}"
        raise ArgumentTypeError(f"loss scaling works with a kvtrainer.Trainer only, got {got}")
    if scaler is not None or trainer.loss_scaler is None:
        trainer.loss_scaler = LossScaler() if scaler is None else scaler


@uncompiled
@contextmanager
def scale_loss(loss: _Loss, trainer: Trainer) -> Iterator[Any]:
    """Yield the loss times the Trainer's loss scale, to call `backward` on. Of several losses it yields a list.

    The next `step` or `update` divides the gradients by the scale. A loss of half precision may overflow itself; keep
    it in float32, as torch.autocast does.

    Raises:
        AmpNotInitializedError: the Trainer has no loss scaler.
        ConfigurationError: `unscale` was called since the last step.
    """
    scaler = scaler_of(trainer)
    scaler.mark_scaled()
    if isinstance(loss, Tensor):
        yield loss * scaler.loss_scale
    else:
        yield [one * scaler.loss_scale for one in loss]


@uncompiled
class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, for a Trainer: a gradient that overflows on any worker skips the step of all.

    What a worker has found travels with its contribution, so there is no further message, and `update` sees the
    decision instead of this worker's part of it: scales stay equal on all workers. With one of torch's optimizers it
    is torch's GradScaler. Several Trainers, as of a GAN, may share one::

        scaler.scale(loss).backward()
        scaler.unscale_(trainer)  # if the loop wants to see unscaled gradients
        result = scaler.step(trainer)  # a StepResult; other arguments go to trainer.step
        scaler.update()

    With contributions that count one by one, in async mode, each worker has a scale of its own. A worker that waits at
    the end of a `trainer.join()` block does not see what becomes of the others' steps: its scale may be another one
    afterwards, which changes no gradient (the Trainer's option amp="dynamic" follows there too). Gradients in float16
    cannot be unscaled where they are; build the Trainer with amp="dynamic" for them, which does it in float32.

    Args:
        device: "cuda" or "cpu"; by default "cuda" where there is one.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as of torch.amp.GradScaler.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
        super().__init__(chosen, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the coming step by the scale, where they are; at most once before `step`.

        Raises:
            ConfigurationError: a Trainer's gradients are float16, or it scales losses itself.
            RuntimeError: it was called already since the last `update`.
        """
        if self._enabled and _is_trainer(optimizer):
            refuse_second_scaler(optimizer)
            half = {name for name, p in optimizer._named_fresh() if p.grad.dtype == torch.float16}  # type: ignore[attr-defined]
            if half:  # it would lose what the loss scale has saved
                raise ConfigurationError(
                    f"gradients in float16 cannot be unscaled where they are without loss: {', '.join(sorted(half))}; "
                    "build the Trainer with amp='dynamic'"
                )
            if self._scale is None and not _fresh(optimizer):
                # A worker that has had no data takes part in the vote all the same.
                self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale unless that was done, and let the Trainer step. If one worker overflows, all skip the step.

        Returns:
            The Trainer's StepResult; with another optimizer what its `step` returns, None where it was skipped.

        Raises:
            ConfigurationError: as of `unscale_`.
            RuntimeError: there is a closure, or it was called already since the last `update`.
            Any error of the Trainer's `step`.
        """
        if not self._enabled or not _is_trainer(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if kwargs.get("closure") is not None or (args and callable(args[0])):
            raise RuntimeError("a GradScaler cannot step with a closure: its gradients would not be unscaled")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        overflows = any(found.item() for found in state["found_inf_per_device"].values())
        vote = cast(Callable[..., StepResult], optimizer._step_voting)  # type: ignore[attr-defined]
        try:
            result = vote(overflows, self.get_scale(), *args, **kwargs)
        except NonFiniteGradientError:
            self._note(state, True)  # on all workers
            raise
        self._note(state, result.skipped)
        return result

    def _note(self, state: dict[str, Any], is_skipped: bool) -> None:
        """Let `update` see what all workers have decided, in place of what was found here."""
        assert self._scale is not None
        decision = torch.full_like(self._scale, float(is_skipped))
        state["found_inf_per_device"] = {self._scale.device: decision}
        state["stage"] = OptState.STEPPED

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state. An empty one, which a disabled scaler saves, changes nothing."""
        if state_dict:
            super().load_state_dict(state_dict)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if _is_trainer(optimizer):
            # Gradients that were used up stay readable: an old infinity among them must not count again.
            given = SimpleNamespace(param_groups=[{"params": _fresh(optimizer)}])
            optimizer = cast(torch.optim.Optimizer, given)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _is_trainer(optimizer: object) -> bool:
    return hasattr(optimizer, "_step_voting")


def _fresh(trainer: Any) -> list[Tensor]:
    """Return the parameters of all devices whose gradients the coming step would use."""
    return [parameter for _, parameter in trainer._named_fresh()]
