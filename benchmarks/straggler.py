"""How much training do all workers get done together, if one of them is slow?

    python benchmarks/straggler.py --out benchmarks/results/straggler

Four workers, one of which computes four times as long as the others; or of each worker's steps a few take ten times as
long. Sleeping stands for computing, so more workers than cores tell the truth. Samples of all workers in a second, of
steps that all wait for (`dist_sync`, and gloo's all-reduce), with bounded staleness (`dist_ssp`) and without a bound
(`dist_async`). The limit is the sum of what the workers do by themselves, without an exchange.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import harness
import numpy as np
import suite
from numpy.typing import NDArray
from steps import LEARNING_RATE, Gradients
from straggler_worker import SLOWER, STORES, WORK

HERE = Path(__file__).resolve().parent
TITLE = "Four workers, one of them slow: synchronous, stale synchronous, asynchronous"
SAMPLES = 32
"""Of a worker's step."""
_NOTES = "The time of a step is the time that all workers together need for one."


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    systems = suite.choose(dict.fromkeys(STORES, ""), options.systems)
    question = suite.Question(
        TITLE, systems, unit="samples/s", is_first_slowest=True, bound="alone", notes=_NOTES
    )
    jobs = list(suite.choose(dict.fromkeys(SLOWER, ""), options.patterns))
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _measure(store: str, pattern: str, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Have a system take steps for some time, and check the sum of all gradients in the weights."""
    with tempfile.TemporaryDirectory(prefix="kvtrainer-steps-") as folder:
        stem = f"{folder}/results"
        command = [sys.executable, str(HERE / "straggler_worker.py"), "--store", store, "--pattern", pattern]
        command += ["--compute", str(options.compute), "--seconds", str(options.seconds)]
        command += ["--staleness", str(options.staleness), "--results", stem]
        if store.startswith("dist_"):
            measured = harness.run_kvtrainer_job(
                command, options.workers, options.servers, options.job_timeout
            )
        else:
            measured = harness.run_torch_job(command, options.workers, options.job_timeout)
        took = [np.load(f"{stem}.{rank}.npy") for rank in range(options.workers)]
        if store != "alone":
            _check(np.load(f"{stem}.weights.npy"), [len(steps) for steps in took])
    values = measured[pattern]
    # Each worker's rate is that over its own steps, the last of which ends a little after the time is over.
    values["median"] = 1 / sum(len(steps) / steps.sum() for steps in took)
    values["amount"] = SAMPLES
    name = f"one worker {SLOWER[pattern]:g} times slower" if pattern == "constant" else "5 % of steps slow"
    return {harness.Case(name, f"{options.workers} x {options.servers}", WORK.optimizer): values}


def _check(found: NDArray[np.float32], steps: list[int]) -> None:
    """Compare the weights with the sum of the gradients that all workers gave.

    Raises:
        ValueError: they differ.
    """
    total = np.zeros_like(found)
    for rank, count in enumerate(steps):
        grads = Gradients(WORK, rank)
        for number in range(count):
            total += grads.flat(number)
    expected = total * np.float32(-LEARNING_RATE[WORK.optimizer] / len(steps))
    if not np.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise ValueError(f"weights are up to {abs(found - expected).max():g} away from the sum of gradients")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=2).add_argument
    add("--patterns", default="", help=f"of {', '.join(SLOWER)}, commas between them")
    add("--workers", type=suite.positive, default=4)
    add("--servers", type=suite.positive, default=2)
    add("--staleness", type=int, default=4, help="of dist_ssp")
    add("--compute", type=float, default=0.04, help="seconds that a step computes")
    add("--seconds", type=float, default=5.0, help="how long steps are taken")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
