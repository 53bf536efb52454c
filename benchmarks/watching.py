"""How much slower is a job that somebody watches?

    python benchmarks/watching.py --out benchmarks/results/watching

The same steps with and without `kvlaunch --dashboard`, which asks both servers once a second: of one parameter of 16
floats, where a request is most in the way, and of 100 MiB with Adam.
"""

from __future__ import annotations

import argparse
import sys

import step_jobs
import suite
from steps import Work

TITLE = "A job with and without a page that shows it"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    small = Work(1, 16, "sgd", warm_up=200, rounds=options.rounds)
    large = Work(16, (options.mib << 20) // 4 // 16, "adam", rounds=options.large_rounds)
    jobs = [step_jobs.Job((work,), 2, 2) for work in (small, large)]
    return step_jobs.ask(TITLE, jobs, [step_jobs.WATCHED], options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=suite.positive, default=4000, help="timed steps of the small parameter")
    add("--mib", type=suite.positive, default=100, help="size of the large model")
    add("--large-rounds", type=suite.positive, default=60, help="timed steps of the large parameters")
    return step_jobs.add_options(parser, repetitions=5)


if __name__ == "__main__":
    sys.exit(main())
