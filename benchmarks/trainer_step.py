"""How long does `Trainer.step` take in one process, beside torch's fused optimizers?

    python benchmarks/trainer_step.py --out benchmarks/results/trainer_step

A step is what follows a backward pass: every parameter has a new gradient, and afterwards new weights. The systems take
turns, step by step, in one process: torch.optim with fused=True, a Trainer without a kvstore and one with 'local'. Each
has parameters of its own with the same values; after the last step the weights are compared with torch's.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import harness
import suite
import torch
from torch import Tensor
from torch.nn import Parameter

import kvtrainer

Shape = tuple[int, ...]
Step = Callable[[], object]

OURS, TORCH = "kvtrainer", "torch fused"
STORES = {"kvstore=None": None, "kvstore='local'": "local"}
WARM_UP = 3
LEARNING_RATE = 1e-3
TITLE = "One step in one process: a Trainer and torch's fused optimizers"
SETTINGS = "systems take turns, step by step, in one process; 'threads' are those of torch"


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


WORKLOADS: dict[str, Callable[[], list[Shape]]] = {
    "160 x 100,000": lambda: [(100_000,)] * 160,
    "1,000 x 1,000": lambda: [(1000,)] * 1000,
    "10,000 x 100": lambda: [(100,)] * 10_000,
    "ResNet-50": resnet50,
    "GPT-2 small": gpt2_small,
}
DEFAULT = "160 x 100,000;1,000 x 1,000;10,000 x 100;ResNet-50"
OPTIMIZERS = ("sgd", "adam")
"""sgd has momentum; both have torch's meaning while the learning rate stays."""


class System:
    """Parameters of its own, and a function that makes a step from their gradients."""

    def __init__(self, shapes: Sequence[Shape], make: Callable[[list[Parameter]], Step]) -> None:
        gen = torch.Generator().manual_seed(1)
        self.parameters = [Parameter(torch.randn(shape, generator=gen)) for shape in shapes]
        self._step = make(self.parameters)
        self.seconds: list[float] = []

    def run(self, grads: Sequence[Tensor]) -> None:
        """Make a step with these gradients, which a backward pass would have left as new tensors."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad.detach()
        began = time.perf_counter()
        self._step()
        self.seconds.append(time.perf_counter() - began)


def _torch_step(optimizer: str, parameters: list[Parameter]) -> Step:
    if optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, fused=True).step
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, fused=True).step


def _our_step(optimizer: str, store: str | None, parameters: list[Parameter]) -> Step:
    options = {"learning_rate": LEARNING_RATE, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    trainer = kvtrainer.Trainer(parameters, optimizer, options, kvstore=store)
    return lambda: trainer.step(1)


def measure(
    shapes: Sequence[Shape], optimizer: str, stores: Sequence[str], steps: int
) -> dict[str, list[float]]:
    """System → seconds of each step.

    Raises:
        AssertionError: the weights of two systems differ by more than 1e-5 after the last step.
    """
    systems = {TORCH: System(shapes, lambda parameters: _torch_step(optimizer, parameters))}
    for name in stores:
        systems[name] = System(
            shapes, lambda parameters, name=name: _our_step(optimizer, STORES[name], parameters)
        )
    gen = torch.Generator().manual_seed(2)
    # Not near 0, where Adam's epsilon counts, which MXNet adds elsewhere than torch.
    batches = [[torch.rand(shape, generator=gen).add_(0.5 * sign) for shape in shapes] for sign in (1, -3)]
    for number in range(WARM_UP + steps):
        for system in systems.values():
            system.run(batches[number % 2])
    expected = systems[TORCH].parameters
    for name in stores:
        for own, other in zip(systems[name].parameters, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    return {name: system.seconds[WARM_UP:] for name, system in systems.items()}


def main() -> int:
    """Run the comparison and write what is known after every case; return 0."""
    options = _options()
    samples: list[suite.Sample] = []
    question = suite.Question(TITLE, {OURS: "", TORCH: ""}, setting="threads")
    stores = options.stores.split(";")
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch"])
    cases = itertools.product(
        range(options.repetitions),
        options.workloads.split(";"),
        map(int, options.threads.split(",")),
        options.optimizers.split(","),
    )
    for repetition, workload, threads, optimizer in cases:
        torch.set_num_threads(threads)
        shapes = WORKLOADS[workload]()
        steps = options.steps or max(5, min(30, 300_000_000 // sum(map(math.prod, shapes))))
        measured = measure(shapes, optimizer, stores, steps)
        medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
        for store in stores:
            case = harness.Case(workload, str(threads), f"{optimizer}, {store}")
            for system, name in ((OURS, store), (TORCH, TORCH)):
                values = {"rounds": measured[name], "median": medians[name]}
                samples.append(suite.Sample(case, system, repetition, values))
            print(
                f"{workload:14} {threads} threads {optimizer:4} {store:15} {medians[store] * 1e3:8.2f} ms, torch "
                f"{medians[TORCH] * 1e3:8.2f} ms: {medians[TORCH] / medians[store]:.2f} x",
                flush=True,
            )
        machine = harness.describe_machine(versions, SETTINGS)
        report = suite.Report(question, samples, [])
        if options.out:
            report.write(Path(options.out), machine)
    print(report.markdown(machine))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default=DEFAULT, help=f"some of {'; '.join(WORKLOADS)}")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="which run")
    parser.add_argument("--stores", default=";".join(STORES), help="which run; semicolons between them")
    parser.add_argument("--threads", default="1,2", help="numbers of torch's threads")
    parser.add_argument("--repetitions", type=int, default=1, help="with new parameters")
    parser.add_argument("--steps", type=int, default=0, help="timed steps of a case; by default 5 to 30")
    parser.add_argument("--out", default="", help="write OUT.json, OUT.md and OUT.svg")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
