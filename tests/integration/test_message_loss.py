"""Messages that get lost between workers and servers are sent again, and nothing counts twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.client import session
from kvtrainer.client.connection import Connection
from kvtrainer.errors import ServerUnreachableError
from kvtrainer.kvstore import DistKVStore
from tests.support.faulty_worker import Training
from tests.support.limits import LIMIT, SOON
from tests.support.lossy import LossyProxy
from tests.support.processes import Members, impatient, new_name, raised, together
from tests.support.stores import Servers

MODES = ["dist_sync", "dist_async", "dist_ssp"]
SHAPE = (256, 64)
"""Of a key that lies on both servers."""


@pytest.fixture
def network(
    jobs: Servers, unseen: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], list[LossyProxy]]]:
    """Puts a proxy in front of each of two servers; workers notice soon that something got lost."""
    monkeypatch.setattr(session, "REPEAT_AFTER", 0.1)
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    proxies: list[LossyProxy] = []

    def lossy(share: float) -> list[LossyProxy]:
        proxies.extend(LossyProxy(s.address, share, seed) for seed, s in enumerate(jobs.of(2)))
        return proxies

    yield lossy
    for proxy in proxies:
        proxy.close()


def in_job(
    proxies: list[LossyProxy], type: str, body: Callable[[DistKVStore, int], Any], **options: Any
) -> list[Any]:
    """What two workers returned or raised, whose messages all pass the proxies."""
    name = new_name()
    with Members() as members:
        stores = [
            members.join([p.address for p in proxies], rank, 2, name, type=type, **options)
            for rank in range(2)
        ]
        return together(*(lambda s=s, r=r: body(s, r) for r, s in enumerate(stores)))


@pytest.mark.parametrize("type", MODES)
def test_every_contribution_counts_once_although_messages_get_lost(
    network: Callable[[float], list[LossyProxy]], type: str
) -> None:
    proxies = network(0.1)

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        kv.set_optimizer(kvtrainer.optimizer.create("test", learning_rate=-1.0))
        kv.init(["small", "sliced"], [torch.zeros(3), torch.zeros(SHAPE)])
        outs = [torch.empty(3), torch.empty(SHAPE)]
        for at in range(15):
            values = [torch.full_like(out, (rank + 1.0) * (at + 1)) for out in outs]
            kv.push(["small", "sliced"], values)
            kv.pull(["small", "sliced"], outs)
        kv.barrier()
        kv.pull(["small", "sliced"], outs)
        return [sorted(set(out.flatten().tolist())) for out in outs]

    total = 3.0 * sum(range(1, 16))
    assert in_job(proxies, type, body) == [[[total], [total]]] * 2
    assert sum(proxy.lost for proxy in proxies) > 0


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_slices_that_are_applied_one_by_one_count_once_although_messages_get_lost(
    network: Callable[[float], list[LossyProxy]], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(Connection, "is_remote", lambda *_: True)
    proxies = network(share)

    def body(kv: DistKVStore, rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(256, 512))
        trainer = kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kv)
        for at in range(8):
            (weight * (rank + 1.0) * (at + 1)).sum().backward()
            trainer.step(1)
        return list(weight.unique().tolist())

    assert in_job(proxies, "dist_sync", body) == [[-3.0 * sum(range(1, 9))]] * 2
    assert bool(share) == (sum(proxy.lost for proxy in proxies) > 0)


def test_a_network_that_loses_everything_is_an_unreachable_server(
    network: Callable[[float], list[LossyProxy]],
) -> None:
    proxies = network(0.0)
    together_now = threading.Barrier(2, timeout=LIMIT)

    def body(kv: DistKVStore, rank: int) -> None:
        training = Training(kv, with_trainer=False)
        training.step()
        together_now.wait()
        for proxy in proxies:
            proxy.loss = 1.0
        with impatient(kv, dead_after=SOON):
            training.step()

    for text in raised(in_job(proxies, "dist_sync", body), ServerUnreachableError):
        assert any(proxy.address in text for proxy in proxies)
    assert all(proxy.lost for proxy in proxies)
