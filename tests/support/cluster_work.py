"""What workers of a cluster do in tests. They import this file alone, and torch only where they use it."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def place(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return (
        os.environ["KVSTORE_RANK"],
        os.environ["KVSTORE_NUM_WORKERS"],
        os.environ.get("KVSTORE_SERVERS"),
        args,
        kwargs,
    )


def place_on_host() -> int:
    from kvtrainer.common.env import local_rank_from_env

    return local_rank_from_env(os.environ)


def say(to: str) -> None:
    print(f"it is {os.environ['KVSTORE_RANK']}", file=getattr(sys, to))


class RefusedError(Exception):
    """One that needs two arguments, and gives Exception one, so that it does not come back from pickle as it is."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


def fail(how: str) -> None:
    """Fail on rank 1; rank 0 waits for it until it is told to end."""
    if os.environ["KVSTORE_RANK"] == "0":
        signal.pause()
    if how == "raise":
        raise KeyError("no such thing")
    if how == "refuse":
        raise RefusedError(1, 2)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave":
        os._exit(0)
    sys.exit(how)


def sum_and_fail() -> None:
    """Sum on servers; then rank 1 fails with the sum, and rank 0 waits for it in the next round."""
    import torch

    import kvtrainer

    kv = kvtrainer.kvstore.create("dist_sync")
    kv.init("w", torch.zeros(2))
    out = torch.empty(2)
    for _ in range(2):
        kv.pushpull("w", torch.full((2,), 10.0**kv.rank), out=out)
        if kv.rank == 1:
            raise LookupError(f"on purpose, after {out.tolist()}")


def fail_until(restarts: int, how: str) -> str:
    """Fail on rank 1 until it was started again so often; return how often this process was."""
    mine = os.environ["KVSTORE_RESTARTS"]
    if os.environ["KVSTORE_RANK"] == "1" and int(mine) < restarts:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError(f"start {mine}")
    return mine


def train_without_rank_1(how: str) -> tuple[int, ...]:
    """Train five steps, in the third of which rank 1 fails; return the members of the last one."""
    import torch

    import kvtrainer

    weight = torch.nn.Parameter(torch.zeros(3))
    with kvtrainer.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist_sync") as trainer:
        for step in range(trainer.resume().round, 5):
            if (trainer.rank, step) == (1, 2):
                fail(how)
            weight.grad = torch.ones(3)
            members = trainer.members
            trainer.step()
        assert weight.tolist() == [-5.0] * 3
        return members


def kill_the_server(token: str) -> str:
    """Kill the server that has a token in its environment and is no supervisor; return where its successor answers."""
    import time

    from kvstore_server import probe
    from tests.support.launch_jobs import Jobs, command_line

    jobs, address = Jobs(), os.environ["KVSTORE_SERVERS"]
    jobs.variable = {"LAUNCH_TEST": token}

    def pids() -> list[int]:
        return [pid for pid in jobs.pids("kvstore_server") if "--supervise" not in command_line(pid)]

    [pid] = pids()
    os.kill(pid, signal.SIGKILL)
    while pids() in ([], [pid]) or probe.probe_server(address, 300.0):
        time.sleep(0.02)
    return address


def pause(folder: str) -> None:
    """Stop this process, until another one lets it go on with `go_on`."""
    with open(os.path.join(folder, f"{os.environ['KVSTORE_RANK']}.tmp"), "w", encoding="utf-8") as file:
        file.write(str(os.getpid()))
    os.replace(file.name, file.name.removesuffix(".tmp"))
    os.kill(os.getpid(), signal.SIGSTOP)


def go_on(folder: str, rank: int) -> None:
    """Let a process go on, as soon as it has stopped."""
    path = os.path.join(folder, str(rank))
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, encoding="utf-8") as file:
        pid = int(file.read())
    while True:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            if file.read().rpartition(")")[2].split()[0] == "T":
                break
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)


def train_with_pauses(
    folder: str, steps: int, pauses: dict[int, tuple[int, int]]
) -> tuple[list[int], int, dict[str, set[float]]]:
    """Train; each rank gives 10 to its power. Some ranks pause from one step to another, which rank 0 makes.

    Returns the steps to which this worker has given, how often it was left out, and the weights.
    """
    import torch

    import kvtrainer

    weights = {
        name: torch.nn.Parameter(torch.zeros(size)) for name, size in (("a", 70_000), ("b", 50_000), ("c", 3))
    }
    trainer = kvtrainer.Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore="dist_sync")
    trainer.resume()
    given, rank = list[int](), trainer.rank
    while (step := trainer.round) < steps:
        if rank in pauses and step >= pauses[rank][0]:
            del pauses[rank]
            pause(folder)
        for other in [one for one, (_, end) in pauses.items() if rank == 0 and step >= end]:
            del pauses[other]
            go_on(folder, other)
        for weight in weights.values():
            weight.grad = torch.full_like(weight, 10.0**rank)
        missed = trainer.num_left_out
        trainer.step(1)
        if trainer.num_left_out == missed:
            given.append(step)
    trainer.close()
    return given, trainer.num_left_out, {name: set(one.tolist()) for name, one in weights.items()}
