"""Hosts of a network that exists on this machine alone: namespaces on a bridge, each behind a link of a limited speed.

It lies in namespaces of its own, which the kernel takes away with the last process in them: nothing has to be removed,
however the program ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import harness

_INSIDE = "KVTRAINER_BENCHMARK_NETWORK"
_APART = [
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--net",
    "--mount",
    "--pid",
    "--mount-proc",
    "--fork",
    "--kill-child",
]
_TOOLS = ("setpriv", "unshare", "mount", "ip", "tc")
_PORT, _MASTER_PORT = 7000, 7001
_BURST, _QUEUE, _UNSENT = 128 << 10, 1 << 20, 128 << 10
"""Bytes that a link sends at once, that wait for it before some are dropped, and that a connection keeps unsent."""


def run_apart() -> int | None:
    """Run this program again in namespaces of its own and return its exit code; in there, return None.

    Raises:
        SystemExit: not as root, or without the tools; it says so in one line.
    """
    if os.environ.get(_INSIDE):
        return None
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing or os.geteuid():
        raise SystemExit(f"{sys.argv[0]} needs {', '.join(missing) or 'root'}: it makes a network of its own")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = [*_APART, sys.executable, *sys.argv]
    with subprocess.Popen(command, env={**os.environ, _INSIDE: "1"}, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            process.kill()  # and with it, by the kernel, everything in there


class Network:
    """So many hosts; each sends to and receives from all others through its one link."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        # Where `ip` keeps names and we keep files: of no concern to other programs, and gone with the namespaces.
        _run("mount", "-t", "tmpfs", "tmpfs", "/run")
        tempfile.tempdir = "/run"
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "link", "set", "switch", "up")
        for host in range(hosts):
            _run("ip", "netns", "add", f"host{host}")
            _run(*_on(host), "sysctl", "-q", "-w", f"net.ipv4.tcp_notsent_lowat={_UNSENT}")
            _run(
                "ip",
                "link",
                "add",
                f"port{host}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                f"host{host}",
            )
            _run("ip", "link", "set", f"port{host}", "master", "switch", "up")
            _run("ip", "-n", f"host{host}", "addr", "add", f"{address(host)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", f"host{host}", "link", "set", device, "up")

    def set_rate(self, megabits: int) -> None:
        """Have every link carry so many megabits in a second each way."""
        bucket = f"root tbf rate {megabits}mbit burst {_BURST} limit {_QUEUE}".split()
        for host in range(self._hosts):
            _run("tc", "qdisc", "replace", "dev", f"port{host}", *bucket)
            _run("tc", "-n", f"host{host}", "qdisc", "replace", "dev", "eth0", *bucket)

    def run_kvtrainer_job(
        self,
        command: Sequence[str],
        workers: int,
        servers: int,
        rates: Sequence[int],
        timeout: float,
        together: int = 1,
    ) -> harness.Measured:
        """Run `command --out FILE` for each worker, so many on a host, and servers on hosts of their own; as of
        `harness`.

        The N-th work of the job has links of the N-th rate.
        """
        bound = [f"tcp://{address(workers + at)}:{_PORT}" for at in range(servers)]
        common = {"PYTHONPATH": harness.FOLDER, "KVSTORE_NUM_WORKERS": str(workers)}
        common["KVSTORE_SERVERS"] = ",".join(bound)
        with harness.Processes() as job:
            for at, where in enumerate(bound):
                serve = [
                    sys.executable,
                    "-m",
                    "kvstore_server",
                    "--bind",
                    where,
                    "--allow-unauthenticated-bind",
                ]
                serve += ["--index", str(at), "--num-servers", str(servers)]
                job.start([*_on(workers + at), *serve], common, serves=True)
            for rank in range(workers):
                job.start(
                    [*_on(rank // together), *command, "--out", str(job.out)],
                    {**common, "KVSTORE_RANK": str(rank)},
                )
            return job.wait(timeout, lambda number: self.set_rate(rates[number]))

    def run_torch_job(
        self, command: Sequence[str], workers: int, rates: Sequence[int], timeout: float
    ) -> harness.Measured:
        """Run `command --out FILE` as every rank of a torch.distributed job, each on a host; as the other one."""
        common = {"MASTER_ADDR": address(0), "MASTER_PORT": str(_MASTER_PORT), "GLOO_SOCKET_IFNAME": "eth0"}
        common["WORLD_SIZE"] = str(workers)
        with harness.Processes() as job:
            for rank in range(workers):
                job.start([*_on(rank), *command, "--out", str(job.out)], {**common, "RANK": str(rank)})
            return job.wait(timeout, lambda number: self.set_rate(rates[number]))


def address(host: int) -> str:
    """The address of a host."""
    return f"10.0.0.{host + 1}"


def _on(host: int) -> list[str]:
    """What runs a command on a host."""
    return ["ip", "netns", "exec", f"host{host}"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
