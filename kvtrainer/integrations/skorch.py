"""skorch's nets over a kvstore.

    from skorch import NeuralNetClassifier
    from kvtrainer.integrations.skorch import KVStoreAccelerator, KVStoreMixin

    class Net(KVStoreMixin, NeuralNetClassifier):
        pass

    Net(Module, accelerator=KVStoreAccelerator("dist_sync"), ...).fit(x, y)

Needs the extra `kvtrainer[skorch]`.
"""

from __future__ import annotations

from typing import Any

from kvtrainer.integrations import needing

with needing("skorch"):
    from skorch.hf import AccelerateMixin

    from kvtrainer.integrations.accelerate import KVStoreAccelerator

__all__ = ["KVStoreAccelerator", "KVStoreMixin"]


class KVStoreMixin(AccelerateMixin):  # type: ignore[misc]
    """skorch's AccelerateMixin for workers of a kvstore: validation, and what is loaded, are the same on all of them.

    Args:
        accelerator: A KVStoreAccelerator.
        *args, **kwargs: as of skorch.hf.AccelerateMixin and the net beside it.
    """

    accelerator: KVStoreAccelerator

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Load as skorch does, on every worker; the weights become those of the store, too."""
        super().load_params(*args, **kwargs)
        self.accelerator.publish()

    def run_single_epoch(self, iterator: Any, training: bool, *args: Any, **kwargs: Any) -> None:
        """Train or validate as skorch does, with rank 0's buffers where all validate."""
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
