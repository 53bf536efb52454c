"""How long does one dense synchronous round take, beside MXNet 1.9.1 on the same machine?

    python benchmarks/dense_round.py --mxnet-env .venv-mxnet

Runs both systems in turn, job by job, and writes the seconds and their ratio to benchmarks/results. A job is a set of
fresh processes: 2 workers and 1 or 2 servers, with the servers replacing the value by the sum, or applying SGD. A round
is one pushpull, or (with SGD) one `Trainer.step`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import harness
from workloads import WORKLOADS, split_into_jobs

HERE = Path(__file__).resolve().parent
OURS, THEIRS, BEFORE = "kvtrainer", "mxnet", "before"
WORKERS = 2
TITLE = "One dense synchronous round: kvtrainer and MXNet 1.9.1"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    systems = options.systems.split(",") + [BEFORE] * bool(options.before)
    others = [system for system in systems if system != OURS]
    versions = _versions(systems, options)
    samples: list[harness.Sample] = []
    for repetition in range(options.repetitions):
        samples += _repeat(repetition, systems, options)
        report = harness.Report(TITLE, samples, harness.describe_machine(versions))
        if options.out:
            report.write(Path(options.out), OURS, *others)
    print(report.markdown(OURS, *others))
    return 0


def _repeat(repetition: int, systems: list[str], options: argparse.Namespace) -> list[harness.Sample]:
    """One job of every configuration on every system, the systems taking turns."""
    samples = []
    configurations = itertools.product(map(int, options.servers.split(",")), options.optimizers.split(","))
    for servers, optimizer in configurations:
        jobs = split_into_jobs(options.workloads, optimizer)
        for workloads, system in itertools.product(jobs, systems):
            measured = _run(system, servers, ["--optimizer", optimizer, "--workloads", workloads], options)
            topology = f"{WORKERS} x {servers}"
            for workload, values in measured.items():
                case = harness.Case(workload, topology, optimizer)
                samples.append(harness.Sample(case, system, repetition, values))
            print(f"{repetition} {system:9} {topology} {optimizer:4}", _short(measured), flush=True)
    return samples


def _run(system: str, servers: int, arguments: list[str], options: argparse.Namespace) -> harness.Measured:
    if system in (OURS, BEFORE):
        command = [sys.executable, str(HERE / "kvtrainer_dense_round.py"), *arguments]
        checkout = options.before if system == BEFORE else ""
        return harness.run_kvtrainer_job(command, WORKERS, servers, options.job_timeout, checkout)
    command = [str(_mxnet_python(options)), str(HERE / "mxnet_dense_round.py"), *arguments]
    return harness.run_mxnet_job(command, WORKERS, servers, options.job_timeout)


def _versions(systems: list[str], options: argparse.Namespace) -> dict[str, str]:
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    if THEIRS in systems:
        versions |= harness.installed_versions(str(_mxnet_python(options)), ["mxnet", "numpy"])
    return versions


def _mxnet_python(options: argparse.Namespace) -> Path:
    return Path(options.mxnet_env) / "bin" / "python"


def _short(measured: harness.Measured) -> str:
    return "  ".join(f"{one['median'] * 1e3:.1f} ms" for one in measured.values())


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mxnet-env", default=".venv-mxnet", help="environment made by benchmarks/mxnet_env.sh"
    )
    parser.add_argument(
        "--repetitions", type=_positive, default=5, help="fresh jobs for each system and configuration"
    )
    parser.add_argument("--servers", default="1,2")
    parser.add_argument("--optimizers", default="none,sgd")
    parser.add_argument("--workloads", default="", help=f"positions 0..{len(WORKLOADS) - 1}; all by default")
    parser.add_argument(
        "--systems", default=f"{OURS},{THEIRS}", help="run one of the two only, for a quick look"
    )
    parser.add_argument(
        "--before", default="", metavar="DIR", help="another checkout, which takes turns with this one"
    )
    parser.add_argument(
        "--out", default="", help="write OUT.json and OUT.md, say benchmarks/results/dense_round"
    )
    parser.add_argument(
        "--job-timeout", type=float, default=300.0, help="seconds after which a job is killed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
