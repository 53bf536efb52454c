"""Launched jobs for tests: a launcher with stand-in servers, and a way to find every process of a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.forks import inherited
from tests.support.limits import LIMIT

ROOT = Path(__file__).parents[2]


def resuming(dies: str) -> str:
    """A script that trains from the last saved states on, whose rank 1 is killed in step 5 if an expression is true."""
    return f"""
import os, signal, torch, kvtrainer
torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
trainer = kvtrainer.Trainer(net.named_parameters(), "adam", {{"learning_rate": 0.1}}, kvstore="dist_sync")
done, _ = trainer.resume()
for step in range(done, 8):
    torch.manual_seed(10 * step + trainer.rank)
    net(torch.randn(8, 4)).square().mean().backward()
    if step == 5 and trainer.rank == 1 and {dies}:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step()
os.write(1, f"{{net.weight.tolist()}} {{net.bias.tolist()}}\\n".encode())  # at once: workers may share a pipe
"""


# Runs a JobLauncher with stand-in servers.
DRIVER = """
import json, os, sys
from kvtrainer.jobs.job import JobLauncher, JobTimeouts
from kvtrainer.jobs.processes import inherited_environment
job = json.loads(sys.argv[1])
command = [sys.executable, "-I", "-S", "-c", job["server"]]
servers = [[*command, str(index)] for index in range(job["servers"])]
limits = JobTimeouts(**job["limits"])
environ = inherited_environment(os.environ)
given = job["worker"], job["workers"], servers, environ, limits, None, job["viewer"], job["restarts"]
elastic = job["elastic"] and tuple(job["elastic"])
sys.exit(JobLauncher(*given, elastic=elastic).run())
"""

TELLS_WHERE = (
    "kvlaunch: servers are ready; to look at them: kvtop tcp://127.0.0.1:5000 tcp://127.0.0.1:5001\n"
)
"""What a launcher says of two stand-in servers."""

READY = """
import os, signal, sys, time
def say(text):
    os.write(1, f"{text}\\n".encode())  # a signal that comes within a `print` must not print
def report(address):
    say(f"kvstore-server: listening on {address}")
def on_term(action):
    signal.signal(signal.SIGTERM, lambda *_: action())
def drain():
    say("drained")
    sys.exit(0)
def stay():
    while True:
        time.sleep(0.05)  # `pause` would miss a signal that comes just before it
index = int(sys.argv[1])
on_term(drain)
"""
SERVER = READY + 'report(f"tcp://127.0.0.1:{5000 + index}")\nstay()'
STUBBORN = "trap '' TERM; while :; do sleep 1; done"


class Jobs:
    """Starts launchers whose processes, down to the last grandchild, can be found by a token."""

    def __init__(self) -> None:
        self.variable = {"LAUNCH_TEST": uuid.uuid4().hex}
        """What every process of these jobs has in its environment; who starts one in another way adds it."""
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        worker: str,
        workers: int = 1,
        servers: int = 0,
        server: str = SERVER,
        environ: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        viewer: str = "",
        restarts: int = 0,
        elastic: tuple[int, int] | None = None,
        stderr: int | IO[bytes] = subprocess.PIPE,
        **limits: float,
    ) -> subprocess.Popen[bytes]:
        job: dict[str, Any] = {
            "worker": ["sh", "-c", worker],
            "workers": workers,
            "servers": servers,
            "server": server,
        }
        job["restarts"], job["elastic"] = restarts, elastic
        job["viewer"] = ["sh", "-c", viewer, "viewer"] if viewer else []
        job["limits"] = {"start": LIMIT, "linger": 0.0, "linger_unheard": 0.0, "grace": LIMIT, **limits}
        process = subprocess.Popen(
            [*prefix, sys.executable, "-S", "-c", DRIVER, json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**inherited(), "PYTHONPATH": str(ROOT), **(environ or {}), **self.variable},
            cwd=ROOT,
        )
        self._started.append(process)
        return process

    def run(self, worker: str, workers: int = 1, **options: object) -> tuple[int, str, str]:
        """Run a job to its end: exit code, standard output, standard error."""
        process = self.start(worker, workers, **options)  # type: ignore[arg-type]
        return self.finish(process)

    def finish(self, process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out.decode(), (err or b"").decode()

    def pids(self, part: str = "") -> list[int]:
        """The pids of all processes of these jobs with `part` in their command line; no zombies."""
        found = []
        [(name, value)] = self.variable.items()
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                ours = f"{name}={value}".encode() in (directory / "environ").read_bytes()
                if ours and part.encode() in (directory / "cmdline").read_bytes():
                    found.append(int(directory.name))
            except OSError:
                continue
        return found

    def alive(self) -> list[str]:
        """The command lines of all processes of these jobs, launcher and guardian included."""
        return [command_line(pid) for pid in self.pids()]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    """The command line of a process, empty for one that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def line_of(process: subprocess.Popen[bytes]) -> str:
    """The next line of a launcher's standard output, without its end; waits for it."""
    assert process.stdout is not None
    return process.stdout.readline().decode().rstrip("\n")
