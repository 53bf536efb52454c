"""A Trainer's parameters on one device or several: names, plan, arenas, gradients and their sums.

`Memory` holds one `DeviceMemory` for each device, with the replicas of all parameters there. Position i in any list is
key i of the plan, the arena and the gradient tracker. A step uses it in this order: `fresh` finds the new gradients,
`gather` copies them into the arenas, `sum_replicas` sums them on the first device, `scatter` copies sums back to
`.grad`, and `share_weights` broadcasts updated weights to the replicas.

Invariants: the first device has the sums and the weights that count. Row-sparse gradients are kept beside the arena, in
`rows`, and the arena has zeros for them. Parameters are placed at once if all have shapes, and otherwise by `allocate`;
frozen parameters that an arena cannot hold stay where they are, with an empty key in the plan.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from kvstore_server.codec import compute_dtype
from kvstore_server.optimizer import coalesce_rows
from kvstore_server.plan import Plan, TensorSpec, make_plan, row_numel
from kvstore_server.protocol.rows import RowSet
from kvtrainer.client.replica_sums import ReplicaCompressor, sum_replica_rows
from kvtrainer.common.tensors import separate_sparse_gradients, tensor_dtype_name
from kvtrainer.errors import (
    ROW_MAJOR,
    ConfigurationError,
    MemoryFormatWarning,
    NotInitializedError,
    StaleGradientError,
    level_of_user,
)
from kvtrainer.memory.arena import HELD_DTYPES, Arena, arena_can_hold
from kvtrainer.memory.gradients import GradientTracker, lazy_parameters
from kvtrainer.memory.hash_table import is_hash_table
from kvtrainer.memory.row_sparse import RowSparseTables
from kvtrainer.parallel.replicas import (
    AUTO,
    FLAT,
    LISTS,
    flat_replica_sum,
    make_replica_reducer,
    policy_of,
    replica_device_names,
)
from kvtrainer.types import NO_TARGETS, Group

_dtype_of = attrgetter("dtype")


class DeviceMemory:
    """The replicas of all parameters on one device. `tables` are positions of those that are only in the store."""

    plan: Plan
    """The layout. Set when the parameters are placed."""
    arena: Arena
    """The weights and gradients. Set when the parameters are placed."""

    def __init__(
        self, parameters: Sequence[Parameter], names: Sequence[str], tables: Iterable[int] = ()
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.tracker = GradientTracker(parameters, names)
        self.rows: dict[int, RowSet] = {}
        """Key (by index) → row-sparse gradient that was gathered last; the arena has zeros for it."""
        self.borrowed: Mapping[int, Tensor] = {}
        """Key (by index) → gradient that is used without a copy, contiguous, until the step has used it."""
        self.targets: Mapping[int, Tensor] = NO_TARGETS
        """Key (by index) → flat buffer outside the arena to which the gradient was gathered."""
        self._tables = frozenset(tables)
        # Keys that are in a store or once had a row-sparse gradient. Checking every gradient would take time.
        self._sparse = set(tables)

    def gather(
        self,
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> None:
        """Copy the gradients of `present` parameters: dense ones into the arena, row-sparse ones into `rows`.

        Args:
            zero_copy_keys, targets: As in `Arena.gather_grads`.

        Raises:
            ParameterMovedError: The data of a parameter were replaced.
            ConfigurationError: A sparse gradient does not consist of whole rows.
        """
        self.arena.check_in_place()
        grads = self.tracker.gradients()
        by_rows = self._by_rows(present) if self._sparse else []
        dense = [is_in and i not in by_rows for i, is_in in enumerate(present)] if by_rows else present
        try:
            self.borrowed, self.targets = (
                self.arena.gather_grads(grads, dense, zero_copy_keys, targets),
                targets,
            )
        except RuntimeError:
            found = {i for i, is_in in enumerate(present) if is_in and _is_sparse(grads[i])}
            if found <= self._sparse:
                raise
            self._sparse |= found
            self.gather(present, zero_copy_keys, targets)
            return
        # A parameter without elements has no rows.
        self.rows = {i: self._rows(i) for i in by_rows if 0 not in self.plan.specs[i].shape}

    def scatter(self, present: Sequence[bool], with_rows: bool) -> None:
        """Copy the arena's gradients back to `present` parameters; row-sparse sums too if `with_rows`."""
        self.arena.scatter_grads([is_in and i not in self.rows for i, is_in in enumerate(present)])
        for key, (ids, values) in self.rows.items() if with_rows else ():
            if present[key]:
                shape, dtype = self.plan.specs[key].shape, self.parameters[key].dtype
                rows = values.to(dtype).view(-1, *shape[1:])
                self.parameters[key].grad = torch.sparse_coo_tensor(
                    ids.view(1, -1),
                    rows,
                    shape,
                    is_coalesced=True,
                    check_invariants=False,
                    device=rows.device,
                )

    @torch.no_grad()
    def unscale(self, present: Sequence[bool], factor: float) -> None:
        """Multiply the gradients that a step has used, in place."""
        used = [p for p, is_in in zip(self.parameters, present, strict=True) if is_in and p.grad is not None]
        self.tracker.forget()  # some gradients may be replaced
        separate_sparse_gradients([self.parameters[i] for i in sorted(self._sparse) if present[i]])
        for parameter in [p for p in used if p.grad.is_inference()]:  # type: ignore[union-attr]
            parameter.grad = None
        grads = {id(p.grad): p.grad for p in used if p.grad is not None}  # parameters may share one
        dense = [grad._values() if grad.is_sparse else grad for grad in grads.values()]
        if not dense:
            return
        try:
            torch._foreach_mul_(dense, factor)
        except RuntimeError:
            # Torch has written nothing: elements of a gradient share memory, as after expand().
            for parameter in used:
                parameter.grad = None if parameter.grad is None else parameter.grad * factor

    def scale_rows(self, scale: float) -> None:
        """Multiply the gathered row-sparse gradients, but not `.grad`."""
        if scale != 1.0:
            self.rows = {
                key: RowSet(rows.ids, rows.values.to(compute_dtype(self.plan.specs[key].dtype)) * scale)
                for key, rows in self.rows.items()
            }

    def differing(self, among: Iterable[int], held: Mapping[str, Tensor]) -> list[int]:
        """Return those of some parameters (by index) that differ in any bit from `held`, weights on the CPU."""
        found = []
        for i in among:
            spec, at = self.plan.specs[i], self.plan.key_offsets[i]
            if spec.row_sparse:
                continue
            mine = self.parameters[i].detach().cpu().view(-1)
            theirs = held[spec.dtype][at : at + spec.numel]
            if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                found.append(i)
        return found

    def densified(self, key: int) -> Tensor:
        """Return the gradient of a key in the arena, flat. Its rows are first written there if it has any."""
        spec, at = self.plan.specs[key], self.plan.key_offsets[key]
        piece = self.arena.grads[spec.dtype][at : at + spec.numel]
        if key in self.rows:
            ids, values = self.rows[key]
            piece.view(-1, values.shape[1])[ids] = values.to(piece.dtype)
        return piece

    def _by_rows(self, among: Sequence[bool]) -> list[int]:
        known = (i for i in sorted(self._sparse) if among[i])
        return [i for i in known if i in self._tables or _is_sparse(self.parameters[i].grad)]

    @torch.no_grad()
    def _rows(self, i: int) -> RowSet:
        """Return a gradient as rows with distinct ids. Raises ConfigurationError if that is not possible."""
        grad, spec = self.parameters[i].grad, self.plan.specs[i]
        assert grad is not None
        if grad.layout is torch.strided and spec.hash_table is None:
            # A dense gradient of a row-sparse parameter was assigned by the loop: it has all rows.
            return RowSet(
                torch.arange(spec.shape[0], device=grad.device),
                grad.detach().reshape(spec.shape[0], row_numel(spec)),
            )
        if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
            raise ConfigurationError(
                f"the gradient of {self.names[i]!r} has layout {grad.layout}"
                + (f" with sparse_dim {grad.sparse_dim()}" if grad.layout is torch.sparse_coo else "")
                + "; a sparse gradient must be a sparse COO tensor with sparse_dim 1, which has whole rows"
            )
        if not self.plan.takes_rows(i):
            raise ConfigurationError(
                f"the gradient of {self.names[i]!r} is sparse, but its rows of {row_numel(spec)} {spec.dtype} "
                "elements are longer than the 1 MiB that are updated together; build the module with sparse=False"
            )
        ids, values = grad._indices()[0], grad._values()
        table, num_rows = self.parameters[i], spec.shape[0]
        if is_hash_table(table):
            ids, num_rows = table.rows_of(ids).to(ids.device), 0
        is_half = values.dtype.itemsize < 4 and len(ids) > 1
        ids, summed = coalesce_rows(ids, values.float() if is_half else values, num_rows)
        return RowSet(ids, summed.to(values.dtype).reshape(len(ids), row_numel(spec)))


class Memory:
    """The parameters of all groups, with their arenas, gradients and names.

    Args:
        groups: torch parameter groups. The replicas on the first device of all parameters of a group come first, then
            those on the second device, and so on.
        names: Names of the parameters of each group, without replicas.

    Raises:
        ConfigurationError: A parameter cannot be stored. Nothing has been changed.
    """

    plan: Plan
    """The layout, equal on all devices. Set once `is_settled`."""
    arena: Arena
    """The weights and gradients on the first device. Set once `is_settled`."""

    def __init__(self, groups: Sequence[Group], names: Sequence[Sequence[str]]) -> None:
        # 1. Sort the parameters of all groups by device.
        self.names = list(chain.from_iterable(names))
        self._group_of = [at for at, own in enumerate(names) for _ in own]
        count = sum(len(group["params"]) for group in groups) // len(self.names)
        rows = list(zip(groups, map(len, names), strict=True))
        replicas: list[list[Parameter]] = [
            [p for group, own in rows for p in group["params"][own * at : own * (at + 1)]]
            for at in range(count)
        ]
        self.parameters = replicas[0]
        """The parameters on the first device."""
        self.has_replicas = count > 1
        self._devices = [_device_of(parameters) for parameters in replicas]
        # Names of the replicas in messages, by device.
        self._labels = [self.names]
        if count > 1:
            self._labels = [
                [f"{name} on {one}" for name in self.names] for one in replica_device_names(self._devices)
            ]
        # 2. Watch the gradients on every device.
        self.tables = RowSparseTables(replicas)
        """The row-sparse parameters, which are only in the store."""
        self.devices = [
            DeviceMemory(parameters, labels if at else self.names, self.tables)
            for at, (parameters, labels) in enumerate(zip(replicas, self._labels, strict=True))
        ]
        # It makes no difference on one device, and takes time to find out.
        policy = policy_of(groups) if count > 1 else LISTS
        self._may_lack = policy.may_lack
        self.num_averaged = 1 if policy.are_scaled else count
        """The number of gradients in a mean over this process."""
        self.own_present: list[Sequence[bool]] = []
        """By device: the keys whose gradients were gathered last."""
        self._is_summed = False
        self._reducer, self._reducer_name = make_replica_reducer(FLAT, self._devices), FLAT
        self.left_out: list[Parameter] = []
        """Parameters without a shape when the others were placed, and frozen ones that an arena cannot hold.

        They stay where they are, and have an empty key in the plan.
        """
        self.is_settled = False
        """Whether the plan and the arenas exist."""
        # 3. Place the parameters now if all have shapes.
        if not lazy_parameters(self.parameters):
            self._place()
        self.attach()

    @cached_property
    def keys(self) -> dict[int, int]:
        return {id(p): key for key, p in enumerate(self.parameters)}

    def allocate(self) -> None:
        """Move the parameters into arenas, once. Lazy parameters may stay outside while they take no part.

        Raises:
            NotInitializedError: Names the lazy parameters that take part.
            ConfigurationError: A parameter cannot be stored. Nothing has been changed.
        """
        rows = zip(self.names, self.parameters, self.participating(), strict=True)
        missing = [name for name, parameter, takes_part in rows if takes_part and is_lazy(parameter)]
        if missing:
            raise NotInitializedError(
                f"{len(missing)} of {len(self.names)} parameters have no shape yet, because no forward pass has "
                f"reached their lazy modules: {', '.join(missing)}. Run a forward pass first, or set "
                "requires_grad=False or grad_req='null' on parameters that are not to be trained"
            )
        self._place()

    def latecomers(self) -> list[str]:
        rows = zip(self.names, self.parameters, self.participating(), strict=True)
        late = set(map(id, self.left_out))
        return [name for name, p, takes_part in rows if takes_part and id(p) in late]

    def attach(self) -> None:
        for device in self.devices:
            device.tracker.attach()

    def participating(self) -> list[bool]:
        """Return which parameters take part in training on any device; see `GradientTracker.participating`."""
        return _any_of([device.tracker.participating() for device in self.devices])

    def fresh_by_device(self, with_edits: bool = False) -> list[list[bool]]:
        """Return by device which replicas take part and have a new gradient; see `GradientTracker.fresh`."""
        trackers = [device.tracker for device in self.devices]
        return [one.fresh(one.participating(), with_edits) for one in trackers]

    def fresh(
        self,
        is_strict: bool = False,
        with_edits: bool = False,
        summed: Sequence[bool] | None = None,
    ) -> list[bool]:
        """Return which parameters take part and have a new gradient on any device.

        Args:
            is_strict: Require a new gradient of every parameter that takes part and of all its replicas. If replicas
                may lack one, as in a DataParallel with uneven batches, one new gradient is enough.
            with_edits: Also count gradients that were written in place since they were used.
            summed: The parameters with a sum of new gradients, if that is known.

        Raises:
            StaleGradientError: Names the parameters without a new gradient.
            ParameterMovedError: Gradients are missing because the data of a parameter were replaced.
        """
        # 1. Ask the trackers, unless the caller knows.
        takes_part = [device.tracker.participating() for device in self.devices]
        if summed is not None:
            by_device, labels = [list(summed)], [self.names]
        else:
            rows = zip(self.devices, takes_part, strict=True)
            by_device = [device.tracker.fresh(takes, with_edits) for device, takes in rows]
            labels = self._labels
        # 2. With `is_strict`, list what is missing.
        fresh = by_device[0] if len(by_device) == 1 else _any_of(by_device)
        stale: list[str] = []
        if is_strict and by_device != takes_part:
            # A parameter that is frozen here may still have a sum of other workers' gradients.
            stale = [
                name
                for own_labels, own, takes in zip(labels, by_device, takes_part, strict=False)
                for name, is_fresh, takes_it, anywhere in zip(own_labels, own, takes, fresh, strict=True)
                if takes_it and not (anywhere if self._may_lack else is_fresh)
            ]
        # 3. Report what is missing, and keep no reference to gradients of a step that does not happen.
        if stale or not any(fresh):
            # If data were replaced, gradients went elsewhere. Then that is the error to report.
            self.check_in_place()
        if stale:
            self.forget_gradients()
            raise StaleGradientError.of(stale, sum(map(len, labels)), any(fresh), self.written())
        return fresh

    def has_writes(self) -> bool:
        return any([one.tracker.written or one.tracker.overwritten for one in self.devices])

    def written(self) -> list[str]:
        """Return the names of parameters whose gradient may be new or old; see `GradientTracker.written`."""
        return [names[key] for names, tracker in self._trackers() for key in tracker.written]

    def take_overwritten(self) -> list[str]:
        """Return, once, the names of parameters whose used and then edited gradient a backward pass has dropped."""
        found = []
        for names, tracker in self._trackers():
            keys, tracker.overwritten = tracker.overwritten, set()
            found += [names[key] for key in sorted(keys)]
        return found

    def _trackers(self) -> Iterator[tuple[Sequence[str], GradientTracker]]:
        return zip(self._labels, [device.tracker for device in self.devices], strict=True)

    def record_zeroed(self) -> None:
        for device in self.devices:
            device.tracker.record_zeroed()

    def forget_gradients(self) -> None:
        """Release the gradients that `fresh` has read; `gather` reads them again."""
        for device in self.devices:
            device.tracker.forget()

    def succeed(self, former: Memory) -> None:
        """Replace another memory on the same devices, and take over what its trackers know."""
        for device, before in zip(self.devices, former.devices, strict=True):
            device.tracker.succeed(before.tracker)
        former.close()

    def release(self, keys: Sequence[int]) -> None:
        for device in self.devices if self.is_settled else ():
            device.arena.release(keys)

    def close(self) -> None:
        for device in self.devices:
            device.tracker.close()

    def gather(
        self,
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> None:
        """Copy new gradients of `present` parameters into the arenas and `rows`; see `DeviceMemory.gather`."""
        self._is_summed = False
        self.own_present = [present]
        if self.has_replicas:
            self.own_present = [
                [asked and own for asked, own in zip(present, fresh, strict=True)]
                for fresh in self.fresh_by_device(with_edits=True)
            ]
        for device, own in zip(self.devices, self.own_present, strict=True):
            device.gather(own, zero_copy_keys, targets)

    def gather_sums(self, present: Sequence[bool]) -> None:
        """Like `gather`, for gradients on the first device that `scatter` has summed."""
        self._is_summed = True
        self.own_present = [present] * len(self.devices)
        self.devices[0].gather(present)

    def scale(self, scale: float) -> None:
        for device in self.devices:
            device.scale_rows(scale)
            for grad in device.arena.grads.values():
                grad.mul_(scale)

    @torch.no_grad()
    def sum_replicas(self, compressor: ReplicaCompressor | None, reducer: str = AUTO) -> None:
        """Sum the gathered gradients into the arena and `rows` of the first device.

        Half precision is accumulated in float32. A compressor encodes each dense gradient first, and these are added
        from left to right, as rows always are. Missing gradients count as zeros.

        Args:
            reducer: The order of summation, out of REDUCERS.

        Raises:
            NonFiniteGradientError: A gradient to be compressed is infinite or NaN.
        """
        self._is_summed = True
        if reducer != self._reducer_name:
            self._reducer, self._reducer_name = make_replica_reducer(reducer, self._devices), reducer
        has_rows, home, summed_rows = any(device.rows for device in self.devices), self.arena.device, {}
        # 1. Keys that are summed alone: rows, and everything that a compressor encodes.
        for key, spec in enumerate(self.plan.specs) if has_rows or compressor is not None else ():
            given = [device for device, own in zip(self.devices, self.own_present, strict=True) if own[key]]
            by_rows = [device.rows[key] for device in given if key in device.rows]
            if given and len(by_rows) == len(given):
                here = [RowSet(rows.ids.to(home), rows.values.to(home)) for rows in by_rows]
                summed_rows[key] = sum_replica_rows(here, spec.dtype)
                continue
            pieces = [device.densified(key) for device in self.devices] if given else []
            if by_rows and compressor is not None:
                flat_replica_sum(pieces)  # row-sparse gradients are not compressed
            elif given and compressor is not None:
                rows = zip(self.devices, pieces, strict=True)
                said = [piece if device in given else None for device, piece in rows]
                pieces[0].copy_(compressor.merge(spec.key, said))
        # 2. Everything else, dtype by dtype in one flat sum.
        if compressor is None:
            for dtype in self.arena.grads:
                self._reducer.sum([device.arena.grads[dtype] for device in self.devices])
        self.devices[0].rows = summed_rows

    @torch.no_grad()
    def share_weights(self, present: Sequence[bool] | None = None) -> None:
        """Broadcast the first device's weights to all replicas. `present` (None: all) have changed."""
        _, *copies = self.devices
        for dtype, flat in self.arena.weights.items():
            self._reducer.broadcast(flat, [copy.arena.weights[dtype] for copy in copies])
        for copy in copies:
            copy.arena.mark_updated(present)
            if present is None:
                copy.arena.writes.count_own()

    @torch.no_grad()
    def scatter(self, present: Sequence[bool], with_rows: bool) -> None:
        """Copy the sums on the first device back to `.grad` of all replicas; see `DeviceMemory.scatter`."""
        first, *copies = self.devices
        first.scatter(present, with_rows)
        for dtype, flat in self.arena.grads.items() if copies else ():
            self._reducer.broadcast(flat, [copy.arena.grads[dtype] for copy in copies])
        for copy in copies:
            home = copy.arena.device
            copy.rows = {
                key: rows._replace(ids=rows.ids.to(home), values=rows.values.to(home))
                for key, rows in first.rows.items()
            }
            copy.scatter(present, with_rows)

    def is_finite(self) -> bool:
        """Return whether all gathered gradients are finite. Blocks until the device is done."""
        # A sum is finite only if all summands are.
        devices = self.devices[:1] if self._is_summed else self.devices
        grads = [grad for one in devices for grad in one.arena.grads.values()]
        grads += [rows.values for one in devices for rows in one.rows.values()]
        bounds = [bound for grad in grads if grad.numel() for bound in torch.aminmax(grad)]
        # aminmax propagates NaN, so two numbers for each tensor are enough.
        return all(math.isfinite(bound.item()) for bound in bounds)

    def check_in_place(self) -> None:
        for device in self.devices:
            device.arena.check_in_place()

    def accept_writes(self, is_in_store: bool) -> None:
        """Detect writes to the weights from now on; see WriteDetector.accept."""
        for device in self.devices:
            device.arena.writes.accept(is_in_store)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the named parameters. Those of row-sparse ones are kept for the store.

        Raises:
            ConfigurationError: A name is unknown or a shape differs. Nothing has changed.
        """
        by_name = dict(zip(self.names, self.parameters, strict=True))
        unknown = [repr(name) for name in values if name not in by_name]
        if unknown:
            raise ConfigurationError(
                f"the Trainer has no parameter {', '.join(unknown)}; its parameters are {', '.join(self.names)}"
            )
        left_out = set(map(id, self.left_out))
        if outside := [repr(name) for name in values if id(by_name[name]) in left_out]:
            raise ConfigurationError(
                f"{', '.join(outside)}: the Trainer does not hold these parameters, because they are frozen and of an "
                "unsupported kind, or have no shape yet; write to them directly, on every worker"
            )
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != by_name[name].shape:
                shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigurationError(
                    f"parameter {name!r} has shape {list(by_name[name].shape)}, its new value {shape}"
                )
        for i, name in enumerate(self.names):
            if name in values and i in self.tables:
                self.tables.give(i, values[name])
            elif name in values:
                self.parameters[i].copy_(values[name])

    def _place(self) -> None:
        # 1. Leave out lazy parameters and frozen ones that an arena cannot hold.
        out = {
            key
            for key, p in enumerate(self.parameters)
            if not p.requires_grad and not (is_lazy(p) or arena_can_hold(p, self._devices[0]))
        }
        out.update([self.keys[id(p)] for p in lazy_parameters(self.parameters)])
        self.left_out = [self.parameters[key] for key in sorted(out)]
        placed = self._with_places_held(0, out)
        # 2. Refuse what cannot be trained, before anything is moved.
        if set(map(_dtype_of, placed)) - HELD_DTYPES:
            wrong = [
                f"{n!r} ({p.dtype})"
                for n, p in zip(self.names, placed, strict=True)
                if p.dtype not in HELD_DTYPES
            ]
            raise ConfigurationError(
                f"the trainer supports float16, bfloat16, float32 and float64, but not {', '.join(wrong)}; freeze "
                "these parameters (p.requires_grad_(False)) or leave them out; for complex numbers train a real view "
                "made by torch.view_as_real"
            )
        # 3. Make the plan.
        sizes, dtypes = [p.shape for p in placed], [tensor_dtype_name(p.dtype) for p in placed]
        # Equal shapes share a tuple: thousands of tuples would trigger a full garbage collection.
        shape_of = {size: tuple(size) for size in set(sizes)}
        shapes = [shape_of[size] for size in sizes]
        tables = set(self.tables)
        in_store = [key in tables for key in range(len(placed))]
        rows = zip(self.names, shapes, dtypes, self._group_of, in_store, strict=True)
        # tuple.__new__ takes half the time of TensorSpec(), and there may be thousands.
        specs = [tuple.__new__(TensorSpec, (*row, None)) for row in rows]
        for key in tables:
            table = placed[key]
            if is_hash_table(table):
                specs[key] = table.spec(specs[key].key, specs[key].dtype, specs[key].group)
        self.plan = make_plan(specs, 1)
        # 4. Move the parameters, and warn about memory formats that are lost.
        named = zip(self.names, placed, in_store, strict=True)
        others = [
            name
            for name, p, is_table in named
            if not is_table and p.layout is torch.strided and not p.is_contiguous()
        ]
        for at, device in enumerate(self.devices):
            parameters = self._with_places_held(at, out) if at else placed
            device.arena, device.plan = Arena(parameters, device.names, self.plan), self.plan
        self.arena, self.is_settled = self.devices[0].arena, True
        if others:
            warnings.warn(
                f"{len(others)} of {len(self.names)} parameters lose their memory format: {', '.join(others)}; "
                f"{ROW_MAJOR}",
                MemoryFormatWarning,
                stacklevel=level_of_user(),
            )

    def _with_places_held(self, at: int, out: Collection[int]) -> Sequence[Parameter]:
        parameters = self.devices[at].parameters
        if not out:
            return parameters
        dtypes = {key: parameters[key].dtype for key in out}
        empty = {
            key: torch.empty(
                0, dtype=dtype if dtype in HELD_DTYPES else torch.float32, device=self._devices[at]
            )
            for key, dtype in dtypes.items()
        }
        return [
            Parameter(empty[key], requires_grad=False) if key in empty else p
            for key, p in enumerate(parameters)
        ]


def _device_of(parameters: Sequence[Parameter]) -> torch.device:
    return next((p for p in parameters if p.requires_grad), parameters[0]).device


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def _any_of(rows: Sequence[list[bool]]) -> list[bool]:
    return rows[0] if len(rows) == 1 else [any(column) for column in zip(*rows, strict=True)]
