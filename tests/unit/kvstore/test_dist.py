"""A store on servers: its names and arguments, and how it counts the processes that are dead."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from kvstore_server.engine.rounds import SYNCHRONOUS, Mode
from kvstore_server.protocol import messages as m
from kvtrainer.client.client import Client
from kvtrainer.client.session import SessionOptions
from kvtrainer.errors import ConfigurationError, ServerUnreachableError
from kvtrainer.kvstore.dist import DistKVStore, _show_dist_debug_log, dist_mode_of, dist_water_mark_of
from kvtrainer.kvstore.verbs import SERVERS, WORKERS, KVStoreVerbs
from tests.support.scripted import Scripted

NOBODY = {"rank": 0, "num_workers": 1, "servers": "127.0.0.1:1", "connect_timeout": 600.0}
"""An address at which nobody listens: a store that asked there would wait for ten minutes."""


@pytest.mark.parametrize("name", ["dist_sync", "dist", "DIST_Sync_Device", "dist_device_sync", "p3"])
def test_most_names_are_synchronous(name: str) -> None:
    assert dist_mode_of(name, None, False, {}) is SYNCHRONOUS


@pytest.mark.parametrize("name", ["dist_async", "dist_async_device", "dist_device_async"])
def test_names_with_async_apply_contributions_one_by_one(name: str) -> None:
    assert dist_mode_of(name, None, False, {}) == Mode("async")
    assert dist_mode_of(name, None, True, {}) == Mode("async", slow_down=True)


@pytest.mark.parametrize(
    ("given", "environ", "bound"),
    [(3, {}, 3), (0, {"KVSTORE_STALENESS": "9"}, 0), (None, {"KVSTORE_STALENESS": "9"}, 9), (None, {}, 1)],
)
def test_the_bound_has_its_order_of_sources(given: int | None, environ: dict[str, str], bound: int) -> None:
    assert dist_mode_of("dist_ssp", given, False, environ).bound == bound


@pytest.mark.parametrize(
    ("name", "staleness", "scale", "environ", "text"),
    [
        ("dist_sync", 1, False, {}, "'dist_sync' takes no staleness, got 1"),
        ("dist_async", 0, False, {}, "'dist_async' takes no staleness"),
        ("dist_ssp", -1, False, {}, "KVSTORE_STALENESS.* at least 0, got -1"),
        ("dist_ssp", True, False, {}, "an integer .*got True"),
        ("dist_ssp", 1.5, False, {}, "an integer .*got 1.5"),
        ("dist_ssp", None, False, {"KVSTORE_STALENESS": "few"}, "KVSTORE_STALENESS.* got 'few'"),
        ("dist_sync", None, True, {}, "gradients are never stale"),
        ("dist_async", None, 1, {}, "scale_lr_by_staleness must be True or False, got 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    name: str, staleness: Any, scale: Any, environ: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        dist_mode_of(name, staleness, scale, environ)


@pytest.mark.parametrize(
    ("name", "environ", "mark"),
    [
        ("dist_sync", {}, 0),
        ("dist_sync", {"DMLC_PS_VAN_TYPE": "zmq", "DMLC_PS_WATER_MARK": "5"}, 0),
        ("dist_async", {"DMLC_PS_VAN_TYPE": "P3"}, 10),
        ("p3", {}, 10),
        ("p3", {"DMLC_PS_WATER_MARK": "3"}, 3),
    ],
)
def test_messages_queue_by_priority_with_p3(name: str, environ: dict[str, str], mark: int) -> None:
    assert dist_water_mark_of(name, environ) == mark


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"DMLC_PS_VAN_TYPE": "ibverbs"}, "is 'ibverbs'; .*'zmq' and 'p3'"),
        (
            {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "0"},
            "DMLC_PS_WATER_MARK must be an integer from 1 .*got 0",
        ),
    ],
)
def test_unknown_values_of_the_variables_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        dist_water_mark_of("dist_sync", environ)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"servers": [1]}, "^1 is not the address of a server"),
        ({"servers": 5}, "servers .* is 5; it must be a list"),
        ({"num_workers": 10**30}, "num_workers is 1000.*; a server takes up to 65536 workers"),
        ({"num_workers": 1 << 40, "rank": 1 << 39}, "up to 65536 workers"),
        ({"rank": 10**30}, r"rank \(KVSTORE_RANK\) is 1000.* must lie in 0\.\.0"),
        ({"namespace": 5}, "namespace must be a str, got 5"),
        ({"namespace": ["job"]}, r"namespace must be a str, got \['job'\]"),
        ({"namespace": "job\ud800"}, r"namespace 'job\\ud800' has the surrogate '\\ud800' at position 3"),
        ({"timeout": "soon"}, "KVSTORE_TIMEOUT is 'soon'"),
    ],
)
def test_wrong_argument_is_named_without_asking_a_server(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistKVStore(**{**NOBODY, **given})


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """The log of messages and rounds, which is as before afterwards."""
    logger = logging.getLogger("kvtrainer.debug")
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_a_worker_shows_its_debug_log_on_standard_error_once(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for _ in range(2):
        _show_dist_debug_log(3)
    logger.debug("round state=started")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(" worker 3 DEBUG round state=started")


def test_a_worker_leaves_its_log_to_the_script(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    _show_dist_debug_log(3)
    logger.debug("round state=started")
    assert logger.handlers == []
    assert caplog.messages == ["round state=started"]


class Store(KVStoreVerbs):
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


def test_without_any_server_dead_workers_cannot_be_counted() -> None:
    store, _ = counting(None, None)
    assert store.num_dead_nodes(SERVERS) == 2
    with pytest.raises(ServerUnreachableError, match="2 servers"):
        store.num_dead_nodes()


@pytest.mark.parametrize("node_id", [0, 1, 5, 8, True, "4", None])
def test_what_is_no_group_of_nodes_is_refused(node_id: Any) -> None:
    store, _ = counting(0)
    with pytest.raises(ConfigurationError, match=r"node_id is 4 \(workers\), 2 \(servers\)"):
        store.num_dead_nodes(node_id)
