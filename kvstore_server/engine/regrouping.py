"""What several servers have saved, as one server of a job with another number of servers needs it.

Slices do not depend on the number of servers, only where they lie does. So a table is put together from the slices that
now belong to this server, whoever has saved them, and from what all servers of a table say alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore_server.engine.cut import StoredSlice, StoredSpace
from kvstore_server.engine.image import COUNTERS, register_of_image
from kvstore_server.errors import RecoveryError
from kvstore_server.plan import Plan, make_plan, tensor_spec_from


class _RegroupedPart(NamedTuple):
    """A table as one server has saved it."""

    space: StoredSpace
    number: int
    """The table's number there."""

    def has(self, index: int) -> bool:
        return (self.number, index) in self.space.slices


def regroup(spaces: Sequence[StoredSpace], server: int, num_servers: int) -> list[StoredSpace]:
    """Return what one of `num_servers` servers holds of some namespaces; nothing of those without tables there.

    Args:
        spaces: All that the former servers have saved.

    Raises:
        RecoveryError: They have not saved the same state, or some of it is missing.
    """
    by_name: dict[str, list[StoredSpace]] = {}
    for space in spaces:
        by_name.setdefault(space.name, []).append(space)
    found = [_regroup_space(parts, server, num_servers) for parts in by_name.values()]
    return [space for space in found if space is not None]


def _regroup_space(parts: Sequence[StoredSpace], server: int, num_servers: int) -> StoredSpace | None:
    # 1. Which tables have slices here?
    by_table: dict[str, list[_RegroupedPart]] = {}
    for space in parts:
        for number, row in enumerate(space.image["declared"]):
            by_table.setdefault(row[1], []).append(_RegroupedPart(space, number))
    tables: list[tuple[Plan, list[_RegroupedPart]]] = []
    for found in by_table.values():
        _, register = register_of_image(found[0].space.image["declared"][found[0].number])
        specs, one_server = list(map(tensor_spec_from, register.specs)), register.one_server
        plan = make_plan(specs, num_servers, register.whole_keys, one_server=one_server)
        if plan.slices_of(server):
            tables.append((plan, found))
    if not tables:
        return None
    # 2. They get numbers of their own.
    # The first server is the one that had decided about the members.
    shared = "space", "optimizer", "ranks"
    image: dict[str, Any] = {name: parts[0].image[name] for name in shared if name in parts[0].image}
    first = [found[0] for _, found in tables]
    image["declared"] = [one.space.image["declared"][one.number] for one in first]
    image["counts"] = [_regrouped_counts(plan, found) for plan, found in tables]
    image["hypers"] = _regrouped_hypers(first)
    image["clients"] = [
        row for number, (_, found) in enumerate(tables) for row in _regrouped_clients(number, found)
    ]
    image["tables"] = _regrouped_columns(tables, server)
    # 3. Their slices.
    slices: dict[tuple[int, int], StoredSlice] = {}
    for number, (plan, found) in enumerate(tables):
        for slice_ in plan.slices_of(server):
            holder = next((one for one in found if one.has(slice_.index)), None)
            if holder is None:
                raise RecoveryError(f"no server has saved slice {slice_.index} of table {number}")
            slices[number, slice_.index] = holder.space.slices[holder.number, slice_.index]
    return StoredSpace(image, slices)


def _regrouped_counts(plan: Plan, found: Sequence[_RegroupedPart]) -> bytes:
    """Return the update counts of all keys, each from a server that has slices of it."""
    counts = [np.frombuffer(one.space.image["counts"][one.number], np.int64) for one in found]
    merged = counts[0].copy()
    for key in range(len(merged)):
        indices = [slice_.index for slice_ in plan.slices_with(key)]
        holders = [at for at, one in enumerate(found) if any(map(one.has, indices))]
        merged[key] = counts[holders[0] if holders else 0][key]
    return merged.tobytes()


def _regrouped_hypers(first: Sequence[_RegroupedPart]) -> list[Any]:
    packed: list[bytes] = []
    rows: list[Any] = []
    for number, one in enumerate(first):
        values, known = one.space.image["hypers"]
        own = dict(known)[one.number]
        rows.append([number, [[rank, len(packed) + at] for at, (rank, _) in enumerate(own)]])
        packed += [values[which] for _, which in own]
    return [packed, rows]


def _regrouped_clients(number: int, found: Sequence[_RegroupedPart]) -> list[Any]:
    """Return (table, rank, the latest two `client_state`s) of every rank."""
    by_rank: dict[int, dict[int, bytes]] = {}
    for one in found:
        for table, rank, states in one.space.image["clients"]:
            if table == one.number:
                by_rank.setdefault(rank, {}).update(states)
    return [[number, rank, [list(one) for one in sorted(own.items())[-2:]]] for rank, own in by_rank.items()]


def _regrouped_columns(tables: Sequence[tuple[Plan, Sequence[_RegroupedPart]]], server: int) -> list[Any]:
    """Return the columns of an image about tables; see `image`."""
    rounds, failed, counters = [], [], []
    failures: list[Any] = []
    ends: list[Any] = []
    of_ends: list[Any] = []
    for number, (plan, found) in enumerate(tables):
        rows = [_regrouped_row(one) for one in found]
        first = rows[0]
        if len({row.round for row in rows}) > 1:
            raise RecoveryError(
                f"servers have saved table {number} after the rounds {[row.round for row in rows]}"
            )
        rounds.append(first.round)
        failed.append(first.failed)
        failures += [[number, first.failures]] if first.failures else []
        # Weights that were sent and superseded have made the versions of some servers higher.
        counters.append([max(row.counters[0] for row in rows), *first.counters[1:]])
        of_ends.append([])
        own = {slice_.index for slice_ in plan.slices_of(server)}
        for rank in first.ends:
            of_ends[-1].append([rank, len(ends)])
            ends.append(_regrouped_round_ends([row.ends[rank] for row in rows if rank in row.ends], own))
    numbers = np.arange(len(tables))
    as_bytes = [np.array(one, np.int64).tobytes() for one in (numbers, rounds, failed)]
    return [*as_bytes, failures, np.array(counters, np.int64).tobytes(), ends, of_ends, {}]


class _RegroupedRow(NamedTuple):
    """What the columns of an image say about one table."""

    round: int
    failed: int
    failures: list[Any]
    counters: list[int]
    ends: Mapping[int, list[Any]]
    """Rank → how its last round has ended."""


def _regrouped_row(part: _RegroupedPart) -> _RegroupedRow:
    _, rounds, failed, failures, counters, ends, of_ends, _ = part.space.image["tables"]
    at = part.number
    return _RegroupedRow(
        int(np.frombuffer(rounds, np.int64)[at]),
        int(np.frombuffer(failed, np.int64)[at]),
        dict(failures).get(at, []),
        np.frombuffer(counters, np.int64).reshape(-1, COUNTERS)[at].tolist(),
        {rank: ends[which] for rank, which in of_ends[at]},
    )


def _regrouped_round_ends(ends: Sequence[list[Any]], own: set[int]) -> list[Any]:
    """Merge what several servers say of the end of a round: keys that were left out there, and norms of slices."""
    versions, left_out, vetoes, hypers, are_over, partials, decisions, are_skipped = zip(*ends, strict=True)
    every = sorted(one for of_server in partials for one in of_server if one[0] in own)
    keys = sorted({key for of_server in left_out for key in of_server})
    return [
        max(versions), keys, vetoes[0], hypers[0], are_over[0], every, decisions[0], are_skipped[0]
    ]  # fmt: skip
