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
"""Elements that are worked on at a time, rounded up to whole units: a slice. Intermediate results of fewer would stay
in a faster cache, but every call has its price, which is more than what that gains (benchmarks/compression.py)."""


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name of the Plan."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@functools.cache
def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype to sum, compress and apply gradients of a Plan's dtype in."""
    dtype = torch_dtype(name)
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@dataclass(frozen=True)
class Codec(ABC):
    """Turns flat gradients into bytes and back. A codec keeps no state: the residual is the caller's.

    The numbers are those of one key or slice, float16, bfloat16, float32 or float64, on the CPU. Arithmetic is done in
    the gradient's compute dtype: float64 for float64, float32 for the others. A gradient may be encoded piece by piece:
    where every piece but the last has a multiple of `unit` elements, the pieces' bytes are the whole's. Callers give
    tensors of the sizes and dtypes that are stated here; what peers send goes through `check_payload` first.

    Subclasses are frozen dataclasses whose fields are the options that `compression_params` may name.
    """

    name: ClassVar[str]
    """The `type` in compression_params."""
    unit: ClassVar[int] = 8
    """The number of elements that are encoded together."""
    largest: ClassVar[float] = math.inf
    """The largest number that can be sent; of a larger one the residual keeps the rest."""

    _memory: dict[str, Numbers] = field(init=False, repr=False, compare=False, default_factory=dict)

    def spec(self) -> dict[str, Any]:
        """Return the codec as plain numbers; `make_codec` rebuilds it from them. Equal specs mean equal codecs."""
        return {"type": self.name, **{f.name: getattr(self, f.name) for f in fields(self) if f.init}}

    def is_exact(self, dtype: str) -> bool:
        """Tell whether gradients of `dtype` travel without loss. They need no residual then."""
        return False

    def residual_dtype(self, dtype: str) -> torch.dtype | None:
        """Return the dtype of the residual of gradients of `dtype`; None: they have none. A new residual is zero.

        Raises:
            ConfigurationError: gradients of that dtype cannot be encoded.
        """
        check.one_of("the dtype of compressed gradients", dtype, ITEM_SIZE)
        return None if self.is_exact(dtype) else compute_dtype(dtype)

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        """Return the size in bytes of `numel` encoded elements of `dtype`."""

    def itemsize(self, dtype: str) -> int | None:
        """Return the bytes of each encoded element of `dtype`; None where elements are not encoded one by one."""
        return None

    @torch.no_grad()
    def encode(
        self, grad: Tensor, residual: Tensor | None, out: Tensor, next_residual: Tensor | None
    ) -> None:
        """Encode `residual + grad` into `out`, and keep the rest as the next residual.

        Args:
            grad: flat; not changed.
            residual: flat, as long as `grad`, of `residual_dtype`; None where that is None. It stays as it is, so that
                a push that was never applied can be taken back or made anew.
            out: uint8, `encoded_nbytes` long; overwritten. Unused bits of the last byte are zero.
            next_residual: like `residual`, in other memory; overwritten.

        Raises:
            NonFiniteGradientError: `residual + grad` is not finite somewhere. Few bits cannot say so and the
                residual would stay poisoned for ever, so `out` and `next_residual` are not to be used. Where
                `is_exact`, such values travel as they are instead.
        """
        if residual is None or next_residual is None:
            out.copy_(grad.contiguous().view(torch.uint8))
            return
        kept, sums, given = residual.numpy(), next_residual.numpy(), grad.detach().to(residual.dtype).numpy()
        blocks = self._blocks(out, str(grad.dtype).removeprefix("torch."), len(kept))
        with self._spare(kept) as spare, np.errstate(over="ignore", invalid="ignore"):
            for start, end, codes in blocks:
                total = np.add(kept[start:end], given[start:end], sums[start:end])
                if not self._quantise(total, codes, spare[: end - start]):
                    np.add(kept[start:end], given[start:end], total)
                    _check_finite(total, grad, start)
                    bounded = np.clip(total, -self.largest, self.largest)
                    beyond = total - bounded
                    self._quantise(bounded, codes, spare[: end - start])
                    np.add(bounded, beyond, total)

    @torch.no_grad()
    def decode(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Overwrite `out` with what `payload` says.

        Args:
            payload: uint8, what `encode` wrote for `out.numel()` elements of `dtype`; see `check_payload`.
            dtype: of the gradient that was encoded.
            out: flat, of `dtype` or of its compute dtype, which holds exactly what the sender took out of its
                residual; half precision rounds that.
        """
        if out.dtype != compute_dtype(dtype):
            out.copy_(self._decoded(payload, dtype, len(out)))
            return
        numbers = out.numpy()
        for start, end, codes in self._blocks(payload, dtype, len(numbers)):
            self._dequantise(codes, dtype, numbers[start:end])

    @torch.no_grad()
    def decode_add(self, payload: Tensor, dtype: str, out: Tensor) -> None:
        """Add what `payload` says to `out`; otherwise as `decode`."""
        if out.dtype != compute_dtype(dtype):
            out.add_(self._decoded(payload, dtype, len(out)))
            return
        numbers = out.numpy()
        with self._spare(numbers) as spare:
            for start, end, codes in self._blocks(payload, dtype, len(numbers)):
                self._dequantise(codes, dtype, spare[: end - start])
                numbers[start:end] += spare[: end - start]

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
        """Write the bytes of one block to `codes`. Leave in `total` what they do not say.

        `spare` is memory like that of `total`, to be overwritten. Returns False, whatever was written, if a number is
        not finite or exceeds `largest`, and True if there is none; otherwise either.
        """

    @abstractmethod
    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        """Overwrite `values`, of the compute dtype, with a block of gradients of `dtype`."""

    def _decoded(self, payload: Tensor, dtype: str, numel: int) -> Tensor:
        values = torch.empty(numel, dtype=compute_dtype(dtype), device="cpu")
        self.decode(payload, dtype, values)
        return values

    def _blocks(self, payload: Tensor, dtype: str, numel: int) -> Iterator[tuple[int, int, Bytes]]:
        """First element, end and bytes of each block."""
        step, data = self._step(), payload.numpy()
        for start in range(0, numel, step):
            end = min(start + step, numel)
            first = self.encoded_nbytes(start, dtype)
            yield start, end, data[first : first + self.encoded_nbytes(end - start, dtype)]

    def _step(self) -> int:
        """Return the number of elements of a block: BLOCK, in whole units."""
        return -(-BLOCK // self.unit) * self.unit

    @contextmanager
    def _spare(self, like: Numbers) -> Iterator[Numbers]:
        """Lend memory for one block, which is kept for the next call: fresh memory takes longer than what is done."""
        size, kind = min(len(like), self._step()), like.dtype.char
        spare = self._memory.pop(kind, None)  # so that no other thread takes it meanwhile
        if spare is None or len(spare) < size:
            spare = np.empty(size, kind)
        yield spare
        self._memory[kind] = spare


def _check_finite(total: Numbers, grad: Tensor, start: int) -> None:
    """Raise NonFiniteGradientError if a sum of the block from `start` is not finite."""
    wrong = np.flatnonzero(~np.isfinite(total))
    if len(wrong):
        at = start + int(wrong[0])
        raise NonFiniteGradientError(
            f"a gradient cannot be compressed: with what was kept back it is {total[wrong[0]]} at element {at} of "
            f"{len(grad)} (the gradient there is {grad[at].item()}). Lower the learning rate, clip gradients or "
            "scale the loss down; without compression_params such values reach the weights"
        )


def _is_finite(left: Numbers) -> bool:
    """Tell whether what is left of some numbers is finite: where their sum is, each of them is."""
    return math.isfinite(torch.from_numpy(left).sum().item())


@dataclass(frozen=True)
class NoCompression(Codec):
    """Gradients travel as they are, infinities and NaNs too."""

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
    """Rounds to a half-precision type (float64 by way of float32); the residual keeps the rounding errors.

    What exceeds the type's largest number (65504 for float16) is sent as that number rather than as an
    infinity; the residual keeps the rest, and sends it along with the next gradients. Gradients that are of
    the type already travel as they are.
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
        return _is_finite(np.subtract(total, spare, total))

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
    """Sends each element as a whole number, −127 to 127, times a scale. 1,024 elements share one.

    The scale is a 127th of the largest magnitude among them, so that one goes as ±127; others are rounded to nearest,
    ties to even, and the residual keeps the rounding errors. 1,024 elements are their scale as float32, and a byte for
    each. Where the largest magnitude is less than 2⁻¹¹⁹, the scale is 0 and all is kept back.
    """

    name: ClassVar[str] = "int8"
    unit: ClassVar[int] = 1024
    largest: ClassVar[float] = 2.0**127

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return numel + 4 * -(-numel // self.unit)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        is_fine = True
        for part, scales, numbers in _rows(total, codes, self.unit, 8):
            scale = (np.maximum(part.max(1), -part.min(1)) / 127).astype(np.float32)[:, None]
            is_fine &= bool((scale <= self.largest / 127).all())
            scale[scale < _FLOAT32.tiny] = 0.0
            inverse = np.divide(1, scale, np.zeros_like(scale), where=scale > 0)
            whole = spare[: part.size].reshape(part.shape)
            _times(part, inverse, whole)
            np.rint(whole, whole)
            np.copyto(numbers.view(np.int8), whole, "unsafe")
            scales[:] = scale.view(np.uint8)
            _times(whole, scale, whole)
            np.subtract(part, whole, part)
        return is_fine

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        for part, scales, numbers in _rows(values, codes, self.unit, 8):
            part[:] = numbers.view(np.int8)
            _times(part, _scale(scales), part)

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        for _, scales, numbers in _rows(_shaped(numel), payload.numpy(), self.unit, 8):
            scale = _scale(scales)
            if not ((scale >= 0) & (scale <= self.largest / 127)).all() or numbers.view(np.int8).min() < -127:
                raise ProtocolError(
                    "a payload holds a scale or a number that 'int8' never sends; it was not written by an 'int8' "
                    "codec, or was damaged on the way"
                )


def _rows(values: Numbers, codes: Bytes, unit: int, bits: int) -> Iterator[tuple[Numbers, Bytes, Bytes]]:
    """Yield whole units together, then what is left: the values by unit, the bytes of their scales, their codes."""
    whole, nbytes = len(values) // unit, 4 + unit * bits // 8
    for start, count, size in ((0, whole, unit), (whole, 1, len(values) - whole * unit)):
        if count and size:
            width = 4 - (-size * bits // 8)
            rows = codes[start * nbytes :][: count * width].reshape(count, width)
            part = values[start * unit :][: count * size].reshape(count, size)
            yield part, rows[:, :4], rows[:, 4:]


def _scale(scales: Bytes) -> NDArray[np.float32]:
    return scales.copy().view("<f4")


def _shaped(numel: int) -> Numbers:
    """Make an array of so many elements that takes no memory. Only its shape matters."""
    return np.broadcast_to(np.float32(0), numel)


def _times(rows: Numbers, factors: Numbers, out: Numbers) -> None:
    """Multiply each row by a factor of its own; numpy takes three times as long."""
    torch.mul(torch.from_numpy(rows), torch.from_numpy(factors), out=torch.from_numpy(out))


_FLOAT32 = torch.finfo(torch.float32)

Tables = dict[str, NDArray[Any]]
"""Compute dtype, as numpy's character → a row for each of the 256 bytes: the numbers that its elements decode to."""


@dataclass(frozen=True)
class TwoBit(Codec):
    """Sends ±threshold or nothing for each element, and takes it out of the residual.

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

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        above, below = flags = np.empty((2, 4 * len(codes)), np.bool_)
        flags[:, len(total) :] = False
        np.greater_equal(total, self.threshold, above[: len(total)])
        np.less_equal(total, -self.threshold, below[: len(total)])
        codes[:] = _two_bits(above, below)
        _look_up(self._tables[total.dtype.char], codes, spare)
        return _is_finite(np.subtract(total, spare, total))

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        _look_up(self._tables[values.dtype.char], codes, values)

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

    What is above 0.7 times their mean magnitude is sent as ±1, and the scale is the mean magnitude of that, which is
    close to the least squared error (Li and Liu, Ternary Weight Networks, 2016). Zeros stay zeros, and the residual
    keeps the rest. 1,024 elements are their scale as float32, and two bits for each, coded as by '2bit'.
    """

    name: ClassVar[str] = "ternary"
    unit: ClassVar[int] = 1024
    largest: ClassVar[float] = 2.0**100

    def encoded_nbytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 4) + 4 * -(-numel // self.unit)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        is_fine = True
        for part, scales, numbers in _rows(total, codes, self.unit, 2):
            values = np.abs(part, spare[: part.size].reshape(part.shape))
            sums = values.sum(1, keepdims=True)
            is_fine &= bool(sums.max() <= self.largest)
            limit = sums * part.dtype.type(0.7 / part.shape[1])
            above, below = flags = np.empty((2, len(part), 4 * numbers.shape[1]), np.bool_)
            flags[:, :, part.shape[1] :] = False
            np.greater(part, limit, above[:, : part.shape[1]])
            np.less(part, -limit, below[:, : part.shape[1]])
            numbers[:] = _two_bits(above, below)
            self._signs(numbers, values)
            sent, count = (np.einsum("ij,ij->i", values, other)[:, None] for other in (part, values))
            scale = (sent / np.maximum(count, 1)).astype(np.float32)
            scales[:] = scale.view(np.uint8)
            _times(values, scale, values)
            np.subtract(part, values, part)
        return is_fine

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        for part, scales, numbers in _rows(values, codes, self.unit, 2):
            self._signs(numbers, part)
            _times(part, _scale(scales), part)

    def _signs(self, numbers: Bytes, values: Numbers) -> None:
        """Overwrite `values`, a row for each unit, with −1, 0 and 1, as their codes say."""
        row = values.shape[1]
        if row % 4:
            _look_up(_SIGNS[values.dtype.char], numbers[0], values[0])
        else:
            _look_up(_SIGNS[values.dtype.char], numbers.reshape(-1), values.reshape(-1))

    def check_payload(self, payload: Tensor, dtype: str, numel: int) -> None:
        super().check_payload(payload, dtype, numel)
        for _, scales, numbers in _rows(_shaped(numel), payload.numpy(), self.unit, 2):
            scale = _scale(scales)
            if not ((scale >= 0) & (scale <= self.largest)).all() or (numbers & ~(numbers >> 1) & 0x55).any():
                raise ProtocolError(
                    "a payload holds a scale or a code that 'ternary' never sends; it was not written by a 'ternary' "
                    "codec, or was damaged on the way"
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

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        codes[:] = np.packbits(total > self.threshold)
        _look_up(self._tables[total.dtype.char], codes, spare)
        return _is_finite(np.subtract(total, spare, total))

    def _dequantise(self, codes: Bytes, dtype: str, values: Numbers) -> None:
        _look_up(self._tables[values.dtype.char], codes, values)


def _tables(values: Sequence[float]) -> Tables:
    """Return the numbers that each byte stands for. A code of the fewest bits that hold it means `values[code]`."""
    width = (len(values) - 1).bit_length()
    shifts = np.arange(8 - width, -1, -width)
    codes = np.arange(256)[:, None] >> shifts & len(values) - 1
    return {kind: np.array(values, kind)[codes] for kind in "fd"}


_FOUR = np.dtype("<u4")
_SIDE_BY_SIDE = {code: np.uint32(code * 0x40100401 % 2**32) for code in (2, 3)}
"""Four bytes that are 0 or 1, as one number, times this: the highest byte has the code for each 1, side by side."""
_SIGNS = _tables((0.0, 0.0, -1.0, 1.0))


def _two_bits(above: NDArray[np.bool_], below: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the bytes of four elements each: 11 for those above, 10 for those below, else 00."""
    return (above.view(_FOUR) * _SIDE_BY_SIDE[3] + below.view(_FOUR) * _SIDE_BY_SIDE[2]) >> 24


def _look_up(table: NDArray[Any], codes: Bytes, values: Numbers) -> None:
    width = table.shape[1]
    whole = len(values) // width
    np.take(table, codes[:whole], 0, values[: whole * width].reshape(whole, width), "clip")
    if whole * width < len(values):
        values[whole * width :] = table[codes[whole]][: len(values) - whole * width]


@dataclass(frozen=True)
class TopK(Codec):
    """Sends the elements of largest magnitude as they are, and keeps the others back.

    Of every 65,536 elements, and of what is left behind the last of them, a share of `ratio` is sent, rounded up; of
    equal magnitudes those that come first. A share is its numbers in the compute dtype, in ascending order of their
    positions, and those positions as uint16.

    Raises:
        ConfigurationError: the ratio is not a number from 1/65,536 to a quarter.
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
        """Return the number of elements that are sent of `numel` in one unit."""
        return min(math.ceil(self.ratio * numel), numel)

    def _quantise(self, total: Numbers, codes: Bytes, spare: Numbers) -> bool:
        # Without the sign, a float's bits as a whole number are in the order of magnitudes, NaNs too.
        whole = np.dtype(f"i{total.itemsize}")
        magnitudes = np.bitwise_and(total.view(whole), np.iinfo(whole).max, spare.view(whole))
        chosen = _largest(magnitudes, self._count(len(total)))
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
                    f"a payload does not name finite numbers at ascending positions below {end - start}, as 'topk' "
                    "does; it was not written by a 'topk' codec, or was damaged on the way"
                )

    def _read(self, codes: Bytes, dtype: torch.dtype) -> tuple[Numbers, NDArray[np.uint16]]:
        """Return the numbers of one unit and their positions."""
        size = len(codes) // (dtype.itemsize + 2) * dtype.itemsize
        return codes[:size].view(f"<f{dtype.itemsize}"), codes[size:].view("<u2")


def _largest(magnitudes: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Positions of the `count` largest numbers, ascending; of equal ones those that come first."""
    near = np.arange(0)
    sample = magnitudes[::_SAMPLED]
    # Nearly always there are enough numbers above this one of the sample, and few; otherwise all are looked at.
    share = count / _SAMPLED
    rank = len(sample) - math.ceil(share + 4 * math.sqrt(share) + 2)
    if rank > 0:
        near = np.flatnonzero(magnitudes > np.partition(sample, rank)[rank])
    if len(near) < count:
        near = np.arange(len(magnitudes))
    among = magnitudes[near]
    edge = np.partition(among, len(among) - count)[len(among) - count]
    is_chosen = among > edge
    ties = np.flatnonzero(among == edge)
    is_chosen[ties[: count - np.count_nonzero(is_chosen)]] = True
    chosen: NDArray[np.intp] = near[is_chosen]
    return chosen


_SAMPLED = 64
"""One number of so many is looked at to find out which may be among the largest."""


_CODECS = {
    cls.name: cls for cls in (NoCompression, OneBit, TwoBit, Ternary, EightBit, Float16, BFloat16, TopK)
}


def make_codec(params: Mapping[str, Any] | None) -> Codec:
    """Return the codec that Gluon's `compression_params` or a `Codec.spec` describe.

    Args:
        params: `type`: 'none', '1bit', '2bit', 'ternary', 'int8', 'fp16', 'bf16' or 'topk', in any case; `threshold`
            for '1bit' and '2bit' (0.5), `ratio` for 'topk' (0.01). None: no compression.

    Raises:
        UnknownNameError: there is no such type; lists the valid ones.
        ConfigurationError: not a mapping, no type, an entry that the type does not know, or a bad number.
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
