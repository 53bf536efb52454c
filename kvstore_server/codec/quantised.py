"""Two bits or one bit an element: MXNet's gradient compression, with its thresholds, its bytes and its order of
operations. Within a byte the first element has the most significant bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

from kvstore_server.codec.base import Codec, compute_dtype
from kvstore_server.errors import ConfigurationError, ProtocolError

_FLOAT32 = torch.finfo(torch.float32)

Tables = dict[torch.dtype, Tensor]
"""Per compute dtype: one row for each of the 256 bytes, the numbers that the byte's elements decode to."""


@dataclass(frozen=True)
class TwoBit(Codec):
    """Sends +threshold, −threshold or nothing for each element, and takes it out of the residual.

    With r the residual plus the gradient: r ≥ threshold is sent as 11, r ≤ −threshold as 10, the rest as 00.

    Raises:
        ConfigurationError: the threshold is not a positive number that float32 can hold.
    """

    name: ClassVar[str] = "2bit"
    threshold: float = 0.5
    _tables: Tables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        threshold = _number(self)
        if threshold < _FLOAT32.tiny:
            raise ConfigurationError(
                f"compression '2bit': threshold must be greater than 0 (at least {_FLOAT32.tiny:.2g}, the "
                f"smallest normal float32), got {self.threshold!r}"
            )
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "_tables", _tables((0.0, 0.0, -threshold, threshold)))

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 4)

    def _quantise(self, total: Tensor, codes: Tensor) -> None:
        above, below = _zeros(total, 4), _zeros(total, 4)
        torch.ge(total, self.threshold, out=above[: total.numel()])
        torch.le(total, -self.threshold, out=below[: total.numel()])
        total.sub_(above[: total.numel()], alpha=self.threshold)
        total.add_(below[: total.numel()], alpha=self.threshold)
        # 11 is one and a half times 10.
        codes.copy_(_packed(below.add_(above, alpha=1.5), (128, 32, 8, 2)))

    def _dequantise(self, codes: Tensor, dtype: str, numel: int) -> Tensor:
        return _looked_up(self._tables[compute_dtype(dtype)], codes, numel)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        lone = payload & ~(payload >> 1) & 0b01010101
        if lone.any():
            raise ProtocolError(
                f"byte {torch.nonzero(lone)[0].item()} of a payload holds the code 01, which '2bit' never sends; "
                "it was not written by a '2bit' codec, or was damaged on the way"
            )


@dataclass(frozen=True)
class OneBit(Codec):
    """Sends +1 or −1 for each element, and takes it out of the residual.

    With r the residual plus the gradient: r > threshold is sent as 1, the rest as 0. Nothing is scaled, and zero
    cannot be said: what had no gradient, padding too, decodes to alternating ones.

    Raises:
        ConfigurationError: the threshold is not a number that float32 can hold.
    """

    name: ClassVar[str] = "1bit"
    threshold: float = 0.5
    _tables: Tables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", _number(self))
        object.__setattr__(self, "_tables", _tables((-1.0, 1.0)))

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 8)

    def _quantise(self, total: Tensor, codes: Tensor) -> None:
        above = _zeros(total, 8)
        fired = above[: total.numel()]
        torch.gt(total, self.threshold, out=fired)
        codes.copy_(_packed(above, (128, 64, 32, 16, 8, 4, 2, 1)))
        total.sub_(fired.mul_(2).sub_(1))

    def _dequantise(self, codes: Tensor, dtype: str, numel: int) -> Tensor:
        return _looked_up(self._tables[compute_dtype(dtype)], codes, numel)


def _number(codec: TwoBit | OneBit) -> float:
    value = codec.threshold
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigurationError(
            f"compression {codec.name!r}: threshold must be a finite number, got {value!r}"
        )
    if abs(value) > _FLOAT32.max:
        raise ConfigurationError(
            f"compression {codec.name!r}: threshold must be a number that float32 can hold, got {value!r}"
        )
    return float(value)


def _zeros(total: Tensor, multiple: int) -> Tensor:
    """Zeros for each element of `total` and on to the end of the last byte."""
    return total.new_zeros(-(-total.numel() // multiple) * multiple)


def _packed(flags: Tensor, weights: Sequence[int]) -> Tensor:
    """Σ weight · flag over the elements of each byte: a whole number below 256, so exact in any float type."""
    return torch.mv(flags.view(-1, len(weights)), flags.new_tensor(weights))


def _tables(values: Sequence[float]) -> Tables:
    """The numbers behind each byte, where a code of the fewest bits that hold it means `values[code]`."""
    width = (len(values) - 1).bit_length()
    shifts = torch.arange(8 - width, -1, -width)
    codes = torch.arange(256).view(-1, 1) >> shifts & len(values) - 1
    return {dtype: torch.tensor(values, dtype=dtype)[codes] for dtype in (torch.float32, torch.float64)}


def _looked_up(table: Tensor, codes: Tensor, numel: int) -> Tensor:
    return table.index_select(0, codes.int()).view(-1)[:numel]
