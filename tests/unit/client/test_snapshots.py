"""To which round a job goes back: a function of what its servers say."""

from __future__ import annotations

import pytest

from kvstore_server.engine.snapshots import SnapshotPeriod
from kvstore_server.errors import ProtocolError, ServerLostState
from kvstore_server.protocol import messages as m
from kvtrainer.client.snapshots import OfferedSnapshot, SnapshotChoice, SnapshotOffer, choose_cut, read_offer

BOTH = frozenset({0, 1})


def offer(round_: int, *cuts: int, holders: frozenset[int] = BOTH, every: int = 50) -> SnapshotOffer:
    stored = [OfferedSnapshot(at, BOTH, at // every) for at in cuts]
    due = max(round_ - 1, 0) // every if every else 0
    own = holders if round_ >= 0 else frozenset[int]()
    return SnapshotOffer(round_, own, stored, 0, 0, SnapshotPeriod(every), due)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([offer(-1), offer(-1)], None),  # the first start
        ([offer(0), offer(-1)], None),  # another worker has just registered its tables
        ([offer(120, 50, 100), offer(121, 50, 100)], None),  # nothing is lost
        ([offer(7, holders=frozenset({0})), offer(-1)], None),  # a server without tables has lost none
        ([offer(-1, 50, 100), offer(-1, 50, 100)], 100),
        ([offer(-1, 50, 100, 150), offer(-1, 50, 100)], 100),
        ([offer(120, 50, 100), offer(-1, 50, 100)], 100),
        ([offer(120, 100), offer(-1, 50, 100)], 100),
        ([offer(30), offer(-1)], 0),  # before the first snapshot
        ([offer(-1, 50), offer(-1)], 0),
    ],
)
def test_a_job_goes_back_to_the_latest_round_that_all_servers_have_if_one_has_lost_its_state(
    offers: list[SnapshotOffer], expected: int | None
) -> None:
    found = choose_cut(offers)
    assert (None if found is None else (found.cut.round, found.generation)) == (
        None if expected is None else (expected, 1)
    )


def test_a_server_that_takes_no_snapshots_is_named() -> None:
    with pytest.raises(ServerLostState, match=r"servers 1 take none"):
        choose_cut([offer(-1, 50), offer(3, every=0)])


@pytest.mark.parametrize(("due", "is_young"), [(1, True), (2, False)])
def test_a_job_with_a_period_in_seconds_begins_again_only_before_its_second_snapshot(
    due: int, is_young: bool
) -> None:
    offers = [offer(500)._replace(period=SnapshotPeriod(0, 30.0), due=due), offer(-1)]
    if is_young:
        assert choose_cut(offers) == SnapshotChoice(OfferedSnapshot(0, frozenset()), 1)
        return
    with pytest.raises(ServerLostState):
        choose_cut(offers)


def test_a_job_that_has_begun_with_what_was_saved_goes_back_to_that_before_its_first_snapshot() -> None:
    loaded = offer(123)._replace(generation=1, restored=100, due=0, tag="best", save="5")
    expected = SnapshotChoice(OfferedSnapshot(100, BOTH), 2, "best", "5")
    assert choose_cut([loaded, offer(-1)]) == expected
    # One was lost before it has gone back.
    young = loaded._replace(round=100)
    assert choose_cut([young, offer(-1, 50)]) == expected._replace(generation=1)


def returned(round_: int, restored: int, *cuts: int, times: int = 1) -> SnapshotOffer:
    return offer(round_, *cuts)._replace(generation=times, restored=restored)


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([returned(100, 100, 50, 100), returned(104, 100, 50, 100)], None),
        # One was killed before it could go back, and has the state of before.
        (
            [returned(100, 100, 50, 100), offer(107, 50, 100)],
            SnapshotChoice(OfferedSnapshot(100, BOTH, 2), 1),
        ),
        (
            [returned(100, 100, 50, 100), offer(100, 50, 100)],
            SnapshotChoice(OfferedSnapshot(100, BOTH, 2), 1),
        ),
        ([returned(-1, 0), offer(30)], SnapshotChoice(OfferedSnapshot(0, frozenset()), 1)),
        # It has lost its state after they went on.
        ([returned(120, 50, 50, 100), offer(-1, 50, 100)], SnapshotChoice(OfferedSnapshot(100, BOTH, 2), 2)),
        # The snapshot is damaged there.
        ([returned(100, 100, 50, 100), offer(107, 50)], SnapshotChoice(OfferedSnapshot(50, BOTH), 2)),
    ],
)
def test_a_server_that_was_killed_before_it_went_back_follows_the_others(
    offers: list[SnapshotOffer], expected: SnapshotChoice | None
) -> None:
    for some in (offers, offers[::-1]):
        assert choose_cut(some) == expected


@pytest.mark.parametrize(
    "offers",
    [
        [offer(-1, 50, 100), offer(-1)],
        [offer(-1, 150, 200), offer(-1, 50, 100)],
        [offer(400), offer(-1)],
        [offer(30, every=0), offer(-1, every=0)],
    ],
)
def test_more_than_the_rounds_before_the_first_snapshot_is_not_given_up(offers: list[SnapshotOffer]) -> None:
    with pytest.raises(ServerLostState, match="server"):
        choose_cut(offers)


def test_a_server_without_tables_that_went_back_alone_goes_back_again_with_the_others() -> None:
    """The one with the tables could not read its snapshot after the other one had gone back."""
    cut = OfferedSnapshot(50, frozenset({1}))
    alone = returned(-1, 100)._replace(holders=frozenset())
    assert choose_cut([alone, offer(-1)._replace(cuts=[cut])]) == SnapshotChoice(cut, 2)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        # Another worker has told the first server, and has yet to tell the one with the tables.
        ((50,), (50, 1)),
        # Since then the job has reached another snapshot, and has lost its server again.
        ((50, 100), (100, 2)),
    ],
)
def test_workers_that_come_together_decide_alike_if_a_server_without_tables_is_told_first(
    rounds: tuple[int, ...], expected: tuple[int, int]
) -> None:
    told = returned(-1, 50)._replace(holders=frozenset())
    cuts = [OfferedSnapshot(at, frozenset({1}), at // 50) for at in rounds]
    found = choose_cut([told, offer(-1)._replace(cuts=cuts)])
    assert found is not None
    assert (found.cut.round, found.generation) == expected


def test_workers_that_come_together_begin_again_once_if_a_server_without_tables_is_told_first() -> None:
    told = returned(-1, 0)._replace(holders=frozenset())
    others = [offer(3, holders=frozenset({1, 2})), offer(-1)]
    assert choose_cut([told, *others]) == SnapshotChoice(OfferedSnapshot(0, frozenset()), 1)


@pytest.mark.parametrize(("round_", "is_followed"), [(-1, True), (0, False)])
def test_a_worker_that_comes_while_another_one_tells_the_servers_to_begin_again_tells_the_rest(
    round_: int, is_followed: bool
) -> None:
    told = returned(round_, 0)
    expected = SnapshotChoice(OfferedSnapshot(0, frozenset()), 1) if is_followed else None
    assert choose_cut([told, offer(0)]) == expected


@pytest.mark.parametrize("answer", [m.Status({"round": "many"}), m.Status({}), m.Pending((), "")])
def test_an_answer_that_is_no_offer_is_a_protocol_error(answer: m.ReplyBody) -> None:
    with pytest.raises(ProtocolError):
        read_offer(answer)
