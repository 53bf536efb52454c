"""Parameters that are on several devices of this process: each device has a Layout, and the first one has the sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvstore_server.plan import row_numel
from kvstore_server.reduction import RowSet
from kvtrainer.kvstore.replica_compression import ReplicaCompressor
from kvtrainer.kvstore.row_sums import sum_rows
from kvtrainer.memory.gradients import GradientTracker, stale_error
from kvtrainer.memory.layout import Layout
from kvtrainer.parallel.policy import device_names, policy_of
from kvtrainer.parallel.reducers import AUTO, FLAT, FlatReducer, make_reducer
from kvtrainer.types import Group


def make_layout(groups: Sequence[Group], names: Sequence[Sequence[str]]) -> Layout:
    """The layout of groups that have as many parameters as names, or a multiple of that: replicas."""
    count = sum(len(group["params"]) for group in groups) // sum(map(len, names))
    return Layout(groups, names) if count == 1 else ReplicatedLayout(groups, names, count)


class ReplicatedLayout(Layout):
    """The first replicas, and in `copies` the others. Gradients are each device's own until `sum_replicas`.

    Args:
        groups, names: as of Layout; in each group the first replicas of all parameters come first.
        count: the number of devices.
    """

    copies: list[Layout]
    tracker: ReplicaTracker  # type: ignore[assignment]

    def __init__(self, groups: Sequence[Group], names: Sequence[Sequence[str]], count: int) -> None:
        super().__init__(groups, names)
        rows = list(zip(groups, names, strict=True))
        of_device = [
            [{"params": group["params"][len(own) * at : len(own) * (at + 1)]} for group, own in rows]
            for at in range(count)
        ]
        devices = [next(p for group in of for p in group["params"]).device for of in of_device]
        labels = device_names(devices)
        labelled = [[[f"{name} on {label}" for name in own] for own in names] for label in labels]
        self.copies = [
            Layout(of, own, self.plan) for of, own in zip(of_device[1:], labelled[1:], strict=True)
        ]
        self.tables.copies = [copy.tables for copy in self.copies]
        first = [name for own in labelled[0] for name in own]
        layouts = [self, *self.copies]
        policy = policy_of(groups)
        names_by_device = [first, *(copy.names for copy in self.copies)]
        self.tracker = ReplicaTracker(
            [layout.tracker for layout in layouts], names_by_device, policy.may_lack
        )
        self.num_averaged = 1 if policy.are_scaled else count
        self._devices = devices
        self._reducer = make_reducer(FLAT, devices)
        self._reducer_name = FLAT
        self._layouts: list[Layout] = layouts
        self.own_present: list[list[bool]] = []
        """By device: the keys whose gradients were gathered there last."""
        self._is_summed = False

    def gather_grads(self, present: Sequence[bool]) -> None:
        self.own_present = [
            [asked and own for asked, own in zip(present, fresh, strict=True)]
            for fresh in self.tracker.fresh_or_zeroed_by_device()
        ]
        self._is_summed = False
        super().gather_grads(self.own_present[0])
        for copy, own in zip(self.copies, self.own_present[1:], strict=True):
            copy.gather_grads(own)

    def gather_sums(self, present: Sequence[bool]) -> None:
        self._is_summed = True
        super().gather_grads(present)

    def scale_grads(self, scale: float) -> None:
        super().scale_grads(scale)
        for copy in self.copies:
            copy.scale_grads(scale)

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
            self._reducer, self._reducer_name = make_reducer(reducer, self._devices), reducer
        summed_rows = {}
        for key in range(len(self.plan.specs)) if self._has_rows or compressor is not None else ():
            given = [layout for layout, own in zip(self._layouts, self.own_present, strict=True) if own[key]]
            if given and all(key in layout.rows for layout in given):
                summed_rows[key] = self._sum_rows(key, given)
            elif given:
                self._densify(key)
                if compressor is not None:
                    self._compress(key, given, compressor)
        if compressor is None:
            for dtype in self.arena.grads:
                self._reducer.sum([layout.arena.grads[dtype] for layout in self._layouts])
        self.rows = summed_rows

    @torch.no_grad()
    def share_weights(self, present: Sequence[bool] | None = None) -> None:
        """Give every replica the weights of the first one, of which those that are `present` (None: all) are new."""
        for dtype, flat in self.arena.weights.items():
            self._reducer.broadcast(flat, [copy.arena.weights[dtype] for copy in self.copies])
        for copy in self.copies:
            copy.arena.mark_updated(present)
            if present is None:
                copy.writes.count_own()

    @torch.no_grad()
    def scatter_grads(self, present: Sequence[bool], with_rows: bool) -> None:
        super().scatter_grads(present, with_rows)
        for dtype, flat in self.arena.grads.items():
            self._reducer.broadcast(flat, [copy.arena.grads[dtype] for copy in self.copies])
        for copy in self.copies:
            device = copy.arena.device
            copy.rows = {
                key: rows._replace(ids=rows.ids.to(device), values=rows.values.to(device))
                for key, rows in self.rows.items()
            }
            copy.scatter_grads(present, with_rows)

    def grads_are_finite(self) -> bool:
        # A sum is finite only if all that was summed is.
        layouts = [] if self._is_summed else self.copies
        return super().grads_are_finite() and all(copy.grads_are_finite() for copy in layouts)

    def check_in_place(self) -> None:
        for layout in self._layouts:
            layout.arena.check_in_place()

    def accept_writes(self, is_in_store: bool) -> None:
        for layout in self._layouts:
            layout.writes.accept(is_in_store)

    @property
    def _has_rows(self) -> bool:
        return any(layout.rows for layout in self._layouts)

    def _sum_rows(self, key: int, given: Sequence[Layout]) -> RowSet:
        """The sum of the gradients of one key of which every device that has one has only rows."""
        device = self.arena.device
        parts = [layout.rows[key] for layout in given]
        here = [RowSet(part.ids.to(device), part.values.to(device)) for part in parts]
        return sum_rows(here, self.plan.specs[key].dtype)

    def _densify(self, key: int) -> None:
        """Write the rows of a key to its place in the arena, on every device that has only rows of it."""
        for layout in self._layouts:
            if key in layout.rows:
                ids, values = layout.rows[key]
                piece = self._piece(layout, key)
                piece.view(-1, row_numel(self.plan.specs[key]))[ids] = values.to(piece.dtype)

    def _compress(self, key: int, given: Sequence[Layout], compressor: ReplicaCompressor) -> None:
        """Sum what is said of the gradients of one key; where one has only rows, the gradients themselves."""
        target = self._piece(self, key)
        if any(key in layout.rows for layout in given):
            FlatReducer().sum([self._piece(layout, key) for layout in self._layouts])
            return
        pieces = [self._piece(layout, key) if layout in given else None for layout in self._layouts]
        target.copy_(compressor.merge(self.plan.specs[key].key, pieces))

    def _piece(self, layout: Layout, key: int) -> Tensor:
        spec, at = self.plan.specs[key], self.plan.key_offsets[key]
        return layout.arena.grads[spec.dtype][at : at + spec.numel]


class ReplicaTracker:
    """The trackers of all devices as one: a parameter is fresh, or takes part, if a replica of it does.

    Args:
        trackers: of each device.
        names: of its replicas, for messages.
        may_lack: whether a gradient on one device is enough.
    """

    def __init__(
        self, trackers: Sequence[GradientTracker], names: Sequence[Sequence[str]], may_lack: bool = False
    ) -> None:
        self._trackers = list(trackers)
        self._names = names
        self._may_lack = may_lack

    def attach(self) -> None:
        """As GradientTracker.attach."""
        for tracker in self._trackers:
            tracker.attach()

    def participating(self) -> list[bool]:
        """As GradientTracker.participating."""
        return _any_of([tracker.participating() for tracker in self._trackers])

    def fresh_by_device(self) -> list[list[bool]]:
        """For each device, which of its replicas take part and have a fresh gradient."""
        return [tracker.fresh(tracker.participating()) for tracker in self._trackers]

    def fresh(self, among: Sequence[bool]) -> list[bool]:
        """As GradientTracker.fresh."""
        found = _any_of(self.fresh_by_device())
        return [asked and is_fresh for asked, is_fresh in zip(among, found, strict=True)]

    def fresh_or_zeroed_by_device(self) -> list[list[bool]]:
        """As `fresh_by_device`, and which were set to zero."""
        return [tracker.fresh_or_zeroed(tracker.participating()) for tracker in self._trackers]

    def fresh_or_zeroed(self, among: Sequence[bool]) -> list[bool]:
        """As GradientTracker.fresh_or_zeroed."""
        found = _any_of(self.fresh_or_zeroed_by_device())
        return [asked and is_there for asked, is_there in zip(among, found, strict=True)]

    def is_fresh(self, i: int) -> bool:
        """As GradientTracker.is_fresh."""
        return any(tracker.is_fresh(i) for tracker in self._trackers)

    def fresh_or_raise(self, summed: Sequence[bool] | None = None) -> list[bool]:
        """As GradientTracker.fresh_or_raise; without sums every replica that takes part must have a gradient.

        Where they `may_lack`, one of them must.
        """
        if summed is not None:
            return self._trackers[0].fresh_or_raise(summed)
        by_device = self.fresh_by_device()
        fresh = _any_of(by_device)
        stale = [
            name
            for tracker, own, names in zip(self._trackers, by_device, self._names, strict=True)
            for name, takes, is_fresh, anywhere in zip(
                names, tracker.participating(), own, fresh, strict=True
            )
            if takes and not (anywhere if self._may_lack else is_fresh)
        ]
        if stale:
            raise stale_error(stale, sum(map(len, self._names)), any(fresh))
        return fresh

    def consume(self, indices: Iterable[int]) -> None:
        """As GradientTracker.consume, for all replicas."""
        used = list(indices)
        for tracker in self._trackers:
            tracker.consume(used)

    def close(self) -> None:
        """As GradientTracker.close."""
        for tracker in self._trackers:
            tracker.close()


def _any_of(rows: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(column) for column in zip(*rows, strict=True)]
