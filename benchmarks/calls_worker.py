"""One worker of a job in which the Python function calls of a step are counted; started by `latency.py`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from calls import COUNT, calls_so_far
from steps import LEARNING_RATE

import kvtrainer


def main() -> None:
    """Count, and write the calls of a step: those of worker 0, and of the server that has the parameter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--floats", type=int, required=True, help="elements of the parameter")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", required=True, help="file for the counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parameter = torch.nn.Parameter(torch.zeros(options.floats))
    kv = kvtrainer.kvstore.create("dist_sync")
    trainer = kvtrainer.Trainer([parameter], "sgd", {"learning_rate": LEARNING_RATE["sgd"]}, kvstore=kv)

    def count_after(steps: int) -> list[int]:
        """The calls of this worker and of each server so far, after some more steps."""
        for _ in range(steps):
            parameter.grad = torch.full_like(parameter, 0.5).detach()
            trainer.step(kv.num_workers)
        kv.barrier()
        counts = [calls_so_far(), *kv.send_command_to_servers(COUNT, "")] if kv.rank == 0 else []
        kv.barrier()
        return list(map(int, counts))

    # What else is called between two counts, for barriers and the command, is the same with any number of steps.
    warm, once, twice = (count_after(steps) for steps in (10, options.steps, 2 * options.steps))
    if kv.rank == 0:
        worker, *servers = (
            (c - 2 * b + a) / options.steps for a, b, c in zip(warm, once, twice, strict=True)
        )
        Path(options.out).write_text(json.dumps({"calls": {"worker": worker, "server": max(servers)}}))


if __name__ == "__main__":
    main()
