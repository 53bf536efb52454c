"""A Trainer's parameters in their places, on one device or several: names, plan, arenas, new gradients and their sums.

The replicas of the parameters on each device are a DeviceMemory; the first one has the sums. Replicas have gradients of
their own until `sum_replicas`.
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
from kvtrainer.client.replica_sums import ReplicaCompressor, sum_rows
from kvtrainer.errors import (
    ROW_MAJOR,
    ConfigurationError,
    MemoryFormatWarning,
    NotInitializedError,
    StaleGradientError,
    level_of_user,
)
from kvtrainer.memory.arena import HELD_DTYPES, Arena, can_hold, dtype_name
from kvtrainer.memory.gradients import GradientTracker, lazy_among
from kvtrainer.memory.row_sparse import RowTables
from kvtrainer.parallel.replicas import AUTO, FLAT, LISTS, device_names, flat_sum, make_reducer, policy_of
from kvtrainer.types import NO_TARGETS, Group

_dtype_of = attrgetter("dtype")


class DeviceMemory:
    """The replicas of all parameters on one device; position i is key i of the plan, the arena and the tracker.

    Args:
        parameters: in the order of the groups.
        names: of each, for messages.
        tables: those that live in the store alone, by position.
    """

    plan: Plan
    """Where every element lies; there once the parameters are placed."""
    arena: Arena
    """The weights and gradients; there once the parameters are placed."""

    def __init__(
        self, parameters: Sequence[Parameter], names: Sequence[str], tables: Iterable[int] = ()
    ) -> None:
        self.parameters = parameters
        self.names = names
        self.tracker = GradientTracker(parameters, names)
        self.rows: dict[int, RowSet] = {}
        """The row-sparse gradients that were gathered last, by index of the key; the arena has zeros for them."""
        self.borrowed: Mapping[int, Tensor] = {}
        """The gradients that were left where they are, contiguous, by index of the key, until they are used."""
        self.targets: Mapping[int, Tensor] = NO_TARGETS
        """Where gradients were gathered that are not in the arena, flat, by index of the key."""
        self._tables = frozenset(tables)
        # Those that had a row-sparse gradient once, or live in a store: to look at every one would take time.
        self._sparse = set(tables)

    def gather(
        self,
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> None:
        """Copy gradients of parameters `present`, dense ones into the arena, or to `rows`.

        Args:
            zero_copy_keys: keys (by index) of which long dense ones stay where they are, and in `borrowed`.
            targets: as of `Arena.gather_grads`.

        Raises:
            ParameterMovedError: the data of a parameter were replaced.
            ConfigurationError: a gradient is sparse in another way than by rows.
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
        # Parameters without elements have no rows.
        self.rows = {i: self._rows(i) for i in by_rows if 0 not in self.plan.specs[i].shape}

    def scatter(self, present: Sequence[bool], with_rows: bool) -> None:
        """Copy the arena's gradients back to the parameters that are `present`.

        Args:
            with_rows: whether `rows` replace the row-sparse gradients, because they are sums of several.
        """
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
        """Multiply the gradients that a step has used, where they are."""
        used = [p for p, is_in in zip(self.parameters, present, strict=True) if is_in and p.grad is not None]
        self.tracker.forget()  # some may be replaced
        for parameter in [p for p in used if p.grad.is_inference()]:  # type: ignore[union-attr]
            parameter.grad = None
        grads = {id(p.grad): p.grad for p in used if p.grad is not None}  # parameters may share one
        dense = [grad._values() if grad.is_sparse else grad for grad in grads.values()]
        if not dense:
            return
        try:
            torch._foreach_mul_(dense, factor)
        except RuntimeError:
            # torch has written none: elements of one share memory, as in an expanded gradient.
            for parameter in used:
                parameter.grad = None if parameter.grad is None else parameter.grad * factor

    def scale_rows(self, scale: float) -> None:
        """Multiply gathered row-sparse gradients, not those that they were copied from."""
        if scale != 1.0:
            self.rows = {
                key: RowSet(rows.ids, rows.values.to(compute_dtype(self.plan.specs[key].dtype)) * scale)
                for key, rows in self.rows.items()
            }

    def differing(self, among: Iterable[int], held: Mapping[str, Tensor]) -> list[int]:
        """List parameters, of some (by index), that differ in any bit from other weights.

        Args:
            held: the other weights, laid out by the plan, on the CPU.
        """
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
        """Get the gradient of a key in the arena, flat; where it goes by rows, those are written there first."""
        spec, at = self.plan.specs[key], self.plan.key_offsets[key]
        piece = self.arena.grads[spec.dtype][at : at + spec.numel]
        if key in self.rows:
            ids, values = self.rows[key]
            piece.view(-1, values.shape[1])[ids] = values.to(piece.dtype)
        return piece

    def _by_rows(self, among: Sequence[bool]) -> list[int]:
        """List those parameters among some whose gradient goes by rows now."""
        known = (i for i in sorted(self._sparse) if among[i])
        return [i for i in known if i in self._tables or _is_sparse(self.parameters[i].grad)]

    @torch.no_grad()
    def _rows(self, i: int) -> RowSet:
        """Read a gradient by rows, each once: values of a row that appears several times are added in order.

        Raises:
            ConfigurationError: it is sparse in another way than by rows, or its rows are too long.
        """
        grad, spec = self.parameters[i].grad, self.plan.specs[i]
        assert grad is not None
        if grad.layout is torch.strided:
            # Of a row-sparse parameter, from elsewhere than its own backward pass: it has all rows.
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
        is_half = values.dtype.itemsize < 4 and len(ids) > 1
        ids, summed = coalesce_rows(ids, values.float() if is_half else values, spec.shape[0])
        return RowSet(ids, summed.to(values.dtype).reshape(len(ids), row_numel(spec)))


class Memory:
    """The parameters of all groups, and everything that is kept beside them.

    Gradients are watched from the start. The parameters move into the arena at once if all have shapes, and otherwise
    when `settle` is called.

    Args:
        groups: torch parameter groups; the first replicas of all parameters of a group come first, then those on the
            second device, and so on.
        names: of the parameters of each group, without replicas.

    Raises:
        ConfigurationError: a parameter cannot be stored; nothing has been changed then.
    """

    plan: Plan
    """Where every element lies, on every device; there once `is_settled`."""
    arena: Arena
    """The weights and gradients on the first device; there once `is_settled`."""

    def __init__(self, groups: Sequence[Group], names: Sequence[Sequence[str]]) -> None:
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
        self._homes = [_home_of(parameters) for parameters in replicas]
        # By device: what replicas are called in messages.
        self._labels = [self.names]
        if count > 1:
            self._labels = [[f"{name} on {one}" for name in self.names] for one in device_names(self._homes)]
        self.tables = RowTables(replicas)
        """Those that live in the store alone."""
        self.devices = [
            DeviceMemory(parameters, labels if at else self.names, self.tables)
            for at, (parameters, labels) in enumerate(zip(replicas, self._labels, strict=True))
        ]
        # Of one device it changes nothing, and to look for it takes time.
        policy = policy_of(groups) if count > 1 else LISTS
        self._may_lack = policy.may_lack
        self.num_averaged = 1 if policy.are_scaled else count
        """How many gradients of a parameter a mean over this process is divided by."""
        self.own_present: list[Sequence[bool]] = []
        """By device: the keys whose gradients were gathered there last."""
        self._is_summed = False
        self._reducer, self._reducer_name = make_reducer(FLAT, self._homes), FLAT
        self.left_out: list[Parameter] = []
        """Those that had no shape when the others were placed, and frozen ones that an arena cannot hold.

        They stay where they are, and an empty key holds the place of each.
        """
        self.is_settled = False
        """Whether there are a plan and arenas."""
        if not lazy_among(self.parameters):
            self._place()
        self.attach()

    @cached_property
    def keys(self) -> dict[int, int]:
        """id of a parameter on the first device → its key."""
        return {id(p): key for key, p in enumerate(self.parameters)}

    def settle(self) -> None:
        """Move the parameters into an arena, once.

        A parameter without a shape may stay outside while it takes no part in training.

        Raises:
            NotInitializedError: one takes part; names all of them.
            ConfigurationError: a parameter cannot be stored; nothing has been changed then.
        """
        rows = zip(self.names, self.parameters, self.participating(), strict=True)
        missing = [name for name, parameter, takes_part in rows if takes_part and is_lazy(parameter)]
        if missing:
            raise NotInitializedError(
                f"{len(missing)} of {len(self.names)} parameters have no shape yet, because no forward pass has "
                f"reached their lazy modules: {', '.join(missing)}. Run one first, or set requires_grad=False or "
                "grad_req='null' on those that shall not be trained"
            )
        self._place()

    def latecomers(self) -> list[str]:
        """Name parameters that take part, but were left out when the arena was made."""
        rows = zip(self.names, self.parameters, self.participating(), strict=True)
        late = set(map(id, self.left_out))
        return [name for name, p, takes_part in rows if takes_part and id(p) in late]

    def attach(self) -> None:
        """Watch the gradients of all parameters that can be watched by now."""
        for device in self.devices:
            device.tracker.attach()

    def participating(self) -> list[bool]:
        """Tell for each parameter whether it takes part in training on any device.

        Raises:
            ConfigurationError: a parameter has an unknown `grad_req`.
        """
        return _any_of([device.tracker.participating() for device in self.devices])

    def fresh_by_device(self, with_edits: bool = False) -> list[list[bool]]:
        """Tell for each device which of its replicas take part and have a new gradient; arguments as of `fresh`."""
        trackers = [device.tracker for device in self.devices]
        return [one.fresh(one.participating(), with_edits) for one in trackers]

    def fresh(
        self,
        is_strict: bool = False,
        with_edits: bool = False,
        summed: Sequence[bool] | None = None,
    ) -> list[bool]:
        """Tell which parameters take part and have a new gradient on any device.

        Args:
            is_strict: whether every parameter that takes part must have one, and so must all of its replicas. Of
                replicas that may lack one, as in a DataParallel of uneven batches, a single new gradient is enough.
            with_edits: whether one counts that was written in place since it was used.
            summed: the parameters that have the sum of new gradients, if that is known.

        Raises:
            StaleGradientError: some have none; names all of them.
            ParameterMovedError: none has one, or too few, and the data of a parameter were replaced.
        """
        takes_part = [device.tracker.participating() for device in self.devices]
        if summed is not None:
            by_device, labels = [list(summed)], [self.names]
        else:
            rows = zip(self.devices, takes_part, strict=True)
            by_device = [device.tracker.fresh(takes, with_edits) for device, takes in rows]
            labels = self._labels
        fresh = by_device[0] if len(by_device) == 1 else _any_of(by_device)
        stale: list[str] = []
        if is_strict and by_device != takes_part:
            # What is frozen here may have a sum all the same, of other workers' gradients.
            stale = [
                name
                for own_labels, own, takes in zip(labels, by_device, takes_part, strict=False)
                for name, is_fresh, takes_it, anywhere in zip(own_labels, own, takes, fresh, strict=True)
                if takes_it and not (anywhere if self._may_lack else is_fresh)
            ]
        if stale or not any(fresh):
            # Gradients do not come back to parameters that were moved, which is then what has to be said.
            self.check_in_place()
        if stale:
            self.forget_gradients()
            raise StaleGradientError.of(stale, sum(map(len, labels)), any(fresh), self.written())
        return fresh

    def has_writes(self) -> bool:
        """Return whether `written` or `take_overwritten` would name any."""
        return any([one.tracker.written or one.tracker.overwritten for one in self.devices])

    def written(self) -> list[str]:
        """Name parameters with gradients that `fresh` could not tell from old ones."""
        return [names[key] for names, tracker in self._trackers() for key in tracker.written]

    def take_overwritten(self) -> list[str]:
        """Name parameters of which a backward pass dropped what was written in place.

        What was used by a step before; each is named once.
        """
        found = []
        for names, tracker in self._trackers():
            keys, tracker.overwritten = tracker.overwritten, set()
            found += [names[key] for key in sorted(keys)]
        return found

    def _trackers(self) -> Iterator[tuple[Sequence[str], GradientTracker]]:
        """Iterate over the trackers of all devices, with what parameters are called there."""
        return zip(self._labels, [device.tracker for device in self.devices], strict=True)

    def note_zeroed(self) -> None:
        """Note that `zero_grad` has zeroed all gradients."""
        for device in self.devices:
            device.tracker.note_zeroed()

    def forget_gradients(self) -> None:
        """Hold no gradient that `fresh` has seen, and read them again for `gather`: others may be assigned first."""
        for device in self.devices:
            device.tracker.forget()

    def succeed(self, former: Memory) -> None:
        """Take the place of another memory, on the same devices.

        What that knew of gradients goes along. A gradient of a parameter that was not there counts as new.
        """
        for device, before in zip(self.devices, former.devices, strict=True):
            device.tracker.succeed(before.tracker)
        former.close()

    def release(self, keys: Sequence[int]) -> None:
        """Let parameters go, which get memory of their own, with the same values."""
        for device in self.devices if self.is_settled else ():
            device.arena.release(keys)

    def close(self) -> None:
        """Stop watching gradients."""
        for device in self.devices:
            device.tracker.close()

    def gather(
        self,
        present: Sequence[bool],
        zero_copy_keys: Collection[int] = (),
        targets: Mapping[int, Tensor] = NO_TARGETS,
    ) -> None:
        """Copy new gradients of parameters `present` into the arenas, by rows into `rows`.

        Args:
            zero_copy_keys, targets: as of `DeviceMemory.gather`.

        Raises:
            ParameterMovedError: the data of a parameter were replaced.
            ConfigurationError: a gradient is sparse in another way than by rows.
        """
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
        """Do as `gather`, for gradients on the first device that are sums by `scatter`."""
        self._is_summed = True
        self.own_present = [present] * len(self.devices)
        self.devices[0].gather(present)

    def scale(self, scale: float) -> None:
        """Multiply all gradients that were gathered, not those that they were copied from."""
        for device in self.devices:
            device.scale_rows(scale)
            for grad in device.arena.grads.values():
                grad.mul_(scale)

    @torch.no_grad()
    def sum_replicas(self, compressor: ReplicaCompressor | None, reducer: str = AUTO) -> None:
        """Sum what was gathered into the arena and `rows` of the first device.

        Half precision accumulates in float32. With a compressor, dense gradients count as what it says of each, and
        are added from left to right, as rows always are. A gradient that a device does not have counts as zeros.

        Args:
            reducer: of REDUCERS; in which order.

        Raises:
            NonFiniteGradientError: one that is to be compressed is infinite or not a number.
        """
        self._is_summed = True
        if reducer != self._reducer_name:
            self._reducer, self._reducer_name = make_reducer(reducer, self._homes), reducer
        has_rows, home, summed_rows = any(device.rows for device in self.devices), self.arena.device, {}
        for key, spec in enumerate(self.plan.specs) if has_rows or compressor is not None else ():
            given = [device for device, own in zip(self.devices, self.own_present, strict=True) if own[key]]
            by_rows = [device.rows[key] for device in given if key in device.rows]
            if given and len(by_rows) == len(given):
                here = [RowSet(rows.ids.to(home), rows.values.to(home)) for rows in by_rows]
                summed_rows[key] = sum_rows(here, spec.dtype)
                continue
            pieces = [device.densified(key) for device in self.devices] if given else []
            if by_rows and compressor is not None:
                flat_sum(pieces)  # rows are not compressed
            elif given and compressor is not None:
                rows = zip(self.devices, pieces, strict=True)
                said = [piece if device in given else None for device, piece in rows]
                pieces[0].copy_(compressor.merge(spec.key, said))
        if compressor is None:
            for dtype in self.arena.grads:
                self._reducer.sum([device.arena.grads[dtype] for device in self.devices])
        self.devices[0].rows = summed_rows

    @torch.no_grad()
    def share_weights(self, present: Sequence[bool] | None = None) -> None:
        """Give every replica the first one's weights. Those `present` (None: all) are new."""
        _, *copies = self.devices
        for dtype, flat in self.arena.weights.items():
            self._reducer.broadcast(flat, [copy.arena.weights[dtype] for copy in copies])
        for copy in copies:
            copy.arena.mark_updated(present)
            if present is None:
                copy.arena.writes.count_own()

    @torch.no_grad()
    def scatter(self, present: Sequence[bool], with_rows: bool) -> None:
        """Copy the sums on the first device back to the gradients of all replicas; see `DeviceMemory.scatter`."""
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
        """Check that no gradient that was gathered is infinite or not a number; waits for the device."""
        # A sum is finite only if all that was summed is.
        devices = self.devices[:1] if self._is_summed else self.devices
        grads = [grad for one in devices for grad in one.arena.grads.values()]
        grads += [rows.values for one in devices for rows in one.rows.values()]
        bounds = [bound for grad in grads if grad.numel() for bound in torch.aminmax(grad)]
        # A NaN anywhere is the minimum and the maximum.
        return all(math.isfinite(bound.item()) for bound in bounds)

    def check_in_place(self) -> None:
        """Raise ParameterMovedError if the data of a parameter were replaced."""
        for device in self.devices:
            device.arena.check_in_place()

    def accept_writes(self, is_in_store: bool) -> None:
        """From now on watch for writes to the weights that come later; see WriteWatch.accept."""
        for device in self.devices:
            device.arena.writes.accept(is_in_store)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the parameters that they name; those of row-sparse ones are kept for the store.

        Raises:
            ConfigurationError: a name is unknown or a value has another shape; nothing has changed then.
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
                f"{', '.join(outside)}: the Trainer leaves these parameters where they are, because they are frozen "
                "and of a kind that it cannot hold, or have no shape yet; write to them yourself, on every worker"
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
        """Make the plan, and move the parameters on every device into an arena."""
        out = {
            key
            for key, p in enumerate(self.parameters)
            if not p.requires_grad and not (is_lazy(p) or can_hold(p, self._homes[0]))
        }
        out.update([self.keys[id(p)] for p in lazy_among(self.parameters)])
        self.left_out = [self.parameters[key] for key in sorted(out)]
        placed = self._with_places_held(0, out)
        if set(map(_dtype_of, placed)) - HELD_DTYPES:
            wrong = [
                f"{n!r} ({p.dtype})"
                for n, p in zip(self.names, placed, strict=True)
                if p.dtype not in HELD_DTYPES
            ]
            raise ConfigurationError(
                f"the trainer trains float16, bfloat16, float32 and float64, but not {', '.join(wrong)}; freeze these "
                "(p.requires_grad_(False)), which then stay where they are, or leave them out; of complex numbers "
                "train the view that torch.view_as_real makes"
            )
        sizes, dtypes = [p.shape for p in placed], [dtype_name(p.dtype) for p in placed]
        # One tuple for all that are alike: thousands more would have the garbage collector look through the process.
        shape_of = {size: tuple(size) for size in set(sizes)}
        shapes = [shape_of[size] for size in sizes]
        tables = set(self.tables)
        in_store = [key in tables for key in range(len(placed))]
        rows = zip(self.names, shapes, dtypes, self._group_of, in_store, strict=True)
        # There may be thousands: a call of TensorSpec takes twice as long.
        self.plan = make_plan([tuple.__new__(TensorSpec, row) for row in rows], 1)
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
        """Return a device's parameters, with an empty one for each that is left `out`."""
        parameters = self.devices[at].parameters
        if not out:
            return parameters
        dtypes = {key: parameters[key].dtype for key in out}
        empty = {
            key: torch.empty(
                0, dtype=dtype if dtype in HELD_DTYPES else torch.float32, device=self._homes[at]
            )
            for key, dtype in dtypes.items()
        }
        return [
            Parameter(empty[key], requires_grad=False) if key in empty else p
            for key, p in enumerate(parameters)
        ]


def _home_of(parameters: Sequence[Parameter]) -> torch.device:
    """Return the device of an arena for these parameters: that of those that are trained."""
    return next((p for p in parameters if p.requires_grad), parameters[0]).device


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.layout is not torch.strided


def _any_of(rows: Sequence[list[bool]]) -> list[bool]:
    return rows[0] if len(rows) == 1 else [any(column) for column in zip(*rows, strict=True)]
