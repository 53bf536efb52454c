"""Answers one question by systems that take turns: the runs, the table with limits and costs, JSON and a plot.

A benchmark states its `Question` and calls `run`. In each repetition the limits of the machine are measured, and then
every system does every job; who goes first changes from repetition to repetition. A system that is not installed has a
line of its own in the table that says so.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import harness
import plots
from limits import Limits, measure_limits

OURS = "kvtrainer"
_MIB = 1 << 20
_SCALES = {"ms": 1e3, "µs": 1e6}
_COSTS = {
    "CPU ms": "cpu",
    "peak RSS MiB": "peak_rss",
    "PSS MiB": "pss",
    "PSS grown MiB": "grown",
    "in models": "models",
}

Job = TypeVar("Job")
Values = dict[str, Any]
"""Of one case: {"median": seconds of a step, "rounds": [seconds ...], "usage": ..., "amount": what a step does}."""


@dataclass(frozen=True)
class Sample:
    """What one job of a system measured of one case."""

    case: harness.Case
    system: str
    repetition: int
    values: Values


@dataclass(frozen=True)
class Question:
    """A title, who answers, and how the answers are shown."""

    title: str
    systems: Mapping[str, str]
    """Name → "", or why it is missing here. The others are compared with the first one."""
    limits: Callable[[harness.Case, str, Limits], Mapping[str, float]] = lambda *_: {}
    """The least seconds that a case can take on a system, by the name of a limit."""
    unit: str = "ms"
    """In which speed is given: ms or µs of a step, or how much of `amount` in a second."""
    is_first_slowest: bool = False
    """Say of the others how much faster they are than the first one, not how much faster that is."""
    bound: str = ""
    """The system whose speed is the limit of the others."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Other columns: the head → what to show of the values of a case."""
    notes: str = ""
    setting: str = "workers x servers"
    """What the topology of a case says."""
    settings: str = harness.SETTINGS
    """How the processes run."""


def run(
    question: Question,
    jobs: Sequence[Job],
    measure: Callable[[str, Job], dict[harness.Case, Values]],
    versions: Mapping[str, str],
    options: argparse.Namespace,
) -> int:
    """Have all systems answer, write what is known after every repetition, print the table; return 0.

    `measure` has a system do a job, and raises if its weights are wrong.
    """
    present = [name for name, missing in question.systems.items() if not missing]
    report, began = Report(question, [], []), time.monotonic()
    for repetition in range(options.repetitions):
        report.limits.append(measure_limits())
        for job in jobs:
            turn = repetition % len(present)
            for system in present[turn:] + present[:turn]:
                for case, values in measure(system, job).items():
                    report.samples.append(Sample(case, system, repetition, values))
                    seconds = values["median"] * 1e3
                    name = f"{case.workload}, {case.optimizer}"
                    print(f"{repetition} {system:24} {seconds:10.2f} ms  {name}", flush=True)
        machine = harness.describe_machine(versions, question.settings)
        machine["took"] = f"{time.monotonic() - began:.0f} s, repetitions of all systems together"
        if options.out:
            report.write(Path(options.out), machine)
    print(report.markdown(machine))
    return 0


def add_options(parser: argparse.ArgumentParser, repetitions: int = 3) -> argparse.ArgumentParser:
    """Add what all benchmarks of this kind take."""
    add = parser.add_argument
    add("--repetitions", type=positive, default=repetitions, help="fresh jobs for each system and case")
    add("--systems", default="", help="which run, for a quick look; commas between them")
    add("--out", default="", help="write OUT.json, OUT.md and OUT.svg")
    add("--job-timeout", type=float, default=300.0, help="seconds after which a job is killed")
    return parser


def choose(systems: Mapping[str, str], names: str) -> dict[str, str]:
    """The systems of some names with commas between them; all if there are none.

    Raises:
        SystemExit: no system has such a name.
    """
    wanted = names.split(",") if names else list(systems)
    unknown = [name for name in wanted if name not in systems]
    if unknown:
        raise SystemExit(f"no system is called {', '.join(unknown)}; there are {', '.join(systems)}")
    return {name: systems[name] for name in wanted}


def positive(text: str) -> int:
    """A whole number of at least 1, of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def grid(text: str) -> list[tuple[int, int]]:
    """Numbers of workers and servers, of an option like "2x2,1x1".

    Raises:
        SystemExit: it is not of this form.
    """
    found = [re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", one) for one in text.split(",")]
    if None in found:
        raise SystemExit(f"{text!r} is not like 2x2,1x1: workers x servers, at least 1 each, commas between")
    return [(int(one[1]), int(one[2])) for one in found if one]


@dataclass(frozen=True)
class Report:
    """What was measured, and the limits of each repetition, if they are known."""

    question: Question
    samples: list[Sample]
    limits: list[Limits]

    def markdown(self, machine: Mapping[str, Any]) -> str:
        """A table with one line per case and system."""
        first = next(iter(self.question.systems))
        head = ["workload", self.question.setting, "optimizer", "system", self.question.unit]
        if self.question.unit in _SCALES:
            head.append("p99")
        slowest = self.question.is_first_slowest
        head.append(f"faster than {first} by" if slowest else f"{first} is faster by")
        head += [f"of the {name} limit" for name in self._limit_names()]
        head += [*self.question.more, *self._cost_names()]
        lines = [f"# {self.question.title}", "", *(f"- {name}: {value}" for name, value in machine.items())]
        lines += [f"- limits, repetition {at}: {one}" for at, one in enumerate(self.limits)]
        lines += ["", _LEGEND + self.question.notes, "", _row(head), "|---" * len(head) + "|"]
        lines += [_row(self._cells(case, system)) for case in self._cases() for system in self._systems(case)]
        for system, missing in self.question.systems.items():
            if missing:
                lines.append(_row(["all", "-", "-", system, f"missing: {missing}", *[""] * (len(head) - 5)]))
        return "\n".join(lines) + "\n"

    def write(self, stem: Path, machine: Mapping[str, Any]) -> None:
        """Write STEM.json with every round, STEM.md with the table and STEM.svg with bars."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {**vars(one.case), "system": one.system, "repetition": one.repetition, **one.values}
            for one in self.samples
        ]
        document = {"title": self.question.title, "machine": dict(machine), "samples": rows}
        document["limits"] = [asdict(one) for one in self.limits]
        document["missing"] = {name: why for name, why in self.question.systems.items() if why}
        stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        stem.with_suffix(".md").write_text(self.markdown(machine))
        groups = {_title(case): self._bars(case) for case in self._cases()}
        stem.with_suffix(".svg").write_text(plots.bars(self.question.title, self.question.unit, groups))

    def _cells(self, case: harness.Case, system: str) -> list[str]:
        mine, first = self._values(case, system), self._values(case, next(iter(self.question.systems)))
        faster = [mine[at]["median"] / first[at]["median"] for at in mine if at in first]
        if self.question.is_first_slowest:
            faster = [1 / one for one in faster]
        cells = [case.workload, case.topology, case.optimizer, system, harness.spread(self._speeds(mine))]
        if self.question.unit in _SCALES:
            rounds = [seconds for one in mine.values() for seconds in one["rounds"]]
            cells.append(harness.figure(_SCALES[self.question.unit] * _p99(rounds)))
        cells.append(harness.spread(faster))
        for name in self._limit_names():
            least = {at: self._least(case, system, at).get(name) for at in mine}
            shares = [least[at] / mine[at]["median"] for at in mine if least[at]]
            cells.append(harness.spread(shares) if shares else "")
        for name in self.question.more.values():
            known = [one[name] for one in mine.values() if one.get(name) is not None]
            cells.append(harness.spread(known) if known else "")
        return cells + self._costs(list(mine.values()))

    def _costs(self, values: list[Values]) -> list[str]:
        found = [[_cost(one, name) for one in values] for name in self._cost_names()]
        known = [[one for one in costs if one is not None] for costs in found]
        return [harness.figure(statistics.median(one)) if one else "" for one in known]

    def _cost_names(self) -> list[str]:
        return [name for name in _COSTS if any(_cost(one.values, name) is not None for one in self.samples)]

    def _least(self, case: harness.Case, system: str, repetition: int) -> Mapping[str, float]:
        least = dict(self.question.limits(case, system, self.limits[repetition])) if self.limits else {}
        bound = self._values(case, self.question.bound)
        if repetition in bound:
            least[self.question.bound] = bound[repetition]["median"]
        return least

    def _limit_names(self) -> list[str]:
        found = [self._least(one.case, one.system, one.repetition) for one in self.samples]
        return list(dict.fromkeys(name for one in found for name in one))

    def _speeds(self, values: Mapping[int, Values]) -> list[float]:
        scale = _SCALES.get(self.question.unit)
        if scale:
            return [one["median"] * scale for one in values.values()]
        return [one["amount"] / one["median"] for one in values.values()]

    def _bars(self, case: harness.Case) -> dict[str, float]:
        systems = self._systems(case)
        return {one: statistics.median(self._speeds(self._values(case, one))) for one in systems}

    def _values(self, case: harness.Case, system: str) -> dict[int, Values]:
        return {s.repetition: s.values for s in self.samples if s.case == case and s.system == system}

    def _cases(self) -> list[harness.Case]:
        return list(dict.fromkeys(sample.case for sample in self.samples))

    def _systems(self, case: harness.Case) -> list[str]:
        return [name for name in self.question.systems if self._values(case, name)]


_LEGEND = """Median (min to max) over repetitions, each the median of its steps; p99 is of the steps of all.
Ratios are taken within a repetition. A share of a limit is the least time that it allows, divided by the time. CPU is
that of all processes for a step, with what lies between steps; memory that of all processes after the last step: the
sum of their peaks (RSS) since before the model was made, their proportional share (PSS), and by how much that grew
without the pages of files, also in models (as often as the weights). """


def _title(case: harness.Case) -> str:
    return f"{case.workload}, {case.topology}, {case.optimizer}"


def _cost(values: Values, name: str) -> float | None:
    """CPU milliseconds of a step, MiB of memory, or how many times the weights; None if that was not measured."""
    found = values.get("usage", {}).get(_COSTS[name])
    if found is None:
        return None
    return float({"CPU ms": 1e3 / len(values["rounds"]), "in models": 1.0}.get(name, 1 / _MIB) * found)


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, len(seconds) * 99 // 100)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
