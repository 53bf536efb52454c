"""A long job in which a process is killed or paused every five seconds: it ends with the bits of an undisturbed one.

    python -m tests.chaos.soak MINUTES

Memory and descriptors of every process are measured all the time, and the directory of snapshots. After a warm-up
memory must not grow by more than a MiB an hour, nor the number of descriptors; the directory must not have more than
three times the bytes of the state. `make soak` runs it; the undisturbed job comes first, and takes about as long.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.jobs import SERVERS, WORKERS, Event, Job, Member, Outcome, check_bits
from tests.chaos.test_random import go_on, kill, pause
from tests.chaos.training import FILL
from tests.support.fork_server import EXEC

PAUSE = 5.0
"""Seconds between two events."""
MEASURED = 10_000
"""Rounds of a job whose speed says how many rounds the others take."""
SLOPE = 1.0
"""MiB an hour that a process may grow by."""
COURSE = 12
"""Samples of a process's memory that are printed."""
MOST_SNAPSHOTS = 3
"""Times the bytes of the state that the directory of snapshots may have."""


class Samples:
    """Memory and descriptors of processes over time, and the bytes of a directory.

    Args:
        state: The directory of snapshots.
    """

    def __init__(self, state: Path) -> None:
        self._began = time.monotonic()
        self._state = state
        self.directory = self.snapshot = 0
        """The most bytes that the directory has had, and that a snapshot of all servers has."""
        self.memory: dict[str, list[tuple[float, float]]] = {}
        """Name of a process → (hours, MiB of its heap and its share of shared memory).

        All pages of the heap count, also those that it still shares with the process from which it was forked: these
        become its own one by one, which is no growth.
        """
        self.files: dict[str, list[int]] = {}

    def take(self, job: Job) -> None:
        servers = [bytes_in(path) for path in self._state.iterdir()]
        self.directory = max(self.directory, sum(map(sum, (one.values() for one in servers))))
        self.snapshot = max(self.snapshot, sum(max(one.values(), default=0) for one in servers))
        for member in job.members:
            if member.process is not None and not member.is_done:
                self._take(f"{member.name}, start {member.starts}", member.process.pid)

    def _take(self, name: str, pid: int) -> None:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError):
            return  # it has just died
        parts = ("Anonymous:", "Pss_Shmem:")
        kib = sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(parts))
        hours = (time.monotonic() - self._began) / 3600
        self.memory.setdefault(name, []).append((hours, kib / 1024))
        self.files.setdefault(name, []).append(files)


def bytes_in(server: Path) -> dict[str, int]:
    """The bytes of each snapshot of a server, complete or not. What is removed meanwhile counts as empty."""
    found: dict[str, int] = {}
    for snapshot in list(server.iterdir()):
        with suppress(FileNotFoundError, NotADirectoryError):
            for path in snapshot.iterdir():
                found[snapshot.name] = found.get(snapshot.name, 0) + path.stat().st_size
    return found


def slope(samples: list[tuple[float, float]]) -> float:
    """The growth in MiB an hour, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def events(seconds: float, samples: Samples) -> Iterator[Event]:
    """Deaths and pauses, of server 1 and the workers 1 and 2; server 0 and worker 0 live long, so they are measured."""
    draw = random.Random(0)
    victims = [1, SERVERS + 1, SERVERS + WORKERS - 1]
    for _ in range(int(seconds / PAUSE)):
        at = draw.choice(victims)
        yield PAUSE - 0.5, samples.take
        if draw.random() < 0.7:
            yield 0.5, partial(kill, at=at)
        else:
            yield 0.1, partial(pause, at=at)
            yield 0.4, partial(go_on, at=at)


def _ignore(job: Job, member: Member) -> None:
    """A process that is paused is let go on by the event after that."""


def main(minutes: float) -> int:
    """Run the soak; 0 if all is well."""
    seconds = 60 * minutes
    with tempfile.TemporaryDirectory() as top:
        # 1. How many rounds take so long with an event every five seconds.
        outcome, _ = disturbed(MEASURED, Path(top) / "measured", 10 * seconds)
        rounds = int(seconds * MEASURED / outcome.seconds)
        # 2. So many undisturbed, as fast as it goes, and once more with the events.
        folder = Path(top) / "undisturbed"
        folder.mkdir()
        with Job("momentum", rounds, folder, {}) as job:
            expected = job.run(seconds=10 * seconds).results
        outcome, samples = disturbed(rounds, Path(top) / "disturbed", 10 * seconds)
        check_bits(outcome, expected)
    print(f"{rounds} rounds in {outcome.seconds:.0f} s, starts: {outcome.starts}, bits as expected")
    return report(samples)


def disturbed(rounds: int, folder: Path, longest: float) -> tuple[Outcome, Samples]:
    """Run a job with an event every five seconds until all rounds are made, or for so many seconds."""
    results, state = folder / "results", folder / "state"
    results.mkdir(parents=True)
    state.mkdir()
    samples = Samples(state)
    with Job("momentum", rounds, results, {}, ["--state-dir", str(state)], stopped=_ignore) as job:
        # A fork has the heap of its parent, with hundreds of megabytes that imports have freed. Pages of these become
        # its own one by one, in whatever order they are used again, which looks like growth.
        for member in (job.servers[0], job.workers[0]):
            member.env = {**member.env, EXEC: "1", FILL: "1"}
        return job.run(events(longest, samples), seconds=longest), samples


def report(samples: Samples) -> int:
    """Print how memory, descriptors and the directory went; 0 if nothing has grown.

    Only of processes that lived long.
    """
    is_small = 0 < samples.directory <= MOST_SNAPSHOTS * samples.snapshot
    code = not is_small
    print(
        f"snapshots: at most {samples.directory} bytes, one of all servers has {samples.snapshot}"
        f"{'' if is_small else '  <- GROWS'}"
    )
    for name, found in samples.memory.items():
        steady = found[len(found) // 4 :]
        if len(steady) < 20:
            continue
        grown, files = slope(steady), samples.files[name][len(found) // 4 :]
        is_well = grown < SLOPE and files[-1] <= files[0]
        code |= not is_well
        course = " ".join(f"{steady[len(steady) * at // COURSE][1]:.1f}" for at in range(COURSE))
        print(
            f"{name}: {course} {steady[-1][1]:.1f} MiB, {grown:+.2f} MiB an hour; "
            f"{files[0]} to {files[-1]} descriptors{'' if is_well else '  <- GROWS'}"
        )
    return int(code)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main(float(sys.argv[1])))
