"""Whether the ranks of a group are about to do the same with a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_server.errors import PlanMismatchError, ProtocolError
from kvstore_server.plan import TensorSpec, check_same


def check_same_call(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> None:
    """Raise ProtocolError or PlanMismatchError, with both sides named, unless two ranks said the same of a call."""
    if first["verb"] != other["verb"] or first.get("keys") != other.get("keys"):
        raise ProtocolError(
            f"rank 0 calls {first['verb']}({first.get('keys', '')}) and rank {rank} {other['verb']}"
            f"({other.get('keys', '')}); every rank must make the same calls with the same keys in the same order"
        )
    if "specs" in first:
        specs = [[TensorSpec(k, tuple(s), d) for k, s, d in said["specs"]] for said in (first, other)]
        check_same(specs[0], specs[1], "rank 0", f"rank {rank}")
    if first.get("bucket_size_mb") != other.get("bucket_size_mb"):
        raise PlanMismatchError(
            f"ranks set different bucket sizes: bucket_size_mb is {first['bucket_size_mb']!r} on rank 0 and "
            f"{other['bucket_size_mb']!r} on rank {rank}; set the same one on every rank"
        )
    if first.get("optimizer") != other.get("optimizer"):
        raise PlanMismatchError(
            f"ranks set different optimizers: {first['optimizer']} on rank 0 and {other['optimizer']} on rank {rank}; "
            "set the same one, with the same numbers, on every rank"
        )


def error_text(error: Exception) -> str:
    """What other ranks are told of an error."""
    return f"{type(error).__name__}: {error}"[:1000]
