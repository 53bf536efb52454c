"""What a server makes of the processes that it sees: a dead one, one that runs and says nothing, a stopped one."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.processes import LAST_WORDS, ProcessState
from kvstore_server.protocol import messages as m

DEAD_AFTER = 20.0
PATIENCE = 600.0
KILLED = "was killed by signal 9 (SIGKILL)"


class Seen:
    """Processes as the server sees them, of rank 0 and 1."""

    def __init__(self) -> None:
        self.states: dict[tuple[bytes, int], ProcessState] = {}
        self.how = ""

    def ended(self) -> dict[tuple[bytes, int], str]:
        return {key: self.how for key, state in self.states.items() if state is ProcessState.ENDED}

    def state(self, key: tuple[bytes, int]) -> ProcessState:
        return self.states.get(key, ProcessState.UNKNOWN)


class Place:
    """An engine with two workers; rank 0 gives signs of life, rank 1 does what the test says."""

    def __init__(self, mode: str = "sync", num_workers: int = 2) -> None:
        self.engine = Engine(EngineConfig(dead_after=DEAD_AFTER))
        self.now = 0.0
        self.seen = Seen()
        self.keys = []
        for rank in range(num_workers):
            peer = b"p%d" % rank
            hello = m.Hello("job", rank, num_workers, 0, 1, "", f"h{rank}:1{rank}", peer, (peer,), mode)
            [welcome] = self.engine.handle(peer, m.Request(0, 0, 1, hello), 0.0)
            assert isinstance(welcome.reply.body, m.Welcome)
            self.keys.append((peer, welcome.reply.body.session))

    def says(self, rank: int, body: m.RequestBody) -> list[m.Outgoing]:
        peer, token = self.keys[rank]
        return self.engine.handle(peer, m.Request(1, token, 5, body), self.now)

    def waits(self) -> None:
        """Have rank 0 come to a barrier."""
        self.says(0, m.Gather(0, PATIENCE))

    def goes_on(self, until: float) -> list[m.Failed]:
        """Let time pass, in which rank 0 alone is heard; what anybody is told."""
        told: list[Any] = []
        while self.now < until and not told:
            self.now = min(self.now + 0.1, until)
            self.says(0, m.Heartbeat())
            self.engine.look_at(self.seen, self.now)  # type: ignore[arg-type]
            told += [out.reply.body for out in self.engine.tick(self.now)]
        return told


def test_a_process_that_has_ended_is_told_to_those_who_wait_for_it_once_its_last_words_would_have_come() -> (
    None
):
    place = Place()
    place.waits()
    place.seen.states[place.keys[1]], place.seen.how = ProcessState.ENDED, KILLED
    [failed] = place.goes_on(DEAD_AFTER)
    assert failed.code == "WorkerLostError"
    assert f"the process of rank 1 (h1:11) {KILLED}" in failed.text
    assert LAST_WORDS <= place.now <= LAST_WORDS + 0.21


def test_a_death_in_a_namespace_that_is_looked_at_rarely_is_told_as_soon() -> None:
    place = Place()
    place.waits()
    place.engine.namespaces["job"].next_look = DEAD_AFTER
    place.seen.states[place.keys[1]] = ProcessState.ENDED
    [failed] = place.goes_on(PATIENCE)
    assert failed.code == "WorkerLostError"
    assert place.now <= LAST_WORDS + 0.31


def test_what_ended_it_may_become_known_later_than_that_it_has_ended() -> None:
    place = Place()
    place.waits()
    place.seen.states[place.keys[1]] = ProcessState.ENDED
    assert place.goes_on(0.1) == []
    place.seen.how = KILLED
    [failed] = place.goes_on(DEAD_AFTER)
    assert KILLED in failed.text


def test_what_it_has_said_before_it_ended_counts_although_it_comes_later() -> None:
    place = Place()
    place.seen.states[place.keys[1]] = ProcessState.ENDED
    assert place.goes_on(0.2) == []
    assert place.says(1, m.Gather(0, PATIENCE))
    out = place.says(0, m.Gather(0, PATIENCE))
    assert {one.reply.body for one in out} == {m.Gathered((b"", b""))}
    place.says(1, m.Leave("ValueError: sample 17", False))
    place.now += DEAD_AFTER
    place.says(0, m.Gather(1, PATIENCE))
    [failed] = place.goes_on(place.now + 1.0)
    assert "rank 1 has left (ValueError: sample 17)" in failed.text


def test_a_dead_worker_is_counted_and_shown_as_failed() -> None:
    place = Place()
    place.seen.states[place.keys[1]], place.seen.how = ProcessState.ENDED, KILLED
    place.goes_on(1.0)
    [stats] = place.says(0, m.Stats())
    assert isinstance(stats.reply.body, m.Status)
    assert stats.reply.body.values["num_dead"] == 1
    [facts] = place.says(0, m.GetStatus())
    assert isinstance(facts.reply.body, m.Status)
    [job] = facts.reply.body.values["jobs"]
    assert [(one["state"], KILLED in one["why"]) for one in job["workers"]] == [
        ("here", False),
        ("failed", True),
    ]


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_where_a_successor_may_go_on_in_its_place_a_dead_worker_is_waited_for_as_one_that_is_silent(
    mode: str,
) -> None:
    place = Place(mode)
    place.waits()
    place.seen.states[place.keys[1]], place.seen.how = ProcessState.ENDED, KILLED
    [failed] = place.goes_on(3 * DEAD_AFTER)
    assert KILLED in failed.text
    assert DEAD_AFTER <= place.now <= DEAD_AFTER + 0.3


def test_a_process_that_runs_is_waited_for_until_the_deadline_of_the_wait_however_silent_it_is() -> None:
    place = Place()
    place.waits()
    place.seen.states[place.keys[1]] = ProcessState.RUNS
    [failed] = place.goes_on(2 * PATIENCE)
    assert place.now == pytest.approx(PATIENCE, abs=0.2)
    assert failed.code == "DeadlineError"
    assert "but its process runs" in failed.text


def test_a_namespace_without_values_is_kept_while_a_process_of_it_runs() -> None:
    place = Place(num_workers=1)
    place.seen.states[place.keys[0]] = ProcessState.RUNS
    for at in range(int(10 * DEAD_AFTER)):
        place.engine.look_at(place.seen, float(at))  # type: ignore[arg-type]
        place.engine.tick(float(at))
    assert list(place.engine.namespaces) == ["job"]


def test_a_stopped_process_is_lost_by_its_silence_which_begins_when_it_was_last_seen_to_run() -> None:
    place = Place()
    place.waits()
    place.seen.states[place.keys[1]] = ProcessState.RUNS
    assert place.goes_on(3 * DEAD_AFTER) == []
    place.seen.states[place.keys[1]] = ProcessState.STOPPED
    [failed] = place.goes_on(2 * PATIENCE)
    assert failed.code == "WorkerLostError"
    assert "and its process is stopped" in failed.text
    assert 3.4 * DEAD_AFTER <= place.now <= 4.1 * DEAD_AFTER


def test_a_process_that_cannot_be_seen_is_lost_by_its_silence_and_the_error_says_what_else_it_may_be() -> (
    None
):
    place = Place()
    place.waits()
    [failed] = place.goes_on(2 * PATIENCE)
    assert DEAD_AFTER <= place.now <= DEAD_AFTER + 0.3
    assert "interpreter lock (GIL), raise KVSTORE_DEAD_AFTER" in failed.text


def test_nobody_is_looked_at_who_is_heard() -> None:
    place = Place()
    place.seen.states[place.keys[1]] = ProcessState.STOPPED
    place.now = 0.4 * DEAD_AFTER
    place.engine.look_at(place.seen, place.now)  # type: ignore[arg-type]
    place.now = 0.9 * DEAD_AFTER
    place.engine.look_at(place.seen, place.now)  # type: ignore[arg-type]
    place.says(1, m.Heartbeat())
    place.engine.look_at(place.seen, place.now)  # type: ignore[arg-type]
    [pending] = place.says(0, m.Gather(0, PATIENCE))
    assert isinstance(pending.reply.body, m.Pending)
    assert pending.reply.body.why.endswith("rank 1 (h1:11) was last heard 0.0 s ago")
