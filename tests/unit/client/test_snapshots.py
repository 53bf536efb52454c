"""To which round a job goes back: a function of what its servers say."""

from __future__ import annotations

import pytest

from kvstore_server.errors import ProtocolError, ServerLostState
from kvtrainer.client.snapshots import ServerOffer, StoredCut, choose_cut, read_offer

BOTH = frozenset({0, 1})


def offer(round_: int, *cuts: int, holders: frozenset[int] = BOTH, every: int = 50) -> ServerOffer:
    return ServerOffer(
        round_, holders if round_ >= 0 else frozenset(), [StoredCut(c, BOTH) for c in cuts], 0, 0, every
    )


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
    offers: list[ServerOffer], expected: int | None
) -> None:
    found = choose_cut(offers)
    assert (None if found is None else found.round) == expected


@pytest.mark.parametrize(
    "offers",
    [
        [offer(-1, 50, 100), offer(-1)],
        [offer(-1, 150, 200), offer(-1, 50, 100)],
        [offer(400), offer(-1)],
        [offer(30, every=0), offer(-1, every=0)],
    ],
)
def test_more_than_the_rounds_before_the_first_snapshot_is_not_given_up(offers: list[ServerOffer]) -> None:
    with pytest.raises(ServerLostState, match="server"):
        choose_cut(offers)


def test_an_answer_that_is_no_offer_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        read_offer({"round": "many"})
