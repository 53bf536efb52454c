"""A supervisor of small processes that store memory, die, hang and refuse to end; nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore_server.restarts import CRASH_LOOP, REPLACED
from kvstore_server.supervisor import hold_supervised_address
from tests.support.launch_jobs import command_line
from tests.support.limits import FOREVER, LIMIT
from tests.support.processes import eventually

ROOT = Path(__file__).parents[3]

DRIVER = """
import os, sys
from kvstore_server.restarts import Restarts
from kvstore_server.supervisor import Supervisor
def say(text):
    print(text, file=sys.stderr, flush=True)
program, limit, stop_after, ready_fd = sys.argv[1:]
command = [sys.executable, "-S", "-u", "-c", program]
given = Restarts(int(limit)), float(stop_after), say, int(ready_fd) if ready_fd else None
sys.exit(Supervisor("the child", command, os.environ, *given).run())
"""
CHILD = """
import os, signal, sys, time
from kvstore_server.notify import notify
starts = int(os.environ["KVSTORE_RESTARTS"])
def tell(message, *descriptors):
    assert notify(os.environ, message, descriptors)
def stored():
    "What this process was started with: name, contents."
    assert int(os.environ.get("LISTEN_PID", os.getpid())) == os.getpid()
    names = os.environ.get("LISTEN_FDNAMES", "").split(":") if "LISTEN_FDS" in os.environ else []
    assert len(names) == int(os.environ.get("LISTEN_FDS", 0))
    return {name: os.pread(fd, 100, 0).decode() for fd, name in enumerate(names, 3)}
def keep(name, text):
    fd = os.memfd_create(name)
    os.write(fd, text.encode())
    tell(f"FDSTORE=1\\nFDNAME={name}", fd)
    return fd
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def stay():
    while True:
        time.sleep(0.05)
"""
"""What every child's program begins with."""


class Supervised:
    """A supervisor in a process of its own, and its lines."""

    def __init__(
        self, program: str, limit: int = 3, stop_after: float = LIMIT, ready_fd: int | None = None
    ) -> None:
        arguments = [CHILD + program, str(limit), str(stop_after), "" if ready_fd is None else str(ready_fd)]
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", DRIVER, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[] if ready_fd is None else [ready_fd],
        )
        self.pids: list[int] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def child(self) -> int:
        """The pid that the child prints in its next line."""
        self.pids.append(int(self.line()))
        return self.pids[-1]

    def end(self) -> tuple[int, list[str], list[str]]:
        """Wait for the end: exit code, lines of output, lines of the log."""
        out, err = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out.splitlines(), err.splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def run() -> Iterator[type[Supervised]]:
    started: list[Supervised] = []

    class Noted(Supervised):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            started.append(self)

    yield Noted
    for one in started:
        one.close()


# What outlives a process.


def test_a_killed_process_finds_its_memory_again_after_each_of_two_restarts(run: type[Supervised]) -> None:
    program = """
fd = 3 if starts else keep("weights", "")
print(stored(), flush=True)
if starts == 2:
    sys.exit(0)
os.pwrite(fd, f"round {starts + 1}".encode(), 0)
die()
"""
    code, out, log = run(program).end()
    assert (code, out) == (0, ["{}", "{'weights': 'round 1'}", "{'weights': 'round 2'}"])
    assert [line.partition(" after ")[0] for line in log] == [
        "the child was killed by signal 9 (SIGKILL)"
    ] * 2
    assert [line.partition("; ")[2] for line in log] == ["restart 1 of 3", "restart 2 of 3 in 0.5 s"]


def test_many_descriptors_come_back_in_their_order_whatever_numbers_they_had(run: type[Supervised]) -> None:
    program = """
if starts == 0:
    for number in range(40):
        keep(f"n{number}", f"text {number}")
    die()
assert stored() == {f"n{number}": f"text {number}" for number in range(40)}
os.fstat(42)
try:
    os.fstat(43)
except OSError:
    print("no more than those")
"""
    code, out, log = run(program).end()
    assert (code, out) == (0, ["no more than those"]), log


def test_memory_that_was_removed_does_not_come_back(run: type[Supervised]) -> None:
    program = """
if starts == 0:
    keep("old", "a"), keep("new", "b"), tell("FDSTOREREMOVE=1\\nFDNAME=old")
    die()
print(stored())
"""
    assert run(program).end()[1] == ["{'new': 'b'}"]


def test_memory_that_was_added_after_a_restart_comes_back_with_the_rest(run: type[Supervised]) -> None:
    program = """
print(stored(), flush=True)
if starts < 2:
    keep(f"life-{starts}", "x")
    die()
"""
    assert run(program).end()[1][-1] == "{'life-0': 'x', 'life-1': 'x'}"


def test_the_first_process_to_be_ready_says_so_once_and_not_into_memory_that_was_kept(
    run: type[Supervised],
) -> None:
    program = """
if starts == 0:
    for number in range(30):
        keep(f"n{number}", "text")
    die()
assert set(stored().values()) == {"text"}
if starts == 1:
    flag, fd = sys.argv[1:]
    os.write(int(fd), b"ready\\n")
    os.close(int(fd))
    assert set(stored().values()) == {"text"}
    tell("READY=1")
    die()
print(sys.argv[1:], flush=True)
stay()
"""
    end, ready = os.pipe()
    one = run(program, ready_fd=ready)
    os.close(ready)
    with open(end) as said:
        assert said.read() == "ready\n"  # and then the end, although the process is there
    assert one.line() == "[]"
    one.process.terminate()
    one.end()


# When there is a restart, and when not.


@pytest.mark.parametrize("code", [0, REPLACED])
def test_a_process_that_is_done_or_replaced_is_not_started_again(run: type[Supervised], code: int) -> None:
    assert run(f"tell('READY=1'); sys.exit({code})").end() == (code, [], [])


def test_a_process_that_fails_before_it_was_ever_ready_is_not_started_again(run: type[Supervised]) -> None:
    assert run("sys.exit(2)").end() == (2, [], [])


def test_a_process_that_is_killed_before_it_was_ready_is_started_again(run: type[Supervised]) -> None:
    code, _, log = run("die() if starts == 0 else sys.exit(0)").end()
    assert (code, len(log)) == (0, 1)


def test_used_up_restarts_end_with_the_code_of_the_first_death(run: type[Supervised]) -> None:
    code, _, log = run("tell('READY=1'); sys.exit(10 + starts)", limit=2).end()
    assert code == 10
    assert [line.partition(" after ")[0] for line in log] == [
        f"the child exited with code {10 + n}" for n in range(3)
    ]
    assert log[-1].endswith("and there is no restart left of 2")


def test_a_process_without_restarts_left_gives_the_code_of_its_signal(run: type[Supervised]) -> None:
    assert run("die()", limit=0).end()[0] == 128 + signal.SIGKILL


# Ends.


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_process_ends_in_its_own_way(
    run: type[Supervised], number: signal.Signals
) -> None:
    one = run(f"signal.signal({int(number)}, lambda *_: sys.exit(7)); print(os.getpid()); stay()")
    child = one.child()
    one.process.send_signal(number)
    assert one.end() == (7, [], [])
    assert not is_there(child)


def test_a_process_that_ignores_the_signal_is_killed_after_its_time(run: type[Supervised]) -> None:
    one = run("signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); stay()", stop_after=0.3)
    child = one.child()
    one.process.terminate()
    assert one.end() == (128 + signal.SIGKILL, [], [])
    assert not is_there(child)


def test_a_signal_during_the_wait_for_a_restart_ends_the_supervisor(run: type[Supervised]) -> None:
    # The fifth restart in a row waits for five seconds; the signal comes as soon as that is announced.
    one = run("tell('READY=1'); sys.exit(3)", limit=CRASH_LOOP)
    assert one.process.stderr is not None
    while "in 5 s" not in one.process.stderr.readline():
        pass
    one.process.terminate()
    assert one.end() == (3, [], [])


def test_the_process_dies_with_a_supervisor_that_is_killed(run: type[Supervised]) -> None:
    one = run("signal.signal(signal.SIGTERM, signal.SIG_IGN); print(os.getpid()); stay()")
    child = one.child()
    one.process.kill()
    assert eventually(lambda: not is_there(child))


def test_the_process_dies_with_a_supervisor_that_is_killed_after_a_restart(run: type[Supervised]) -> None:
    one = run("print(os.getpid()); die() if starts == 0 else stay()")
    one.line()
    child = one.child()
    one.process.kill()
    assert eventually(lambda: not is_there(child))


def test_what_a_dead_process_left_running_in_its_group_is_gone_at_its_next_start(
    run: type[Supervised],
) -> None:
    program = f"""
if starts == 0:
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep({FOREVER})
    print(pid)
    die()
print("up again")
stay()
"""
    one = run(program)
    left = one.child()
    assert one.line() == "up again"
    assert not is_there(left)
    one.process.terminate()
    one.end()


def test_a_supervisor_loads_neither_torch_nor_zeromq_nor_numpy() -> None:
    heavy = {"torch", "zmq", "numpy", "msgpack"}
    show = f"import sys, kvstore_server.supervisor; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    assert done.stdout == "[]\n"


def test_a_command_with_a_supervisor_loads_none_of_them_either_and_says_why_it_cannot_start() -> None:
    flags = ["--supervise", "--bind", "tcp://192.0.2.1:0"]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvstore_server", *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(said)) == (1, 1)
    assert said[0].startswith("kvstore-server: cannot listen on tcp://192.0.2.1:0: ")
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "kvstore_server.supervisor" in loaded
    assert {"torch", "zmq", "numpy"} & loaded == set()


# The port.


def test_a_held_port_is_given_to_nobody_else_and_a_server_can_listen_there() -> None:
    address, holder = hold_supervised_address("tcp://127.0.0.1:0")
    assert holder is not None
    port = int(address.rpartition(":")[2])
    with holder, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        assert hold_supervised_address(f"tcp://127.0.0.1:{port}") == (f"tcp://127.0.0.1:{port}", None)


@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "tcp://*:0", "tcp://localhost:0"])
def test_the_host_of_an_address_stays_as_it_was_given(bind: str) -> None:
    address, holder = hold_supervised_address(bind)
    assert holder is not None
    with holder:
        assert address == f"{bind[:-1]}{holder.getsockname()[1]}"


@pytest.mark.parametrize("bind", ["nonsense", "tcp://127.0.0.1:99999", "tcp://192.0.2.1:5555"])
def test_an_address_that_cannot_be_held_is_left_to_the_server(bind: str) -> None:
    assert hold_supervised_address(bind) == (bind, None)


def test_a_host_of_another_machine_has_no_port_to_choose() -> None:
    with pytest.raises(OSError, match="assign"):
        hold_supervised_address("tcp://192.0.2.1:0")


def is_there(pid: int) -> bool:
    return command_line(pid) != ""
