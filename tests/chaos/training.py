"""A worker that trains a model in which every gradient depends on all keys, all servers, the rank and all draws before.

A job that loses, repeats or mixes up anything therefore ends with other bits. With an elementwise gradient it would
not: weights of two servers that are a round apart, for example, would pass unnoticed.

Run as `python -m tests.chaos.training CASE ROUNDS FOLDER` by a launcher. It writes into FOLDER which rounds it
computes, and at the end the digests of its weights and of the optimizer's state.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module

import kvtrainer
import tests.chaos.optimizers  # noqa: F401 - registers one
from kvtrainer.errors import UnknownNameError
from kvtrainer.memory.hash_table import is_hash_table

FILL = "KVTRAINER_TESTS_FILL"
"""Environment variable of a worker whose memory is measured."""

ROWS, WIDTH = 3000, 16
BATCH = 8


@dataclass(frozen=True)
class Case:
    """What the workers do.

    Args:
        optimizer: Its name.
        options: Its options.
        trainer: More options of the Trainer.
        table: Whether gradients of the embedding are "dense" or "sparse", or the table is "stored" on servers alone, or
            is a "hash" table, whose rows come with their second gradient and soon expire.
        barriers: The workers meet at a barrier before every third step.
        uneven: The higher its rank, the fewer steps a worker makes; then it joins.
        saves: Rank 0 saves the job by hand before every so many steps; a job that is started loads what was saved.
    """

    optimizer: str
    options: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    table: str = "dense"
    barriers: bool = False
    uneven: bool = False
    saves: int = 0


SAVED = "last"
"""The tag under which jobs are saved."""
MOMENTUM = {"learning_rate": 0.05, "momentum": 0.9}
CASES = {
    "momentum": Case("sgd", MOMENTUM),
    "adam": Case("adam", {"learning_rate": 0.002}),
    "adagrad": Case("adagrad", {"learning_rate": 0.02}, table="sparse"),
    "clip": Case("sgd", MOMENTUM, {"clip_grad": {"max_norm": 0.5}}),
    "compressed": Case("adam", {"learning_rate": 0.002}, {"compression_params": {"pull": "bf16"}}),
    "2bit": Case("sgd", MOMENTUM, {"compression_params": {"type": "2bit", "threshold": 0.01}}),
    "topk": Case(
        "adam",
        {"learning_rate": 0.002},
        {"compression_params": {"type": "topk", "ratio": 0.1}, "overlap": True},
    ),
    "worker_update": Case("adam", {"learning_rate": 0.002}, {"update_on_kvstore": False}),
    "overlap": Case("sgd", MOMENTUM, {"overlap": True}),
    "stored": Case("adagrad", {"learning_rate": 0.02}, table="stored"),
    "hash": Case("adagrad", {"learning_rate": 0.02}, table="hash"),
    "barrier": Case("sgd", MOMENTUM, barriers=True),
    "join": Case("sgd", MOMENTUM, uneven=True),
    "lamb": Case("lamb", {"learning_rate": 0.01}),
    "own": Case("skewed", {"learning_rate": 0.05}),
    "saved": Case("sgd", MOMENTUM, saves=6),
    "saved clip": Case("adam", {"learning_rate": 0.002}, {"clip_grad": {"max_norm": 0.5}}, saves=6),
    "saved adagrad": Case("adagrad", {"learning_rate": 0.02}, table="sparse", saves=6),
    "saved hash": Case("adagrad", {"learning_rate": 0.02}, table="hash", saves=6),
    "saved overlap": Case("sgd", MOMENTUM, {"overlap": True}, saves=6),
}


class Coupled(Module):
    """An embedding and two dense layers, in slices on both servers; each has all others in its gradient."""

    def __init__(self, table: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows: Module | None = None
        if table == "stored":
            self.stored = kvtrainer.RowSparseParameter((ROWS, WIDTH), torch.nn.init.normal_)
        elif table == "hash":
            self.rows = kvtrainer.Embedding(WIDTH, admit_after=2, expire_after=5, max_rows=2000)
        else:
            self.rows = Embedding(ROWS, WIDTH, sparse=table == "sparse")
        self.hidden = Linear(4 * WIDTH, 160)
        self.last = Linear(160, WIDTH)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        found = (self.stored.row_sparse_data(ids) if self.rows is None else self.rows(ids)).flatten(1)
        return (self.last(self.hidden(found).tanh()).tanh() - targets).square().sum()


class Data:
    """Batches of a rank, drawn one after the other: the state of the draws is what a successor needs."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator()
        self._generator.manual_seed(100 + rank)

    def draw(self) -> tuple[Tensor, Tensor]:
        # How much is drawn depends on the draws, so a cursor alone would not find the place again.
        skipped = int(torch.randint(5, (), generator=self._generator))
        torch.rand(skipped, generator=self._generator)
        # A part of the rows is drawn often.
        ids = torch.randint(ROWS, (BATCH, 4), generator=self._generator)
        ids[:, :2] %= ROWS // 100
        return ids, torch.rand(BATCH, WIDTH, generator=self._generator) - 0.5

    @property
    def state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    @state.setter
    def state(self, state: bytes) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def digest(tensors: list[Tensor]) -> str:
    """The SHA-256 of the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()


def digest_of_state(trainer: kvtrainer.Trainer) -> str:
    """The digest of the optimizer's state: its tensors and numbers, by parameter."""
    state = trainer.state_dict()["state"]
    tensors, numbers = list[Tensor](), list[str]()
    for key in sorted(state):
        for name, value in sorted(state[key].items()):
            tensors += [value] if isinstance(value, Tensor) else []
            numbers += [f"{key} {name} {value!r}"] if not isinstance(value, Tensor) else [f"{key} {name}"]
    return digest([*tensors, torch.tensor(list("\n".join(numbers).encode()), dtype=torch.uint8)])


def append(path: Path, line: str) -> None:
    """Append a line to a file in one call, so that it is there whole or not at all."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def fill_interned_strings() -> None:
    """Let the interpreter's table of interned strings have its final size, which it reaches by one step of 2 MiB.

    It makes room for three times as many strings when all of its entries have been used once, also by strings that
    are gone: after 10 to 25 minutes, for the names in what a worker is sent.
    """
    for number in range(200_000):
        sys.intern(f"{__name__} {number}")


def main(name: str, rounds: int, folder: Path) -> None:
    if FILL in os.environ:
        fill_interned_strings()
    # 1. Build the model, and take the rank's place.
    case = CASES[name]
    torch.set_num_threads(1)
    model = Coupled(case.table)
    kv = kvtrainer.kvstore.create("dist_sync") if case.barriers or case.saves else "dist_sync"
    if isinstance(kv, kvtrainer.kvstore.DistKVStore) and case.saves:
        with suppress(UnknownNameError):
            kv.load(SAVED)
    named = list(model.named_parameters())
    trainer = kvtrainer.Trainer(named, case.optimizer, case.options, kvstore=kv, **case.trainer)
    start = trainer.resume()
    rank, data = trainer.rank, Data(trainer.rank)
    assert trainer.client_state == start.client_state  # for a successor that comes before the next step
    if start.client_state is not None:
        data.state = start.client_state["data"]
        assert start.client_state["cursor"] == start.round, (start.client_state["cursor"], start.round)
    # 2. Train.
    own = rounds - 2 * rank if case.uneven else rounds
    with trainer.join() if case.uneven else nullcontext():
        for at in range(start.round, own):
            if isinstance(kv, kvtrainer.kvstore.DistKVStore) and case.barriers and at % 3 == 0:
                kv.barrier()
            if isinstance(kv, kvtrainer.kvstore.DistKVStore) and case.saves and at and at % case.saves == 0:
                kv.save(SAVED) if rank == 0 else None
            append(folder / f"computed.{rank}", f"{at} {os.getpid()}")
            model(*data.draw()).backward()
            trainer.client_state = {"cursor": at + 1, "data": data.state}
            trainer.step(3 * BATCH)
    # 3. Say what has come of it.
    weights = digest(
        [one.detach() for one in model.parameters() if not is_hash_table(one)]
    )  # those are in the state
    append(folder / f"result.{rank}", f"{weights} {digest_of_state(trainer)}")
    trainer.close()
    if not isinstance(kv, str):
        kv.close()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
