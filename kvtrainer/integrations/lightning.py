"""Lightning's Trainer over a kvstore.

    import lightning as L
    from kvtrainer.integrations.lightning import KVStoreStrategy
    L.Trainer(strategy=KVStoreStrategy("dist_sync"), ...).fit(module, data)

Needs the extra `kvtrainer[lightning]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import optim

from kvtrainer.integrations import needing
from kvtrainer.integrations.workers import Workers, scaler_like
from kvtrainer.kvstore.base import KVStoreBase
from kvtrainer.trainer.trainer import Trainer

with needing("lightning"):
    from lightning.fabric.plugins import ClusterEnvironment
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities import rank_zero_only

__all__ = ["KVStoreStrategy"]


class WorkersEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Lightning which worker this process is; whoever launched the job has started all of them."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def creates_processes_externally(self) -> bool:
        """Say that Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Not asked, because the workers have met; required by Lightning."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not asked, as `main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Say that this environment is never guessed, only given by a KVStoreStrategy."""
        return False

    def world_size(self) -> int:
        """Return the number of workers."""
        return self._workers.size

    def set_world_size(self, size: int) -> None:
        """Leave it as it is: the store knows."""

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return self._workers.rank

    def set_global_rank(self, rank: int) -> None:
        """Leave it as it is: the store knows."""

    def local_rank(self) -> int:
        """Return which worker of its host this one is."""
        return self._workers.local_rank

    def node_rank(self) -> int:
        """Return 0: workers are counted over all hosts."""
        return 0


class KVStoreStrategy(DDPStrategy):  # type: ignore[misc]
    """Lets Lightning train over a kvstore: to all that is not gradients the workers are the processes of a DDP job.

        trainer = L.Trainer(strategy=KVStoreStrategy("dist_sync"), max_epochs=3)
        trainer.fit(module, loader)

    Torch optimizers that `configure_optimizers` returns become Trainers over the store; Trainers stay as they are.
    Each worker gets its part of every epoch, values logged with `sync_dist=True` are averaged, the worker of rank 0
    logs and writes checkpoints, and all load them. `gradient_clip_val` limits the gradient of all workers together.
    Buffers, as of BatchNorm, are rank 0's in validation, tests and checkpoints.

    Args:
        kvstore: The store, or the name of one, which is made here; blocks until all workers are there.
        **options: more options of the Trainers, such as compression_params and update_on_kvstore.

    Raises:
        ConfigurationError: the store does not connect all processes of the job.
    """

    strategy_name = "kvstore"
    optimizers: list[Any]
    _optimizers: list[Any]

    def __init__(self, kvstore: str | KVStoreBase = "dist_sync", **options: Any) -> None:
        self.workers = Workers(kvstore)
        self._options = options
        # Trainers of the present fit that the module did not bring itself.
        self._made: list[Trainer] = []
        super().__init__(cluster_environment=WorkersEnvironment(self.workers))
        self.set_world_ranks()

    def set_world_ranks(self) -> None:
        """Tell Lightning's loggers and callbacks the rank of this worker."""
        rank_zero_only.rank = self.workers.rank

    @property
    def root_device(self) -> torch.device:
        """The device of this worker: of several that it sees, the one of its number on its host."""
        devices = self.parallel_devices
        assert devices
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a DistributedSampler wants to know."""
        return {"num_replicas": self.workers.size, "rank": self.workers.rank}

    def setup_distributed(self) -> None:
        """Do nothing: the workers have met when the strategy was made."""

    def configure_ddp(self) -> None:
        """Give all workers rank 0's weights, without a wrapper: gradients go through the store."""
        assert self.model is not None
        self.workers.share(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make Trainers of the module's optimizers. Those of an earlier fit are closed."""
        for one in self._made:
            one.close()
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        given, module = self.optimizers, self.lightning_module
        self.optimizers = [self.workers.trainer_of(one, module, **self._options) for one in given]
        self._made = [one for one in self.optimizers if one not in given]

    def setup_precision_plugin(self) -> None:
        """Leave limits of gradients, and overflows, to all workers together."""
        plugin = self.precision_plugin
        if isinstance(plugin, MixedPrecision) and type(plugin.scaler) is torch.amp.GradScaler:
            plugin.scaler = scaler_like(plugin.scaler)
        plugin.clip_gradients = self._clip_gradients
        super().setup_precision_plugin()

    def _clip_gradients(
        self, optimizer: optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Have the store limit the gradient; in the place of Lightning's function, which sees one worker's alone."""
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
        """Let all workers validate the same model."""
        self._share_buffers()

    def on_train_end(self) -> None:
        """Let all workers end with the same model."""
        self._share_buffers()

    def _share_buffers(self) -> None:
        assert self.lightning_module is not None
        self.workers.share_buffers(self.lightning_module)

    def teardown(self) -> None:
        """End a run. Trainers stay, so that their state can be saved; they are closed before the next fit."""
        # Lightning would fetch the state of all optimizers to move it, from servers that may be why the run ends.
        optimizers, self._optimizers = self._optimizers, []
        super().teardown()
        self._optimizers = optimizers
