"""How long does the smallest step take, beside an all-reduce?

    python benchmarks/latency.py --out benchmarks/results/latency

`Trainer.step` of one parameter of 16 floats with SGD by 2 workers and 2 servers: its median and its 99th percentile,
beside torch.distributed's all-reduce (gloo) and MPICH's, each with torch's SGD, and the time that one byte and its
answer take through a TCP connection. The same by 1 worker and 1 server, which wait for nobody else, so that is the
length of a step's path; its least time is shown, too, for the median depends on when the system lets processes run. The
Python functions that a worker and a server of kvtrainer call in a step are counted in another short job.
"""

from __future__ import annotations

import argparse
import functools
import sys

import harness
import step_jobs
import suite
from limits import Limits
from steps import Work

TITLE = "The smallest step: kvtrainer, gloo and MPICH"
_LEAST, _WORKER, _SERVER = "least µs", "calls of a worker", "calls of a server"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    work = Work(1, options.floats, "sgd", warm_up=options.rounds // 10 + 1, rounds=options.rounds)
    jobs = [step_jobs.Job((work,), *numbers) for numbers in suite.grid(options.grid)]
    return step_jobs.ask(
        TITLE,
        jobs,
        ["gloo flat", step_jobs.MPICH],
        options,
        functools.partial(_measure, counted=set(), options=options),
        unit="µs",
        limits=_round_trip,
        more={name: name for name in (_LEAST, _WORKER, _SERVER)},
        notes="Calls are those of Python functions in a step.",
    )


def _measure(
    system: str, job: step_jobs.Job, counted: set[tuple[str, step_jobs.Job]], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Have a system do a job, and, when it does it for the first time, count calls."""
    [(case, values)] = step_jobs.measure(system, job, options).items()
    if job.workers == job.servers == 1:
        values[_LEAST] = 1e6 * min(values["rounds"])
    if step_jobs.is_ours(system) and (system, job) not in counted:
        calls = step_jobs.count_calls(system, job, options)
        values |= {_WORKER: calls["worker"], _SERVER: calls["server"]}
        counted.add((system, job))
    return {case: values}


def _round_trip(case: harness.Case, system: str, limits: Limits) -> dict[str, float]:
    return {"TCP round trip": limits.round_trip}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--floats", type=suite.positive, default=16, help="size of the parameter")
    parser.add_argument("--grid", default="2x2,1x1", help="workers x servers, commas between")
    parser.add_argument("--rounds", type=suite.positive, default=1000, help="timed steps of a job")
    return step_jobs.add_options(parser, repetitions=5)


if __name__ == "__main__":
    sys.exit(main())
