"""Jobs for MXNet's launcher start unchanged: scheduler, servers and workers from one script, and all of them end."""

from __future__ import annotations

import signal

import pytest

from tests.support.dmlc import DmlcJob
from tests.support.limits import DEAD_AFTER, LIMIT, SOON
from tests.support.processes import Process, Processes

STORE = """
kv = kvstore.create("dist_sync")
print("rank", kv.rank, "of", kv.num_workers, flush=True)
kv.init("w", torch.zeros(1000))
out = torch.empty(1000)
for step in range(3):
    kv.pushpull("w", torch.full((1000,), float(10 ** kv.rank + step)), out=out)
at(f"sum {out.unique().tolist()}")
kv.pushpull("w", torch.ones(1000), out=out)
print(out.unique().tolist(), flush=True)
"""
# Two workers, the third step: (1 + 2) + (10 + 2).
LAST_SUM = "sum [15.0]"

TRAINER = """
layer = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(layer.weight)
trainer = kvtrainer.Trainer(layer.parameters(), "sgd", {"learning_rate": 1.0}, kvstore="dist_sync")
print("built", flush=True)
layer(torch.ones(1, 1)).backward()
trainer.step(1)
print(layer.weight.item(), flush=True)
print(kvstore.create("dist_sync", namespace="another").num_workers, flush=True)
"""


ROUNDS = """
kv = kvstore.create(os.environ["STORE"], connect_timeout=float(os.environ["PATIENCE"]))
kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
kv.init("w", torch.zeros(3))
out = torch.empty(3)
kv.pushpull("w", torch.ones(3), out)
at("begun")
for _ in range(20):
    kv.pushpull("w", torch.ones(3), out)
kv.barrier()
kv.pull("w", out)
kv.barrier()
print(out.tolist(), flush=True)
"""


def assert_ended(*members: Process) -> None:
    """All of them end well."""
    for member in members:
        code, err = member.end()
        assert code == 0, err


def test_a_script_for_mxnets_launcher_trains_and_every_process_ends(processes: Processes) -> None:
    job = DmlcJob(processes, STORE, 2, 2)
    workers = [job.start("worker"), job.start("worker")]
    others = [job.start("server"), job.start("scheduler"), job.start("server")]
    assert [worker.line() for worker in workers] == ["rank 0 of 2", "rank 1 of 2"]
    assert [worker.line() for worker in workers] == [LAST_SUM] * 2
    for worker in workers:
        worker.go()
    assert [worker.line() for worker in workers] == ["[2.0]"] * 2
    assert_ended(*workers, *others)


def test_servers_and_scheduler_end_when_the_last_worker_was_killed(processes: Processes) -> None:
    job = DmlcJob(processes, STORE, 1, 1, KVSTORE_DEAD_AFTER=str(DEAD_AFTER))
    scheduler, server, worker = (job.start(role) for role in ("scheduler", "server", "worker"))
    worker.line()
    worker.line()
    worker.signal(signal.SIGKILL)
    assert_ended(scheduler, server)


def test_a_trainer_serves_at_construction_and_the_script_behind_it_is_for_workers(
    processes: Processes,
) -> None:
    job = DmlcJob(processes, TRAINER, 1, 1)
    scheduler, server, worker = (job.start(role) for role in ("scheduler", "server", "worker"))
    assert (worker.line(), worker.line()) == ("built", "-1.0")
    assert worker.line() == "1"  # a second store does not join a second time
    assert_ended(scheduler, server, worker)
    for other in (scheduler, server):
        assert other.popen.stdout is not None
        assert other.popen.stdout.read() == b""


def test_ranks_follow_the_order_of_the_start_and_not_that_of_the_arrival(processes: Processes) -> None:
    script = 'at("here")\nprint(kvstore.create("dist_sync").rank, flush=True)'
    job = DmlcJob(processes, script, 2, 1)
    first, second = job.start("worker"), job.start("worker")
    others = [job.start("scheduler"), job.start("server")]
    for process in (*others, second, first):
        assert process.line() == "here"
        process.go()
    assert (first.line(), second.line()) == ("0", "1")
    assert_ended(first, second, *others)


def test_a_missing_server_is_named_by_everybody(processes: Processes) -> None:
    script = 'at("here")\nkvstore.create("dist_sync")'
    job = DmlcJob(processes, script, 1, 2, KVSTORE_CONNECT_TIMEOUT="5")
    members = [job.start(role) for role in ("scheduler", "server", "worker")]
    for member in members:
        assert member.line() == "here"
        member.go()
    for member in members:
        code, err = member.end()
        assert code == 1
        # Whoever began to wait first was the first to give up.
        assert "ConnectTimeoutError" in err or "gave up" in err
        assert "no server but 1 of 2" in err


def test_a_server_that_cannot_serve_ends_the_job_at_once(processes: Processes) -> None:
    job = DmlcJob(processes, 'kvstore.create("dist_sync")', 1, 1)
    server = job.start("server", KVSTORE_IMPORT="no_such_module")
    others = [job.start(role) for role in ("scheduler", "worker")]
    assert server.end()[0] == 1
    for member in others:
        code, err = member.end()
        assert code == 1
        assert "RoundAbortedError: server on " in err


# The fault matrix: once a job has begun nobody needs the scheduler, and its end hangs nobody.

FAST = {("killed", "dist_ssp"), ("stopped", "dist_async"), ("started again", "dist_sync")}


@pytest.mark.parametrize(
    ("event", "type"),
    [
        pytest.param(event, type, marks=() if (event, type) in FAST else pytest.mark.full)
        for event in ("killed", "stopped", "started again")
        for type in ("dist_sync", "dist_async", "dist_ssp")
    ],
)
def test_a_job_goes_on_and_ends_whatever_happens_to_its_scheduler(
    processes: Processes, event: str, type: str
) -> None:
    job = DmlcJob(processes, ROUNDS, 2, 1, STORE=type, PATIENCE=str(LIMIT))
    members = [job.start(role) for role in ("scheduler", "server", "worker", "worker")]
    scheduler, _, *workers = members
    assert [worker.line() for worker in workers] == ["begun"] * 2
    if event == "stopped":
        scheduler.freeze()
    else:
        scheduler.signal(signal.SIGKILL)
        assert scheduler.end()[0] == -signal.SIGKILL
    again = [job.start("scheduler", PATIENCE=str(SOON))] if event == "started again" else []
    for worker in workers:
        worker.go()
    assert [worker.line() for worker in workers] == ["[42.0, 42.0, 42.0]"] * 2
    assert_ended(*members[1:])
    for successor in again:  # nobody comes to it: it says so in time
        code, err = successor.end()
        assert code == 1
        assert "ConnectTimeoutError" in err
    if event == "stopped":
        scheduler.signal(signal.SIGCONT)
        assert_ended(scheduler)
