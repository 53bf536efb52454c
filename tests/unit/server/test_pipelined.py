"""Engines apply and answer a round slice by slice when all ranks have announced it, and take that back if need be.

Contributions are added to weights of zero, so the weights say what counts. The table has eight slices, each of which is
applied by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kvstore_server.engine.rounds import Mode
from kvstore_server.protocol import messages as m
from kvstore_server.protocol.frames import pack_control
from tests.sim.schedule import CautiousAdding
from tests.sim.workers import packed
from tests.support.engines import EngineJob
from tests.support.messages import contribution

SHAPE = (140_000,)
SLICES = range(8)
SAYS = 500
"""The number of a rank's announcement and commit."""


class Job(EngineJob):
    """Two ranks, of which each announces, gives and commits round 1 in whatever order."""

    def __init__(self, mode: Mode | None = None) -> None:
        super().__init__(2, mode or Mode("sync"), shape=SHAPE)

    def say(self, rank: int, *, flags: int = m.WANTS_WEIGHTS | m.DECLARES_INTENT, **said: float) -> None:
        """Announce, or with other flags commit, that all slices are given."""
        self.ask(rank, contribution([], 1, 0, 8, flags=flags, **said), SAYS)

    def commit_all(self, *ranks: int, **said: float) -> None:
        for rank in ranks:
            self.say(rank, flags=m.WANTS_WEIGHTS, **said)

    def give(self, rank: int, slices: Iterable[int], value: float = 1.0, generation: int = 0) -> None:
        rows = [(at, torch.full((self.slices[at].length,), value)) for at in slices]
        self.ask(rank, contribution(rows, 1, generation=generation))

    def came(self, rank: int) -> list[tuple[list[int], set[int], set[float]]]:
        """The slots, versions and values of each message of weights that a rank was sent for its round."""
        bodies = [body for body in self.replies.get((rank, SAYS), []) if isinstance(body, m.Weights)]
        return [
            (
                body.parts[:, m.PART_SLOT].tolist(),
                set(body.parts[:, m.PART_VERSION].tolist()),
                set(torch.cat([one[:8] for one in body.payloads]).tolist()),
            )
            for body in bodies
        ]

    def half(self, *ranks: int) -> None:
        """Have these ranks announce the round and give ones to half of the slices."""
        for rank in ranks:
            self.say(rank)
        for rank in ranks:
            self.give(rank, SLICES[:4])

    def weights(self, rank: int = 0) -> list[set[float]]:
        """The values of each slice as a rank reads them."""
        [body] = self.pull(rank)
        assert isinstance(body, m.Weights)
        return [set(one[:8].tolist()) for one in body.payloads]


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_rank_that_announces_that_it_gives_nothing_keeps_no_slice_waiting(job: Job) -> None:
    job.say(0)
    job.ask(1, contribution([], 1, 0, 0, flags=m.DECLARES_INTENT), SAYS)
    job.give(0, SLICES[:4])
    assert job.came(0) == [([0, 1, 2, 3], {1}, {1.0})]
    job.give(0, SLICES[4:])
    job.commit_all(0)
    assert [type(body) for body in job.ask(1, contribution([], 1, 0, 0), SAYS)][-1] is m.Done
    assert job.weights() == [{1.0}] * 8
    assert job.came(1) == []


def test_the_last_slices_come_with_the_commits_and_no_slice_comes_twice(job: Job) -> None:
    job.half(0, 1)
    job.give(0, SLICES[4:])
    job.give(1, SLICES[4:])
    assert job.came(0)[1:] == [([4, 5, 6], {1}, {2.0})]
    job.commit_all(0, 1)
    assert job.came(0)[2:] == job.came(1)[2:] == [([7], {1}, {2.0})]
    assert job.weights() == [{2.0}] * 8


def test_a_rank_that_wants_no_weights_is_only_told_that_the_round_is_over(job: Job) -> None:
    job.say(0, flags=m.DECLARES_INTENT)
    job.say(1)
    for rank in range(2):
        job.give(rank, SLICES)
    job.say(0, flags=0)
    job.commit_all(1)
    assert [type(body) for body in job.replies[0, SAYS]] == [m.Done]
    assert job.weights() == [{2.0}] * 8


def test_a_round_ends_at_its_deadline_without_a_trace_and_its_reader_is_answered(job: Job) -> None:
    job.half(0, 1)
    job.give(0, SLICES[4:])
    job.commit_all(0, timeout=5.0)
    job.ask(1, m.Pull((0,), 60.0), 900)
    job.tick(6.0, alive=[0, 1])
    assert [type(body) for body in job.replies[0, SAYS]] == [m.Weights, m.Failed]
    job.tick()
    assert isinstance(job.replies[1, 900][-1], m.Weights)
    assert job.weights() == [{0.0}] * 8


def test_nobody_reads_a_table_of_which_some_slices_are_of_the_next_version(job: Job) -> None:
    job.half(0, 1)
    job.ask(1, m.Pull((0,), 30.0), 900)
    assert [type(body) for body in job.replies[1, 900]] == [m.Pending]
    for rank in range(2):
        job.give(rank, SLICES[4:])
    job.commit_all(0, 1)
    [_, read] = job.replies[1, 900]
    assert isinstance(read, m.Weights)
    assert {one[0].item() for one in read.payloads} == {2.0}


EXPECTS = m.WANTS_WEIGHTS | m.DECLARES_INTENT | m.TENTATIVE


def expecting(job: Job) -> None:
    """Both ranks say what is to be expected, and give half of the slices, which are applied."""
    for rank in range(2):
        job.say(rank, flags=EXPECTS)
    for rank in range(2):
        job.give(rank, SLICES[:4])


@pytest.mark.parametrize("request_", [m.Pull((0,), 30.0), m.GetState(0, 0)])
def test_who_asks_before_it_knows_what_it_gives_is_answered_at_once(
    job: Job, request_: m.RequestBody
) -> None:
    expecting(job)
    [answer] = job.ask(1, request_, 900)
    assert not isinstance(answer, m.Pending | m.Failed)
    for rank in range(2):
        job.give(rank, SLICES[4:])
    assert len(job.came(0)) == 1
    assert job.weights() == [{0.0}] * 8
    job.commit_all(0, 1)
    assert job.weights() == [{2.0}] * 8


@pytest.mark.parametrize("row", [(8, 1, 0, 0), (-1, 1, 0, 0), (0, 1, 0, 4)])
def test_an_announcement_that_names_no_slice_of_its_table_or_brings_bytes_is_refused(
    job: Job, row: tuple[int, int, int, int]
) -> None:
    commits = m.matrix([(0, 1, 8, 0, -1, EXPECTS)], m.COMMIT_WORDS)
    [told] = job.ask(0, m.Contribute(m.matrix([row], m.PUSH_WORDS), (), commits))
    assert isinstance(told, m.Failed)
    assert told.code == "ProtocolError"


@pytest.mark.parametrize("said", [{"hold": 2.0}, {"flags": m.WANTS_WEIGHTS | m.DECLARES_INTENT | m.VETOES}])
def test_a_round_that_is_held_or_vetoed_is_not_pipelined(job: Job, said: dict[str, float]) -> None:
    for rank in range(2):
        job.say(rank, **said)  # type: ignore[arg-type]
        job.give(rank, SLICES)
    assert not job.came(0)


def test_a_round_whose_optimizer_may_raise_is_not_pipelined(job: Job) -> None:
    for rank in range(2):
        job.ask(rank, m.SetOptimizer(packed(CautiousAdding.name)))
    job.half(0, 1)
    assert not job.came(0)


def test_announcements_of_ranks_that_count_one_by_one_have_no_effect() -> None:
    job = Job(Mode("async"))
    job.half(0, 1)
    assert not job.came(0)
    job.give(0, SLICES[4:])
    job.commit_all(0)
    assert job.came(0) == [([*SLICES], {1}, {1.0})]


def test_an_optimizer_that_is_set_meanwhile_is_used_for_the_whole_round(job: Job) -> None:
    job.half(0, 1)
    for rank in range(2):
        job.ask(rank, m.SetOptimizer(packed(CautiousAdding.name)))
    assert job.weights() == [{0.0}] * 8


class Parts(Job):
    """The same, where ranks give slice 0 in parts of 16 KiB; its last one is shorter."""

    form = b""
    """How slice 0 is sent."""

    def part(
        self, rank: int, number: int, value: float = 1.0, generation: int = 0, round_: int = 1, count: int = 1
    ) -> list[m.ReplyBody]:
        """Give one part of slice 0, by its number, or several as one."""
        begin, size = number * PART, 4 * self.slices[0].length
        values = torch.full((min(count * PART, size - begin) // 4,), value)
        end = begin + values.nbytes
        if self.form:
            values = values[: self.slices[0].used - begin // 4]
            end, values = begin + 4 * len(values), values.to(torch.bfloat16)
        pushes = m.matrix([(end // 4 << m.PART, round_, generation, values.nbytes)], m.PUSH_WORDS)
        return self.ask(rank, m.Contribute(pushes, (values,), m.matrix((), m.COMMIT_WORDS), self.form))

    def give(self, rank: int, slices: Iterable[int], value: float = 1.0, generation: int = 0) -> None:
        super().give(rank, [at for at in slices if at or not self.form], value, generation)
        if self.form and 0 in slices:
            values = torch.full((self.slices[0].used,), value, dtype=torch.bfloat16)
            pushes = m.matrix([(0, 1, generation, values.nbytes)], m.PUSH_WORDS)
            data = values.view(torch.uint8)
            self.ask(rank, m.Contribute(pushes, (data,), m.matrix((), m.COMMIT_WORDS), self.form))

    def begin(self) -> None:
        """Have both ranks announce the round, and give half of slice 0."""
        for rank in range(2):
            self.say(rank)
            self.part(rank, 0)
            self.part(rank, 1)

    def end(self, *last: int) -> None:
        """Have both ranks give the rest, those of `last` all of slice 0 at once, and commit."""
        for rank in range(2):
            for number in () if rank in last else range(2, NUM_PARTS):
                self.part(rank, number)
            self.give(rank, SLICES[1:] if rank not in last else SLICES)
        self.commit_all(0, 1)

    def ends(self, rank: int) -> list[int]:
        """Where the parts end in slice 0 of which a rank has been told new weights."""
        bodies = [body for body in self.replies.get((rank, SAYS), []) if isinstance(body, m.Weights)]
        places = [m.unpack_slot(word) for body in bodies for word in body.parts[:, m.PART_SLOT].tolist()]
        return [4 * end for slot, end in places if end and not slot]

    def check(self, value: float) -> None:
        """Compare all weights with one number."""
        [body] = self.pull(0)
        assert isinstance(body, m.Weights)
        assert {number for one in body.payloads for number in set(one[:-16].tolist())} == {value}


PART, NUM_PARTS = 16 << 10, 5


@pytest.fixture(params=["plain", "bf16"])
def parts(request: pytest.FixtureRequest) -> Parts:
    made = Parts()
    made.form = pack_control({"type": "bf16"}) if request.param == "bf16" else b""
    return made


def test_a_part_that_all_ranks_have_given_is_answered_while_the_others_are_on_their_way(parts: Parts) -> None:
    parts.say(0)
    parts.say(1)
    for number in range(3):
        parts.part(0, number)
    assert not parts.ends(0)
    parts.part(1, 0)
    parts.part(1, 1)
    assert parts.ends(0) == parts.ends(1) == [PART, 2 * PART]
    assert {
        float(body.payloads[0][-1]) for body in parts.replies[0, SAYS] if isinstance(body, m.Weights)
    } == {2.0}
    parts.end()
    parts.check(2.0)


def test_parts_that_come_before_the_last_announcement_are_answered_with_it(parts: Parts) -> None:
    parts.say(0)
    for rank in range(2):
        parts.part(rank, 0)
    parts.say(1)
    assert parts.ends(0) == [PART]


def test_other_bytes_under_the_name_of_a_part_are_counted_and_have_no_effect(parts: Parts) -> None:
    parts.begin()
    parts.part(0, 1, 7.0)
    parts.end()
    parts.check(2.0)
    assert parts.engine.namespaces["j"].rounds.mismatches(0) == 1


def test_parts_that_ranks_have_cut_otherwise_are_summed_element_by_element(parts: Parts) -> None:
    for rank in range(2):
        parts.say(rank)
    parts.part(1, 0, 10.0)
    for number in range(3):
        parts.part(0, number, 1.0 + number)
    parts.part(1, 1, 20.0, count=2)
    assert parts.ends(0) == [PART, 3 * PART]
    bodies = [body for body in parts.replies[0, SAYS] if isinstance(body, m.Weights)]
    found = torch.cat([body.payloads[0] for body in bodies])
    assert found.view(3, -1).unique(dim=1).tolist() == [[11.0], [22.0], [23.0]]


def test_the_last_part_of_all_waits_for_the_commits(parts: Parts) -> None:
    parts.begin()
    for rank in range(2):
        parts.give(rank, SLICES[1:])
        for number in range(2, NUM_PARTS):
            parts.part(rank, number)
    size = 4 * parts.slices[0].length
    assert parts.ends(0)[-1] == 4 * PART
    parts.commit_all(0, 1)
    assert parts.ends(0)[-1] == size
    parts.check(2.0)


def test_parts_of_another_generation_than_was_announced_do_not_count(parts: Parts) -> None:
    for rank in range(2):
        parts.say(rank)
    parts.give(0, SLICES)
    parts.part(0, 0, 5.0, generation=1)
    parts.part(1, 0)
    parts.part(1, 1)
    assert parts.ends(0) == [PART, 2 * PART]
    bodies = [body for body in parts.replies[0, SAYS] if isinstance(body, m.Weights)]
    assert {number for body in bodies for number in body.payloads[0].tolist()} == {2.0}


def test_a_rank_that_wants_rounded_weights_gets_parts_of_them(parts: Parts) -> None:
    parts.say(0)
    parts.say(1, flags=m.WANTS_WEIGHTS | m.WANTS_HALF | m.DECLARES_INTENT)
    for rank in range(2):
        parts.part(rank, 0)
        parts.part(rank, 1)
    [first, second] = [body for body in parts.replies[1, SAYS] if isinstance(body, m.Weights)]
    assert parts.ends(1) == [PART, 2 * PART]
    assert first.parts[0, m.PART_KIND] == second.parts[0, m.PART_KIND] == m.HALF
    assert first.payloads[0].dtype == torch.bfloat16


@pytest.mark.parametrize("word", [(99, PART // 4), (0, 1 << 30), (0, PART // 8)])
def test_a_part_that_no_slice_has_is_refused(parts: Parts, word: tuple[int, int]) -> None:
    slot, end = word
    pushes = m.matrix([(slot | end << m.PART, 1, 0, PART)], m.PUSH_WORDS)
    body = m.Contribute(pushes, (torch.zeros(PART, dtype=torch.uint8),), m.matrix((), m.COMMIT_WORDS))
    [failed] = parts.ask(0, body)
    assert isinstance(failed, m.Failed)
    assert failed.code == "ProtocolError"


@pytest.mark.parametrize("form", [{"type": "int8"}, {"type": "rows"}])
def test_what_is_not_encoded_element_by_element_comes_in_no_parts(form: dict[str, str]) -> None:
    parts = Parts()
    parts.form = pack_control(form)
    [failed] = parts.part(0, 0)
    assert isinstance(failed, m.Failed)
    assert failed.code == "ProtocolError"


def test_a_part_in_another_form_than_the_one_before_counts_as_other_bytes() -> None:
    parts = Parts()
    parts.say(0)
    parts.part(0, 0)
    parts.form = pack_control({"type": "bf16"})
    parts.part(0, 1)
    parts.form = b""
    parts.part(0, 1)
    assert parts.engine.namespaces["j"].rounds.mismatches(0) == 1
    for number in range(2):
        parts.part(1, number)
    parts.say(1)
    assert parts.ends(0) == [2 * PART]


def test_ranks_that_count_one_by_one_give_no_parts() -> None:
    [failed] = Parts(Mode("async")).part(0, 0)
    assert isinstance(failed, m.Failed)
    assert failed.code == "ProtocolError"


def test_a_table_without_room_for_its_copy_is_applied_when_all_have_committed(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    budget, size = job.engine.budget, 4 * sum(slice_.length for slice_ in job.slices)
    budget._limit = budget.used + size - 1
    job.half(0, 1)
    assert not job.came(0)
    assert sum("--max-memory" in record.getMessage() for record in caplog.records) == 1
    for rank in range(2):
        job.give(rank, SLICES[4:])
    job.commit_all(0, 1)
    assert job.weights() == [{2.0}] * 8


def test_the_copy_of_a_table_is_claimed_once_and_given_back_with_its_namespace(job: Job) -> None:
    before, size = job.engine.budget.used, 4 * sum(slice_.length for slice_ in job.slices)
    job.half(0, 1)
    assert job.engine.budget.used == before + size
    for rank in range(2):
        job.give(rank, SLICES[4:])
    job.commit_all(0, 1)
    assert job.engine.budget.used == before + size
    for rank in range(2):
        job.leave(rank, is_clean=True)
    job.tick(1.0)
    assert job.engine.budget.used == 0
