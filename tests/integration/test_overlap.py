"""Gradients that go to servers during the backward pass: the same bits, whatever a loop does to them before its step.

Two workers on two servers train with and without the option, and do the same beside it. Digests cover the weights after
every step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.comm import session
from kvtrainer.errors import StaleGradientError, WeightsWrittenError, WorkerLostError
from kvtrainer.kvstore import DistKVStore
from tests.support.lossy import LossyProxy
from tests.support.processes import Members, new_name, together
from tests.support.stores import Servers

STEPS = 6
SIZES = (40, 300, 70, 9)
"""Of the layers. The second weight has several slices and shares none; the others share theirs."""


class Loop:
    """One worker's training."""

    def __init__(self, kv: DistKVStore, rank: int, overlap: bool, **options: Any) -> None:
        self.net = nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(SIZES)])
        chance = torch.Generator().manual_seed(3)
        for p in self.net.parameters():
            nn.init.uniform_(p, -0.1, 0.1, generator=chance)
        self.first, self.second, self.last = [self.net[at].weight for at in range(3)]
        self.rank = rank
        self.chance = torch.Generator().manual_seed(rank)
        given = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}, "kvstore": kv, **options}
        self.trainer = kvtrainer.Trainer(self.net, overlap=overlap, **given)
        self.digest = hashlib.sha256()

    def loss(self) -> Tensor:
        """Of a batch of its own."""
        x = torch.randn(8, SIZES[0], generator=self.chance)
        found: Tensor = self.net(x).square().sum()
        return found

    def step(self, *args: Any, **options: Any) -> None:
        self.trainer.step(16, *args, **options)
        self.note()

    def note(self) -> None:
        """Remember the weights after a step."""
        for p in self.net.parameters():
            self.digest.update(p.detach().numpy().tobytes())

    def received(self) -> int:
        """The bytes of gradients that the servers have got so far, of all workers."""
        return sum(row["bytes_in"] for one in self.trainer.server_stats() for row in one["tables"])


Case = Callable[[Loop, int], None]
"""Makes one step, of this number."""


def plain(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.step()


def two_passes(loop: Loop, at: int) -> None:
    """And three in some steps, so that what came after two was too early."""
    for _ in range(2 + (at % 3 == 2)):
        loop.loss().backward()
    loop.step()


def window(loop: Loop, at: int) -> None:
    for _ in range(2):
        loop.trainer.update_params(loop.loss(), 16)
    loop.note()


def clipped_by_the_loop(loop: Loop, at: int) -> None:
    loop.loss().backward()
    if at % 2:
        nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
    loop.step()


def one_edited(loop: Loop, at: int) -> None:
    """In ways that torch knows nothing of."""
    loop.loss().backward()
    for p in (loop.second, loop.last):
        assert p.grad is not None
    if at % 3 == 1:
        loop.second.grad.data[0, :5] *= -1.0
    if at % 3 == 2:
        loop.last.grad.numpy()[:] = 0.5
    loop.step()


def replaced(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.last.grad = torch.full_like(loop.last, 0.25 * (loop.rank + 1))
    loop.step()


def dropped(loop: Loop, at: int) -> None:
    """Gradients that were sent are not given, on one worker or on both, of whole slices and of parts."""
    loop.loss().backward()
    if at % 2 == loop.rank or at == 4:
        loop.second.grad = None
    if at % 3:
        loop.net[2].bias.grad = None
    loop.step(ignore_stale_grad=True)


def second_batch_alone(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.trainer.zero_grad()
    loop.loss().backward()
    loop.step()


def added_up(loop: Loop, at: int) -> None:
    """grad_req changes while training; 'add' never drops."""
    for p in loop.net.parameters():
        p.grad_req = "add" if at < 3 else "write"
    loop.second.grad_req = "null" if at == 4 else "add"
    loop.loss().backward()
    loop.step()


def overflowing(loop: Loop, at: int) -> None:
    loss = loop.loss()
    (loss * float("inf") if at % 3 == 1 and loop.rank else loss).backward()
    loop.step()


def published(loop: Loop, at: int) -> None:
    """New values for everybody come between a backward pass and its step."""
    loop.loss().backward()
    if at % 2:
        loop.trainer.set_data({"0.weight": torch.full_like(loop.first, 0.01 * at)})
    loop.step()


def by_halves(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.trainer.allreduce_grads()
    nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
    loop.trainer.update(16)
    loop.note()


def not_reduced(loop: Loop, at: int) -> None:
    """An update that no other worker hears of gathers gradients as well."""
    loop.loss().backward()
    if at == 1:
        loop.trainer.update(16)
    loop.loss().backward()
    loop.step()


def uneven(loop: Loop, at: int) -> None:
    """A worker leaves the block with a gradient that it never gives."""
    with loop.trainer.join():
        for _ in range(1 + loop.rank * (at % 3)):
            plain(loop, at)
        loop.loss().backward()


def stale(loop: Loop, at: int) -> None:
    """A step that is refused has no effect on the next one."""
    loop.loss().backward()
    kept = loop.last.grad
    loop.last.grad = None
    with pytest.raises(StaleGradientError):
        loop.step()
    loop.last.grad = kept
    loop.step()


def written(loop: Loop, at: int) -> None:
    """So has one that finds weights that it would overwrite."""
    loop.loss().backward()
    if at:
        loop.last.data.mul_(0.5)
        with pytest.raises(WeightsWrittenError):
            loop.step()
        loop.trainer.set_data()
    loop.step()


CLIP = {"clip_grad": {"max_norm": 0.3}}
SKIP = {"on_nonfinite": "skip"}
BY_WORKERS = {"update_on_kvstore": False}
CODECS: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.05},
    "1bit": {"type": "1bit", "threshold": 0.05},
    "topk": {"type": "topk", "ratio": 0.1},
    "fp16": {"type": "fp16"},
}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (plain, {}),
    "sgd, averaged": (
        plain,
        {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}},
    ),
    "two passes": (two_passes, {}),
    "a window of two": (window, {"accumulate": 2}),
    "clip_grad": (plain, CLIP),
    "clip_grad, dropped": (dropped, CLIP),
    "clipped by the loop": (clipped_by_the_loop, {}),
    "one edited": (one_edited, {}),
    "replaced": (replaced, {}),
    "dropped": (dropped, {}),
    "second batch alone": (second_batch_alone, {}),
    "added up": (added_up, {}),
    "overflowing": (overflowing, SKIP),
    "amp": (window, {"amp": {"init_scale": 64.0}}),
    "published": (published, {}),
    "by workers": (plain, BY_WORKERS),
    "by halves": (by_halves, BY_WORKERS),
    "not reduced": (not_reduced, BY_WORKERS),
    "uneven": (uneven, {}),
    "stale": (stale, {}),
    "written": (written, {}),
    "p3": (plain, {}),
    **{f"{name}, edited": (one_edited, {"compression_params": codec}) for name, codec in CODECS.items()},
    "2bit, dropped": (dropped, {"compression_params": CODECS["2bit"]}),
    "2bit, overflowing": (overflowing, {"compression_params": CODECS["2bit"], **SKIP}),
    "2bit, published": (published, {"compression_params": CODECS["2bit"]}),
}


def trained(jobs: Servers, name: str, overlap: bool) -> tuple[list[str], int]:
    """The digests of both workers, and the bytes that the servers got from them."""
    case, options = CASES[name]

    def body(kv: DistKVStore, rank: int) -> tuple[str, int]:
        loop = Loop(kv, rank, overlap, **options)
        for at in range(STEPS):
            case(loop, at)
        kv.barrier()
        return loop.digest.hexdigest(), loop.received()

    found = jobs.results(2, 2, body, **({"type": "p3"} if name == "p3" else {}))
    return [digest for digest, _ in found], found[0][1]


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_without_overlap(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, True)[0] == trained(jobs, name, False)[0]


def test_a_gradient_is_on_the_servers_before_the_step_which_sends_no_more_of_it(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        loop = Loop(kv, rank, True)
        plain(loop, 0)
        seen = []
        for _ in range(2):
            loop.loss().backward()
            kv.barrier()
            seen.append(loop.received())
            kv.barrier()
            loop.step()
        return seen

    first, second = jobs.results(2, 2, body)[0]
    whole = second - first
    elements = sum(numel + pair[1] for pair in itertools.pairwise(SIZES) for numel in [pair[0] * pair[1]])
    assert 2 * 4 * elements <= whole <= 2 * 4 * elements * 1.01


def test_row_sparse_gradients_go_with_the_step_beside_dense_ones_that_went_before(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, overlap: bool) -> list[Tensor]:
        chance = torch.Generator().manual_seed(rank)
        net = nn.ModuleDict({"table": nn.Embedding(500, 16, sparse=True), "head": nn.Linear(16, 120)})
        for p in net.parameters():
            nn.init.constant_(p, 0.01)
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.1}, kv, overlap=overlap)
        for _ in range(STEPS):
            ids = torch.randint(0, 500, (20,), generator=chance)
            net["head"](net["table"](ids)).square().sum().backward()
            trainer.step(40)
        return [p.detach().clone() for p in net.parameters()]

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)]
    for first, *others in zip(*found[0], *found[1], strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_parameters_that_come_while_training_go_during_the_backward_pass_too(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, overlap: bool) -> str:
        loop = Loop(kv, rank, overlap)
        for at in range(2):
            plain(loop, at)
        more = nn.Linear(SIZES[-1], 3)
        nn.init.constant_(more.weight, 0.1)
        nn.init.constant_(more.bias, 0.1)
        loop.loss().backward()
        loop.trainer.add_param_group({"params": more.parameters()})
        loop.net.append(more)
        loop.step(ignore_stale_grad=True)
        for at in range(2):
            plain(loop, at)
        return loop.digest.hexdigest()

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False)]
    assert len({*found[0], *found[1]}) == 1


@pytest.mark.parametrize("case", [plain, one_edited, dropped])
def test_lost_messages_change_no_bit(jobs: Servers, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "REPEAT_AFTER", 0.1)
    monkeypatch.setenv("KVSTORE_TRANSPORT", "tcp")
    proxies = [LossyProxy(server.address, 0.1, seed) for seed, server in enumerate(jobs.of(2))]

    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, True)
        for at in range(STEPS):
            case(loop, at)
        kv.barrier()
        return loop.digest.hexdigest()

    with Members() as members:
        addresses, name = [proxy.address for proxy in proxies], new_name()
        stores = [members.join(addresses, rank, 2, name) for rank in range(2)]
        found = together(*[lambda kv=kv, rank=rank: body(kv, rank) for rank, kv in enumerate(stores)])
    lost = sum(proxy.lost for proxy in proxies)
    for proxy in proxies:
        proxy.close()
    monkeypatch.undo()
    assert lost
    name = next(name for name, (one, options) in CASES.items() if one is case and not options)
    assert found == trained(jobs, name, False)[0]


def test_of_a_worker_that_ends_between_its_backward_pass_and_its_step_nothing_counts(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[int]:
        loop = Loop(kv, rank, True)
        plain(loop, 0)
        loop.loss().backward()
        kv.barrier()
        if rank:
            loop.trainer.__exit__(RuntimeError, RuntimeError("of the script"), None)
            return []
        with pytest.raises(WorkerLostError, match="rank 1"):
            loop.step()
        return [row["version"] for one in loop.trainer.server_stats() for row in one["tables"]]

    assert jobs.results(2, 2, body)[0] == [1, 1]
