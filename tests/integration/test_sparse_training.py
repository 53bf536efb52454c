"""Two workers train embeddings by rows on one and on three servers, as one process that has all rows would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from tests.support.sparse_model import CASES, Embeddings, batches
from tests.support.stores import Servers


def in_one_process(name: str) -> list[Tensor]:
    """By plain torch, or by the one Trainer that has the rows of both workers."""
    model, (kind, options) = Embeddings(), CASES[name]
    optimizer: Any
    if kind.startswith("torch:"):
        optimizer = getattr(torch.optim, kind.removeprefix("torch:"))(model.parameters(), **options)
    else:
        optimizer = Trainer(model, kind, options, kvstore=None)
    for (big_0, small_0), (big_1, small_1) in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        (model(big_0, small_0) + model(big_1, small_1)).backward()
        optimizer.step(*([] if kind.startswith("torch:") else [1]))
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("name", "servers"), [(name, 1 + 2 * (i % 2)) for i, name in enumerate(CASES)])
def test_workers_have_the_weights_of_one_process_and_all_the_same(
    jobs: Servers, name: str, servers: int
) -> None:
    """A rank may have no rows of a table at all."""
    models = [Embeddings() for _ in range(2)]  # each seeds the random numbers of all threads

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        model = models[rank]
        trainer = Trainer(model, *CASES[name], kv)
        for big, small in batches(rank):
            model(big, small).backward()
            trainer.step(1)
        return [p.detach().clone() for p in model.parameters()]

    first, second = jobs.results(2, servers, body)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for found, expected in zip(first, in_one_process(name), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
