"""Optimizer states go on in any other job as if never interrupted, whatever its processes, servers and store.

One job for each number of servers saves for all places that it can have, and one loads. A place goes on with one kind
of optimizer from each source, such that it meets every kind, and every kind meets every place and source. All workers
have the same data, so that a mean over them has the bits of one worker's gradient.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

import kvtrainer
from kvtrainer import kvstore
from kvtrainer.errors import (
    ConfigurationError,
    RoundAbortedError,
    StateFileError,
    StateMismatchError,
    WorkerLostError,
)
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.optimizer import create
from kvtrainer.states.format import read_state_file
from tests.support.jobs import Job, Results, run_job
from tests.support.limits import LIMIT
from tests.support.stores import Servers

BEFORE, AFTER = 3, 3
"""Steps before the states are saved, and after."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
    "torch:NAdam": {"lr": 0.01},
    "lamb": {"learning_rate": 0.01},
}
PLACES: dict[str, tuple[str | None, bool | None]] = {
    "none": (None, None),
    "local": ("local", True),
    "reduced": ("local", False),
    "dist": ("dist_sync", True),
    "dist reduced": ("dist_sync", False),
}
"""The store, and whether the optimizer runs in it."""
SIZES: dict[int, list[str]] = {
    0: ["none", "local", "reduced"],
    2: ["dist 2", "dist reduced 2"],
    3: ["dist 3"],
}
"""Number of servers → the places in a job with so many."""
SOURCES = [place for places in SIZES.values() for place in places]
SAVERS = {"sgd": 0, "adam": 1, "torch:NAdam": 0, "lamb": 1}
"""Which of two workers saves while the other one is ahead, by optimizer."""


class Net(nn.Module):
    """A parameter that is spread over all servers, small ones of unequal size, and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Linear(60, 301)
        self.outer = nn.Linear(301, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(torch.tanh(self.inner(x))) * self.scale
        return out


def trainer_of(net: Net, kind: str, place: str, **options: Any) -> kvtrainer.Trainer:
    name, in_store = PLACES[place.rstrip("123 ")]
    store = None if name is None else kvtrainer.kvstore.create(name)
    options = {**OPTIMIZERS[kind], **options}
    return kvtrainer.Trainer(net.named_parameters(), kind, options, kvstore=store, update_on_kvstore=in_store)


def train(net: Net, trainer: kvtrainer.Trainer, first: int, steps: int) -> list[Tensor]:
    """Steps whose data and learning rate depend only on their number; the weights at their end."""
    for i in range(first, first + steps):
        generator = torch.Generator().manual_seed(i)
        trainer.set_learning_rate(0.05 / (i + 1))
        trainer.zero_grad()
        net(torch.randn(4, 60, generator=generator)).square().mean().backward()
        trainer.step()
    return [p.detach().clone() for p in net.parameters()]


def folder_of(base: str, source: str, kind: str) -> Path:
    """Where the files of one run are; `source` names the place and the size of its job."""
    found = Path(base) / source.replace(" ", "-") / kind.replace(":", "-")
    found.mkdir(parents=True, exist_ok=True)
    return found


def kind_of(place: str, source: str) -> str:
    """Give the optimizer with which a place goes on from a source."""
    return [*OPTIMIZERS][(SOURCES.index(place) + SOURCES.index(source)) % len(OPTIMIZERS)]


def save(folder: Path, place: str, kind: str, is_saver: bool) -> list[Tensor]:
    """Train, save in the middle on the last rank, and train on."""
    net = Net()
    with trainer_of(net, kind, place) as trainer:
        train(net, trainer, 0, BEFORE)
        if is_saver:
            trainer.save_states(folder / "states")
            torch.save(net.state_dict(), folder / "weights")
        return train(net, trainer, BEFORE, AFTER)


def resume(folder: Path, place: str, kind: str) -> list[Tensor]:
    """Go on from the middle; options that the file must overrule are other ones here."""
    net = Net()
    net.load_state_dict(torch.load(folder / "weights"))
    decay = "weight_decay" if kind.startswith("torch:") else "wd"
    with trainer_of(net, kind, place, **{decay: 0.5}) as trainer:
        trainer.load_states(folder / "states")
        return train(net, trainer, BEFORE, AFTER)


def save_all(rank: int, workers: int, folder: str, places: list[str]) -> Results:
    """The weights of runs that were never interrupted, by place and kind; they save in the middle."""
    found: dict[str, Any] = {
        place: {
            kind: save(folder_of(folder, place, kind), place, kind, rank == workers - 1)
            for kind in OPTIMIZERS
        }
        for place in places
    }
    if "dist 2" in places:
        found["cut"] = {kind: cut(folder_of(folder, "cut", kind), kind, rank) for kind in OPTIMIZERS}
    return found


def resume_all(rank: int, workers: int, folder: str, places: list[str]) -> Results:
    """The weights of runs that went on from the files of the sources, by place and source."""
    return {
        place: {
            source: resume(folder_of(folder, source, kind_of(place, source)), place, kind_of(place, source))
            for source in SOURCES
        }
        for place in places
    }


def cut(folder: Path, kind: str, rank: int) -> dict[str, list[Tensor]]:
    """Train, and save while the other worker is already in the next round; then go back to what was saved."""
    net = Net()
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        if rank == SAVERS[kind]:
            wait_until_it_waits(trainer, rank)
            trainer.save_states(folder / "states")
            wait_until_it_waits(trainer, rank)
        after = train(net, trainer, 2, 2)
        # Back to the states of step 2, with the weights of step 4; the third step made sure that the file is there.
        trainer.load_states(folder / "states")
        return {"after": after, "again": train(net, trainer, 2, 2)}


def wait_until_it_waits(trainer: kvtrainer.Trainer, rank: int) -> None:
    """Return when the next round of every server lacks nobody but `rank`."""
    pause, deadline = threading.Event(), time.monotonic() + LIMIT
    while True:
        tables = [table for stats in trainer.server_stats() for table in stats["tables"]]
        if all(table["waiting_for"] == [rank] for table in tables):
            return
        assert time.monotonic() < deadline, f"the other worker never came to the next round: {tables}"
        pause.wait(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every worker found, by place, and "cut"; states are in `folder` then."""
    found: dict[str, Any] = {}
    for servers, places in SIZES.items():
        own = tmp_path_factory.mktemp(f"save{servers}")
        job = run_job(save_all, own, 2 if servers else 1, servers, str(folder), places)
        found |= {name: job[name] for name in job.results[0]}
    return found


@pytest.mark.parametrize("servers", SIZES)
def test_training_goes_on_in_any_other_place_as_if_never_interrupted(
    uninterrupted: dict[str, Any], folder: Path, tmp_path: Path, servers: int
) -> None:
    start = [*Net().parameters()]
    job = run_job(resume_all, tmp_path, 2 if servers else 1, servers, str(folder), SIZES[servers])
    for place in SIZES[servers]:
        for source in SOURCES:
            expected = uninterrupted[source][0][kind_of(place, source)]
            assert all(not torch.equal(a, b) for a, b in zip(expected, start, strict=True)), source
            check_equal(job[place][0][source], expected, 0 if source == place else 1e-6)


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 0.0) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, check_dtype=False)


def test_every_place_and_every_source_has_every_kind_of_optimizer() -> None:
    for place in SOURCES:
        assert {kind_of(place, source) for source in SOURCES} == OPTIMIZERS.keys()
        assert {kind_of(other, place) for other in SOURCES} == OPTIMIZERS.keys()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_one_worker_saves_the_state_of_its_own_last_step_while_others_are_ahead_and_all_can_go_back(
    uninterrupted: dict[str, Any], folder: Path, kind: str
) -> None:
    net, path = Net(), folder_of(str(folder), "cut", kind) / "states"
    trainer = trainer_of(net, kind, "none")
    train(net, trainer, 0, 2)
    saved, states = read_state_file(path).parameters.values(), trainer.state_dict()["state"].values()
    for mine, expected in zip(saved, states, strict=True):
        assert (mine.state["step"], mine.state.keys()) == (2, expected.keys())
        values = [torch.as_tensor(mine.state[name]) for name in expected]
        check_equal(values, [torch.as_tensor(value) for value in expected.values()], 1e-7)
    after = train(net, trainer, 2, 2)
    trainer.load_states(path)
    again = train(net, trainer, 2, 2)
    for found in uninterrupted["cut"]:
        check_equal(found[kind]["after"], after, 1e-6)  # saving did not disturb the round that waited
        check_equal(found[kind]["again"], again, 1e-6)


def through_torchs_checkpoint(folder: Path, kind: str, by_name: bool) -> dict[str, list[Tensor]]:
    """By torch.distributed.checkpoint, with ranks whose optimizer runs on servers."""
    net, again = Net(), Net()
    with trainer_of(net, kind, "dist") as trainer:
        train(net, trainer, 0, 2)
        trainer.zero_grad()
        states = get_optimizer_state_dict(net, trainer) if by_name else trainer.state_dict()
        save_checkpoint({"net": net.state_dict(), "trainer": states}, checkpoint_id=folder)
        expected = train(net, trainer, 2, 2)
    with trainer_of(again, kind, "dist") as other:
        content: dict[str, Any] = {"net": again.state_dict()}
        content["trainer"] = get_optimizer_state_dict(again, other) if by_name else other.state_dict()
        load_checkpoint(content, checkpoint_id=folder)
        if by_name:
            set_optimizer_state_dict(again, other, content["trainer"])
        else:
            other.load_state_dict(content["trainer"])
        return {"uninterrupted": expected, "resumed": train(again, other, 2, 2)}


WAYS = {"state_dict": ("adam", False), "get_optimizer_state_dict": ("lamb", True)}


def checkpoints(rank: int, workers: int, folder: str) -> Results:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own use of what it has deprecated
        return {way: through_torchs_checkpoint(Path(folder) / way, *given) for way, given in WAYS.items()}


def test_ranks_go_on_from_their_common_checkpoint_of_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    own, files = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("checkpoints")
    job: Job = run_job(checkpoints, own, 2, 2, str(files), in_group=True)
    for found in (one for way in WAYS for one in job[way]):
        check_equal(found["resumed"], found["uninterrupted"])


SHAPES = {"big": (90, 301), "small": (3,)}


def grads(step: int, rank: int) -> list[Tensor]:
    gen = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=gen) for shape in SHAPES.values()]


def steps(kv: Any, which: range, ranks: range) -> list[Tensor]:
    """Push for the given ranks in one (they are summed, as replicas), and pull."""
    outs = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in which:
        kv.push(
            list(SHAPES), [list(parts) for parts in zip(*(grads(step, rank) for rank in ranks), strict=True)]
        )
    kv.pull(list(SHAPES), outs)
    return outs


def started(kv: Any, optimizer: str, values: list[Tensor] | None = None) -> Any:
    kv.set_optimizer(
        create(optimizer, learning_rate=0.1, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    )
    kv.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()] if values is None else values)
    return kv


@pytest.mark.parametrize(("optimizer", "before", "after"), [("sgd", 2, 3), ("adam", 3, 1), ("lamb", 2, 3)])
def test_training_goes_on_as_if_never_interrupted(
    jobs: Servers, tmp_path: Path, optimizer: str, before: int, after: int
) -> None:
    file = tmp_path / "states"

    def first(kv: DistKVStore, rank: int) -> list[Tensor]:
        weights = steps(started(kv, optimizer), range(3), range(rank, rank + 1))
        if rank == 1:
            kv.save_optimizer_states(file)
        kv.barrier()
        return weights

    def second(kv: DistKVStore, rank: int) -> list[Tensor]:
        started(kv, optimizer, weights)
        kv.load_optimizer_states(file)
        return steps(kv, range(3, 5), range(rank, rank + 1))

    weights = jobs.results(2, before, first)[0]
    found = jobs.results(2, after, second)
    expected = steps(started(kvstore.create("local"), optimizer), range(5), range(2))
    for one in found:
        check_equal(one, expected, 1e-6)


@pytest.mark.parametrize("damage", ["damaged", "another store's"])
def test_states_that_one_worker_cannot_read_are_loaded_by_none(
    jobs: Servers, tmp_path: Path, damage: str
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        path = tmp_path / f"{rank}"
        started(kv, "sgd").save_optimizer_states(path)
        if rank == 1 and damage == "damaged":
            path.write_bytes(path.read_bytes()[:-1])
        elif rank == 1:
            started(kvstore.create("local"), "adam").save_optimizer_states(path)
        kv.barrier()
        steps(kv, range(2), range(rank, rank + 1))  # there is momentum, which the files lack
        own = StateFileError if damage == "damaged" else StateMismatchError
        with pytest.raises(own if rank == 1 else RoundAbortedError, match="rank 1" if rank == 0 else None):
            kv.load_optimizer_states(path)
        return steps(kv, range(2, 4), range(rank, rank + 1))

    expected = steps(started(kvstore.create("local"), "sgd"), range(4), range(2))
    for one in jobs.results(2, 2, body):
        check_equal(one, expected, 1e-6)


def test_states_that_one_worker_is_interrupted_in_reading_can_be_loaded_again(
    jobs: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        path = tmp_path / f"{rank}"
        started(kv, "sgd").save_optimizer_states(path)
        kv.barrier()
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(kv, "_fitting_states", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt if rank == 1 else WorkerLostError):
                kv.load_optimizer_states(path)
        kv.load_optimizer_states(path)
        return steps(kv, range(2), range(rank, rank + 1))

    expected = steps(started(kvstore.create("local"), "sgd"), range(2), range(2))
    for one in jobs.results(2, 2, body):
        check_equal(one, expected, 1e-6)


def raising(error: BaseException) -> Any:
    def call(*_: Any) -> None:
        raise error

    return call


def test_a_store_forgets_the_clients_of_what_was_agreed_on(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> int:
        for _ in range(3):
            kv.open_agreement().close()
        return len(kv._clients)

    assert jobs.results(2, 1, body) == [2, 2], "its own and the last"


@pytest.mark.parametrize("dump_optimizer", [True, False])
def test_the_optimizers_numbers_come_along_if_they_were_dumped(tmp_path: Path, dump_optimizer: bool) -> None:
    first = started(kvstore.create("local"), "sgd")
    steps(first, range(1), range(1))
    first.save_optimizer_states(tmp_path / "states", dump_optimizer=dump_optimizer)
    second = kvstore.create("local")
    optimizer = create("sgd", learning_rate=0.5, momentum=0.9)
    second.set_optimizer(optimizer)
    second.init(list(SHAPES), [torch.ones(shape) for shape in SHAPES.values()])
    second.load_optimizer_states(tmp_path / "states")
    assert optimizer.learning_rate == (0.1 if dump_optimizer else 0.5)


def test_states_of_other_keys_or_of_another_optimizer_are_refused_with_every_difference(
    tmp_path: Path,
) -> None:
    first = started(kvstore.create("local"), "sgd")
    steps(first, range(1), range(1))
    first.save_optimizer_states(tmp_path / "states")
    second = kvstore.create("local")
    second.set_optimizer("adam")
    second.init(["big", "other"], [torch.ones(2), torch.ones(3)])
    with pytest.raises(StateMismatchError) as caught:
        second.load_optimizer_states(tmp_path / "states")
    for part in ("'sgd' in the file and 'adam' here", "lacks the keys 'other'", "has the keys 'small'",
                 "'big' has shape [90, 301] in the file and [2] here"):  # fmt: skip
        assert part in str(caught.value)


def test_without_an_optimizer_there_are_no_states(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="set_optimizer"):
        kvstore.create("local").save_optimizer_states(tmp_path / "states")


def test_a_scheduler_decides_the_rate_of_every_push_wherever_the_key_lives(
    jobs: Servers, tmp_path: Path
) -> None:
    def moves(kv: Any, rank: int = 0) -> list[float]:
        schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
        kv.set_optimizer(create("sgd", lr_scheduler=schedule))
        kv.init("w", torch.zeros(2))
        out, found = torch.zeros(2), []
        for _ in range(6):
            before = out.clone()
            kv.pushpull("w", torch.ones(2), out)
            found.append(float((before - out)[0]))
        return found

    # MXNet's trace for updates 1, 2, …
    expected = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert moves(kvstore.create("local")) == expected
    assert jobs.results(1, 2, moves) == [expected]
