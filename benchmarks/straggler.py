"""How much training do all workers get done together, if one of them is slow?

    python benchmarks/straggler.py --out benchmarks/results/straggler

Four workers, one of which computes four times as long as the others; or of each worker's steps a few take ten times as
long; or one worker's step in each round takes four times as long, of each in turn. Sleeping stands for computing, so
more workers than cores tell the truth. Samples of all workers in a second, of steps that all wait for (`dist_sync`,
and gloo's all-reduce), of steps that leave out the slowest worker, whose samples then do not count
(`dist_sync+backup`), with bounded staleness (`dist_ssp`) and without a bound (`dist_async`). The limit is the sum of
what the workers do by themselves, without an exchange. What they learn is a linear regression; its loss after as many
samples of all workers together, on each system, says what old weights cost.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import suite
from numpy.typing import NDArray
from straggler_worker import BATCH, RATE, SLOWER, STORES, WORK

HERE = Path(__file__).resolve().parent
TITLE = "Four workers, one of them slow: synchronous, stale synchronous, asynchronous"
NAMES = {
    "constant": "one worker 4 times slower",
    "random": "5 % of steps slow",
    "turns": "each in turn 4 times slower",
}
_NOTES = """The time of a step is the time that all workers together need for one. The loss is 1.01 at first and 0.01 at
best. """


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    systems = suite.choose(dict.fromkeys(STORES, ""), options.systems)
    question = suite.Question(
        TITLE,
        systems,
        unit="samples/s",
        is_first_slowest=True,
        bound="alone",
        notes=_NOTES,
        more={f"loss after {BATCH * options.steps:,} samples": "loss"},
    )
    jobs = [list(suite.choose(dict.fromkeys(SLOWER, ""), options.patterns))]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _measure(
    store: str, patterns: list[str], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Have a system take steps for some time, once with each pattern, and check the weights."""
    with tempfile.TemporaryDirectory(prefix="kvtrainer-steps-") as folder:
        command = [sys.executable, str(HERE / "straggler_worker.py"), "--store", store]
        command += ["--patterns", ",".join(patterns), "--workers", str(options.workers)]
        command += ["--compute", str(options.compute), "--seconds", str(options.seconds)]
        command += ["--staleness", str(options.staleness), "--results", f"{folder}/results"]
        if store.startswith("dist_"):
            measured = harness.run_kvtrainer_job(
                command, options.workers, options.servers, options.job_timeout
            )
        else:
            measured = harness.run_torch_job(command, options.workers, options.job_timeout)
        topology = f"{options.workers} x {options.servers}"
        return {
            harness.Case(NAMES[name], topology, WORK.optimizer): measured[name]
            | _evaluate(f"{folder}/results.{name}", store, options)
            for name in patterns
        }


def _evaluate(stem: str, store: str, options: argparse.Namespace) -> suite.Values:
    """The time of a step, what it does, and the loss, from what all workers wrote.

    Each worker's rate is that over its own steps, the last of which ends a little after the time is over.

    Raises:
        ValueError: the weights are wrong.
    """
    found = [dict(np.load(f"{stem}.{rank}.npz")) for rank in range(options.workers)]
    rate = sum(one["counted"].sum() / one["seconds"].sum() for one in found)
    values = {"median": 1 / rate, "amount": BATCH}
    if store == "alone":
        return values
    _check(np.load(f"{stem}.weights.npy"), [one["given"] for one in found])
    return {**values, "loss": _loss_after(options.steps, found)}


def _loss_after(steps: int, found: Sequence[Mapping[str, NDArray[Any]]]) -> float | None:
    """The loss of weights that have so many steps of all workers in them, between the nearest that were seen.

    None: there were not so many steps.
    """
    versions, losses = (np.concatenate([one[name] for one in found]) for name in ("versions", "losses"))
    if versions.max() < steps:
        return None
    order = np.argsort(versions, kind="stable")
    return float(np.exp(np.interp(steps, versions[order], np.log(losses[order]))))


def _check(found: NDArray[np.float32], given: Sequence[NDArray[np.float64]]) -> None:
    """Compare the weights with the sum of the gradients that all workers gave.

    Raises:
        ValueError: they differ.
    """
    expected = np.sum(given, axis=0) * (-RATE / len(given))
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
    add("--seconds", type=float, default=4.0, help="how long steps are taken")
    add("--steps", type=suite.positive, default=80, help="of all workers, after which the loss is compared")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
