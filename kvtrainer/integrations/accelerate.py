"""accelerate over a kvstore.

    from kvtrainer.integrations.accelerate import KVStoreAccelerator
    accelerator = KVStoreAccelerator("dist_sync")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

Needs the extra `kvtrainer[accelerate]`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations import guard_import
from kvtrainer.integrations.workers import Workers, scaler_for_workers
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.trainer.trainer import Trainer

with guard_import("accelerate"):
    from accelerate import Accelerator, PartialState
    from accelerate.optimizer import AcceleratedOptimizer

__all__ = ["KVStoreAccelerator", "join"]


def join(kvstore: str | KVStoreBase = "dist_sync") -> Workers:
    """Make accelerate use the workers of a store as its processes. Collective. Call it before anything of accelerate.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and, without CUDA, ACCELERATE_USE_CPU, which accelerate reads.

    Raises:
        ConfigurationError: accelerate was used before; or as for `Workers`.
    """
    workers = Workers(kvstore)
    if workers.size > 1:
        rank, size = str(workers.rank), str(workers.size)
        found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": str(workers.local_rank)}
        found["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", str(workers.local_size))
        if not torch.cuda.is_available():
            found["ACCELERATE_USE_CPU"] = "true"
        os.environ.update(found)
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.num_processes != workers.size:
        raise ConfigurationError(
            f"accelerate has {state.num_processes} processes, but the kvstore has {workers.size} workers; call "
            "kvtrainer.integrations.accelerate.join() before anything of accelerate or Transformers is made"
        )
    return workers


class AcceleratedTrainer(AcceleratedOptimizer):  # type: ignore[misc]
    """A Trainer prepared by accelerate. Whether a step was skipped is decided by all workers, not by the scaler."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the workers skipped the last step. Schedules do not advance then."""
        last = self.optimizer.last
        return last is not None and last.skipped


class KVStoreAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator over a kvstore. Except for gradients, the workers take the role of the processes of a DDP job.

    Torch optimizers become Trainers over the store when they are prepared; Trainers stay unchanged. Models get rank 0's
    weights, and no wrapper. Clipping and overflow checks apply to all workers together.

    Args:
        kvstore: A store, the name of one, or the result of `join`. Blocks until all workers are there.
        trainer_options: More options of the Trainers, such as compression_params.
        **options: As for accelerate's Accelerator.

    Raises:
        ConfigurationError: As for `join`.
    """

    scaler: Any

    def __init__(
        self,
        kvstore: str | KVStoreBase | Workers = "dist_sync",
        *,
        trainer_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        workers = kvstore if isinstance(kvstore, Workers) else join(kvstore)
        super().__init__(**options)
        self.follow(workers, trainer_options or {})

    def follow(self, workers: Workers, trainer_options: Mapping[str, Any]) -> None:
        """Use these workers. For an Accelerator that another library created."""
        self.workers = workers
        self._trainer_options = dict(trainer_options)
        self._norms: WeakKeyDictionary[Trainer, Tensor] = WeakKeyDictionary()
        if self.scaler is not None:
            self.scaler = scaler_for_workers(self.scaler)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as accelerate does, with rank 0's weights instead of a wrapper."""
        tensors = (*model.parameters(), *model.buffers())
        if device_placement is None and {self.device.type, *(one.device.type for one in tensors)} == {"cpu"}:
            # To accelerate the CPU is cpu:0, so its .to() would copy a model that a Trainer may hold already.
            device_placement = False
        # With evaluation_mode accelerate adds no wrapper.
        model = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode:
            self.workers.share(model)
        return model

    def prepare_optimizer(
        self, optimizer: optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer as accelerate does, after making it a Trainer."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer)
        trainer = self.workers.trainer_of(optimizer, self._model_of(optimizer), **self._trainer_options)
        # The Trainer keeps its state on the devices of the parameters.
        prepared = AcceleratedTrainer(trainer, device_placement=False, scaler=self.scaler)
        self._optimizers.append(prepared)
        return prepared

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradient norm over all workers in the next step. An infinite limit only measures.

        Returns:
            A tensor that is NaN until the optimizer's step sets it to the norm.

        Raises:
            ConfigurationError: These are not the parameters of one optimizer, or the limit differs from that of the
                first step.
        """
        trainer = self._trainer_of(parameters)
        limit = {"max_norm": min(float(max_norm), sys.float_info.max), "norm_type": float(norm_type)}
        self.workers.limit(trainer, limit)
        if trainer not in self._norms:
            trainer.register_step_post_hook(self._tell_norm)
        self._norms[trainer] = torch.tensor(float("nan"), device="cpu")
        return self._norms[trainer]

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradient over all workers in the next step. Errors as in `clip_grad_norm_`."""
        self.workers.limit(self._trainer_of(parameters), {"type": "value", "clip_value": clip_value})

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported; see `Trainer.join`."""
        raise ConfigurationError(
            "join_uneven_inputs() is for DistributedDataParallel; give all workers the same number of batches "
            "(even_batches=True), or use kvtrainer.Trainer and its join() in a loop of your own"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` saved, on every worker, and publish the weights to the store."""
        super().load_state(*args, **kwargs)
        self.publish()

    def publish(self) -> None:
        """Publish rank 0's weights to the store after something else wrote them. Collective."""
        for one in self._trainers():
            if one.has_begun:
                one.set_data()

    def _trainers(self) -> list[Trainer]:
        return [one.optimizer for one in self._optimizers]

    def _model_of(self, optimizer: optim.Optimizer) -> nn.Module:
        """Return the prepared model that an optimizer trains, or an empty one."""
        first = next(p for group in optimizer.param_groups for p in group["params"])
        own = (one for one in self._models if any(p is first for p in one.parameters()))
        return next(own, nn.Module())

    def _trainer_of(self, parameters: Iterable[Tensor] | Tensor) -> Trainer:
        """Return the Trainer whose parameters are all among these."""
        given = {id(p) for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        for one in self._trainers():
            own = {id(p) for group in one.param_groups for p in group["params"]}
            if own <= given:
                return one
        raise ConfigurationError(
            "the gradient of all workers is clipped for all parameters of an optimizer together; pass "
            "model.parameters()"
        )

    def _tell_norm(self, trainer: Any, args: Any, kwargs: Any) -> None:
        if trainer.last is not None and trainer.last.grad_norm is not None:
            self._norms[trainer].fill_(trainer.last.grad_norm)
