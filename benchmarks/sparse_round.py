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
THEIRS = [name for name in SYSTEMS if name != OURS]
TITLE = "One row-sparse synchronous round: kvtrainer, dense gradients, and one process"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    samples: list[harness.Sample] = []
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    cases = list(itertools.product(range(len(WORKLOADS)), options.optimizers.split(","), SYSTEMS))
    for repetition in range(options.repetitions):
        for at, optimizer, system in cases:
            measured = _run(system, at, optimizer, options.job_timeout)
            for workload, values in measured.items():
                case = harness.Case(workload, f"{WORKERS} x {SERVERS}", optimizer)
                samples.append(harness.Sample(case, system, repetition, values))
                print(
                    f"{repetition} {system:17} {optimizer:8} {values['median'] * 1e3:8.1f} ms  {workload}",
                    flush=True,
                )
        report = harness.Report(TITLE, samples, harness.describe_machine(versions))
        if options.out:
            report.write(Path(options.out), OURS, *THEIRS)
    print(report.markdown(OURS, *THEIRS))
    return 0


def _run(system: str, at: int, optimizer: str, timeout: float) -> harness.Measured:
    script = [sys.executable, str(HERE / "sparse_worker.py")]
    command = [*script, "--system", system, "--workload", str(at), "--optimizer", optimizer]
    if system.startswith("kvtrainer"):
        return harness.run_kvtrainer_job(command, WORKERS, SERVERS, timeout)
    return harness.run_torch_job(command, WORKERS if system.startswith("gloo") else 1, timeout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3, help="fresh jobs for each system and case")
    parser.add_argument("--optimizers", default="sgd,adagrad", help=f"some of {', '.join(CLASSES)}")
    parser.add_argument("--out", default="", help="write OUT.json and OUT.md")
    parser.add_argument(
        "--job-timeout", type=float, default=300.0, help="seconds after which a job is killed"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
