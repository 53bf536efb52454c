"""Jobs as MXNet's launcher starts them: one script in a scheduler, servers and workers, told apart by variables."""

from __future__ import annotations

import sys

from tests.support.limits import LIMIT
from tests.support.processes import Process, Processes, held_port

PREFACE = """
import os, sys, torch, kvtrainer
from kvtrainer import kvstore
torch.set_num_threads(1)
def at(word):
    print(word, flush=True)
    sys.stdin.readline()
"""


class DmlcJob:
    """A job whose processes are started one by one; ends with `processes`."""

    def __init__(self, processes: Processes, script: str, workers: int, servers: int, **env: str) -> None:
        self._processes = processes
        self._script = PREFACE + script
        self._env = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": str(held_port()),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
            "KVSTORE_CONNECT_TIMEOUT": str(LIMIT),
            "KVSTORE_DEAD_AFTER": str(LIMIT),
            **env,
        }

    def start(self, role: str, **env: str) -> Process:
        command = [sys.executable, "-c", self._script]
        return self._processes.start(command, env={**self._env, "DMLC_ROLE": role, **env})
