"""Which processes of one host live, are stopped or are dead, seen without a word of theirs; over each transport."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from kvtrainer.common import env
from kvtrainer.errors import ServerUnreachableError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
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


class Pair(NamedTuple):
    """Both ranks of a job, whose key "w" is initialised: rank 0 is a store here, rank 1 a process."""

    store: DistKVStore
    worker: Process

    def round(self) -> Call:
        """Let rank 0 begin a round."""
        return Call(lambda: round_of(self.store, "w", torch.ones(3)))


@pytest.fixture
def pair_of(processes: Processes, members: Members, transport: str) -> Callable[..., Pair]:
    def make(servers: list[Process], script: str, **limits: float) -> Pair:
        """Rank 1 goes on with the script when it is told to."""
        name, environ = new_name(), {env.TRANSPORT: transport}
        worker = processes.worker(READY + script, servers, 1, 2, name, FOREVER, environ)
        store = members.join(servers, 0, 2, name, **limits)
        store.init("w", torch.zeros(3))
        assert worker.line() == "ready"
        return Pair(store, worker)

    return make


@pytest.mark.parametrize("how", IN_C)
def test_a_worker_in_one_long_call_in_c_is_not_lost(
    processes: Processes, pair_of: Callable[..., Pair], how: str
) -> None:
    pair = pair_of(processes.servers(1, "--dead-after", str(SOON)), IN_C[how] + PUSHPULL)
    waiting = pair.round()
    pair.worker.go()
    assert torch.equal(waiting.outcome(), torch.full((3,), 2.0))
    assert pair.worker.line() == "[2.0, 2.0, 2.0]"


@pytest.mark.parametrize("how", ENDS)
def test_the_others_are_told_of_a_worker_that_ends_without_a_word(
    processes: Processes, pair_of: Callable[..., Pair], how: str
) -> None:
    servers = processes.servers(2, *PATIENT)
    pair = pair_of(servers, ENDS[how], timeout=FOREVER, dead_after=FOREVER)
    waiting = pair.round()
    pair.worker.go()
    [text] = raised([waiting.outcome()], WorkerLostError)
    assert "the process of rank 1" in text
    assert f":{pair.worker.pid})" in text
    assert pair.store.num_dead_nodes() == 1
    assert_serve(servers)


def test_a_child_that_a_worker_has_forked_does_not_hide_its_death(
    processes: Processes, pair_of: Callable[..., Pair]
) -> None:
    forks = "child = os.fork()\nif not child:\n    at('forked')\n    os._exit(0)\nsignal.pause()\n"
    pair = pair_of(processes.servers(1, *PATIENT), forks, timeout=FOREVER, dead_after=FOREVER)
    pair.worker.go()
    assert pair.worker.line() == "forked"
    waiting = pair.round()
    pair.worker.signal(signal.SIGKILL)
    raised([waiting.outcome()], WorkerLostError)
    pair.worker.go()


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
    processes: Processes, pair_of: Callable[..., Pair], waits_for: str
) -> None:
    servers = processes.servers(1, *FORGETFUL)
    pair = pair_of(servers, PUSHPULL, timeout=FOREVER, dead_after=SOON)
    stopped = pair.worker if waits_for == "worker" else servers[0]
    stopped.freeze()
    kind = WorkerLostError if waits_for == "worker" else ServerUnreachableError
    [text] = raised([pair.round().outcome(LIMIT)], kind)
    assert "its process is paused" in text
    stopped.signal(signal.SIGCONT)


def test_who_comes_to_a_barrier_after_a_worker_has_died_is_told_as_well(
    processes: Processes, pair_of: Callable[..., Pair]
) -> None:
    pair = pair_of(processes.servers(1, *PATIENT), "", timeout=FOREVER, dead_after=FOREVER)
    pair.worker.signal(signal.SIGKILL)
    pair.worker.end()
    [text] = raised([Call(pair.store.barrier).outcome()], WorkerLostError)
    assert "the process of rank 1" in text
