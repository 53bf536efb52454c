"""How much longer does a step take if the servers' state outlives their processes?

    python benchmarks/durability.py --out benchmarks/results/durability

The same jobs in turns with `--durability off`, with `process`, and with snapshots every 50 rounds as well, all under
`kvlaunch --restart`, with workers that call `resume()`: 100 MiB in 16 tensors with Adam; 1,000 parameters of 1,000
floats with Adam; one parameter of 16 floats with SGD; and a table of 1 M rows of 64 floats of which each worker has
8,192 ids in a step, with lazy Adam.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import harness
import numpy as np
import sparse
import step_jobs
import suite
import torch
from sparse_steps import Table
from steps import Work

HERE = Path(__file__).resolve().parent
TITLE = "A step with state that outlives the servers: --durability process and off"
SNAPSHOTS = "process + snapshots"
MODES = ("process", "off", SNAPSHOTS)
BEFORE = "process before"
SNAPSHOT_EVERY = 50
DENSE = {
    "large": Work(16, 1_638_400, rounds=2 * SNAPSHOT_EVERY),
    "keys": Work(1000, 1000, warm_up=10, rounds=4 * SNAPSHOT_EVERY),
    "small": Work(1, 16, "sgd", warm_up=100, rounds=2000),
}
SPARSE = {"sparse": Table(1_000_000, 64, 8_192, rounds=4 * SNAPSHOT_EVERY)}
Job = step_jobs.Job | Table


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    systems = {name: "" for name in (*MODES, BEFORE) if name != BEFORE or options.before}
    question = suite.Question(
        TITLE, suite.choose(systems, options.systems), is_first_slowest=True, more={"mean ms": "mean"}
    )
    chosen = suite.choose(dict.fromkeys((*DENSE, *SPARSE), ""), options.cases)
    jobs: list[Job] = [
        SPARSE[name] if name in SPARSE else step_jobs.Job((DENSE[name],), options.workers, options.servers)
        for name in chosen
    ]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _measure(system: str, job: Job, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Have servers of one mode do a job, and compare the weights with those of torch in one process."""
    topology = f"{options.workers} x {options.servers}"
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        stem = f"{folder}/weights"
        if isinstance(job, Table):
            arguments = ["--system", "resuming" if options.resume else "kvtrainer", "--optimizers", "adam"]
            arguments += ["--table", json.dumps(asdict(job)), "--workers", str(options.workers)]
            measured = _run(system, "sparse_worker.py", [*arguments, "--weights", stem], options)
            found, wanted = np.load(f"{stem}.adam.npy"), sparse.reference(job, "adam", options.workers)
            torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-4)
            return {harness.Case(job.name, topology, "adam"): measured["adam"]}
        [work] = job.works
        arguments = ["--store", "resuming" if options.resume else "trainer", "--weights", stem]
        arguments += ["--works", json.dumps([asdict(work)])]
        [values] = _run(system, "step_worker.py", arguments, options).values()
        step_jobs.check(torch.from_numpy(np.load(f"{stem}.0.npy")), work, options.workers)
        return {harness.Case(work.name, topology, work.optimizer): values}


def _run(system: str, script: str, arguments: list[str], options: argparse.Namespace) -> harness.Measured:
    """Run a job; add the mean of its steps in ms, because a snapshot shows in one step of many."""
    checkout = options.before if system == BEFORE else ""
    flags = ["--restart", "1", "--durability", system.split()[0]]
    command = [sys.executable, str(HERE / script), *arguments]
    with tempfile.TemporaryDirectory(prefix="kvtrainer-snapshots-") as folder:
        if system == SNAPSHOTS:
            flags += ["--state-dir", folder, "--snapshot-every", str(SNAPSHOT_EVERY)]
        found = harness.run_kvtrainer_job(
            command, options.workers, options.servers, options.job_timeout, checkout, flags=flags
        )
    return {
        name: {**values, "mean": 1e3 * statistics.mean(values["rounds"])} for name, values in found.items()
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=5).add_argument
    add("--cases", default="", help=f"of {', '.join((*DENSE, *SPARSE))}, commas between them; all by default")
    add("--workers", type=suite.positive, default=2)
    add("--servers", type=suite.positive, default=2)
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    add("--no-resume", dest="resume", action="store_false", help="workers that cannot be replaced")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
