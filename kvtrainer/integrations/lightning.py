"""Lightning's Trainer over a kvstore.

    import lightning as L
    from kvtrainer.integrations.lightning import LightningStrategy
    L.Trainer(strategy=LightningStrategy("dist_sync"), ...).fit(module, data)

Needs the extra `kvtrainer[lightning]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from kvtrainer.integrations import guard_import
from kvtrainer.integrations.workers import Workers, scaler_for_workers
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.trainer.trainer import Trainer

with guard_import("lightning"):
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities import rank_zero_only

__all__ = ["KVStoreStrategy", "LightningStrategy"]


class LightningEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Lightning the rank of this worker. The workers were started by the job's own launcher."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Unused, because the workers are connected already."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Unused, as `main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """False: the environment is only used through LightningStrategy."""
        return False

    def world_size(self) -> int:
        return self._workers.size

    def set_world_size(self, size: int) -> None:
        """Ignored: the store determines it."""

    def global_rank(self) -> int:
        return self._workers.rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: the store determines it."""

    def local_rank(self) -> int:
        return self._workers.local_rank

    def node_rank(self) -> int:
        """Return 0, because ranks are counted over all hosts."""
        return 0


class LightningStrategy(DDPStrategy):  # type: ignore[misc]
    """A Lightning strategy over a kvstore. Except for gradients, the workers take the role of a DDP job's processes.

        trainer = L.Trainer(strategy=LightningStrategy("dist_sync"), max_epochs=3)
        trainer.fit(module, loader)

    Torch optimizers that `configure_optimizers` returns become Trainers over the store; Trainers stay unchanged. Each
    worker gets its part of every epoch, and values logged with `sync_dist=True` are averaged. Rank 0 logs and writes
    checkpoints, and all workers load them. `gradient_clip_val` clips the gradient of all workers together. In
    validation, tests and checkpoints, buffers such as those of BatchNorm are rank 0's.

    Args:
        kvstore: A store, or the name of one to create. Blocks until all workers are there.
        **options: More options of the Trainers, such as compression_params and update_on_kvstore.

    Raises:
        ConfigurationError: The store does not connect all processes of the job.
    """

    strategy_name = "kvstore"
    optimizers: list[Any]
    _optimizers: list[Any]

    def __init__(self, kvstore: str | KVStoreBase = "dist_sync", **options: Any) -> None:
        self.workers = Workers(kvstore)
        self._options = options
        # Trainers of the current fit that were made here, not by the module.
        self._made: list[Trainer] = []
        super().__init__(cluster_environment=LightningEnvironment(self.workers))
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Set the rank that Lightning's loggers and callbacks see."""
        rank_zero_only.rank = self.workers.rank

    @property
    def root_device(self) -> torch.device:
        """The device of this worker: if it sees several, the one with its rank on the host."""
        devices = self.parallel_devices
        assert devices
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.workers.size, "rank": self.workers.rank}

    def setup_distributed(self) -> None:
        """Do nothing: the workers were connected when the strategy was created."""

    def configure_ddp(self) -> None:
        """Copy rank 0's weights to all workers. There is no wrapper, because gradients go through the store."""
        assert self.model is not None
        self.workers.share(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers Trainers, and close those of an earlier fit."""
        for one in self._made:
            one.close()
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        given, module = self.optimizers, self.lightning_module
        self.optimizers = [self.workers.trainer_of(one, module, **self._options) for one in given]
        self._made = [one for one in self.optimizers if one not in given]

    def setup_precision_plugin(self) -> None:
        """Make clipping and overflow checks apply to all workers."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
            plugin.scaler = scaler_for_workers(plugin.scaler)
        plugin.clip_gradients = self._clip_gradients
        super().setup_precision_plugin()

    def _clip_gradients(
        self, optimizer: optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Make the store clip the gradient. Lightning's own function would see one worker's only."""
        trainer: Any = getattr(optimizer, "_optimizer", optimizer)
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        if clip_val and clip_val > 0:
            limit = {"type": "value", "clip_value": clip_val} if by_value else {"max_norm": clip_val}
            self.workers.limit(trainer, limit)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Fetch the state of an optimizer for a checkpoint, on the worker that writes it."""
        state: dict[str, Any] = super().optimizer_state(optimizer) if self.is_global_zero else {}
        return state

    def on_validation_start(self) -> None:
        """Validate the same model on all workers."""
        self._share_buffers()

    def on_train_end(self) -> None:
        """End with the same model on all workers."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        assert self.lightning_module is not None
        self.workers.share_buffers(self.lightning_module)

    def teardown(self) -> None:
        """End a run. Trainers are closed before the next fit, so that their state can still be saved."""
        # Lightning would fetch all optimizer states to move them, from servers whose failure may have ended the run.
        optimizers, self._optimizers = self._optimizers, []
        super().teardown()
        self._optimizers = optimizers


KVStoreStrategy = LightningStrategy
"""The former name of `LightningStrategy`."""
