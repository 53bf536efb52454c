"""The fault matrix, for MXNet's scheduler: once a job has begun nobody needs it, and its end hangs nobody."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.dmlc import DmlcJob
from tests.support.limits import LIMIT, SOON
from tests.support.processes import Processes

SCRIPT = """
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
FAST = {("killed", "dist_ssp"), ("stopped", "dist_async"), ("started again", "dist_sync")}


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


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
    job = DmlcJob(processes, SCRIPT, 2, 1, STORE=type, PATIENCE=str(LIMIT))
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
    for member in members[1:]:
        code, err = member.end()
        assert code == 0, err
    for successor in again:  # nobody comes to it: it says so in time
        code, err = successor.end()
        assert code == 1
        assert "ConnectTimeoutError" in err
    if event == "stopped":
        scheduler.signal(signal.SIGCONT)
        code, err = scheduler.end()
        assert code == 0, err
