"""No compression: the gradient's own bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvstore_server.codec.base import Codec
from kvstore_server.plan import ITEM_SIZE


@dataclass(frozen=True)
class NoCompression(Codec):
    """Gradients travel as they are, infinities and NaNs too."""

    name: ClassVar[str] = "none"

    def is_exact(self, dtype: str) -> bool:
        return True

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_SIZE[dtype]

    def _quantise(self, total: Tensor, codes: Tensor) -> None:
        raise AssertionError("an exact codec quantises nothing")

    def _dequantise(self, codes: Tensor, dtype: str, numel: int) -> Tensor:
        # A copy, because bytes that were received may begin at an odd address.
        return codes.clone().view(getattr(torch, dtype))
