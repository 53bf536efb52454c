"""A worker needs files: it has as many as it may, and says so at the start if they do not suffice. In processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.limits import LIMIT
from tests.support.processes import ROOT

CONNECT = """
import os, resource, sys
from kvtrainer.client.connection import Connection
from kvtrainer.errors import ConfigurationError
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
def connect():
    try:
        Connection(["tcp://127.0.0.1:1"]).close()
        print("connected")
    except ConfigurationError as error:
        print(error)
num_open = len(os.listdir("/proc/self/fd"))
"""


def told(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT + script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=True,
    )
    return done.stdout.strip()


def test_a_worker_raises_its_limit_of_open_files_as_far_as_it_may() -> None:
    script = "resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 2, hard)); connect(); "
    assert (
        told(script + "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard))")
        == "connected\nTrue"
    )


@pytest.mark.parametrize("left", [0, 2, 10])
def test_a_worker_that_may_not_open_enough_files_says_so_before_it_opens_any(left: int) -> None:
    limited = f"resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + {left}, num_open + {left}))\n"
    used_up = "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(1)]\n" if not left else ""
    text = told(limited + used_up + "connect()")
    assert text.startswith("a store over 1 servers opens about ")
    assert "files, and this process has " in text
    assert "raise the limit (ulimit -Hn" in text
