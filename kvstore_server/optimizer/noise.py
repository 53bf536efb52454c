"""Noise by counters: a function of a name and a place, wherever and in whichever order it is drawn."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_BLOCK = 16384
"""Elements drawn at once: torch does not share so few among threads, and they stay in the cache."""
_UNIT = 64
"""Every draw is of a multiple of so many, since the ends of other vectors may be rounded differently."""


def normal(stream: tuple[object, ...], first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw from N(0, 1) the elements `first` to `first + count` of a stream: a function of its name and a counter.

    So its parts can be drawn anywhere, in any order. Each element gets one 64-bit word: its counter, taken twice
    through the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), with 128 key bits from a hash of the stream's
    name. 40 bits of the word are the radius and 24 the angle of the Box-Muller transform, in float64; so no value is
    above 7.5.

    Args:
        stream: its name: plain values such as numbers and strings. Different names give independent noise.

    Returns:
        float64[count]; any part of a stream has the same bits whichever way it is drawn (on one kind of device).
    """
    name = repr(stream).encode()
    digest = hashlib.blake2b(name, digest_size=16).digest()
    keys = (_signed(int.from_bytes(digest[:8], "little")), _signed(int.from_bytes(digest[8:], "little")))
    begin, end = first - first % _UNIT, first + count + -(first + count) % _UNIT
    drawn = torch.empty(end - begin, dtype=torch.float64, device=device)
    for start in range(begin, end, _BLOCK):
        block = drawn[start - begin : start - begin + _BLOCK]
        block.copy_(_block(keys, start, block.numel(), device))
    return drawn[first - begin : first - begin + count]


def _block(keys: tuple[int, int], start: int, count: int, device: torch.device | str) -> Tensor:
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    words = _mixed(_mixed(counters.mul_(_signed(0x9E3779B97F4A7C15)).add_(keys[0])).add_(keys[1]))
    angle = (words & 0xFFFFFF).double().mul_(2.0 * math.pi / 2**24)
    radius = _shifted(words, 24).add_(1).double().mul_(2.0**-40).log_().mul_(-2.0).sqrt_()
    return radius.mul_(angle.cos_())


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place; int64 products wrap as unsigned ones do."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right as if unsigned."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return word - 2**64 if word >= 2**63 else word
