"""Trainers whose weights come back from real servers rounded, or as encoded changes: the weights, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, PlanMismatchError
from kvtrainer.kvstore import DistKVStore
from tests.support.processes import raised
from tests.support.stores import Servers, servers

INT8: dict[str, Any] = {"pull": "int8"}
RATE = 2.0**-7
SIZE = 300_000


def whole(seed: int, size: int) -> Tensor:
    """Make numbers from -127 to 127, one of each 1,024 the largest, of which int8 loses nothing."""
    found = torch.randint(-127, 128, (size,), generator=torch.Generator().manual_seed(seed)).float()
    found[::1024] = 127.0
    return found


def noise(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def steps(trainer: Trainer, weight: Parameter, grads: list[Tensor]) -> list[Tensor]:
    """The weights after each step."""
    seen = []
    for grad in grads:
        weight.grad = grad.clone()
        trainer.step(1)
        seen.append(weight.detach().clone())
    return seen


@pytest.mark.parametrize("size", [100, SIZE])
def test_workers_have_the_weights_of_servers_where_the_codec_says_all(jobs: Servers, size: int) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        weight = Parameter(noise(0, size).round())
        trainer = Trainer([weight], "sgd", {"learning_rate": RATE}, kv, INT8)
        return steps(trainer, weight, [whole(seed, size) if rank else torch.zeros(size) for seed in range(3)])

    wanted, want = noise(0, size).round(), []
    for seed in range(3):
        wanted = wanted - RATE * whole(seed, size)
        want.append(wanted)
    for seen in jobs.results(2, 2, body):
        assert all(torch.equal(*pair) for pair in zip(seen, want, strict=True))


@pytest.mark.parametrize(("codec", "share"), [("ternary", 1.1 / 16), ("topk", 0.016), ("int8", 0.252)])
def test_a_step_brings_back_the_bytes_of_the_codec(jobs: Servers, codec: str, share: float) -> None:
    def body(kv: DistKVStore, rank: int) -> float:
        weight = Parameter(noise(0, SIZE))
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.1}, kv, {"pull": codec})

        def sent() -> int:
            kv.barrier()
            total = sum(table["bytes_out"] for one in trainer.server_stats() for table in one["tables"])
            kv.barrier()
            return total

        steps(trainer, weight, [noise(9, SIZE)])  # the first weights come whole
        before = sent()
        steps(trainer, weight, [noise(seed, SIZE) for seed in range(4)])
        return (sent() - before) / (4 * kv.num_workers * weight.nbytes)

    for found in jobs.results(2, 2, body):
        assert share / 2 < found < share


def drawn(net: nn.Module) -> nn.Module:
    """Give a network first weights that do not depend on what other threads draw."""
    with torch.no_grad():
        for seed, p in enumerate(net.parameters()):
            p.copy_(0.1 * noise(seed, p.numel()).view(p.shape))
    return net


def trained(kv: DistKVStore, rank: int, **options: Any) -> list[Tensor]:
    """The weights of a small model after each of six steps, with gradients that differ by rank."""
    net = drawn(nn.Sequential(nn.Linear(40, 3000), nn.Tanh(), nn.Linear(3000, 8)))
    trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kv, **options)
    seen = []
    for step in range(6):
        net.zero_grad()
        net(noise(2 * step + rank, 160).view(4, 40)).square().mean().backward()
        trainer.step(2)
        seen += [p.detach().clone() for p in net.parameters()]
    trainer.close()
    return seen


WAYS: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "compressed": {},
    "clipped": {"clip_grad": {"max_norm": 1e9}},
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_the_same_on_all_workers_whichever_way_they_come(jobs: Servers, way: str) -> None:
    params = {"pull": "ternary"} | ({"type": "ternary"} if way == "compressed" else {})

    def body(kv: DistKVStore, rank: int) -> list[list[Tensor]]:
        plain = trained(kv, rank, compression_params=params)
        return [plain, trained(kv, rank, compression_params=params, **WAYS[way])]

    [(mine, my_other), (theirs, their_other)] = jobs.results(2, 2, body)
    for found in (my_other, theirs, their_other):
        assert all(torch.equal(*pair) for pair in zip(mine, found, strict=True))


def test_training_loses_little_where_both_directions_are_compressed(jobs: Servers) -> None:
    """The loss of a regression ends near that of a job that sends all, and far from where it began."""

    def losses(kv: DistKVStore, rank: int, params: dict[str, Any] | None) -> list[float]:
        net = drawn(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)))
        x = noise(1, 2000).view(100, 20)
        y = x[:, :1] * x[:, 1:2]
        trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.05}, kv, params)
        found = []
        for _ in range(200):
            net.zero_grad()
            loss = (net(x[rank::2]) - y[rank::2]).square().mean()
            loss.backward()
            trainer.step(2)
            found.append(loss.item())
        return [found[0], found[-1]]

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        return [losses(kv, rank, params) for params in (None, {"type": "ternary", "pull": "ternary"})]

    for plain, compressed in jobs.results(2, 2, body):
        assert plain[1] < 0.5 * plain[0]
        assert compressed[1] < 1.25 * plain[1]


def test_rows_of_an_embedding_come_as_they_are_beside_changes_of_the_rest(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        table, head = nn.Embedding(5000, 8, sparse=True), Parameter(torch.zeros(2048))
        with torch.no_grad():
            table.weight.copy_(noise(0, 40_000).view(5000, 8))
        trainer = Trainer({"table": table.weight, "head": head}, "sgd", {"learning_rate": RATE}, kv, INT8)
        for step in range(4):
            table(torch.tensor([rank, 7, 4000 + step])).sum().backward()
            head.grad = whole(step, 2048) if rank else torch.zeros(2048)
            trainer.step(1)
            table.zero_grad()
        return [table.weight.detach().clone(), head.detach().clone()]

    want = noise(0, 40_000).view(5000, 8)
    for step in range(4):
        for ids in ([0, 7, 4000 + step], [1, 7, 4000 + step]):
            want[ids] -= RATE
    head = -RATE * sum(whole(step, 2048) for step in range(4))
    for table, mine in jobs.results(2, 2, body):
        torch.testing.assert_close(table, want, rtol=0, atol=1e-5)
        assert torch.equal(mine, head)


def test_what_is_published_is_what_all_have_and_training_goes_on_from_there(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        weight = Parameter(noise(0, 3000))
        trainer = Trainer({"w": weight}, "sgd", {"learning_rate": RATE}, kv, INT8)
        steps(trainer, weight, [noise(1, 3000), noise(2, 3000)])
        trainer.set_data({"w": whole(3 + rank, 3000)})
        published = weight.detach().clone()
        return [published, *steps(trainer, weight, [whole(9, 3000) / 2])]

    want = whole(3, 3000)
    for published, after in jobs.results(2, 2, body):
        assert torch.equal(published, want)
        assert torch.equal(after, want - RATE * whole(9, 3000))


def test_workers_without_data_have_the_weights_of_the_others_at_the_end(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Tensor:
        weight = Parameter(noise(0, SIZE))
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.1}, kv, {"pull": "ternary"})
        with trainer.join():
            steps(trainer, weight, [noise(seed, SIZE) for seed in range(2 + 3 * rank)])
        return weight.detach().clone()

    mine, theirs = jobs.results(2, 2, body)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["dist_async", "dist_ssp"])
def test_contributions_that_count_one_by_one_bring_their_workers_what_they_lack(
    jobs: Servers, mode: str
) -> None:
    """No two of the changes lose anything, so all have the sum of what all have given."""

    def body(kv: DistKVStore, rank: int) -> Tensor:
        weight = Parameter(torch.zeros(SIZE))
        trainer = Trainer([weight], "sgd", {"learning_rate": RATE}, kv, INT8)
        steps(trainer, weight, [whole(seed, SIZE) for seed in range(3)])
        kv.barrier()
        return steps(trainer, weight, [torch.zeros(SIZE)])[0]

    want = -2 * RATE * sum(whole(seed, SIZE) for seed in range(3))
    for found in jobs.results(2, 2, body, type=mode):
        torch.testing.assert_close(found, want, rtol=0, atol=2 * 254 * RATE)


def test_weights_that_were_only_looked_at_count_as_not_received(jobs: Servers) -> None:
    """What another worker changed of row-sparse keys before still comes with the next step."""

    def body(kv: DistKVStore, rank: int) -> Tensor:
        table = nn.Embedding(5000, 8, sparse=True)
        nn.init.zeros_(table.weight)
        trainer = Trainer({"table": table.weight}, "sgd", {"learning_rate": RATE}, kv, INT8)

        def step(row: int) -> None:
            table(torch.tensor([row])).sum().backward()
            trainer.step(1)
            table.zero_grad()

        for row in (0, 1):  # rows come from now on
            step(row)
            kv.barrier()
        for row in (2, 3) if rank else ():
            step(row)
        kv.barrier()
        trainer.pull_weights()
        step(4)
        kv.barrier()
        return table.weight[:4].sum(1).detach().clone()

    mine, _ = jobs.results(2, 2, body, type="dist_async")
    assert torch.equal(mine, -8 * RATE * torch.tensor([2.0, 2.0, 1.0, 1.0]))


def test_delay_compensation_looks_at_the_weights_that_a_worker_has(jobs: Servers) -> None:
    """Of sixteen changes the largest comes back, and the second update makes up for the others."""

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        weight = Parameter(torch.zeros(16))
        options = {"learning_rate": 1.0, "lamda": 0.5}
        trainer = Trainer([weight], "dcasgd", options, kv, {"pull": {"type": "topk", "ratio": 1 / 16}})
        seen = steps(trainer, weight, [torch.tensor([8.0, 3.0] + [1.0] * 14), torch.ones(16)])
        return [one.tolist() for one in seen]

    second = -3 - (1 + 0.5 * 1 * (-3 - 0))
    assert jobs.results(1, 1, body, type="dist_async") == [[[-8.0] + [0.0] * 15, [-8.0, second] + [0.0] * 14]]


def test_saved_states_go_on_with_the_weights_that_workers_have(jobs: Servers, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer_params": {"learning_rate": RATE, "momentum": 0.5}}

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        weight = Parameter(torch.zeros(2048))
        trainer = Trainer([weight], "sgd", kvstore=kv, compression_params=INT8, **options)
        steps(trainer, weight, [whole(0, 2048) / 2])
        trainer.save_states(tmp_path / "states")
        trainer.close()
        other = Trainer([weight], "sgd", kvstore=kv, compression_params=INT8, **options)
        other.load_states(tmp_path / "states")
        return steps(other, weight, [torch.zeros(2048)])

    want = -RATE * whole(0, 2048) * 1.5
    for [found] in jobs.results(2, 2, body):
        torch.testing.assert_close(found, want, rtol=0, atol=RATE)


@pytest.mark.parametrize("forms", [("ternary", "topk"), (None, "bf16")])
def test_workers_that_want_different_forms_are_told(jobs: Servers, forms: Sequence[str | None]) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        weight, form = Parameter(torch.zeros(3)), forms[rank]
        trainer = Trainer([weight], "sgd", {}, kv, form and {"pull": form})
        with pytest.raises(PlanMismatchError) as told:
            steps(trainer, weight, [torch.ones(3)])
        assert all(str(one) in str(told.value) for one in forms)  # whoever came first is named first
        return weight.tolist()

    assert jobs.results(2, 2, body) == [[0.0] * 3] * 2


def test_a_server_without_room_for_the_weights_of_workers_refuses_them() -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        weight = Parameter(torch.zeros(SIZE))
        steps(Trainer([weight], "sgd", {}, kv, INT8), weight, [torch.ones(SIZE)])

    with servers("--max-memory", str(3 * SIZE * 4)) as tight:
        assert len(raised(tight.everybody(1, 1, body), ConfigurationError)) == 1


def test_a_row_sparse_gradient_and_a_clipped_one_leave_rounded_weights_too(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[tuple[Tensor, Tensor]]:
        table = nn.Embedding(300, 40, sparse=True)
        head = nn.Linear(40, 3)
        with torch.no_grad():
            for seed, p in enumerate((table.weight, head.weight, head.bias)):
                p.copy_(noise(seed, p.numel()).view(p.shape))
        named = [*table.named_parameters("table"), *head.named_parameters("head")]
        trainer = Trainer(
            dict(named), "sgd", {"learning_rate": 0.1}, kv, {"pull": "bf16"}, clip_grad={"max_norm": 1.0}
        )
        for step in range(3):
            ids = torch.tensor([rank, 7, 100 + step])
            head(table(ids)).pow(2).sum().backward()
            trainer.step(2)
        return [(p.detach().clone(), p.detach().to(torch.bfloat16).float()) for _, p in named]

    first, second = jobs.results(2, 2, body)
    for (mine, want), (theirs, _) in zip(first, second, strict=True):
        assert torch.equal(mine, want)
        assert torch.equal(mine, theirs)
