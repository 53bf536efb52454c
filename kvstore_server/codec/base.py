"""What every codec shares: its contract, the checks of what it is given, error feedback, and the walk in blocks.

A codec's family adds two functions: how a block of numbers becomes bytes, and how those become numbers again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server.errors import (
    ConfigurationError,
    NonFiniteGradientError,
    ProtocolError,
    ShapeMismatchError,
)

BLOCK = 131072
"""Elements that are worked on at a time, so that intermediate results stay in the cache. A multiple of 8, so that
every block but the last fills its bytes."""

_COMPUTE = {
    "float16": torch.float32,
    "bfloat16": torch.float32,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Codec(ABC):
    """Turns flat gradients into bytes and back. A codec keeps no state: the residual is the caller's.

    The numbers are those of one key or slice, float16, bfloat16, float32 or float64, on the CPU. Arithmetic is
    done in the gradient's compute dtype: float64 for float64, float32 for the others. A gradient may be encoded
    piece by piece: where every piece but the last has a multiple of 8 elements, the pieces' bytes are the whole's.

    Subclasses are frozen dataclasses whose fields are the options that `compression_params` may name.
    """

    name: ClassVar[str]
    """The `type` in compression_params."""

    def spec(self) -> dict[str, Any]:
        """The codec as plain numbers; `make_codec` rebuilds it from them. Equal specs mean equal codecs."""
        return {"type": self.name, **{f.name: getattr(self, f.name) for f in fields(self) if f.init}}

    def is_exact(self, dtype: str) -> bool:
        """Whether gradients of `dtype` travel without any loss, and so without a residual."""
        return False

    def residual_dtype(self, dtype: str) -> torch.dtype | None:
        """The dtype of the residual of gradients of `dtype`; None: they have none. A new residual is zero.

        Raises:
            ConfigurationError: gradients of that dtype cannot be encoded.
        """
        compute = compute_dtype(dtype)
        return None if self.is_exact(dtype) else compute

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        """The size in bytes of `numel` encoded elements of `dtype`."""

    @torch.no_grad()
    def encode(
        self, grad: Tensor, residual: Tensor | None, out: Tensor, next_residual: Tensor | None = None
    ) -> None:
        """Encode `residual + grad` into `out`, and keep what the bytes do not say as the new residual.

        Args:
            grad: flat; not changed.
            residual: flat, as long as `grad`, of `residual_dtype`; None where that is None.
            out: uint8, `encoded_nbytes` long; overwritten. Unused bits of the last byte are zero.
            next_residual: where the new residual goes; None: to `residual`. With another tensor `residual`
                stays as it is, so that a push that was never applied can be taken back or made anew.

        Raises:
            NonFiniteGradientError: `residual + grad` is not finite somewhere. Few bits cannot say so and the
                residual would stay poisoned for ever, so nothing is encoded and nothing has changed. Where
                `is_exact`, such values travel as they are instead.
            ShapeMismatchError: a tensor has another length or dtype than stated above; nothing has changed.
        """
        dtype = self._check_encode(grad, residual, out, next_residual)
        if residual is None:
            out.copy_(grad.contiguous().view(torch.uint8))
            return
        _check_finite(grad, residual)
        target = residual if next_residual is None else next_residual
        for start, end in _blocks(grad.numel()):
            first = self.encoded_nbytes(start, dtype)
            codes = out[first : first + self.encoded_nbytes(end - start, dtype)]
            total = torch.add(residual[start:end], grad[start:end], out=target[start:end])
            self._quantise(total, codes)

    @torch.no_grad()
    def decode(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Overwrite `out` with what `payload` says.

        Args:
            payload: uint8, what `encode` wrote for `out.numel()` elements of `dtype`.
            dtype: of the gradient that was encoded.
            out: flat, of `dtype` or of its compute dtype, which holds exactly what the sender took out of its
                residual; half precision rounds that.

        Raises:
            ProtocolError: no sender's `encode` wrote `payload` for so many elements; `out` has not changed.
            ShapeMismatchError: `out` is not flat, or has another dtype.
        """
        self._check_decode(payload, dtype, out)
        for block, values in self._decoded(payload, dtype, out):
            block.copy_(values)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Add what `payload` says to `out`; otherwise as `decode`."""
        self._check_decode(payload, dtype, out)
        for block, values in self._decoded(payload, dtype, out):
            block.add_(values)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        """Raise ProtocolError unless `payload` is what some `encode` wrote for `numel` elements of `dtype`."""
        expected = self.encoded_nbytes(numel, dtype)
        if payload.dim() != 1 or payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ProtocolError(
                f"{numel} elements of {dtype} take {expected} bytes as {self.name!r}; got {_what(payload)}"
            )

    @abstractmethod
    def _quantise(self, total: Tensor, codes: Tensor) -> None:
        """Write the bytes of one block to `codes`, and leave in `total` what they do not say."""

    @abstractmethod
    def _dequantise(self, codes: Tensor, dtype: str, numel: int) -> Tensor:
        """The `numel` numbers of one block, of any dtype that holds them exactly."""

    def _decoded(self, payload: Tensor, dtype: str, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for start, end in _blocks(out.numel()):
            first = self.encoded_nbytes(start, dtype)
            codes = payload[first : first + self.encoded_nbytes(end - start, dtype)]
            yield out[start:end], self._dequantise(codes, dtype, end - start)

    def _check_encode(
        self, grad: Tensor, residual: Tensor | None, out: Tensor, next_residual: Tensor | None
    ) -> str:
        """Return the name of the gradient's dtype."""
        dtype = str(grad.dtype).removeprefix("torch.")
        if grad.dim() != 1 or dtype not in _COMPUTE:
            raise ShapeMismatchError(
                f"a gradient must be flat, one of {', '.join(_COMPUTE)}; got {_what(grad)}"
            )
        numel, kind = grad.numel(), self.residual_dtype(dtype)
        if (residual is None) != (kind is None) or (kind is None and next_residual is not None):
            wanted = "none" if kind is None else f"one of {kind}[{numel}]"
            raise ShapeMismatchError(
                f"{self.name!r} takes {dtype} gradients with a residual: {wanted}; got "
                f"{', '.join(_what(tensor) for tensor in (residual, next_residual))}"
            )
        for tensor in (residual, next_residual):
            if tensor is not None:
                _check_tensor(tensor, "the residual", kind, numel)
        _check_tensor(out, f"the bytes of {_what(grad)}", torch.uint8, self.encoded_nbytes(numel, dtype))
        return dtype

    def _check_decode(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        compute = compute_dtype(dtype)
        if out.dim() != 1 or out.dtype not in (compute, getattr(torch, dtype)):
            raise ShapeMismatchError(
                f"{dtype} gradients decode into a flat tensor of {dtype} or {compute}; got {_what(out)}"
            )
        self.check_payload(payload, dtype, out.numel())


def compute_dtype(dtype: str) -> torch.dtype:
    """The dtype that arithmetic on gradients of `dtype` is done in.

    Raises:
        ConfigurationError: gradients of that dtype cannot be encoded.
    """
    compute = _COMPUTE.get(dtype)
    if compute is None:
        raise ConfigurationError(f"gradients of {dtype} cannot be compressed; only {', '.join(_COMPUTE)} can")
    return compute


def _blocks(numel: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


def _check_finite(grad: Tensor, residual: Tensor) -> None:
    for start, end in _blocks(grad.numel()):
        total = residual[start:end] + grad[start:end]
        # A NaN anywhere is the minimum and the maximum.
        if not all(math.isfinite(bound.item()) for bound in torch.aminmax(total)):
            wrong = torch.nonzero(~torch.isfinite(total)).view(-1) + start
            raise NonFiniteGradientError(
                f"a gradient cannot be compressed: with what was kept back it is {total[wrong[0] - start].item()} "
                f"at element {wrong[0].item()} of {grad.numel()} (the gradient there is "
                f"{grad[wrong[0]].item()}). Lower the learning rate, clip gradients or scale the loss down; "
                "without compression_params such values reach the weights"
            )


def _check_tensor(tensor: Tensor, what: str, dtype: torch.dtype | None, numel: int) -> None:
    if tensor.dim() != 1 or tensor.dtype != dtype or tensor.numel() != numel:
        raise ShapeMismatchError(f"{what} must be {dtype}[{numel}], got {_what(tensor)}")


def _what(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"
