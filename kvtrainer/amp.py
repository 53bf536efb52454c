"""Loss scaling for half-precision gradients, as in Gluon, for use with `torch.autocast`::

    kvtrainer.amp.init_trainer(trainer)
    ...
    with torch.autocast("cuda", torch.float16):
        loss = loss_fn(net(x), y)
    with kvtrainer.amp.scale_loss(loss, trainer) as scaled:
        scaled.backward()
    trainer.step(batch_size)

If a gradient overflows on any worker, all workers skip the step, wherever the optimizer runs: no weight, optimizer
state or update count changes, the gradients count as used, and the next step has half the scale.
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

from kvtrainer.common.tensors import separate_sparse_gradients
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, NonFiniteGradientError
from kvtrainer.options.loss_scaler import LossScaler, refuse_second_loss_scaler, scaler_of, unscale
from kvtrainer.trainer.trainer import Trainer
from kvtrainer.types import StepResult

__all__ = ["GradScaler", "LossScaler", "init_trainer", "scale_loss", "unscale"]

_Loss = TypeVar("_Loss", bound=Tensor | Sequence[Tensor])


@uncompiled
def init_trainer(trainer: Trainer, scaler: LossScaler | None = None) -> None:
    """Give a Trainer a loss scaler. Call it on every worker, with equal scalers.

    Args:
        trainer: Keeps the scaler it already has (from saved states, for example) unless another is given.
        scaler: A new LossScaler by default, whose scale starts at 2^16.

    Raises:
        ArgumentTypeError: `trainer` is not a Trainer.
    """
    if not isinstance(trainer, Trainer):
        got = f"{type(trainer).__name__}: {trainer!r:.80}"
        raise ArgumentTypeError(f"loss scaling works with a kvtrainer.Trainer only, got {got}")
    if scaler is not None or trainer.loss_scaler is None:
        trainer.loss_scaler = LossScaler() if scaler is None else scaler


@uncompiled
@contextmanager
def scale_loss(loss: _Loss, trainer: Trainer) -> Iterator[Any]:
    """Yield the loss times the Trainer's loss scale, to call `backward` on; for several losses, a list.

    The next `step` or `update` divides the gradients by the scale. A half-precision loss may itself overflow: compute
    it in float32, as torch.autocast does.

    Raises:
        AmpNotInitializedError: The Trainer has no loss scaler.
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
    """torch.amp.GradScaler for a Trainer: a gradient that overflows on any worker skips the step on all of them.

    Each worker's finding travels with its contribution, so this costs no further message, and `update` uses the common
    decision: scales stay equal on all workers. With a torch optimizer this is torch's own GradScaler. Several Trainers,
    for example those of a GAN, may share one::

        scaler.scale(loss).backward()
        scaler.unscale_(trainer)  # if the loop wants to see unscaled gradients
        result = scaler.step(trainer)  # a StepResult; other arguments go to trainer.step
        scaler.update()

    In asynchronous modes each worker has a scale of its own. A worker that waits at the end of a `trainer.join()` block
    does not see the outcome of the other workers' steps. Its scale may differ afterwards, which changes no gradient
    (with the option amp="dynamic" the scale follows there too). float16 gradients cannot be unscaled in place; use the
    Trainer's option amp="dynamic" for them, which unscales in float32.

    Args:
        device: "cuda" or "cpu"; by default "cuda" if available.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As in torch.amp.GradScaler.
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
        """Divide the gradients of the coming step by the scale, in place; at most once before `step`.

        Raises:
            ConfigurationError: The Trainer's gradients are float16, or it scales losses itself.
            RuntimeError: It was already called since the last `update`.
        """
        if self._enabled and _is_trainer(optimizer):
            refuse_second_loss_scaler(optimizer)
            half = {name for name, p in optimizer._named_fresh() if p.grad.dtype == torch.float16}  # type: ignore[attr-defined]
            if half:  # it would lose what the loss scale has saved
                raise ConfigurationError(
                    f"gradients in float16 cannot be unscaled where they are without loss: {', '.join(sorted(half))}; "
                    "build the Trainer with amp='dynamic'"
                )
            separate_sparse_gradients(p for _, p in optimizer._named_fresh())  # type: ignore[attr-defined]
            if self._scale is None and not _fresh_parameters_to_unscale(optimizer):
                # A worker that has had no data takes part in the vote all the same.
                self._lazy_init_scale_growth_tracker(torch.device(self._device))
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, unless that was done, and step the Trainer. If any worker overflows, all workers skip the step.

        Returns:
            The Trainer's StepResult. For a torch optimizer, what its `step` returns, or None if it was skipped.

        Raises:
            ConfigurationError: As in `unscale_`.
            RuntimeError: A closure was given, or `step` was already called since the last `update`.
            Any error of the Trainer's `step`.
        """
        if not self._enabled or not _is_trainer(optimizer):
            return super().step(optimizer, *args, **kwargs)
        # 1. Refuse what torch's GradScaler refuses.
        if kwargs.get("closure") is not None or (args and callable(args[0])):
            raise RuntimeError("a GradScaler cannot step with a closure: its gradients would not be unscaled")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        # 2. Find overflows here, and step together with the other workers.
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        overflows = any(found.item() for found in state["found_inf_per_device"].values())
        vote = cast(Callable[..., StepResult], optimizer._step_voting)  # type: ignore[attr-defined]
        try:
            result = vote(overflows, self.get_scale(), *args, **kwargs)
        except NonFiniteGradientError:
            self._note(state, True)  # all workers raise it
            raise
        # 3. From here on `update` sees the common decision.
        self._note(state, result.skipped)
        return result

    def _note(self, state: dict[str, Any], is_skipped: bool) -> None:
        """Replace this worker's finding by the common decision, which `update` reads."""
        assert self._scale is not None
        decision = torch.full_like(self._scale, float(is_skipped))
        state["found_inf_per_device"] = {self._scale.device: decision}
        state["stage"] = OptState.STEPPED

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. An empty one, which a disabled scaler saves, changes nothing."""
        if state_dict:
            super().load_state_dict(state_dict)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if _is_trainer(optimizer):
            # Used gradients stay in `.grad`: an infinity in an old one must not count again.
            given = SimpleNamespace(param_groups=[{"params": _fresh_parameters_to_unscale(optimizer)}])
            optimizer = cast(torch.optim.Optimizer, given)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _is_trainer(optimizer: object) -> bool:
    return hasattr(optimizer, "_step_voting")


def _fresh_parameters_to_unscale(trainer: Any) -> list[Tensor]:
    return [parameter for _, parameter in trainer._named_fresh()]
