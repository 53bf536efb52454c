"""How long does a round of row-sparse gradients take, beside all-reducing the dense ones and beside one process?

    python benchmarks/sparse_round.py --out benchmarks/results/sparse_round

A round ends when every worker has the new weights: `Trainer.step` with 2 workers and 2 servers, with sparse gradients
and with dense ones of the same table; torch.distributed's all-reduce (gloo, 2 processes) and then torch.optim; and
torch.optim in one process that has the gradients of both workers, which sends nothing. Systems take turns, job by job.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import harness
from sparse_worker import CLASSES, SYSTEMS, WORKERS, WORKLOADS

HERE = Path(__file__).resolve().parent
SERVERS = 2
OURS = "kvtrainer"
BEFORE = "before"
TITLE = "One row-sparse synchronous round: kvtrainer, dense gradients, and one process"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    samples: list[harness.Sample] = []
    systems = options.systems.split(";") + [BEFORE] * bool(options.before)
    others = [system for system in systems if system != OURS]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    positions = map(int, options.workloads.split(",")) if options.workloads else range(len(WORKLOADS))
    cases = list(itertools.product(positions, options.optimizers.split(","), systems))
    for repetition in range(options.repetitions):
        for at, optimizer, system in cases:
            measured = _run(system, at, optimizer, options)
            for workload, values in measured.items():
                case = harness.Case(workload, f"{WORKERS} x {SERVERS}", optimizer)
                samples.append(harness.Sample(case, system, repetition, values))
                print(
                    f"{repetition} {system:17} {optimizer:8} {values['median'] * 1e3:8.1f} ms  {workload}",
                    flush=True,
                )
        report = harness.Report(TITLE, samples, harness.describe_machine(versions))
        if options.out:
            report.write(Path(options.out), OURS, *others)
    print(report.markdown(OURS, *others))
    return 0


def _run(system: str, at: int, optimizer: str, options: argparse.Namespace) -> harness.Measured:
    script = [sys.executable, str(HERE / "sparse_worker.py")]
    kind, checkout = (OURS, options.before) if system == BEFORE else (system, "")
    command = [*script, "--system", kind, "--workload", str(at), "--optimizer", optimizer]
    if kind.startswith(OURS):
        return harness.run_kvtrainer_job(command, WORKERS, SERVERS, options.job_timeout, checkout)
    return harness.run_torch_job(command, WORKERS if kind.startswith("gloo") else 1, options.job_timeout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3, help="fresh jobs for each system and case")
    parser.add_argument("--optimizers", default="sgd,adagrad", help=f"some of {', '.join(CLASSES)}")
    parser.add_argument("--workloads", default="", help=f"positions 0..{len(WORKLOADS) - 1}; all by default")
    parser.add_argument(
        "--systems", default=";".join(SYSTEMS), help="which run, for a quick look; semicolons between them"
    )
    parser.add_argument(
        "--before", default="", metavar="DIR", help="another checkout, which takes turns with this one"
    )
    parser.add_argument("--out", default="", help="write OUT.json and OUT.md")
    parser.add_argument(
        "--job-timeout", type=float, default=300.0, help="seconds after which a job is killed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
