"""What a server remembers of the weights that workers have: changes of weights, and versions for delay compensation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.codec import make_codec
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.engine.rounds import Mode
from kvstore_server.errors import ProtocolError
from kvstore_server.optimizer import checked_optimizer_spec
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.shard import deltas
from kvstore_server.shard.deltas import Deltas, add_delta_changes
from kvstore_server.shard.storage import Storage
from kvtrainer.client.contribution import Contribution
from tests.support.switchboard import connected, play

NUMEL = 2001


class Table:
    """One slice on a server, and workers by the version that they have."""

    def __init__(self, kind: str = "int8", dtype: str = "float32") -> None:
        storage = Storage()
        unit = storage.add(make_plan([TensorSpec("w", (NUMEL,), dtype)], 1), 0, None)
        self.codec, self.slot = make_codec({"type": kind}), unit.first
        self.weights = storage.padded[unit.first]
        self.deltas = Deltas(self.codec, storage, unit)
        self.workers: dict[int, Tensor] = {}
        self.version = -1

    def change(self, weights: Tensor | float) -> None:
        """Give the server other weights, and note what a worker has who is told of all of them."""
        if isinstance(weights, Tensor):
            self.weights[:NUMEL] = weights
        else:
            self.weights[:NUMEL] += weights
        former, self.version = self.version, self.version + 1
        self.deltas.follow(self.version)
        self.workers[self.version] = self.told(former)

    def told(self, held: int) -> Tensor:
        """Return the weights of a worker that had some version."""
        given, is_delta = self.deltas.parts(self.slot, held)
        if not is_delta:
            return given
        weights = self.workers[held].clone()
        add_delta_changes(self.codec, given, weights)
        return weights


def noise(seed: int, size: float = 0.01) -> Tensor:
    return size * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["ternary", "int8", "topk", "2bit", "fp16"])
def test_whatever_version_a_worker_had_it_comes_to_the_weights_of_all(kind: str, dtype: str) -> None:
    table = Table(kind, dtype)
    for seed in range(4):
        table.change(table.weights[:NUMEL] + noise(seed))
    for held in range(-1, 4):
        assert torch.equal(table.told(held), table.workers[3])


def test_the_first_weights_come_as_they_are() -> None:
    table = Table()
    table.change(noise(0))
    given, is_delta = table.deltas.parts(table.slot, -1)
    assert not is_delta
    assert torch.equal(given[:NUMEL], noise(0))


@pytest.mark.parametrize(("kind", "rounds"), [("int8", 4), ("fp16", 4), ("topk", 101), ("ternary", 100)])
def test_what_was_held_back_comes_later(kind: str, rounds: int) -> None:
    table = Table(kind)
    table.change(noise(0))
    table.change(noise(1))
    distance = (table.workers[1] - table.weights).norm()
    for _ in range(rounds):
        table.change(0.0)
    left = (table.workers[table.version] - table.weights).norm()
    assert left < 0.05 * distance


def test_weights_that_stay_send_changes_of_zero() -> None:
    table = Table("ternary")
    table.change(noise(0))
    table.change(0.0)
    given, is_delta = table.deltas.parts(table.slot, 0)
    assert is_delta
    assert not given.any()


def test_elements_that_do_not_change_stay_to_the_bit() -> None:
    table = Table("ternary")
    table.change(noise(0))
    for seed in range(1, 5):
        step = noise(seed)
        step[::2] = 0.0
        table.change(table.weights[:NUMEL] + step)
    assert torch.equal(table.workers[4][:NUMEL:2], noise(0)[::2])


@pytest.mark.parametrize("kind", ["ternary", "int8", "topk", "2bit", "fp16"])
@pytest.mark.parametrize("size", [NUMEL, 1 << 20], ids=["in one slice", "each in its own"])
def test_a_key_that_no_round_updates_stays_as_workers_saw_it_last_until_one_does(
    kind: str, size: int
) -> None:
    storage, codec = Storage(), make_codec({"type": kind})
    unit = storage.add(make_plan([TensorSpec(name, (size,), "float32") for name in "ab"], 1), 0, None)
    sent, drawn = Deltas(codec, storage, unit), torch.Generator().manual_seed(0)
    places = {
        (segment.key, segment.key_start): (slot, slice(segment.start, segment.start + segment.numel))
        for slot, slice_ in sent._slices.items()
        for segment in slice_.segments
    }

    def of(key: int) -> list[Tensor]:
        return [sent.weights[slot][part].clone() for (own, _), (slot, part) in places.items() if own == key]

    def round_(version: int, left_out: tuple[int, ...]) -> None:
        for (key, _), (slot, part) in places.items():
            if key not in left_out:
                numbers = storage.padded[slot][part]
                numbers += torch.randn(len(numbers), generator=drawn)
        sent.record_round(left_out)
        sent.follow(version)

    for version in range(3):
        round_(version, ())
    former = of(0), of(1)
    for version in range(3, 6):
        round_(version, (0,))
    assert all(map(torch.equal, of(0), former[0]))
    assert not all(map(torch.equal, of(1), former[1]))
    round_(6, (1,))
    assert not all(map(torch.equal, of(0), former[0]))


@pytest.mark.parametrize("wrong", [0.0, float("nan")], ids=["finite", "not finite"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_key_that_no_round_updates_stays_as_it_is_whatever_numbers_are_in_it_or_beside_it(
    dtype: str, wrong: float
) -> None:
    storage, codec = Storage(), make_codec({"type": "int8"})
    unit = storage.add(make_plan([TensorSpec(name, (100,), dtype) for name in "ab"], 1), 0, None)
    sent, weights = Deltas(codec, storage, unit), storage.padded[unit.first]
    places = [one.start for one in sent._slices[unit.first].segments]
    still, other = (slice(start, start + 100) for start in places)
    weights[:] = torch.linspace(-1, 1, len(weights))
    weights[still][:2] = torch.tensor([float("inf"), -float("inf")])
    sent.follow(0)
    weights[still][2:] += 1 / 64  # what a codec has kept back
    before = sent.weights[unit.first].clone()
    weights[other] += wrong + 0.5
    sent.record_round((0,))
    sent.follow(1)
    assert torch.equal(sent.weights[unit.first][still], before[still])
    torch.testing.assert_close(
        sent.weights[unit.first][other], weights[other], rtol=0, atol=0.02, equal_nan=True
    )


def test_two_rounds_at_once_change_what_either_has_updated() -> None:
    table = Table("int8")
    table.change(noise(0))
    table.deltas.record_round((0,))
    table.deltas.record_round(())
    table.change(0.5)
    assert not torch.equal(table.workers[1], table.workers[0])


@pytest.mark.parametrize("kind", ["ternary", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_half_precision_at_its_end_stays_finite_where_a_codec_rounds_up(kind: str, sign: int) -> None:
    """Every second weight comes to the largest number, by less than the others change."""
    table, largest = Table(kind, "float16"), torch.finfo(torch.float16).max
    before = largest - 16000 - 9000 * torch.rand(NUMEL, generator=torch.Generator().manual_seed(0))
    after = torch.full((NUMEL,), largest)
    before[::2], after[::2] = 0, 30000
    table.change(sign * before)
    table.change(sign * after)
    assert table.workers[1].isfinite().all()
    assert table.workers[1].abs().max() == largest
    assert torch.equal(table.told(0), table.workers[1])


def test_changes_have_the_bytes_of_the_codec() -> None:
    table = Table("ternary")
    for seed in range(3):
        table.change(noise(seed))
    sizes = [table.deltas.parts(table.slot, held)[0].nbytes for held in range(3)]
    one = table.codec.encoded_nbytes(len(table.weights), "float32")
    assert sizes == [2 * one, one, 0]


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_come_as_they_are_and_changes_follow_again(wrong: float) -> None:
    table = Table()
    table.change(noise(0))
    table.change(torch.full((NUMEL,), wrong))
    assert not table.deltas.parts(table.slot, 0)[1]
    assert torch.equal(table.workers[1].isfinite(), table.weights.isfinite())
    table.change(noise(1))
    table.change(noise(2))
    assert table.deltas.parts(table.slot, 2)[1]
    assert torch.equal(table.told(0), table.workers[3])


def test_a_key_that_no_round_updates_stays_beside_one_whose_weights_are_not_finite() -> None:
    storage, sizes = Storage(), (100, 200)
    specs = [TensorSpec(name, (size,), "float32") for name, size in zip("ab", sizes, strict=True)]
    unit = storage.add(make_plan(specs, 1), 0, None)
    [slice_] = unit.plan.slices
    sent, slot = Deltas(make_codec({"type": "topk"}), storage, unit), unit.first
    frozen, other = (slice(one.start, one.start + one.numel) for one in slice_.segments)
    sent.follow(0)
    storage.padded[slot][frozen] += torch.arange(100.0)
    sent.record_round(())
    sent.follow(1)  # of which the codec leaves something out
    former = sent.weights[slot][frozen].clone()
    assert not torch.equal(former, storage.padded[slot][frozen])
    storage.padded[slot][other] = float("inf")
    sent.record_round((0,))
    sent.follow(2)
    assert torch.equal(sent.weights[slot][frozen], former)
    assert sent.weights[slot][other].isinf().all()


def test_weights_that_were_replaced_come_as_they_are() -> None:
    table = Table("topk")
    table.change(noise(0))
    table.change(noise(1))
    table.deltas.reset()
    table.change(noise(2))
    assert torch.equal(table.told(1)[:NUMEL], noise(2))
    table.change(noise(3))
    for held in range(3):
        assert torch.equal(table.told(held), table.workers[3])


def test_changes_that_are_together_longer_than_half_of_the_weights_are_forgotten() -> None:
    table = Table("int8")
    for seed in range(4):
        table.change(noise(seed))
    assert [table.deltas.parts(table.slot, held)[1] for held in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["ternary", "int8", "topk", "2bit"])
def test_who_lacks_the_last_change_is_sent_that_in_fewer_bytes_than_weights(kind: str, dtype: str) -> None:
    table = Table(kind, dtype)
    table.change(noise(0))
    table.change(noise(1))
    given, is_delta = table.deltas.parts(table.slot, 0)
    assert is_delta
    assert given.nbytes < 0.52 * table.weights.nbytes


def test_no_more_than_some_changes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "STEPS_KEPT", 2)
    table = Table("ternary")
    for seed in range(5):
        table.change(noise(seed))
    assert [table.deltas.parts(table.slot, held)[1] for held in range(5)] == [False, False, True, True, True]


def test_a_slot_that_is_left_has_no_changes_and_is_exact_for_those_who_got_it_since() -> None:
    table = Table()
    table.change(noise(0))
    table.deltas.leave([table.slot], 1)
    table.deltas.follow(1)
    assert table.slot not in table.deltas
    assert [table.deltas.has_exact(table.slot, held) for held in (0, 1, 2)] == [False, True, True]
    table.deltas.reset()
    table.deltas.follow(2)
    assert table.slot not in table.deltas


@pytest.mark.parametrize("given", [b"\x00", b"\xff" * 4 + b"\x80" * 64])
def test_bytes_that_are_no_changes_are_refused(given: Any) -> None:
    with pytest.raises(ProtocolError):
        add_delta_changes(
            make_codec({"type": "int8"}), torch.tensor(list(given), dtype=torch.uint8), torch.zeros(64)
        )


TABLE_NUMEL, LAMDA = 1 << 16, 0.5


class DelayedJob:
    """Two ranks of a table of ones; the first one has its first weights, and the second one all that it has made."""

    def __init__(self, max_memory: int = 0) -> None:
        self.engine = Engine(EngineConfig(max_memory=max_memory))
        self.clients = connected([self.engine], 2, mode=Mode("async"))
        optimizer = kvtrainer.optimizer.create("dcasgd", learning_rate=1.0, lamda=LAMDA)
        for client in self.clients:
            client.set_optimizer(checked_optimizer_spec(optimizer))
        self.tables = [
            client.register({"t": [TensorSpec("k", (TABLE_NUMEL,), "float32")]})[0] for client in self.clients
        ]
        self.outs = [{"float32": torch.zeros(TABLE_NUMEL)} for _ in self.tables]
        first = [{"float32": torch.ones(TABLE_NUMEL)}]
        rows = zip(self.tables, (first, None), self.outs, strict=True)
        play(self.clients, [Contribution([table], values, [out]) for table, values, out in rows])

    def step(self, rank: int, gradient: float) -> float:
        """Contribute, and read the weights, all of which are equal."""
        values = [{"float32": torch.full((TABLE_NUMEL,), gradient)}]
        rounds = self.clients[rank].rounds
        rounds.wait(rounds.start(Contribution([self.tables[rank]], values, [self.outs[rank]])))
        return self.outs[rank]["float32"][0].item()

    def look(self) -> None:
        self.clients[0].rounds.read(self.tables[0], {"float32": torch.empty(TABLE_NUMEL)})

    def pull(self) -> None:
        self.clients[0].rounds.pull([self.tables[0]], [self.outs[0]])

    @property
    def kept(self) -> list[list[int]]:
        """The versions of the weights that are kept for each rank."""
        reads = self.engine.namespaces["job"].tables[0].unit.reads
        return [[one.version for one in reads[rank]] for rank in range(2)]

    @property
    def claimed(self) -> int:
        return self.engine.budget.used


def compensated(weight: float, read: float, gradient: float) -> float:
    return weight - (gradient + LAMDA * gradient**2 * (weight - read))


def test_a_gradient_is_compensated_from_the_weights_that_its_commit_names() -> None:
    for was_pulled, read in ((False, 1.0), (True, 0.0)):
        job = DelayedJob()
        weight = job.step(1, 1.0)
        if was_pulled:
            job.pull()
        for _ in range(3):
            weight = job.step(1, 1.0)
        job.look()
        assert job.step(0, 0.5) == compensated(weight, read, 0.5)


def test_of_many_looks_no_more_than_two_are_kept_until_the_next_commit() -> None:
    job = DelayedJob()
    for _ in range(4):
        job.look()
        job.step(1, 1.0)
        job.look()
    assert job.kept == [[0, 3, 4], [4]]
    job.step(0, 1.0)
    assert job.kept == [[5], [4]]


def test_what_is_kept_of_pulls_is_claimed_once_and_given_back_with_the_namespace() -> None:
    job = DelayedJob()
    before, found = job.claimed, list[int]()
    for _ in range(3):
        for _ in range(3):
            job.step(1, 1.0)
            job.look()
        job.step(0, 1.0)
        found.append((job.claimed - before) // (4 * TABLE_NUMEL))
    assert found == [2, 2, 2]
    for client in job.clients:
        client.close()
    assert job.claimed == 0


@pytest.mark.parametrize("was_pulled", [False, True])
def test_without_memory_for_more_what_was_sent_last_counts(was_pulled: bool) -> None:
    job = DelayedJob(max_memory=DelayedJob().claimed)
    weight = [job.step(1, 1.0) for _ in range(3)][-1]
    job.step(0, 0.0)
    weight = [job.step(1, 1.0) for _ in range(3)][-1]
    if was_pulled:
        job.pull()
    assert job.step(0, 0.5) == compensated(weight, weight if was_pulled else weight + 3.0, 0.5)
