"""Sums of what replicas or ranks give for one key: dense values, rows, or compressed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kvstore_server.codec import Codec, compute_dtype, torch_dtype
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import TensorSpec, row_numel
from kvstore_server.protocol.rows import RowSet
from kvtrainer.client.tables import Residuals
from kvtrainer.common.tensors import is_sparse_tensor, tensor_dtype_name
from kvtrainer.parallel.replicas import AUTO, is_left_fold, make_replica_reducer


def merge_replicas(replicas: Sequence[Tensor], reducer: str = AUTO) -> Tensor:
    """Sum dense replicas with a reducer, or from left to right on the CPU; flat, on the CPU.

    Half precision accumulates in float32. A single replica is not copied if it is flat on the CPU already.
    """
    first = replicas[0].detach()
    if len(replicas) == 1:
        return first.to("cpu").contiguous().view(-1)
    if not is_left_fold(reducer):
        parts = [one.detach().clone(memory_format=torch.contiguous_format).view(-1) for one in replicas]
        make_replica_reducer(reducer, [part.device for part in parts]).sum(parts)
        return parts[0].to("cpu")
    compute = compute_dtype(tensor_dtype_name(first.dtype))
    total = first.to("cpu", compute, copy=True, memory_format=torch.contiguous_format)
    for other in replicas[1:]:
        total += other.detach().to("cpu", compute)
    return total.to(first.dtype).view(-1)


def merge_replica_rows(spec: TensorSpec, replicas: Sequence[Tensor]) -> RowSet:
    """Sum sparse replicas from left to right on the CPU; half precision accumulates in float32.

    Raises:
        ShapeMismatchError: a replica has a row that the key does not have.
    """
    parts = [_coalesce_replica(spec, one) for one in replicas]
    if len(parts) == 1:
        return RowSet(parts[0].ids, parts[0].values.to(torch_dtype(spec.dtype)))
    ids, values = torch.cat([part.ids for part in parts]), torch.cat([part.values for part in parts])
    ids, values = coalesce_rows(ids, values, spec.shape[0])
    return RowSet(ids, values.to(torch_dtype(spec.dtype)))


def densify_replica(spec: TensorSpec, value: Tensor) -> Tensor:
    return sum_dense_replicas(spec, [value]) if is_sparse_tensor(value) else value


def sum_dense_replicas(spec: TensorSpec, replicas: Sequence[Tensor]) -> Tensor:
    ids, values = merge_replica_rows(spec, replicas)
    dense = values.new_zeros(spec.shape[0], row_numel(spec))
    dense[ids] = values
    return dense.view(spec.shape)


@torch.no_grad()
def sum_replica_rows(parts: Sequence[RowSet], dtype: str) -> RowSet:
    """Sum the rows that several gave of one key: a left fold in their order, in the dtype that `dtype` is summed in.

    The bits are the same on every device, because the ids of one part are distinct.
    """
    values = [part.values.to(compute_dtype(dtype)) for part in parts]
    if len(parts) == 1:
        return RowSet(parts[0].ids, values[0])
    ids = torch.unique(torch.cat([part.ids for part in parts]))
    total = values[0].new_zeros(len(ids), values[0].shape[1])
    for part, value in zip(parts, values, strict=True):
        total.index_add_(0, torch.searchsorted(ids, part.ids), value)
    return RowSet(ids, total)


class ReplicaCompressor:
    """Compresses replicas before they are summed, with a residual for every key and replica."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._residuals = Residuals[tuple[str, int]](codec)
        """By key and position."""

    def merge(self, key: str, replicas: Sequence[Tensor | None]) -> Tensor:
        """Sum the compressed replicas from left to right on the CPU; flat.

        Half precision accumulates in float32. Residuals stay as they are until `accept`. A replica that is None is
        left out, as is its residual; at least one is not.

        Raises:
            NonFiniteGradientError: a replica is infinite or not a number; nothing has changed.
        """
        there = [((key, at), replica) for at, replica in enumerate(replicas) if replica is not None]
        first, following = there[0][1], dict[tuple[str, int], Tensor]()
        numel, dtype = first.numel(), tensor_dtype_name(first.dtype)
        total = torch.empty(numel, dtype=compute_dtype(dtype), device="cpu")
        said = torch.empty(self._codec.encoded_nbytes(numel, dtype), dtype=torch.uint8, device="cpu")
        for number, (place, replica) in enumerate(there):
            residual, after = self._residuals.pair(place, numel, dtype)
            self._codec.encode(replica.detach().to("cpu").reshape(-1), residual, said, after)
            if after is not None:
                following[place] = after
            (self._codec.decode_add if number else self._codec.decode)(said, dtype, total)
        self._residuals.following |= following
        return total.to(first.dtype)

    def accept(self, keys: Iterable[str] | None = None) -> None:
        applied = None if keys is None else set(keys)
        for place in list(self._residuals.following):
            if applied is None or place[0] in applied:
                self._residuals.accept(place)

    def forget(self) -> None:
        self._residuals.forget()

    def residuals(self, specs: Sequence[TensorSpec], num_replicas: int) -> list[dict[int, Tensor]]:
        return [
            {
                key: self._residuals.kept[spec.key, at].clone().view(spec.shape)
                for key, spec in enumerate(specs)
                if (spec.key, at) in self._residuals.kept
            }
            for at in range(num_replicas)
        ]

    def set_residuals(self, specs: Sequence[TensorSpec], residuals: Sequence[Mapping[int, Tensor]]) -> None:
        self._residuals = Residuals(self._codec)
        self._residuals.kept = {
            (specs[key].key, at): value.detach().reshape(-1).clone()
            for at, held in enumerate(residuals)
            for key, value in held.items()
        }


def _coalesce_replica(spec: TensorSpec, value: Tensor) -> RowSet:
    value = value.detach()
    ids = value._indices()[0].to("cpu")
    values = value._values().to("cpu", compute_dtype(spec.dtype)).reshape(len(ids), row_numel(spec))
    return RowSet(*coalesce_rows(ids, values, spec.shape[0]))
