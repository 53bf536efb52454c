"""What a server refuses before it plans or allocates anything."""

from __future__ import annotations

import gc
import itertools
import os
import re
import struct
import weakref
from pathlib import Path

import pytest
import torch

from kvstore_server import server as loop
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.memory import available_memory, memory_limit
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.errors import ConfigurationError, FencedError, ProtocolError
from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from tests.support.messages import contribution


class Peer:
    """One worker of a job of its own, in an engine without sockets."""

    def __init__(
        self, engine: Engine, namespace: str = "job", num_workers: int = 1, now: float = 0.0
    ) -> None:
        self._engine = engine
        self._number = 0
        self._run = self._session = 0
        self.now = now
        hello = m.Hello(
            namespace, 0, num_workers, 0, engine.config.num_servers, "", "host:1", bytes(16), (b"peer",)
        )
        self.answer = self.ask(hello)
        if isinstance(self.answer, m.Welcome):
            self._run, self._session = self.answer.run_id, self.answer.session

    def ask(self, body: m.RequestBody) -> m.ReplyBody:
        """The only answer."""
        [answer] = self.ask_all(body)
        return answer

    def ask_all(self, body: m.RequestBody) -> list[m.ReplyBody]:
        self._number += 1
        request = m.Request(self._run, self._session, self._number, body)
        return [out.reply.body for out in self._engine.handle(b"peer", request, self.now)]

    def register(self, name: str, numel: int) -> m.ReplyBody:
        return self.ask(m.Register(name, ((name, (numel,), "float32", 0, False),), False))

    def initialise(self, name: str, numel: int) -> None:
        """Declare a table of one slice, and give it values."""
        table = self.register(name, numel)
        assert isinstance(table, m.Registered)
        whole = torch.zeros(-(-numel // 16) * 16)
        self.ask(contribution([(table.slot, whole)], 0, table.table, 1))


def refused(answer: m.ReplyBody, kind: type[Exception] = ConfigurationError) -> str:
    """What a refusal says."""
    assert isinstance(answer, m.Failed)
    assert answer.code == kind.__name__
    return answer.text


def optimizer(name: str, **options: float) -> m.SetOptimizer:
    return m.SetOptimizer(pack_control(create(name, **options).spec()))


MIB = 1 << 20


def test_a_table_that_does_not_fit_into_memory_is_refused_at_once() -> None:
    answer = Peer(Engine(EngineConfig(num_servers=2, max_memory=1 << 30))).register("big", 1 << 36)
    told = refused(answer)
    assert (
        "table 'big', of 274877906944 bytes on all servers, needs about 137438953472 bytes on server 0"
        in told
    )
    assert "of the 1073741824 that it may use (--max-memory)" in told


def test_a_table_above_the_limit_is_refused_with_the_flag_that_raises_it() -> None:
    answer = Peer(Engine(EngineConfig(max_table_bytes=1 << 20))).register("big", 1 << 19)
    assert "accepts tables of up to 1048576 bytes (--max-table-bytes)" in refused(answer)


def test_the_tables_of_all_jobs_together_have_the_memory_of_one_server() -> None:
    # Each has 4 MiB of weights and a sum of as many.
    engine = Engine(EngineConfig(max_memory=20 * MIB))
    first, second = Peer(engine, "first"), Peer(engine, "second")
    assert isinstance(first.register("a", MIB), m.Registered)
    assert isinstance(second.register("b", MIB), m.Registered)
    assert "(--max-memory)" in refused(second.register("c", MIB))
    assert isinstance(second.register("d", 1000), m.Registered)


@pytest.mark.parametrize(("available", "lines"), [(12 * MIB, 0), (6 * MIB, 1), (0, 0)])
def test_a_table_that_needs_more_memory_than_is_available_is_served_with_a_line_that_has_both_numbers(
    caplog: pytest.LogCaptureFixture, available: int, lines: int
) -> None:
    """It needs 8 MiB. 0 bytes are available where the system does not tell."""
    engine = Engine(EngineConfig())
    engine.budget.available = lambda: available
    peer = Peer(engine)
    assert isinstance(peer.register("a", MIB), m.Registered)
    assert isinstance(peer.register("b", 1000), m.Registered)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == lines
    assert all(
        re.match(r"table 'a' needs about 8\d{6} bytes on server 0, where 6291456 are available", line)
        for line in told
    )


@pytest.mark.parametrize("ends", ["leaves", "is not heard from"])
def test_a_job_that_ends_gives_its_memory_back(ends: str) -> None:
    engine = Engine(EngineConfig(max_memory=12 * MIB, forget_after=100.0, dead_after=5.0))
    before = engine.budget.used
    first, second = Peer(engine, "first"), Peer(engine, "second")
    first.register("a", MIB)
    space = weakref.ref(engine.namespaces["first"])
    gc.disable()
    try:
        if ends == "leaves":
            first.ask_all(m.Leave("done", True))
        else:
            second.now = 6.0
            second.ask(m.Heartbeat())
            engine.tick(6.0)
        assert space() is None  # at once, and not when the next full collection comes
    finally:
        gc.enable()
    assert isinstance(second.register("b", MIB), m.Registered)
    second.ask_all(m.Leave("done", True))
    assert engine.budget.used == before


def test_free_memory_goes_back_once_for_jobs_that_ended_whatever_others_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, calls = Engine(EngineConfig()), list[None]()
    monkeypatch.setattr(loop, "return_free_memory", lambda: calls.append(None))
    for name in ("first", "second"):
        Peer(engine, name).ask_all(m.Leave("done", True))
    Peer(engine, "third").register("a", MIB)
    times, ticks = itertools.count(0.0, loop.TICK), itertools.count()
    server = loop.Server(engine, loop.ServerOptions(drain_timeout=0.0), clock=lambda: next(times))
    server.stop_when(lambda _: next(ticks) > 1)
    server.run()
    server.close()
    assert (len(calls), list(engine.namespaces)) == (1, ["third"])


@pytest.mark.parametrize(
    ("name", "options", "copies"),
    [
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 1),
        ("adam", {}, 2),
        ("lamb", {}, 2),
        ("torch:SGD", {"lr": 0.1}, 0),
        ("torch:AdamW", {"amsgrad": True}, 3),
    ],
)
def test_the_state_of_an_optimizer_counts_when_it_is_named(
    name: str, options: dict[str, float], copies: int
) -> None:
    engine = Engine(EngineConfig(max_memory=1 << 30))
    peer = Peer(engine)
    peer.register("a", 10 * MIB)
    before = engine.budget.used
    assert isinstance(peer.ask(optimizer(name, **options)), m.Status)
    assert (engine.budget.used - before) / (40 * MIB) == pytest.approx(copies, abs=0.01)
    before = engine.budget.used
    peer.register("b", 10 * MIB)
    assert (engine.budget.used - before) / (40 * MIB) == pytest.approx(2 + copies, abs=0.01)


def test_an_optimizer_whose_state_does_not_fit_is_refused_and_the_former_one_stays() -> None:
    engine = Engine(EngineConfig(max_memory=14 * MIB))
    peer = Peer(engine)
    peer.register("a", MIB)
    peer.ask(optimizer("sgd", momentum=0.9))
    used = engine.budget.used
    assert "the state of optimizer 'adam' in namespace 'job' needs about" in refused(
        peer.ask(optimizer("adam"))
    )
    named = engine.namespaces["job"].optimizer.named
    assert named is not None
    assert named.registered_name == "sgd"
    assert engine.budget.used == used


def test_there_are_so_many_namespaces_and_no_more() -> None:
    engine = Engine(EngineConfig(max_namespaces=3))
    peers = [Peer(engine, str(i)) for i in range(4)]
    assert [type(peer.answer) for peer in peers] == [m.Welcome] * 3 + [m.Failed]
    told = refused(peers[3].answer)
    assert "server 0 has 3 namespaces and accepts up to 3 (--max-namespaces)" in told
    assert isinstance(Peer(engine, "1").answer, m.Welcome)  # a worker of a job that is here
    peers[2].ask_all(m.Leave("done", True))
    assert isinstance(Peer(engine, "3").answer, m.Welcome)


def test_of_namespaces_without_weights_the_one_that_is_silent_longest_makes_room() -> None:
    engine = Engine(EngineConfig(max_namespaces=3, dead_after=20.0))
    trained, silent, alive = Peer(engine, "trained"), Peer(engine, "silent"), Peer(engine, "alive")
    trained.initialise("w", 10)
    silent.register("w", 10)
    assert "for 20 s (--dead-after)" in refused(Peer(engine, "new", now=4.0).answer)
    alive.now = 6.0
    alive.ask(m.Heartbeat())
    assert isinstance(Peer(engine, "new", now=6.0).answer, m.Welcome)
    assert set(engine.namespaces) == {"trained", "alive", "new"}
    assert "was freed (--max-namespaces)" in refused(silent.ask(m.Heartbeat()), FencedError)
    assert "has 3 namespaces" in refused(Peer(engine, "newer", now=7.0).answer)


def test_of_a_flood_of_namespaces_that_say_nothing_more_all_make_room() -> None:
    engine = Engine(EngineConfig(max_namespaces=64, dead_after=20.0))
    for at in range(64):
        Peer(engine, f"flood {at}")
    answers = [Peer(engine, f"job {at}", now=6.0).answer for at in range(65)]
    assert [type(answer) for answer in answers] == [m.Welcome] * 64 + [m.Failed]


def test_weights_outlive_their_workers_for_a_long_time_and_nothing_else_does() -> None:
    engine = Engine(EngineConfig(dead_after=5.0, forget_after=1000.0))
    with_values, without = Peer(engine, "with"), Peer(engine, "without")
    with_values.initialise("w", 10)
    without.register("w", 10)
    engine.tick(4.0)
    assert set(engine.namespaces) == {"with", "without"}
    engine.tick(6.0)
    assert set(engine.namespaces) == {"with"}
    engine.tick(999.0)
    assert set(engine.namespaces) == {"with"}
    engine.tick(1001.0)
    assert set(engine.namespaces) == set()
    told = refused(with_values.ask(m.Heartbeat()), FencedError)
    assert "no worker of namespace 'with' was heard from for 1001 s, so it was freed (--forget-after)" in told


def test_one_worker_that_is_heard_keeps_the_weights_of_all() -> None:
    engine = Engine(EngineConfig(dead_after=5.0, forget_after=20.0))
    peer = Peer(engine)
    peer.initialise("w", 10)
    for now in range(0, 100, 10):
        peer.now = now
        peer.ask(m.Heartbeat())
        engine.tick(now)
    assert set(engine.namespaces) == {"job"}


@pytest.mark.parametrize(
    "body",
    [
        m.Pull(tuple(range(100))),
        contribution([(i, torch.zeros(16)) for i in range(100)], 0),
        m.Contribute(m.matrix([], 4), (), m.matrix([(i, 0, 0, 0, -1, 0) for i in range(100)], 6)),
        m.Register("v", tuple((str(i), (1,), "float32", 0, False) for i in range(100)), False),
    ],
)
def test_a_message_that_names_too_much_is_refused_with_the_number_and_the_flag(body: m.RequestBody) -> None:
    peer = Peer(Engine(EngineConfig(max_message_keys=99)))
    peer.register("w", 4)
    told = refused(peer.ask(body), ProtocolError)
    assert (
        "names 100 keys, slices or tables, server 0 accepts up to 99 in one message (--max-message-keys)"
        in told
    )


@pytest.mark.parametrize(
    "body",
    [
        m.Pull((0,) * 50),
        m.PullRows(0, (0,), (struct.pack("<2q", 3, 3),), (b"",), 1.0),
        contribution([(0, torch.zeros(16))] * 2, 0),
        m.Contribute(m.matrix([], 4), (), m.matrix([(0, 0, 0, 0, -1, 0)] * 2, 6)),
    ],
)
def test_what_is_named_twice_is_answered_with_an_error_alone(body: m.RequestBody) -> None:
    peer = Peer(Engine(EngineConfig()))
    peer.initialise("w", 4)
    assert "twice" in refused(peer.ask(body), ProtocolError)


@pytest.mark.parametrize("number", [1, -1, 2**62])
def test_weights_of_a_table_that_is_not_there_are_refused_as_a_mistake_of_who_asks(number: int) -> None:
    peer = Peer(Engine(EngineConfig()))
    peer.initialise("w", 4)
    for body in (m.Pull((number,)), m.PullRows(number, (0,), (struct.pack("<q", 0),), (b"",), 1.0)):
        refused(peer.ask(body), ProtocolError)


def test_rows_of_a_table_with_a_number_of_more_than_64_bits_are_refused_as_a_mistake_of_who_asks() -> None:
    peer = Peer(Engine(EngineConfig()))
    peer.initialise("w", 4)
    refused(peer.ask(m.PullRows(2**64 - 1, (0,), (struct.pack("<q", 0),), (b"",), 1.0)), ProtocolError)


def test_keys_come_in_portions_of_which_each_may_come_again_or_get_lost() -> None:
    engine = Engine(EngineConfig(max_message_keys=4))
    peer = Peer(engine)
    specs = tuple((f"key{i}", (i + 1,), "float32", 0, False) for i in range(10))
    plan = make_plan([TensorSpec(*spec) for spec in specs], 1)

    def portion(first: int, total: int = 10) -> m.ReplyBody:
        return peer.ask(m.Register("w", specs[first : first + 4], False, first, total, plan.digest))

    assert portion(4) == m.Status({"keys": 0})  # the first one got lost
    assert [portion(0), portion(0), portion(8), portion(4)] == [
        m.Status({"keys": keys}) for keys in (4, 4, 4, 8)
    ]
    assert portion(8) == m.Registered(0, 0, 0)
    assert portion(8) == m.Registered(0, 0, 0)
    assert engine.namespaces["job"].tables[0].plan == plan


def test_no_more_keys_are_collected_than_there_is_memory_for() -> None:
    peer = Peer(Engine(EngineConfig(max_memory=1 << 20)))
    answer = peer.ask(m.Register("w", (("a", (1,), "float32", 0, False),), False, 0, 1 << 40))
    assert "declaring 1099511627776 keys of table 'w' needs about" in refused(answer)


@pytest.mark.parametrize("where", ["key", "table", "namespace"])
def test_a_name_that_is_too_long_is_refused(where: str) -> None:
    long = "n" * 1025
    peer = Peer(Engine(EngineConfig()), long if where == "namespace" else "job")
    spec = (long if where == "key" else "k", (1,), "float32", 0, False)
    answer = (
        peer.answer
        if where == "namespace"
        else peer.ask(m.Register(long if where == "table" else "t", (spec,), False))
    )
    assert f"a {where} has a name of 1025 characters" in refused(answer)


OUTER, INNER = "memory.max", "job/step/memory.max"
OLD_OUTER, OLD_INNER = "memory/memory.limit_in_bytes", "memory/job/memory.limit_in_bytes"


@pytest.mark.parametrize(
    ("own", "limits", "least"),
    [
        ("0::/", {OUTER: "1000\n"}, 1000),
        ("0::/", {OUTER: "max\n"}, None),
        ("0::/", {}, None),
        ("0::/../elsewhere", {OUTER: "1000"}, 1000),
        ("0::/job/step", {INNER: "3000"}, 3000),
        ("0::/job/step", {INNER: "3000", "job/memory.max": "2000"}, 2000),
        ("0::/host/names/step", {OUTER: "1000"}, 1000),
        ("4:memory:/job\n0::/", {OLD_INNER: "3000", OLD_OUTER: str(1 << 62)}, 3000),
        ("4:cpu:/job\n", {OLD_INNER: "3000", INNER: "3000"}, None),
        ("what is this\n\n0::/job/step", {INNER: "3000", "job/step/memory.stat": "\n"}, 3000),
    ],
)
def test_the_least_limit_of_the_control_groups_around_a_process_counts(
    tmp_path: Path, own: str, limits: dict[str, str], least: int | None
) -> None:
    written(tmp_path, {"own": own, **limits})
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(tmp_path, tmp_path / "own") == (least or total)


def written(folder: Path, files: dict[str, str]) -> None:
    """Make files, and the folders that they are in; names are those of the file system."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, errors="surrogateescape")


def test_a_process_that_does_not_see_its_control_groups_has_the_limit_of_the_outermost(
    tmp_path: Path,
) -> None:
    written(tmp_path, {"memory.max": "1000"})
    assert memory_limit(tmp_path, tmp_path / "nothing there") == 1000


def test_keys_that_are_declared_in_portions_have_claimed_their_memory_until_the_rank_leaves() -> None:
    engine = Engine(EngineConfig(max_memory=100 * MIB))
    peer, other = Peer(engine, num_workers=2), Peer(engine, "other")
    before = engine.budget.used
    specs = tuple((f"k{i}", (1,), "float32", 0, False) for i in range(4000))
    answer = peer.ask(m.Register("t", specs, False, 0, 8000, "digest"))
    assert answer == m.Status({"keys": 4000})
    assert engine.budget.used - before >= 4000 * 1000
    peer.ask_all(m.Leave("done", True))
    assert engine.budget.used < before
    assert isinstance(other.answer, m.Welcome)


def test_a_worker_that_says_at_great_length_where_it_runs_is_refused() -> None:
    hello = m.Hello("job", 0, 1, 0, 1, "", "a" * 60_000, bytes(16), (b"peer",))
    [out] = Engine(EngineConfig()).handle(b"peer", m.Request(0, 0, 1, hello), 0.0)
    assert "in 60000 characters" in refused(out.reply.body)


def test_the_waits_of_a_very_large_namespace_are_looked_at_more_rarely_but_they_are() -> None:
    engine = Engine(EngineConfig(dead_after=1e9))
    peer = Peer(engine, num_workers=40_000)
    [pending] = peer.ask_all(m.Gather(0, 10.0))
    assert isinstance(pending, m.Pending)
    assert len(pending.waiting_for) < 100
    times = [at / 10 for at in range(1, 200)]
    failed = [at for at in times if engine.tick(at)]
    [at] = failed
    assert 10.0 <= at <= 13.0


def test_a_row_sparse_table_of_empty_rows_is_taken() -> None:
    answer = Peer(Engine(EngineConfig())).ask(
        m.Register("t", (("k", (1 << 40, 0), "float32", 0, True),), False)
    )
    assert isinstance(answer, m.Registered)


V2 = {"limit": "memory.max", "usage": "memory.current", "stat": "memory.stat"}
V1 = {
    "limit": "memory/memory.limit_in_bytes",
    "usage": "memory/memory.usage_in_bytes",
    "stat": "memory/memory.stat",
}
OF_JOB = {kind: f"job/{name}" for kind, name in V2.items()}
ODD = {kind: f"job-\udcff/{name}" for kind, name in V2.items()}
"""Of a group whose name is no text."""


@pytest.mark.parametrize(
    ("own", "names", "limit", "usage", "stat", "available"),
    [
        ("0::/job\n", OF_JOB, "max", 7 << 20, None, 5 << 20),
        ("0::/job\n", OF_JOB, str(9 << 20), 7 << 20, None, 2 << 20),
        ("0::/job\n", OF_JOB, str(30 << 20), 7 << 20, None, 5 << 20),
        ("0::/job\n", OF_JOB, "100", 7 << 20, None, 0),
        # What was read of files can be dropped.
        ("0::/", V2, "1000", 950, "file 900\nactive_file 300\ninactive_file 400\n", 450),
        ("8:memory:/", V1, "1000", 950, "inactive_file 1\ntotal_inactive_file 400\n", 450),
        ("0::/job-\udcff\n", ODD, "1000", 950, "", 50),
        ("0::/job-\udcff\n", ODD, "1000", 950, "\n\ninactive_file 400\n", 450),
        ("0::/job-\udcff\n", ODD, "1000", 950, "inactive_file\ninactive_file 400\n", 450),
    ],
)
def test_what_is_available_is_the_machines_memory_or_what_is_left_of_the_control_group(
    tmp_path: Path, own: str, names: dict[str, str], limit: str, usage: int, stat: str | None, available: int
) -> None:
    files = {"own": own, names["limit"]: limit, names["usage"]: str(usage)}
    written(tmp_path, files | ({} if stat is None else {names["stat"]: stat}))
    written(tmp_path, {"meminfo": "\nMemTotal: 9 kB\nMemAvailable:    5120 kB\n"})
    assert available_memory(tmp_path, tmp_path / "own", tmp_path / "meminfo") == available
    assert available_memory(tmp_path, tmp_path / "own", tmp_path / "nothing there") == 0
    if names is ODD:
        assert memory_limit(tmp_path, tmp_path / "own") == 1000
