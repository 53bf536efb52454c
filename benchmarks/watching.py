"""How much slower is a job that somebody watches?

    python benchmarks/watching.py --out benchmarks/results/watching

A page (`kvlaunch --dashboard`) asks both servers of a running job once a second, and `/metrics` is fetched as often. It
is stopped and goes on in turns, so that windows of one job are compared in pairs, a watched one with the unwatched one
beside it: by seconds of a step, for which the machine must be idle, and by CPU seconds of servers and workers. At the
end the workers are stopped, and what one look costs the servers is measured alone. With what the page uses itself, all
on one core, that is the most that any step can lose; it holds on a busy machine, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import suite
import usage
from steps import Work
from watching_worker import Progress

from kvstore_server.engine.facts import FRESH
from kvstore_server.probe import probe_servers, read_probe_keys

_TITLE = "A job with and without a page that shows it"
_SETTINGS = "OMP_NUM_THREADS=1 in every process"
HERE = Path(__file__).resolve().parent
_BEGIN = 300.0
"""Seconds for a job to begin with its steps."""
_BETWEEN = 1.0
"""Seconds from one scrape to the next."""
_LOOKS, _PAUSE = 20, FRESH + 0.05
"""So many looks are measured alone, each of which has the servers put their facts together anew."""
_HEAD = (
    "steps of 2 workers and 2 servers",
    "steps a second",
    "a watched step is longer by",
    "and uses more CPU by",
    "CPU ms of a look: servers",
    "CPU ms a second: page",
    "together, of one core",
)
_LEGEND = """\
Differences are medians of pairs of windows, in parentheses the limits between which they lie with 95 % confidence. A
page looks once a second, and is scraped as often. What servers and page use for that together is the most that any step
can lose.
"""


@dataclass(frozen=True)
class Window:
    """Some seconds of a job in which somebody watches it, or nobody does."""

    is_watched: bool
    wall: float
    steps: float
    seconds: float
    """In which these steps were made: from the end of one to the end of another."""
    cpu: float
    """Seconds of servers and workers."""
    page: float
    """CPU seconds of the page."""


@dataclass(frozen=True)
class Found:
    """What was measured of one kind of step."""

    name: str
    windows: list[Window]
    look: float
    """CPU seconds of all servers for one look."""

    def row(self) -> str:
        """The line of the table."""
        made = [one for one in self.windows if one.steps > 0]
        rate = statistics.median([one.steps / one.seconds for one in made])
        watched = [one for one in self.windows if one.is_watched]
        page = sum([one.page for one in watched]) / sum([one.wall for one in watched])
        cells = [
            self.name,
            harness.figure(rate),
            _difference([a.seconds / a.steps / (b.seconds / b.steps) for a, b in self._pairs()]),
            _difference([a.cpu / a.steps / (b.cpu / b.steps) for a, b in self._pairs()]),
            f"{1e3 * self.look:.2f}",
            f"{1e3 * page:.2f}",
            f"{100 * (self.look + page):.2f} %",
        ]
        return f"| {' | '.join(cells)} |"

    def _pairs(self) -> list[tuple[Window, Window]]:
        """Windows beside each other, the watched one first."""
        beside = zip(self.windows[::2], self.windows[1::2], strict=True)
        ordered = [(a, b) if a.is_watched else (b, a) for a, b in beside]
        return [(a, b) for a, b in ordered if a.steps > 0 and b.steps > 0]


def main() -> int:
    """Watch one job after the other, write what is known after each, print the table; return 0."""
    options = _options()
    floats = (options.mib << 20) // 4 // 16
    works = [Work(1, 16, "sgd"), Work(options.keys, 100), Work(16, floats)]
    found: list[Found] = []
    for work in works:
        found.append(_watch(work, options))
        print(found[-1].row(), flush=True)
        if options.out:
            table = harness.Table(_TITLE, _LEGEND, _HEAD, [one.row() for one in found])
            harness.write_table(Path(options.out), table, found, _SETTINGS)
    return 0


def _watch(work: Work, options: argparse.Namespace) -> Found:
    """Run one job, and measure it while it makes steps.

    Raises:
        JobError: the job has ended, or makes no steps.
    """
    where = f"127.0.0.1:{harness.free_port()}"
    jobs = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", "2", "-s", "2"]
    launch = [*jobs, "--dashboard", where, "--"]
    worker = [
        sys.executable,
        str(HERE / "watching_worker.py"),
        "--work",
        json.dumps(dataclasses.asdict(work)),
    ]
    environ = {"PYTHONPATH": harness.FOLDER, "KVSTORE_DEAD_AFTER": "600"}
    with harness.Processes() as job:
        progress = Progress(job.out, is_new=True)
        top = job.start([*launch, *worker, "--progress", str(job.out)], environ, harness.FOLDER)
        deadline = time.monotonic() + _BEGIN
        while progress.read()[0] < 10:
            job.check()
            if time.monotonic() > deadline:
                raise harness.JobError(f"the job has made no 10 steps in {_BEGIN:g} s")
            time.sleep(0.05)
        page, servers, workers = (
            _named(top, word) for word in ("kvtrainer.watch.top", "kvstore_server", "watching_worker.py")
        )
        windows = []
        for number in range(2 * options.pairs):
            is_watched = number % 4 in (1, 2)  # in turns who is first: what changes slowly does no harm then
            _send(page, signal.SIGCONT if is_watched else signal.SIGSTOP)
            began, before = time.monotonic(), (*progress.read(), _cpu([*servers, *workers]), _cpu(page))
            while (left := began + options.seconds - time.monotonic()) > 0:
                if is_watched:
                    _scrape(where)
                time.sleep(max(min(left, _BETWEEN), 0.0))
            after = (*progress.read(), _cpu([*servers, *workers]), _cpu(page))
            passed = [b - a for a, b in zip(before, after, strict=True)]
            windows.append(Window(is_watched, time.monotonic() - began, *passed))
            job.check()
        _send([*page, *workers], signal.SIGSTOP)
        alone = _cost_of_a_look(servers, _addresses(page))
        _send([*page, *workers], signal.SIGCONT)
    return Found(work.name, windows, alone)


def _scrape(where: str) -> None:
    """Fetch the numbers of a page, as Prometheus does. Raises JobError where they are not there."""
    with urllib.request.urlopen(f"http://{where}/metrics", timeout=10.0) as answer:
        if b"kvstore_server_up" not in answer.read():
            raise harness.JobError(f"no numbers of servers at {where}")


def _cost_of_a_look(servers: Sequence[int], addresses: Sequence[str]) -> float:
    """CPU seconds that one look costs servers that have nothing else to do."""
    used = []
    for is_looking in (False, True):
        before, keys = _cpu(servers), read_probe_keys(os.environ, addresses)
        for _ in range(_LOOKS):
            time.sleep(_PAUSE)
            if is_looking and None in probe_servers(addresses, 10.0, keys):
                raise harness.JobError("a server has not answered")
        used.append(_cpu(servers) - before)
    return (used[1] - used[0]) / _LOOKS


def _named(top: int, word: str) -> list[int]:
    """The descendants of a process whose command line has a word.

    Raises:
        JobError: there are none.
    """
    pids = sorted(usage.with_descendants([top]) - {top})
    found = [pid for pid in pids if any(word in one for one in _words(pid))]
    if not found:
        raise harness.JobError(f"the job has no process {word}")
    return found


def _addresses(page: Sequence[int]) -> list[str]:
    """Where the servers are, which a page is told."""
    return [word for pid in page for word in _words(pid) if word.startswith("tcp://")]


def _words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _cpu(pids: Sequence[int]) -> float:
    """CPU seconds of processes so far, to the nanosecond: Linux has a clock for each."""
    return sum([time.clock_gettime(~pid << 3 | 2) for pid in pids])


def _difference(ratios: Sequence[float]) -> str:
    """By how many percent ratios are above 1: the median, and between which ones of them it lies with 95 %."""
    ordered = [100 * (one - 1) for one in sorted(ratios)]
    if not ordered:
        return "-"
    first = max(0, math.floor((len(ordered) - 1.96 * math.sqrt(len(ordered))) / 2))
    low, high = ordered[first], ordered[-1 - first]
    return f"{statistics.median(ordered):.1f} % ({low:.1f} to {high:.1f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", type=suite.positive, default=16, help="of windows, one of them watched")
    add("--seconds", type=float, default=2.0, help="of a window")
    add("--keys", type=suite.positive, default=10_000, help="parameters of 100 floats")
    add("--mib", type=suite.positive, default=100, help="size of the large model")
    add("--out", default="", help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
