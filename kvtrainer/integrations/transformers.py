"""The Trainer of Hugging Face Transformers over a kvstore.

    from kvtrainer.integrations.transformers import KVStoreTrainer, join
    workers = join("dist_sync")  # before TrainingArguments, which ask for the processes
    trainer = KVStoreTrainer(model, TrainingArguments(...), train_dataset=data, workers=workers)

Needs the extra `kvtrainer[transformers]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations import guard_import
from kvtrainer.integrations.workers import Workers

with guard_import("transformers"):
    from transformers import Trainer

    from kvtrainer.integrations.accelerate import KVStoreAccelerator, join

__all__ = ["KVStoreTrainer", "join"]


class KVStoreTrainer(Trainer):  # type: ignore[misc]
    """Transformers' Trainer over a kvstore, whose workers take the role of the processes of a DDP job.

    Each worker gets its part of every epoch. Losses and metrics cover all workers. Rank 0 logs and writes checkpoints,
    and all workers load them. The optimizer becomes a kvtrainer.Trainer, however it is created.

    Args:
        workers: The result of `join`, called before the TrainingArguments were made.
        trainer_options: More options of the kvtrainer.Trainer, such as compression_params.
        *args, **kwargs: As for transformers.Trainer.

    Raises:
        ConfigurationError: The TrainingArguments have another number of processes.
    """

    def __init__(
        self,
        *args: Any,
        workers: Workers,
        trainer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._workers, self._trainer_options = workers, trainer_options or {}
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator as Transformers does, and make it train over the store."""
        if self.args.world_size != self._workers.size:
            raise ConfigurationError(
                f"the TrainingArguments have {self.args.world_size} processes, but the kvstore has "
                f"{self._workers.size} workers; call kvtrainer.integrations.transformers.join() before making them"
            )
        super().create_accelerator_and_postprocess()
        # Transformers has no option for the class. Changing it is safe, because ours adds only methods.
        self.accelerator.__class__ = KVStoreAccelerator
        self.accelerator.follow(self._workers, self._trainer_options)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint as Transformers does, and publish the weights to the store."""
        super()._load_from_checkpoint(*args, **kwargs)
        self.accelerator.publish()

    def _load_best_model(self) -> None:
        """Load the best weights as Transformers does, and publish them to the store."""
        super()._load_best_model()
        self.accelerator.publish()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as Transformers does, with rank 0's buffers on all workers."""
        self._workers.share_buffers(self.model)
        return super().evaluation_loop(*args, **kwargs)
