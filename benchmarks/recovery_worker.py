"""One worker that makes steps until it is ended, and marks what happens; started by `recovery.py`."""

from __future__ import annotations

import argparse
import logging

import torch
from recovery_marks import ANSWERED, RESUMED, STEPPED, mark, mark_start

import kvtrainer


class Returns(logging.Handler):
    """Marks when a server that was gone answers this worker."""

    def emit(self, record: logging.LogRecord) -> None:
        if "is back after" in record.msg:
            mark("worker", ANSWERED)


def main() -> None:
    """Make steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, required=True, help="parameters")
    parser.add_argument("--floats", type=int, required=True, help="elements of each")
    options = parser.parse_args()
    # 1. A model, and gradients that are the same in all steps.
    torch.set_num_threads(1)
    logging.getLogger("kvtrainer.client.session").addHandler(Returns())
    model = [torch.nn.Parameter(torch.zeros(options.floats)) for _ in range(options.keys)]
    grads = [torch.full_like(one, 0.5).detach() for one in model]
    trainer = kvtrainer.Trainer(model, "adam", {"learning_rate": 1e-3}, kvstore="dist_sync")
    mark_start("worker")
    # 2. Take the rank's place, and go on.
    trainer.resume()
    mark("worker", RESUMED)
    while True:
        for parameter, grad in zip(model, grads, strict=True):
            parameter.grad = grad.detach()  # another object, so a new gradient
        trainer.step(trainer.num_workers)
        mark("worker", STEPPED)


if __name__ == "__main__":
    main()
