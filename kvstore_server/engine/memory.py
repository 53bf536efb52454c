"""Memory of a server: the limit for this process, and estimates of what a table needs."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from kvstore_server.codec import compute_dtype, torch_dtype
from kvstore_server.engine.agreed_options import effective_hypers
from kvstore_server.engine.rounds import Mode
from kvstore_server.errors import KVStoreError
from kvstore_server.optimizer import Optimizer, create_optimizer_from_spec
from kvstore_server.plan import ITEM_SIZE, SIZES, Plan, TensorSpec, make_plan
from kvstore_server.protocol.frames import pack_control, unpack_control
from kvstore_server.shard.reduction import RankContribution
from kvstore_server.shard.shard import Shard

NAMESPACE, MEMBER, KEY = 16 << 10, 1 << 10, 1 << 10
"""Rough overhead of each in bytes, without the contents of tables."""
_MALLOC_OPTIONS = ((-3, 32 << 20), (-1, 1 << 30), (-2, 64 << 20))
"""glibc's M_MMAP_THRESHOLD (not above its own dynamic maximum), M_TRIM_THRESHOLD, and M_TOP_PAD, which keeps whole
heaps of threads.
"""
_TABLE, _SLICE = 12 << 10, 1 << 10
_PROBE = (64, 64)
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FILES_V2 = "memory.max", "memory.current", "inactive_file"
_FILES_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""For control groups v2 and v1: the files with the limit and the usage, and the field with reclaimable memory."""


def memory_limit(groups: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int:
    """Return the machine's memory in bytes, or the limit of a control group if that is lower.

    Args:
        groups: Where control groups are mounted.
        own: The file that names those of this process.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _read_memory_limits(groups, own))])


def available_memory(
    groups: Path = _GROUPS, own: Path = _OWN_GROUPS, meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Return the bytes that the machine and the control groups still have available; 0 if unknown.

    Args:
        groups, own: See `memory_limit`.
        meminfo: The file that describes the machine's memory.
    """
    found = [0]
    with suppress(OSError, ValueError, StopIteration):
        found = [1024 * _read_meminfo_number("MemAvailable:", meminfo)]
    found += [limit - used for limit, used in _read_memory_limits(groups, own)]
    return max(min(found), 0)


def _read_memory_limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, usage) in bytes of each control group around this process that has a limit."""
    try:
        lines = own.read_text(errors="surrogateescape").splitlines()
        named = [line.split(":", 2) for line in lines if line.count(":") > 1]
    except OSError:
        named = [["0", "", "/"]]
    for _, controllers, name in named:
        if controllers and "memory" not in controllers.split(","):
            continue
        top, (limit, used, unused) = (groups / "memory", _FILES_V1) if controllers else (groups, _FILES_V2)
        inner = Path(name.lstrip("/"))
        # A container does not see groups outside it; it finds its own at the top.
        inner = Path() if ".." in inner.parts else inner
        for folder in (inner, *inner.parents):
            group = top / folder
            with suppress(OSError, ValueError):  # not mounted, or no limit: "max"
                most, now = int((group / limit).read_text()), 0
                with suppress(OSError, ValueError, StopIteration):
                    now = int((group / used).read_text())
                    # Inactive file pages do not count: the kernel drops them before the limit is reached.
                    now -= _read_meminfo_number(unused, group / "memory.stat")
                yield most, now


def _read_meminfo_number(name: str, file: Path) -> int:
    lines = map(str.split, file.read_text().splitlines())
    return next(int(words[1]) for words in lines if len(words) > 1 and words[0] == name)


def return_free_memory() -> None:
    """Return free memory that the C library keeps to the system, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_free_memory() -> None:
    """Let the C library keep freed memory for reuse, if it can and the environment does not configure malloc."""
    # The frames of each round are allocated and freed. By default glibc would return their memory and fault it in
    # again page by page, which takes longer than filling it.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    is_told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if set_option is not None and not is_told:
        for option, value in _MALLOC_OPTIONS:
            set_option(option, value)


def size_of_table(plan: Plan, server: int, num_workers: int, mode: Mode, optimizer: Optimizer | None) -> int:
    """Return the bytes that a table needs on one server: weights, their sum, and the state of the named optimizer.

    Pushed rows of row-sparse keys are not counted. Not included are contributions that wait for other ranks (up to one
    copy of the weights each) and weights sent as bfloat16; the copy of pipelined rounds is claimed with the first of
    them.
    """
    total = _TABLE + KEY * len(plan.specs) + _SLICE * len(plan.slices) + 8 * num_workers
    for slice_ in plan.slices_of(server):
        weights = slice_.length * SIZES[slice_.dtype]
        state = 0.0
        # Measured once per optimizer and dtype, by one update of a small key.
        if optimizer is not None and slice_.dtype in ITEM_SIZE:  # integers have no optimizer state
            state = weights * _state_memory_ratio(pack_control(optimizer.spec()), slice_.dtype)
            state += (weights + state) * optimizer.may_raise  # the copy that a failed update restores
            state += weights * num_workers * (optimizer.delay_state is not None and not mode.is_sync)
        total += weights + int(state) + weights * plan.is_resident(slice_)
    return total


def size_of_deltas(plan: Plan, server: int) -> int:
    """Return the extra bytes of a table on one server whose weights are sent as encoded changes.

    These are the weights that workers have, the stored changes (half as long as the weights in the dtype of
    computation), and scratch memory.
    """
    slices = plan.resident_slices_of(server)
    weights = sum([slice_.length * SIZES[slice_.dtype] for slice_ in slices])
    computed = [slice_.length * compute_dtype(slice_.dtype).itemsize for slice_ in slices]
    return weights + sum(computed) // 2 + 4 * max(computed, default=0)


def size_of_copy(plan: Plan, server: int, optimizer: Optimizer | None) -> int:
    total = 0.0
    spec = None if optimizer is None else pack_control(optimizer.spec())
    for slice_ in plan.slices_of(server):
        has_state = spec is not None and slice_.dtype in ITEM_SIZE
        total += (
            slice_.length
            * SIZES[slice_.dtype]
            * (1 + (_state_memory_ratio(spec, slice_.dtype) if has_state else 0.0))
        )
    return int(total)


@functools.lru_cache(maxsize=64)
def _state_memory_ratio(spec: bytes, dtype: str) -> float:
    """Return the bytes of state per byte of weights, measured by one update of a small key; 0 if that fails."""
    described = unpack_control(spec)
    optimizer = create_optimizer_from_spec(described)
    # User-defined optimizers are not tried, because that could change them.
    if optimizer.may_raise:
        return 0.0
    optimizer.mute()
    plan = make_plan([TensorSpec("key", _PROBE, dtype)], 1, not optimizer.elementwise)
    shard = Shard()
    unit = shard.add(plan)
    zeros = torch.zeros(_PROBE, dtype=torch_dtype(dtype), device="cpu").view(-1)
    try:
        given = RankContribution(shard.runs_of(unit, {dtype: zeros}))
        shard.update([given], optimizer, [effective_hypers(plan, optimizer, {})])
    except KVStoreError:
        return 0.0
    return shard.state_nbytes / zeros.nbytes
