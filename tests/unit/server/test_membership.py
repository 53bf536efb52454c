"""Who takes part, who is gone, and the barrier: one rule in each test. The clock is an argument."""

from __future__ import annotations

import pytest

from kvstore_server.engine.membership import Membership, RankSession
from kvstore_server.engine.rounds import Waiter
from kvstore_server.errors import (
    ConfigurationError,
    KVStoreError,
    ProtocolError,
    ServerLostState,
    ServerStoppingError,
    ServerUnreachableError,
    WorkerLostError,
    describe,
)
from kvstore_server.protocol.messages import Gather, Hello

DEAD_AFTER = 20.0


def session(
    rank: int, token: int = 9, now: float = 0.0, *, num_workers: int = 3, address: str = ""
) -> RankSession:
    hello = Hello("job", rank, num_workers, 0, 1, "", address or f"host{rank}:1{rank}", b"", ())
    return RankSession(token, hello, b"peer", now)


def joined(*ranks: int, now: float = 0.0) -> Membership:
    """Three workers, of which these have joined."""
    members = Membership("job", 3)
    for rank in ranks:
        members.join(session(rank, token=rank + 1, now=now))
    return members


def enter(
    members: Membership, rank: int, sequence: int = 0, now: float = 0.0, data: bytes = b""
) -> list[tuple[bytes, int]]:
    """Rank `rank` comes to a barrier, under request number 10 + rank, with 60 s of patience; who is released."""
    waiter = Waiter(b"p%d" % rank, 10 + rank)
    released = members.enter_barrier(rank, Gather(sequence, 60.0, data), waiter, now)
    return [one for one, _ in released]


def test_another_number_of_workers_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigurationError, match=r"rank 1 \(host1:11\).* 4 workers.* 3;"):
        joined(0).join(session(1, num_workers=4, token=2, now=0.0))


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank {rank} is not in 0 … 2"):
        joined().join(session(rank, token=1, now=0.0))


def test_the_error_of_a_departed_rank_names_it_and_its_reason() -> None:
    members = joined(0, 1)
    members.leave(1, "ValueError: nan", is_clean=False)
    error = members.lost_error([1], "round 4 of 'w'", 1.0, DEAD_AFTER)
    assert isinstance(error, WorkerLostError)
    assert str(error) == (
        "round 4 of 'w' cannot complete: rank 1 has left (ValueError: nan); "
        "restart the job from its last saved states"
    )


@pytest.mark.parametrize("kind", [ServerUnreachableError, ServerLostState, ServerStoppingError])
def test_the_error_of_a_rank_that_has_left_because_it_lost_a_server_is_that_of_the_server(
    kind: type[KVStoreError],
) -> None:
    members = joined(0, 1)
    members.leave(1, describe(kind("server 2 has not answered")), is_clean=False)
    error = members.lost_error([1], "round 4 of 'w'", 1.0, DEAD_AFTER)
    assert type(error) is kind
    assert "server 2 has not answered" in str(error)


def test_only_where_a_rank_was_done_before_the_others_its_error_speaks_of_joining() -> None:
    members = joined(1, 2)
    members.refuse(0, "it was refused")
    members.leave(1, "nan", is_clean=False)
    members.leave(2, "it closed its kvstore", is_clean=True)
    texts = {rank: str(members.lost_error([rank], "round 4", 1.0, DEAD_AFTER)) for rank in (0, 1, 2)}
    assert {rank: "trainer.join()" in text for rank, text in texts.items()} == {0: False, 1: False, 2: True}
    members.join(session(2, token=9, now=1.0))
    members.leave(2, "nan", is_clean=False)
    assert "trainer.join()" not in str(members.lost_error([2], "round 4", 1.0, DEAD_AFTER))


def test_the_error_of_a_silent_rank_says_where_it_runs_and_when_it_was_heard() -> None:
    error = joined(0, 1).lost_error([1], "round 4 of 'w'", 31.25, DEAD_AFTER)
    assert isinstance(error, WorkerLostError)
    for value in (
        "round 4 of 'w'",
        "rank 1 (host1:11)",
        "31.2 s",
        "20 s",
        "--dead-after",
        "KVSTORE_DEAD_AFTER",
    ):
        assert value in str(error)


def test_a_barrier_ahead_of_the_open_one_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"rank 1.*barrier 2.*barrier 0"):
        enter(joined(0, 1), 1, sequence=2)


def test_a_failed_barrier_can_be_tried_again() -> None:
    members = joined(0, 1, 2)
    enter(members, 0)
    assert members.absent_from_barrier() == [1, 2]
    members.take_barrier()
    for member in members.members.values():
        member.last_heard = 61.0
    # Who waited in vain counts no more before it comes again.
    assert [enter(members, rank, now=61.0) == [] for rank in (1, 2, 0)] == [True, True, False]


def test_whoever_reads_gets_what_all_gave_in_rank_order_also_if_it_asks_again() -> None:
    members, waiters = joined(0, 1, 2), [Waiter(b"p%d" % rank, 10 + rank) for rank in range(3)]
    given = [Gather(0, 60.0, b"of %d" % rank, reads=rank != 2) for rank in range(3)]
    for rank in (2, 0):
        assert not members.enter_barrier(rank, given[rank], waiters[rank], 0.0)
    everything = (b"of 0", b"of 1", b"of 2")
    released = members.enter_barrier(1, given[1], waiters[1], 0.0)
    assert dict(released) == {waiters[0]: everything, waiters[1]: everything, waiters[2]: ()}
    for rank, parts in ((1, everything), (2, ())):
        again = members.enter_barrier(rank, given[rank], waiters[rank], 0.0)
        assert again == [(waiters[rank], parts)]
