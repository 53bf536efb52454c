"""How long does the same step take through shared memory and TCP, and how near to the limit of each?

    python benchmarks/transport.py --out benchmarks/results/transport

`Trainer.step` with SGD for models of several sizes, with each value of KVSTORE_TRANSPORT, beside gloo with one flat
buffer and MXNet 1.9.1 over TCP and over Unix sockets. The limits are what a copy in memory, one TCP connection and
ZeroMQ over TCP alone take for the bytes of a step: each worker's gradient to the servers, and the weights back.
"""

from __future__ import annotations

import argparse
import sys

import harness
import step_jobs
import suite
from limits import Limits
from steps import Work

TITLE = "The same step through shared memory and TCP: kvtrainer, gloo and MXNet"
_NOTES = "Limits are of the bytes of a step: all gradients in, and the weights out to every worker."
_MIB = 1 << 20


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    works = tuple(
        Work(options.tensors, int(float(mib) * _MIB) // 4 // options.tensors, "sgd", rounds=options.rounds)
        for mib in options.mib.split(",")
    )
    sent = {work.name: 2 * options.workers * work.nbytes for work in works}

    def limits(case: harness.Case, system: str, found: Limits) -> dict[str, float]:
        rates = {"memory copy": found.copy, "TCP stream": found.loopback, "ZeroMQ tcp": found.zmq_tcp}
        return {name: sent[case.workload] / rate for name, rate in rates.items()}

    peers = ["gloo flat", step_jobs.MXNET, step_jobs.MXNET_IPC]
    jobs = [step_jobs.Job(works, options.workers, options.servers)]
    return step_jobs.ask(TITLE, jobs, peers, options, notes=_NOTES, limits=limits)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", default="1,10,100", help="sizes of the model, commas between them")
    parser.add_argument("--tensors", type=suite.positive, default=16, help="into which a model is cut")
    parser.add_argument("--workers", type=suite.positive, default=2)
    parser.add_argument("--servers", type=suite.positive, default=2)
    parser.add_argument("--rounds", type=suite.positive, default=10, help="timed steps of a job")
    return step_jobs.add_options(parser, transports="shm,tcp")


if __name__ == "__main__":
    sys.exit(main())
