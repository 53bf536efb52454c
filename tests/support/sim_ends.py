"""What there was in the rounds of a schedule, so that a test can tell that the schedules reach everything."""

from __future__ import annotations

from collections import Counter

from tests.support.sim_model import APPLIED, FAILED, TableModel


def count_end(seen: Counter[str], model: TableModel, outcome: str) -> None:
    """Note what was special about the open round of a table, which ends so."""
    assigns = [given.assign for given in model.committed.values()]
    joined = [given.joined for given in model.committed.values()]
    seen[f"joined by some, {outcome}"] += any(joined) and not all(joined)
    seen[f"joined by all, {outcome}"] += len(joined) == model.num_workers and all(joined)
    kinds = model.kinds_of_rows() if outcome == APPLIED else set()
    seen["by rows alone"] += kinds == {True}
    seen["rows and all of it"] += len(kinds) == 2
    seen["assigned"] += outcome == APPLIED and any(assigns)
    seen["assigned by some"] += len(assigns) == model.num_workers and any(assigns) and not all(assigns)
    seen[f"compressed, {outcome}"] += model.has_compressed()
    seen["held by some"] += len({given.hold for given in model.active().values()}) > 1
    seen["given up while held"] += model.is_held and outcome == FAILED
