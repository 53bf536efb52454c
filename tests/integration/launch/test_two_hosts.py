"""A job on two hosts that have nothing but a network between them: network namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import run_program
from tests.support.launch_jobs import ROOT, resuming
from tests.support.limits import LIMIT

HOSTS = {"10.199.7.1": f"kvhost{os.getpid()}a", "10.199.7.2": f"kvhost{os.getpid()}b"}
"""Address → namespace."""
FAKE_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
case $host in {cases} esac
echo "$host $*" >> {log}
exec ip netns exec $name setsid -w env -i PATH="$PATH" sh -c "$*"
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=LIMIT)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[str]]:
    """The flags of kvlaunch for two hosts, of which neither reaches the other's loopback."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("only root can make network namespaces, with ip")
    try:
        first, second = HOSTS.values()
        try:
            for name in HOSTS.values():
                ip("netns", "add", name)
            ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
            for address, name in HOSTS.items():
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    ip("-n", name, "link", "set", device, "up")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"this system makes no network namespaces: {error}")
        cases = " ".join(f"{address}) name={name};;" for address, name in HOSTS.items())
        ssh, hosts = tmp_path / "ssh", tmp_path / "hosts"
        ssh.write_text(FAKE_SSH.format(cases=cases, log=tmp_path / "commands"))
        ssh.chmod(0o755)
        hosts.write_text("\n".join(HOSTS))
        yield ["-H", str(hosts), "--ssh", str(ssh)]
    finally:
        for name in HOSTS.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT, check=False)


def run(flags: list[str]) -> list[str]:
    command = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", "-n", "2", "-s", "2", "--linger=0", *flags]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", resuming("False")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line[5:] for line in done.stdout.splitlines() if line.startswith("[w")]


def run_on_one_host(folder: Path) -> list[str]:
    said = run_program(["-c", resuming("False")], folder, 2, 2)
    return [line for line in said.splitlines() if line.startswith("[[")]


def test_a_job_on_two_hosts_has_keys_of_its_own_and_the_bits_of_one_on_a_single_host(
    two_hosts: list[str], tmp_path: Path
) -> None:
    on_two, on_one = run(two_hosts), run_on_one_host(tmp_path)
    assert len(on_two) == len(on_one) == 2
    assert len({*on_two, *on_one}) == 1
    # What everybody can see of the processes says that there are keys, and not which.
    commands = (tmp_path / "commands").read_text()
    assert commands.count("--keys") == 4
    assert "KVSTORE_KEYS" not in commands


@pytest.mark.full
def test_a_job_on_two_hosts_without_keys_has_the_same_bits(two_hosts: list[str], tmp_path: Path) -> None:
    on_two, on_one = (
        run([*two_hosts, "--keys", "off", "--allow-unauthenticated-bind"]),
        run_on_one_host(tmp_path),
    )
    assert len(on_two) == len(on_one) == 2
    assert len({*on_two, *on_one}) == 1
