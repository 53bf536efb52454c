"""skorch nets over a kvstore.

    from skorch import NeuralNetClassifier
    from kvtrainer.integrations.skorch import KVStoreAccelerator, KVStoreMixin

    class Net(KVStoreMixin, NeuralNetClassifier):
        pass

    Net(Module, accelerator=KVStoreAccelerator("dist_sync"), ...).fit(x, y)

Needs the extra `kvtrainer[skorch]`.
"""

from __future__ import annotations

from typing import Any

from kvtrainer.integrations import guard_import

with guard_import("skorch"):
    from skorch.hf import AccelerateMixin

    from kvtrainer.integrations.accelerate import KVStoreAccelerator

__all__ = ["KVStoreAccelerator", "KVStoreMixin"]


class KVStoreMixin(AccelerateMixin):  # type: ignore[misc]
    """skorch's AccelerateMixin for workers of a kvstore: all workers validate and load the same model.

    Args:
        accelerator: A KVStoreAccelerator.
        *args, **kwargs: As for skorch.hf.AccelerateMixin and the net.
    """

    accelerator: KVStoreAccelerator

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Load as skorch does, on every worker, and publish the weights to the store."""
        super().load_params(*args, **kwargs)
        self.accelerator.publish()

    def run_single_epoch(self, iterator: Any, training: bool, *args: Any, **kwargs: Any) -> None:
        """Train or validate as skorch does. For validation, all workers get rank 0's buffers."""
        if iterator is not None and not training:
            self._share_buffers()
        super().run_single_epoch(iterator, training, *args, **kwargs)

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """End as skorch does, with rank 0's buffers on every worker."""
        self._share_buffers()
        return super().on_train_end(*args, **kwargs)

    def _share_buffers(self) -> None:
        for name in self._modules:
            self.accelerator.workers.share_buffers(getattr(self, f"{name}_"))
