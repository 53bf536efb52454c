"""How long does a step of a large table take of which a batch has some rows, beside torch's sparse optimizers?

    python benchmarks/sparse.py --out benchmarks/results/sparse

A table of 1 M rows of 64 floats, and 8,192 ids by Zipf's law on each of 2 workers: `Trainer.step` with 2 servers, until
every worker has the new rows; the same in one process with kvstore='local', and torch's own optimizer for sparse
gradients, each with the rows of both workers; and MXNet 1.9.1 with a row_sparse weight. "pull" is the time in which a
worker has the rows of a batch: `row_sparse_data` of a table that lives on the servers, beside `index_select`.
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
import sparse_worker
import suite
import torch
from limits import Limits
from sparse_steps import PULL, Gradients, Table

HERE = Path(__file__).resolve().parent
TITLE = "A step by some rows of a large table: kvtrainer, torch's sparse optimizers and MXNet"
OPTIMIZERS = ("adam", "sgd", "adagrad", PULL)
STATES = {"sgd": 2, "adagrad": 4, "adam": 6}
"""How often an optimizer reads or writes a row of a weight or state."""
BEFORE, MXNET = "before", "MXNet 1.9.1"
SYSTEMS = {suite.OURS: "kvtrainer", BEFORE: "kvtrainer", f"{suite.OURS} local": "local", "torch": "torch"}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    systems = {name: "" for name in SYSTEMS if name != BEFORE or options.before}
    systems[MXNET] = harness.why_missing(_mxnet(options), "mxnet")
    limits = functools.partial(_limits, options=options)
    question = suite.Question(TITLE, suite.choose(systems, options.systems), limits)
    # A job for each, so that its memory is its own: a table that servers have stays there until the job ends.
    jobs = [[name] for name in suite.choose(dict.fromkeys(OPTIMIZERS, ""), options.optimizers)]
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, functools.partial(_measure, options=options), versions, options)


def _limits(case: harness.Case, system: str, found: Limits, options: argparse.Namespace) -> dict[str, float]:
    """The least seconds of a step by memory traffic, the same for every system.

    Of a step: all rows of gradients are read, as fast as a copy, and of each distinct row of the batch of all workers
    the weights and states are read and written, as fast as rows of 256 bytes are copied from random places. Of "pull":
    each worker reads the distinct rows of its ids. What travels between processes is not counted.
    """
    table = _table(options)
    of_all, of_each = _distinct(table, options.workers)
    row = 4 * table.width
    if case.optimizer == PULL:
        return {"memory": of_each * row / found.rows_256}
    gradients = options.workers * table.ids * row
    return {"memory": gradients / found.copy + STATES[case.optimizer] * of_all * row / found.rows_256}


@functools.lru_cache(maxsize=1)
def _distinct(table: Table, workers: int) -> tuple[float, float]:
    """The distinct rows of a step: of all workers together, and the sum of those of each; means over all rounds."""
    grads, rounds = [Gradients(table, rank) for rank in range(workers)], table.warm_up + table.rounds
    steps = [[one.of(number)[0] for one in grads] for number in range(rounds)]
    of_all = sum(len(np.unique(np.concatenate(ids))) for ids in steps)
    of_each = sum(len(np.unique(own)) for ids in steps for own in ids)
    return of_all / rounds, of_each / rounds


def _measure(
    system: str, optimizers: list[str], options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Have a system make its steps, and compare the weights with those of one process."""
    table = _table(options)
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        weights = f"{folder}/weights"
        command = ["--table", json.dumps(asdict(table)), "--optimizers", ",".join(optimizers)]
        command += ["--workers", str(options.workers), "--weights", weights]
        measured = _run(system, command, options)
        for optimizer in optimizers:
            found = torch.from_numpy(np.load(f"{weights}.{optimizer}.npy"))
            expected = reference(table, optimizer, options.workers)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    topology = f"{options.workers} x {options.servers}"
    return {harness.Case(table.name, topology, name): values for name, values in measured.items()}


def _run(system: str, arguments: list[str], options: argparse.Namespace) -> harness.Measured:
    limit = options.job_timeout
    if system == MXNET:
        command = [_mxnet(options), str(HERE / "mxnet_sparse_worker.py"), *arguments]
        return harness.run_mxnet_job(command, options.workers, options.servers, limit)
    kind = SYSTEMS[system]
    command = [sys.executable, str(HERE / "sparse_worker.py"), "--system", kind, *arguments]
    if kind != "kvtrainer":
        return harness.run_torch_job(command, 1, limit)
    checkout = options.before if system == BEFORE else ""
    return harness.run_kvtrainer_job(command, options.workers, options.servers, limit, checkout)


@functools.lru_cache(maxsize=4)
def reference(table: Table, optimizer: str, workers: int) -> torch.Tensor:
    """The weights after all steps of torch's optimizer in this process."""
    step, weights = sparse_worker.start_torch(table, optimizer)
    grads = [Gradients(table, rank) for rank in range(workers)]
    for number in range(table.warm_up + table.rounds):
        step(sparse_worker.sparse_gradient(table, grads, number))
    return weights()


def _table(options: argparse.Namespace) -> Table:
    return Table(options.rows, options.width, options.ids, rounds=options.rounds)


def _mxnet(options: argparse.Namespace) -> str:
    return str(Path(options.mxnet_env).absolute() / "bin" / "python")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=2).add_argument
    add("--optimizers", default="adam,sgd,adagrad,pull", help=f"of {', '.join(OPTIMIZERS)}")
    add("--rows", type=suite.positive, default=1_000_000, help="of the table")
    add("--width", type=suite.positive, default=64, help="floats of a row")
    add("--ids", type=suite.positive, default=8_192, help="of a worker in a step")
    add("--workers", type=suite.positive, default=2)
    add("--servers", type=suite.positive, default=2)
    add("--rounds", type=suite.positive, default=20, help="timed steps of a job")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    add("--mxnet-env", default=".venv-mxnet", help="environment made by benchmarks/mxnet_env.sh")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
