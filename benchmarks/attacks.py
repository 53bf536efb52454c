"""How much longer does a step take while 32 attackers are at the server, which has keys?

    python benchmarks/attacks.py --out benchmarks/results/attacks

A job with 2 workers and 1 server trains 5,000 floats with SGD, three times in turns: alone; while 32 attackers of 12
kinds (`tests/support/attackers.py`) are at another server on this machine; and while the same attackers are at its own
server. They are silent, send garbage, flood it with connections, use unknown keys or keys of other roles and ranks, a
stolen routing id and recorded traffic, and never read replies. On a machine with few cores the attackers, and the
server that they are at, take the job's CPU; the second case shows how much of the delay is due to that alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import harness
import suite

from kvstore_server.keys import KeyHolder, Role, make_keys

_TITLE = "A job while 32 attackers are at its server"
_SETTINGS = "OMP_NUM_THREADS=1 in every process; attackers run at the lowest priority (nice 19)"
_HERE = Path(__file__).resolve().parent
_LIMIT = 120.0
_ALONE, _OTHER, _ATTACKED = "alone", "attackers at another server", "attackers at its server"
_HEAD = ("transport", "system", "p50 ms", "p99 ms", "p99 beside alone", "p99 beside attackers elsewhere")
_LEGEND = """\
Medians (min to max) over repetitions; ratios are taken within a repetition, below 1: faster than that.
"""


@dataclass(frozen=True)
class Sample:
    """One job; seconds of a step of rank 0."""

    transport: str
    system: str
    repetition: int
    p50: float
    p99: float


def main() -> int:
    """Run all, write what is known after every repetition, print the table; return 0."""
    options = _options()
    samples: list[Sample] = []
    for repetition in range(options.repetitions):
        for transport in ("auto", "tcp"):
            for system in (_ALONE, _OTHER, _ATTACKED):
                times = sorted(_measure(system, transport, options.steps))
                p99 = times[len(times) * 99 // 100]
                samples.append(Sample(transport, system, repetition, statistics.median(times), p99))
        rows = _rows(samples)
        print("\n".join(rows), flush=True)
        if options.out:
            table = harness.Table(_TITLE, _LEGEND, _HEAD, rows)
            harness.write_table(Path(options.out), table, samples, _SETTINGS)
    return 0


def _measure(system: str, transport: str, steps: int) -> list[float]:
    """The seconds of each step of rank 0, while attackers are where `system` says."""
    with harness.Processes() as job:
        folder = job.out.parent
        make_keys(
            folder / "server",
            [
                KeyHolder("worker", b"", Role.WORKER),
                KeyHolder("observer", b"", Role.OBSERVER),
                KeyHolder("admin", b"", Role.ADMIN),
                KeyHolder("alice", b"", Role.WORKER, ("job-*",), frozenset({0})),
            ],
        )
        for path in (folder / "server").glob("*.secret"):
            if path.stem != "server":
                own = folder / "clients" / path.stem
                own.mkdir(mode=0o700, parents=True)
                for name in (path.name, "server.public"):
                    (own / name).write_bytes((folder / "server" / name).read_bytes())
                    (own / name).chmod(0o600)
        # 1. Two servers, and the job on the first.
        ports = [harness.free_port() for _ in range(2)]
        addresses = [f"tcp://127.0.0.1:{port}" for port in ports]
        flags = ["--keys", str(folder / "server"), "--log", "error"]
        for address in addresses:
            command = [sys.executable, "-m", "kvstore_server", "--bind", address, *flags]
            job.start(command, {}, serves=True)
        environ = {
            "KVSTORE_SERVERS": addresses[0],
            "KVSTORE_NUM_WORKERS": "2",
            "KVSTORE_NAMESPACE": "job",
            "KVSTORE_KEYS": str(folder / "clients" / "worker"),
            "KVSTORE_TRANSPORT": transport,
        }
        for rank in range(2):
            worker = [
                sys.executable,
                str(_HERE / "attacks_worker.py"),
                "--steps",
                str(steps),
                "--out",
                str(job.out),
            ]
            job.start(worker, {**environ, "KVSTORE_RANK": str(rank)})
        # 2. The attackers begin once it trains, and know a routing id of rank 0.
        ready, go = job.out.with_suffix(".ready"), job.out.with_suffix(".go")
        deadline = time.monotonic() + _LIMIT
        while not ready.exists():
            job.check()
            if time.monotonic() > deadline:
                raise harness.JobError(f"the job did not begin within {_LIMIT:g} s")
            time.sleep(0.02)
        attackers = None
        if system != _ALONE:
            address = addresses[system == _OTHER]
            attackers = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.attackers",
                    address,
                    str(folder / "clients"),
                    ready.read_text(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=_HERE.parent,
                preexec_fn=lambda: os.nice(19) and None,
            )
            assert attackers.stdout is not None
            attackers.stdout.readline()
        # 3. The steps.
        try:
            go.touch()
            found = job.wait(_LIMIT)
        finally:
            if attackers is not None:
                attackers.kill()
                attackers.wait()
        times: list[float] = json.loads(json.dumps(found))["steps"]["seconds"]
        return times


def _rows(samples: list[Sample]) -> list[str]:
    rows = []
    for transport in ("auto", "tcp"):
        of = {
            system: [one for one in samples if (one.transport, one.system) == (transport, system)]
            for system in (_ALONE, _OTHER, _ATTACKED)
        }
        for system, own in of.items():
            cells = [transport, system]
            cells.append(harness.spread([1000 * one.p50 for one in own]))
            cells.append(harness.spread([1000 * one.p99 for one in own]))
            for other in (of[_ALONE], of[_OTHER]):
                cells.append(harness.spread([a.p99 / b.p99 for a, b in zip(own, other, strict=True)]))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=suite.positive, default=1000)
    parser.add_argument("--repetitions", type=suite.positive, default=5)
    parser.add_argument("--out", default="", help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
