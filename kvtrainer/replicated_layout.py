"""Parameters that are on several devices of this process: each device has a Layout, and the first one has the sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvstore_server.plan import row_numel
from kvstore_server.reduction import compute_dtype
from kvtrainer.gradients import GradientTracker, stale_error
from kvtrainer.kvstore.replica_compression import ReplicaCompressor
from kvtrainer.layout import Layout
from kvtrainer.parameters import Group
from kvtrainer.replicas import device_names
from kvtrainer.row_sums import sum_rows


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
        first = [name for own in labelled[0] for name in own]
        layouts = [self, *self.copies]
        self.tracker = ReplicaTracker(
            [layout.tracker for layout in layouts], [first, *(copy.names for copy in self.copies)]
        )
        self._layouts: list[Layout] = layouts
        self.own_present: list[list[bool]] = []
        """By device: the keys whose gradients were gathered there last."""
        self._is_summed = False

    def gather_grads(self, present: Sequence[bool]) -> None:
        self.own_present = [
            [asked and own for asked, own in zip(present, fresh, strict=True)]
            for fresh in self.tracker.fresh_by_device()
        ]
        self._is_summed = False
        super().gather_grads(self.own_present[0])
        for copy, own in zip(self.copies, self.own_present[1:], strict=True):
            copy.gather_grads(own)

    def gather_sums(self, present: Sequence[bool]) -> None:
        self._is_summed = True
        super().gather_grads(present)

    @torch.no_grad()
    def sum_replicas(self, compressor: ReplicaCompressor | None) -> None:
        """Sum what was gathered, from left to right, into the arena and `rows` of the first device.

        Half precision accumulates in float32. With a compressor, dense gradients count as what it says of each.

        Raises:
            NonFiniteGradientError: one that is to be compressed is infinite or not a number.
        """
        self._is_summed = True
        all_same = all(own == self.own_present[0] for own in self.own_present)
        if compressor is None and all_same and not any(layout.rows for layout in self._layouts):
            for dtype, flat in self.arena.grads.items():
                _fold(flat, [copy.arena.grads[dtype] for copy in self.copies], dtype)
            return
        summed_rows = {}
        for key in range(len(self.plan.specs)):
            given = [layout for layout, own in zip(self._layouts, self.own_present, strict=True) if own[key]]
            if given and all(key in layout.rows for layout in given):
                parts = [layout.rows[key] for layout in given]
                here = [part._replace(ids=part.ids.to(self.arena.device)) for part in parts]
                here = [part._replace(values=part.values.to(self.arena.device)) for part in here]
                summed_rows[key] = sum_rows(here, self.plan.specs[key].dtype)
            elif given:
                self._sum_dense(key, given, compressor)
        self.rows = summed_rows

    @torch.no_grad()
    def share_weights(self, present: Sequence[bool] | None = None) -> None:
        """Give every replica the weights of the first one, of which those that are `present` (None: all) are new."""
        for copy in self.copies:
            for dtype, flat in copy.arena.weights.items():
                flat.copy_(self.arena.weights[dtype])
            copy.arena.mark_updated(present)
            if present is None:
                copy.writes.count_own()

    @torch.no_grad()
    def scatter_grads(self, present: Sequence[bool], with_rows: bool) -> None:
        super().scatter_grads(present, with_rows)
        for copy in self.copies:
            for dtype, flat in copy.arena.grads.items():
                flat.copy_(self.arena.grads[dtype])
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

    def accept_writes(self) -> None:
        for layout in self._layouts:
            layout.writes.accept()

    def _sum_dense(self, key: int, given: Sequence[Layout], compressor: ReplicaCompressor | None) -> None:
        """Sum the gradients of one key, of which some may have only rows."""
        target, name = self._piece(self, key), self.plan.specs[key].key
        spec, device = self.plan.specs[key], self.arena.device
        pieces: list[Tensor | None] = []
        for layout in self._layouts:
            piece = self._piece(layout, key)
            if layout not in given:
                pieces.append(None)
                continue
            if key in layout.rows:
                ids, values = layout.rows[key]
                piece.view(-1, row_numel(spec))[ids] = values.to(piece.dtype)
            pieces.append(piece)
        if compressor is not None and not any(key in layout.rows for layout in given):
            target.copy_(compressor.merge(name, pieces))
            return
        first, *others = [piece.to(device) for piece in pieces if piece is not None]
        if first is not target:
            target.copy_(first)
        _fold(target, others, spec.dtype)

    def _piece(self, layout: Layout, key: int) -> Tensor:
        spec, at = self.plan.specs[key], self.plan.key_offsets[key]
        return layout.arena.grads[spec.dtype][at : at + spec.numel]


class ReplicaTracker:
    """The trackers of all devices as one: a parameter is fresh, or takes part, if a replica of it does.

    Args:
        trackers: of each device.
        names: of its replicas, for messages.
    """

    def __init__(self, trackers: Sequence[GradientTracker], names: Sequence[Sequence[str]]) -> None:
        self._trackers = list(trackers)
        self._names = names

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

    def is_fresh(self, i: int) -> bool:
        """As GradientTracker.is_fresh."""
        return any(tracker.is_fresh(i) for tracker in self._trackers)

    def fresh_or_raise(self, summed: Sequence[bool] | None = None) -> list[bool]:
        """As GradientTracker.fresh_or_raise; without sums every replica that takes part must have a gradient."""
        if summed is not None:
            return self._trackers[0].fresh_or_raise(summed)
        by_device = self.fresh_by_device()
        fresh = _any_of(by_device)
        stale = [
            name
            for tracker, own, names in zip(self._trackers, by_device, self._names, strict=True)
            for name, takes, is_fresh in zip(names, tracker.participating(), own, strict=True)
            if takes and not is_fresh
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


def _fold(total: Tensor, others: Sequence[Tensor], dtype: str) -> None:
    """Add others to `total` from left to right, in the dtype to sum `dtype` in."""
    compute = compute_dtype(dtype)
    wide = total.to(compute)
    for other in others:
        wide.add_(other.to(total.device, compute))
    if wide is not total:
        total.copy_(wide)


def _any_of(rows: Sequence[Sequence[bool]]) -> list[bool]:
    return [any(column) for column in zip(*rows, strict=True)]
