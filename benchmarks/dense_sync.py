"""How long does one whole synchronous step of a large model take, beside all-reduce with torch's fused optimizer?

    python benchmarks/dense_sync.py --out benchmarks/results/dense_sync

A step ends when every worker can read the new weights. It is measured twice: from the call of `step`, with gradients
assigned to `.grad` before, and from the start of a backward pass. Beside `Trainer.step` with the optimizer on servers:
torch.distributed (gloo) with one flat buffer, and in DistributedDataParallel's buckets; MPICH with one flat buffer; and
MXNet 1.9.1. Peers update on every rank by torch's fused optimizer, MXNet on its servers. "bare shared memory" is no
peer but what a host allows: the same step of nothing but shared memory, eventfds and fused kernels.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import step_jobs
import suite
from steps import Work

TITLE = "One whole synchronous step of a large model: kvtrainer, gloo, MPICH and MXNet"
_NOTES = "From backward, gloo DDP is DistributedDataParallel; a step alone has its buckets all-reduced."
_MIB = 1 << 20


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    peers = ["gloo flat", "gloo DDP", step_jobs.MPICH, step_jobs.MXNET, step_jobs.BARE]
    return step_jobs.ask(TITLE, _jobs(options), peers, options, notes=_NOTES)


def _jobs(options: argparse.Namespace) -> list[step_jobs.Job]:
    """One job for each work, so that its memory is its own."""
    choices = (options.workers, options.servers, options.mib, options.optimizers, options.starts)
    jobs = []
    for workers, servers, mib, optimizer, start in itertools.product(*(one.split(",") for one in choices)):
        floats = int(float(mib) * _MIB) // 4 // options.tensors
        work = Work(options.tensors, floats, optimizer, start, rounds=options.rounds)
        jobs.append(step_jobs.Job((work,), int(workers), int(servers)))
    return jobs


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="100", help="sizes of the model, commas between them")
    parser.add_argument("--tensors", type=suite.positive, default=16, help="into which the model is cut")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--servers", default="2")
    parser.add_argument("--optimizers", default="adam", help="of adam and sgd")
    parser.add_argument("--starts", default="step,backward", help="from where a step is timed")
    parser.add_argument("--rounds", type=suite.positive, default=17, help="timed steps of a job, after 3")
    return step_jobs.add_options(parser, repetitions=2)


if __name__ == "__main__":
    sys.exit(main())
