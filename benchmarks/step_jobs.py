"""Systems that make the same steps: how each is started, what is missing here, and the check of their weights.

Used by the benchmarks of one step: `dense_sync.py`, `transport.py`, `scaling.py`, `key_scaling.py` and `latency.py`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import suite
import torch
from limits import Limits
from step_worker import make_updater
from steps import Gradients, Work

from kvstore_server.codec import make_codec
from kvstore_server.plan import Plan, TensorSpec, make_plan
from kvtrainer.client.tables import Compressor

HERE = Path(__file__).resolve().parent
BEFORE = "before"
TORCH = {
    "gloo flat": "flat",
    "gloo flat grads": "flat grads",
    "gloo DDP": "buckets",
    "gloo per tensor": "tensors",
}
PUSHPULL, MPICH, MXNET, MXNET_IPC = "pushpull", "mpich", "mxnet", "mxnet ipc"
BARE = "bare shared memory"
"""No peer, but a step of which nothing is left that does not move or change numbers."""
STATES = {"adam": 6, "sgd": 2, "momentum": 4}
"""How often an optimizer reads or writes a weight or state, the gradient aside."""


@dataclass(frozen=True)
class Job:
    """Work that one set of fresh processes does, one after the other."""

    works: tuple[Work, ...]
    workers: int
    servers: int


_MIB = 1 << 20
_DIFFERING = 1e-3
"""The share of weights that may differ where their changes are compressed."""


def add_options(
    parser: argparse.ArgumentParser, repetitions: int = 3, transports: str = "auto"
) -> argparse.Namespace:
    """Parse what these benchmarks take together with their own options."""
    add = suite.add_options(parser, repetitions).add_argument
    add("--transports", default=transports, help="values of KVSTORE_TRANSPORT, commas between them")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    add("--device", default="cpu", help="where workers have their parameters: cpu, or cuda, which all share")
    add("--mpi-env", default=".venv-mpi", help="environment made by benchmarks/mpi_env.sh")
    add("--mxnet-env", default=".venv-mxnet", help="environment made by benchmarks/mxnet_env.sh")
    return parser.parse_args()


def ask(
    title: str,
    jobs: Sequence[Job],
    peers: Sequence[str],
    options: argparse.Namespace,
    run_job: Callable[[str, Job], dict[harness.Case, suite.Values]] | None = None,
    **more: Any,
) -> int:
    """Have kvtrainer and `peers` do all jobs in turns, and report; return 0.

    kvtrainer takes part with each transport, and from another checkout if `options` names one. A peer that is called
    "pushpull" is kvtrainer's verb, with each transport. A system does a job by `run_job`, by default by `measure`.
    `more` are fields of the Question.
    """
    found = _systems(peers, options)
    work_of = {_case(job, work): (job, work) for job in jobs for work in job.works}
    show = {"limits": lambda case, system, limits: _limits(system, *work_of[case], limits), **more}
    question, versions = suite.Question(title, found, **show), _versions(found, options)
    return suite.run(
        question, jobs, run_job or functools.partial(measure, options=options), versions, options
    )


def _systems(peers: Sequence[str], options: argparse.Namespace) -> dict[str, str]:
    ours = [suite.OURS if one == "auto" else f"{suite.OURS} {one}" for one in options.transports.split(",")]
    verbs = [f"{name} {PUSHPULL}" for name in ours if PUSHPULL in peers]
    names = [*ours, *[BEFORE] * bool(options.before), *verbs, *[peer for peer in peers if peer != PUSHPULL]]
    return suite.choose({name: _missing(name, options) for name in names}, options.systems)


def _case(job: Job, work: Work) -> harness.Case:
    return harness.Case(work.name, f"{job.workers} x {job.servers}", work.optimizer)


def _versions(found: dict[str, str], options: argparse.Namespace) -> dict[str, str]:
    """Versions of what runs."""
    known = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "pyzmq"])
    for name, packages in ((MPICH, ["mpich", "mpi4py"]), (MXNET, ["mxnet"])):
        if found.get(name) == "":
            known |= harness.installed_versions(_python(name, options), packages)
    return known | harness.cuda_device(options.device)


def measure(system: str, job: Job, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Have a system do a job, and compare the weights with those of torch in one process.

    Raises:
        AssertionError: weights differ.
    """
    if system in (MXNET, MXNET_IPC) and len(job.works) > 1:  # its Trainers number their keys from 0
        alone = [replace(job, works=(work,)) for work in job.works]
        return {case: found for one in alone for case, found in measure(system, one, options).items()}
    with tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        stem = f"{folder}/weights"
        works = json.dumps([asdict(work) for work in job.works])
        measured = _run(system, job, ["--works", works, "--weights", stem], options)
        for at, work in enumerate(job.works):
            check(torch.from_numpy(np.load(f"{stem}.{at}.npy")), work, job.workers)
    cases = {_case(job, work): values for work, values in zip(job.works, measured.values(), strict=True)}
    for work, values in zip(job.works, cases.values(), strict=True):
        grown = values["usage"].get("grown")
        if grown is not None and work.nbytes >= 1 << 20:
            values["usage"]["models"] = grown / work.nbytes
    return cases


def is_ours(system: str) -> bool:
    """Whether a system is a `Trainer`, of this checkout or another."""
    return system == BEFORE or system.split()[0] == suite.OURS


def count_calls(system: str, job: Job, options: argparse.Namespace) -> dict[str, float]:
    """Count the Python function calls of a step with SGD of one parameter, in a job of its own.

    Returns:
        "worker": those of worker 0; "server": those of the server that has the parameter.
    """
    command = [sys.executable, str(HERE / "calls_worker.py"), "--floats", str(job.works[0].floats)]
    calls: dict[str, float] = _run_ours(system, job, command, options, ("--import", "calls"))["calls"]
    return calls


def check(
    found: torch.Tensor, work: Work, workers: int, codec: str = "none", pull_codec: str = "none"
) -> None:
    """Compare the weights after all rounds with those of torch in this process.

    Args:
        codec: How workers compress gradients; what that takes from one is left for the next.
        pull_codec: How weights come back: rounded, with bf16, else their changes, of which the same is true. A few
            elements may then differ, for where the codec draws a line the last bit counts.

    Raises:
        AssertionError: they differ.
    """
    rounding = 2.0**-8 if pull_codec == "bf16" else 1e-4
    wanted = _reference(work, workers, codec, pull_codec)
    if pull_codec in ("none", "bf16"):
        torch.testing.assert_close(found, wanted, rtol=rounding, atol=1e-5)
    share = (~torch.isclose(found, wanted, rtol=rounding, atol=1e-5)).double().mean().item()
    assert share < _DIFFERING, f"{share:.2%} of the weights are not those of torch"


def _limits(system: str, job: Job, work: Work, found: Limits) -> dict[str, float]:
    """The least seconds of a step: by memory traffic of any exchange, and by bytes through one TCP connection.

    Memory: every gradient is read, and the weights are updated once. Loopback: servers take in each gradient and give
    out the weights; an all-reduce sends the gradients but one, twice. Of models below a MiB, for which bytes hardly
    count, also a round trip through TCP, which is what any exchange through it takes.
    """
    size = work.nbytes
    reduces = system in TORCH or system == MPICH
    sent = 2 * (job.workers - reduces) * size
    traffic = (job.workers + STATES[work.optimizer]) * size
    least = {"memory": traffic / found.add, "loopback": sent / found.loopback}
    return least if size >= _MIB else {**least, "TCP round trip": found.round_trip}


def _run(system: str, job: Job, arguments: list[str], options: argparse.Namespace) -> harness.Measured:
    limit = options.job_timeout
    if system in (MXNET, MXNET_IPC):
        command = [_python(MXNET, options), str(HERE / "mxnet_step_worker.py"), *arguments]
        return harness.run_mxnet_job(command, job.workers, job.servers, limit, system == MXNET_IPC)
    if system == BARE:
        command = [sys.executable, str(HERE / "bare_worker.py"), *arguments]
        command += ["--workers", str(job.workers), "--servers", str(job.servers)]
        return harness.run_process(command, limit)
    python = _python(MPICH, options) if system == MPICH else sys.executable
    command = [python, str(HERE / "step_worker.py"), *arguments, "--device", options.device, "--store"]
    if system == MPICH:
        return harness.run_mpi_job([*command, "mpi"], job.workers, limit)
    if system in TORCH:
        from_backward = system == "gloo DDP" and job.works[0].start == "backward"
        return harness.run_torch_job(
            [*command, "ddp" if from_backward else TORCH[system]], job.workers, limit
        )
    store = "pushpull" if system.endswith(PUSHPULL) else "trainer"
    return _run_ours(system, job, [*command, store], options)


def _run_ours(
    system: str, job: Job, command: list[str], options: argparse.Namespace, flags: Sequence[str] = ()
) -> harness.Measured:
    """Run `command` as every worker of a job of kvtrainer, with the transport and from the checkout of a system."""
    checkout = options.before if system == BEFORE else ""
    # Peers do not encrypt what goes over TCP either.
    environ = {"KVSTORE_TRANSPORT": _transport(system), "KVSTORE_KEYS": "off"}
    limit = options.job_timeout
    return harness.run_kvtrainer_job(command, job.workers, job.servers, limit, checkout, environ, flags)


@functools.lru_cache(maxsize=16)
def _reference(work: Work, workers: int, codec: str, pull_codec: str) -> torch.Tensor:
    """The weights after all rounds of a work, computed by torch.optim in this process."""
    grads = [Gradients(work, rank) for rank in range(workers)]
    weights = torch.nn.Parameter(torch.zeros(sum(work.numels)))
    updater = make_updater([weights], work.optimizer, fused=False)
    plan = make_plan([TensorSpec(str(at), (one,), "float32") for at, one in enumerate(work.numels)], 1)
    compressors = [Compressor(make_codec({"type": codec}), plan) for _ in grads]
    known, back = torch.zeros_like(weights), make_codec({"type": pull_codec})
    for number in range(work.warm_up + work.rounds):
        sent = [torch.from_numpy(one.flat(number)) for one in grads]
        if codec != "none":
            sent = [_as_sent(one, how, plan) for one, how in zip(sent, compressors, strict=True)]
        weights.grad = sum(sent) / workers
        updater.step()
        if pull_codec not in ("none", "bf16"):
            # A compressor anew: what it would hold back is in the difference of the next round.
            known += _as_sent(weights.detach() - known, Compressor(back, plan), plan)
    return weights.detach() if pull_codec in ("none", "bf16") else known.detach()


def _as_sent(grad: torch.Tensor, compressor: Compressor, plan: Plan) -> torch.Tensor:
    """What arrives of a gradient."""
    result = torch.zeros_like(grad)
    for index, payload in compressor.encode({"float32": grad}, plan.slices, frozenset()).items():
        slice_ = plan.slices[index]
        compressor.codec.decode(payload, "float32", result[slice_.offset : slice_.offset + slice_.used])
    compressor.accept()
    return result


def _missing(system: str, options: argparse.Namespace) -> str:
    if system not in (BARE, MPICH, MXNET, MXNET_IPC):
        return ""
    if options.device != "cpu":
        return "measured with parameters on the CPU"
    if system == BARE:
        return ""
    modules = "mpi4py.MPI, torch" if system == MPICH else "mxnet"
    return harness.why_missing(_python(system, options), modules)


def _python(system: str, options: argparse.Namespace) -> str:
    folder = options.mpi_env if system == MPICH else options.mxnet_env
    return str(Path(folder).absolute() / "bin" / "python")


def _transport(system: str) -> str:
    words = system.removesuffix(PUSHPULL).split()
    return words[1] if words[0] == suite.OURS and len(words) > 1 else "auto"
