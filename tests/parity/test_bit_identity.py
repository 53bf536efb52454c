"""float32 runs give the same bits in every store, for any number of servers, in any order of arrival.

Digests cover the weights after every step, so equal digests mean equal trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from kvstore_server.plan import TensorSpec, make_plan
from tests.support.jobs import Job, PartOfJob
from tests.support.workers.bits import KEYS, LAYERS, OPTIMIZERS, gradient

SERVERS = (1, 2, 3)

# One fixture runs three jobs.


@pytest.fixture(scope="module")
def alone(part_of_job: PartOfJob) -> list[Job]:
    """One worker, with every number of servers."""
    return [part_of_job("bits", 1, servers) for servers in SERVERS]


@pytest.fixture(scope="module")
def three(part_of_job: PartOfJob) -> list[Job]:
    """Three workers, with every number of servers."""
    return [part_of_job("bits", 3, servers) for servers in SERVERS]


def named(jobs: Iterable[Job], name: str) -> dict[str, str]:
    """The digests of one kind of run: by servers, rank and store."""
    return {
        f"{job.servers} servers, rank {rank}: {store}": digest
        for job in jobs
        for rank, digests in enumerate(job[name])
        for store, digest in digests.items()
    }


def assert_all_equal(digests: dict[str, str], count: int) -> None:
    assert len(digests) == count
    assert len(set(digests.values())) == 1, digests


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_gets_the_same_bits_from_every_store_and_update_site(
    alone: list[Job], optimizer: str
) -> None:
    # Servers: in the store or not, each twice. One process: in place by three names, an engine with and without.
    assert_all_equal(named(alone, f"trainer {optimizer}"), len(SERVERS) * (4 + 5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_worker_gets_the_same_bits_from_the_verbs_of_every_store(
    alone: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(alone, f"verbs {optimizer}"), len(SERVERS) * 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_workers_get_the_same_bits_whatever_the_servers_site_and_arrival(
    three: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(three, f"trainer {optimizer}"), len(SERVERS) * 3 * 4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_three_replicas_in_one_process_give_the_bits_of_three_workers(
    three: list[Job], optimizer: str
) -> None:
    assert_all_equal(named(three, f"verbs {optimizer}"), len(SERVERS) * 3 * 2)


def test_a_sum_is_the_left_fold_in_rank_order(three: list[Job]) -> None:
    for key in KEYS:
        first, second, third = (gradient(key, 0, rank) for rank in range(3))
        expected = (first + second) + third
        for job in three:
            assert all(torch.equal(seen[key], expected) for seen in job["sums"]), (
                f"{key}, {job.servers} servers"
            )


def test_the_sums_would_differ_in_another_order() -> None:
    first, second, third = (gradient("sliced", 0, rank) for rank in range(3))
    assert not torch.equal((first + second) + third, first + (second + third))


def test_the_digests_tell_optimizers_and_worker_counts_apart(alone: list[Job], three: list[Job]) -> None:
    runs = [named(jobs, f"trainer {optimizer}") for jobs in (alone, three) for optimizer in OPTIMIZERS]
    assert len({digest for digests in runs for digest in digests.values()}) == 2 * len(OPTIMIZERS)


@pytest.mark.parametrize("shapes", [KEYS, {"weight": (LAYERS[2], LAYERS[1])}], ids=["verbs", "trainer"])
def test_the_biggest_key_lies_on_all_three_servers(shapes: dict[str, tuple[int, ...]]) -> None:
    key = max(shapes, key=lambda name: shapes[name][0] * shapes[name][-1])
    plan = make_plan([TensorSpec(key, shapes[key], "float32")], 3)
    assert {piece.server for piece in plan.slices} == {0, 1, 2}
