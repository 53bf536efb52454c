"""The norm and finiteness of a gradient, wherever it lies, and what follows.

A norm is made of one partial for each slice of the Plan: the norm of the slice's sum of gradients, in float64 and over
blocks of a fixed size. Partials are combined in the order of the slices. So neither the number of servers, nor who
measures, nor the number of threads changes a bit of it. Powers that float64 cannot hold are taken of what is divided by
the greatest magnitude, so a norm is infinite only where it is itself too large for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.optimizer.rows import bound_of
from kvstore_server.plan import Plan, Slice
from kvstore_server.protocol.rows import RowSet, split_rows

_BLOCK = 16384
"""Elements that are summed at a time: torch divides longer sums (from 32768) between threads, which changes bits."""
_LEAST = 1e-290
"""A sum of powers below this may have lost digits."""


class Measured(NamedTuple):
    """What is known of a gradient before it is applied."""

    norm: float
    """Of the sum over ranks, scaled, before it is clipped; infinite also where finite numbers are too large for it."""
    is_finite: bool
    """Whether every element is a finite number."""


class Decision(NamedTuple):
    """What is done with a gradient that was measured."""

    coef: float = 1.0
    """The gradient is multiplied by this first."""
    clip_value: float | None = None
    """Then its elements are brought into -clip_value … clip_value."""
    skip: bool = False
    """Nothing is changed at all: no weight, no state of the optimizer, no update count."""


@dataclass(frozen=True)
class Guard:
    """Which norm a worker wants to know before an update, and what it makes of that.

    Args:
        norm_type: p of the p-norm, above 0; infinity for the greatest magnitude.
        decide: Must depend on nothing in which workers differ, for the first decision that arrives counts for all.

    Raises:
        ConfigurationError: the type of the norm is no number above 0.
    """

    norm_type: float
    decide: Callable[[Measured], Decision]

    def __post_init__(self) -> None:
        check.number("norm_type", self.norm_type, above=0, finite=False)


def partial_norm(values: Tensor, norm_type: float) -> float:
    """(Σ |g|^p)^(1/p) of all elements in float64, their greatest magnitude for p = ∞; a NaN or an infinity stays one.

    Args:
        values: any shape; contiguous ones are fastest.
    """
    if norm_type == math.inf:
        return _greatest(_floats([block.abs().amax().double() for block in _blocks(values)]))
    total = _sum_of_powers(values, norm_type)
    if _LEAST < total < math.inf or math.isnan(total):
        return _root(total, norm_type)
    if total == 0.0 and norm_type <= 2.0 and values.dtype != torch.float64:
        return 0.0  # squares of narrower numbers do not vanish in float64
    greatest = partial_norm(values, math.inf)
    if greatest == 0.0 or greatest == math.inf:
        return greatest
    return greatest * _root(_sum_of_powers(values, norm_type, greatest), norm_type)


def _blocks(values: Tensor) -> Sequence[Tensor]:
    return torch.split(values.reshape(-1), _BLOCK) if values.numel() else ()


def _sum_of_powers(values: Tensor, norm_type: float, divisor: float = 1.0) -> float:
    wide = (block.double() if block.dtype != torch.float64 else block.clone() for block in _blocks(values))
    some = wide if divisor == 1.0 else (block.div_(divisor) for block in wide)
    return _in_order(_floats([_powers(block, norm_type).sum() for block in some]))


def _floats(parts: Sequence[Tensor]) -> Iterable[float]:
    if parts and parts[0].device.type != "cpu":
        return torch.stack([*parts]).tolist()
    return (float(part) for part in parts)


def _in_order(parts: Iterable[float]) -> float:
    """Add numbers one by one. From Python 3.12 on `sum` compensates for rounding: other bits than before."""
    total = 0.0
    for part in parts:
        total += part
    return total


def _root(total: float, norm_type: float) -> float:
    if norm_type in (1.0, 2.0):
        return total if norm_type == 1.0 else math.sqrt(total)
    try:
        return float(total ** (1.0 / norm_type))
    except OverflowError:
        return math.inf


def _powers(values: Tensor, norm_type: float) -> Tensor:
    """|g|^p of each element, in place."""
    if norm_type == 2.0:
        return values.mul_(values)
    return values.abs_() if norm_type == 1.0 else values.abs_().pow_(norm_type)


def is_finite(values: Tensor, partial: float) -> bool:
    """Tell whether all elements are finite, given their partial norm; looks at them again only where that is not."""
    return math.isfinite(partial) or bool(torch.isfinite(values).all())


def combine(partials: Iterable[float], norm_type: float) -> float:
    """Combine partials, in the order of their slices, to the norm."""
    all_partials = [*partials]
    greatest = _greatest(all_partials)
    if norm_type == math.inf or greatest == 0.0 or not math.isfinite(greatest):
        return greatest
    return greatest * _root(_in_order((one / greatest) ** norm_type for one in all_partials), norm_type)


UNCHANGED = Decision()
"""The gradient is used as it is."""


def same_decision(a: Decision, b: Decision) -> bool:
    """Tell whether two decisions have the same effect."""
    if a.skip or b.skip:
        return a.skip == b.skip
    return a == b or (a.clip_value == b.clip_value and math.isnan(a.coef) and math.isnan(b.coef))


def apply_decision(values: Tensor, decision: Decision) -> None:
    """Multiply and clip a gradient in place, as decided; what to skip is the caller's business."""
    if decision.coef != 1.0:
        values.mul_(decision.coef)
    if decision.clip_value is not None:
        bound = bound_of(decision.clip_value, values)
        values.clamp_(-bound, bound)


@torch.no_grad()
def measure(
    plan: Plan,
    arenas: Mapping[str, Tensor],
    rows: Mapping[int, RowSet],
    present: Sequence[bool],
    norm_type: float,
    scale: float = 1.0,
) -> Measured:
    """Measure sums of gradients in one process, to the bits that servers get for them.

    Those of half precision have been rounded to be here, so their norm is not the servers' to the bit.

    Args:
        arenas: dtype → flat, laid out by the plan.
        rows: Keys (by index) of which only these rows count, in place of what is in the arenas.
        present: Which keys take part; nothing else is looked at.
        scale: What the sums are yet to be multiplied by, in the dtype that updates compute in.
    """
    split = split_rows(plan, {key: some for key, some in rows.items() if present[key]})
    partials: list[float] = []
    finite = True
    for piece in plan.slices:
        sparse = split.get(piece.index, {})
        dense = [present[s.key] and s.key not in rows for s in piece.segments]
        body = None
        if any(dense):
            body = arenas[piece.dtype][piece.offset : piece.offset + piece.used]
            body = body if all(dense) else only_segments(body, piece, dense)
        if body is not None or sparse:
            if scale != 1.0:
                body = None if body is None else _scaled(body, scale)
                sparse = {
                    at: part._replace(values=_scaled(part.values, scale)) for at, part in sparse.items()
                }
            partial, is_fine = partial_of_slice(body, sparse, norm_type)
            partials.append(partial)
            finite = finite and is_fine
    return Measured(combine(partials, norm_type), finite)


def partial_of_slice(
    body: Tensor | None, sparse: Mapping[int, RowSet], norm_type: float
) -> tuple[float, bool]:
    """Return the partial norm of a slice, and whether all of it is finite.

    Args:
        body: The elements of the slice, zero where they do not count; None where none does.
        sparse: Position of a segment → its rows, which count as well.
    """
    parts = [body] if body is not None else []
    parts += [sparse[position].values for position in sorted(sparse)]
    partials = [partial_norm(part, norm_type) for part in parts]
    finite = all(is_finite(part, partial) for part, partial in zip(parts, partials, strict=True))
    return combine(partials, norm_type), finite


def only_segments(body: Tensor, piece: Slice, wanted: Sequence[bool]) -> Tensor:
    """Return a copy of the elements of a slice that is zero outside of some segments."""
    copy = torch.zeros_like(body)
    for segment, is_wanted in zip(piece.segments, wanted, strict=True):
        if is_wanted:
            end = segment.start + segment.numel
            copy[segment.start : end] = body[segment.start : end]
    return copy


def _scaled(values: Tensor, scale: float) -> Tensor:
    return (values.float() if values.dtype.itemsize < 4 else values) * scale


def _greatest(partials: Iterable[float]) -> float:
    """Return the greatest of numbers that are not negative; a NaN if one is."""
    found = 0.0
    for partial in partials:
        if math.isnan(partial) or partial > found:  # nothing is above a NaN that is there already
            found = partial
    return found
