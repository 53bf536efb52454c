"""mmengine's optimizer wrapper around a Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import Tensor, nn

from kvtrainer.config import wrapper_arguments
from kvtrainer.errors import ArgumentTypeError, ConfigurationError
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.trainer import Trainer

_BASE, _SCALER = "base_param_settings", "loss_scaler"
_AMP = ("loss_scale", "dtype")
_LISTS = ("params", "param_names")


@OPTIM_WRAPPERS.register_module()
class TrainerOptimWrapper(OptimWrapper):  # type: ignore[misc]
    """Lets mmengine's loops, hooks and schedulers drive a Trainer, wherever its optimizer runs.

    Accumulation, clipping and loss scaling are the Trainer's, over the gradients of all workers; on a CPU too.
    `scale_loss` leaves a loss as it is, because `backward` divides it.

    Args:
        optimizer: A Trainer, which has all options already; or the torch optimizer that it is to be made of, whose
            parameters of equal options are then put into one group.
        accumulative_counts, clip_grad: as of mmengine's OptimWrapper.
        loss_scale, dtype: as of its AmpOptimWrapper; without either, there is no mixed precision.
        model: Where the names of parameters come from.
        kvstore: of the Trainer.
        **options: more options of the Trainer, such as compression_params, update_on_kvstore and on_nonfinite.

    Raises:
        ConfigurationError: an option is wrong, or would not reach a Trainer that is there.
    """

    def __init__(
        self,
        optimizer: Trainer | torch.optim.Optimizer,
        accumulative_counts: int = 1,
        clip_grad: Mapping[str, Any] | None = None,
        *,
        loss_scale: Any = None,
        dtype: Any = None,
        model: nn.Module | None = None,
        kvstore: str | KVStoreBase | None = "device",
        **options: Any,
    ) -> None:
        given = {"accumulative_counts": accumulative_counts, "clip_grad": clip_grad}
        given |= {n: v for n, v in zip(_AMP, (loss_scale, dtype), strict=True) if v is not None}
        if isinstance(optimizer, Trainer):
            said = [name for name, value in {**given, **options}.items() if value not in (None, 1)]
            if said:
                raise ConfigurationError(
                    f"{', '.join(said)} would have no effect on a Trainer that is there; give it these options itself"
                )
            trainer = optimizer
        elif isinstance(optimizer, torch.optim.Optimizer):
            trainer = _trainer_of(optimizer, model, given, {"kvstore": kvstore, **options})
        else:
            raise ArgumentTypeError(
                f"optimizer must be a Trainer or a torch optimizer, got {type(optimizer).__name__}"
            )
        super().__init__(trainer, accumulative_counts=trainer.accumulation.counts)
        self.optimizer: Trainer

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run a backward pass; the loss is divided and scaled as the options say. Takes no other arguments."""
        if kwargs:
            raise ConfigurationError(
                f"backward() of a Trainer does not take {', '.join(map(repr, kwargs))}; call loss.backward() yourself, "
                "without accumulation and mixed precision"
            )
        self.optimizer.backward(loss)
        self._inner_count = self.optimizer.accumulation.done

    def step(self, **kwargs: Any) -> None:
        """Reduce the gradients and update; the norm before clipping is logged as train/grad_norm."""
        self.optimizer.step(**kwargs)
        last = self.optimizer.last
        if last is not None and last.grad_norm is not None:
            self.message_hub.update_scalar("train/grad_norm", float(last.grad_norm))

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Open the context for the forward pass. Nothing travels before `step`, so there is nothing to hold back."""
        with self.optimizer.context():
            yield

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Say how many backward passes were made before, and how many there will be in all."""
        self.optimizer.set_progress(init_counts, max_counts)
        super().initialize_count_status(model, init_counts, max_counts)

    def should_update(self) -> bool:
        """Tell if the next `step` ends in an update."""
        return self.optimizer.accumulation.is_boundary

    def should_sync(self) -> bool:
        """Tell if the backward pass that comes next is the last one before an update."""
        count, total = self.optimizer.accumulation.done + 1, self.optimizer.accumulation.total
        return count % self.optimizer.accumulation.counts == 0 or count == total

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss as it is: `backward` divides it."""
        return loss

    @property
    def inner_count(self) -> int:
        """How many backward passes were made."""
        return self.optimizer.accumulation.done

    def state_dict(self) -> dict[str, Any]:
        """Options and optimizer state, wherever it is kept, with the loss scale; blocks while state is fetched.

        Any one worker may call it between its steps. Parameters that were never updated have no state, as in torch.
        """
        state: dict[str, Any] = super().state_dict()
        state["state"] = {at: one for at, one in state["state"].items() if float(one.get("step", 1)) > 0}
        if self.optimizer.loss_scaler is not None:
            state[_SCALER] = self.optimizer.loss_scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or that of mmengine's wrapper of an optimizer of the same kind and groups.

        Call it on every worker.
        """
        given, notes = dict(state_dict), self.notes()
        scale = given.pop(_SCALER, None)
        if scale and self.optimizer.loss_scaler is not None:
            self.optimizer.loss_scaler.load_state_dict(scale)
        super().load_state_dict(given)
        self._keep_marks(notes["groups"])

    def notes(self) -> dict[str, Any]:
        """Return what schedulers keep beside a Trainer's options: base settings, and marks in the groups."""
        groups = [{n: v for n, v in g.items() if n not in _LISTS} for g in self.optimizer.param_groups]
        base = None if self.base_param_settings is None else dict(self.base_param_settings)
        return {"groups": groups, _BASE: base}

    def take_notes(self, notes: Mapping[str, Any]) -> None:
        """Take over what `notes` gave, once the Trainer has its options."""
        if self.base_param_settings is not None and notes.get(_BASE) is not None:
            self.base_param_settings.update(_as_before(notes[_BASE], self.base_param_settings))
        self._keep_marks(notes.get("groups", ()))

    def follow_defaults(self) -> None:
        """Let the base settings begin anew with the Trainer's present defaults, as after scaling its learning rate."""
        if self.base_param_settings is not None:
            self.base_param_settings.update(self.optimizer.defaults)

    def _keep_marks(self, groups: Any) -> None:
        """Entries of the groups that the Trainer does not know, and so does not keep."""
        for group, marks in zip(self.optimizer.param_groups, groups, strict=False):
            for name, value in marks.items():
                group.setdefault(name, value)


def _trainer_of(
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    given: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Trainer:
    merge_groups(optimizer)
    its = [p for group in optimizer.param_groups for p in group["params"]]
    named: Any = model if model is not None else [(f"parameter{at}", p) for at, p in enumerate(its)]
    kind = "AmpOptimWrapper" if any(name in given for name in _AMP) else "OptimWrapper"
    return Trainer(**{**wrapper_arguments(named, {**given, "type": kind, "optimizer": optimizer}), **options})


def merge_groups(optimizer: torch.optim.Optimizer) -> None:
    """Put parameters of equal options into one group each, in the order of their first ones, in place.

    mmengine makes a group of every parameter, and the update of many small groups takes several times as long. An
    optimizer that has state already stays as it is.
    """
    if optimizer.state or any("param_names" in group for group in optimizer.param_groups):
        return
    merged: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        twin = next(
            (one for one in merged if {n: v for n, v in one.items() if n != "params"} == options), None
        )
        if twin is None:
            merged.append(group)
        else:
            twin["params"] = [*twin["params"], *group["params"]]
    optimizer.param_groups[:] = merged


def _as_before(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Saved settings, with tuples where there are tuples now."""
    return {n: tuple(v) if isinstance(present.get(n), tuple) else v for n, v in saved.items()}
