"""Figures of what jobs cost: bytes and rows of kinds of tables, and time where workers are uneven; see plots.py."""

from __future__ import annotations

from pathlib import Path

from common import read
from matplotlib import pyplot


def flights(folder: Path) -> None:
    """Bytes of a step and quality of the three kinds of table."""
    kinds = ("dense", "sparse", "stored")
    found = [read(folder, f"flights_{kind}") for kind in kinds]
    _, (left, right) = pyplot.subplots(1, 2)
    sizes = [(one["received"] + one["sent"]) / 1e6 for one in found]
    left.bar_label(left.bar(kinds, sizes, color="C0"), fmt="%.2f")
    left.set(ylabel="MB for a step of two workers", yscale="log", ylim=(0.1, 300))
    right.bar_label(right.bar(kinds, [one["auc"] for one in found], color="C1"), fmt="%.4f")
    right.set(ylabel="AUC of held-out flights", ylim=(0.5, 0.9))


def stream(folder: Path) -> None:
    """Rows over the year of tables with rules, and the AUC of each twelfth of it beside that of fixed tables."""
    found = read(folder, "stream")
    tables, steps = found["tables"], [step for step, _ in found["rows"]]
    unbounded = {"keep": "no rules", "expire": "expire_after", "admit": "expire_after, admit_after"}
    flights = [step * found["batch"] / 1000 for step in steps]
    _, (left, right) = pyplot.subplots(1, 2)
    for at, (name, label) in enumerate(unbounded.items()):
        left.plot(flights, [rows[at] for _, rows in found["rows"]], color=f"C{at}")
        right.plot(range(1, 13), tables[name]["twelfths"], ".-", color=f"C{at}", label=label)
    for name, marks in {"fixed_40000": "--", "fixed_2000": ":"}.items():
        rows = int(name.partition("_")[2])
        left.axhline(rows, color="gray", ls=marks)
        right.plot(range(1, 13), tables[name]["twelfths"], marks, color="gray", label=f"fixed, {rows:,} rows")
    left.set(xlabel="thousands of flights", ylabel="rows", yscale="log")
    right.set(xlabel="twelfth of the year", ylabel="AUC", ylim=(0.55, 0.8))
    right.legend(fontsize="x-small", loc="lower right")


def uneven(folder: Path) -> None:
    """Loss over wall time of the three ways to wait, where one worker is slow, and where all are by turns."""
    _, axes = pyplot.subplots(1, 2, sharey=True)
    for ax, slow, title in zip(
        axes, ("one", "turns"), ("always the same worker", "any of them"), strict=True
    ):
        for store in ("dist_sync", "dist_ssp", "dist_async"):
            seen = read(folder, f"uneven_{slow}_{store}.0")["seen"]
            ax.plot(*zip(*seen, strict=True), label=store)
        ax.set(title=f"slow is {title}", xlabel="seconds")
    axes[0].set_ylabel("held-out loss")
    axes[1].legend()
