"""What compression holds back of replicas, between its keeper's form and the one by device and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvtrainer.kvstore.replica_compression import ReplicaCompressor
from kvtrainer.memory.layout import Layout


def residuals_by_device(compressor: ReplicaCompressor, layout: Layout) -> list[dict[int, Tensor]]:
    """For every device the residuals by index of the key, in its shape; copies."""
    held = compressor.residuals()
    found: list[dict[int, Tensor]] = [{} for _ in range(1 + len(layout.copies))]
    for key, spec in enumerate(layout.plan.specs):
        for at, residual in enumerate(held.get(spec.key, ())):
            if residual is not None:
                found[at][key] = residual.view(spec.shape)
    return found


def put_residuals(
    compressor: ReplicaCompressor, by_device: Sequence[Mapping[int, Tensor]], layout: Layout
) -> None:
    """Replace all residuals by these, in the form of `residuals_by_device`."""
    compressor.set_residuals(
        {
            spec.key: [values.get(key) for values in by_device]
            for key, spec in enumerate(layout.plan.specs)
            if any(key in values for values in by_device)
        }
    )
