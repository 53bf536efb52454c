"""How much longer does a step take if traffic over TCP is encrypted?

    python benchmarks/keys.py --out benchmarks/results/keys

The same jobs in turns with the keys that `kvlaunch` makes and with `--keys off`, all over TCP
(`KVSTORE_TRANSPORT=tcp`): 100 MiB in 16 tensors with Adam, and one parameter of 16 floats with SGD. Through shared
memory nothing is encrypted.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import harness
import numpy as np
import step_jobs
import suite
import torch
from steps import Work

HERE = Path(__file__).resolve().parent
TITLE = "A step over TCP with keys, which encrypt it, and without"
KEYS, OFF = "keys", "no keys"
WORKS = {
    "large": Work(16, 1_638_400, rounds=40),
    "small": Work(1, 16, "sgd", warm_up=100, rounds=1000),
}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    systems = suite.choose(dict.fromkeys((OFF, KEYS), ""), options.systems)
    question = suite.Question(TITLE, systems)
    jobs = [step_jobs.Job((work,), options.workers, options.servers) for work in WORKS.values()]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _measure(
    system: str, job: step_jobs.Job, options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Do a job with or without keys, and compare the weights with those of torch in one process."""
    [work] = job.works
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        command = [sys.executable, str(HERE / "step_worker.py"), "--store", "trainer"]
        command += ["--weights", f"{folder}/weights", "--works", json.dumps([asdict(work)])]
        flags = ["--keys", "off"] if system == OFF else []
        [values] = harness.run_kvtrainer_job(
            command,
            options.workers,
            options.servers,
            options.job_timeout,
            environ={"KVSTORE_TRANSPORT": "tcp"},
            flags=flags,
        ).values()
        step_jobs.check(torch.from_numpy(np.load(f"{folder}/weights.0.npy")), work, options.workers)
    topology = f"{options.workers} x {options.servers}"
    return {harness.Case(work.name, topology, work.optimizer): values}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=5).add_argument
    add("--workers", type=suite.positive, default=2)
    add("--servers", type=suite.positive, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
