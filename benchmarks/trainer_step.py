"""How long does `Trainer.step` take in one process, beside torch's fused optimizers?

    python benchmarks/trainer_step.py --out benchmarks/results/trainer_step

A step is what follows a backward pass: every parameter has a new gradient, and afterwards new weights. A Trainer
without a kvstore, one with 'local', and torch.optim with fused=True take turns, each in a process of its own, for many
parameters of one size and for as many, and as large, as those of known models; with SGD with momentum, and Adam.
`--device cuda` has parameters on a CUDA device, which a step waits for at its end.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import harness
import numpy as np
import step_jobs
import suite
import torch
from limits import Limits
from steps import Work

Shape = tuple[int, ...]

HERE = Path(__file__).resolve().parent
TITLE = "One step in one process: a Trainer and torch's fused optimizers"
SYSTEMS = {suite.OURS: "none", f"{suite.OURS} local": "local", "torch fused": "fused"}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    systems = suite.choose(dict.fromkeys(SYSTEMS, ""), options.systems)
    chosen = options.workloads.split(";") if options.workloads else WORKLOADS
    works = [
        WORKLOADS[name](optimizer=optimizer, rounds=options.rounds)
        for name, optimizer in itertools.product(chosen, options.optimizers.split(","))
    ]
    sizes = {work.name: work.nbytes for work in works}

    def limits(case: harness.Case, system: str, found: Limits) -> dict[str, float]:
        """The gradient is read once, and the weights are updated. Of a device's memory no limit is measured."""
        if options.device != "cpu":
            return {}
        return {"memory": (1 + step_jobs.STATES[case.optimizer]) * sizes[case.workload] / found.add}

    question = suite.Question(TITLE, systems, limits, setting="threads")
    measure = functools.partial(_measure, works=works, options=options)
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch"])
    versions |= harness.cuda_device(options.device)
    return suite.run(question, options.threads.split(","), measure, versions, options)


def _measure(
    system: str, threads: str, works: list[Work], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Have a system make all steps in a process, and compare the weights with those of torch here."""
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        command = [sys.executable, str(HERE / "step_worker.py"), "--store", SYSTEMS[system]]
        command += ["--threads", threads, "--weights", f"{folder}/weights", "--device", options.device]
        command += ["--works", json.dumps([asdict(work) for work in works])]
        measured = harness.run_torch_job(command, 1, options.job_timeout)
        for at, work in enumerate(works):
            step_jobs.check(torch.from_numpy(np.load(f"{folder}/weights.{at}.npy")), work, 1)
    return {
        harness.Case(work.name, threads, work.optimizer): values
        for work, values in zip(works, measured.values(), strict=True)
    }


def resnet50() -> list[Shape]:
    """Shapes of the parameters of ResNet-50 (He et al., 2015), 25.6 million in 161 tensors."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for at in range(blocks):
            convolutions = [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            convolutions += [] if at else [(4 * planes, width, 1, 1)]
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            width = 4 * planes
    return [*shapes, (1000, width), (1000,)]


def gpt2_small() -> list[Shape]:
    """Shapes of the parameters of GPT-2 (Radford et al., 2019), 124 million in 148 tensors."""
    block: list[Shape] = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
    block += [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *(block * 12), (768,), (768,)]


def _model(name: str, shapes: list[Shape]) -> functools.partial[Work]:
    return functools.partial(Work, 0, 0, model=name, sizes=tuple(map(math.prod, shapes)))


WORKLOADS = {
    "160 x 100,000": functools.partial(Work, 160, 100_000),
    "1,000 x 1,000": functools.partial(Work, 1000, 1000),
    "10,000 x 100": functools.partial(Work, 10_000, 100),
    "ResNet-50": _model("ResNet-50", resnet50()),
    "GPT-2 small": _model("GPT-2 small", gpt2_small()),
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=1).add_argument
    add("--workloads", default="", help=f"of {'; '.join(WORKLOADS)}; semicolons between them")
    add("--optimizers", default="momentum,adam", help="of momentum, adam and sgd")
    add("--threads", default="1,2", help="numbers of torch's threads")
    add("--rounds", type=suite.positive, default=15, help="timed steps of a job")
    add("--device", default="cpu", help="where the parameters are: cpu or cuda")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
