"""Workers of one host that give one gradient: what the sum is, what travels, and what can go wrong.

Workers are threads that say on which host they are. Where results are compared with those without the option, gradients
are small whole numbers, whose sums are exact in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvtrainer.errors import ConfigurationError, DeadlineError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.ranks import host_reduce, shared_memory
from kvtrainer.ranks.host_reduce import HierarchicalReduce
from tests.support.processes import impatient
from tests.support.stores import Servers

SIZES = (3, 20_003, 1, 300)
PLACE, SMALL = 16 << 10, 1 << 10
"""Bytes, so that the sums of a few thousand elements take every way."""
Hosts = Sequence[str]
"""Of each rank."""
PAIRS = ("a", "a", "b", "b")


@pytest.fixture(autouse=True)
def far_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    monkeypatch.setattr(shared_memory, "PLACE", PLACE)
    monkeypatch.setattr(shared_memory, "SMALL", SMALL)
    monkeypatch.setattr(host_reduce, "name_host", lambda: _here.host)


_here = threading.local()


def gradient(rank: int, at: int, numel: int) -> Tensor:
    """Numbers whose sums depend on the order."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * at + 10 * numel + rank))
    return drawn * 10.0 ** (rank % 3)


def whole(rank: int, at: int, numel: int) -> Tensor:
    """Numbers whose sums do not."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(100 * at + rank)).float()


class Loop:
    """One worker's training."""

    def __init__(
        self, kv: DistKVStore, rank: int, hosts: Hosts, hierarchy: bool = True, **options: Any
    ) -> None:
        _here.host = hosts[rank]
        self.rank, self.num_workers = rank, len(hosts)
        self.params = [Parameter(torch.zeros(numel)) for numel in SIZES]
        given = {"optimizer": "sgd", "optimizer_params": {"learning_rate": 1.0}, **options}
        self.trainer = kvtrainer.Trainer(self.params, kvstore=kv, hierarchy=hierarchy, **given)

    def give(self, at: int, make: Callable[[int, int, int], Tensor] = whole) -> None:
        for p in self.params:
            p.grad = make(self.rank, at, p.numel())

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    def counted(self, name: str) -> int:
        return sum(row[name] for one in self.trainer.server_stats() for row in one["tables"])


def folded(hosts: Hosts, at: int, numel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The sum within each host, in rank order, and then over hosts."""
    of_hosts: dict[str, Any] = {}
    for rank, host in enumerate(hosts):
        own = gradient(rank, at, numel).numpy()
        of_hosts[host] = of_hosts[host] + own if host in of_hosts else own
    first, *others = of_hosts.values()
    for other in others:
        first = first + other
    return first  # type: ignore[no-any-return]


TOPOLOGIES = {
    "two hosts of two": PAIRS,
    "in turns": ("a", "b", "a", "b"),
    "three and one": ("a", "a", "a", "b"),
    "one and three": ("a", "b", "b", "b"),
    "one host": ("a", "a", "a", "a"),
    "each its own": ("a", "b", "c", "d"),
}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_sum_is_made_within_hosts_first_and_then_over_hosts(jobs: Servers, name: str) -> None:
    hosts = TOPOLOGIES[name]

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        loop = Loop(kv, rank, hosts)
        for at in range(3):
            loop.give(at, gradient)
            loop.trainer.step(4)
            assert all(torch.equal(p.grad, gradient(rank, at, p.numel())) for p in loop.params)
        return loop.weights()

    expected = [np.zeros(numel, np.float32) for numel in SIZES]
    for at in range(3):
        expected = [w - folded(hosts, at, len(w)) * np.float32(0.25) for w in expected]
    for found in jobs.results(4, 2, body):
        assert all(np.array_equal(mine, right) for mine, right in zip(found, expected, strict=True))


@pytest.mark.usefixtures("sent_once")
def test_a_host_sends_one_gradient_and_gets_weights_once(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        loop = Loop(kv, rank, PAIRS)
        seen = []
        for at in range(3):
            loop.give(at)
            loop.trainer.step(1)
            kv.barrier()
            seen.append([loop.counted("bytes_in"), loop.counted("bytes_out")])
            kv.barrier()
        return [after - before for before, after in zip(seen[1], seen[2], strict=True)]

    one = 4 * sum(SIZES)
    for number in jobs.results(4, 2, body)[0]:
        assert 2 * one <= number <= 2 * one * 1.02


# ---------------------------------------------------------------- rounds that are not plain


Case = Callable[[Loop, int], None]
"""Makes one step, of this number."""


def plain(loop: Loop, at: int) -> None:
    loop.give(at)
    loop.trainer.step(4)


def other_batch_sizes(loop: Loop, at: int) -> None:
    loop.give(at)
    loop.trainer.step(4 if loop.rank == at else 2)


def one_leaves_out(loop: Loop, at: int) -> None:
    """On one worker of a host, or on another one, or nobody."""
    loop.give(at)
    if loop.rank == at:
        loop.params[1].grad = None
    loop.trainer.step(4, ignore_stale_grad=True)


def all_leave_out(loop: Loop, at: int) -> None:
    """On all workers, or on those of one host."""
    loop.give(at)
    if at % 2 or loop.rank < 2:
        loop.params[at % 4].grad = None
    loop.trainer.step(4, ignore_stale_grad=True)


def one_overflows(loop: Loop, at: int) -> None:
    loop.give(at)
    if loop.rank == at:
        loop.params[2].grad = torch.full((1,), torch.inf)
    result = loop.trainer.step(4)
    assert result is not None
    assert result.skipped == (at < 4)


def some_have_rows(loop: Loop, at: int) -> None:
    """From the second step on; one worker has fewer than the others."""
    loop.give(at)
    if at:
        ids = torch.tensor([[0, 2 + loop.rank]])
        loop.params[1].grad = torch.sparse_coo_tensor(ids, torch.tensor([1.0, at]), (SIZES[1],)).coalesce()
    loop.trainer.step(4)


def published(loop: Loop, at: int) -> None:
    plain(loop, at)
    if at % 2:
        with torch.no_grad():
            for p in loop.params:
                p.copy_(torch.full_like(p, at))
        loop.trainer.set_data()


def windows(loop: Loop, at: int) -> None:
    for part in range(2):
        loss = sum((p * whole(loop.rank, 10 * at + part, p.numel())).sum() for p in loop.params)
        loop.trainer.update_params(loss, 4)


def joined(loop: Loop, at: int) -> None:
    """All have other numbers of batches."""
    with loop.trainer.join():
        for part in range(1 + loop.rank):
            plain(loop, 10 * at + part)


def more_parameters(loop: Loop, at: int) -> None:
    if at == 2:
        loop.params.append(Parameter(torch.zeros(70)))
        loop.give(at)
        loop.trainer.add_param_group({"params": loop.params[-1:]})
    plain(loop, at)


CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (plain, {}),
    "adam": (plain, {"optimizer": "adam"}),
    "sums come back": (plain, {"update_on_kvstore": False}),
    "weights in half": (plain, {"compression_params": {"pull": "bf16"}}),
    "changes of weights": (plain, {"compression_params": {"pull": "ternary"}}),
    "other batch sizes": (other_batch_sizes, {}),
    "one leaves out": (one_leaves_out, {}),
    "all leave out": (all_leave_out, {}),
    "all leave out, sums come back": (all_leave_out, {"update_on_kvstore": False}),
    "clipped by norm": (plain, {"clip_grad": {"max_norm": 5.0}}),
    "clipped, and skipped": (one_overflows, {"clip_grad": {"max_norm": 5.0}}),
    "skipped": (one_overflows, {"on_nonfinite": "skip"}),
    "rows": (some_have_rows, {}),
    "published": (published, {}),
    "windows": (windows, {"accumulate": 2}),
    "joined": (joined, {}),
    "more parameters": (more_parameters, {}),
    "whole keys": (plain, {"optimizer": "lamb"}),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_sums_give_the_weights_of_a_run_without_it(jobs: Servers, name: str) -> None:
    case, options = CASES[name]

    def body(kv: DistKVStore, rank: int, hierarchy: bool) -> list[list[Tensor]]:
        loop = Loop(kv, rank, PAIRS, hierarchy, **options)
        found = []
        for at in range(5):
            case(loop, at)
            found.append(loop.weights())
        assert loop.trainer.version >= 0
        return found

    with_it, without = [
        jobs.results(4, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)
    ]
    for mine, theirs in zip(with_it, without, strict=True):
        for step, right in zip(mine, theirs, strict=True):
            assert all(map(torch.equal, step, right))


def test_the_sum_of_a_host_is_compressed_not_what_its_workers_give(jobs: Servers) -> None:
    """0.4 + 0.4 of each host: 0.5 of it arrives in each of two steps, and what is held back adds up to it in the third
    and fourth, of which the last has 0.2 left and sends no more."""

    def body(kv: DistKVStore, rank: int) -> list[float]:
        two_bit = {"type": "2bit", "threshold": 0.5}
        loop = Loop(kv, rank, PAIRS, compression_params=two_bit)
        seen = []
        for given in (0.4, 0.4, 0.0, 0.0):
            for p in loop.params:
                p.grad = torch.full_like(p, given)
            loop.trainer.step(1)
            seen.append(float(loop.weights()[1][17]))
        return seen

    assert jobs.results(4, 2, body) == [[-1.0, -2.0, -3.0, -3.0]] * 4


def test_what_workers_give_of_other_batch_sizes_is_multiplied_before_it_is_summed(jobs: Servers) -> None:
    sizes = (3, 5, 7, 7)

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        loop = Loop(kv, rank, PAIRS)
        loop.give(0, gradient)
        loop.trainer.step(sizes[rank])
        return loop.weights()

    for found, numel in zip(jobs.results(4, 2, body)[3], SIZES, strict=True):
        a, b, c, d = [gradient(rank, 0, numel).numpy() for rank in range(4)]
        first = a * np.float32(1 / 3) + b * np.float32(1 / 5)
        assert np.array_equal(found, -(first + (c + d) * np.float32(1 / 7)))


def test_lost_messages_change_no_bit(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        loop = Loop(kv, rank, PAIRS, clip_grad={"max_norm": 5.0})
        for at in range(6):
            plain(loop, at)
        kv.barrier()
        return loop.weights()

    for mine, theirs in zip(jobs.over_losses(4, 2, body), jobs.results(4, 2, body), strict=True):
        assert all(map(torch.equal, mine, theirs))


# ---------------------------------------------------------------- where it changes nothing


def test_half_precision_goes_as_without_it_and_one_line_of_each_host_says_so(
    jobs: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    def body(kv: DistKVStore, rank: int) -> float:
        _here.host = PAIRS[rank]
        p = Parameter(torch.zeros(5, dtype=torch.bfloat16))
        trainer = kvtrainer.Trainer([p], "sgd", {"learning_rate": 1.0}, kv, hierarchy=True)
        p.grad = torch.full_like(p, 3.0)
        trainer.step(1)
        return float(p.detach()[0])

    assert jobs.results(4, 2, body) == [-12.0] * 4
    assert [record.levelname for record in caplog.records if "half precision" in record.message] == [
        "WARNING"
    ] * 2


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_servers_sum_in_memory_that_all_share_with_them(
    jobs: Servers, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", transport)
    seen = []
    monkeypatch.setattr(
        host_reduce, "HierarchicalReduce", lambda *of: seen.append(of) or HierarchicalReduce(*of)
    )

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        loop = Loop(kv, rank, ("a", "a"))
        loop.give(0, gradient)
        loop.trainer.step(1)
        return loop.weights()

    for found, numel in zip(jobs.results(2, 2, body)[1], SIZES, strict=True):
        assert np.array_equal(found, -folded(("a", "a"), 0, numel))
    assert len(seen) == (2 if transport == "tcp" else 0)


def test_a_host_without_memory_goes_as_without_it_and_one_line_says_why(
    jobs: Servers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(rank: int, peers: Sequence[Any]) -> Any:
        if _here.host == "b" and rank == 3:
            raise OSError("no memory today")
        return share(rank, peers)

    share = shared_memory._share_memory_arena
    monkeypatch.setattr(shared_memory, "_share_memory_arena", refuse)

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        loop = Loop(kv, rank, PAIRS)
        loop.give(0, gradient)
        loop.trainer.step(1)
        return loop.weights()

    for found, numel in zip(jobs.results(4, 2, body)[0], SIZES, strict=True):
        a, b, c, d = [gradient(rank, 0, numel).numpy() for rank in range(4)]
        assert np.array_equal(found, -((a + b) + c + d))
    [line] = [record.message for record in caplog.records if "no memory today" in record.message]
    assert "rank 3" in line


def test_a_job_that_never_sums_hosts_says_so_once(jobs: Servers, caplog: pytest.LogCaptureFixture) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        loop = Loop(kv, rank, ("a", "a"))
        for at in range(2 * host_reduce._SEPARATE):
            loop.give(at)
            loop.params[rank].grad = None
            loop.trainer.step(1, ignore_stale_grad=True)

    jobs.results(2, 1, body)
    [record] = [record for record in caplog.records if "no effect on this host" in record.message]
    assert "different parameters" in record.message


# ---------------------------------------------------------------- what goes wrong


def test_a_worker_that_leaves_is_named_by_the_others_of_its_host(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[str]:
        loop = Loop(kv, rank, ("a", "a", "a"))
        plain(loop, 0)
        if rank == 1:
            loop.trainer.close()
            return []
        said = []
        for _ in range(2):
            with pytest.raises(WorkerLostError) as caught:
                plain(loop, 1)
            said.append(str(caught.value))
        return said

    for first, again in jobs.results(3, 1, body)[::2]:
        assert "rank 1" in first
        assert again == first


def test_a_worker_that_does_not_come_is_named_at_the_deadline(jobs: Servers) -> None:
    is_over = threading.Event()

    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, ("a", "a"))
        plain(loop, 0)
        if rank == 1:
            is_over.wait()
            return ""
        try:
            with impatient(kv, timeout=0.1), pytest.raises(DeadlineError) as caught:
                plain(loop, 1)
        finally:
            is_over.set()
        return str(caught.value)

    assert "rank 1" in jobs.results(2, 1, body)[0]


def test_one_that_loses_the_weights_on_their_way_raises_that_they_may_be_of_two_rounds(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, ("a", "a"))
        plain(loop, 0)
        if rank == 0:
            broadcast = shared_memory.RankMemory.broadcast

            def dies(memory: shared_memory.RankMemory, flat: Tensor) -> None:
                if not memory._at:
                    raise KeyboardInterrupt
                broadcast(memory, flat)

            monkeypatch.setattr(shared_memory.RankMemory, "broadcast", dies)
            with pytest.raises(KeyboardInterrupt):
                plain(loop, 1)
            loop.trainer.close()
            return ""
        with pytest.raises(WorkerLostError) as caught:
            plain(loop, 1)
        return str(caught.value)

    said = jobs.results(2, 1, body)[1]
    assert "rank 0" in said
    assert "two rounds" in said


def test_workers_that_do_not_all_want_it_are_told_so(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        loop = Loop(kv, rank, PAIRS, hierarchy=rank == 1)
        with impatient(kv, timeout=0.1):
            plain(loop, 0)

    found = jobs.everybody(2, 1, body)
    assert any(isinstance(one, ConfigurationError) and "by_host" in str(one) for one in found)
    assert all(isinstance(one, Exception) for one in found)
