"""How does the time of a step grow with the number of workers, and what do more servers change?

    python benchmarks/scaling.py --out benchmarks/results/scaling

`Trainer.step` of one model with Adam by 1 to 8 workers and 1 to 4 servers on one host, each with gradients of its own,
beside torch.distributed (gloo) in DistributedDataParallel's buckets, of as many workers, and beside a step of as many
processes of which nothing is left but memory that they share. All share the cores of the machine, so with more workers
than cores the work of a step grows with them.
"""

from __future__ import annotations

import argparse
import sys

import step_jobs
import suite
from steps import Work

TITLE = "A step of more workers and more servers: kvtrainer and gloo"
_NOTES = "gloo has no servers: where a row says how many, it is measured again beside them."


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    floats = int(float(options.mib) * (1 << 20)) // 4 // options.tensors
    work = Work(options.tensors, floats, options.optimizer, warm_up=2, rounds=options.rounds)
    jobs = [step_jobs.Job((work,), *numbers) for numbers in suite.grid(options.grid)]
    return step_jobs.ask(TITLE, jobs, options.peers.split(","), options, notes=_NOTES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", default="1x1,2x2,4x4,8x2", help="workers x servers, commas between")
    parser.add_argument("--mib", default="100", help="size of the model")
    parser.add_argument("--tensors", type=suite.positive, default=16, help="into which it is cut")
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"))
    parser.add_argument("--peers", default=f"gloo DDP,{step_jobs.BARE}", help="commas between them")
    parser.add_argument("--rounds", type=suite.positive, default=5, help="timed steps of a job")
    return step_jobs.add_options(parser, repetitions=2)


if __name__ == "__main__":
    sys.exit(main())
