"""Engines tell ranks that map weights where these are, and send them what has no place for the moment."""

from __future__ import annotations

import pytest
import torch

from kvstore_server.engine.rounds import Mode
from kvstore_server.protocol import messages as m
from kvstore_server.transport.arena import Leases
from tests.support.engines import EngineJob as Job

SHAPE = (140_000,)
"""Eight slices of more than 64 KiB."""
MAPS = m.WANTS_WEIGHTS | m.MAPS_WEIGHTS
KNOWS = MAPS | m.KNOWS_PLACES


@pytest.fixture
def leases() -> Leases:
    """Those of a server that shares memory, whose places are addresses."""
    made = Leases()
    made.shared = lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8)
    made.place_of = torch.Tensor.data_ptr
    return made


def commit(job: Job, flags: int, round_: int = 1) -> list[list[m.ReplyBody]]:
    """Have both ranks give ones to all slices; what each is told when the round is over."""
    for rank in range(2):
        job.commit(rank, round_, 1.0, flags, number=1000 * round_)
    return [job.told[rank, 1000 * round_] for rank in range(2)]


def test_slices_that_somebody_reads_come_as_bytes_beside_the_places_of_others(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=SHAPE, leases=leases)
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    leases.hold(weights.payloads[3])
    for [sent] in commit(job, MAPS):
        assert isinstance(sent, m.Weights)
        assert sent.places[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7]
        assert sent.parts[:, 0].tolist() == [3]
        assert set(sent.payloads[0].tolist()) == {2.0}
    assert not weights.payloads[3].any()


def test_a_rank_that_knows_all_places_is_told_of_one_slice_that_they_are_still_those(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=SHAPE, leases=leases)
    commit(job, MAPS)
    for round_, flags in ((2, KNOWS), (3, KNOWS | m.WANTS_DELTA)):
        for told in commit(job, flags, round_):
            [shown] = told
            assert isinstance(shown, m.Weights)
            assert shown.places.tolist() == [[0, round_, m.STILL]]
            assert not len(shown.parts)


def test_a_rank_that_knows_all_places_is_told_every_one_where_a_slice_has_moved(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=SHAPE, leases=leases)
    [weights] = job.pull(0)
    assert isinstance(weights, m.Weights)
    leases.hold(weights.payloads[3])
    for [sent] in commit(job, KNOWS):
        assert isinstance(sent, m.Weights)
        assert sent.places[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7]
        assert (sent.places[:, 2] > 0).all()
        assert sent.parts[:, 0].tolist() == [3]


def test_ranks_that_do_not_map_weights_are_sent_them_beside_those_that_do(leases: Leases) -> None:
    job = Job(2, Mode("sync"), shape=SHAPE, leases=leases)
    [[sent], _] = commit(job, m.WANTS_WEIGHTS)
    assert isinstance(sent, m.Weights)
    assert not len(sent.places)


def test_ranks_whose_contributions_count_one_by_one_are_sent_weights_though_they_map_them(
    leases: Leases,
) -> None:
    job = Job(1, Mode("async"), shape=SHAPE, leases=leases)
    told = job.commit(0, 1, 1.0, flags=MAPS)
    assert [type(body) for body in told] == [m.Done, m.Weights]


def test_a_server_that_shares_no_memory_sends_weights() -> None:
    job = Job(2, Mode("sync"), shape=SHAPE)
    [[sent], _] = commit(job, MAPS)
    assert isinstance(sent, m.Weights)
    assert not len(sent.places)
