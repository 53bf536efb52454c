"""What a kernel reads, put together: gradients that lie in pieces, and rows by their ids, which are put back as well.

Pieces are multiplied and clipped in the cache just before the kernel reads them.
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
"""Elements that are worked on at a time where they are gone over more than once, so that they stay in the cache."""


class Cuts:
    """Keeps flat memory as it was cut: the next update cuts it alike, and views take longer than a small sum.

    What an update did not use is let go by the next one that begins, so that no memory is held for long by its views.
    """

    def __init__(self) -> None:
        self._used: dict[tuple[int, int], tuple[list[int], list[Tensor]]] = {}
        self._former = self._used

    def begin(self) -> None:
        """Begin an update."""
        self._used, self._former = {}, self._used

    def of(self, flat: Tensor, sizes: list[int]) -> list[Tensor]:
        """Cut memory into parts of these sizes."""
        place = flat.data_ptr(), flat.numel()  # of nothing else, for the views hold it
        known = self._used.get(place) or self._former.get(place)
        if known is None or known[0] != sizes:
            known = sizes, list(torch.split(flat, sizes))
        self._used[place] = known
        return known[1]


class Pieces(NamedTuple):
    """A gradient that is yet to be multiplied and clipped.

    Args:
        tensors: Contiguous, one after the other; each ends where a line of 64 bytes does.
        scale: The factor.
        bound: The limit of the magnitude of each element, after that; None: there is none.
        cuts: What keeps the memory beside them as it was cut; None: nothing does.
    """

    tensors: Sequence[Tensor]
    scale: float = 1.0
    bound: float | None = None
    cuts: Cuts | None = None


Gradient = Tensor | Pieces
"""Flat, as it is used, or in pieces."""


def bound_of(limit: float, values: Tensor) -> float:
    """Return a limit of elements that their dtype can hold.

    A greater one limits infinities alone, and torch refuses it.
    """
    return min(limit, torch.finfo(values.dtype).max)


def aligned_fragments(
    grad: Gradient, *flats: Tensor, factor: float = 1.0
) -> Iterator[tuple[list[Tensor], list[list[Tensor]]]]:
    """Yield tensors of a gradient, times a factor, and what lies beside in `flats`.

    All come at once if the gradient is used as it lies. Otherwise it is made block by block, each in memory that the
    next one overwrites, and still in the cache when it is read.
    """
    tensors, scale, bound, cuts = grad if isinstance(grad, Pieces) else Pieces([grad])
    cut: Callable[[Tensor, list[int]], Sequence[Tensor]] = torch.split if cuts is None else cuts.of
    if scale == factor == 1.0 and bound is None:
        sizes = list(map(Tensor.numel, tensors))
        yield list(tensors), [[flat] if len(sizes) == 1 else list(cut(flat, sizes)) for flat in flats]
        return
    blocks = list(_blocks(tensors))
    sizes = [sum([part.numel() for part in block]) for block in blocks]
    memory = tensors[0].new_empty(max(sizes))
    early, late = (factor, 1.0) if scale == 1.0 and bound is None else (scale, factor)
    for block, size, *own in zip(blocks, sizes, *[cut(flat, sizes) for flat in flats], strict=True):
        made = memory[:size]
        places = [made] if len(block) == 1 else torch.split(made, [part.numel() for part in block])
        for part, place in zip(block, places, strict=True):
            torch.mul(part, early, out=place)
        if bound is not None:
            made.clamp_(-bound, bound)
        if late != 1.0:
            made.mul_(late)
        yield [made], [[part] for part in own]


def joined(grad: Gradient, factor: float) -> Tensor:
    """Return a flat gradient times a factor, in memory of its own."""
    tensors = grad.tensors if isinstance(grad, Pieces) else [grad]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).mul_(factor)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Put together, or cut, what stays in the cache."""
    block, size = list[Tensor](), 0
    for tensor in tensors:
        flat = tensor if tensor.dim() == 1 else tensor.view(-1)
        for part in torch.split(flat, CACHED) if flat.numel() > CACHED else (flat,):
            if block and size + part.numel() > CACHED:
                yield block
                block, size = [], 0
            block.append(part)
            size += part.numel()
    yield block


_FEW_RUNS = 16
"""Ascending runs, as of the ids of some workers one behind the other, up to which it takes least time to merge them."""
_MANY = 512
"""Ids for each 16 bits of them from which on it takes least time to count."""


class Ordered(NamedTuple):
    """Ids of rows in ascending order."""

    ids: Tensor
    """int64; the distinct ones."""
    order: npt.NDArray[np.int64]
    """Of each in ascending order, where it was given; equal ones in the order given."""
    is_first: npt.NDArray[np.bool_]
    """Whether the one before is another one."""

    def places(self) -> Tensor:
        """Return the position of each given id among the distinct ones, int64."""
        places = np.empty_like(self.order)
        places[self.order] = self.is_first.cumsum() - 1
        return torch.from_numpy(places)

    def sums(self, values: Tensor) -> Tensor:
        """Sum the values of each distinct id in the order given. There is a row of them for each id.

        Values of ids that are distinct and ascending already are returned as they are, not copied.
        """
        device, [firsts] = values.device, self.is_first.nonzero()
        if len(firsts) == len(self.order) and (self.order[1:] > self.order[:-1]).all():
            return values
        if values.dtype is torch.float32 and values.is_cpu and values.numel():
            # This kernel reads each row once, and adds those of an id in their order, as the calls below do.
            order, offsets = torch.from_numpy(self.order), torch.from_numpy(firsts)
            flat = values.reshape(len(values), -1)
            return torch.embedding_bag(flat, order, offsets)[0].view(-1, *values.shape[1:])
        # A sum begins with 0, which turns -0.0 into 0.0.
        total = values.index_select(0, torch.from_numpy(self.order[firsts]).to(device)).add_(0)
        if len(firsts) < len(self.order):
            [again] = np.logical_not(self.is_first).nonzero()
            places = torch.from_numpy((self.is_first.cumsum() - 1)[again]).to(device)
            further = torch.from_numpy(self.order[again]).to(device)
            total.index_add_(0, places, values.index_select(0, further))
        return total


def put_in_order(given: npt.NDArray[np.int64], num_rows: int) -> Ordered:
    """Put ids of rows, each from 0 up to `num_rows`, in ascending order.

    Of 8,192 and 65,536 ids of 1,000,000 rows, uniform and by Zipf's law (1.1), nothing that hashes was faster on the
    machine of `benchmarks/results`: a table with a place for each row, kept from call to call, takes 1.0 to 1.5 times
    as long, and 8 bytes a row; a Python dict takes 6 to 19 times as long.
    """
    passes, shift = -(-max(num_rows - 1, 1).bit_length() // 16), len(given).bit_length()
    if np.count_nonzero(given[1:] < given[:-1]) < _FEW_RUNS:
        order = given.argsort(kind="stable")  # which merges what is in order already
        ascending = given[order]
    elif len(given) >= _MANY * passes or shift + num_rows.bit_length() > 62:
        # numpy sorts numbers of 16 bits, from the lowest ones on, by counting them.
        order = given.astype(np.uint16).argsort(kind="stable")
        for at in range(16, 16 * passes, 16):
            order = order[(given >> at).astype(np.uint16)[order].argsort(kind="stable")]
        ascending = given[order]
    else:
        # With the place behind it each id is another number, and numpy sorts few plain numbers fastest.
        packed = (given << shift) | np.arange(len(given))
        packed.sort()
        ascending, order = packed >> shift, packed & ((1 << shift) - 1)
    is_first = np.ones(len(given), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    return Ordered(torch.from_numpy(ascending[is_first]), order, is_first)


def coalesce_rows(ids: Tensor, values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return distinct ascending ids, and for each the sum of its values in order.

    torch's own coalesce adds the values of one id in an order that it does not promise. Ids that are distinct
    and ascending already are returned as they are, not copied.

    Args:
        ids: int64, one dimension, each from 0 up to `num_rows`.
        values: one row for each id; half precision should have been converted, for it is summed as it is.

    Raises:
        ShapeMismatchError: the numbers of ids and of rows differ, or an id is outside the key.
    """
    if ids.dim() != 1 or values.dim() < 1 or len(ids) != len(values):
        raise ShapeMismatchError(
            f"a row-sparse gradient needs one row of values for each id, got ids of shape {tuple(ids.shape)} and "
            f"values of shape {tuple(values.shape)}"
        )
    if not ids.numel():
        return ids, values
    given = ids.cpu().numpy()  # a look at ids of another device waits for it in any case
    for end in (int(given.min()), int(given.max())):
        if not 0 <= end < num_rows:
            raise ShapeMismatchError(f"a row-sparse gradient has row {end}, but its key has {num_rows} rows")
    if (given[1:] > given[:-1]).all():
        return ids, values
    ordered = put_in_order(given, num_rows)
    return ordered.ids.to(ids.device), ordered.sums(values)


def taken(whole: Tensor, rows: Tensor, length: int) -> Tensor:
    """Copy some rows out; flat with zeros up to a length, unless that is 0."""
    if not length:
        return whole.index_select(0, rows)
    flat, shape = whole.new_empty(length), (rows.numel(), *whole.shape[1:])
    count = math.prod(shape)
    if count < length:
        flat[count:].zero_()
    torch.index_select(whole, 0, rows, out=flat[:count].view(shape))
    return flat


def put(whole: Tensor, rows: Tensor, values: Tensor) -> None:
    """Put back what `taken` has copied out, in whichever dtype."""
    shape = (rows.numel(), *whole.shape[1:])
    put_rows(whole, rows, values.view(-1)[: math.prod(shape)].view(shape).to(whole.dtype))


def put_rows(whole: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Copy rows to the places that the (distinct) ids name, as `index_copy_`."""
    if whole.device.type != "cpu" or not whole.is_contiguous():
        whole.index_copy_(0, ids, rows)
        return
    if count := rows.numel():  # numpy copies rows in less than half the time, where each is one element to it
        row = f"V{count // ids.numel() * rows.element_size()}"
        flat, given = (t.view(-1).view(torch.uint8).numpy().view(row) for t in (whole, rows.contiguous()))
        flat[ids.numpy()] = given


def lengthened(flat: Tensor, spare: int) -> Tensor:
    """Append so many zeros; return the vector itself, not a copy, where there are none."""
    return torch.nn.functional.pad(flat, (0, spare)) if spare else flat
