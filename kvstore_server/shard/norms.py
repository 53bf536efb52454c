"""Norm and finiteness of a gradient, and the decision that follows from them.

A norm consists of one partial for each slice of the plan: the norm of the slice's summed gradient, computed in float64
over blocks of a fixed size. Partials are combined in slice order. So no bit depends on the number of servers, on who
measures, or on the number of threads. Powers that would overflow or underflow float64 are computed of elements divided
by the largest magnitude, so a norm is infinite only if it does not fit into float64 itself.
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
"""Elements summed at a time. torch splits longer sums (from 32768) between threads, which changes bits."""
_MIN_SAFE_SUM = 1e-290
"""Below this sum, some powers may have been subnormal or zero in float64, so the sum is not accurate."""


class Measured(NamedTuple):
    """The measurements of a gradient before it is applied."""

    norm: float
    """Norm of the scaled sum over ranks, before clipping.

    Infinite if it exceeds float64, even if all elements are finite.
    """
    is_finite: bool


class Decision(NamedTuple):
    """What is done with a gradient after measuring it."""

    coef: float = 1.0
    """First, the gradient is multiplied by this."""
    clip_value: float | None = None
    """Then its elements are clamped to -clip_value … clip_value."""
    skip: bool = False
    """True: nothing changes at all, no weight, optimizer state or update count."""


UNCHANGED = Decision()
"""Use the gradient unchanged."""


@dataclass(frozen=True)
class Guard:
    """Which norm to measure, and the function that turns it into a `Decision`.

    Args:
        norm_type: p of the p-norm, above 0; infinity for the largest magnitude.
        decide: Must not depend on anything that differs between workers: the first decision that arrives counts for
            all.

    Raises:
        ConfigurationError: `norm_type` is not a number above 0.
    """

    norm_type: float
    decide: Callable[[Measured], Decision]

    def __post_init__(self) -> None:
        check.number("norm_type", self.norm_type, above=0, finite=False)


def partial_norm(values: Tensor, norm_type: float) -> float:
    """Return (Σ |g|^p)^(1/p) in float64, or the largest magnitude for p = ∞; NaN or infinity if an element is.

    Args:
        values: Any shape; contiguous ones are fastest.
    """
    if norm_type == math.inf:
        return _largest_partial_norm(
            _read_partial_norms([block.abs().amax().double() for block in _split_norm_blocks(values)])
        )
    total = _sum_norm_powers(values, norm_type)
    if _MIN_SAFE_SUM < total < math.inf or math.isnan(total):
        return _take_norm_root(total, norm_type)
    if total == 0.0 and norm_type <= 2.0 and values.dtype != torch.float64:
        return (
            0.0  # exact: squares of the smallest float32 subnormals, about 1e-90, do not underflow in float64
        )
    # The sum overflowed or is inaccurate: compute it again from elements divided by the largest magnitude.
    largest = partial_norm(values, math.inf)
    if largest == 0.0 or largest == math.inf:
        return largest
    return largest * _take_norm_root(_sum_norm_powers(values, norm_type, largest), norm_type)


def _split_norm_blocks(values: Tensor) -> Sequence[Tensor]:
    return torch.split(values.reshape(-1), _BLOCK) if values.numel() else ()


def _sum_norm_powers(values: Tensor, norm_type: float, divisor: float = 1.0) -> float:
    # `_raise_to_norm_power` writes in place, which saves an allocation for each block. So it needs a copy: `double`
    # makes one, except of float64.
    blocks = _split_norm_blocks(values)
    wide = (block.clone() if block.dtype == torch.float64 else block.double() for block in blocks)
    some = wide if divisor == 1.0 else (block.div_(divisor) for block in wide)
    return _add_norms_in_order(
        _read_partial_norms([_raise_to_norm_power(block, norm_type).sum() for block in some])
    )


def _read_partial_norms(parts: Sequence[Tensor]) -> Iterable[float]:
    if parts and parts[0].device.type != "cpu":
        return torch.stack([*parts]).tolist()
    return (float(part) for part in parts)


def _add_norms_in_order(parts: Iterable[float]) -> float:
    """Add numbers one by one. `sum` compensates for rounding from Python 3.12 on, which gives other bits."""
    total = 0.0
    for part in parts:
        total += part
    return total


def _take_norm_root(total: float, norm_type: float) -> float:
    if norm_type in (1.0, 2.0):
        return total if norm_type == 1.0 else math.sqrt(total)
    try:
        return float(total ** (1.0 / norm_type))
    except OverflowError:
        return math.inf


def _raise_to_norm_power(values: Tensor, norm_type: float) -> Tensor:
    """Replace elements by the powers of their magnitudes, in place."""
    if norm_type == 2.0:
        return values.mul_(values)
    return values.abs_() if norm_type == 1.0 else values.abs_().pow_(norm_type)


def is_finite(values: Tensor, partial: float) -> bool:
    """Return whether all elements are finite. A finite partial norm implies it; otherwise the elements are read."""
    return math.isfinite(partial) or bool(torch.isfinite(values).all())


def combine(partials: Iterable[float], norm_type: float) -> float:
    """Return the norm of the whole from the partial norms of its parts, given in slice order."""
    all_partials = [*partials]
    largest = _largest_partial_norm(all_partials)
    if norm_type == math.inf or largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * _take_norm_root(
        _add_norms_in_order((one / largest) ** norm_type for one in all_partials), norm_type
    )


def same_decision(a: Decision, b: Decision) -> bool:
    """Return whether two decisions have the same effect; NaN coefficients count as equal."""
    if a.skip or b.skip:
        return a.skip == b.skip
    return a == b or (a.clip_value == b.clip_value and math.isnan(a.coef) and math.isnan(b.coef))


def apply_decision(values: Tensor, decision: Decision) -> None:
    """Scale and clip a gradient in place; the caller handles `skip`."""
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
    """Measure summed gradients in one process, bit-identical to what servers measure.

    Exception: sums that arrive in half precision have already been rounded, so their norm can differ from the one
    that servers compute.

    Args:
        arenas: dtype → flat, laid out by the plan.
        rows: Index of a key → its rows. The elements of this key in the arenas are ignored.
        present: For each key, whether it takes part; the others are not read.
        scale: The factor by which the sums are multiplied first, in the dtype that updates compute in.
    """
    split = split_rows(plan, {key: some for key, some in rows.items() if present[key]})
    partials: list[float] = []
    finite = True
    for slice_ in plan.slices:
        sparse = split.get(slice_.index, {})
        # A slice may contain several keys: those that are absent or given as rows are masked.
        dense = [present[s.key] and s.key not in rows for s in slice_.segments]
        values = None
        if any(dense):
            values = arenas[slice_.dtype][slice_.offset : slice_.offset + slice_.used]
            values = values if all(dense) else only_segments(values, slice_, dense)
        if values is not None or sparse:
            if scale != 1.0:
                values = None if values is None else _scale_for_norm(values, scale)
                sparse = {
                    at: part._replace(values=_scale_for_norm(part.values, scale))
                    for at, part in sparse.items()
                }
            partial, is_slice_finite = partial_norm_of_slice(values, sparse, norm_type)
            partials.append(partial)
            finite = finite and is_slice_finite
    return Measured(combine(partials, norm_type), finite)


def partial_norm_of_slice(
    values: Tensor | None, sparse: Mapping[int, RowSet], norm_type: float
) -> tuple[float, bool]:
    """Return the partial norm of a slice, and whether all of it is finite.

    Args:
        values: The dense elements of the slice, with zeros in segments that are absent or sparse; None if it has none.
        sparse: Position of a sparse segment → its rows.
    """
    parts = [values] if values is not None else []
    parts += [sparse[position].values for position in sorted(sparse)]
    partials = [partial_norm(part, norm_type) for part in parts]
    finite = all(is_finite(part, partial) for part, partial in zip(parts, partials, strict=True))
    return combine(partials, norm_type), finite


def only_segments(values: Tensor, slice_: Slice, wanted: Sequence[bool]) -> Tensor:
    """Return a copy of a slice's elements with zeros outside the wanted segments."""
    copy = torch.zeros_like(values)
    for segment, is_wanted in zip(slice_.segments, wanted, strict=True):
        if is_wanted:
            end = segment.start + segment.numel
            copy[segment.start : end] = values[segment.start : end]
    return copy


def _scale_for_norm(values: Tensor, scale: float) -> Tensor:
    return (values.float() if values.dtype.itemsize < 4 else values) * scale


def _largest_partial_norm(partials: Iterable[float]) -> float:
    found = 0.0
    for partial in partials:
        # After a NaN, no comparison is true, so a NaN stays the result.
        if math.isnan(partial) or partial > found:
            found = partial
    return found
