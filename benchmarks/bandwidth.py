"""How long does a synchronous step take where links between hosts are the limit, beside an all-reduce over them?

    sudo .venv/bin/python benchmarks/bandwidth.py --out benchmarks/results/bandwidth

4 workers and 4 servers, each on a host of its own: a network namespace behind a link of 1 Gb/s, 200 Mb/s or 100 Mb/s
each way, by a token bucket. `Trainer.step` with SGD, also with what travels compressed in both directions, beside gloo
with one flat buffer. The limit is the time in which a link carries the model once. "overlapped" is a loop that computes
for as long: it pushes layer by layer while it computes backwards, and computes each layer forwards as soon as that is
there, the first layers with the highest priority, or all with the same ("fifo"); or a Trainer, plain or with overlap.
Needs root, to make the network, which goes when the program does, however that ends. The table says what the default
leaves out, and how to ask for that.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import network
import numpy as np
import step_jobs
import suite
import torch
from step_worker import CODECS
from steps import Work

TITLE = (
    "A synchronous step over slow links, 4 workers and 4 servers on hosts of their own: kvtrainer and gloo"
)
FIFO, GLOO = "kvtrainer fifo", "gloo flat"
PLAIN, OVERLAP = "kvtrainer plain", "kvtrainer overlap"
BY_HOST = "kvtrainer by host"
STEPS = {suite.OURS: "trainer", **{f"kvtrainer {one}": one for one in CODECS}, GLOO: "flat"}
OVERLAPPED = {suite.OURS: "urgent first", FIFO: "fifo", PLAIN: "plain", OVERLAP: "overlap"}
HOSTS = {suite.OURS: "trainer", BY_HOST: "by host"}
TOPK = "kvtrainer topk"
_LINE, _LONGER = 1024, 3
_NOTES = "Where codecs compress, the link limit is that of plain float32, too."
_ALL_RATES, _RATES = "1000,200,100", "1000,100"
_SETTINGS = "OMP_NUM_THREADS=1 in every process; hosts are network namespaces that talk over TCP"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    code = network.run_apart()
    if code is not None:
        return code
    torch.set_num_threads(1)
    systems = suite.choose(dict.fromkeys([*STEPS, *OVERLAPPED, BY_HOST], ""), options.systems)
    notes = _NOTES
    if not options.systems:
        systems[TOPK] = f"left out of the default: --systems '{TOPK}'"
    if options.megabits == _RATES:
        notes += f" Links of 200 Mb/s are left out of the default: --megabits {_ALL_RATES}"
    jobs, topology = _jobs(options), f"{options.workers} x {options.servers}"
    limits = {case: {"link": least} for job in jobs for case, least in job.limits(topology).items()}
    question = suite.Question(
        TITLE, systems, lambda case, system, found: limits[case], notes=notes, settings=_SETTINGS
    )
    hosts = network.Network(options.workers + options.servers)
    measure = functools.partial(_measure, hosts=hosts, options=options)
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    return suite.run(question, jobs, measure, versions, options)


@dataclass(frozen=True)
class Job:
    """For each rate a model that links carry in so many seconds; how systems take part, and how cases are called."""

    rates: Sequence[int]
    seconds: float
    tensors: int
    rounds: int
    stores: Mapping[str, str]
    name: str = ""
    together: int = 1
    """How many workers share a host."""

    def works(self) -> list[Work]:
        """The steps at each rate."""
        floats = [int(rate * 1e6 / 32 * self.seconds / self.tensors) // _LINE * _LINE for rate in self.rates]
        return [Work(self.tensors, max(one, _LINE), "sgd", warm_up=2, rounds=self.rounds) for one in floats]

    def limits(self, topology: str) -> dict[harness.Case, float]:
        """The least seconds of each case: a worker sends its gradient while it receives weights."""
        return {
            harness.Case(f"{rate} Mb/s, {work.name}{self.name}", topology, work.optimizer): (
                8 * work.nbytes / (rate * 1e6)
            )
            for rate, work in zip(self.rates, self.works(), strict=True)
        }


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Steps at all rates, and overlapped ones of fewer, larger layers at the least, where cores have time left."""
    rates = [suite.positive(one) for one in options.megabits.split(",")]
    long = _LONGER * options.seconds
    return [
        Job(rates, options.seconds, 16, options.rounds, STEPS),
        Job([min(rates)], long, 8, options.rounds, OVERLAPPED, ", overlapped"),
        Job([min(rates)], options.seconds, 16, options.rounds, HOSTS, ", 2 workers on a host", 2),
    ]


def _measure(
    system: str, job: Job, hosts: network.Network, options: argparse.Namespace
) -> dict[harness.Case, suite.Values]:
    """Have a system do a job that concerns it, and compare the weights with those of one process."""
    store = job.stores.get(system)
    if store is None:
        return {}
    works, workers, servers = job.works(), options.workers, options.servers
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        command = [sys.executable, str(Path(__file__).with_name("step_worker.py")), "--store", store]
        command += ["--works", json.dumps([asdict(work) for work in works]), "--weights", f"{folder}/weights"]
        command += ["--compute", str(job.seconds)]
        if system == GLOO:
            measured = hosts.run_torch_job(command, workers, job.rates, options.job_timeout)
        else:
            measured = hosts.run_kvtrainer_job(
                command, workers, servers, job.rates, options.job_timeout, job.together
            )
        for at, work in enumerate(works):
            found = torch.from_numpy(np.load(f"{folder}/weights.{at}.npy"))
            step_jobs.check(
                found, work, workers, *[CODECS.get(store, {}).get(what, "none") for what in ("type", "pull")]
            )
    cases = job.limits(f"{workers} x {servers}")
    return dict(zip(cases, measured.values(), strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=1).add_argument
    add("--megabits", default=_RATES, help="rates of the links, commas between them")
    add(
        "--seconds",
        type=float,
        default=0.2,
        help="in which a link carries a model, and in which it is computed",
    )
    add("--workers", type=suite.positive, default=4)
    add("--servers", type=suite.positive, default=4)
    add("--rounds", type=suite.positive, default=5, help="timed steps of a job")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
