"""Local clusters whose servers and workers are forked, for tests of what a cluster does and not of how it starts them.

Their command lines and environments cannot be found in /proc: those are of the fork server. All else is as of real
ones: sessions, signals, pipes, and the guardian, which is real.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrainer.jobs import processes
from tests.support.forks import ROOT, Fork, fork_server


def fork_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes of local clusters forked until the test ends."""
    kinds = {"PIPE": subprocess.PIPE, "DEVNULL": subprocess.DEVNULL}
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(Popen=_fork, **kinds))


def _fork(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> Fork:
    """Start a process as `ChildProcess` does, with pipes and a session of its own."""
    assert list(command[:2]) == [sys.executable, "-m"]
    null = os.open(os.devnull, os.O_RDONLY)
    out, their_out = os.pipe()
    err, their_err = os.pipe()
    streams = [null, their_out, their_err]
    child = fork_server().start(command[1:], env, ROOT, streams, pass_fds, is_session=True)
    for one in streams:
        os.close(one)
    child.stdout, child.stderr = open(out, "rb", 0), open(err, "rb", 0)  # noqa: SIM115
    return child
