"""What became of each parameter under the rules: its options, and which rules decided them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

_ALWAYS = ("lr", "weight_decay")


@dataclass(frozen=True)
class ParamRow:
    """One parameter; `options` are all that hold for it, `rules` the names of those that decided some."""

    name: str
    parameter: Tensor
    options: Mapping[str, Any]
    rules: tuple[str, ...] = ()

    @property
    def lr(self) -> Any:
        return self.options.get("lr")

    @property
    def weight_decay(self) -> Any:
        return self.options.get("weight_decay")


@dataclass(frozen=True)
class ParamReport:
    """All parameters in the model's order, and the rules that matched none. As a str it is a table."""

    rows: tuple[ParamRow, ...]
    unmatched: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> ParamRow:
        """The row of a parameter. Raises KeyError if there is none of that name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [_table(self.rows)]
        if self.unmatched:
            lines.append(f"no parameter matches {', '.join(self.unmatched)}")
        return "\n".join(lines)

    def with_groups(self, groups: Iterable[Mapping[str, Any]]) -> ParamReport:
        """The same with the options that groups have now, of the parameters that are in them.

        Replicas, which a Trainer calls "NAME on DEVICE", come after all others, with the rules of NAME.
        """
        rules = {row.name: row.rules for row in self.rows}
        rows = {row.name: row for row in rows_of(groups)}
        order = [name for name in rules if name in rows] + [name for name in rows if name not in rules]
        decided = [rules.get(name, rules.get(name.rpartition(" on ")[0], ())) for name in order]
        found = (replace(rows[name], rules=by) for name, by in zip(order, decided, strict=True))
        return ParamReport(tuple(found), self.unmatched)


def rows_of(groups: Iterable[Mapping[str, Any]]) -> list[ParamRow]:
    """A row for each parameter of torch's groups; without "param_names" it is called by its position."""
    rows: list[ParamRow] = []
    for group in groups:
        names = group.get("param_names") or [str(len(rows) + i) for i in range(len(group["params"]))]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for name, given in zip(names, group["params"], strict=True):
            parameter = given[0] if isinstance(given, list | tuple) else given
            rows.append(ParamRow(name, parameter, options))
    return rows


def _table(rows: Sequence[ParamRow]) -> str:
    """Columns for the learning rate and weight decay, and for what else is not the same for all."""
    others = dict.fromkeys(key for row in rows for key in row.options if key not in _ALWAYS)
    differing = [key for key in others if any(_of(row, key) != _of(rows[0], key) for row in rows)]
    columns = [key for key in _ALWAYS if any(key in row.options for row in rows)] + differing
    lines = [["parameter", "shape", *columns, "rules"]]
    for row in rows:
        shape = "?" if is_lazy(row.parameter) else "x".join(map(str, row.parameter.shape)) or "scalar"
        lines.append([row.name, shape, *(_of(row, key) for key in columns), ", ".join(row.rules) or "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _of(row: ParamRow, key: str) -> str:
    value = row.options.get(key)
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
