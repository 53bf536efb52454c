"""Half precision: two bytes an element, rounded to nearest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvstore_server.codec.base import Codec


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Rounds to a half-precision type (float64 by way of float32); the residual keeps the rounding errors.

    What exceeds the type's largest number (65504 for float16) is sent as that number rather than as an
    infinity; the residual keeps the rest, and sends it along with the next gradients. Gradients that are of
    the type already travel as they are.
    """

    wire: ClassVar[torch.dtype]

    def is_exact(self, dtype: str) -> bool:
        return getattr(torch, dtype) is self.wire

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return 2 * numel

    def _quantise(self, total: Tensor, codes: Tensor) -> None:
        largest = torch.finfo(self.wire).max
        rounded = total.clamp(-largest, largest).to(self.wire)
        total.sub_(rounded)
        codes.copy_(rounded.view(torch.uint8))

    def _dequantise(self, codes: Tensor, dtype: str, numel: int) -> Tensor:
        # A copy, because bytes that were received may begin at an odd address.
        return codes.clone().view(self.wire)


@dataclass(frozen=True)
class Float16(HalfPrecision):
    """IEEE half precision: 11 significant bits, from 6e-8 to 65504."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class BFloat16(HalfPrecision):
    """bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[torch.dtype] = torch.bfloat16
