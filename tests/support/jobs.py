"""Real jobs for tests: Python programs beside real servers, with a deadline, and their results as files.

A program is started once per worker, with the environment that the launcher would give it. `run_job` has every worker
call one function, and gives what each returned.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvstore_server.failpoints import FAILPOINT, FAILPOINT_DIR
from kvtrainer.common.env import WORKER_MEMORY
from kvtrainer.errors import KVStoreError
from kvtrainer.jobs.worker_memories import WorkerMemories
from tests.support.forks import Fork, fork_server, inherited
from tests.support.limits import JOB_LIMIT, LIMIT

ROOT = Path(__file__).parents[2]
FOLDER = "KVTRAINER_TEST_FOLDER"
"""The variable that tells a worker where its results go."""

Results = Mapping[str, Any]
"""What one worker returns: numbers, strings and tensors under names, nested as one likes."""


@dataclass(frozen=True)
class Job:
    """A job that has ended well: its size, and what each worker returned, by rank."""

    workers: int
    servers: int
    results: list[Results]

    def __getitem__(self, name: str) -> list[Any]:
        """What the workers returned under one name, by rank."""
        return [result[name] for result in self.results]


def run_job(
    body: Callable[..., Results],
    folder: Path,
    workers: int,
    servers: int,
    *arguments: Any,
    in_group: bool = False,
    restarts: int = 0,
    environ: Mapping[str, str] = {},
) -> Job:
    """Call `body(rank, workers, *arguments)` in every worker; each computes on one thread, warnings are errors.

    Args:
        body: A function of a module, which the workers import.
        folder: An empty folder for results and output.
        arguments: Of JSON's kinds.
        in_group: Whether the workers are also ranks of torch.distributed, over gloo. A group that `body` makes itself
            and leaves behind is not ended in order.
        restarts: How often a worker that a signal killed is started again.
        environ: More variables of all processes. With KVSTORE_DURABILITY=process, servers are supervised.

    Raises:
        AssertionError: the job failed or took too long; shows its output.
    """
    main = sys.modules["__main__"].__spec__
    module = main.name if body.__module__ == "__main__" and main else body.__module__
    call = [module, body.__name__, json.dumps(arguments), str(int(in_group))]
    run_program(["-m", "tests.support.jobs", *call], folder, workers, servers, restarts, environ)
    return Job(workers, servers, [torch.load(_file(folder, rank)) for rank in range(workers)])


def run_with_deaths(
    body: Callable[..., Results],
    folder: Path,
    points: str,
    workers: int,
    servers: int,
    *arguments: Any,
    environ: Mapping[str, str] = {},
) -> Job:
    """As `run_job`, but workers that die at failpoints are started again; all of the points must be reached."""
    patient = dict.fromkeys(
        ["KVSTORE_CONNECT_TIMEOUT", "KVSTORE_REJOIN_TIMEOUT", "KVSTORE_RESTART_TIMEOUT"], str(LIMIT)
    )
    with armed(points, folder) as more:
        restarts = points.count(",") + 1
        return run_job(
            body,
            folder,
            workers,
            servers,
            *arguments,
            restarts=restarts,
            environ={**patient, **more, **environ},
        )


@contextlib.contextmanager
def armed(points: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """Give the variables that let processes of a job die at failpoints, each once; afterwards all must have.

    Args:
        points: As in KVSTORE_FAILPOINT.
    """
    fired = folder / "fired"
    fired.mkdir()
    yield {FAILPOINT: points, FAILPOINT_DIR: str(fired)}
    assert len(list(fired.iterdir())) == points.count(",") + 1


def run_program(
    command: Sequence[str],
    folder: Path,
    workers: int,
    servers: int,
    restarts: int = 0,
    environ: Mapping[str, str] = {},
) -> str:
    """Run `python COMMAND` as every worker of a job, to its end; gives what all processes printed.

    `restarts` and `environ` as in `run_job`.

    Raises:
        AssertionError: the job failed or took too long; shows its output.
    """
    members = _Members(folder, environ)
    try:
        code = members.run(command, workers, servers, JOB_LIMIT, restarts)
    finally:
        members.close()
    output = members.log.read_text(errors="replace")
    if code != 0:
        how = f"took more than {JOB_LIMIT:g} s" if code is None else f"exited with code {code}"
        what = f"the job {' '.join(command)} with {workers} workers and {servers} servers"
        raise AssertionError(f"{what} {how}; its output:\n{output}")
    return output


def own_place() -> tuple[int, int]:
    """In a worker: its rank and the number of workers."""
    return int(os.environ["KVSTORE_RANK"]), int(os.environ["KVSTORE_NUM_WORKERS"])


def error_of(call: Callable[[], object]) -> str:
    """The class and the text of what a call raises."""
    try:
        call()
    except KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _work(module: str, function: str, arguments: str, in_group: str) -> None:
    """In a worker: call the function, and hand what it returns to the test that started the job."""
    rank, workers = own_place()
    folder = Path(os.environ[FOLDER])
    body = getattr(importlib.import_module(module), function)
    with _group(rank, workers, folder) if in_group == "1" else contextlib.nullcontext():
        results = body(rank, workers, *json.loads(arguments))
    torch.save(dict(results), _file(folder, rank))
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(0)  # a group in which a collective timed out cannot be destroyed in order


def begin_group(rank: int, ranks: int, meeting: Path) -> None:
    """In a worker: become a rank of torch.distributed, over gloo; the ranks meet in a file."""
    limit, where = datetime.timedelta(seconds=LIMIT), f"file://{meeting}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)


@contextlib.contextmanager
def _group(rank: int, workers: int, folder: Path) -> Iterator[None]:
    begin_group(rank, workers, folder / "meeting")
    yield
    dist.barrier()
    dist.destroy_process_group()


def _environ(folder: Path) -> dict[str, str]:
    return {**inherited(), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", FOLDER: str(folder)}


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


class _Members:
    """The processes of a job, which end together."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.log = folder / "output.txt"
        self._environ = {**_environ(folder), **environ}
        self._is_supervised = environ.get("KVSTORE_DURABILITY") == "process"
        self._output = self.log.open("ab")
        self._input = open(os.devnull, "rb")  # noqa: SIM115
        self._memories = WorkerMemories(0)
        self._servers: list[Fork] = []
        self._workers: list[Fork] = []

    def run(
        self, command: Sequence[str], workers: int, servers: int, seconds: float, restarts: int
    ) -> int | None:
        """Run servers and workers; the first exit code that is not 0, or 0, or None where time was up."""
        deadline = time.monotonic() + seconds
        environ = {"KVSTORE_NUM_WORKERS": str(workers)}
        if servers:
            environ["KVSTORE_SERVERS"] = ",".join(self._start_servers(servers))
        has_memory = restarts and WORKER_MEMORY not in self._environ
        self._memories = WorkerMemories(workers if has_memory else 0)
        for rank in range(workers):
            self._workers.append(self._start_worker(command, rank, environ))
        code = self._with_restarts(command, environ, restarts, deadline)
        if code == 0:
            for server in self._servers:
                server.terminate()
            code = _first_failure(self._servers, deadline)
        elif code is not None:
            # The others notice it soon, and say what they saw.
            _first_failure(
                [one for one in self._workers if not one.poll()], min(deadline, time.monotonic() + 5.0)
            )
        return code

    def _with_restarts(
        self, command: Sequence[str], environ: Mapping[str, str], restarts: int, deadline: float
    ) -> int | None:
        """Like `_first_failure` of the workers, but start those again that a signal has killed."""
        started = [0] * len(self._workers)
        while (code := _first_failure(self._workers, deadline)) is not None and code < 0:
            rank = next(at for at, worker in enumerate(self._workers) if (worker.poll() or 0) < 0)
            if started[rank] == restarts:
                break
            started[rank] += 1
            again = {**environ, "KVSTORE_RESTARTS": str(started[rank])}
            self._workers[rank] = self._start_worker(command, rank, again)
        return code

    def close(self) -> None:
        for process in [*self._workers, *self._servers]:
            process.kill()
            process.wait()
        self._output.close()
        self._input.close()
        self._memories.close()

    def _start_worker(self, command: Sequence[str], rank: int, environ: Mapping[str, str]) -> Fork:
        place = {"KVSTORE_RANK": str(rank), **self._memories.environment(rank)}
        return self._start(command, {**environ, **place}, self._memories.descriptors(rank))

    def _start_servers(self, count: int) -> list[str]:
        """Start servers; returns their addresses once they listen."""
        ready = []
        for index in range(count):
            ours, theirs = os.pipe()
            flags = ["--index", str(index), "--num-servers", str(count), "--ready-fd", str(theirs)]
            flags += ["--supervise"] * self._is_supervised
            self._servers.append(self._start(["-m", "kvstore_server", *flags], {}, [theirs]))
            os.close(theirs)
            ready.append(ours)
        addresses = []
        for fd in ready:
            with open(fd) as lines:
                addresses.append(lines.readline().strip())
        return addresses

    def _start(self, command: Sequence[str], environ: Mapping[str, str], others: Sequence[int] = ()) -> Fork:
        streams = [self._input.fileno(), self._output.fileno(), self._output.fileno()]
        return fork_server().start(command, {**self._environ, **environ}, ROOT, streams, others)


def _first_failure(processes: Sequence[Fork], deadline: float) -> int | None:
    """Wait for all, or for one that fails; its exit code, else 0, or None where time was up."""
    while time.monotonic() < deadline:
        codes = {process: process.poll() for process in processes}
        failed = [code for code in codes.values() if code]
        if failed or None not in codes.values():
            return failed[0] if failed else 0
        ends = select.poll()
        for process in [one for one, code in codes.items() if code is None]:
            ends.register(process, select.POLLIN)
        ends.poll(1000 * max(deadline - time.monotonic(), 0.0))
    return None


if __name__ == "__main__":
    _work(*sys.argv[1:])
