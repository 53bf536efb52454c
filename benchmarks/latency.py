"""How long does the smallest step take, beside an all-reduce?

    python benchmarks/latency.py --out benchmarks/results/latency

`Trainer.step` of one parameter of 16 floats with SGD on 2 servers: its median and its 99th percentile, beside
torch.distributed's all-reduce (gloo) and MPICH's, each with torch's SGD, and the time that one byte and its answer take
through a TCP connection.
"""

from __future__ import annotations

import argparse
import sys

import harness
import step_jobs
import suite
from limits import Limits
from steps import Work

TITLE = "The smallest step: kvtrainer, gloo and MPICH"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    work = Work(1, options.floats, "sgd", warm_up=options.rounds // 10 + 1, rounds=options.rounds)
    jobs = [step_jobs.Job((work,), options.workers, options.servers)]
    return step_jobs.ask(TITLE, jobs, ["gloo flat", step_jobs.MPICH], options, unit="µs", limits=_round_trip)


def _round_trip(case: harness.Case, system: str, limits: Limits) -> dict[str, float]:
    return {"TCP round trip": limits.round_trip}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--floats", type=suite.positive, default=16, help="size of the parameter")
    parser.add_argument("--workers", type=suite.positive, default=2)
    parser.add_argument("--servers", type=suite.positive, default=2)
    parser.add_argument("--rounds", type=suite.positive, default=1000, help="timed steps of a job")
    return step_jobs.add_options(parser, repetitions=5)


if __name__ == "__main__":
    sys.exit(main())
