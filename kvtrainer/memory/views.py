"""Warns if something still sees the memory where parameters were before they moved into an arena."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from kvtrainer.errors import SharedWeightsWarning, level_of_user


class FormerMemoryViews:
    """The memory of parameters that are about to move. Whatever still sees it would silently show old values."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        storages = list(map(torch.Tensor.untyped_storage, parameters))
        is_on_host = bool(parameters) and parameters[0].device.type == "cpu"  # all are on one device
        self._shared = [at for at, one in enumerate(storages) if is_on_host and one.is_shared()]
        self._references = list(map(StorageWeakRef, storages))
        self._nbytes = [p.nbytes for p in parameters]

    def warn_of_views(self, names: Sequence[str]) -> None:
        """Warn if something still sees the memory. Call it after the parameters, with these names, have moved."""
        viewed = self._still_in_use()
        if viewed:
            gc.collect()  # drops references that are only left in cycles
            viewed = self._still_in_use()
        found = sorted({*self._shared, *viewed})
        if not found:
            return
        what = (
            "a NumPy array, a state_dict(), another tensor that shares it, or a loss that still has its graph"
        )
        if self._shared:
            what = "another process, after share_memory() or by torch.multiprocessing"
        warnings.warn(
            f"the Trainer has moved the data of its parameters to memory of its own, but something else still sees "
            f"where those of {len(found)} of {len(names)} were, with old values: parameters "
            f"{', '.join([repr(names[at]) for at in found])}. It is {what}. Make views when the Trainer is built, "
            "and again after its groups were changed; give other processes copies such as p.detach().clone()",
            SharedWeightsWarning,
            stacklevel=level_of_user(),
        )

    def _still_in_use(self) -> list[int]:
        """Return the parameters whose memory is still in use. Memory larger than a parameter may belong to others."""
        rows = enumerate(zip(self._references, self._nbytes, strict=True))
        return [at for at, (memory, nbytes) in rows if nbytes and nbytes == _nbytes_of_viewed_memory(memory)]


def has_shared_views(parameter: Parameter) -> bool:
    # CUDA memory always reports that it is shared.
    return parameter.device.type == "cpu" and bool(parameter.untyped_storage().is_shared())


def _nbytes_of_viewed_memory(memory: StorageWeakRef) -> int:
    if memory.expired():  # type: ignore[no-untyped-call]
        return 0
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
    return 0 if storage is None else int(storage.nbytes())
