"""Which processes of one host live, are stopped or are dead, seen without a word of theirs; over each transport."""

from __future__ import annotations

import signal

import pytest
import torch

from kvtrainer.common import env
from kvtrainer.errors import ServerUnreachableError, WorkerLostError
from tests.support.limits import FOREVER, LIMIT, SOON
from tests.support.processes import (
    FORGETFUL,
    Call,
    Members,
    Process,
    Processes,
    assert_serve,
    new_name,
    raised,
    round_of,
    together,
)

PATIENT = ("--dead-after", str(FOREVER))
"""Flags for servers that nobody's silence would tell of a death: only what is known does."""
READY = 'kv.init("w", torch.zeros(3)); at("ready")\n'
PUSHPULL = 'out = torch.empty(3); kv.pushpull("w", torch.ones(3), out=out); print(out.tolist(), flush=True)\n'
IN_C = {
    "sleeps": "import ctypes; ctypes.PyDLL(None).usleep(3_000_000)\n",
    "computes": "sum(range(10 ** 8))\n",
}
"""Calls in C, of some seconds each, that hold the interpreter's lock."""
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)\n",
    "ended in C": "os._exit(0)\n",
    "crashed": "os.kill(os.getpid(), signal.SIGSEGV)\n",
}


@pytest.fixture(params=["auto", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How all workers of a test reach servers."""
    monkeypatch.setenv(env.TRANSPORT, request.param)
    return str(request.param)


def worker_of(
    processes: Processes, servers: list[Process], name: str, script: str, transport: str
) -> Process:
    """Rank 1 of 2, which has initialised its key and goes on with the script when it is told to."""
    return processes.worker(READY + script, servers, 1, 2, name, FOREVER, {env.TRANSPORT: transport})


@pytest.mark.parametrize("how", IN_C)
def test_a_worker_in_one_long_call_in_c_is_not_lost(
    processes: Processes, members: Members, transport: str, how: str
) -> None:
    servers = processes.servers(1, "--dead-after", str(SOON))
    name = new_name()
    worker = worker_of(processes, servers, name, IN_C[how] + PUSHPULL, transport)
    other = members.join(servers, 0, 2, name)
    other.init("w", torch.zeros(3))
    assert worker.line() == "ready"
    waiting = Call(lambda: round_of(other, "w", torch.ones(3)))
    worker.go()
    assert torch.equal(waiting.outcome(), torch.full((3,), 2.0))
    assert worker.line() == "[2.0, 2.0, 2.0]"


@pytest.mark.parametrize("how", ENDS)
def test_the_others_are_told_of_a_worker_that_ends_without_a_word(
    processes: Processes, members: Members, transport: str, how: str
) -> None:
    servers = processes.servers(2, *PATIENT)
    name = new_name()
    worker = worker_of(processes, servers, name, ENDS[how], transport)
    other = members.join(servers, 0, 2, name, timeout=FOREVER, dead_after=FOREVER)
    other.init("w", torch.zeros(3))
    assert worker.line() == "ready"
    waiting = Call(lambda: round_of(other, "w", torch.ones(3)))
    worker.go()
    [text] = raised([waiting.outcome()], WorkerLostError)
    assert "the process of rank 1" in text
    assert f":{worker.pid})" in text
    assert other.num_dead_nodes() == 1
    assert_serve(servers)


def test_a_child_that_a_worker_has_forked_does_not_hide_its_death(
    processes: Processes, members: Members, transport: str
) -> None:
    forks = "child = os.fork()\nif not child:\n    at('forked')\n    os._exit(0)\nsignal.pause()\n"
    servers = processes.servers(1, *PATIENT)
    name = new_name()
    worker = worker_of(processes, servers, name, forks, transport)
    other = members.join(servers, 0, 2, name, timeout=FOREVER, dead_after=FOREVER)
    other.init("w", torch.zeros(3))
    assert worker.line() == "ready"
    worker.go()
    assert worker.line() == "forked"
    waiting = Call(lambda: round_of(other, "w", torch.ones(3)))
    worker.signal(signal.SIGKILL)
    raised([waiting.outcome()], WorkerLostError)
    worker.go()


def test_workers_notice_that_a_server_has_died_without_waiting_for_its_silence(
    processes: Processes, members: Members, transport: str
) -> None:
    servers = processes.servers(1)
    pair = members.pair(servers, timeout=FOREVER, dead_after=FOREVER)
    assert together(*(lambda s=s: s.init("w", torch.zeros(3)) for s in pair)) == [None, None]
    waiting = Call(lambda: round_of(pair[0], "w", torch.ones(3)))
    servers[0].signal(signal.SIGKILL)
    outcomes = [waiting.outcome(), Call(lambda: round_of(pair[1], "w", torch.ones(3))).outcome()]
    texts = raised(outcomes, ServerUnreachableError)
    assert all(f"the process of server 0 ({servers[0].address})" in text for text in texts)


@pytest.mark.parametrize("waits_for", ["worker", "server"])
def test_a_stopped_process_is_still_found_by_its_silence_and_the_error_says_that_it_is_stopped(
    processes: Processes, members: Members, transport: str, waits_for: str
) -> None:
    servers = processes.servers(1, *FORGETFUL)
    name = new_name()
    worker = worker_of(processes, servers, name, PUSHPULL, transport)
    other = members.join(servers, 0, 2, name, timeout=FOREVER, dead_after=SOON)
    other.init("w", torch.zeros(3))
    assert worker.line() == "ready"
    stopped = worker if waits_for == "worker" else servers[0]
    stopped.freeze()
    kind = WorkerLostError if waits_for == "worker" else ServerUnreachableError
    [text] = raised([Call(lambda: round_of(other, "w", torch.ones(3))).outcome(LIMIT)], kind)
    assert "its process is stopped" in text
    stopped.signal(signal.SIGCONT)
