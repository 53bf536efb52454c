"""The Trainer of Hugging Face's Transformers over a kvstore.

    from kvtrainer.integrations.transformers import KVStoreTrainer, join
    workers = join("dist_sync")  # before TrainingArguments, which ask who is there
    trainer = KVStoreTrainer(model, TrainingArguments(...), train_dataset=data, workers=workers)

Needs the extra `kvtrainer[transformers]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtrainer.errors import ConfigurationError
from kvtrainer.integrations import needing
from kvtrainer.integrations.workers import Workers

with needing("transformers"):
    from transformers import Trainer

    from kvtrainer.integrations.accelerate import KVStoreAccelerator, join

__all__ = ["KVStoreTrainer", "join"]


class KVStoreTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of Transformers over a kvstore: the workers are to it what the processes of a DDP job are.

    Each worker gets its part of every epoch, losses and metrics are those of all, the worker of rank 0 logs and writes
    checkpoints, and all load them. The optimizer becomes a kvtrainer.Trainer, whatever makes it.

    Args:
        workers: What `join` returned before the TrainingArguments were made.
        trainer_options: more options of the kvtrainer.Trainer, such as compression_params.
        *args, **kwargs: as of transformers.Trainer.

    Raises:
        ConfigurationError: the TrainingArguments know of another number of processes.
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
        """Make the Accelerator as Transformers does, and have it train over the store."""
        if self.args.world_size != self._workers.size:
            raise ConfigurationError(
                f"the TrainingArguments know of {self.args.world_size} processes, the kvstore of {self._workers.size} "
                "workers; call kvtrainer.integrations.transformers.join() before making them"
            )
        super().create_accelerator_and_postprocess()
        # Transformers offers no other place for a class of one's own; that one differs in methods alone.
        self.accelerator.__class__ = KVStoreAccelerator
        self.accelerator.follow(self._workers, self._trainer_options)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load weights to go on from as Transformers does; they become those of the store, too."""
        super()._load_from_checkpoint(*args, **kwargs)
        self.accelerator.publish()

    def _load_best_model(self) -> None:
        """Load the best weights as Transformers does; they become those of the store, too."""
        super()._load_best_model()
        self.accelerator.publish()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as Transformers does, the same model on all workers: buffers become rank 0's."""
        self._workers.share_buffers(self.model)
        return super().evaluation_loop(*args, **kwargs)
