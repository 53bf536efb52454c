"""The row-sparse parameters of a Trainer: which of its keys they are, and values on their way to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.nn import Parameter

from kvtrainer.comm.tickets import Source
from kvtrainer.errors import ConfigurationError, RowSparseError
from kvtrainer.memory.row_sparse import Owner, RowSparseParameter, is_row_sparse
from kvtrainer.parallel.policy import COPIES
from kvtrainer.parameters import collect
from kvtrainer.types import Group

Tables = Mapping[int, Callable[[], Source]]
"""Key (by index) → what gives its values, called on the worker whose values count."""


NO_TABLES: Tables = MappingProxyType({})


class RowTables:
    """Position i of `parameters` is key i; so it is in `copies`, the replicas on each further device."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = {i: p for i, p in enumerate(parameters) if is_row_sparse(p)}
        self.copies: Sequence[RowTables] = ()
        self._given: dict[int, Tensor] = {}
        """New values that the store has not got yet."""

    def __contains__(self, key: int) -> bool:
        return key in self._parameters

    def key_of(self, parameter: RowSparseParameter) -> int:
        found = (key for one in (self, *self.copies) for key, p in one._parameters.items() if p is parameter)
        return next(found)

    def give(self, key: int, values: Tensor) -> None:
        """Values for `first` or `changed`."""
        self._given[key] = values.detach().to("cpu", self._parameters[key].dtype).reshape(-1)

    def given(self, key: int) -> Tensor | None:
        """Values that the store has not got yet, flat; None if there are none."""
        return self._given.get(key)

    def first(self) -> Tables:
        """The values of all keys, with which the store begins."""
        return {**{key: p._source for key, p in self._parameters.items()}, **self.changed()}

    def changed(self) -> Tables:
        """The values of the keys that were given new ones."""
        return {key: _giving(flat) for key, flat in self._given.items()}

    def are_placed(self) -> None:
        """The store has the values now."""
        self._given.clear()
        for parameter in self._parameters.values():
            parameter._place()
        for copy in self.copies:
            copy.are_placed()


def check_claimable(groups: Sequence[Group]) -> bool:
    """Whether there are row-sparse parameters in these groups.

    Raises:
        RowSparseError: one has a Trainer already, or is a replica of a parameter of another kind.
    """
    found = list(_named(groups))
    for name, parameter in found:
        parameter.check_claimable(name)
    for group in groups:
        for of_device in group.get(COPIES, ()):
            for name, p, copy in zip(group["param_names"], group["params"], of_device, strict=True):
                if is_row_sparse(p) is not is_row_sparse(copy):
                    raise RowSparseError(
                        f"some replicas of {name!r} are row-sparse and some are not; make all alike"
                    )
    return bool(found)


def refuse_to_add(group: Group) -> None:
    """Raise ConfigurationError if there are row-sparse ones among parameters that come later than the Trainer."""
    for name, _ in _named(collect([group])):
        raise ConfigurationError(
            f"parameter {name!r} is row-sparse, which decides about the Trainer's store; give it to the Trainer's "
            "constructor"
        )


def claim(owner: Owner, groups: Sequence[Group]) -> None:
    """Let the row-sparse parameters of these groups belong to a Trainer."""
    for name, parameter in _named(groups):
        parameter._claim(owner, name)


def _named(groups: Sequence[Group]) -> Iterator[tuple[str, RowSparseParameter]]:
    """The row-sparse parameters, each with all of its replicas."""
    for group in groups:
        for of_device in (group["params"], *group.get(COPIES, ())):
            for name, parameter in zip(group["param_names"], of_device, strict=True):
                if is_row_sparse(parameter):
                    yield name, parameter


def _giving(flat: Tensor) -> Callable[[], Source]:
    return lambda: lambda start, numel: flat[start : start + numel]
