"""Worker: trains embeddings with row-sparse gradients on servers, and delivers its weights and refusals."""

from __future__ import annotations

from typing import Any

import torch

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError
from tests.support.jobs import Results, deliver, own_place
from tests.support.sparse_model import CASES, Embeddings, batches


def main() -> None:
    rank, num_workers = own_place()
    results: dict[str, Any] = {name: trained(name, rank) for name in CASES}
    deliver({**results, "reduced": refusal(), "num_workers": num_workers})


def trained(name: str, rank: int) -> Results:
    """The weights after each worker's own batches; a rank may have no rows of a table at all."""
    optimizer, options = CASES[name]
    model = Embeddings()
    with Trainer(model, optimizer, options, "dist_sync") as trainer:
        for big, small in batches(rank):
            model(big, small).backward()
            trainer.step(1)
    return {"weights": [p.detach().clone() for p in model.parameters()]}


def refusal() -> str:
    """What a Trainer that updates by itself says to rows that other workers do not have."""
    table = torch.nn.Embedding(3, 1, sparse=True)
    with Trainer(table, "sgd", kvstore="dist_sync", update_on_kvstore=False) as trainer:
        table(torch.tensor([1])).sum().backward()
        try:
            trainer.step(1)
        except ConfigurationError as error:
            return str(error)
    return "nothing"


if __name__ == "__main__":
    main()
