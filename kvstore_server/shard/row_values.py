"""Values of rows of a hash table that follow from what is known without the table: initial ones, and factors.

All are the same on every machine, and do not depend on which rows are computed together.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvstore_server.plan import HashTableOptions
from kvstore_server.shard.id_index import Ints


def initial_rows(options: HashTableOptions, name: str, rows: Ints, width: int, dtype: torch.dtype) -> Tensor:
    """Return the initial values of rows: a function of the seed, the table's name, the row number and the column.

    Each number takes one 64-bit word, a counter passed through the finaliser of SplitMix64 (Steele, Lea and Flood,
    2014). Uniform numbers are 24 bits of it. Normal ones are the sum of four uniform 16-bit numbers, which has the
    mean, the variance and (to 3.46 deviations) about the form of a normal distribution, and needs only whole numbers
    and one product: so the bits are the same on every machine.
    """
    found = _drawn_rows(options, name, rows, width, dtype)
    if options.max_norm:
        limit_norms(found, options.max_norm)
    return found


def limit_norms(rows: Tensor, max_norm: float) -> Ints:
    """Scale rows whose norm is larger than this, as torch.nn.Embedding does; return which these are."""
    norms = torch.linalg.vector_norm(rows.double(), dim=1)
    too_large = (norms > max_norm).nonzero()[:, 0]
    if len(too_large):
        factors = max_norm / (norms[too_large] + _NORM_EPSILON)
        rows[too_large] = (rows[too_large].double() * factors[:, None]).to(rows.dtype)
    changed: Ints = too_large.numpy()
    return changed


def multiply_rows(rows: Tensor, logarithms: npt.NDArray[np.float64]) -> None:
    """Multiply each row by a factor, given by its logarithm."""
    if not logarithms.any():
        return
    # By Python, once for each factor: vector loops round some of them differently.
    distinct, places = np.unique(logarithms, return_inverse=True)
    factors = torch.tensor([math.exp(one) for one in distinct.tolist()], dtype=torch.float64, device="cpu")
    rows.copy_(rows.double().mul_(factors[torch.from_numpy(places)][:, None]))


def move_rows(
    rows: Tensor,
    momentum: Tensor,
    mu: float,
    missed: Ints,
    logarithms: npt.NDArray[np.float64],
    last: float = 0.0,
) -> None:
    """Change rows, and their momentum, as rounds in which they had no gradient do: `m = mu m; w = d w - m` each.

    This is SGD with momentum and decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 1, SGDW) without
    gradients. After k rounds `m_k = mu**k m` and `w_k = d**k w - (mu**k + mu**(k-1) d + ... + mu d**(k-1)) m`, a
    geometric sum. d is the mean factor of these rounds, so the sum is exact if their learning rate is the same.

    Args:
        missed: The k of each row.
        logarithms: Of the product of all factors d of each row.
        last: Included in these, the logarithm of a factor by which rows are multiplied after the k rounds.
    """
    # By Python, once for each pair: vector loops round some of them differently.
    pairs, places = np.unique(
        np.stack([missed.astype(np.float64), logarithms], 1), axis=0, return_inverse=True
    )
    factors = []
    for count, logarithm in pairs.tolist():
        decay = logarithm - last
        moved = _geometric_sum(math.log(mu), decay / count, count) if count else 0.0
        factors.append((math.exp(logarithm), moved * math.exp(last), mu**count))
    found = torch.tensor(factors, dtype=torch.float64, device="cpu").view(-1, 3)
    decayed, moved_by, kept = found.index_select(0, torch.from_numpy(places.reshape(-1))).T[:, :, None]
    wide = momentum.double()
    rows.copy_(rows.double().mul_(decayed).sub_(wide * moved_by))
    momentum.copy_(wide.mul_(kept))


def _geometric_sum(a: float, b: float, count: float) -> float:
    """Return the sum of exp(j a + (count - j) b) for j = 1 to count."""
    ratio = -abs(a - b)
    terms = math.expm1(count * ratio) / math.expm1(ratio) if ratio else count
    # The largest term is factored out: the first one, or the last.
    return math.exp(a + (count - 1) * b if a < b else count * a) * terms


_NORM_EPSILON = 1e-7
"""torch adds this to a norm that it divides by, so that the scaled row is not above the limit by rounding."""


def _drawn_rows(options: HashTableOptions, name: str, rows: Ints, width: int, dtype: torch.dtype) -> Tensor:
    found = torch.empty(len(rows), width, dtype=dtype, device="cpu")
    if options.init == "constant":
        return found.fill_(options.scale)
    digest = hashlib.blake2b(f"{options.seed} {name}".encode(), digest_size=8).digest()
    word = np.dtype(np.uint64).type
    key, golden = word(int.from_bytes(digest, "little")), 0x9E3779B97F4A7C15
    columns = np.arange(1, width + 1, dtype=np.uint64) * word(golden)
    words = _mixed(rows.view(np.uint64) ^ key)[:, None] + columns
    words = _mixed(words)
    if options.init == "uniform":
        unit = torch.from_numpy((words >> word(40)).astype(np.int32))
        found.copy_(
            unit.to(torch.promote_types(dtype, torch.float32)).mul_(2.0**-23).sub_(1.0).mul_(options.scale)
        )
        return found
    low = word(0xFFFF)
    total = (words & low) + (words >> word(16) & low) + (words >> word(32) & low) + (words >> word(48))
    centered = torch.from_numpy(total.astype(np.int64) - 2 * 0xFFFF)
    factor = options.scale / _DEVIATION
    return found.copy_(centered.to(torch.promote_types(dtype, torch.float32)).mul_(factor))


_DEVIATION = (4 * (65536.0**2 - 1) / 12) ** 0.5
"""Of the sum of four uniform 16-bit numbers."""


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = np.dtype(np.uint64).type
    words = (words ^ (words >> word(30))) * word(0xBF58476D1CE4E5B9)
    words ^= words >> word(27)
    words *= word(0x94D049BB133111EB)
    words ^= words >> word(31)
    return words
