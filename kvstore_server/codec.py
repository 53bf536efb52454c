"""Gradient compression: the elements of one slice become fewer bytes, and what is lost is kept for the next push.

A codec encodes flat gradients to bytes and decodes them. Every codec but 'none' is lossy: what it rounds away goes
into a residual, which the sender adds to its next gradient (error feedback; Seide et al., 1-bit SGD, 2014). So nothing
is lost, it only arrives later. The residual belongs to the caller; codecs are stateless, apart from scratch memory.

Elements are processed in blocks, so that intermediate results stay in a cache: `Codec.encode` adds the residual block
by block, and subclasses only implement `_quantise` and `_dequantise` for one block. Encoding is bit-identical however
a gradient is cut, as long as every piece but the last is a multiple of `unit` elements.

Invariants: after `encode`, decoded bytes + next residual = gradient + residual, up to rounding in the compute dtype.
Non-finite values raise instead of poisoning the residual forever. Payloads from peers go through `check_payload`
before they are decoded. Nothing here knows a message, a key or a rank.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore_server import check
from kvstore_server.errors import (
    ConfigurationError,
    NonFiniteGradientError,
    ProtocolError,
    UnknownNameError,
)
from kvstore_server.plan import ITEM_SIZE

Numbers: TypeAlias = NDArray[Any]
"""Flat, of a compute dtype."""
Bytes: TypeAlias = NDArray[np.uint8]

BLOCK = 1 << 18
"""Elements processed at a time, rounded up to whole units. Smaller blocks would fit into a faster cache, but the
overhead of more calls costs more than that gains (benchmarks/compression.py).
"""


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a dtype name of the plan."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@functools.cache
def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are summed, compressed and applied."""
    dtype = torch_dtype(name)
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes flat gradients to bytes and decodes them. Stateless: the residual belongs to the caller.

    Gradients are those of one key or slice, in float16, bfloat16, float32 or float64, on the CPU. Arithmetic is in the
    compute dtype: float64 for float64, float32 for all others. A gradient may be encoded in pieces: if every piece but
    the last is a multiple of `unit` elements, the bytes are those of the whole. Sizes and dtypes of arguments are not
    checked; payloads of peers must pass `check_payload` first.

    Subclasses are frozen dataclasses; their fields are the options that `compression_params` may contain.
    """

    name: ClassVar[str]
    """The `type` in compression_params."""
    unit: ClassVar[int] = 8
    """How many elements are encoded together."""
    largest: ClassVar[float] = math.inf
    """The largest magnitude that can be encoded; the excess of larger elements stays in the residual."""

    _memory: dict[str, Numbers] = field(init=False, repr=False, compare=False, default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """Return the options as plain values for `make_codec`. Equal specs mean equal codecs."""
        return {"type": self.name, **{f.name: getattr(self, f.name) for f in fields(self) if f.init}}

    def is_exact(self, dtype: str) -> bool:
        """Return whether gradients of `dtype` are encoded without loss, so that they need no residual."""
        return False

    def residual_dtype(self, dtype: str) -> torch.dtype | None:
        """Return the dtype of the residual of gradients of `dtype`; None if they need none. A new residual is zero.

        Raises:
            ConfigurationError: Gradients of that dtype cannot be encoded.
        """
        check.one_of("the dtype of compressed gradients", dtype, ITEM_SIZE)
        return None if self.is_exact(dtype) else compute_dtype(dtype)

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        """Return the size in bytes of `numel` encoded elements of `dtype`."""

    def itemsize(self, dtype: str) -> int | None:
        """Return the bytes of one encoded element; None if elements are not encoded one by one."""
        return None

    @torch.no_grad()
    def encode(
        self, grad: Tensor, residual: Tensor | None, out: Tensor, next_residual: Tensor | None
    ) -> None:
        """Encode `residual + grad` into `out`, and write what is lost into `next_residual`.

        Args:
            grad: Flat; not changed.
            residual: Flat, as long as `grad`, of `residual_dtype`, or None if that is None. Not changed, so that a
                push that was never applied can be repeated or dropped.
            out: uint8, `encoded_nbytes` long; overwritten. Unused bits of the last byte are zero.
            next_residual: Like `residual`, in other memory; overwritten.

        Raises:
            NonFiniteGradientError: An element of `residual + grad` is not finite, which few bits cannot represent and
                which would poison the residual forever. `out` and `next_residual` are then invalid. Exact codecs
                encode such values.
        """
        if residual is None or next_residual is None:
            out.copy_(grad.contiguous().view(torch.uint8))
            return
        kept, sums, given = residual.numpy(), next_residual.numpy(), grad.detach().to(residual.dtype).numpy()
        blocks = self._blocks(out, str(grad.dtype).removeprefix("torch."), len(kept))
        with self._spare(kept) as spare, np.errstate(over="ignore", invalid="ignore"):
            for start, end, codes in blocks:
                # The fast path assumes that all elements are finite and not too large. If not, clip and move the
                # excess to the residual.
                total = np.add(kept[start:end], given[start:end], sums[start:end])
                if not self._quantise(total, codes, spare[: end - start]):
                    np.add(kept[start:end], given[start:end], total)
                    _check_finite_before_encoding(total, grad, start)
                    bounded = np.clip(total, -self.largest, self.largest)
                    beyond = total - bounded
                    self._quantise(bounded, codes, spare[: end - start])
                    np.add(bounded, beyond, total)

    @torch.no_grad()
    def decode(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Decode `payload` into `out`.

        Args:
            payload: uint8, as encoded for `out.numel()` elements of `dtype`; see `check_payload`.
            dtype: The dtype of the encoded gradient.
            out: Flat, of `dtype` or its compute dtype. The compute dtype holds exactly what the sender took out of its
                residual; half precision rounds it.
        """
        if out.dtype != compute_dtype(dtype):
            out.copy_(self._decoded(payload, dtype, len(out)))
            return
        target = out.numpy()
        for start, end, codes in self._blocks(payload, dtype, len(target)):
            self._dequantise(codes, dtype, target[start:end])

    @torch.no_grad()
    def decode_add(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Add the decoded `payload` to `out`; otherwise like `decode`."""
        if out.dtype != compute_dtype(dtype):
            out.add_(self._decoded(payload, dtype, len(out)))
            return
        target = out.numpy()
        with self._spare(target) as spare:
            for start, end, codes in self._blocks(payload, dtype, len(target)):
                self._dequantise(codes, dtype, spare[: end - start])
                target[start:end] += spare[: end - start]

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        """Raise ProtocolError unless `payload` can be `numel` encoded elements of `dtype`."""
        expected = self.encoded_nbytes(numel, dtype)
        if payload.dim() != 1 or payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ProtocolError(
                f"{numel} elements of {dtype} take {expected} bytes as {self.name!r}; got "
                f"{payload.dtype}{list(payload.shape)}"
            )

    @abstractmethod
    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        """Encode one block into `codes`, and leave in `total` what is lost.

        `spare` is scratch memory like `total`. Must return False if an element is not finite or exceeds `largest`;
        what was written is then ignored. May also return False otherwise, which takes the slow path.
        """

    @abstractmethod
    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        """Decode a block of gradients of `dtype` into `values`, of the compute dtype."""

    def _decoded(self, payload: Tensor, dtype: str, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=compute_dtype(dtype), device="cpu")
        self.decode(payload, dtype, values)
        return values

    def _blocks(self, payload: Tensor, dtype: str, numel: int) -> Iterator[tuple[int, int, Bytes]]:
        step, data = self._step(), payload.numpy()
        for start in range(0, numel, step):
            end = min(start + step, numel)
            first = self.encoded_nbytes(start, dtype)
            yield start, end, data[first : first + self.encoded_nbytes(end - start, dtype)]

    def _step(self) -> int:
        return -(-BLOCK // self.unit) * self.unit

    @contextmanager
    def _spare(self, like: Numbers) -> Iterator[Numbers]:
        """Borrow scratch memory for one block; it is kept, because allocating takes longer than the work."""
        size, kind = min(len(like), self._step()), like.dtype.char
        spare = self._memory.pop(kind, None)  # so that another thread does not get it, too
        if spare is None or len(spare) < size:
            spare = np.empty(size, kind)
        yield spare
        self._memory[kind] = spare


def _check_finite_before_encoding(total: Numbers, grad: Tensor, start: int) -> None:
    wrong = np.flatnonzero(~np.isfinite(total))
    if len(wrong):
        at = start + int(wrong[0])
        raise NonFiniteGradientError(
            f"a gradient cannot be compressed: with its residual it is {total[wrong[0]]} at element {at} of "
            f"{len(grad)} (the gradient there is {grad[at].item()}). Lower the learning rate, clip gradients or "
            "scale the loss down; without compression_params such values reach the weights"
        )


def _is_residual_finite(left: Numbers) -> bool:
    """Return whether all elements are finite, by their sum: a sum is finite only if every element is."""
    return math.isfinite(torch.from_numpy(left).sum().item())


@dataclass(frozen=True)
class NoCompression(Codec):
    """No compression; infinities and NaNs are sent, too."""

    name: ClassVar[str] = "none"

    def is_exact(self, dtype: str) -> bool:
        return True

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_SIZE[dtype]

    def itemsize(self, dtype: str) -> int | None:
        return ITEM_SIZE.get(dtype)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        raise AssertionError("an exact codec quantises nothing")

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        torch.from_numpy(values).copy_(torch.frombuffer(codes, dtype=torch_dtype(dtype)))


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Rounds to a half-precision dtype (float64 via float32); the residual keeps the rounding errors.

    Elements beyond the largest number of the dtype (65504 for float16) are sent as that number instead of infinity,
    and the residual sends the rest with later gradients. Gradients of that dtype are sent unchanged.
    """

    wire: ClassVar[torch.dtype]

    def is_exact(self, dtype: str) -> bool:
        return torch_dtype(dtype) is self.wire

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return numel * self.wire.itemsize

    def itemsize(self, dtype: str) -> int | None:
        return self.wire.itemsize if dtype in ITEM_SIZE else None

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        rounded = torch.frombuffer(codes, dtype=self.wire)
        rounded.copy_(torch.from_numpy(total))
        torch.from_numpy(spare).copy_(rounded)
        return _is_residual_finite(np.subtract(total, spare, total))

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        torch.from_numpy(values).copy_(torch.frombuffer(codes, dtype=self.wire))


@dataclass(frozen=True)
class Float16(HalfPrecision):
    """IEEE half precision: 11 significant bits, from 6e-8 to 65504."""

    name: ClassVar[str] = "fp16"
    wire: ClassVar[torch.dtype] = torch.float16
    largest: ClassVar[float] = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class BFloat16(HalfPrecision):
    """bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    wire: ClassVar[torch.dtype] = torch.bfloat16
    largest: ClassVar[float] = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class EightBit(Codec):
    """Sends each element as an integer, −127 to 127, times a scale that 1,024 elements share.

    The scale is 1/127 of their largest magnitude, which is sent as ±127; others are rounded to nearest, ties to even,
    and the residual keeps the rounding errors. Layout: the scale as float32, then one byte for each element. If the
    largest magnitude is below 2⁻¹¹⁹, the scale is 0 and everything stays in the residual.
    """

    name: ClassVar[str] = "int8"
    unit: ClassVar[int] = 1024
    largest: ClassVar[float] = 2.0**127

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return numel + 4 * -(-numel // self.unit)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        is_fine = True
        for part, scales, quantised in _split_quantised_units(total, codes, self.unit, 8):
            scale = (np.maximum(part.max(1), -part.min(1)) / 127).astype(np.float32)[:, None]
            is_fine &= bool((scale <= self.largest / 127).all())
            scale[scale < _FLOAT32.tiny] = 0.0
            inverse = np.divide(1, scale, np.zeros_like(scale), where=scale > 0)
            whole = spare[: part.size].reshape(part.shape)
            _scale_quantised_rows(part, inverse, whole)
            np.rint(whole, whole)
            np.copyto(quantised.view(np.int8), whole, "unsafe")
            scales[:] = scale.view(np.uint8)
            _scale_quantised_rows(whole, scale, whole)
            np.subtract(part, whole, part)
        return is_fine

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        for part, scales, quantised in _split_quantised_units(values, codes, self.unit, 8):
            part[:] = quantised.view(np.int8)
            _scale_quantised_rows(part, _read_quantised_scales(scales), part)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        for _, scales, quantised in _split_quantised_units(
            _empty_codec_array(numel), payload.numpy(), self.unit, 8
        ):
            scale = _read_quantised_scales(scales)
            if (
                not ((scale >= 0) & (scale <= self.largest / 127)).all()
                or quantised.view(np.int8).min() < -127
            ):
                raise ProtocolError(
                    "a payload holds a scale or a number that 'int8' never sends; it was not written by an 'int8' "
                    "codec, or was damaged on the way"
                )


def _split_quantised_units(
    values: Numbers, codes: Bytes, unit: int, bits: int
) -> Iterator[tuple[Numbers, Bytes, Bytes]]:
    """Yield the complete units as one matrix, then the rest: values by unit, bytes of the scales, codes."""
    whole, nbytes = len(values) // unit, 4 + unit * bits // 8
    for start, count, size in ((0, whole, unit), (whole, 1, len(values) - whole * unit)):
        if count and size:
            width = 4 - (-size * bits // 8)
            rows = codes[start * nbytes :][: count * width].reshape(count, width)
            part = values[start * unit :][: count * size].reshape(count, size)
            yield part, rows[:, :4], rows[:, 4:]


def _read_quantised_scales(scales: Bytes) -> NDArray[np.float32]:
    return scales.copy().view("<f4")


def _empty_codec_array(numel: int) -> Numbers:
    """Return an array that has the length `numel` but no memory, for its shape."""
    return np.broadcast_to(np.float32(0), numel)


def _scale_quantised_rows(rows: Numbers, factors: Numbers, out: Numbers) -> None:
    """Multiply each row by its factor; numpy takes three times as long."""
    torch.mul(torch.from_numpy(rows), torch.from_numpy(factors), out=torch.from_numpy(out))


_FLOAT32 = torch.finfo(torch.float32)

Tables = dict[str, NDArray[Any]]
"""Compute dtype, as numpy's character → for each of the 256 bytes the numbers that its elements decode to."""


@dataclass(frozen=True)
class TwoBit(Codec):
    """Sends +threshold, −threshold or nothing for each element, and subtracts it from the residual.

    With r = residual + gradient: r ≥ threshold is sent as 11, r ≤ −threshold as 10, others as 00.

    Raises:
        ConfigurationError: The threshold is not a positive number that float32 can hold.
    """

    name: ClassVar[str] = "2bit"
    threshold: float = 0.5
    _tables: Tables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        label = "compression '2bit': threshold"  # in float32
        threshold = check.number(label, self.threshold, _FLOAT32.tiny, _FLOAT32.max)
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "_tables", _build_decode_tables((0.0, 0.0, -threshold, threshold)))

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 4)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        above, below = flags = np.empty((2, 4 * len(codes)), np.bool_)
        flags[:, len(total) :] = False
        np.greater_equal(total, self.threshold, above[: len(total)])
        np.less_equal(total, -self.threshold, below[: len(total)])
        codes[:] = _pack_two_bit_codes(above, below)
        _decode_by_table(self._tables[total.dtype.char], codes, spare)
        return _is_residual_finite(np.subtract(total, spare, total))

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        _decode_by_table(self._tables[values.dtype.char], codes, values)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        lone = payload & ~(payload >> 1) & 0b01010101
        if lone.any():
            raise ProtocolError(
                f"byte {torch.nonzero(lone)[0].item()} of a payload holds the code 01, which '2bit' never sends; "
                "it was not written by a '2bit' codec, or was damaged on the way"
            )


@dataclass(frozen=True)
class Ternary(Codec):
    """Sends each element as −1, 0 or 1 times a scale that 1,024 elements share.

    Elements above 0.7 times their mean magnitude are sent as ±1, and the scale is the mean magnitude of those, which
    is close to the least squared error (Li and Liu, Ternary Weight Networks, 2016). Zeros stay zeros, and the residual
    keeps the rest. Layout: the scale as float32, then two bits for each element, coded like '2bit'.
    """

    name: ClassVar[str] = "ternary"
    unit: ClassVar[int] = 1024
    largest: ClassVar[float] = 2.0**100

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 4) + 4 * -(-numel // self.unit)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        is_fine = True
        for part, scales, quantised in _split_quantised_units(total, codes, self.unit, 2):
            # 1. The threshold of each unit.
            values = np.abs(part, spare[: part.size].reshape(part.shape))
            sums = values.sum(1, keepdims=True)
            is_fine &= bool(sums.max() <= self.largest)
            limit = sums * part.dtype.type(0.7 / part.shape[1])
            # 2. Encode the signs, and read back what was sent.
            above, below = flags = np.empty((2, len(part), 4 * quantised.shape[1]), np.bool_)
            flags[:, :, part.shape[1] :] = False
            np.greater(part, limit, above[:, : part.shape[1]])
            np.less(part, -limit, below[:, : part.shape[1]])
            quantised[:] = _pack_two_bit_codes(above, below)
            self._signs(quantised, values)
            # 3. The scale is the mean magnitude of the elements sent.
            sent, count = (np.einsum("ij,ij->i", values, other)[:, None] for other in (part, values))
            scale = (sent / np.maximum(count, 1)).astype(np.float32)
            scales[:] = scale.view(np.uint8)
            _scale_quantised_rows(values, scale, values)
            np.subtract(part, values, part)
        return is_fine

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        for part, scales, quantised in _split_quantised_units(values, codes, self.unit, 2):
            self._signs(quantised, part)
            _scale_quantised_rows(part, _read_quantised_scales(scales), part)

    def _signs(self, quantised: Bytes, values: Numbers) -> None:
        row = values.shape[1]
        if row % 4:
            _decode_by_table(_SIGNS[values.dtype.char], quantised[0], values[0])
        else:
            _decode_by_table(_SIGNS[values.dtype.char], quantised.reshape(-1), values.reshape(-1))

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        for _, scales, quantised in _split_quantised_units(
            _empty_codec_array(numel), payload.numpy(), self.unit, 2
        ):
            scale = _read_quantised_scales(scales)
            if (
                not ((scale >= 0) & (scale <= self.largest)).all()
                or (quantised & ~(quantised >> 1) & 0x55).any()
            ):
                raise ProtocolError(
                    "a payload holds a scale or a code that 'ternary' never sends; it was not written by a 'ternary' "
                    "codec, or was damaged on the way"
                )


@dataclass(frozen=True)
class OneBit(Codec):
    """Sends +1 or −1 for each element, and subtracts it from the residual.

    With r = residual + gradient: r > threshold is sent as 1, others as 0. There is no scale, and zero cannot be
    represented: elements without gradient, padding included, decode to alternating signs.

    Raises:
        ConfigurationError: The threshold is not a number that float32 can hold.
    """

    name: ClassVar[str] = "1bit"
    threshold: float = 0.5
    _tables: Tables = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        label = "compression '1bit': threshold"  # in float32
        threshold = check.number(label, self.threshold, _FLOAT32.min, _FLOAT32.max)
        object.__setattr__(self, "threshold", threshold)
        object.__setattr__(self, "_tables", _build_decode_tables((-1.0, 1.0)))

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 8)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        codes[:] = np.packbits(total > self.threshold)
        _decode_by_table(self._tables[total.dtype.char], codes, spare)
        return _is_residual_finite(np.subtract(total, spare, total))

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        _decode_by_table(self._tables[values.dtype.char], codes, values)


def _build_decode_tables(values: Sequence[float]) -> Tables:
    """Return what each byte decodes to, if a code of as few bits as possible means `values[code]`."""
    width = (len(values) - 1).bit_length()
    shifts = np.arange(8 - width, -1, -width)
    codes = np.arange(256)[:, None] >> shifts & len(values) - 1
    return {kind: np.array(values, kind)[codes] for kind in "fd"}


_FOUR = np.dtype("<u4")
_SIDE_BY_SIDE = {code: np.uint32(code * 0x40100401 % 2**32) for code in (2, 3)}
"""Multiplying four bytes of 0 or 1, as one integer, by this puts the code for each 1 side by side into the highest
byte.
"""
_SIGNS = _build_decode_tables((0.0, 0.0, -1.0, 1.0))


def _pack_two_bit_codes(above: NDArray[np.bool_], below: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the codes of four elements in each byte: 11 for those above, 10 for those below, otherwise 00."""
    return (above.view(_FOUR) * _SIDE_BY_SIDE[3] + below.view(_FOUR) * _SIDE_BY_SIDE[2]) >> 24


def _decode_by_table(table: NDArray[Any], codes: Bytes, values: Numbers) -> None:
    width = table.shape[1]
    whole = len(values) // width
    np.take(table, codes[:whole], 0, values[: whole * width].reshape(whole, width), "clip")
    if whole * width < len(values):
        values[whole * width :] = table[codes[whole]][: len(values) - whole * width]


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of largest magnitude exactly, and keeps the others in the residual.

    Of every 65,536 elements, and of the rest after the last of them, a share of `ratio` is sent, rounded up; among
    equal magnitudes the first ones are. Layout: the elements in the compute dtype, in ascending order of position,
    then the positions as uint16.

    Raises:
        ConfigurationError: The ratio is not a number from 1/65,536 to 1/4.
    """

    name: ClassVar[str] = "topk"
    unit: ClassVar[int] = 1 << 16
    ratio: float = 0.01

    def __post_init__(self) -> None:
        ratio = check.number("compression 'topk': ratio", self.ratio, 1 / self.unit, 0.25)
        object.__setattr__(self, "ratio", ratio)

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        whole, left = divmod(numel, self.unit)
        return (whole * self._count(self.unit) + self._count(left)) * (compute_dtype(dtype).itemsize + 2)

    def _step(self) -> int:
        return self.unit

    def _count(self, numel: int) -> int:
        return min(math.ceil(self.ratio * numel), numel)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        # Without its sign bit, a float's bits compare as an integer in the order of magnitudes, NaNs largest.
        whole = np.dtype(f"i{total.itemsize}")
        magnitudes = np.bitwise_and(total.view(whole), np.iinfo(whole).max, spare.view(whole))
        chosen = _find_topk_positions(magnitudes, self._count(len(total)))
        sent = total[chosen]
        codes[: sent.nbytes] = sent.view(np.uint8)
        codes[sent.nbytes :] = chosen.astype("<u2").view(np.uint8)
        total[chosen] = 0.0
        return bool(np.isfinite(sent).all())

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        sent, positions = self._read(codes, compute_dtype(dtype))
        values.fill(0)
        values[positions] = sent

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        for start, end, codes in self._blocks(payload, dtype, numel):
            sent, positions = self._read(codes, compute_dtype(dtype))
            ascends = bool((positions[1:] > positions[:-1]).all())
            if not ascends or positions[-1] >= end - start or not np.isfinite(sent).all():
                raise ProtocolError(
                    f"a payload does not contain finite numbers at ascending positions below {end - start}, as 'topk' "
                    "does; it was not written by a 'topk' codec, or was damaged on the way"
                )

    def _read(self, codes: Bytes, dtype: torch.dtype) -> tuple[Numbers, NDArray[np.uint16]]:
        size = len(codes) // (dtype.itemsize + 2) * dtype.itemsize
        return codes[:size].view(f"<f{dtype.itemsize}"), codes[size:].view("<u2")


def _find_topk_positions(magnitudes: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Return the positions of the `count` largest numbers, ascending; among equal ones the first."""
    near = np.arange(0)
    sample = magnitudes[::_SAMPLED]
    # Estimate a bound from a sample: nearly always, enough but few elements are above it. Otherwise use all of them.
    share = count / _SAMPLED
    rank = len(sample) - math.ceil(share + 4 * math.sqrt(share) + 2)
    if rank > 0:
        near = np.flatnonzero(magnitudes > np.partition(sample, rank)[rank])
    if len(near) < count:
        near = np.arange(len(magnitudes))
    # Of the candidates take those above the count-th largest, and fill up with ties.
    among = magnitudes[near]
    edge = np.partition(among, len(among) - count)[len(among) - count]
    is_chosen = among > edge
    ties = np.flatnonzero(among == edge)
    is_chosen[ties[: count - np.count_nonzero(is_chosen)]] = True
    chosen: NDArray[np.intp] = near[is_chosen]
    return chosen


_SAMPLED = 64
"""One element in this many is sampled."""


_CODECS = {
    cls.name: cls for cls in (NoCompression, OneBit, TwoBit, Ternary, EightBit, Float16, BFloat16, TopK)
}


def make_codec(params: Mapping[str, Any] | None) -> Codec:
    """Return the codec that Gluon's `compression_params` or a `Codec.spec` describe.

    Args:
        params: `type`: 'none', '1bit', '2bit', 'ternary', 'int8', 'fp16', 'bf16' or 'topk', in any case; `threshold`
            for '1bit' and '2bit' (default 0.5), `ratio` for 'topk' (default 0.01). None: no compression.

    Raises:
        UnknownNameError: There is no such type; the error lists the valid ones.
        ConfigurationError: `params` is not a mapping, has no type or an unknown entry, or a number is out of range.
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
