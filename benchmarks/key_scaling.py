"""How does the time of a step grow with the number of parameters, beside all-reduce in one buffer and per tensor?

    python benchmarks/key_scaling.py --out benchmarks/results/key_scaling

Steps of 1 to 10,000 parameters of 100 floats, and of 1,000 of 1,000 floats, with Adam: `Trainer.step`, and `pushpull`
of all keys in one call, through shared memory and over TCP; torch.distributed (gloo), with torch's fused Adam; and
MXNet 1.9.1. gloo has all gradients and all weights in one tensor each ("gloo flat"); or all gradients in one buffer,
and Adam the parameters as a model has them ("gloo flat grads"); or makes one call for each gradient ("gloo per
tensor"). A job of a system measures all of them, one after the other.
"""

from __future__ import annotations

import argparse
import sys

import step_jobs
import suite
from steps import Work

TITLE = "A step of few and of many parameters: kvtrainer, gloo and MXNet"
_MANY = 1000


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    works = tuple(_work(shape, options) for shape in options.shapes.split(","))
    jobs = [step_jobs.Job(works, options.workers, options.servers)]
    peers = [step_jobs.PUSHPULL, "gloo flat", "gloo flat grads", "gloo per tensor", step_jobs.MXNET]
    return step_jobs.ask(TITLE, jobs, peers, options, notes=_NOTES)


def _work(shape: str, options: argparse.Namespace) -> Work:
    """Of more than a thousand parameters a few steps are enough."""
    keys, floats = map(int, shape.split("x"))
    warm_up, rounds = (3, options.rounds) if keys <= _MANY else (2, min(options.rounds, 3))
    return Work(keys, floats, options.optimizer, warm_up=warm_up, rounds=rounds)


_NOTES = "Jobs measure all rows, one after the other, but MXNet's, whose Trainers count their keys from 0."


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        default="1x100,10x100,100x100,1000x100,10000x100,1000x1000",
        help="parameters x floats, commas between them",
    )
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"))
    parser.add_argument("--workers", type=suite.positive, default=2)
    parser.add_argument("--servers", type=suite.positive, default=2)
    parser.add_argument("--rounds", type=suite.positive, default=12, help="timed steps of a job")
    return step_jobs.add_options(parser, repetitions=1, transports="auto,tcp")


if __name__ == "__main__":
    sys.exit(main())
