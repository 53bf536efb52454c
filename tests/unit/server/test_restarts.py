"""A server that is killed anywhere and restarted with its memory ends like one that was never killed, bit by bit."""

from __future__ import annotations

import functools
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore_server.durable.log import read_log_records
from kvstore_server.engine import durability
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.durability import Head
from kvstore_server.engine.rounds import Mode
from kvstore_server.errors import RecoveryError, UnknownNameError
from kvstore_server.failpoints import POINTS
from kvstore_server.optimizer import create, registry
from kvstore_server.plan import HashTableOptions, TensorSpec, hash_table_spec
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from kvstore_server.protocol.rows import SENT, read_pulled_rows
from kvstore_server.shard.shard import Shard
from kvstore_server.transport.arena import Leases, SharedArena
from kvstore_server.transport.exports import WeightExports
from tests.sim.schedule import Cautious
from tests.support.durable import HeldDescriptors, crash_at
from tests.support.one_in import one_in
from tests.support.restarts import Case, Job

MATRIX = TensorSpec("matrix", (5, 7), "float32")
VECTOR = TensorSpec("vector", (40,), "float32")
TABLE = TensorSpec("table", (20, 4), "float32", 0, True)
HASHED = hash_table_spec("hashed", (4,), "float32", HashTableOptions(admit_after=2, expire_after=2))
KNOWN = hash_table_spec("known", (4,), "float32", HashTableOptions())
HALF = TensorSpec("half", (33,), "float16")
BIG = TensorSpec("big", (400_000,), "float32")
LONG = TensorSpec("long", (70_000,), "float32")


def rates(round_: int) -> bytes:
    return pack_hypers([{"lr": 0.1 if round_ < 3 else 0.05}], {}, {}, True)


def some_rows(round_: int, rank: int) -> Sequence[int]:
    return [row for row in range(20) if (row * 7 + round_ * 3 + rank) % 5 == 0]


def known_hashes(round_: int, rank: int) -> Sequence[int]:
    """Rows that come in two rounds, and are all there afterwards; so they are not in the order of their slots."""
    return (0, 2) if round_ == 1 else (1, 3) if round_ == 2 else range(4)


def some_hashes(round_: int, rank: int) -> Sequence[int]:
    return [row for row in range(4) if (row + round_ + 2 * rank) % 3]


CASES = {
    "plain sum": Case([[MATRIX, VECTOR]]),
    "sgd": Case([[MATRIX, VECTOR]], ("sgd", {"learning_rate": 0.1})),
    "momentum": Case([[MATRIX], [VECTOR], [HALF]], ("sgd", {"momentum": 0.9}), hypers=rates),
    "adam": Case([[MATRIX, VECTOR]], ("adam", {"wd": 0.01})),
    "half with masters": Case([[HALF], [MATRIX]], ("sgd", {"momentum": 0.9, "multi_precision": True})),
    "lamb": Case([[MATRIX, VECTOR]], ("lamb", {}), whole_keys=True),
    "adafactor": Case([[MATRIX, VECTOR]], ("torch:adafactor", {}), whole_keys=True),
    "one that may raise": Case([[MATRIX], [VECTOR]], (Cautious.name, {})),
    "rows": Case([[TABLE, VECTOR]], ("adagrad", {}), rows=some_rows),
    "rows of sgd": Case([[TABLE]], ("sgd", {"momentum": 0.9, "lazy_update": True}), rows=some_rows),
    "known rows": Case([[KNOWN, VECTOR]], ("adagrad", {}), rows=known_hashes, rounds=4),
    "hash table": Case([[HASHED, VECTOR]], ("adagrad", {}), rows=some_hashes, rounds=6),
    "rows as changes": Case(
        [[TABLE, VECTOR]], ("sgd", {}), rows=some_rows, flags=m.WANTS_WEIGHTS | m.WANTS_DELTA
    ),
    "2bit": Case([[MATRIX, VECTOR]], ("sgd", {}), codec={"type": "2bit", "threshold": 0.5}),
    "encoded weights": Case(
        [[VECTOR], [MATRIX]],
        ("sgd", {}),
        pull_codec={"type": "2bit", "threshold": 0.05},
        flags=m.WANTS_WEIGHTS | m.WANTS_DELTA,
    ),
    "clipped": Case([[MATRIX, VECTOR], [HALF]], ("adam", {}), hold=2.0),
    "slice by slice": Case([[LONG], [VECTOR]], ("adam", {}), is_pipelined=True, rounds=3),
    "async": Case([[MATRIX], [VECTOR]], ("sgd", {"learning_rate": 1.0}), integers=True, mode=Mode("async")),
    "ssp": Case([[VECTOR]], ("sgd", {"learning_rate": 1.0}), integers=True, mode=Mode("ssp", 2)),
    "delay compensation": Case([[VECTOR]], ("dcasgd", {}), mode=Mode("async")),
    "thousand keys": Case([[TensorSpec(f"k{at}", (3,), "float32") for at in range(300)]], ("sgd", {})),
}
FEW = (
    "momentum",
    "lamb",
    "rows",
    "one that may raise",
    "encoded weights",
    "slice by slice",
    "delay compensation",
)
"""Cases that differ in how their state is stored."""
SERVER_POINTS = sorted(n for n in POINTS if n.startswith("server.") and not n.startswith("server.snapshot."))


@functools.cache
def undisturbed(name: str) -> dict[str, Any]:
    job = Job(CASES[name])
    job.run()
    return job.facts()


@pytest.fixture
def store() -> Iterator[HeldDescriptors]:
    held = HeldDescriptors()
    yield held
    held.close()


@pytest.mark.parametrize("name", CASES)
def test_durability_changes_no_bit(name: str, store: HeldDescriptors) -> None:
    job = Job(CASES[name], store)
    job.run()
    assert job.facts() == undisturbed(name)
    again = Job(CASES[name], store)
    again.engine.tick(200.0)
    assert again.facts() == undisturbed(name)


@pytest.mark.parametrize(
    ("name", "point", "nth"),
    one_in(12, CASES, [one for one in SERVER_POINTS if "recovery" not in one], (1, 5)),
)
def test_a_killed_server_ends_like_one_that_was_not(
    name: str, point: str, nth: int, store: HeldDescriptors
) -> None:
    with crash_at((point, nth)):
        job = Job(CASES[name], store)
        job.run()
    assert job.facts() == undisturbed(name)
    assert Job(CASES[name], store).facts() == undisturbed(name)


@pytest.mark.parametrize(
    ("name", "point", "nth"), one_in(3, FEW, [one for one in SERVER_POINTS if "recovery" in one], [1, 2, 5])
)
def test_a_server_that_is_killed_while_it_restarts_begins_that_again(
    name: str, point: str, nth: int, store: HeldDescriptors
) -> None:
    with crash_at(("server.update.end", 2), (point, nth)):
        job = Job(CASES[name], store)
        job.run()
    assert job.facts() == undisturbed(name)


@pytest.mark.parametrize(
    ("name", "point", "nth"),
    one_in(
        6,
        FEW,
        [one for one in SERVER_POINTS if "compact" in one or "memory" in one or "log" in one],
        (1, 2, 3, 9),
    ),
)
def test_a_server_that_is_killed_while_its_log_is_replaced_loses_nothing(
    name: str, point: str, nth: int, store: HeldDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_MIN_LOG", 1)
    monkeypatch.setattr(durability, "_GROWTH", 1)
    with crash_at((point, nth)):
        job = Job(CASES[name], store)
        job.run()
    assert job.facts() == undisturbed(name)
    Job(CASES[name], store)
    assert len([one.name for one in store.fds if "log" in one.name]) == 1


@pytest.mark.parametrize(("name", "seed"), one_in(12, CASES, range(12)))
def test_a_server_that_is_killed_again_and_again_ends_like_one_that_was_not(
    name: str, seed: int, store: HeldDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "_MIN_LOG", 1)
    monkeypatch.setattr(durability, "_GROWTH", 1 + seed % 3)
    rng = random.Random(seed)
    points = [(rng.choice(SERVER_POINTS), rng.randrange(1, 12)) for _ in range(8)]
    with crash_at(*points):
        job = Job(CASES[name], store)
        job.run()
    assert job.facts() == undisturbed(name)


@pytest.mark.parametrize("point", SERVER_POINTS)
def test_each_point_is_reached(point: str, store: HeldDescriptors, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes = 0
    for name in ("momentum", "rows", "hash table"):  # the last one, which takes long, only for its own points
        if crashes:
            break
        other = ("server.update.end", 2) if "recovery" in point else ("server.update.begin", 999)
        with crash_at(other, (point, 1)):
            job = Job(CASES[name], HeldDescriptors())
            job.run()
            for rank in range(job.case.ranks):
                job.leave(rank)
        crashes += job.crashes - ("recovery" in point)
        assert job.store is not None
        job.store.close()
    assert crashes > 0


# ---------------------------------------------------------------- what is logged


def commits_of(job: Job) -> Counter[int]:
    """How many records of each kind the log has."""
    assert job.engine._durability is not None
    log = job.engine._durability._log
    assert log is not None
    return Counter(record.kind for record in read_log_records(log.fd))


@pytest.mark.parametrize("name", ["sgd", "adam", "momentum", "clipped", "thousand keys", "half with masters"])
def test_rounds_like_those_before_are_logged_as_increments(name: str, store: HeldDescriptors) -> None:
    case = replace(CASES[name], rounds=12)
    job = Job(case, store)
    job.run()
    kinds = commits_of(job)
    # Not the first rounds: the optimizer's state begins with the first update. Held rounds end table by table.
    assert kinds[durability._ROUND] >= (12 - 3) * (len(case.keys) if case.hold else 1)
    assert kinds[durability._RANGES] <= 3 * len(case.keys)
    again = Job(case, store)
    undisturbed_job = Job(case)
    undisturbed_job.run()
    assert again.facts() == undisturbed_job.facts()


def test_a_round_of_many_keys_takes_few_bytes_of_log(store: HeldDescriptors) -> None:
    job = Job(replace(CASES["thousand keys"], rounds=3), store)
    job.run()
    assert job.engine._durability is not None
    log = job.engine._durability._log
    assert log is not None
    before, rounds = log.end, 20
    job.case.rounds = rounds + 3
    for round_ in range(4, rounds + 4):
        assert job.send(list(job._round(round_, range(job.case.ranks))))
    assert (log.end - before) / rounds < 300


# ---------------------------------------------------------------- what is refused


def test_random_damage_of_what_was_stored_is_refused() -> None:
    job = Job(CASES["momentum"], HeldDescriptors())
    job.run()
    assert job.store is not None
    expected, rng = undisturbed("momentum"), random.Random(3)
    [log] = [one for one in job.store.fds if "log" in one.name]
    whole = os.pread(log.fd, job.engine._durability._log.end, 0)
    for _ in range(300):
        at = rng.randrange(len(whole))
        os.pwrite(log.fd, bytes([whole[at] ^ 1 << rng.randrange(8)]), at)
        with pytest.raises(RecoveryError):
            Job(job.case, job.store)
        os.pwrite(log.fd, whole, 0)
    assert Job(job.case, job.store).facts() == expected
    job.store.close()


@pytest.mark.parametrize("what", ["missing", "short"])
def test_memory_that_is_not_there_is_an_error(what: str, store: HeldDescriptors) -> None:
    Job(CASES["sgd"], store).run()
    [one] = [kept for kept in store.fds if kept.name == "kvstore-memory-1"]
    store.remove(one.name)
    if what == "short":
        fd = os.memfd_create("short")
        os.ftruncate(fd, 8)
        store.store(one.name, fd)
        os.close(fd)
    with pytest.raises(RecoveryError, match="memory 1 "):
        Job(CASES["sgd"], store)


@pytest.mark.parametrize(
    ("mine", "named"),
    [((1, 2, ""), "--index"), ((0, 3, ""), "--num-servers"), ((0, 2, "avx"), "the CPU")],
)
def test_another_server_does_not_take_what_was_stored(mine: tuple[int, int, str], named: str) -> None:
    head = Head(0, 2, "", 5, "tcp://127.0.0.1:1")
    head.check(0, 2, "")
    with pytest.raises(RecoveryError, match=named):
        head.check(*mine)


def test_an_optimizer_that_is_not_known_any_more_is_an_error_by_name(
    store: HeldDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    Job(CASES["one that may raise"], store).run()
    monkeypatch.delitem(registry._registry, Cautious.name)
    with pytest.raises(UnknownNameError, match=Cautious.name):
        Job(CASES["one that may raise"], store)


# ---------------------------------------------------------------- memory


def test_the_memory_of_a_namespace_that_ends_is_given_back(store: HeldDescriptors) -> None:
    job = Job(CASES["adam"], store)
    job.run()
    assert len(store.fds) > 3
    for rank in range(2):
        job.leave(rank)
    assert [one.name.rpartition("-")[0] for one in store.fds] == ["kvstore-log"]
    assert not Job(CASES["adam"], store).engine.namespaces


def test_a_server_that_stops_leaves_nothing(store: HeldDescriptors) -> None:
    job = Job(CASES["adam"], store)
    job.run()
    job.engine.stop()
    job.engine.abandon(200.0)
    assert store.fds == []


def test_memory_of_an_optimizer_that_was_replaced_is_given_back(store: HeldDescriptors) -> None:
    job = Job(CASES["adam"], store)
    job.run()
    before = len(store.fds)
    for rank in range(2):
        job.ask(rank, m.SetOptimizer(pack_control(create("sgd").spec())))
    job = Job(CASES["sgd"], store)
    assert len(store.fds) == before - 4  # two averages, and their shadows
    [table] = job.engine.namespaces["job"].tables
    assert table.shard.get_state(table.unit, 0).tensors == {}


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.mode.is_sync])
def test_weights_of_the_round_before_are_kept_over_a_restart(
    name: str, is_compacted: bool, store: HeldDescriptors
) -> None:
    case = CASES[name]
    job, before = Job(case, store), dict[int, list[bytes]]()
    for step in list(job.steps())[:-1]:
        before = job.weights() if job.engine.namespaces else before
        assert job.send(list(step))
    if is_compacted:
        compact(job)
    for now in (job, Job(case, store)):
        tables = now.engine.namespaces["job"].tables
        former = [now.former(table) for table in tables]
        assert former == [before[table.number] for table in tables]


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("name", ["rows", "rows of sgd", "rows as changes"])
def test_rows_of_the_round_before_are_kept_over_a_restart(
    name: str, is_compacted: bool, store: HeldDescriptors
) -> None:
    case = CASES[name]
    job, every = Job(case, store), np.arange(TABLE.shape[0], dtype="<i8").tobytes()
    *former_rounds, last_round, _ = job.steps()
    for step in former_rounds:
        assert job.send(list(step))
    before = rows_told(job.ask(0, m.PullRows(0, (0,), (every,), (b"",), 60.0)))
    assert job.send(list(last_round))
    if is_compacted:
        compact(job)
    some = np.array([0, 3, 4, 11, 19], "<i8")
    width = TABLE.shape[1]
    wanted = np.frombuffer(before, np.float32).reshape(-1, width)[some].tobytes()
    for now in (job, Job(case, store)):
        now.sessions |= job.sessions
        told = rows_told(now.ask(0, m.PullRows(0, (0,), (some.tobytes(),), (b"",), 60.0, case.rounds)))
        present = rows_told(now.ask(0, m.PullRows(0, (0,), (some.tobytes(),), (b"",), 60.0, case.rounds + 1)))
        assert told == wanted != present
        assert present == rows_told(now.ask(0, m.PullRows(0, (0,), (some.tobytes(),), (b"",), 60.0)))
        [failed] = now.ask(0, m.PullRows(0, (0,), (some.tobytes(),), (b"",), 60.0, case.rounds - 1))
        assert isinstance(failed, m.Failed)
        assert failed.code == "WorkerLostError"


@pytest.mark.parametrize("is_compacted", [False, True])
def test_rows_of_a_hash_table_before_the_round_are_kept_over_a_restart(
    is_compacted: bool, store: HeldDescriptors
) -> None:
    case = CASES["known rows"]
    starts = case.plans[0].rows(0).blocks[0].starts[:-1]
    job, every = Job(case, store), (starts[:, None] + np.arange(4)).reshape(-1)
    request = m.PullRows(0, (0,), (every.astype("<i8").tobytes(),), (b"",), 60.0)

    def told(now: Job, round_: int = -1) -> list[list[float]]:
        data = torch.frombuffer(
            bytearray(rows_told(now.ask(0, replace(request, round=round_)))), dtype=torch.uint8
        )
        pulled = read_pulled_rows(data, len(every), 4, torch.float32)
        assert (pulled.forms == SENT).all()
        return pulled.values.tolist()

    *former_rounds, last_round, _ = job.steps()
    for step in former_rounds:
        assert job.send(list(step))
    before = told(job)
    assert job.send(list(last_round))
    if is_compacted:
        compact(job)
    for now in (job, Job(case, store)):
        now.sessions |= job.sessions
        assert told(now, case.rounds) == before
        assert told(now) != before


def rows_told(answers: Sequence[m.ReplyBody]) -> bytes:
    [answer] = answers
    assert isinstance(answer, m.Weights)
    return b"".join([one.numpy().tobytes() for one in answer.payloads])


def compact(job: Job) -> None:
    engine = job.engine
    assert engine._durability is not None
    engine._durability.compact(engine.namespaces, engine._sessions, engine._finished)


def test_weights_before_a_round_of_other_keys_are_the_present_ones(store: HeldDescriptors) -> None:
    case = CASES["sgd"]
    job = Job(case, store)
    job.run()
    # All ranks leave out all keys: the round is applied, and changes nothing.
    before, round_ = job.weights(), case.rounds + 1
    for rank in range(case.ranks):
        commits = m.matrix([(0, round_, 0, 0, -1, 0)], m.COMMIT_WORDS)
        absent = tuple((0, key) for key in range(len(case.plans[0].specs)))
        job.ask(rank, m.Contribute(m.matrix((), m.PUSH_WORDS), (), commits, timeout=600.0, absent=absent))
    for now in (job, Job(case, store)):
        [table] = now.engine.namespaces["job"].tables
        assert (table.version, now.former(table)) == (round_, before[0])


def test_weights_of_a_key_that_is_sent_and_left_out_are_as_before(store: HeldDescriptors) -> None:
    case = Case([[BIG, BIG._replace(key="other")]], ("sgd", {}), rounds=2)
    job = Job(case, store)
    job.run()
    before, round_, slices = job.weights(), case.rounds + 1, case.plans[0].slices
    for rank in range(case.ranks):
        for slice_ in slices:
            assert job.send([(rank, 50_000 + slice_.index, job._slice(round_, rank, 0, slice_))])
        commits = m.matrix([(0, round_, len(slices), 0, -1, 0)], m.COMMIT_WORDS)
        empty = m.matrix((), m.PUSH_WORDS)
        job.ask(rank, m.Contribute(empty, (), commits, timeout=600.0, absent=((0, 1),)))
    are_same = [was == is_ for was, is_ in zip(before[0], job.weights()[0], strict=True)]
    assert are_same == [slice_.segments[0].key == 1 for slice_ in slices]
    for now in (job, Job(case, store)):
        [table] = now.engine.namespaces["job"].tables
        assert (table.version, now.former(table)) == (round_, before[0])


def test_weights_before_a_round_that_changed_nothing_are_the_present_ones(store: HeldDescriptors) -> None:
    case = CASES["sgd"]
    job = Job(case, store)
    job.run()
    vetoed = case.rounds + 1
    for rank in range(case.ranks):
        commits = m.matrix([(0, vetoed, 0, 0, -1, m.VETOES)], m.COMMIT_WORDS)
        job.ask(rank, m.Contribute(m.matrix((), m.PUSH_WORDS), (), commits, timeout=600.0))
    [before] = job.ask(0, m.Pull((0,), 60.0, vetoed))
    [now] = job.ask(0, m.Pull((0,)))
    assert isinstance(before, m.Weights)
    assert isinstance(now, m.Weights)
    assert all(map(torch.equal, before.payloads, now.payloads))


def test_weights_that_moved_because_they_are_read_survive(store: HeldDescriptors) -> None:
    case = CASES["momentum"]
    leases = Leases()
    job = Job(case, store, leases=leases)
    for step in list(job.steps())[:3]:
        assert job.send(list(step))
    storage = job.engine.namespaces["job"].shard.storage
    for slot in range(len(storage.slots)):
        leases.hold(storage.padded[slot])
    before = job.weights()
    for step in list(job.steps())[3:]:
        before = job.weights() if job.engine.namespaces["job"].tables[0].version < case.rounds else before
        assert job.send(list(step))
    assert storage.has_moved
    assert job.facts() == undisturbed("momentum")
    assert [job.former(table) for table in job.engine.namespaces["job"].tables] == list(before.values())
    again = Job(case, store)
    assert again.facts() == undisturbed("momentum")
    assert not again.engine.namespaces["job"].shard.storage.has_moved


def test_a_rank_that_was_taken_over_stays_fenced_after_a_restart(store: HeldDescriptors) -> None:
    job = Job(CASES["sgd"], store)
    job.run()
    hello = next(body for _, _, body in next(job.steps()) if isinstance(body, m.Hello))
    former = job.sessions[0]
    [welcome] = job.ask(0, replace(hello, nonce=b"another"))
    assert isinstance(welcome, m.Welcome)
    again = Job(CASES["sgd"], store)
    again.sessions = {0: former}
    [answer] = again.ask(0, m.Heartbeat())
    assert isinstance(answer, m.Failed)
    assert answer.code == "FencedError"
    again.sessions = {0: welcome.session}
    assert again.ask(0, m.Heartbeat()) == [m.Pending(())]
    assert again.ask(0, replace(hello, nonce=b"another")) == [welcome]


# ---------------------------------------------------------------- weights that workers map


def exporting(store: HeldDescriptors) -> tuple[Job, WeightExports]:
    leases = Leases()
    exports = WeightExports(leases)
    leases.export, leases.location_of = exports.add, lambda weights: exports.find([weights])
    return Job(Case([[BIG]], ("sgd", {}), rounds=2), store, leases=leases), exports


def test_exported_weights_keep_their_numbers_and_places(store: HeldDescriptors) -> None:
    job, exports = exporting(store)
    job.run()
    places = list(job.engine.namespaces["job"].shard.storage.locations)
    assert max(places) >= 0
    # A worker keeps its mapping, over the end of the process that made the memory.
    [number] = exports.fds
    seen = SharedArena(os.dup(exports.fds[number]), is_ours=False)
    exports.close()
    again, more = exporting(store)
    again.sessions = job.sessions
    assert list(more.fds) == [number]
    assert list(again.engine.namespaces["job"].shard.storage.locations) == places
    before = seen.data.clone()
    again.case.rounds = 3
    *_, last, _ = again.steps()
    assert again.send(list(last))
    assert not torch.equal(seen.data, before)
    more.close()


def test_workers_cannot_write_exported_weights(store: HeldDescriptors) -> None:
    job, exports = exporting(store)
    job.run()
    [fd] = exports.fds.values()
    with pytest.raises(OSError, match=r"denied|permitted"):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(store.fds[0].fd if "memory" in store.fds[0].name else store.fds[1].fd, 1)
    exports.close()


# Rounds that are taken back.

TAKEN_BACK = (
    "momentum",
    "adam",
    "half with masters",
    "lamb",
    "one that may raise",
    "clipped",
    "slice by slice",
)
TAKEN = 3
"""The round that is taken back; one more follows."""


@pytest.fixture
def keeps_undos_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last round of every table can be undone, as where members may change and there are several servers."""
    make = Shard.__init__

    def make_that_keeps(self: Shard, *args: Any) -> None:
        make(self, *args)
        self.keeps_undos = True

    monkeypatch.setattr(Shard, "__init__", make_that_keeps)


def numbers_of(job: Job) -> dict[Any, Any]:
    wanted = ("weights", "state", "counts", "round", "hyper")
    return {key: value for key, value in job.facts().items() if isinstance(key, tuple) and key[1] in wanted}


def without_a_round(case: Case, is_taken_back: bool, *crashes: tuple[str, int], store: Any = None) -> Job:
    """Run a job whose round `TAKEN` fails: before it is applied, or by being taken back, if it then still can."""
    job = Job(replace(case, rounds=TAKEN + 1), store)
    *before, taken, last, _ = [list(step) for step in job.steps()]
    for step in [*before, taken] if is_taken_back else before:
        assert job.send(step)
    with crash_at(*crashes):
        for table in range(len(case.plans)):
            job.ask(0, m.Abort(table, TAKEN, "it was lost", is_taken_back, True))
    assert job.send(last)
    return job


@pytest.mark.usefixtures("keeps_undos_always")
@pytest.mark.parametrize("name", TAKEN_BACK)
def test_a_round_that_is_taken_back_leaves_no_trace(name: str, store: HeldDescriptors) -> None:
    case = CASES[name]
    expected = numbers_of(without_a_round(case, is_taken_back=False))
    assert numbers_of(without_a_round(case, is_taken_back=True, store=store)) == expected


@pytest.mark.usefixtures("keeps_undos_always")
@pytest.mark.parametrize("point", SERVER_POINTS)
def test_a_server_that_dies_while_it_takes_a_round_back_has_all_of_it_or_nothing(
    point: str, store: HeldDescriptors
) -> None:
    case = CASES["adam"]
    job = without_a_round(case, True, (point, 1), store=store)
    whole = Job(replace(case, rounds=TAKEN + 1))
    whole.run()
    # The next process cannot take back what an earlier one has applied.
    assert numbers_of(job) in [numbers_of(without_a_round(case, False)), *[numbers_of(whole)] * job.crashes]
    assert Job(job.case, store).facts() == job.facts()
