"""Keys and values of kvstore calls: validation and conversion to one form.

The verbs take a key or a list of keys, and for each a tensor, or a list of replicas. `read_values` turns all of these
into a sequence of keys and `Values`; `read_row_pulls` does the same for `row_sparse_pull`. `targets_of_values` decides
where received weights are written: directly into an `out` that is flat and of the key's dtype, otherwise into a buffer
that is copied to `out` afterwards.

Everything here is checked before anything is sent. These functions run for every key of every call, so they avoid
work per tensor on the common path: one dense tensor for each key.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.errors import ConfigurationError, KeyNotFoundError, ShapeMismatchError
from kvstore_server.plan import ITEM_SIZE, TensorSpec
from kvtrainer.client.tables import RemoteTable
from kvtrainer.common.tensors import is_one_id_tensor, is_sparse_tensor, read_id_tensor, tensor_dtype_name
from kvtrainer.kvstore.base import Key

_INT_LIMIT = 1 << 63


class ValueEntry:
    """A key of a store, with its spec and its table."""

    __slots__ = ("dtype", "spec", "table")

    def __init__(self, spec: TensorSpec, table: RemoteTable) -> None:
        self.spec, self.table = spec, table
        self.dtype = torch_dtype(spec.dtype)

    def new_arena(self) -> dict[str, Tensor]:
        return {self.spec.dtype: torch.empty(self.spec.numel, dtype=self.dtype, device="cpu")}


class RowPull(NamedTuple):
    """One set of rows of one key, and the tensors that receive them."""

    entry: ValueEntry
    ids: Tensor
    """int64, distinct and ascending."""
    outs: Sequence[Tensor]


class Values(NamedTuple):
    """The first tensor of each key, and further replicas. Thousands of lists would burden the garbage collector."""

    first: list[Tensor]
    others: dict[int, list[Tensor]]
    """Replicas after the first, by position of the key."""

    def lists(self) -> Iterator[list[Tensor]]:
        for at, one in enumerate(self.first):
            yield [one, *self.others.get(at, ())]

    @classmethod
    def of(cls, lists: Iterable[list[Tensor]]) -> Values:
        found = cls([], {})
        for at, (one, *others) in enumerate(lists):
            found.first.append(one)
            if others:
                found.others[at] = others
        return found


def flat_view(tensor: Tensor) -> Tensor | None:
    """Return a flat view of a dense CPU tensor, or None if that would need a copy."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def targets_of_values(
    entries: Sequence[ValueEntry], outs: Values
) -> tuple[list[dict[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Choose the memory that receives the new values of each key.

    Returns:
        The arena of each key, which is its first `out` where that is flat and of the key's dtype; and (out, source)
        pairs for the tensors that have to be copied from an arena afterwards.
    """
    arenas: list[dict[str, Tensor]] = []
    others: list[tuple[Tensor, Tensor]] = []
    for at, (entry, first) in enumerate(zip(entries, outs.first, strict=True)):
        flat = flat_view(first) if first.dtype is entry.dtype else None
        if flat is None:
            flat = torch.empty(entry.spec.numel, dtype=entry.dtype, device="cpu")
            others.append((first.detach(), flat))
        arenas.append({entry.spec.dtype: flat})
        if at in outs.others:
            others += [(out.detach(), flat) for out in outs.others[at]]
    return arenas, others


def read_values(key: Any, value: Any, what: str) -> tuple[Sequence[Key], Values]:
    """Normalise (key, value) or (keys, values) to keys and Values. Keys may repeat.

    Unknown keys are not validated here; see `check_value_keys`.

    Raises:
        ConfigurationError: A value is not a suitable tensor, or the lists differ in length.
    """
    if not isinstance(key, list | tuple):
        key, value = (key,), (value,)
    if not isinstance(value, list | tuple) or len(value) != len(key):
        check_value_keys(key)
        got = f"{len(value)} values" if isinstance(value, list | tuple) else f"{type(value).__name__}"
        raise ConfigurationError(f"{len(key)} keys need a list of {len(key)} values in {what}, got {got}")
    first: list[Tensor] = []
    others: dict[int, list[Tensor]] = {}
    for at, item in enumerate(value):
        # A single dense tensor is by far the most frequent value.
        if isinstance(item, Tensor) and item.layout is torch.strided and not item.is_meta:
            first.append(item)
        else:
            one, *more = _replica_values(key[at], item, what)
            first.append(one)
            if more:
                others[at] = more
    return key, Values(first, others)


def check_value_keys(keys: Sequence[Any]) -> None:
    kinds = {type(check_value_key(one)) for one in keys}
    if len(kinds) > 1:
        raise ConfigurationError(f"the keys of one call must all be int or all be str, got {list(keys)!r}")


def check_value_key(key: Any) -> Key:
    """Return the key if it is a str or a 64-bit int. Raises ConfigurationError otherwise."""
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ConfigurationError(f"a key must be an int or a str, got {key!r} of type {type(key).__name__}")
    if isinstance(key, str):
        check_text("key", key)
    elif not -_INT_LIMIT <= key < _INT_LIMIT:
        raise ConfigurationError(
            f"a key that is an int has up to 64 bits, got one of {key.bit_length()} bits"
        )
    return key


def check_text(what: str, text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{what} {text!a:.80} has the surrogate {text[error.start]!a} at position {error.start}, which is no "
            "character; decode the bytes that it came from with their true encoding"
        ) from None


def spec_of_value(key: Key, value: Tensor, others: Collection[str] = ()) -> TensorSpec:
    """Return the spec of a key from its first value.

    Args:
        others: Names of dtypes that the store accepts in addition to those of ITEM_SIZE.

    Raises:
        ConfigurationError: The dtype cannot be stored.
    """
    name = tensor_dtype_name(value.dtype)
    if name not in ITEM_SIZE and name not in others:
        named = ", ".join((*ITEM_SIZE, *others))
        raise ConfigurationError(f"key {key!r} has dtype {name}; this store holds {named} only")
    return TensorSpec(str(key), tuple(value.shape), name)


def check_out_value(spec: TensorSpec, out: Tensor) -> None:
    """Raise ShapeMismatchError or ConfigurationError unless `out`, of any dtype, can receive a key's values."""
    if out.shape != spec.shape:
        raise shape_mismatch_error(spec, out)
    if out.layout is not torch.strided:
        raise ConfigurationError(
            f"out of key {spec.key!r} is sparse, but pull writes the whole key; give a dense tensor, or call "
            "row_sparse_pull for some rows"
        )
    if out.is_contiguous():
        return
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ShapeMismatchError(
            f"out of key {spec.key!r} has shape {list(out.shape)} but strides {list(out.stride())}: several elements "
            "share memory, as after expand(); pass a tensor with its own memory, such as out.clone()"
        )


def check_on_cuda(devices: Sequence[torch.device], what: str) -> None:
    others = sorted({str(device) for device in devices if device.type != "cuda"})
    if others:
        raise ConfigurationError(
            f"kvstore 'nccl' takes CUDA tensors only, but {what} are on {', '.join(others)}; use 'device'"
        )


def read_row_pulls(
    entries: Mapping[Key, ValueEntry], key: Any, out: Any, row_ids: Any
) -> tuple[list[list[RowPull]], list[bool]]:
    """Read the arguments of row_sparse_pull.

    Returns:
        For each key its pulls, one for each set of ids; and whether several sets were given for it.

    Raises:
        ConfigurationError: The arguments do not fit together, or ids are not whole numbers.
        KeyNotFoundError: A key was never initialised.
        ShapeMismatchError: A key has no rows, or an `out` does not have its shape.
        RowIdError: An id is out of range.
    """
    if row_ids is None:
        raise ConfigurationError("row_sparse_pull needs row_ids=…: the rows that are wanted")
    if not isinstance(key, list | tuple):
        keys, outs, ids = [key], [out], [row_ids]
    else:
        keys = list(key)
        outs = _values_for_each_key(keys, out, "out") if out is not None else [None] * len(keys)
        ids = (
            [row_ids] * len(keys)
            if is_one_id_tensor(row_ids)
            else _values_for_each_key(keys, row_ids, "row_ids")
        )
    pulls = [_row_pull_values(entries, *row) for row in zip(keys, outs, ids, strict=True)]
    return pulls, [not is_one_id_tensor(one) for one in ids]


def as_sparse_value(spec: TensorSpec, ids: Tensor, rows: Tensor) -> Tensor:
    values = rows.view(len(ids), *spec.shape[1:])
    return torch.sparse_coo_tensor(
        ids[None], values, spec.shape, is_coalesced=True, check_invariants=False, device=values.device
    )


@torch.no_grad()
def write_row_values(out: Tensor, rows: Tensor) -> None:
    """Write the rows of a sparse tensor to `out`, and zeros to its other rows."""
    if is_sparse_tensor(out):
        # Not through detach(), which would give a tensor with separate indices.
        out.copy_(rows)
        return
    ids, values = rows._indices()[0], rows._values()
    out.zero_()
    out[ids.to(out.device)] = values.to(out.device, out.dtype)


def _replica_values(key: Key, value: Any, what: str) -> list[Tensor]:
    tensors = list(value) if isinstance(value, list | tuple) else [value]
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise ConfigurationError(
            f"{what} of key {key!r} must be a tensor or a list of tensors, got {value!r:.80}"
        )
    for one in tensors:
        if is_sparse_tensor(one) and (one.layout is not torch.sparse_coo or one.sparse_dim() != 1):
            form = f" with sparse_dim {one.sparse_dim()}" if one.layout is torch.sparse_coo else ""
            raise ConfigurationError(
                f"{what} of key {key!r} is sparse, of shape {list(one.shape)} and layout {one.layout}{form}; it must "
                "be a sparse COO tensor with sparse_dim 1, which has whole rows"
            )
    if any(one.is_meta for one in tensors):
        raise ConfigurationError(
            f"{what} of key {key!r} is on the meta device and has no values; make it on a real device first"
        )
    return tensors


def shape_mismatch_error(spec: TensorSpec, value: Tensor) -> ShapeMismatchError:
    return ShapeMismatchError(
        f"key {spec.key!r} holds {spec.dtype}{list(spec.shape)}, got "
        f"{tensor_dtype_name(value.dtype)}{list(value.shape)}"
    )


def _row_pull_values(entries: Mapping[Key, ValueEntry], key: Key, out: Any, row_ids: Any) -> list[RowPull]:
    entry = entries.get(key)
    if entry is None:
        raise KeyNotFoundError(f"key {key!r} has not been initialised; call init or broadcast first")
    if not entry.spec.shape:
        raise ShapeMismatchError(f"key {key!r} has no dimension, hence no rows; use pull")
    outs = _row_out_values(entry, key, out)
    sets = [row_ids] if is_one_id_tensor(row_ids) else list(row_ids)
    found = [read_id_tensor(repr(key), one, entry.spec.shape[0]) for one in sets]
    # One set of ids serves all outs; several sets need one out each.
    if len(found) == 1:
        return [RowPull(entry, found[0], outs)]
    if out is not None and len(outs) != len(found):
        raise ConfigurationError(
            f"key {key!r} has {len(outs)} outs but {len(found)} row_ids; give one for each, or one for all"
        )
    return [RowPull(entry, ids, outs[at : at + 1]) for at, ids in enumerate(found)]


def _row_out_values(entry: ValueEntry, key: Key, out: Any) -> list[Tensor]:
    outs = (
        [] if out is None or (isinstance(out, list | tuple) and not out) else _replica_values(key, out, "out")
    )
    for one in outs:
        if not is_sparse_tensor(one):
            check_out_value(entry.spec, one)
        elif one.shape != entry.spec.shape:
            raise shape_mismatch_error(entry.spec, one)
    return outs


def _values_for_each_key(keys: Sequence[Key], given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple) or len(given) != len(keys):
        got = f"{len(given)}" if isinstance(given, list | tuple) else type(given).__name__
        raise ConfigurationError(f"{len(keys)} keys need a list of {len(keys)} {what}, got {got}")
    return list(given)
