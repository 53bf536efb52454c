"""The optimizer state of adjacent segments, and its encoding as plain numbers and one block of bytes.

An entry with one number per element is in flat memory with the layout of the weights, so that one kernel call updates
many segments. Every other entry (a plain value, or a tensor of any shape made by an optimizer of whole keys) is stored
with its segment, or with the first one if a key has several. Trees are stored as by `flatten_trees`.

Invariants: the mapping of entries of a segment may be shared between segments, so it is replaced and never changed;
segments with the same mapping and step can be updated together. Flat memory is zero where no segment has an entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore_server.errors import ProtocolError, ShapeMismatchError
from kvstore_server.optimizer.base import StateValue
from kvstore_server.optimizer.trees import decode_tree_entry, encode_tree_entry, tree_leaf_names
from kvstore_server.plan import ALIGNMENT, Slice

RESERVED = ("step", "master")
"""Reserved names of entries: the number of updates, and float32 copies of half-precision weights."""

_JSON = "json"
"""Stands for a dtype in the encoding of a value that is text, or a tree without its tensors."""
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


class FlatStateEntry(Enum):
    """Marks an entry that is in flat memory."""

    MEMORY = 0


Entries = Mapping[str, StateValue | FlatStateEntry]


@dataclass
class State:
    """The state of some elements during an update; a new one is the state before the first update."""

    values: dict[str, StateValue] = field(default_factory=dict)
    """The optimizer's entries, under its own names."""
    step: int = 0
    """The number of updates applied."""
    master: Tensor | None = None
    """float32 copies of half-precision weights (multi_precision); they follow weights that are replaced."""
    views: Mapping[str, Tensor] = field(default_factory=dict)
    """Those of the values that were views of flat memory."""

    @property
    def is_new(self) -> bool:
        """Whether the optimizer has yet to create it."""
        return not self.step and not self.values


class States:
    """The state of consecutive segments in flat memory: those of one slice, or of a whole Shard.

    Args:
        dtype: Of the weights, as named in plans.
        length: Elements of the memory, padding included.
        segments: Start and number of elements of each segment.
        device: Of the weights.
        allocate: Returns flat memory of zeros for an entry, given its name, length and dtype; None: memory of the
            process.
    """

    def __init__(
        self,
        dtype: str,
        length: int,
        segments: Sequence[tuple[int, int]] = (),
        device: torch.device | str = "cpu",
        allocate: Callable[[str, int, torch.dtype], Tensor] | None = None,
    ) -> None:
        self.dtype = dtype
        self.length = length
        self.device = torch.device(device)
        self._allocate = allocate
        self.segments: list[tuple[int, int]] = []
        self.steps = np.zeros(0, np.int64)
        """The number of updates of each segment."""
        self.entries: list[Entries] = []
        """For each segment; may be shared between segments, so it is replaced and never changed."""
        self.tensors: dict[str, Tensor] = {}
        """Name → flat memory, in the dtype that updates compute in; zero where nothing was stored."""
        self.history = 0
        """Of a slice of a hash table on its way to or from its holder; see `HashTable.history`."""
        self._shared: dict[tuple[str, ...], Entries] = {}
        self.add(segments)

    @classmethod
    def of_slice(cls, slice_: Slice, device: torch.device | str = "cpu") -> States:
        return cls(slice_.dtype, slice_.length, [(s.start, s.numel) for s in slice_.segments], device)

    def add(self, segments: Sequence[tuple[int, int]]) -> None:
        self.segments += segments
        self.steps = np.concatenate([self.steps, np.zeros(len(segments), np.int64)])
        self.entries += [self._share({})] * len(segments)

    def view(self, first: int, part: slice, *, copies: bool = True) -> State:
        """Return the common state of the segments from `first` on with the elements `part`; tensors are views.

        Args:
            copies: Whether tensors that are not in flat memory are copied, so that the former ones stay.
        """
        own = own_state_value if copies else lambda value: value
        views: dict[str, Tensor] = {}
        values: dict[str, StateValue] = {}
        for name, value in self.entries[first].items():
            if value is FlatStateEntry.MEMORY:
                values[name] = views[name] = self.tensors[name][part]
            else:
                values[name] = own(value)
        master = values.pop("master", None)
        assert master is None or isinstance(master, Tensor)
        return State(values, int(self.steps[first]), master, views)

    def keep(self, first: int, end: int, part: slice, state: State) -> None:
        """Store what an update made of a `view`; every tensor with a dimension has a number per element."""
        # 1. The common case: everything was updated in place.
        named = state.values if state.master is None else {**state.values, "master": state.master}
        if end - first == 1:
            self.steps[first] = state.step  # faster than a slice
        else:
            self.steps[first:end] = state.step
        if named.keys() == state.views.keys() == self.entries[first].keys() and all(
            map(is_, named.values(), map(state.views.__getitem__, named))
        ):
            return
        # 2. Copy what the optimizer has replaced.
        entries: dict[str, StateValue | FlatStateEntry] = {}
        has_own = False
        for name, value in named.items():
            entries[name] = value
            if isinstance(value, Tensor) and value.dim():
                memory = self.tensors[name] if name in self.tensors else self.tensor(name, value)
                # Views were updated in place; anything else is copied.
                if memory[part].data_ptr() != value.data_ptr():
                    memory[part].copy_(value.reshape(-1))
                entries[name] = FlatStateEntry.MEMORY
            else:
                has_own = True
        # One mapping for all segments with these names, so that runs are found by identity.
        shared = entries if has_own else self._shared.setdefault(tuple(entries), entries)
        if shared is not self.entries[first]:
            self.entries[first:end] = [shared] * (end - first)

    def keep_key(self, first: int, end: int, part: slice, state: State) -> None:
        """Like `keep`, for one whole key: only the master has a number per element."""
        master = None if state.master is None else state.master.view(-1)  # a key without dimensions, too
        self.keep(first, end, part, State({}, state.step, master))
        self.entries[first] = {**self.entries[first], **state.values}

    def cleared(self, name: str, like: Tensor, part: slice) -> Tensor:
        """Return the flat memory with that name, zeroed in `part`; allocated if it is new."""
        is_new = name not in self.tensors
        memory = self.tensor(name, like)[part]
        return memory if is_new else memory.zero_()

    def tensor(self, name: str, like: Tensor) -> Tensor:
        """Return the flat memory with that name; if it is new, zeroed, in the dtype that updates compute in."""
        if name not in self.tensors:
            compute = torch.float64 if self.dtype == "float64" else torch.float32
            dtype = compute if like.is_floating_point() else like.dtype
            if self._allocate is None:
                self.tensors[name] = aligned_zeros(self.length, dtype, self.device)
            else:
                self.tensors[name] = self._allocate(name, self.length, dtype)
        return self.tensors[name]

    def copy(
        self, first: int, end: int, part: slice, copied: Callable[[Tensor], Tensor] = torch.clone
    ) -> States:
        """Copy the state of some segments; `copied` copies flat memory."""
        segments = [(start - part.start, numel) for start, numel in self.segments[first:end]]
        found = States(self.dtype, part.stop - part.start, segments, self.device)
        found.steps[:] = self.steps[first:end]
        found.entries = [
            {n: own_state_value(v) for n, v in entries.items()} for entries in self.entries[first:end]
        ]
        names = {n for entries in found.entries for n, v in entries.items() if v is FlatStateEntry.MEMORY}
        found.tensors = {name: copied(memory[part]) for name, memory in self.tensors.items() if name in names}
        return found

    def copied(self) -> States:
        return self.copy(0, len(self.segments), slice(0, self.length))

    def replace(self, first: int, part: slice, other: States) -> None:
        for name, memory in other.tensors.items():
            self.tensor(name, memory)[part].copy_(memory)
        end = first + len(other.segments)
        self.steps[first:end] = other.steps
        self.entries[first:end] = [self._share(entries) for entries in other.entries]

    def restore_entries(self, segment: int, entries: Entries) -> None:
        """Set which entries a segment has, whose flat memory is there already."""
        self.entries[segment] = self._share(entries)

    def forget(self) -> None:
        self.steps[:] = 0
        self.entries = [self._share({})] * len(self.segments)
        self.tensors.clear()

    @property
    def nbytes(self) -> int:
        own = [value for entries in self.entries for value in entries.values()]
        return sum(value.nbytes for value in [*self.tensors.values(), *own] if isinstance(value, Tensor))

    def _share(self, entries: Entries) -> Entries:
        """Return the shared mapping if all entries are in flat memory; otherwise the mapping itself."""
        if any(value is not FlatStateEntry.MEMORY for value in entries.values()):
            return entries
        return self._shared.setdefault(tuple(entries), entries)


def joined(parts: Sequence[tuple[States, int]], shape: Sequence[int] | None) -> dict[str, StateValue]:
    """Return a copy of the state of a key: 'step', and its entries.

    Args:
        parts: Its segments, in order.
        shape: Of the key; None leaves entries with a number per element flat.
    """
    first, at = parts[0]
    found: dict[str, StateValue] = {"step": float(first.steps[at])}
    for name, value in first.entries[at].items():
        if value is FlatStateEntry.MEMORY:
            pieces = [
                states.tensors[name][start : start + numel]
                for states, start, numel in _locate_state_parts(parts)
            ]
            flat = torch.cat(pieces) if len(pieces) > 1 else pieces[0].clone()
            found[name] = flat if shape is None else flat.view(tuple(shape))
        else:
            found[name] = own_state_value(value)
    return found


def spread_state(
    parts: Sequence[tuple[States, int]],
    values: Mapping[str, StateValue],
    per_element: Collection[str],
) -> None:
    """Replace the state of a key by what `joined` returned, possibly elsewhere.

    Without 'step' the key counts as never updated. A tensor of a shape of its own is stored with the first segment.

    Args:
        parts: Its segments, in order.
        per_element: Names of the entries that have a number per element.

    Raises:
        ShapeMismatchError: One has another number of elements than the key; nothing has changed.
    """
    given = {
        n: torch.as_tensor(v, device=getattr(v, "device", "cpu"))
        for n, v in values.items()
        if n in per_element
    }
    flat = {n: v.detach().reshape(-1) for n, v in given.items()}
    others = {n: own_state_value(v) for n, v in values.items() if n not in flat and n != "step"}
    size = sum(numel for _, _, numel in _locate_state_parts(parts))
    for name, tensor in flat.items():
        if tensor.numel() != size:
            raise ShapeMismatchError(
                f"state {name!r} has {tensor.numel()} elements, but its key has {size}; load the state of the "
                "same model"
            )
    at = 0
    for (states, index), (_, start, numel) in zip(parts, _locate_state_parts(parts), strict=True):
        for name, tensor in flat.items():
            states.tensor(name, tensor)[start : start + numel].copy_(tensor[at : at + numel])
        states.steps[index] = int(values.get("step", 0))
        states.entries[index] = states._share({**others, **dict.fromkeys(flat, FlatStateEntry.MEMORY)})
        # Tensors of other shapes belong to the first segment alone, and with them trees that contain them.
        others = {n: v for n, v in others.items() if not (isinstance(v, Tensor) and v.dim())}
        there = others.keys() | flat.keys()
        others = {n: v for n, v in others.items() if there.issuperset(tree_leaf_names(v))}
        at += numel


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeroed memory that starts on a 64-byte boundary. On the CPU pages are provided as they are written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    nbytes = numel * dtype.itemsize
    # numpy's zeros are pages that the system provides on first write (calloc).
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[start : start + nbytes]).view(dtype)


def pack_states(states: States) -> tuple[dict[str, Any], bytes]:
    """Return (summary, data): the tensors are in `data` in the order of the summary."""
    summary, parts = describe_states(states)
    return summary, b"".join(map(bytes_of, parts))


def describe_states(states: States) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the summary of some state as plain values, and its tensors, not copied."""
    tensors: list[tuple[str, Tensor, int]] = [(name, memory, -1) for name, memory in states.tensors.items()]
    rows: list[dict[str, Any]] = []
    for index, entries in enumerate(states.entries):
        rows.append({})
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dim():
                tensors.append((name, value, index))
            elif isinstance(value, Tensor):
                rows[-1][name] = [value.item(), _state_dtype_name(value)]
            elif type(value) is float:
                rows[-1][name] = [value, ""]
            else:
                rows[-1][name] = (
                    None if value is FlatStateEntry.MEMORY else [json.dumps(encode_tree_entry(value)), _JSON]
                )
    # Flat memory (index -1) comes first, then tensors of single segments.
    parts = [tensor.detach().cpu().contiguous() for _, tensor, _ in tensors]
    named = [[name, _state_dtype_name(t), list(t.shape), index] for name, t, index in tensors]
    return {"steps": states.steps.tolist(), "entries": rows, "tensors": named}, parts


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def unpack_states(slice_: Slice, summary: Mapping[str, Any], data: bytes) -> States:
    """Decode the state of a slice. Raises ProtocolError unless summary and data describe such a state."""
    try:
        return _unpack_state(slice_, summary, data)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise ProtocolError(f"this is not the optimizer state of slice {slice_.index}: {error}") from None


def _unpack_state(slice_: Slice, summary: Mapping[str, Any], data: bytes) -> States:
    # 1. The plain values of each segment.
    found, count = States.of_slice(slice_), len(slice_.segments)
    steps = [int(step) for step in summary["steps"]]
    rows = [
        {str(name): _unpack_state_value(value) for name, value in row.items()} for row in summary["entries"]
    ]
    if len(steps) != count or len(rows) != count:
        raise ValueError(f"it has {len(steps)} segments, the slice has {count}")
    # 2. The tensors: per element in flat memory, others with their segment.
    at = 0
    for name, dtype, shape, index in summary["tensors"]:
        tensor = _read_state_tensor(data, at, str(name), dtype, shape)
        at += tensor.nbytes
        if 0 <= index < count:
            rows[index][str(name)] = tensor
        elif tuple(shape) == (slice_.length,):
            found.tensors[str(name)] = tensor
        else:
            raise ValueError(f"{name!r} has the shape {list(shape)}, the slice {slice_.length} elements")
    if at != len(data):
        raise ValueError(f"it has {len(data)} bytes, its tensors need {at}")
    # 3. Every value that names a tensor must have one.
    missing = {n for row in rows for n, v in row.items() if v is FlatStateEntry.MEMORY} - found.tensors.keys()
    if missing or any(row.get("master", FlatStateEntry.MEMORY) is not FlatStateEntry.MEMORY for row in rows):
        raise ValueError(f"{sorted(missing) or 'master'} should have a number per element")
    for row in rows:
        leaves = [name for value in row.values() for name in tree_leaf_names(value)]
        are_tensors = all(isinstance(row.get(name), Tensor | FlatStateEntry) for name in leaves)
        if len(set(leaves)) < len(leaves) or not are_tensors:
            raise ValueError("the tensors of a tree are not there")
    found.steps[:] = steps
    found.entries = [found._share(row) for row in rows]
    return found


def _read_state_tensor(data: bytes, at: int, name: str, dtype: Any, shape: Any) -> Tensor:
    if dtype not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name!r} is {dtype}{shape}")
    kind: torch.dtype = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    if size > len(data) - at:
        raise ValueError(f"{name!r} needs {size} bytes, {len(data) - at} are left")
    if not size:
        return torch.empty(shape, dtype=kind, device="cpu")
    # Copied, because the message's memory is neither ours nor aligned.
    return torch.frombuffer(bytearray(memoryview(data)[at : at + size]), dtype=kind).reshape(shape)


def _unpack_state_value(value: Any) -> StateValue | FlatStateEntry:
    if value is None:
        return FlatStateEntry.MEMORY
    number, dtype = value
    if dtype == _JSON:
        return decode_tree_entry(json.loads(number))
    if not isinstance(number, int | float) or (dtype and dtype not in _DTYPES):
        raise ValueError(f"{value!r} is no number")
    return torch.tensor(number, dtype=getattr(torch, dtype), device="cpu") if dtype else number


def _state_dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _locate_state_parts(parts: Sequence[tuple[States, int]]) -> list[tuple[States, int, int]]:
    return [(states, *states.segments[index]) for states, index in parts]


def own_state_value(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
