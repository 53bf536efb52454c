"""Jobs of two servers and three workers whose processes are killed, stopped and started again, and what comes of them.

`Job` is a supervisor in the test: it starts every process that dies again, at once, and keeps the descriptors of a
server's memory, as kvlaunch and `kvstore-server --supervise` do. Its processes are forked from one that has imported
torch, so a start takes a tenth of a second, and hundreds of jobs take minutes. What kvlaunch adds is tested with it.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore_server.descriptor_store import DescriptorStore
from kvtrainer.jobs.worker_memories import WorkerMemories
from tests.support.forks import Fork, fork_server, inherited
from tests.support.limits import LIMIT
from tests.support.processes import held_port

ROOT = Path(__file__).parents[2]
SERVERS, WORKERS = 2, 3
REPLACED = 75
"""The exit code of a worker whose rank another process has taken over."""
_POLL = 0.02
"""Seconds between two looks at whether a process has stopped itself."""
_SERVER = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
from kvstore_server.cli import run_server_cli
run_server_cli()
"""
_MAX_STARTS = 1000
"""Of one process in a job: more are a crash loop."""


class Member:
    """One server or worker of a job, through all of its processes."""

    def __init__(self, role: str, index: int, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.role, self.index = role, index
        self.name = f"{role}{index}"
        self.arguments, self.env = arguments, env
        self.store = DescriptorStore() if role == "server" else None
        self.memory = WorkerMemories(1 if role == "worker" else 0)
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: Fork | None = None
        self.is_done = False
        self.starts = 0
        self.zombies: list[Fork] = []
        """Processes that are stopped or alive although a successor was started."""
        self.codes: list[int] = []
        """How its processes have ended."""

    def start(self) -> None:
        # Above 0 at the first start, too: then servers also tell a process that was held up there if all have finished.
        environ, stored = {**self.env, "KVSTORE_RESTARTS": str(self.starts + 1)}, list[int]()
        environ |= self.memory.environment(0)
        if self.store is not None:
            environ, stored = self.store.environment(environ), self.store.descriptors
        null = os.open(os.devnull, os.O_RDWR)
        streams = [null, self.log.fileno(), self.log.fileno()]
        others = self.memory.descriptors(0)
        self.process = fork_server().start(self.arguments, environ, ROOT, streams, others, stored=stored)
        os.close(null)
        self.starts += 1

    def lose(self) -> None:
        """Kill it, and all that outlives its process; it is started again, also if it was done."""
        self.signal(signal.SIGKILL)
        if self.store is not None:
            self.store.close()
            self.store = DescriptorStore()
        if self.is_done:
            self.is_done = False
            self.start()

    def receive(self) -> None:
        if self.store is not None and self.process is not None:
            self.store.receive(os.getpgid(self.process.pid))

    def is_stopped(self) -> bool:
        return self.process is not None and _is_stopped(self.process)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended; it is not reaped here, because what it has sent was not received yet."""
        if self.process is not None and not self.is_done and not self.has_ended():
            os.kill(self.process.pid, number)

    def has_ended(self) -> bool:
        assert self.process is not None
        poll = select.poll()  # select takes no descriptor above 1023
        poll.register(self.process.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def said(self) -> str:
        """The end of what its processes have written."""
        return os.pread(self.log.fileno(), 1 << 22, 0).decode(errors="replace")[-20_000:]

    def close(self) -> None:
        for process in [*self.zombies, *([self.process] if self.process else [])]:
            process.kill()
            process.wait()
        if self.store is not None:
            self.store.close()
        self.memory.close()
        self.log.close()


@dataclass
class Outcome:
    """What came of a job.

    Attributes:
        results: The digests of weights and of the optimizer's state, of each rank.
        computed: (rank, round) → how often its gradient was computed.
        starts: How often each process was started.
        fired: The failpoints that have fired.
        codes: The exit codes of processes that a successor has replaced.
        seconds: How long the job took.
    """

    results: list[str]
    computed: Counter[tuple[int, int]]
    starts: dict[str, int]
    fired: list[str]
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def recomputed(self) -> dict[int, int]:
        """Rank → how many computations there were beyond one for each round."""
        found = Counter[int]()
        for (rank, _), count in self.computed.items():
            found[rank] += count - 1
        return {rank: count for rank, count in found.items() if count}


Event = tuple[float, Callable[["Job"], None]]
"""After how many seconds from the last event, and what is done then."""


class Job:
    """Runs one job to its end; a context manager that leaves no process behind.

    Args:
        case: One of `training.CASES`.
        rounds: Steps of every worker.
        folder: Where the workers write their results; empty.
        environ: More variables of all processes.
        flags: More flags of the servers.
        stopped: What is done with a process that has stopped itself; continues it after a while by default.
        workers: How many there are.
        module: What they run, with the case, the rounds and the folder as its arguments.
        servers: How many there are.
    """

    def __init__(
        self,
        case: str,
        rounds: int,
        folder: Path,
        environ: Mapping[str, str],
        flags: Sequence[str] = (),
        stopped: Callable[[Job, Member], None] | None = None,
        workers: int = WORKERS,
        module: str = "tests.chaos.training",
        servers: int = SERVERS,
    ) -> None:
        self._folder, self._rounds = folder, rounds
        self._stopped = stopped or (lambda job, member: member.signal(signal.SIGCONT))
        ports = [held_port() for _ in range(servers)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        base = {
            **inherited(),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "KVSTORE_DEAD_AFTER": "20",
            "KVSTORE_REJOIN_TIMEOUT": str(LIMIT),
            "KVSTORE_RESTART_TIMEOUT": str(LIMIT),
            "KVSTORE_TIMEOUT": str(LIMIT),
            "KVSTORE_CONNECT_TIMEOUT": str(LIMIT),
            "KVSTORE_NUM_WORKERS": str(workers),
            "KVSTORE_SERVERS": ",".join(addresses),
            "KVSTORE_DURABILITY": "process",
            **environ,
        }
        self.servers = [
            Member(
                "server",
                at,
                [
                    "-c",
                    _SERVER,
                    "--index",
                    str(at),
                    "--num-servers",
                    str(servers),
                    "--bind",
                    address,
                    "--import",
                    "tests.chaos.optimizers",
                    *flags,
                ],
                base,
            )
            for at, address in enumerate(addresses)
        ]
        training = ["-m", module, case, str(rounds), str(folder)]
        self.workers = [
            Member("worker", rank, training, {**base, "KVSTORE_RANK": str(rank)}) for rank in range(workers)
        ]
        self.members = [*self.servers, *self.workers]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.close()

    def run(self, events: Iterator[Event] | None = None, seconds: float = LIMIT) -> Outcome:
        """Run the job until all workers have ended well; what comes of it.

        Args:
            events: What happens to it meanwhile.
            seconds: After these it counts as hanging, and its processes say what they do.
        """
        began = time.monotonic()
        deadline, event = began + seconds, _next(events, began)
        for member in self.members:
            member.start()
        while not all(worker.is_done for worker in self.workers):
            now = time.monotonic()
            assert now < deadline, f"the job hangs\n{self._stacks()}"
            # 1. What is due happens.
            while event is not None and event[0] <= now:
                event[1](self)
                event = _next(events, now)
            # 2. Wait for the end of a process, or for what a server hands over.
            poll = select.poll()
            for member in self.members:
                if member.process is not None and not member.is_done:
                    poll.register(member.process.fileno(), select.POLLIN)
                if member.store is not None:
                    poll.register(member.store.fileno(), select.POLLIN)
            due = deadline if event is None else event[0]
            poll.poll(1000 * max(0.0, min(_POLL, due - now)))
            # 3. Start again what has died; see to what has stopped.
            for member in self.members:
                self._look_after(member)
        # 4. Those that were replaced find that out while there are servers, which may just be paused; one that still
        # stands still is killed.
        for server in self.servers:
            server.signal(signal.SIGCONT)
        zombies = [zombie for member in self.members for zombie in member.zombies]
        for zombie in zombies:
            if _is_stopped(zombie):
                zombie.kill()
        while left := [zombie for zombie in zombies if zombie.poll() is None]:
            assert time.monotonic() < deadline, f"a process that was replaced hangs\n{self._stacks()}"
            poll = select.poll()
            for fd in left:
                poll.register(fd, select.POLLIN)
            poll.poll(1000 * _POLL)
        codes = [zombie.wait() for zombie in zombies]
        for server in self.servers:
            server.signal(signal.SIGTERM)
        return self._outcome(codes, time.monotonic() - began)

    def computed(self, rank: int) -> int:
        """How many gradients a rank has computed so far."""
        path = self._folder / f"computed.{rank}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def replace(self, member: Member) -> None:
        """Start a successor of a worker whose process lives, as if nobody could see that."""
        assert member.process is not None
        if not member.is_done:
            member.zombies.append(member.process)
            member.start()

    def _look_after(self, member: Member) -> None:
        assert member.process is not None
        if member.is_done:
            return
        has_ended = member.has_ended()
        member.receive()  # before it is reaped
        if not has_ended:
            if member.is_stopped():
                self._stopped(self, member)
            return
        code = member.process.wait()
        member.codes.append(code)
        # One whose rank has finished everywhere is told so, and has nothing left to do.
        if member.role == "worker" and code in (0, REPLACED):
            member.is_done = True
            return
        is_lost = member.role == "worker" and code == 1 and "ServerLostState: " in member.said()
        assert code == -signal.SIGKILL or is_lost, f"{member.name} ended with {code}\n{self._logs()}"
        assert member.starts < _MAX_STARTS, f"{member.name} dies again and again\n{self._logs()}"
        member.start()

    def _outcome(self, codes: list[int], seconds: float) -> Outcome:
        results, computed = list[str](), Counter[tuple[int, int]]()
        for rank in range(len(self.workers)):
            said = (self._folder / f"result.{rank}").read_text().splitlines()
            assert len(set(said)) == 1, said
            results.append(said[0])
            lines = (self._folder / f"computed.{rank}").read_text().splitlines()
            computed.update((rank, int(line.split()[0])) for line in lines)
        assert {at for _, at in computed} == set(range(self._rounds))
        fired = self._folder / "fired"
        return Outcome(
            results,
            computed,
            {member.name: member.starts for member in self.members},
            sorted(path.name for path in fired.iterdir()) if fired.is_dir() else [],
            codes,
            seconds,
        )

    def _stacks(self) -> str:
        for member in self.members:
            if member.process is not None and not member.is_done:
                member.signal(signal.SIGCONT)
                member.signal(signal.SIGUSR1)
            for zombie in member.zombies:
                zombie.send_signal(signal.SIGUSR1)
        time.sleep(2.0)  # nothing says when all have written
        return self._logs()

    def _logs(self) -> str:
        return "\n".join(
            f"---- {one.name}, started {one.starts} times, ended with {one.codes}\n{one.said()}"
            for one in self.members
        )


Undisturbed = Callable[[str, int], list[str]]
"""Given a case and a number of rounds, the results of a job in which nothing happens."""


def run_case(
    case: str, entries: Sequence[str], way: str, folder: Path, expected: list[str], rounds: int
) -> Outcome:
    """Run a job with failpoints; check that all have fired, and that nothing shows in what it computes.

    Args:
        entries: NAME@INDEX:N of each failpoint.
        way: The transport.
    """
    fired = folder / "fired"
    fired.mkdir()
    environ = {
        "KVSTORE_FAILPOINT": ",".join(entries),
        "KVSTORE_FAILPOINT_DIR": str(fired),
        "KVSTORE_TRANSPORT": way,
    }
    with Job(case, rounds, folder, environ) as job:
        outcome = job.run()
    missing = {f"{entry}=kill" for entry in entries}.difference(outcome.fired)
    assert not missing, f"these did not fire: {sorted(missing)}"
    check_bits(outcome, expected)
    assert sum(outcome.starts.values()) == len(outcome.starts) + len(entries), outcome
    return outcome


def check_bits(outcome: Outcome, expected: list[str]) -> None:
    """Check that a job has the expected results, and that no worker has computed a round that it had committed."""
    assert outcome.results == expected, f"{outcome}, but expected {expected}"
    # A process that dies has one round that it had not committed, at most.
    deaths = {rank: outcome.starts[f"worker{rank}"] - 1 for rank in range(WORKERS)}
    assert all(count <= deaths[rank] for rank, count in outcome.recomputed.items()), outcome


def _is_stopped(process: Fork) -> bool:
    if process.returncode is not None:
        return False
    text = Path(f"/proc/{process.pid}/stat").read_text()  # it is there until it is reaped
    return text.rpartition(")")[2].split()[0] == "T"


def _next(events: Iterator[Event] | None, now: float) -> Event | None:
    found: Any = next(events, None) if events is not None else None
    return None if found is None else (now + found[0], found[1])
