"""Gradient compression: how the numbers of one slice become fewer bytes, and what is kept back meanwhile.

Every codec but 'none' rounds, and keeps what it rounded away in a residual beside the gradient, which the
sender adds to its next gradient (error feedback): nothing is lost, it only arrives later. Nothing here knows a
message, a key or a rank.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvstore_server import check
from kvstore_server.errors import (
    ConfigurationError,
    NonFiniteGradientError,
    ProtocolError,
    UnknownNameError,
)
from kvstore_server.plan import ITEM_SIZE

BLOCK = 131072
"""Elements that are worked on at a time, so that intermediate results stay in the cache. A multiple of 8, so that
every block but the last fills its bytes."""


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name of the Plan."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@functools.cache
def compute_dtype(name: str) -> torch.dtype:
    """The dtype in which gradients of a dtype of the Plan are summed, compressed and applied."""
    dtype = torch_dtype(name)
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Codec(ABC):
    """Turns flat gradients into bytes and back. A codec keeps no state: the residual is the caller's.

    The numbers are those of one key or slice, float16, bfloat16, float32 or float64, on the CPU. Arithmetic is done in
    the gradient's compute dtype: float64 for float64, float32 for the others. A gradient may be encoded piece by piece:
    where every piece but the last has a multiple of 8 elements, the pieces' bytes are the whole's. Callers give tensors
    of the sizes and dtypes that are stated here; what peers send goes through `check_payload` first.

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
        check.one_of("the dtype of compressed gradients", dtype, ITEM_SIZE)
        return None if self.is_exact(dtype) else compute_dtype(dtype)

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
        """
        dtype = str(grad.dtype).removeprefix("torch.")
        target = residual if next_residual is None else next_residual
        if residual is None or target is None:
            out.copy_(grad.contiguous().view(torch.uint8))
            return
        _check_finite(grad, residual)
        for start, end in _blocks(grad.numel()):
            first = self.encoded_nbytes(start, dtype)
            codes = out[first : first + self.encoded_nbytes(end - start, dtype)]
            total = torch.add(residual[start:end], grad[start:end], out=target[start:end])
            self._quantise(total, codes)

    @torch.no_grad()
    def decode(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Overwrite `out` with what `payload` says.

        Args:
            payload: uint8, what `encode` wrote for `out.numel()` elements of `dtype`; see `check_payload`.
            dtype: of the gradient that was encoded.
            out: flat, of `dtype` or of its compute dtype, which holds exactly what the sender took out of its
                residual; half precision rounds that.
        """
        for block, values in self._decoded(payload, dtype, out):
            block.copy_(values)

    @torch.no_grad()
    def decode_add(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Add what `payload` says to `out`; otherwise as `decode`."""
        for block, values in self._decoded(payload, dtype, out):
            block.add_(values)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        """Raise ProtocolError unless `payload` is what some `encode` wrote for `numel` elements of `dtype`."""
        expected = self.encoded_nbytes(numel, dtype)
        if payload.dim() != 1 or payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ProtocolError(
                f"{numel} elements of {dtype} take {expected} bytes as {self.name!r}; got "
                f"{payload.dtype}{list(payload.shape)}"
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
        label = "compression '2bit': threshold"  # in float32
        threshold = check.number(label, self.threshold, _FLOAT32.tiny, _FLOAT32.max)
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
        label = "compression '1bit': threshold"  # in float32
        threshold = check.number(label, self.threshold, _FLOAT32.min, _FLOAT32.max)
        object.__setattr__(self, "threshold", threshold)
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


_CODECS = {cls.name: cls for cls in (NoCompression, OneBit, TwoBit, Float16, BFloat16)}


def make_codec(params: Mapping[str, Any] | None) -> Codec:
    """Return the codec that Gluon's `compression_params`, or a `Codec.spec`, describes.

    Args:
        params: `type`: 'none', '1bit', '2bit', 'fp16' or 'bf16', in any case; `threshold` for the bits (0.5).
            None: no compression.

    Raises:
        UnknownNameError: there is no such type; lists the valid ones.
        ConfigurationError: not a mapping, no type, an entry that the type does not know, or a bad threshold.
    """
    if params is None:
        return NoCompression()
    options = dict(check.mapping("compression_params, such as {'type': '2bit'},", params))
    kind = options.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigurationError(
            f"compression_params needs a 'type', one of {', '.join(_CODECS)}; got {dict(params)!r:.80}"
        )
    cls = _CODECS[check.one_of("the type of compression", kind.lower(), _CODECS, error=UnknownNameError)]
    check.known(f"compression {cls.name!r}", options, ["type", *(f.name for f in fields(cls) if f.init)])
    return cls(**options)
