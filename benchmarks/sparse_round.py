"""How long does a round of row-sparse gradients take, beside all-reducing the dense ones and beside one process?

    python benchmarks/sparse_round.py --out benchmarks/results/sparse_round

A round ends when every worker has the new weights: `Trainer.step` with 2 workers and 2 servers, with sparse gradients
and with dense ones of the same table; torch.distributed's all-reduce (gloo, 2 processes) and then torch.optim; and
torch.optim in one process that has the gradients of both workers, which sends nothing. Systems take turns, job by job.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path

import harness
import suite
from sparse_worker import CLASSES, SYSTEMS, WORKERS, WORKLOADS

HERE = Path(__file__).resolve().parent
SERVERS = 2
BEFORE = "before"
TITLE = "One row-sparse synchronous round: kvtrainer, dense gradients, and one process"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    systems = suite.choose(dict.fromkeys(SYSTEMS, ""), options.systems)
    systems |= {BEFORE: ""} if options.before else {}
    positions = map(int, options.workloads.split(",")) if options.workloads else range(len(WORKLOADS))
    jobs = list(itertools.product(positions, options.optimizers.split(",")))
    measure = functools.partial(_measure, options=options)
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(suite.Question(TITLE, systems), jobs, measure, versions, options)


def _measure(
    system: str, job: tuple[int, str], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    at, optimizer = job
    kind, checkout = (suite.OURS, options.before) if system == BEFORE else (system, "")
    command = [sys.executable, str(HERE / "sparse_worker.py"), "--system", kind]
    command += ["--workload", str(at), "--optimizer", optimizer]
    if kind.startswith(suite.OURS):
        measured = harness.run_kvtrainer_job(command, WORKERS, SERVERS, options.job_timeout, checkout)
    else:
        ranks = WORKERS if kind.startswith("gloo") else 1
        measured = harness.run_torch_job(command, ranks, options.job_timeout)
    topology = f"{WORKERS} x {SERVERS}"
    return {harness.Case(workload, topology, optimizer): values for workload, values in measured.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=3).add_argument
    add("--optimizers", default="sgd,adagrad", help=f"some of {', '.join(CLASSES)}")
    add("--workloads", default="", help=f"positions 0..{len(WORKLOADS) - 1}; all by default")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
