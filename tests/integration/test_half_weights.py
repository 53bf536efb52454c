"""Trainers whose weights come back as bfloat16 from real servers, which go on with their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

ROUNDS = 4
HALF: dict[str, Any] = {"pull": "bf16"}


def sixteenths(seed: int, size: int, bits: int) -> Tensor:
    """Numbers of so many bits, so that sums and differences of few of them are exact."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**bits), 2**bits, (size,), generator=gen) / 16


def rounded(weights: Tensor) -> Tensor:
    return weights.to(torch.bfloat16).float()


@pytest.mark.parametrize(
    ("size", "params"), [(100, HALF), (300_000, HALF), (300_000, {"type": "bf16", "pull": "bf16"})]
)
def test_workers_have_the_rounding_of_weights_that_servers_go_on_with(
    jobs: Servers, size: int, params: dict[str, Any]
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        w = Parameter(sixteenths(0, size, 9))
        trainer = Trainer([w], "sgd", {"learning_rate": 0.25}, kv, params)
        seen = []
        for round_ in range(ROUNDS):
            w.grad = sixteenths(2 * round_ + rank + 1, size, 3)
            trainer.step(2)
            seen.append(w.detach().clone())
        return seen

    master, want = sixteenths(0, size, 9), []
    for round_ in range(ROUNDS):
        grads = [sixteenths(2 * round_ + rank + 1, size, 3) for rank in range(2)]
        master = master - 0.25 * (grads[0] + grads[1]) / 2
        want.append(rounded(master))
    for seen in jobs.results(2, 2, body):
        assert all(torch.equal(*pair) for pair in zip(seen, want, strict=True))


def test_a_row_sparse_gradient_and_a_clipped_one_leave_rounded_weights_too(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[tuple[Tensor, Tensor]]:
        table = nn.Embedding(300, 40, sparse=True)
        head = nn.Linear(40, 3)
        with torch.no_grad():
            for seed, p in enumerate((table.weight, head.weight, head.bias)):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        named = [*table.named_parameters("table"), *head.named_parameters("head")]
        trainer = Trainer(dict(named), "sgd", {"learning_rate": 0.1}, kv, HALF, clip_grad={"max_norm": 1.0})
        for step in range(3):
            ids = torch.tensor([rank, 7, 100 + step])
            head(table(ids)).pow(2).sum().backward()
            trainer.step(2)
        return [(p.detach().clone(), rounded(p.detach())) for _, p in named]

    first, second = jobs.results(2, 2, body)
    for (mine, want), (theirs, _) in zip(first, second, strict=True):
        assert torch.equal(mine, want)
        assert torch.equal(mine, theirs)
