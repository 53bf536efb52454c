"""How many processes of a job are dead, as a store counts them from what its servers say, or do not say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvstore_server.protocol import messages as m
from kvtrainer.client.client import Client
from kvtrainer.client.session import SessionOptions
from kvtrainer.errors import ConfigurationError, ServerUnreachableError
from kvtrainer.kvstore.verbs import SERVERS, WORKERS, TableKVStore
from tests.support.scripted import Scripted


class Store(TableKVStore):
    """A store without verbs."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None: ...
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None: ...


def counting(*dead: int | None) -> tuple[Store, Scripted]:
    """A store whose servers count so many dead workers; None stands for a server that does not answer."""

    def answer(server: int, request: m.Request) -> Iterable[m.ReplyBody] | None:
        if not isinstance(request.body, m.Stats):
            return None
        count = dead[server]
        return [] if count is None else [m.Status({"num_dead": count})]

    servers = Scripted(len(dead), answer)
    client = Client(servers, SessionOptions("job", 0, 9, dead_after=5.0), servers.clock)
    client.connect()
    return Store("dist_sync", client), servers


def test_a_worker_counts_as_dead_when_one_server_says_so() -> None:
    store, servers = counting(0, 2, 1)
    assert store.num_dead_nodes() == store.num_dead_nodes(WORKERS) == 2
    assert servers.now == 100.0  # nobody was waited for


def test_servers_that_do_not_answer_are_counted_where_servers_count() -> None:
    store, servers = counting(1, None, None)
    assert [store.num_dead_nodes(n) for n in (WORKERS, SERVERS, WORKERS + SERVERS)] == [1, 2, 3]
    assert servers.now == 115.0  # five seconds of silence each time


def test_a_server_that_has_lost_the_job_counts_as_dead() -> None:
    store, servers = counting(0)
    servers.answer = lambda server, request: [m.Failed("ServerLostState", "restarted")]
    assert store.num_dead_nodes(SERVERS) == 1


def test_without_any_server_nobody_knows_about_workers() -> None:
    store, _ = counting(None, None)
    assert store.num_dead_nodes(SERVERS) == 2
    with pytest.raises(ServerUnreachableError, match="2 servers"):
        store.num_dead_nodes()


@pytest.mark.parametrize("node_id", [0, 1, 5, 8, True, "4", None])
def test_what_is_no_group_of_nodes_is_refused(node_id: Any) -> None:
    store, _ = counting(0)
    with pytest.raises(ConfigurationError, match=r"node_id is 4 \(workers\), 2 \(servers\)"):
        store.num_dead_nodes(node_id)
