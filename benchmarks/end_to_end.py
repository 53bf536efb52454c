"""How fast is training itself, beside DistributedDataParallel, and beside workers that do not communicate?

    python benchmarks/end_to_end.py --out benchmarks/results/end_to_end

Whole training loops (zero_grad, forward, backward, step with torch's Adam) of small models: samples of all workers in a
second, over servers (`dist_sync`) and between ranks (`device`). DistributedDataParallel runs over gloo, with gradients
as bucket views, a static graph and the fused optimizer. The limit of all is as many processes that train at the same
time, each by itself.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import harness
import models
import numpy as np
import suite
import torch

HERE = Path(__file__).resolve().parent
TITLE = "Training loops: kvtrainer, DistributedDataParallel and workers that do not communicate"
DEVICE, DDP, ALONE, BEFORE = "kvtrainer device", "DDP", "no communication", "before"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    names = [suite.OURS, *[BEFORE] * bool(options.before), DEVICE, DDP, ALONE]
    systems = suite.choose(dict.fromkeys(names, ""), options.systems)
    question = suite.Question(TITLE, systems, unit="samples/s", bound=ALONE)
    jobs = [list(suite.choose(dict.fromkeys(models.MODELS, ""), options.models))]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _measure(system: str, names: list[str], options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Train models on a system, and compare the weights with those of one process."""
    kind = {DEVICE: "device", DDP: "ddp", ALONE: "alone"}.get(system, "kvtrainer")
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        command = [sys.executable, str(HERE / "end_to_end_worker.py"), "--system", kind]
        command += ["--models", ",".join(names), "--rounds", str(options.rounds)]
        command += ["--weights", f"{folder}/weights"]
        measured = _run(kind, command, options.before if system == BEFORE else "", options)
        workers = 1 if system == ALONE else options.workers
        for at, name in enumerate(names):
            found = torch.from_numpy(np.load(f"{folder}/weights.{at}.npy"))
            models.check(name, workers, models.WARM_UP + options.rounds, found)
            measured[name]["amount"] = models.MODELS[name].batch * options.workers
    topology = f"{options.workers} x {options.servers}"
    return {harness.Case(name, topology, "adam"): values for name, values in measured.items()}


def _run(kind: str, command: list[str], checkout: str, options: argparse.Namespace) -> harness.Measured:
    if kind == "kvtrainer":
        return harness.run_kvtrainer_job(
            command, options.workers, options.servers, options.job_timeout, checkout
        )
    return harness.run_torch_job(command, options.workers, options.job_timeout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=2).add_argument
    add("--models", default="", help=f"of {', '.join(models.MODELS)}, commas between them")
    add("--workers", type=suite.positive, default=2)
    add("--servers", type=suite.positive, default=2)
    add("--rounds", type=suite.positive, default=20, help="timed steps of a job")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
