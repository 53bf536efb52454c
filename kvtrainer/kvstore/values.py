"""Keys and values as kvstore verbs get them, checked and brought into one form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvstore_server.codec import torch_dtype
from kvstore_server.errors import ConfigurationError, KeyNotFoundError, ShapeMismatchError
from kvstore_server.plan import ITEM_SIZE, TensorSpec
from kvtrainer.client.tables import RemoteTable
from kvtrainer.common.tensors import _is_one_set, dtype_name, is_sparse, read_ids
from kvtrainer.kvstore.base import Key

_INT_LIMIT = 1 << 63


class Entry:
    """A key that a store has: its spec and its table."""

    __slots__ = ("dtype", "spec", "table")

    def __init__(self, spec: TensorSpec, table: RemoteTable) -> None:
        self.spec, self.table = spec, table
        self.dtype = torch_dtype(spec.dtype)

    def new_arena(self) -> dict[str, Tensor]:
        """Make room for the key's values; not initialised."""
        return {self.spec.dtype: torch.empty(self.spec.numel, dtype=self.dtype, device="cpu")}


class RowPull(NamedTuple):
    """One set of rows of one key, and the tensors that they go to."""

    entry: Entry
    ids: Tensor
    """int64, distinct and ascending."""
    outs: Sequence[Tensor]


class Values(NamedTuple):
    """Tensors of some keys: the first one of each, and the others of those that have several.

    There is no list for each key: of thousands, the garbage collector would look at all of them again and again.
    """

    first: list[Tensor]
    others: dict[int, list[Tensor]]
    """By position of the key."""

    def lists(self) -> Iterator[list[Tensor]]:
        """Yield all tensors of each key."""
        for at, one in enumerate(self.first):
            yield [one, *self.others.get(at, ())]

    @classmethod
    def of(cls, lists: Iterable[list[Tensor]]) -> Values:
        """Tensors of keys that have one at least each."""
        found = cls([], {})
        for at, (one, *others) in enumerate(lists):
            found.first.append(one)
            if others:
                found.others[at] = others
        return found


def flat_view(tensor: Tensor) -> Tensor | None:
    """View a tensor as flat memory on the CPU; None where that takes a copy, or it is sparse."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def targets_of(
    entries: Sequence[Entry], outs: Values
) -> tuple[list[dict[str, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Choose where new values of keys are received: in the first `out` of each, if that is flat and of its dtype.

    Returns the arenas of the keys; and the other tensors, each with that in which its values will be.
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
    """Bring (key, value) or (keys, values) into keys and what each of them has; a key may appear more than once.

    Keys are not checked here, but by `check_keys` where they are not known.

    Raises:
        ConfigurationError: values are no tensors that a key can take, or lists have different lengths.
    """
    if not isinstance(key, list | tuple):
        key, value = (key,), (value,)
    if not isinstance(value, list | tuple) or len(value) != len(key):
        check_keys(key)
        got = f"{len(value)} values" if isinstance(value, list | tuple) else f"{type(value).__name__}"
        raise ConfigurationError(f"{len(key)} keys need a list of {len(key)} values in {what}, got {got}")
    first: list[Tensor] = []
    others: dict[int, list[Tensor]] = {}
    for at, item in enumerate(value):
        # A single dense tensor is by far the most frequent value.
        if isinstance(item, Tensor) and item.layout is torch.strided and not item.is_meta:
            first.append(item)
        else:
            one, *more = _replicas(key[at], item, what)
            first.append(one)
            if more:
                others[at] = more
    return key, Values(first, others)


def check_keys(keys: Sequence[Any]) -> None:
    """Raise ConfigurationError unless all keys of a call are valid and of one type."""
    kinds = {type(check_key(one)) for one in keys}
    if len(kinds) > 1:
        raise ConfigurationError(f"the keys of one call must all be int or all be str, got {list(keys)!r}")


def check_key(key: Any) -> Key:
    """Return the key if it is an int of 64 bits or a str, the two types of keys."""
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
    """Raise ConfigurationError unless UTF-8 can express a key or name."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{what} {text!a:.80} has the surrogate {text[error.start]!a} at position {error.start}, which is no "
            "character; decode the bytes that it came from with their true encoding"
        ) from None


def spec_of(key: Key, value: Tensor, others: Collection[str] = ()) -> TensorSpec:
    """Make the spec of a key from its first value.

    The store takes dtypes of `others` beside those of ITEM_SIZE.

    Raises:
        ConfigurationError: the dtype cannot be stored.
    """
    name = dtype_name(value.dtype)
    if name not in ITEM_SIZE and name not in others:
        named = ", ".join((*ITEM_SIZE, *others))
        raise ConfigurationError(f"key {key!r} has dtype {name}; this store holds {named} only")
    return TensorSpec(str(key), tuple(value.shape), name)


def check_out(spec: TensorSpec, out: Tensor) -> None:
    """Raise ShapeMismatchError unless `out`, of any dtype, can take a key's values."""
    if out.shape != spec.shape:
        raise mismatch(spec, out)
    if out.layout is not torch.strided:
        raise ConfigurationError(
            f"out of key {spec.key!r} is sparse, but all of the key is written to it; give a dense tensor, or call "
            "row_sparse_pull for some rows"
        )
    if out.is_contiguous():
        return
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        raise ShapeMismatchError(
            f"out of key {spec.key!r} has shape {list(out.shape)} but strides {list(out.stride())}: several of its "
            "elements are one place in memory, as after expand(); give a tensor of its own, as clone() returns"
        )


def check_on_cuda(devices: Sequence[torch.device], what: str) -> None:
    """Raise ConfigurationError unless all devices are CUDA's."""
    others = sorted({str(device) for device in devices if device.type != "cuda"})
    if others:
        raise ConfigurationError(
            f"kvstore 'nccl' takes CUDA tensors only, but {what} are on {', '.join(others)}; use 'device'"
        )


def read_row_pulls(
    entries: Mapping[Key, Entry], key: Any, out: Any, row_ids: Any
) -> tuple[list[list[RowPull]], list[bool]]:
    """Read the arguments of row_sparse_pull.

    Returns, per key, its pulls, one for each set of ids; and whether several sets were given.

    Raises:
        ConfigurationError: the arguments do not fit together, or ids are no whole numbers.
        KeyNotFoundError: a key was never initialised.
        ShapeMismatchError: a key has no rows, or an `out` is not like its key.
        RowIdError: a key has no such rows.
    """
    if row_ids is None:
        raise ConfigurationError("row_sparse_pull needs row_ids=…: the rows that are wanted")
    if not isinstance(key, list | tuple):
        keys, outs, ids = [key], [out], [row_ids]
    else:
        keys = list(key)
        outs = _for_each(keys, out, "out") if out is not None else [None] * len(keys)
        ids = [row_ids] * len(keys) if _is_one_set(row_ids) else _for_each(keys, row_ids, "row_ids")
    pulls = [_pulls_of(entries, *row) for row in zip(keys, outs, ids, strict=True)]
    return pulls, [not _is_one_set(one) for one in ids]


def as_sparse(spec: TensorSpec, ids: Tensor, rows: Tensor) -> Tensor:
    """Make rows a coalesced sparse tensor of the key's shape."""
    values = rows.view(len(ids), *spec.shape[1:])
    return torch.sparse_coo_tensor(
        ids[None], values, spec.shape, is_coalesced=True, check_invariants=False, device=values.device
    )


@torch.no_grad()
def write_rows(out: Tensor, rows: Tensor) -> None:
    """Let `out` have the rows of a sparse tensor and, if it is dense, zeros elsewhere."""
    if is_sparse(out):
        out.copy_(rows)  # not through detach(), which has indices of its own
        return
    ids, values = rows._indices()[0], rows._values()
    out.zero_()
    out[ids.to(out.device)] = values.to(out.device, out.dtype)


def _replicas(key: Key, value: Any, what: str) -> list[Tensor]:
    tensors = list(value) if isinstance(value, list | tuple) else [value]
    if not tensors or not all(isinstance(one, Tensor) for one in tensors):
        raise ConfigurationError(
            f"{what} of key {key!r} must be a tensor or a list of tensors, got {value!r:.80}"
        )
    for one in tensors:
        if is_sparse(one) and (one.layout is not torch.sparse_coo or one.sparse_dim() != 1):
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


def mismatch(spec: TensorSpec, value: Tensor) -> ShapeMismatchError:
    """Return the error of a value that has not the shape or dtype of its key."""
    return ShapeMismatchError(
        f"key {spec.key!r} holds {spec.dtype}{list(spec.shape)}, got {dtype_name(value.dtype)}{list(value.shape)}"
    )


def _pulls_of(entries: Mapping[Key, Entry], key: Key, out: Any, row_ids: Any) -> list[RowPull]:
    entry = entries.get(key)
    if entry is None:
        raise KeyNotFoundError(f"key {key!r} has not been initialised; call init or broadcast first")
    if not entry.spec.shape:
        raise ShapeMismatchError(f"key {key!r} has no dimension, hence no rows; use pull")
    outs = _row_outs(entry, key, out)
    sets = [row_ids] if _is_one_set(row_ids) else list(row_ids)
    found = [read_ids(key, one, entry.spec.shape[0]) for one in sets]
    if len(found) == 1:
        return [RowPull(entry, found[0], outs)]
    if out is not None and len(outs) != len(found):
        raise ConfigurationError(
            f"key {key!r} has {len(outs)} outs but {len(found)} row_ids; give one for each, or one for all"
        )
    return [RowPull(entry, ids, outs[at : at + 1]) for at, ids in enumerate(found)]


def _row_outs(entry: Entry, key: Key, out: Any) -> list[Tensor]:
    outs = [] if out is None or (isinstance(out, list | tuple) and not out) else _replicas(key, out, "out")
    for one in outs:
        if not is_sparse(one):
            check_out(entry.spec, one)
        elif one.shape != entry.spec.shape:
            raise mismatch(entry.spec, one)
    return outs


def _for_each(keys: Sequence[Key], given: Any, what: str) -> list[Any]:
    if not isinstance(given, list | tuple) or len(given) != len(keys):
        got = f"{len(given)}" if isinstance(given, list | tuple) else type(given).__name__
        raise ConfigurationError(f"{len(keys)} keys need a list of {len(keys)} {what}, got {got}")
    return list(given)
