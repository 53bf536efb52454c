"""Embeddings without a number of rows: their rows come with the ids that are trained, and go by rules.

    table = kvtrainer.Embedding(64, admit_after=3, expire_after=10_000)
    trainer = kvtrainer.Trainer([("table", table.weight), *dense.named_parameters()], "adagrad", kvstore="dist_sync")
    out = dense(table(ids))

Ids are int64 of any value: hashes, or numbers of users. The rows live in the store of the Trainer, and only those of a
batch move. An `EmbeddingBagCollection` fetches the rows of several tables together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvstore_server import check
from kvstore_server.errors import did_you_mean
from kvstore_server.plan import HASH_SLICES, HashTableOptions
from kvstore_server.shard.table_optimizer import check_hash_table, describe_table_optimizer
from kvtrainer.common.tensors import flatten_id_tensor
from kvtrainer.common.uncompiled import uncompiled
from kvtrainer.errors import ConfigurationError
from kvtrainer.memory.hash_table import HashTableParameter, RowLookup, look_up
from kvtrainer.optimizer import Optimizer
from kvtrainer.optimizer import create as create_optimizer

_MODES = ("sum", "mean")
_NO_OFFSETS = (torch.bool, torch.complex64, torch.complex128)


@uncompiled
class Embedding(nn.Module):
    """Looks rows up by ids of 64 bits, in a table without a number of rows.

    A row that has never been trained reads as its initial value, a function of `seed`, the parameter's name in the
    Trainer, the id and the column; so results do not depend on the number of workers or servers. Rounds that train the
    table are the clock of `expire_after` and `evict`. `state_dict()` leaves the rows out.

    Args:
        dim: Elements of a row.
        init: Initial values: "normal", "uniform" or "constant".
        scale: Their standard deviation, bound or value.
        seed: Of the initial values.
        admit_after: A row is trained from its nth gradient on; those before are ignored. Each worker gives one a round.
        expire_after: A row is forgotten that had no gradient for this many rounds; 0: never.
        max_rows: About the most rows, at least 128; 0: as many as there is memory for.
        evict: With `max_rows`, which rows are forgotten when there are too many: "lru" (longest without a gradient; the
            default), "lfu" (fewest), or "norm" (smallest Euclidean norm).
        padding_idx: The id whose row is always zero, and not trained.
        weight_decay: Decoupled weight decay: each round multiplies every row that is there by 1 - lr * weight_decay,
            before the optimizer's update (as torch's AdamW). A row is multiplied when it is read or trained.
        max_norm: Rows with a larger Euclidean norm are scaled down to it after their update; None: no limit.
        optimizer: The table's own: a name, a class or an instance, as for the Trainer. None: the Trainer's.
        optimizer_params: Its options. Without `learning_rate` it has the learning rate of the parameter's group in the
            Trainer; the other options of the group, and the Trainer's weight decay, do not apply to it.
        cache_rows: How many rows this worker keeps, those that it has read last, so that servers send only rows that
            have changed since; the same results as without. For stores with servers.
        cache_age: Rows that were read at most this many rounds ago are used without asking, whether they have changed
            or not; 0: servers are always asked.
        dtype, device: Of the rows. With float16 on the CPU only one lookup may be in a backward pass, because torch
            cannot add two such gradients.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    def __init__(
        self,
        dim: int,
        *,
        init: str = "normal",
        scale: float = 1.0,
        seed: int = 0,
        admit_after: int = 1,
        expire_after: int = 0,
        max_rows: int = 0,
        evict: str | None = None,
        padding_idx: int | None = None,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        optimizer: str | type | Optimizer | torch.optim.Optimizer | None = None,
        optimizer_params: Mapping[str, Any] | None = None,
        cache_rows: int = 0,
        cache_age: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        scale = float(scale) if check.is_number(scale) else scale
        decay = check.number("weight_decay", weight_decay, 0)
        if evict is not None and max_rows == 0:
            raise ConfigurationError(
                f"evict={evict!r} says which rows go from a full table, but this one has no max_rows; give it one"
            )
        if check.is_integer(max_rows, 1, HASH_SLICES - 1):
            raise ConfigurationError(
                f"max_rows={max_rows} cannot be kept, because each of the {HASH_SLICES} slices of a table has a row or "
                f"more; give at least {HASH_SLICES}"
            )
        evict = "lru" if evict is None else evict
        limit = 0.0 if max_norm is None else check.number("max_norm", max_norm, above=0)
        options = HashTableOptions(
            seed, init, scale, admit_after, expire_after, max_rows, evict, decay, limit, ""
        )
        options = options._replace(optimizer=_described(optimizer, optimizer_params, options))
        self.weight = HashTableParameter(
            dim, options, dtype=dtype, device=device, cache_rows=cache_rows, cache_age=cache_age
        )
        if padding_idx is not None:
            padding_idx = check.integer("padding_idx", padding_idx, -(2**63), 2**64 - 1)
            padding_idx -= 2**64 if padding_idx >= 2**63 else 0
        self.padding_idx = padding_idx

    def forward(self, ids: Any) -> Tensor:
        """Return the rows of ids (int64, any shape) as a tensor of shape ids.shape + (dim,). Blocks."""
        [found] = look_up([self._lookup(ids)])
        return found

    def _lookup(self, ids: Any) -> RowLookup:
        if self.padding_idx is None:
            return self.weight.lookup(ids)
        flat, shape = flatten_id_tensor(self.weight._name(), ids, 0)
        [places] = (flat != self.padding_idx).nonzero(as_tuple=True)
        kept = self.weight.lookup(flat[places])

        def finish(rows: Tensor) -> Tensor:
            rows = kept.finish(rows)
            found = rows.new_zeros(flat.numel(), rows.shape[1]).index_copy(0, places.to(rows.device), rows)
            return found.view(*shape, rows.shape[1])

        return kept._replace(finish=finish)

    def _lookups(self, given: Any) -> list[RowLookup]:
        """Return what a collection, or `Trainer.prefetch`, looks up if it is given this for the table."""
        args = given if isinstance(given, tuple) else (given,)
        most = 3 if isinstance(self, EmbeddingBag) else 1
        if not 1 <= len(args) <= most:
            raise ConfigurationError(
                f"{self.weight._name()} is an {type(self).__name__}, which takes a tuple of 1 to {most}, but this one "
                f"has {len(args)}; several ids are a tensor or a list"
            )
        return [self._lookup(*args)]

    def _rows_to_look_up(self, given: Any) -> list[tuple[HashTableParameter, Tensor]]:
        return [(one.table, one.rows) for one in self._lookups(given)]

    def stats(self) -> dict[str, Any]:
        """Return figures of the table in all servers. Blocks until they answer; all rows are looked at.

        Returns:
            'rows' that are there; how many have been 'admitted' since the start, those that came again included, and
            how many were 'evicted' or have expired and were removed; 'refused', gradients of ids that are not admitted
            yet; 'nbytes', the memory in use; 'hottest', the ten ids with most gradients and how many they had.
        """
        return self.weight.stats()

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the rows to one safetensors file, which `kvtrainer.RowFile` reads without a Trainer. Blocks.

        The file has `ids` (int64, ascending), `weights` (a row for each id, in the dtype of the table), and what the
        initial values of all other ids follow from. Rows that have expired are left out; optimizer state is not in it.
        Any single worker may export between its steps; other workers may train meanwhile in asynchronous modes, where
        the file has some of their updates and not others.

        The worker takes memory for the ids (32 bytes each) and for one of 128 slices of the table at a time, and disk
        space for twice the file.

        Raises:
            RowSparseError: There is no Trainer yet.
            StateFileError: The file cannot be written; the former one is unchanged.
            KVStoreError: The store did not answer, or a step was interrupted in its update.
        """
        self.weight.export(path, self.padding_idx)

    def load_rows(self, source: Any, weights: Any = None) -> None:
        """Put pretrained rows into the table, before the first step or between two steps. Collective. Blocks.

        Every worker calls it, with the same rows; those of rank 0 are loaded. A loaded row is as new, also if it was
        there before: it has no gradients yet, initial optimizer state, and counts as trained in the last step for
        `expire_after` and `evict`. It comes whatever `admit_after` says; with `max_rows`, rows go as in training. Other
        rows stay as they are.

        Args:
            source: Ids (integers of 64 bits, one dimension), with `weights`; or without them a `torch.nn.Embedding`,
                whose rows have ids from 0 on; a `RowFile`; the name of a file of `export`, or of a Parquet or Arrow
                file; or a `pyarrow.Table` of two columns, `ids` (or `id`) and lists of numbers.
            weights: A row for each id, (number of ids, dim), floating point. They are rounded to the dtype of the
                table, and scaled down to `max_norm`; float32 copies that an optimizer keeps of half-precision weights
                (`multi_precision`) are made from these. A row of `padding_idx` is left out if it is zero.

        Raises:
            RowSparseError: There is no Trainer yet.
            ConfigurationError: An id is not an integer of 64 bits, or comes twice with different weights; weights are
                not floating point, or not finite in the dtype of the table; `padding_idx` has a row that is not zero;
                there are more rows than `max_rows`; or the workers cannot agree, because their number may change.
            ShapeMismatchError: Rows have another length than `dim`, or there is not one for each id.
            StateFileError: The file cannot be read, is damaged, or is of another kind.
            RoundAbortedError: Another worker has raised one of these. In all these cases nothing has changed.
            OptimizerError: A server has no memory for the rows. Some may have been loaded.
        """
        self.weight.load_rows(source, weights, self.padding_idx)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Leave the rows out: they are in the store."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing: the rows are in the store."""

    def extra_repr(self) -> str:
        options = {**self.weight.options._asdict(), "padding_idx": self.padding_idx}
        return f"{self.weight.shape[1]}, {', '.join(f'{k}={v!r}' for k, v in options.items())}"


def _described(
    optimizer: str | type | Optimizer | torch.optim.Optimizer | None,
    params: Mapping[str, Any] | None,
    table: HashTableOptions,
) -> str:
    """Describe a table's own optimizer as text; empty: none."""
    if optimizer is None and params is None:
        return ""
    if optimizer is None:
        raise ConfigurationError(f"optimizer_params={params!r:.80} needs the name of an optimizer beside it")
    options = {} if params is None else check.mapping("optimizer_params", params)
    built = create_optimizer(optimizer, **options)
    has_rate = not isinstance(optimizer, str | type) or bool(options.keys() & {"learning_rate", "lr"})
    # Which rate a table without one has is known in a Trainer.
    check_hash_table("this Embedding", table, built, built.hyper if has_rate else {**built.hyper, "lr": 0.0})
    return describe_table_optimizer(built, has_rate)


@uncompiled
class EmbeddingBag(Embedding):
    """Sums or averages rows of bags of ids; otherwise like `Embedding`.

    Sums are made from left to right in float32 or wider, and only they and the distinct rows take memory.

    Args:
        dim: Elements of a row.
        mode: "sum" or "mean".
        include_last_offset: Whether `offsets` end with the number of ids.
        **options: The other arguments of `Embedding`. Ids that are `padding_idx` count as if they were not there.
    """

    def __init__(
        self, dim: int, *, mode: str = "mean", include_last_offset: bool = False, **options: Any
    ) -> None:
        if mode not in _MODES:
            raise ConfigurationError(f"an EmbeddingBag has mode 'sum' or 'mean', got {mode!r}")
        super().__init__(dim, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}, include_last_offset={self.include_last_offset}"

    def forward(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Return a tensor of shape (number of bags, dim). Blocks.

        Args:
            ids: int64; of two dimensions, with a bag in each row, or of one, with `offsets`.
            offsets: Where each bag begins in `ids`: integers, ascending, the first one 0; with `include_last_offset`
                the last one is the number of ids.
            per_sample_weights: A factor of each id, in the shape of `ids`. A mean is divided by the number of ids all
                the same.

        Raises:
            ConfigurationError: Shapes or offsets do not fit.
        """
        [found] = look_up([self._lookup(ids, offsets, per_sample_weights)])
        return found

    def _lookup(self, ids: Any, offsets: Any = None, per_sample_weights: Any = None) -> RowLookup:
        flat, starts, weights = self._read_bags(ids, offsets, per_sample_weights)
        if self.padding_idx is not None:
            is_kept = flat != self.padding_idx
            gone_before = torch.cumsum(~is_kept, 0)
            starts = starts - torch.cat([gone_before.new_zeros(1), gone_before])[starts]
            flat, weights = flat[is_kept], None if weights is None else weights[is_kept.to(weights.device)]
        summed = self.weight.pooled_lookup(flat, starts, weights)
        if self.mode == "sum":
            return summed

        def finish(rows: Tensor) -> Tensor:
            sums = summed.finish(rows)
            counts = torch.diff(starts, append=starts.new_tensor([len(flat)]))
            return sums / counts.clamp_(min=1)[:, None].to(sums)

        return summed._replace(finish=finish)

    def _read_bags(self, ids: Any, offsets: Any, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return flat ids and where bags begin, both int64 on the CPU, and flat weights."""
        who = self.weight._name()
        flat, shape = flatten_id_tensor(who, ids, 0)
        if len(shape) == 2 and offsets is None:
            starts = torch.arange(shape[0], device="cpu") * shape[1]
        elif len(shape) == 1 and offsets is not None:
            starts = self._read_offsets(offsets, len(flat))
        else:
            raise ConfigurationError(
                f"ids of {who} have two dimensions, or one and offsets; got {len(shape)} dimensions "
                f"{'without' if offsets is None else 'and'} offsets"
            )
        if weights is None:
            return flat, starts, None
        factors = _as_numbers(f"per_sample_weights of {who}", weights)
        if factors.shape != shape:
            raise ConfigurationError(
                f"per_sample_weights of {who} have the shape of ids, {list(shape)}, got {list(factors.shape)}"
            )
        return flat, starts, factors.reshape(-1)

    def _read_offsets(self, offsets: Any, num_ids: int) -> Tensor:
        given = _as_numbers(f"offsets of bags of {self.weight._name()}", offsets)
        is_valid = given.dim() == 1 and given.dtype not in _NO_OFFSETS and not given.dtype.is_floating_point
        starts = (
            given.detach().to("cpu", torch.int64)
            if is_valid
            else torch.zeros(0, dtype=torch.int64, device="cpu")
        )
        ends = starts if self.include_last_offset else torch.cat([starts, starts.new_tensor([num_ids])])
        is_valid = is_valid and bool(len(ends)) and not int(ends[0]) and int(ends[-1]) == num_ids
        if not is_valid or bool((ends[1:] < ends[:-1]).any()):
            last = (
                f"the last one {num_ids}, the number of ids" if self.include_last_offset else "none above it"
            )
            raise ConfigurationError(
                f"offsets of bags of {self.weight._name()} are integers, ascending, the first one 0 and {last}; got "
                f"{offsets} for {num_ids} ids"
            )
        return ends[:-1]


def _as_numbers(what: str, given: Any) -> Tensor:
    try:
        return given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{what} are a tensor or a list of numbers: {error}") from None


@uncompiled
class EmbeddingBagCollection(nn.ModuleDict):
    """Looks rows up in several tables with one request to each server, whatever the number of tables.

    A `torch.nn.ModuleDict` of them. Results, gradients and everything else are as if each table were called by itself;
    only forward hooks of the tables do not run. More rows than fit into a message of 1 MiB take several.

    Args:
        tables: Each an `Embedding` or `EmbeddingBag`, by name. One may have several names: their features share it.

    Raises:
        ConfigurationError: One is another module.

        tables = {"user": kvtrainer.Embedding(16), "words": kvtrainer.EmbeddingBag(16)}
        found = kvtrainer.EmbeddingBagCollection(tables)({"user": users, "words": (words, offsets)})
    """

    def __init__(self, tables: Mapping[str, Embedding]) -> None:
        if not isinstance(tables, Mapping):
            raise ConfigurationError(f"an EmbeddingBagCollection needs a dict of tables, got {tables!r:.80}")
        super().__init__(dict(tables))

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a table. Raises ConfigurationError if it is another module."""
        if not isinstance(module, Embedding):
            raise ConfigurationError(
                f"an EmbeddingBagCollection has kvtrainer.Embedding and EmbeddingBag, got {name!r}: {module!r:.80}"
            )
        super().add_module(name, module)

    def forward(self, ids: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the result of each table that is named, in this order. Blocks.

        Args:
            ids: By name, what the table is called with: ids, or a tuple of ids, offsets and per_sample_weights for an
                `EmbeddingBag`. Tables may be left out.

        Raises:
            ConfigurationError: There is no such table, or a table is given what it does not take.
        """
        return dict(zip(ids, look_up(self._lookups(ids)), strict=True))

    def _lookups(self, ids: Any) -> list[RowLookup]:
        if not isinstance(ids, Mapping):
            raise ConfigurationError(
                f"an EmbeddingBagCollection takes a dict of ids by name, got {ids!r:.80}"
            )
        return [self._lookup(name, given) for name, given in ids.items()]

    def _rows_to_look_up(self, given: Any) -> list[tuple[HashTableParameter, Tensor]]:
        return [(one.table, one.rows) for one in self._lookups(given)]

    def _lookup(self, name: str, given: Any) -> RowLookup:
        if name not in self:
            raise ConfigurationError(
                f"there is no table {name!r} in this EmbeddingBagCollection{did_you_mean(name, self.keys())}"
            )
        table = self[name]
        assert isinstance(table, Embedding)
        try:
            [found] = table._lookups(given)
        except ConfigurationError as error:
            raise type(error)(f"feature {name!r}: {error}") from None
        return found
