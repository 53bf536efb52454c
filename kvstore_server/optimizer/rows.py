"""Prepare what kernels read: gradients in fragments, and rows gathered by id and scattered back.

Fragments are scaled and clipped block by block, in the cache, just before the kernel reads them. Row ids are sorted
and the values of equal ids summed in the order given, so results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.errors import ShapeMismatchError

CACHED = 256 * 1024
"""Elements processed at a time in operations with several passes, so that they stay in the cache."""


class ViewCache:
    """Caches views of flat memory: the next update splits it in the same way, and creating views takes longer than a
    small sum.

    Entries that an update did not use are dropped when the next one begins, because views keep their memory alive.
    """

    def __init__(self) -> None:
        self._used: dict[tuple[int, int], tuple[list[int], list[Tensor]]] = {}
        self._former = self._used

    def begin(self) -> None:
        self._used, self._former = {}, self._used

    def of(self, flat: Tensor, sizes: list[int]) -> list[Tensor]:
        """Split memory into parts of these sizes."""
        place = flat.data_ptr(), flat.numel()  # a sufficient key, because the views keep the memory alive
        known = self._used.get(place) or self._former.get(place)
        if known is None or known[0] != sizes:
            known = sizes, list(torch.split(flat, sizes))
        self._used[place] = known
        return known[1]


class GradFragments(NamedTuple):
    """A gradient that is still to be scaled and clipped.

    Args:
        tensors: Contiguous, in order; each ends at a 64-byte line.
        scale: The factor.
        bound: Then the limit of the magnitude of each element; None: no limit.
        cuts: Caches the views of the other memory; None: no cache.
    """

    tensors: Sequence[Tensor]
    scale: float = 1.0
    bound: float | None = None
    cuts: ViewCache | None = None


Gradient = Tensor | GradFragments
"""Flat and ready to use, or in fragments."""


def bound_of(limit: float, values: Tensor) -> float:
    """Return a limit that the dtype can represent; torch refuses larger ones, which would only limit infinities."""
    return min(limit, torch.finfo(values.dtype).max)


def aligned_fragments(
    grad: Gradient, *flats: Tensor, factor: float = 1.0
) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
    """Yield fragments of a gradient times a factor, with the corresponding parts of `flats`.

    If the gradient can be used unchanged, there is one item with all fragments. Otherwise it is computed block by
    block in memory that the next block overwrites, so that it is still in the cache when it is read.
    """
    tensors, scale, bound, cuts = grad if isinstance(grad, GradFragments) else GradFragments([grad])
    cut: Callable[[Tensor, list[int]], Sequence[Tensor]] = torch.split if cuts is None else cuts.of
    if scale == factor == 1.0 and bound is None:
        sizes = list(map(Tensor.numel, tensors))
        yield list(tensors), [[flat] if len(sizes) == 1 else list(cut(flat, sizes)) for flat in flats]
        return
    # Scale, clip, then apply the factor; without scale and bound the factor is the only multiplication.
    blocks = list(_split_cached_blocks(tensors))
    sizes = [sum([part.numel() for part in block]) for block in blocks]
    memory = tensors[0].new_empty(max(sizes))
    early, late = (factor, 1.0) if scale == 1.0 and bound is None else (scale, factor)
    for block, size, *own in zip(blocks, sizes, *[cut(flat, sizes) for flat in flats], strict=True):
        made = memory[:size]
        places = [made] if len(block) == 1 else torch.split(made, [part.numel() for part in block])
        # Scale while copying into the block's memory; then clip and scale in place.
        for part, place in zip(block, places, strict=True):
            torch.mul(part, early, out=place)
        if bound is not None:
            made.clamp_(-bound, bound)
        if late != 1.0:
            made.mul_(late)
        yield [made], [[part] for part in own]


def joined(grad: Gradient, factor: float) -> Tensor:
    tensors = grad.tensors if isinstance(grad, GradFragments) else [grad]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(factor)


def _split_cached_blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    block, size = list[Tensor](), 0
    for tensor in tensors:
        for part in torch.split(tensor, CACHED) if tensor.numel() > CACHED else (tensor,):
            if block and size + part.numel() > CACHED:
                yield block
                block, size = [], 0
            block.append(part)
            size += part.numel()
    yield block


_FEW_RUNS = 16
"""Up to this many ascending runs (one for each worker's ids, say) merging them is fastest."""
_SAMPLE = 128
"""Ids in any order have more ascending runs than that among this many."""


class SortedRowIds(NamedTuple):
    ids: Tensor
    """The distinct ids, int64."""
    order: npt.NDArray[np.int64]
    """The stable sorting permutation of the given ids."""
    is_first: npt.NDArray[np.bool_]
    """For each sorted id, whether it differs from the one before."""

    def places(self) -> Tensor:
        """Return the index of each given id among the distinct ones, int64."""
        places = np.empty_like(self.order)
        places[self.order] = self.is_first.cumsum() - 1
        return torch.from_numpy(places)

    def sums(self, values: Tensor) -> Tensor:
        """Sum the rows of values of each distinct id, in the order given.

        If the ids are already distinct and ascending, the values are returned, not a copy.
        """
        [firsts] = self.is_first.nonzero()
        if (
            len(firsts) == len(self.order)
            and _are_ascending(self.order[:_SAMPLE])
            and _are_ascending(self.order)
        ):
            return values
        if values.dtype is torch.float32 and values.is_cpu and values.numel():
            # The kernel reads each row once, and adds the rows of an id in order, as the general code below does.
            order, offsets = torch.from_numpy(self.order), torch.from_numpy(firsts)
            flat = values if values.dim() == 2 else values.reshape(values.shape[0], -1)
            return torch.embedding_bag(flat, order, offsets)[0].view(-1, *values.shape[1:])
        device = values.device
        # Begin each sum with 0, as the kernel does, which turns -0.0 into 0.0.
        total = values.index_select(0, torch.from_numpy(self.order[firsts]).to(device)).add_(0)
        if len(firsts) < len(self.order):
            [again] = np.logical_not(self.is_first).nonzero()
            places = torch.from_numpy((self.is_first.cumsum() - 1)[again]).to(device)
            further = torch.from_numpy(self.order[again]).to(device)
            total.index_add_(0, places, values.index_select(0, further))
        return total


def sort_row_ids(given: npt.NDArray[np.int64], num_rows: int = 0) -> SortedRowIds:
    """Sort ids of rows, each from 0 up to `num_rows`; 0: any.

    For 8,192 and 65,536 ids of 1,000,000 rows, uniform and Zipf-distributed (1.1), no hashing was faster on the
    machine of `benchmarks/results`: a table with a place for each row, kept between calls, takes 1.0 to 1.5 times as
    long, and 8 bytes a row; a Python dict takes 6 to 19 times as long.
    """
    shift = len(given).bit_length()
    if not num_rows:
        order = _order_of_hashes(given)
        ascending = given[order]
    elif shift + num_rows.bit_length() > 62 or (_has_few_runs(given[:_SAMPLE]) and _has_few_runs(given)):
        order = given.argsort(kind="stable")  # a merge sort, which merges ascending runs
        ascending = given[order]
    else:
        # Pack id and position into one integer: numpy sorts plain integers fastest, and all are distinct.
        packed = (given << shift) | np.arange(len(given))
        packed.sort()
        ascending, order = packed >> shift, packed & ((1 << shift) - 1)
    is_first = np.ones(len(given), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    return SortedRowIds(torch.from_numpy(ascending[is_first]), order, is_first)


def _are_ascending(given: npt.NDArray[np.int64]) -> bool:
    return bool((given[1:] > given[:-1]).all())


def _has_few_runs(given: npt.NDArray[np.int64]) -> bool:
    return bool(np.count_nonzero(given[1:] < given[:-1]) < _FEW_RUNS)


def _order_of_hashes(given: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the stable sorting permutation of numbers of 64 bits, most of which differ in their higher bits."""
    shift = len(given).bit_length()
    # Replace the lowest bits by the position: numpy sorts plain integers several times as fast as it finds an order.
    packed = (given >> shift << shift) | np.arange(len(given))
    packed.sort()
    order = packed & ((1 << shift) - 1)
    ascending = given[order]
    return order if (ascending[1:] >= ascending[:-1]).all() else given.argsort(kind="stable")


def coalesce_rows(ids: Tensor, values: Tensor, num_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Return distinct ascending ids, and for each the sum of its values in the order given.

    torch's own coalesce does not guarantee the order of summation. If the ids are already distinct and ascending, they
    and the values are returned, not copies.

    Args:
        ids: int64, one dimension, each from 0 up to `num_rows`; 0: any.
        values: One row for each id; summed in their dtype, so half precision should be converted before.

    Raises:
        ShapeMismatchError: The numbers of ids and rows differ, or an id is out of range.
    """
    if ids.dim() != 1 or values.dim() < 1 or ids.shape[0] != values.shape[0]:
        raise ShapeMismatchError(
            f"a row-sparse gradient needs one row of values for each id, got ids of shape {tuple(ids.shape)} and "
            f"values of shape {tuple(values.shape)}"
        )
    if not ids.numel():
        return ids, values
    given = ids.cpu().numpy()  # reading ids on another device waits for it anyway
    # Range checks on the extremes only, before anything is summed. Viewed as unsigned, negative ids are huge.
    if num_rows and given.view(np.uint64).max() >= num_rows:
        low, high = int(given.min()), int(given.max())
        raise ShapeMismatchError(
            f"a row-sparse gradient has row {low if low < 0 else high}, but its key has {num_rows} rows"
        )
    if _are_ascending(given[:_SAMPLE]) and _are_ascending(given):
        return ids, values
    ordered = sort_row_ids(given, num_rows)
    distinct = ordered.ids if ids.is_cpu else ordered.ids.to(ids.device)
    return distinct, ordered.sums(values)


def gather_rows(whole: Tensor, rows: Tensor, length: int) -> Tensor:
    """Gather rows; if `length` is not 0, flat and zero-padded to that length."""
    if not length:
        # As one dimension torch gathers single elements in half the time.
        is_column = whole.dim() == 2 and whole.shape[1] == 1 and whole.is_contiguous()
        return whole.view(-1).index_select(0, rows).view(-1, 1) if is_column else whole.index_select(0, rows)
    flat, shape = whole.new_empty(length), (rows.numel(), *whole.shape[1:])
    count = math.prod(shape)
    if count < length:
        flat[count:].zero_()
    torch.index_select(whole, 0, rows, out=(flat if count == length else flat[:count]).view(shape))
    return flat


def put_rows(whole: Tensor, rows: Tensor, values: Tensor) -> None:
    """Scatter what `gather_rows` has gathered, converted to the target's dtype."""
    count = rows.numel() * math.prod(whole.shape[1:])
    flat = values.view(-1) if values.numel() == count else values.view(-1)[:count]
    scatter_rows(whole, rows, flat if flat.dtype is whole.dtype else flat.to(whole.dtype))


def scatter_rows(whole: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Copy rows, in their shape or flat, to distinct ids, like `index_copy_`."""
    if whole.device.type != "cpu" or not whole.is_contiguous():
        whole.index_copy_(0, ids, rows.view(-1, *whole.shape[1:]))
        return
    if count := rows.numel():  # numpy copies rows, viewed as single elements, in less than half the time
        row = f"V{count // ids.numel() * rows.element_size()}"
        flat, given = (t.view(-1).view(torch.uint8).numpy().view(row) for t in (whole, rows.contiguous()))
        flat[ids.numpy()] = given


def append_zeros(flat: Tensor, spare: int) -> Tensor:
    """Append `spare` zeros; without any, return the vector itself."""
    return torch.nn.functional.pad(flat, (0, spare)) if spare else flat
