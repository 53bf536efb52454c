"""How long does one dense synchronous round take, beside MXNet 1.9.1 on the same machine?

    python benchmarks/dense_round.py --mxnet-env .venv-mxnet

Runs both systems in turn, job by job, and writes the seconds and their ratio to benchmarks/results. A job is a set of
fresh processes: 2 workers and 1 or 2 servers, with the servers replacing the value by the sum, or applying SGD. A round
is one pushpull, or (with SGD) one `Trainer.step`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path

import harness
import suite
from limits import Limits
from workloads import MIB, WORKLOADS, split_into_jobs

HERE = Path(__file__).resolve().parent
THEIRS, BEFORE = "mxnet", "before"
WORKERS = 2
TITLE = "One dense synchronous round: kvtrainer and MXNet 1.9.1"
_SIZES = {one.name: one.mebibytes * MIB for one in WORKLOADS}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    python = str(_mxnet_python(options))
    known = {suite.OURS: "", THEIRS: harness.why_missing(python, "mxnet")}
    systems = suite.choose(known, options.systems) | ({BEFORE: ""} if options.before else {})
    configurations = itertools.product(map(int, options.servers.split(",")), options.optimizers.split(","))
    jobs = [
        (servers, optimizer, workloads)
        for servers, optimizer in configurations
        for workloads in split_into_jobs(options.workloads, optimizer)
    ]
    measure = functools.partial(_measure, options=options)
    question = suite.Question(TITLE, systems, _limits)
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    if systems.get(THEIRS) == "":
        versions |= harness.installed_versions(python, ["mxnet", "numpy"])
    return suite.run(question, jobs, measure, versions, options)


def _measure(
    system: str, job: tuple[int, str, str], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    servers, optimizer, workloads = job
    arguments = ["--optimizer", optimizer, "--workloads", workloads]
    if system == THEIRS:
        command = [str(_mxnet_python(options)), str(HERE / "mxnet_dense_round.py"), *arguments]
        measured = harness.run_mxnet_job(command, WORKERS, servers, options.job_timeout)
    else:
        command = [sys.executable, str(HERE / "kvtrainer_dense_round.py"), *arguments]
        checkout = options.before if system == BEFORE else ""
        measured = harness.run_kvtrainer_job(command, WORKERS, servers, options.job_timeout, checkout)
    return {
        harness.Case(workload, f"{WORKERS} x {servers}", optimizer): values
        for workload, values in measured.items()
    }


def _limits(case: harness.Case, system: str, found: Limits) -> dict[str, float]:
    """Servers take in each worker's values and give out results."""
    return {"loopback": 2 * WORKERS * _SIZES[case.workload] / found.loopback}


def _mxnet_python(options: argparse.Namespace) -> Path:
    return Path(options.mxnet_env).absolute() / "bin" / "python"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=5).add_argument
    add("--mxnet-env", default=".venv-mxnet", help="environment made by benchmarks/mxnet_env.sh")
    add("--servers", default="1,2")
    add("--optimizers", default="none,sgd")
    add("--workloads", default="", help=f"positions 0..{len(WORKLOADS) - 1}; all by default")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
