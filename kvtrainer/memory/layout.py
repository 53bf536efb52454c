"""A Trainer's parameters in their places: names, gradient tracker, and once shapes are known, plan and arena."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvstore_server.reduction import RowSet, compute_dtype
from kvtrainer.errors import ConfigurationError, NotInitializedError
from kvtrainer.memory.arena import Arena, dtype_name
from kvtrainer.memory.gradients import GradientTracker
from kvtrainer.memory.row_grads import SparseGrads
from kvtrainer.memory.row_sparse import is_row_sparse
from kvtrainer.memory.row_tables import RowTables
from kvtrainer.memory.writes import WriteWatch
from kvtrainer.types import Group


class Layout:
    """The parameters of all groups in order; position i is key i of the plan, the arena and the tracker.

    Gradients are watched from the start. The parameters move into the arena at once if all have shapes, and otherwise
    when `settle` is called.

    Args:
        groups: torch parameter groups. What comes after as many parameters as a group has names are replicas.
        names: of their parameters, for each group.
        plan: where every element shall lie; made of the parameters if it is None.

    Raises:
        ConfigurationError: a parameter cannot be stored; nothing has been changed then.
    """

    writes: WriteWatch
    """What others than the Trainer do to the weights in the arena; there once the Layout is settled."""
    num_averaged = 1
    """How many gradients of a parameter a mean over this process is divided by."""
    copies: Sequence[Layout] = ()
    """The replicas of the parameters, if there are any: for each further device one Layout, by the same plan."""

    def __init__(
        self, groups: Sequence[Group], names: Sequence[Sequence[str]], plan: Plan | None = None
    ) -> None:
        self.names = list(chain.from_iterable(names))
        rows = list(zip(groups, names, strict=True))
        self.parameters: list[Parameter] = [p for group, own in rows for p in group["params"][: len(own)]]
        self.tracker = GradientTracker(self.parameters, self.names)
        self._group_of = [at for at, own in enumerate(names) for _ in own]
        self._given_plan = plan
        self._keys: dict[int, int] = {}
        self._placed: tuple[Plan, Arena] | None = None
        self.rows: dict[int, RowSet] = {}
        """The row-sparse gradients that were gathered last, by index of the key; the arena has zeros for them."""
        self._sparse = SparseGrads(self.parameters, self.names)
        self.tables = RowTables(self.parameters)
        """Those that live in the store alone."""
        self._left_out: list[Parameter] = []
        """Those that had no shape when the others were placed; an empty key holds the place of each."""
        if not any(is_lazy(p) for p in self.parameters):
            self._place()
        self.tracker.attach()

    @property
    def is_settled(self) -> bool:
        """Whether there are a plan and an arena."""
        return self._placed is not None

    def key_of(self, parameter: Tensor) -> int | None:
        """The key of a parameter; None if it is not one of these."""
        if not self._keys:
            self._keys = {id(p): key for key, p in enumerate(self.parameters)}
        return self._keys.get(id(parameter))

    @property
    def plan(self) -> Plan:
        """Where every element lies. Raises NotInitializedError as `settle`, before it."""
        return self._both()[0]

    @property
    def arena(self) -> Arena:
        """The weights and gradients. Raises NotInitializedError as `settle`, before it."""
        return self._both()[1]

    def settle(self) -> None:
        """Move the parameters into an arena, if that has not been done.

        A parameter without a shape may stay outside while it takes no part in training.

        Raises:
            NotInitializedError: one takes part; names all of them.
            ConfigurationError: a parameter cannot be stored; nothing has been changed then.
        """
        if self._placed is None:
            rows = zip(self.names, self.parameters, self.tracker.participating(), strict=True)
            missing = [name for name, parameter, takes_part in rows if takes_part and is_lazy(parameter)]
            if missing:
                raise NotInitializedError(
                    f"{len(missing)} of {len(self.names)} parameters have no shape yet, because no forward pass has "
                    f"reached their lazy modules: {', '.join(missing)}. Run one first, or set requires_grad=False or "
                    "grad_req='null' on those that shall not be trained"
                )
            self._place()

    def latecomers(self) -> list[str]:
        """The parameters that take part although they had no shape when the others went into the arena."""
        if not self._left_out:
            return []
        rows = zip(self.names, self.parameters, self.tracker.participating(), strict=True)
        return [
            name for name, p, takes_part in rows if takes_part and any(p is one for one in self._left_out)
        ]

    def gather_grads(self, present: Sequence[bool]) -> None:
        """Copy the dense gradients of the parameters that are `present` into the arena, and the others to `rows`.

        Raises:
            ParameterMovedError: the data of a parameter were replaced.
            ConfigurationError: a gradient is sparse in another way than by rows.
        """
        self.arena.check_in_place()
        while True:
            sparse = self._sparse.present(present)
            try:
                self.arena.gather_grads(_without(present, sparse))
                break
            except RuntimeError:
                if not self._sparse.find(present):
                    raise
        self.rows = self._sparse.rows(sparse, self.plan)

    def gather_sums(self, present: Sequence[bool]) -> None:
        """As `gather_grads`, of gradients that `scatter_grads` has replaced by sums."""
        self.gather_grads(present)

    def scale_rows(self, scale: float) -> None:
        """Multiply the row-sparse gradients that were gathered, not those that they were copied from."""
        if scale != 1.0:
            self.rows = {
                key: RowSet(rows.ids, rows.values.to(compute_dtype(self.plan.specs[key].dtype)) * scale)
                for key, rows in self.rows.items()
            }

    def scale_grads(self, scale: float) -> None:
        """Multiply all gradients that were gathered, not those that they were copied from."""
        if scale != 1.0:
            self.scale_rows(scale)
            for grad in self.arena.grads.values():
                grad.mul_(scale)

    def scatter_grads(self, present: Sequence[bool], with_rows: bool) -> None:
        """Copy the arena's gradients back to the parameters that are `present`.

        Args:
            with_rows: whether `rows` replace the row-sparse gradients, because they are sums of several.
        """
        self.arena.scatter_grads(_without(present, list(self.rows)))
        for key, (ids, values) in self.rows.items() if with_rows else ():
            if present[key]:
                shape, dtype = self.plan.specs[key].shape, self.parameters[key].dtype
                rows = values.to(dtype).view(-1, *shape[1:])
                self.parameters[key].grad = torch.sparse_coo_tensor(
                    ids.view(1, -1), rows, shape, is_coalesced=True, check_invariants=False
                )

    def grads_are_finite(self) -> bool:
        """Whether no gradient in the arena or in `rows` is infinite or not a number; waits for the device."""
        grads = [*self.arena.grads.values(), *(rows.values for rows in self.rows.values())]
        bounds = [bound for grad in grads if grad.numel() for bound in torch.aminmax(grad)]
        # A NaN anywhere is the minimum and the maximum.
        return all(math.isfinite(bound.item()) for bound in bounds)

    def check_in_place(self) -> None:
        """Raise ParameterMovedError if the data of a parameter were replaced."""
        self.arena.check_in_place()

    def accept_writes(self, is_in_store: bool) -> None:
        """From now on watch for writes to the weights that come later; see WriteWatch.accept."""
        self.writes.accept(is_in_store)

    def differing(self, among: Sequence[int], held: Mapping[str, Tensor]) -> list[str]:
        """The names of those parameters, of some (by index), that differ in any bit from other weights.

        Args:
            held: the other weights, laid out by the plan, on the CPU.
        """
        names = []
        for i in among:
            spec, at = self.plan.specs[i], self.plan.key_offsets[i]
            if spec.row_sparse:
                continue
            mine = self.parameters[i].detach().cpu().view(-1)
            if not torch.equal(
                mine.view(torch.uint8), held[spec.dtype][at : at + spec.numel].view(torch.uint8)
            ):
                names.append(self.names[i])
        return names

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

    def _both(self) -> tuple[Plan, Arena]:
        self.settle()
        assert self._placed is not None
        return self._placed

    def _place(self) -> None:
        self._left_out = [p for p in self.parameters if is_lazy(p)]
        placed = self.parameters
        if self._left_out:
            placed = [
                Parameter(torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=False)
                if is_lazy(p)
                else p
                for p in self.parameters
            ]
        rows = zip(self.names, placed, self._group_of, strict=True)
        specs = [
            TensorSpec(name, tuple(p.shape), dtype_name(p.dtype), group, is_row_sparse(p))
            for name, p, group in rows
        ]
        plan = self._given_plan or make_plan(specs, 1)
        arena = Arena(placed, self.names, plan)
        self._placed = plan, arena
        self.writes = WriteWatch(placed, arena.weights, plan)


def _without(present: Sequence[bool], those: Sequence[int]) -> Sequence[bool]:
    if not those:
        return present
    rest = list(present)
    for i in those:
        rest[i] = False
    return rest
