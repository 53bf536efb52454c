"""How long does a killed server, or a killed worker, take to come back?

    python benchmarks/recovery.py --out benchmarks/results/recovery

A job under `kvlaunch --restart` with 2 workers and 1 server trains 100 MiB in 16 tensors with Adam, so the server holds
300 MiB and as much again to undo what a kill interrupts. Its server is killed again and again at random moments, and
then one of its workers. A server is back with its first answer to a worker, a worker when `resume()` has returned:
with the weights, in the round that is open. The time from the start of the new process to the end of its imports, for
a worker to its model, is given by itself and is not in these figures; noticing the death is.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import suite
from recovery_marks import ANSWERED, MARKS, READY, RESUMED, STARTED, STEPPED

from kvstore_server.restarts import STEADY

_TITLE = "A killed server, or worker, until it is back"
_SETTINGS = "OMP_NUM_THREADS=1 in every process"
_HERE = Path(__file__).resolve().parent
_LIMIT = 120.0
"""Seconds for a job to begin, and for a process to come back."""
_HEAD = (
    "killed",
    "kills",
    "back after s: p50",
    "p95",
    "most",
    "start of the process s",
    "a step ends after s",
)
_LEGEND = """\
Seconds from the kill; medians if nothing else is said. The start of the process, imports and for a worker its model, is
not in "back after", and it is in "a step ends after".
"""


@dataclass(frozen=True)
class Mark:
    """A line of the file: what happened to a process, and when."""

    role: str
    pid: int
    event: str
    at: float


@dataclass(frozen=True)
class Recovery:
    """One kill, in seconds.

    Args:
        back: Until the process was back, without its start.
        start: From the start of the new process until it had its imports, and a worker its model.
        step: Until the next step ended that the killed process took part in.
    """

    back: float
    start: float
    step: float


@dataclass(frozen=True)
class Found:
    """All kills of one kind of process."""

    role: str
    recoveries: list[Recovery]

    def row(self) -> str:
        """The line of the table."""
        back = sorted(one.back for one in self.recoveries)
        cells = [
            self.role,
            str(len(back)),
            f"{statistics.median(back):.3f}",
            f"{percentile(back, 95):.3f}",
            f"{back[-1]:.3f}",
            f"{statistics.median([one.start for one in self.recoveries]):.2f}",
            f"{statistics.median([one.step for one in self.recoveries]):.2f}",
        ]
        return f"| {' | '.join(cells)} |"


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The least of some values that so many percent of them do not exceed."""
    return ordered[-(-percent * len(ordered) // 100) - 1]


class Job:
    """A job that marks its moments in a file."""

    def __init__(self, job: harness.Processes, options: argparse.Namespace) -> None:
        self._job, self._path = job, job.out
        floats = (options.mib << 20) // 4 // options.keys
        launch = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", "2", "-s", "1"]
        launch += [
            "--restart",
            str(2 * options.kills + 1),
            "--import",
            "recovery_server",
            "--",
            sys.executable,
        ]
        worker = [str(_HERE / "recovery_worker.py"), "--keys", str(options.keys), "--floats", str(floats)]
        environ = {"PYTHONPATH": f"{harness.FOLDER}:{_HERE}", MARKS: str(self._path)}
        job.start([*launch, *worker], environ, harness.FOLDER)

    def marks(self) -> list[Mark]:
        """What has happened so far."""
        if not self._path.exists():
            return []
        rows = [line.split() for line in self._path.read_text().splitlines()]
        return [Mark(role, int(pid), event, float(at)) for role, pid, event, at in rows]

    def await_marks(self, is_there: Callable[[list[Mark]], bool]) -> list[Mark]:
        """Wait until the marks are as they should be.

        Raises:
            JobError: the job has ended, or that takes too long.
        """
        deadline = time.monotonic() + _LIMIT
        while not is_there(marks := self.marks()):
            self._job.check()
            if time.monotonic() > deadline:
                raise harness.JobError(
                    f"the job did not go on for {_LIMIT:g} s; its last marks: {marks[-5:]}"
                )
            time.sleep(0.02)
        return marks


def main() -> int:
    """Kill servers, then workers, write what is known after both, print the table; return 0."""
    options = _options()
    draw, found = random.Random(0), list[Found]()
    with harness.Processes() as processes:
        job = Job(processes, options)
        job.await_marks(lambda marks: _num_steps(marks, _newest(marks, "worker")) >= 3)
        for role in ("server", "worker"):
            found.append(Found(role, [_kill(job, role, draw) for _ in range(options.kills)]))
            print(found[-1].row(), flush=True)
            if options.out:
                table = harness.Table(_TITLE, _LEGEND, _HEAD, [one.row() for one in found])
                harness.write_table(Path(options.out), table, found, _SETTINGS)
    return 0


def _kill(job: Job, role: str, draw: random.Random) -> Recovery:
    """Kill the newest process of a role at a random moment, once it counts as steady, and measure its successor."""
    # 1. Wait, so that it is started again at once.
    marks = job.marks()
    victim = _newest(marks, role)
    [ready] = [one.at for one in marks if one.pid == victim and one.event == READY]
    time.sleep(max(0.0, ready + STEADY + draw.uniform(0.2, 1.2) - time.monotonic()))
    # 2. Kill it, and wait for a step with its successor.
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    marks = job.await_marks(lambda marks: _has_stepped(marks, role, victim, killed))
    # 3. When it was back: by what a worker says of a server, or by itself.
    pid, later = _newest(marks, role), [one for one in marks if one.at > killed]
    moments = {one.event: one.at for one in reversed(later) if one.pid == pid}
    start = moments[READY] - moments[STARTED]
    back = moments[RESUMED] if role == "worker" else min(one.at for one in later if one.event == ANSWERED)
    step = min(one.at for one in later if one.event == STEPPED and one.at > back)
    return Recovery(back - killed - start, start, step - killed)


def _newest(marks: Sequence[Mark], role: str) -> int:
    """The process of a role that started last; 0 if there is none."""
    return max(
        [(one.at, one.pid) for one in marks if one.role == role and one.event == STARTED], default=(0.0, 0)
    )[1]


def _num_steps(marks: Sequence[Mark], pid: int, since: float = 0.0) -> int:
    return len([one for one in marks if one.pid == pid and one.event == STEPPED and one.at > since])


def _has_stepped(marks: Sequence[Mark], role: str, victim: int, killed: float) -> bool:
    """Whether a worker has made two steps with the successor of a process that was killed."""
    pid = _newest(marks, role)
    if pid == victim:
        return False
    if role == "worker":
        return _num_steps(marks, pid) >= 2
    answered = [one.at for one in marks if one.event == ANSWERED and one.at > killed]
    return bool(answered) and len([m for m in marks if m.event == STEPPED and m.at > answered[0]]) >= 2


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=suite.positive, default=20, help="of servers, and of workers")
    add("--mib", type=suite.positive, default=100, help="size of the model")
    add("--keys", type=suite.positive, default=16, help="parameters in it")
    add("--out", default="", help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
