"""Row-sparse parameters: tables whose values are in the store; a worker holds only the rows that it uses.

A `RowSparseParameter` has a shape, a dtype and a gradient, but no memory: its tensor is an expanded scalar.
`row_sparse_data(ids)` fetches rows through the Trainer that owns the parameter, and the backward pass produces a
row-sparse gradient with distinct ids. `__torch_function__` lets through what does not look at elements, and raises
RowSparseError for everything else, so a table is never silently read as the scalar.

Initial values stay with the parameter (a number, tensor or function) until the Trainer's first step or read creates the
store; then `_place` drops them. `RowSparseTables` keeps a Trainer's row-sparse parameters, the values that the store
does not have yet, and the rows to be prefetched.

Invariants: at most one live Trainer owns a parameter, and refers to it weakly. Rank 0's values count.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeAlias, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvstore_server.optimizer.rows import SortedRowIds, sort_row_ids
from kvstore_server.plan import ITEM_SIZE
from kvtrainer.common.tensors import flatten_id_tensor, read_id_tensor
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ArgumentTypeError, ConfigurationError, RowSparseError
from kvtrainer.parallel.replicas import COPIES
from kvtrainer.states.pretrained_rows import PretrainedRows
from kvtrainer.states.safetensors_file import Path
from kvtrainer.types import Group

Source: TypeAlias = Callable[[int, int], Tensor]
"""(first element, number of elements) → that range of the values, flat, on the CPU."""
Init: TypeAlias = float | Tensor | Callable[[Tensor], object] | None

# Tensor methods that do not look at elements. `view_as` is how torch finds a parameter's node in the graph.
_READABLE = frozenset({
    "__hash__", "__len__", "_has_compatible_shallow_copy_type", "_is_view", "data_ptr", "dim", "element_size",
    "get_device", "has_names", "is_complex", "is_contiguous", "is_floating_point", "is_inference", "ndimension",
    "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
    "storage_offset", "stride", "untyped_storage", "view_as",
})  # fmt: skip
# What torch.compile and torch.export call first when they make a fake tensor.
_ASKED_BY_TRACERS = frozenset({"is_conj", "is_neg"})
_MOVES = frozenset({"to", "cpu", "cuda", "half", "float", "double", "bfloat16", "type"})
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
# Held while the process's random generator is in use: an init function cannot be given another one.
_filling = threading.RLock()


@runtime_checkable
class LooksUp(Protocol):
    """A module that looks up rows: a `kvtrainer.Embedding`, or an `EmbeddingBagCollection`."""

    def _rows_to_look_up(self, given: Any) -> Sequence[tuple[RowSparseParameter, Tensor]]:
        """Return each table, and its rows (distinct, ascending), that `forward` looks up if it is given this."""


class RowSparseOwner(Protocol):
    """The Trainer that owns a row-sparse parameter."""

    def row_sparse_pull(self, wanted: Sequence[tuple[RowSparseParameter, Tensor]]) -> list[Tensor]:
        """Fetch rows (distinct ids, ascending) of each as a CPU tensor of shape (number of ids, elements of a row)."""

    def row_sparse_read(self, parameter: RowSparseParameter, ids: Tensor) -> Tensor | None:
        """Read rows of any valid ids on the CPU if the store's memory can be read directly, else return None."""

    def row_sparse_write(self, parameter: RowSparseParameter, values: Tensor) -> None:
        """Keep values for the store until they are published."""

    def server_stats(self) -> list[dict[str, Any]]:
        """Return each server's counters."""

    def export_rows(self, parameter: RowSparseParameter, fname: Path, padding_idx: int | None) -> None:
        """Write the rows of a hash table to a file."""

    def load_rows(self, parameter: RowSparseParameter, read: Callable[[], PretrainedRows]) -> None:
        """Put rows into a hash table, collectively; `read` returns them."""


@uncompiled
class RowSparseParameter(Parameter):
    """A table of rows that is in the store of its Trainer. It has a shape and a gradient here, but no memory.

    `row_sparse_data(row_ids)` fetches rows, and a backward pass through them gives a row-sparse gradient, which the
    Trainer's `step` sends. Anything else that reads or writes elements raises RowSparseError. In modules it behaves as
    other parameters: `state_dict()` fetches the whole table, and `load_state_dict()` sets the initial values; once a
    store has values, `trainer.set_data()` must publish them.

    Args:
        shape: Shape of the table. The first dimension counts rows.
        init: Initial values, where rank 0 decides: a number; a tensor of that shape, which is not copied; a function
            that fills a tensor, such as those of `torch.nn.init`, called on the CPU at first use with a seed drawn
            now; None for zeros.
        dtype: A floating-point dtype. The default is torch's.
        device: Where fetched rows are placed.
        requires_grad: Whether the table is trained.

    Raises:
        ConfigurationError: An argument is wrong.

        table = kvtrainer.RowSparseParameter((1_000_000, 64), torch.nn.init.normal_)
        vectors = table.row_sparse_data(ids)
    """

    _init: Init
    _seed: int
    _owner: weakref.ref[RowSparseOwner] | None
    _label: str
    _is_placed: bool
    _backward_pass: int
    """That of the last float16 gradient."""

    def __new__(
        cls,
        shape: Sequence[int],
        init: Init = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        requires_grad: bool = True,
    ) -> RowSparseParameter:
        given = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
        if not given or not all(check.is_integer(size, 0) for size in given):
            raise ConfigurationError(
                f"a RowSparseParameter needs a shape of one or more whole numbers, rows first; got {shape!r}"
            )
        sizes = tuple(map(int, given))
        scalar = torch.zeros((), dtype=dtype, device=device)
        if str(scalar.dtype).removeprefix("torch.") not in ITEM_SIZE:
            raise ConfigurationError(
                f"a RowSparseParameter has dtype {', '.join(ITEM_SIZE)}, got {scalar.dtype}"
            )
        self: RowSparseParameter = torch.Tensor._make_subclass(cls, scalar.expand(sizes), requires_grad)
        self._init = _checked_row_sparse_init(init, sizes)
        with _filling:
            self._seed = int(torch.randint(1 << 62, (), device="cpu")) if callable(init) else 0
        self._owner, self._label, self._is_placed, self._backward_pass = None, "", False, -1
        return self

    def row_sparse_data(self, row_ids: Any) -> Tensor:
        """Fetch rows as a tensor of shape row_ids.shape + shape[1:], after this worker's steps. Blocks.

        The backward pass adds a row-sparse tensor to `grad`, in which repeated ids are summed. The first use of a
        Trainer creates its store and sets the values, collectively, as a first step does.

        Args:
            row_ids: Integers in any shape, on any device; may be empty.

        Raises:
            RowSparseError: There is no Trainer yet, or torch.jit.trace is running.
            RowIdError: An id is out of range.
            KVStoreError: The store did not answer, or the Trainer is closed.
        """
        owner = self._ready_owner()
        # Attribute access would otherwise go through __torch_function__.
        with torch._C.DisableTorchFunctionSubclass():
            (num_rows, *of_row), device = self.shape, self.device
        ids, shape = flatten_id_tensor(self._name(), row_ids, num_rows)
        which: SortedRowIds | Tensor = ids
        rows = owner.row_sparse_read(self, ids)
        # The store is in another process or the rows are in several places: request each row once.
        if rows is None:
            which = sort_row_ids(ids.numpy(), num_rows)
            [rows] = owner.row_sparse_pull([(self, which.ids)])
        rows = rows.to(device)
        if torch.is_grad_enabled():
            gathered: Tensor = _RowSparseGather.apply(self, rows, which)  # type: ignore[no-untyped-call]
        else:
            gathered = _select_row_sparse_rows(rows, which)
        return gathered.view(*shape, *of_row)

    def _ready_owner(self) -> RowSparseOwner:
        """Return the Trainer, through which rows are fetched."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            self._refuse_to_be_traced()
        owner = self._owner() if self._owner is not None else None
        if owner is None:
            raise RowSparseError(
                f"cannot get row_sparse data for {self._name()} when no Trainer is created with it; build the Trainer "
                "first, and keep it"
            )
        return owner

    def _check_alone(self, values: Tensor) -> None:
        """Raise RowSparseError if autograd would have to add this gradient to another one and torch cannot."""
        if values.dtype is not torch.float16 or not values.is_cpu:
            return
        former, self._backward_pass = self._backward_pass, torch._C._current_graph_task_id()
        if former == self._backward_pass:
            raise RowSparseError(
                f"{self._name()} was looked up twice in the graph of one backward pass, and torch cannot add two "
                "float16 gradients of rows on the CPU; use bfloat16 or float32, or look all ids up together"
            )

    def _read_ids(self, row_ids: Any) -> Tensor:
        """Return the rows of these ids as stores know them: distinct, ascending, int64, on the CPU."""
        return read_id_tensor(self._name(), row_ids, self.shape[0])

    def detach(self) -> Tensor:
        """Return all values as a new tensor the size of the whole table. `state_dict()` saves these."""
        owner = self._owner() if self._owner is not None else None
        if self._is_placed:
            if owner is None:
                raise RowSparseError(
                    f"the values of {self._name()} were in the store of a Trainer that is gone"
                )
            with torch.no_grad():
                [rows] = owner.row_sparse_pull([(self, torch.arange(self.shape[0], device="cpu"))])
            return rows.view(self.shape).to(self.device)
        return self._source()(0, self.numel()).view(self.shape).to(self.device, copy=True)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> RowSparseParameter:
        """Set the initial values, as `load_state_dict` does. If a store has values already, `trainer.set_data()` must
        publish rank 0's before the next step, which otherwise raises WeightsWrittenError."""
        values = source.detach().clone()
        _checked_row_sparse_init(values, tuple(self.shape))
        owner = self._owner() if self._owner is not None else None
        if self._is_placed and owner is not None:
            owner.row_sparse_write(self, values)
            return self
        self._init, self._is_placed = values, False
        self._owner = None if owner is None else self._owner
        return self

    def claim(self, owner: RowSparseOwner, name: str) -> None:
        self._owner, self._label = weakref.ref(owner), name

    def check_claimable(self, name: str) -> None:
        if self._owner is not None and self._owner() is not None:
            raise RowSparseError(
                f"failed to set the trainer for Parameter {name!r} because it was already set: more than one trainer "
                "for a row_sparse parameter is not supported"
            )
        if self._is_placed:
            raise RowSparseError(
                f"the values of row-sparse parameter {name!r} were in the store of a Trainer that is gone; give it "
                "new ones first, by load_state_dict or parameter.copy_(tensor)"
            )

    def _place(self) -> None:
        """Drop the values, which are in the store from now on."""
        self._init, self._is_placed = None, True

    def _source(self) -> Source:
        init, dtype = self._init, self.dtype
        if callable(init) and not isinstance(init, Tensor):
            filled = torch.empty(self.shape, dtype=dtype, device="cpu")
            with _filling, torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(self._seed)
                init(filled)
            init = filled
        if isinstance(init, Tensor):
            return _row_sparse_source(init.detach().to("cpu", dtype).reshape(-1))
        value = torch.tensor(float(init or 0), dtype=dtype, device="cpu")
        return lambda start, numel: value.expand(numel)

    def _name(self) -> str:
        return repr(self._label) if self._label else f"a RowSparseParameter of shape {list(self.shape)}"

    def _moved(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Apply a conversion of dtype or device to the empty tensor; fetched rows will follow it."""
        scalar: Tensor = getattr(torch.zeros((), dtype=self.dtype, device=self.device), name)(*args, **kwargs)
        if self._owner is not None and (scalar.dtype, scalar.device) != (self.dtype, self.device):
            raise RowSparseError(
                f"{self._name()} cannot become {scalar.dtype} on {scalar.device} while a Trainer has it; move the "
                "model before building the Trainer"
            )
        return scalar.expand(self.shape)

    def _refuse(self, what: str) -> NoReturn:
        raise RowSparseError(
            f"{what} needs the elements of {self._name()}, which live in the store of its Trainer; work with the rows "
            "that row_sparse_data(row_ids) returns"
        )

    def _refuse_to_be_traced(self) -> NoReturn:
        raise RowSparseError(
            f"a model with {self._name()} cannot be exported or traced, because its values live in the store of its "
            "Trainer; replace it with torch.nn.Embedding.from_pretrained(parameter.detach()) first, which needs memory "
            "for the whole table"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        with torch._C.DisableTorchFunctionSubclass():
            mine = next((one for one in args if isinstance(one, cls)), None)
            if mine is not None and name in _MOVES:
                return mine._moved(name, args[1:], kwargs or {})
            if mine is not None and name in _ASKED_BY_TRACERS:
                # The compiler continues to a call of row_sparse_data, where it breaks the graph.
                is_exporting = getattr(torch.compiler, "is_exporting", bool)  # torch 2.6 has none
                if torch.compiler.is_compiling() and not is_exporting():
                    return func(*args, **(kwargs or {}))
                mine._refuse_to_be_traced()
            is_readable = name in ("__get__", "__set__", "__delete__") or name in _READABLE
            if mine is not None and (not is_readable or attribute in _VIEWS):
                mine._refuse(attribute or name)
            if mine is None and not is_readable:
                raise RowSparseError(
                    f"{name} needs the elements of a RowSparseParameter, which are in a store"
                )
            return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RowSparseParameter(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSparseParameter:
        if self._is_placed or self._owner is not None:
            raise RowSparseError(
                f"{self._name()} cannot be copied, because its values live in the store of its Trainer; copy the model "
                "before building the Trainer, or copy the rows"
            )
        init = self._init.clone() if isinstance(self._init, Tensor) else self._init
        made = type(self)(
            tuple(self.shape), init, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )
        made._seed = self._seed
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RowSparseError(
            f"{self._name()} cannot be pickled, because its values live in a store; save the module's state_dict(), "
            "which fetches them"
        )


def is_row_sparse(parameter: object) -> TypeGuard[RowSparseParameter]:
    """Return whether this is a RowSparseParameter; much faster than isinstance, which torch overrides."""
    return issubclass(type(parameter), RowSparseParameter)


Tables = Mapping[int, Callable[[], Source]]
"""Key (by index) → function that returns its values, called on rank 0 only."""


NO_TABLES: Tables = MappingProxyType({})


class RowSparseTables:
    """The row-sparse parameters of a Trainer by key, with replicas, and values that the store does not have yet."""

    def __init__(self, replicas: Sequence[Sequence[Parameter]]) -> None:
        self._parameters: dict[int, list[RowSparseParameter]] = {}
        # id() of a parameter → its key.
        self._keys: dict[int, int] = {}
        for parameters in replicas:
            for key, parameter in enumerate(parameters) if _has_row_sparse_tables(parameters) else ():
                if is_row_sparse(parameter):
                    self._parameters.setdefault(key, []).append(parameter)
                    self._keys[id(parameter)] = key
        self.given: dict[int, Tensor] = {}
        """Key → new values that the store does not have yet, flat."""
        self.wanted: dict[int, Tensor] = {}
        """Key → ids of the rows to fetch after the next step."""

    def __contains__(self, key: int) -> bool:
        return key in self._parameters

    def __iter__(self) -> Iterator[int]:
        return iter(self._parameters)

    def key_of(self, parameter: RowSparseParameter) -> int:
        return self._keys[id(parameter)]

    def want(self, rows: Any) -> None:
        """Set the rows to fetch after the next step, replacing earlier ones; see `Trainer.prefetch`."""
        if not isinstance(rows, Mapping):
            if len(self._parameters) != 1:
                raise ConfigurationError(
                    f"this Trainer has {len(self._parameters)} row-sparse parameters; give prefetch() a dict from "
                    "parameter to row ids"
                )
            rows = {parameters[0]: rows for parameters in self._parameters.values()}
        names = {parameters[0]._label: key for key, parameters in self._parameters.items()}
        wanted: dict[int, Tensor] = {}
        for given, ids in rows.items():
            found = self._rows_of(given, ids, names)
            if found is None or found.keys() & wanted.keys():
                raise ConfigurationError(
                    "prefetch() takes each RowSparseParameter of this Trainer, or its name, once, or a module that "
                    f"looks its rows up; got {given!r:.80}"
                    + (did_you_mean(given, names) if isinstance(given, str) else "")
                )
            wanted |= found
        self.wanted = wanted

    def _rows_of(self, given: Any, ids: Any, names: Mapping[str, int]) -> dict[int, Tensor] | None:
        """Return the rows that are wanted, by key; None: there is no such parameter here."""
        if isinstance(given, LooksUp):
            parts: dict[int, list[Tensor]] = {}
            for table, rows in given._rows_to_look_up(ids):
                if id(table) not in self._keys:
                    return None
                parts.setdefault(self._keys[id(table)], []).append(rows)
            return {key: torch.unique(torch.cat(found)) for key, found in parts.items()}
        key = names.get(given) if isinstance(given, str) else self._keys.get(id(given))
        if key is None:
            return None
        parameter = self._parameters[key][0]
        if isinstance(ids, tuple):
            raise ArgumentTypeError(
                f"the ids of {parameter._name()} to prefetch are a tensor, an array or a list, got a tuple of "
                f"{len(ids)}; what a kvtrainer.EmbeddingBag is called with is given to it: "
                "prefetch({bag: (ids, offsets)})"
            )
        return {key: parameter._read_ids(ids)}

    def take_wanted(self) -> dict[int, Tensor]:
        wanted, self.wanted = self.wanted, {}
        return wanted

    def give(self, key: int, values: Tensor) -> None:
        self.given[key] = values.detach().to("cpu", self._parameters[key][0].dtype).reshape(-1)

    def first(self) -> Tables:
        return {**{key: first._source for key, (first, *_) in self._parameters.items()}, **self.changed()}

    def changed(self) -> Tables:
        return {key: partial(_row_sparse_source, flat) for key, flat in self.given.items()}

    def are_placed(self) -> None:
        self.given.clear()
        for parameter in chain.from_iterable(self._parameters.values()):
            parameter._place()


def _has_row_sparse_tables(parameters: Iterable[object]) -> bool:
    # By their classes: isinstance of each parameter would take longer.
    return any(issubclass(kind, RowSparseParameter) for kind in set(map(type, parameters)))


def row_sparse_parameters(groups: Sequence[Group]) -> list[tuple[str, RowSparseParameter]]:
    """Return the row-sparse parameters of groups, with their names, including all replicas.

    Raises:
        RowSparseError: One belongs to a Trainer already, or its replicas are of different kinds.
    """
    found: list[tuple[str, RowSparseParameter]] = []
    for group in groups:
        of_devices = [group["params"], *group.get(COPIES, ())]
        if not any(map(_has_row_sparse_tables, of_devices)):
            continue
        for name, *copies in zip(group["param_names"], *of_devices, strict=True):
            if len(set(map(is_row_sparse, copies))) > 1:
                raise RowSparseError(
                    f"some replicas of {name!r} are row-sparse and some are not; make all of one kind"
                )
            found += [(name, p) for p in copies if is_row_sparse(p)]
    for name, parameter in found:
        parameter.check_claimable(name)
    return found


def _row_sparse_source(flat: Tensor) -> Source:
    return lambda start, numel: flat[start : start + numel]


def _select_row_sparse_rows(rows: Tensor, ids: SortedRowIds | Tensor) -> Tensor:
    """Repeat fetched rows for all positions of their ids. With plain ids, there is one row for each already."""
    return rows if isinstance(ids, Tensor) else rows.index_select(0, ids.places().to(rows.device))


@uncompiled
class _RowSparseGather(torch.autograd.Function):
    """Gathers rows for repeated ids; the backward pass sums the gradients of each id."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, rows: Tensor, ids: SortedRowIds | Tensor) -> Tensor:
        ctx.parameter, ctx.shape = parameter, tuple(parameter.shape)
        # A clone, because the loop may overwrite its ids before the backward pass.
        ctx.ids = ids.clone() if isinstance(ids, Tensor) else ids
        return _select_row_sparse_rows(rows, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return a sparse gradient with distinct ids. Half precision is summed in float32 and rounded once."""
        flat, ordered = grad.reshape(len(grad), *ctx.shape[1:]), ctx.ids
        if isinstance(ordered, Tensor):
            ordered = sort_row_ids(ordered.numpy(), ctx.shape[0])
        values = sums_of_rows(ordered, flat)
        ctx.parameter._check_alone(values)
        return sparse_gradient(ordered.ids, values, ctx.shape, is_coalesced=True), None, None


def sums_of_rows(ids: SortedRowIds, grad: Tensor) -> Tensor:
    """Sum gradients of rows with equal ids, in the order given; half precision in float32, rounded once.

    The result is new memory, because a loop may change it, and autograd may give `grad` to others, too.
    """
    sums = ids.sums(grad.float() if grad.dtype.itemsize < 4 else grad).to(grad.dtype)
    is_given = sums.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
    return sums.clone() if is_given else sums


def sparse_gradient(ids: Tensor, values: Tensor, shape: tuple[int, ...], is_coalesced: bool) -> Tensor:
    """Return a row-sparse gradient, to which autograd can add others."""
    # Torch resizes one without rows in place, which memory of NumPy does not allow.
    ids = ids.to(values.device) if ids.numel() else torch.empty(0, dtype=torch.int64, device=values.device)
    return torch.sparse_coo_tensor(
        ids[None], values, shape, is_coalesced=is_coalesced, check_invariants=False, device=values.device
    )


def _checked_row_sparse_init(init: Any, shape: tuple[int, ...]) -> Init:
    if isinstance(init, Tensor):
        if tuple(init.shape) != shape or init.layout is not torch.strided or init.is_meta:
            raise ConfigurationError(
                f"a RowSparseParameter of shape {list(shape)} was given a {init.layout} tensor of shape "
                f"{list(init.shape)} as its values; give a dense tensor of the same shape"
            )
        return init
    if init is not None and not check.is_number(init) and not callable(init):
        raise ConfigurationError(
            "init of a RowSparseParameter must be a number, a tensor, a function that fills a tensor, or None; got "
            f"{init!r}"
        )
    return float(init) if check.is_number(init) else init
