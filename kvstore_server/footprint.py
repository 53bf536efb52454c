"""How much memory a table needs on one server, as far as that is known before it has any."""

from __future__ import annotations

import functools

import torch

from kvstore_server.dense import DenseTable
from kvstore_server.errors import KVStoreError
from kvstore_server.hyper import effective_hypers
from kvstore_server.modes import Mode
from kvstore_server.optimizer import Optimizer, create_from_spec
from kvstore_server.plan import ITEM_SIZE, Plan, TensorSpec, make_plan
from kvstore_server.protocol.control import pack_control, unpack_control
from kvstore_server.reduction import Addend, torch_dtype
from kvstore_server.slicing import SIZES

NAMESPACE, MEMBER, KEY = 16 << 10, 1 << 10, 1 << 10
"""Bytes that one of them occupies, roughly, beside what the tables hold."""
_TABLE, _SLICE = 12 << 10, 1 << 10
_PROBE = (64, 64)


def footprint(plan: Plan, server: int, num_workers: int, mode: Mode, optimizer: Optimizer | None) -> int:
    """Bytes of a table's weights on a server, of their sum, and of the state of the optimizer that was named.

    Of row-sparse keys and their sums, what is pushed counts as nothing. Contributions that wait for those of other
    ranks come on top: up to one copy of the weights each.
    """
    total = _TABLE + KEY * len(plan.specs) + _SLICE * len(plan.slices) + 8 * num_workers
    for piece in plan.slices_of(server):
        weights = piece.length * SIZES[piece.dtype]
        state = 0.0
        if optimizer is not None and piece.dtype in ITEM_SIZE:  # which does not update integers
            state = weights * _state_bytes(pack_control(optimizer.spec()), piece.dtype)
            state += (weights + state) * optimizer.may_raise  # what a failed update goes back to
            state += weights * num_workers * (optimizer.delay_state is not None and not mode.is_sync)
        total += weights + int(state) + weights * plan.is_resident(piece)
    return total


@functools.lru_cache(maxsize=64)
def _state_bytes(spec: bytes, dtype: str) -> float:
    """Bytes of optimizer state for each byte of weights, found by one update of a small key; 0 where that fails.

    Optimizers that users wrote are not tried out, for that could change them.
    """
    described = unpack_control(spec)
    optimizer = create_from_spec(described)
    if optimizer.may_raise:
        return 0.0
    optimizer.mute()
    plan = make_plan([TensorSpec("key", _PROBE, dtype)], 1, not optimizer.elementwise)
    table = DenseTable(plan, 0)
    zeros = torch.zeros(_PROBE, dtype=torch_dtype(dtype)).view(-1)
    try:
        given = Addend({piece.index: zeros[: piece.used] for piece in plan.slices}, 1.0, frozenset())
        table.update([given], optimizer, effective_hypers(plan, optimizer, {}))
    except KVStoreError:
        return 0.0
    return table.state_nbytes / zeros.nbytes
