"""Links that stay open and carry nothing: half-open ones, and a worker that is cut off from one of two servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import kvtrainer
from kvtrainer.errors import KVStoreError, RoundAbortedError, ServerUnreachableError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.integration import registered_optimizer
from tests.integration.test_elastic import first_weights, plain_loop, sgd
from tests.integration.test_elastic_losses import SGD, SHIFT, give
from tests.support.limits import FOREVER, LIMIT
from tests.support.lossy import BOTH, TO_SERVER, TO_WORKER, LinkProxy
from tests.support.processes import Members, Processes, eventually, new_name, round_of, together

SILENCE = 2.5
"""Seconds after which workers and servers give each other up; signs of life come every second."""
CUT_AT, END = 2, 5
Weights = dict[str, torch.nn.Parameter]

pytestmark = pytest.mark.usefixtures("unseen")


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[str]]:
    flags = "--spread-from", "1", "--rejoin-timeout", "0.5", "--dead-after", str(SILENCE)
    with Processes() as started:
        yield [one.address for one in started.servers(2, *flags, "--import", registered_optimizer.__name__)]


@pytest.fixture
def linked() -> Iterator[Callable[[str], LinkProxy]]:
    links: list[LinkProxy] = []

    def make(server: str) -> LinkProxy:
        links.append(LinkProxy(server))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.mark.parametrize("ways", [(TO_SERVER,), (TO_WORKER,), BOTH], ids=" and ".join)
def test_both_ends_find_a_half_open_link_by_its_silence(
    ways: Sequence[str],
    two_servers: list[str],
    linked: Callable[[str], LinkProxy],
    members: Members,
) -> None:
    link, name = linked(two_servers[0]), new_name()
    limits = {"timeout": FOREVER, "dead_after": SILENCE}  # nothing but silence ends a wait
    stores = [
        members.join([address, two_servers[1]], rank, 2, name, **limits)
        for rank, address in enumerate((two_servers[0], link.address))
    ]
    ones, twos = torch.ones(40_000), torch.full((40_000,), 2.0)

    def step(store: DistKVStore) -> torch.Tensor | KVStoreError:
        try:
            return round_of(store, "w", ones)
        except KVStoreError as error:
            return error

    together(*(lambda one=one: one.init("w", torch.zeros(40_000)) for one in stores))
    assert all(torch.equal(found, twos) for found in together(*(lambda one=one: step(one) for one in stores)))
    link.hold(*ways)
    whole, cut_off = together(*(lambda one=one: step(one) for one in stores))
    assert isinstance(cut_off, ServerUnreachableError)
    assert link.address in str(cut_off)
    if TO_SERVER in ways:
        assert isinstance(whole, WorkerLostError | RoundAbortedError)
    else:
        assert torch.equal(whole, twos)  # what the worker gave arrived; it is the answer that did not
    link.heal()


def train(
    store: DistKVStore,
    optimizer: tuple[Any, dict[str, Any]],
    before: Callable[[int], None] = lambda _: None,
    **options: Any,
) -> tuple[kvtrainer.Trainer, Weights, list[dict[str, torch.Tensor]]]:
    """Train to the end; returns the weights after each step, too. A worker that fails leaves the job."""
    weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
    trainer, found = kvtrainer.Trainer(weights, *optimizer, kvstore=store, **options), []
    if store._client.options.is_elastic:
        trainer.resume()
    try:
        for step in range(END):
            give(weights, store.rank, step)
            before(step)
            trainer.step()
            found.append({key: weight.detach().clone() for key, weight in weights.items()})
    except KVStoreError as error:
        trainer.__exit__(type(error), error, None)
        raise
    return trainer, weights, found


def stores_of(
    members: Members, servers: list[str], link: LinkProxy, workers: int, **limits: Any
) -> list[DistKVStore]:
    """All workers of a job; rank 1 reaches the second server by the link."""
    name = new_name()
    places = [[servers[0], link.address if rank == 1 else servers[1]] for rank in range(workers)]
    return [members.join(place, rank, workers, name, **limits) for rank, place in enumerate(places)]


def test_a_partition_from_one_of_two_servers_that_heals_changes_no_bit(
    two_servers: list[str], linked: Callable[[str], LinkProxy], members: Members
) -> None:
    link = linked(two_servers[1])
    stores = stores_of(members, two_servers, link, 2)

    def cut(step: int) -> None:
        if step == CUT_AT:
            link.hold(*BOTH)

    def heal() -> None:
        assert eventually(lambda: link.held >= 2, LIMIT)
        link.heal()

    _, *found = together(heal, lambda: train(stores[0], SGD), lambda: train(stores[1], SGD, cut))
    expected = plain_loop([(0, 1)] * END, sgd, None)
    for one in found:
        assert isinstance(one, tuple), one
        for weights, wanted in zip(one[2], expected, strict=True):
            assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
        one[0].close()


def test_a_partition_from_one_of_two_servers_that_stays_ends_the_job_and_no_worker_has_half_a_step(
    two_servers: list[str], linked: Callable[[str], LinkProxy], members: Members
) -> None:
    link = linked(two_servers[1])
    stores = stores_of(members, two_servers, link, 2, timeout=FOREVER, dead_after=SILENCE)
    left: list[dict[str, torch.Tensor]] = [{}, {}]

    def work(rank: int) -> BaseException | None:
        weights = {key: torch.nn.Parameter(value) for key, value in first_weights().items()}
        trainer = kvtrainer.Trainer(weights, *SGD, kvstore=stores[rank], zero_copy=False)
        try:
            for step in range(END):
                give(weights, rank, step)
                if (rank, step) == (1, CUT_AT):
                    link.hold(*BOTH)
                trainer.step()
        except KVStoreError as error:
            return error
        finally:
            left[rank] = {key: weight.detach().clone() for key, weight in weights.items()}
        return None

    whole, cut_off = together(lambda: work(0), lambda: work(1))
    assert isinstance(cut_off, ServerUnreachableError)
    assert isinstance(whole, KVStoreError)
    expected = plain_loop([(0, 1)] * CUT_AT, sgd, None)[-1]
    for weights in left:
        assert all(torch.equal(weights[key], expected[key]) for key in expected)
    link.heal()


def test_the_others_go_on_without_a_worker_that_is_cut_off_from_one_server_if_members_may_change(
    two_servers: list[str], linked: Callable[[str], LinkProxy], members: Members
) -> None:
    link = linked(two_servers[1])
    stores = stores_of(members, two_servers, link, 3, elastic="1..3", timeout=FOREVER, dead_after=SILENCE)

    def cut(step: int) -> None:
        if step == CUT_AT:
            link.hold(*BOTH)

    def cut_off() -> None:
        with pytest.raises(ServerUnreachableError):
            train(stores[1], SHIFT, cut, update_on_kvstore=True)

    def work(rank: int) -> tuple[kvtrainer.Trainer, Weights, list[dict[str, torch.Tensor]]]:
        return train(stores[rank], SHIFT, update_on_kvstore=True)

    # It stays cut off: what it has sent would count if it arrived before the others give it up.
    _, *found = together(cut_off, lambda: work(0), lambda: work(2))
    members_of = [(0, 1, 2)] * CUT_AT + [(0, 2)] * (END - CUT_AT)
    expected = plain_loop(members_of, lambda p: registered_optimizer.Shift(p, **SHIFT[1]), None)
    for one in found:
        assert isinstance(one, tuple), one
        trainer, _, steps = one
        assert trainer.members == (0, 2)
        for weights, wanted in zip(steps, expected, strict=True):
            assert all(torch.equal(weights[key], wanted[key]) for key in wanted)
        trainer.close()
