"""How fast does a model with large embedding tables learn, beside DistributedDataParallel and beside plain torch?

    python benchmarks/ctr.py --out benchmarks/results/ctr

Whole loops (zero_grad, forward, backward, step) of a model that guesses clicks: three tables of together 1.3 M rows of
16 floats, of which a batch of 256 samples on each worker looks up three rows a sample, by Zipf's law; and two small
layers. kvtrainer on 2 workers and 2 servers, with the tables in every worker, and with tables that live on the servers
alone, also with `Trainer.prefetch`; DistributedDataParallel over gloo, which all-reduces the sparse gradients of tables
that every rank has; torch in one process, with the batches of both workers; and as many processes as workers, which do
not communicate: that is the limit, computing included.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from pathlib import Path

import ctr_worker
import harness
import numpy as np
import suite
import torch
from limits import Limits

HERE = Path(__file__).resolve().parent
TITLE = "Learning clicks with large tables: kvtrainer, DistributedDataParallel and torch"
BEFORE, ALONE = "before", "no communication"
STATES = {"sgd": 2, "adagrad": 4}
"""How often an optimizer reads or writes a row of a weight or state."""
SYSTEMS = {
    suite.OURS: "kvtrainer",
    f"{suite.OURS} stored": "stored",
    f"{suite.OURS} prefetched": "prefetched",
    "DDP": "ddp",
    "1 process": "torch",
    ALONE: "alone",
}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    names = [*SYSTEMS, *[BEFORE] * bool(options.before)]
    systems = suite.choose(dict.fromkeys(names, ""), options.systems)
    limits = functools.partial(_limits, options=options)
    question = suite.Question(TITLE, systems, limits, unit="samples/s", bound=ALONE)
    jobs = list(suite.choose(dict.fromkeys(ctr_worker.CLASSES, ""), options.optimizers))
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _limits(case: harness.Case, system: str, found: Limits, options: argparse.Namespace) -> dict[str, float]:
    """The least seconds of a step by memory traffic of the tables, the same for every system.

    Each worker copies the distinct rows of its batch, as fast as rows of 64 bytes are copied from random places, and
    their gradients are read as fast as a copy. Of each distinct row of all batches weights and states are read and
    written, as fast as such rows. Layers and what travels between processes are not counted.
    """
    of_all, of_each = _distinct(options.batch, options.workers)
    row = 4 * ctr_worker.WIDTH
    seconds = (of_each + STATES[case.optimizer] * of_all) * row / found.rows_64
    return {"memory": seconds + of_each * row / found.copy}


@functools.lru_cache(maxsize=1)
def _distinct(batch: int, workers: int) -> tuple[float, float]:
    """The distinct rows of a step: of all workers together, and the sum of those of each; means over all batches."""
    by_rank = [ctr_worker.batches(rank, batch) for rank in range(workers)]
    steps = [[ids for ids, *_ in turn] for turn in zip(*by_rank, strict=True)]
    of_each = sum(len(np.unique(table)) for step in steps for ids in step for table in ids)
    of_all = sum(len(np.unique(torch.cat(own))) for step in steps for own in zip(*step, strict=True))
    return of_all / ctr_worker.BATCHES, of_each / ctr_worker.BATCHES


def _measure(system: str, optimizer: str, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Train on a system, and compare the weights with those of one process."""
    kind = SYSTEMS.get(system, "kvtrainer")
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        weights = f"{folder}/weights.pt"
        command = [sys.executable, str(HERE / "ctr_worker.py"), "--system", kind, "--optimizer", optimizer]
        command += ["--batch", str(options.batch), "--workers", str(options.workers)]
        command += ["--rounds", str(options.rounds), "--weights", weights]
        if kind in ("ddp", "alone", "torch"):
            ranks = 1 if kind == "torch" else options.workers
            measured = harness.run_torch_job(command, ranks, options.job_timeout)
        else:
            checkout = options.before if system == BEFORE else ""
            measured = harness.run_kvtrainer_job(
                command, options.workers, options.servers, options.job_timeout, checkout
            )
        together = 1 if kind == "alone" else options.workers
        _check(torch.load(weights), optimizer, together, options.batch, options.rounds)
    values = measured[optimizer]
    values["amount"] = options.batch * options.workers
    name = f"{options.batch} samples a worker"
    return {harness.Case(name, f"{options.workers} x {options.servers}", optimizer): values}


@functools.lru_cache(maxsize=4)
def _reference(optimizer: str, workers: int, batch: int, rounds: int) -> list[torch.Tensor]:
    """The weights after all rounds in one process."""
    group = ctr_worker.Group()
    training = ctr_worker.start_torch(optimizer, group)
    by_rank = [ctr_worker.batches(rank, batch) for rank in range(workers)]
    given = [ctr_worker.joined(all) for all in zip(*by_rank, strict=True)]
    ctr_worker.train(training, given, rounds, group.barrier)
    return list(training.network.state_dict().values())


def _check(found: list[torch.Tensor], optimizer: str, workers: int, batch: int, rounds: int) -> None:
    """Compare weights with those of one process; sums are rounded in another order.

    Raises:
        AssertionError: they differ.
    """
    for mine, expected in zip(found, _reference(optimizer, workers, batch, rounds), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=2e-3)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=2).add_argument
    add("--optimizers", default="adagrad", help=f"of {', '.join(ctr_worker.CLASSES)}, commas between them")
    add("--batch", type=suite.positive, default=256, help="samples of a worker in a step")
    add("--workers", type=suite.positive, default=2)
    add("--servers", type=suite.positive, default=2)
    add("--rounds", type=suite.positive, default=200, help="timed steps of a job")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
