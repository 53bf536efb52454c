"""Runs benchmark jobs in fresh processes, collects what they measured, and describes the machine.

A job either returns what its worker 0 wrote, or raises JobError with the end of its output; it is killed as a whole at
its time limit. Of jobs whose workers call `steps.mark` also memory and CPU seconds of all processes are measured.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import usage

from kvtrainer.jobs.guardian import end_with_parent
from kvtrainer.jobs.processes import inherited_environment

Measured = dict[str, dict[str, Any]]
"""Workload name → {"init": seconds, "rounds": [seconds …], "median": seconds}."""

SETTINGS = (
    "OMP_NUM_THREADS=1 in every process; peers over TCP on loopback, kvtrainer as KVSTORE_TRANSPORT says"
)
_HERE = Path(__file__).resolve().parent
FOLDER = str(_HERE.parent)
"""Where the packages of this checkout lie."""
_TAIL = 3000
_RESULTS = "benchmarks/results"
"""What is in there changes no measurement."""


class JobError(RuntimeError):
    """A job failed or ran into its time limit."""


@dataclass(frozen=True)
class Case:
    """What was measured: the workload, workers x servers or another setting, and the optimizer."""

    workload: str
    topology: str
    optimizer: str


def run_kvtrainer_job(
    command: Sequence[str],
    workers: int,
    servers: int,
    timeout: float,
    checkout: str = "",
    environ: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
) -> Measured:
    """Run `command --out FILE` as every worker of a job under kvlaunch with `flags`; return what FILE holds then.

    The job runs on the packages in the folder `checkout`, by default in that of this file. Servers can --import modules
    of this file's folder.
    """
    folder = os.path.abspath(checkout or FOLDER)
    launch = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", str(workers), "-s", str(servers)]
    launch += [*flags, "--"]
    common = {**(environ or {}), "PYTHONPATH": f"{folder}{os.pathsep}{_HERE}"}
    with Processes() as job:
        job.start([*launch, *command, "--out", str(job.out)], common, folder)
        return job.wait(timeout)


def run_torch_job(command: Sequence[str], workers: int, timeout: float) -> Measured:
    """Run `command --out FILE` as every rank of a torch.distributed job; return what FILE holds then.

    kvtrainer is that of this file's folder.
    """
    common = {
        "PYTHONPATH": FOLDER,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
    }
    common |= {"GLOO_SOCKET_IFNAME": "lo"}
    with Processes() as job:
        for rank in range(workers):
            job.start([*command, "--out", str(job.out)], {**common, "RANK": str(rank)})
        return job.wait(timeout)


def run_process(command: Sequence[str], timeout: float) -> Measured:
    """Run `command --out FILE` as one process, which may start others; return what FILE holds then.

    They keep memory that they freed, as those of a job under kvlaunch do.
    """
    with Processes() as job:
        job.start(
            [*command, "--out", str(job.out)], {**inherited_environment(os.environ), "PYTHONPATH": FOLDER}
        )
        return job.wait(timeout)


def run_mpi_job(command: Sequence[str], workers: int, timeout: float) -> Measured:
    """Run `command --out FILE` as every rank of an MPI job; its `mpiexec` lies beside the command's interpreter."""
    mpiexec = str(Path(command[0]).parent / "mpiexec")
    with Processes() as job:
        job.start([mpiexec, "-n", str(workers), *command, "--out", str(job.out)], {})
        return job.wait(timeout)


def run_mxnet_job(
    command: Sequence[str], workers: int, servers: int, timeout: float, is_ipc: bool = False
) -> Measured:
    """Run `command --out FILE` in every role of an MXNet job; return what FILE holds then.

    They meet on the loopback device, or, if `is_ipc`, over Unix sockets.
    """
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_INTERFACE": "lo",
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        **({"DMLC_LOCAL": "1"} if is_ipc else {}),
    }
    with Processes() as job:
        for role in ["scheduler", *["server"] * servers, *["worker"] * workers]:
            job.start([*command, "--out", str(job.out)], {**common, "DMLC_ROLE": role})
        return job.wait(timeout)


@dataclass(frozen=True)
class Table:
    """What a page of results says: rows of Markdown under a head."""

    title: str
    legend: str
    head: Sequence[str]
    rows: Sequence[str]


def write_table(stem: Path, table: Table, samples: Sequence[Any], settings: str) -> None:
    """Write STEM.json with every sample (dataclasses), and STEM.md with the table."""
    machine = describe_machine(installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"]), settings)
    stem.parent.mkdir(parents=True, exist_ok=True)
    document = {"title": table.title, "machine": machine, "samples": list(map(asdict, samples))}
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        f"# {table.title}",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        "",
        table.legend,
    ]
    lines += [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|", *table.rows]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")


def describe_machine(versions: Mapping[str, str], settings: str = SETTINGS) -> dict[str, Any]:
    """Date, hardware, system and versions, as printed above the numbers."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "load average at the end": "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": _revision(),
        "python": platform.python_version(),
        "settings": settings,
    }


def cuda_device(device: str) -> dict[str, str]:
    """The name of the CUDA device that parameters are on, in the form of versions; nothing for the CPU."""
    if device == "cpu":
        return {}
    torch = importlib.import_module("torch")
    return {"CUDA": f"{torch.version.cuda} on {torch.cuda.get_device_name(device)}"}


def installed_versions(python: str, names: Sequence[str]) -> dict[str, str]:
    """The versions of packages as another interpreter sees them."""
    code = "import sys, importlib.metadata as m\nfor name in sys.argv[1:]: print(name, m.version(name))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


def why_missing(python: str, modules: str) -> str:
    """Why another interpreter cannot import modules, with commas between them; "" if it can."""
    if not Path(python).exists():
        return f"there is no {python}"
    done = subprocess.run([python, "-c", f"import {modules}"], capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be imported"])[-1]


class Processes:
    """Processes of one job, each in a group of its own, so that none is left behind; they end with this one, too."""

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._folder = tempfile.TemporaryDirectory(prefix="kvtrainer-benchmark-")
        self._running: list[subprocess.Popen[str]] = []
        self._serving: list[subprocess.Popen[str]] = []
        self.out = Path(self._folder.name) / "measured.json"
        """Where worker 0 writes what it has measured."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._output.close()
        self._folder.cleanup()

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: str | None = None,
        serves: bool = False,
    ) -> int:
        """Start one process in a folder and return its number; its output is kept for the case of a failure.

        One that `serves` is ended when all others have ended.
        """
        process = subprocess.Popen(
            list(command),
            env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=folder,
            preexec_fn=end_with_parent(os.getpid()),
        )
        self._running.append(process)
        if serves:
            self._serving.append(process)
        return process.pid

    def check(self) -> None:
        """Raise JobError if one has ended."""
        for process in self._running:
            if process.poll() is not None:
                raise JobError(f"{process.args!r} ended with code {process.returncode}:\n{self._tail()}")

    def wait(self, timeout: float, prepare: Callable[[int], object] = lambda number: None) -> Measured:
        """Return what worker 0 wrote when all have ended well.

        `prepare` is called with the number of each work before that.

        Raises:
            JobError: one failed, the time is over, or nothing was written.
        """
        deadline = time.monotonic() + timeout
        marks = usage.Marks(self.out, [process.pid for process in self._running], prepare)
        waiting = list(self._running)
        while len(waiting) > len(self._serving):
            for process in list(waiting):
                code = process.poll()
                if code is None:
                    continue
                if code != 0 or process in self._serving:
                    raise JobError(f"{process.args!r} ended with code {code}:\n{self._tail()}")
                waiting.remove(process)
            if time.monotonic() > deadline:
                raise JobError(f"the job was not over after {timeout:g} s:\n{self._tail()}")
            marks.serve()
            time.sleep(0.02)
        if not self.out.exists():
            raise JobError("the job ended well, but its worker 0 wrote no result")
        measured: Measured = json.loads(self.out.read_text())
        marks.add_to(measured)
        return measured

    def _tail(self) -> str:
        self._output.seek(0)
        return self._output.read()[-_TAIL:]


def free_port() -> int:
    """Find a port of loopback that nobody listens at, and that the system gives nobody who leaves the choice to it.

    A peer listens there a second later, when others of its processes have asked for ports.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(1024, max(lowest, 1024)), min(64, max(lowest - 1024, 0))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise JobError("no port of 127.0.0.1 is free")


def _revision() -> str:
    """Name the commit that was measured, and say so if the working tree differs from it in more than results."""
    git = ["git", "-C", str(Path(__file__).parent)]
    others = [":/", f":(exclude,top){_RESULTS}"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = [*git, "describe", "--always", "--abbrev=10"]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", *others], capture_output=True, check=True
        )
        return f"{name}-dirty" if changed.stdout else name
    return "unknown"


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def spread(values: Sequence[float]) -> str:
    """The median, least and greatest of some values; "-" if there are none, one alone as it is."""
    if not values:
        return "-"
    if len(values) == 1:
        return figure(values[0])
    return f"{figure(statistics.median(values))} ({figure(min(values))} to {figure(max(values))})"


def figure(value: float) -> str:
    """A number with two or three digits that count."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
