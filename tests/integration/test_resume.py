"""Workers that are killed and started again: the run ends with the bits of an undisturbed one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvtrainer
from kvtrainer.common.env import RESTARTS
from kvtrainer.errors import ConfigurationError, ConnectTimeoutError
from kvtrainer.states.surviving_memory import SurvivingMemory
from kvtrainer.utils import get_random_state, set_random_state
from tests.support.jobs import Job, Results, error_of, run_job, run_with_deaths
from tests.support.one_in import one_in
from tests.support.processes import held_port

STEPS, WORKERS, SERVERS = 9, 3, 2
Loop = Callable[..., Results]
POINTS = [
    "worker.connect.open",
    "worker.register.end",
    "worker.init.begin",
    "worker.init.end",
    "worker.round.begin:2",
    "worker.round.commit:4",
    "worker.round.committed:4",
    "worker.round.answered:4",
    "worker.round.write:4",
    "worker.round.written:4",
    "worker.round.end:4",
    "worker.round.end:10",
    "worker.close",
]
"""Where rank 1 dies. The init counts as the first round."""
FEW = {
    "worker.connect.open": "shm",
    "worker.round.begin:2": "tcp",
    "worker.round.committed:4": "shm",
    "worker.round.written:4": "tcp",
    "worker.round.end:10": "shm",
}
"""Where it dies in `make test`, and the way to servers; tests/chaos/test_points.py has all points."""


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    # Long enough for two servers; every gradient depends on the weights of both.
    return torch.nn.Sequential(torch.nn.Linear(40, 600), torch.nn.Tanh(), torch.nn.Linear(600, 600))


def digest(net: torch.nn.Module, trainer: kvtrainer.Trainer) -> str:
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    for _, state in sorted(trainer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            found.update(name.encode())
            found.update(value.cpu().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


def training(
    rank: int, workers: int, optimizer: str, options: Mapping[str, Any], steps: int = STEPS
) -> Results:
    """A loop whose data come from a generator that it resumes; counts the steps that this process made."""
    net, made = model(), 0
    with kvtrainer.Trainer(
        net.named_parameters(), optimizer, {"learning_rate": 0.01}, kvstore="dist_sync", **options
    ) as trainer:
        start = trainer.resume()
        torch.manual_seed(rank)
        if start.client_state is not None:
            set_random_state(start.client_state["random"])
        for _ in range(start.round, steps):
            trainer.backward(net(torch.randn(4, 40)).square().mean())
            trainer.client_state = {"random": get_random_state()}
            trainer.step(4 * workers)
            made += 1
        return {
            "digest": digest(net, trainer),
            "lr": trainer.param_groups[0]["lr"],
            "start": start.round,
            "made": made,
            "restarts": int(os.environ.get(RESTARTS, "0")),
        }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    known: dict[str, Job] = {}

    def run(optimizer: str, options: Mapping[str, Any], loop: Loop = training, workers: int = WORKERS) -> Job:
        name = f"{loop.__name__} {optimizer} {options}"
        if name not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            known[name] = run_job(loop, folder, workers, SERVERS, optimizer, options, restarts=1)
        return known[name]

    return run


def disturbed(
    folder: Path,
    points: str,
    optimizer: str,
    options: Mapping[str, Any],
    loop: Loop = training,
    workers: int = WORKERS,
    **environ: str,
) -> Job:
    return run_with_deaths(loop, folder, points, workers, SERVERS, optimizer, options, environ=environ)


@pytest.mark.parametrize(
    ("point", "transport"),
    [
        pytest.param(point, way, marks=() if FEW.get(point) == way else pytest.mark.full)
        for point in POINTS
        for way in ("shm", "tcp")
    ],
)
def test_a_worker_that_dies_comes_back_and_the_run_ends_with_the_same_bits(
    point: str, transport: str, tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    name, _, nth = point.partition(":")
    # A process that dies right after it has sent its commits may not have sent the last one over TCP.
    durability = "process" if (name, transport) == ("worker.round.committed", "tcp") else "off"
    environ = {"KVSTORE_TRANSPORT": transport, "KVSTORE_DURABILITY": durability}
    job = disturbed(tmp_path, f"{name}@1{nth and f':{nth}'}", "adam", {}, **environ)
    assert job["digest"] == undisturbed("adam", {})["digest"]
    assert job["restarts"] == [0, 1, 0]
    assert [made for rank, made in enumerate(job["made"]) if rank != 1] == [STEPS, STEPS]


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a norm that is clipped on the servers": ("sgd", {"clip_grad": {"max_norm": 0.05}}),
    "schedules": ("adam", {"schedules": [{"policy": "step", "step": [2, 4, 6], "by_epoch": False}]}),
    "a loss scale": ("sgd", {"amp": {"loss_scale": "dynamic", "init_scale": 2.0**20, "growth_interval": 2}}),
    "rounded weights": ("adagrad", {"compression_params": {"pull": "bf16"}}),
    "changes of weights": ("sgd", {"compression_params": {"pull": "ternary"}}),
    "gradients that are sent early": ("nag", {"overlap": True}),
    "copied weights": ("adam", {"zero_copy": False}),
    "an update in the worker, clipped and with schedules": (
        "adam",
        {
            "update_on_kvstore": False,
            "clip_grad": {"max_norm": 0.05},
            "schedules": [{"policy": "step", "step": [2, 4, 6], "by_epoch": False}],
        },
    ),
    "residuals of compression": ("sgd", {"compression_params": {"type": "2bit", "threshold": 1e-3}}),
    "residuals that are sent early": (
        "adam",
        {"compression_params": {"type": "topk", "ratio": 0.2}, "overlap": True},
    ),
    "residuals, and a loss scale that skips steps": (
        "sgd",
        {
            "compression_params": {"type": "int8"},
            "amp": {"loss_scale": "dynamic", "init_scale": 2.0**120, "growth_interval": 2},
        },
    ),
}
OF_CHAOS = {
    "a norm that is clipped on the servers",
    "rounded weights",
    "gradients that are sent early",
    "copied weights",
    "residuals that are sent early",
    "residuals, and a loss scale that skips steps",
}
"""Options that `make chaos` has."""


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=pytest.mark.chaos if name in OF_CHAOS else ()) for name in OPTIONS],
)
def test_what_options_keep_in_the_worker_goes_on_too(
    what: str, tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    optimizer, options = OPTIONS[what]
    job = disturbed(tmp_path, "worker.round.committed@1:5,worker.round.begin@0:7", optimizer, options)
    expected = undisturbed(optimizer, options)
    assert job["digest"] == expected["digest"]
    assert job["lr"] == expected["lr"]
    assert job["restarts"] == [1, 1, 0]


def test_all_workers_may_die_in_one_round(tmp_path: Path, undisturbed: Callable[..., Job]) -> None:
    points = ",".join(f"worker.round.{at}:5" for at in ("begin@0", "commit@1", "committed@2"))
    job = disturbed(tmp_path, points, "adam", {})
    assert job["digest"] == undisturbed("adam", {})["digest"]
    assert job["restarts"] == [1, 1, 1]


def test_a_worker_may_die_again_and_again(tmp_path: Path, undisturbed: Callable[..., Job]) -> None:
    points = ",".join(f"worker.round.committed@2:{nth}" for nth in (6, 3, 2))
    job = disturbed(tmp_path, points, "adam", {})
    assert job["digest"] == undisturbed("adam", {})["digest"]
    assert job["restarts"] == [0, 0, 3]
    assert job["made"][2] < STEPS


@pytest.mark.parametrize(("optimizer", "transport"), one_in(2, ["adam", "lamb"], ["shm", "tcp"]))
def test_a_step_whose_commit_reached_one_of_two_servers_is_repeated_from_the_weights_before_it(
    optimizer: str, transport: str, tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    environ = {"KVSTORE_TRANSPORT": transport, "KVSTORE_DURABILITY": "process"}
    job = disturbed(tmp_path, "worker.round.next_commit@1:5", optimizer, {}, **environ)
    assert job["digest"] == undisturbed(optimizer, {})["digest"]
    assert job["restarts"] == [0, 1, 0]


def changing(rank: int, workers: int, optimizer: str, options: Mapping[str, Any]) -> Results:
    """A loop that changes options and schedules before some steps, and weights: in place, or for all by `set_data`."""
    net = model()
    by_epoch = [{"policy": "step", "step": [1, 2], "by_epoch": True}]
    with kvtrainer.Trainer(
        net.named_parameters(), optimizer, {"learning_rate": 0.01}, "dist_sync", schedules=by_epoch, **options
    ) as trainer:
        start = trainer.resume()
        resumed = trainer._pipeline.binding.resumed
        for step in range(start.round, 6):
            if step % 2 == 1:
                trainer.end_epoch()
                trainer.param_groups[0]["weight_decay"] += 0.01
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.mul_(0.5)
                if step == 3 or not options:
                    trainer.set_data()
                elif step == 5:
                    net[0].bias.data += 1.0
            x = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))
            net(x).square().mean().backward()
            trainer.step(4 * workers)
        group = trainer.param_groups[0]
        return {
            "digest": digest(net, trainer),
            "options": [group["lr"], group["weight_decay"]],
            "repeated": resumed is not None and resumed.records.repeated is not None,
        }


HERE = {"update_on_kvstore": False}
BEFORE = [(HERE, 5), ({}, 3)]
"""Where the job dies in `make test`: weights were written in place; or published, too."""
MORE = [
    (options, step)
    for options in ({}, HERE, {**HERE, "clip_grad": {"max_norm": 0.1}})
    for step in (1, 2, 3, 5)
]


@pytest.mark.parametrize(
    ("options", "step"),
    BEFORE + [pytest.param(*one, marks=pytest.mark.chaos) for one in MORE if one not in BEFORE],
)
def test_what_stands_before_a_repeated_step_counts_once(
    options: Mapping[str, Any], step: int, tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    # Of each round there are two commits.
    point = f"worker.round.next_commit@1:{2 * rounds_before(step, options) + 1}"
    job = disturbed(tmp_path, point, "adam", options, changing, 2, KVSTORE_DURABILITY="process")
    assert job["repeated"] == [False, True]
    assert_changes_alike(job, undisturbed("adam", options, changing, 2))


@pytest.mark.parametrize("options", [{}, HERE])
def test_what_stands_before_weights_that_count_and_a_step_that_does_not_counts_once(
    options: Mapping[str, Any], tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    point = f"worker.round.begin@1:{rounds_before(3, options) + 1}"
    job = disturbed(tmp_path, point, "adam", options, changing, 2)
    assert_changes_alike(job, undisturbed("adam", options, changing, 2))


def rounds_before(step: int, options: Mapping[str, Any]) -> int:
    """How many rounds `changing` makes before that of a step: the first values, steps, and published weights."""
    return 1 + step + sum(before % 2 == 1 for before in range(step + 1) if before == 3 or not options)


def assert_changes_alike(job: Job, expected: Job) -> None:
    assert (job["digest"], job["options"]) == (expected["digest"], expected["options"])


@pytest.mark.parametrize("point", ["server.journal.copied@1:6", "server.commit.logged@0:12"])
def test_a_server_and_a_worker_may_die_in_one_job(
    point: str, tmp_path: Path, undisturbed: Callable[..., Job]
) -> None:
    points = f"{point},worker.round.committed@2:5"
    job = disturbed(tmp_path, points, "adam", {}, KVSTORE_DURABILITY="process")
    assert job["digest"] == undisturbed("adam", {})["digest"]
    assert job["restarts"] == [0, 0, 1]


def refusals(rank: int, workers: int) -> Results:
    def trainer(**options: Any) -> kvtrainer.Trainer:
        return kvtrainer.Trainer(model().named_parameters(), "sgd", kvstore="dist_sync", **options)

    told = {}
    for name, options in {
        "2bit": {"compression_params": {"type": "2bit", "threshold": 0.5}},
        "hierarchy": {"hierarchy": True},
        "here": {"update_on_kvstore": False},
    }.items():
        with trainer(**options) as one:
            told[name] = error_of(one.resume).partition(":")[0]
    with trainer() as one:
        one.set_data()
        told["open"] = error_of(one.resume).partition(":")[0]
    return told


def test_what_would_end_with_the_process_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    [told] = run_job(refusals, tmp_path, 1, 1).results
    assert told == dict.fromkeys(["2bit", "hierarchy", "here", "open"], "ConfigurationError")


def refusals_with_memory(rank: int, workers: int) -> Results:
    def trainer(optimizer: Any = "sgd", **options: Any) -> kvtrainer.Trainer:
        own = {"update_on_kvstore": False, **options}
        return kvtrainer.Trainer(model().named_parameters(), optimizer, kvstore="dist_sync", **own)

    told = {}
    with trainer(compression_params={"type": "2bit", "threshold": 0.5}) as one:
        told["both"] = error_of(one.resume).partition(":")[0]
    with trainer("torch:LBFGS") as one:
        told["all together"] = error_of(one.resume).partition(":")[0]
    with trainer() as one, trainer() as other:
        one.resume()
        told["the second Trainer"] = error_of(other.resume).partition(":")[0]
        told["halves"] = error_of(one.allreduce_grads).partition(":")[0]
        told["join"] = error_of(lambda: one.join().__enter__()).partition(":")[0]
    with trainer() as one:
        told["the next one"] = error_of(one.resume)
    return told


def test_what_could_not_be_repeated_is_refused_although_there_is_memory_for_it(tmp_path: Path) -> None:
    environ = {"KVSTORE_WORKER_MEMORY": str(tmp_path / "memory")}
    [told] = run_job(refusals_with_memory, tmp_path, 1, 1, environ=environ).results
    assert told.pop("the next one") == "nothing"
    assert set(told.values()) == {"ConfigurationError"}
    assert len(told) == 5


def test_memory_is_free_again_after_a_resume_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {
        "RANK": "0",
        "NUM_WORKERS": "1",
        "SERVERS": f"tcp://127.0.0.1:{held_port()}",
        "CONNECT_TIMEOUT": "0.2",
    }
    for name, value in {**place, "WORKER_MEMORY": str(tmp_path / "memory")}.items():
        monkeypatch.setenv(f"KVSTORE_{name}", value)
    trainer = kvtrainer.Trainer(model().parameters(), "sgd", kvstore="dist_sync", update_on_kvstore=False)
    with pytest.raises(ConnectTimeoutError):
        trainer.resume()
    SurvivingMemory(str(tmp_path / "memory"), 0.0).close()
    trainer.close()


def lost_memory(rank: int, workers: int) -> Results:
    """As `training`, but each process has memory of its own, as on another host."""
    os.environ["KVSTORE_WORKER_MEMORY"] += f".{os.environ.get(RESTARTS, '0')}"
    told = error_of(lambda: training(rank, workers, "sgd", {"update_on_kvstore": False}, 4))
    return {"told": told.partition(":")[0]}


def test_a_successor_on_another_host_is_told_that_what_it_needs_is_not_there(tmp_path: Path) -> None:
    environ = {"KVSTORE_WORKER_MEMORY": str(tmp_path / "memory")}
    point = "worker.round.committed@0:3"
    [told] = run_with_deaths(lost_memory, tmp_path, point, 1, 1, environ=environ).results
    assert told == {"told": "WorkerLostError"}


def adding(rank: int, workers: int) -> Results:
    """A loop that adds parameters before its third step, and counts the warnings about that."""
    net, warned = model(), list[logging.LogRecord]()
    heard = logging.Handler(logging.WARNING)
    heard.emit = warned.append  # type: ignore[method-assign]
    logging.getLogger("kvtrainer.sync.binding").addHandler(heard)

    def train() -> None:
        with kvtrainer.Trainer(net[0].parameters(), "sgd", kvstore="dist_sync") as trainer:
            start = trainer.resume()
            for step in range(start.round, 6):
                if step == 2:
                    trainer.add_param_group({"params": list(net[2].parameters())})
                net(torch.ones(1, 40)).square().mean().backward()
                trainer.step(1)

    return {"told": error_of(train).partition(":")[0], "warned": len(warned)}


@pytest.mark.parametrize(("nth", "told", "warned"), [(2, "nothing", 1), (6, "WorkerLostError", 0)])
def test_a_successor_is_told_that_it_has_not_the_parameters_that_were_added(
    nth: int, told: str, warned: int, tmp_path: Path
) -> None:
    job = run_with_deaths(adding, tmp_path, f"worker.round.committed@0:{nth}", 1, 1)
    assert (job["told"], job["warned"]) == ([told], [warned])


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_without_servers_every_start_is_the_first(kvstore: str | None) -> None:
    with kvtrainer.Trainer(model().named_parameters(), "sgd", kvstore=kvstore) as trainer:
        assert trainer.resume() == (0, None)


@pytest.mark.parametrize(
    "value", [{1.5: 2}, {"a": torch.zeros(2)}, [1 << 70], {"a": [set()]}, b"x" * (49 << 10)]
)
def test_a_state_of_other_than_plain_values_or_too_long_is_refused_where_it_is_set(value: Any) -> None:
    with kvtrainer.Trainer(model().named_parameters(), "sgd", kvstore=None) as trainer:
        with pytest.raises(ConfigurationError):
            trainer.client_state = value
        assert trainer.client_state is None


def test_random_states_continue_the_numbers_of_all_generators() -> None:
    import random

    import numpy as np

    state = get_random_state()
    first = random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()
    set_random_state(state)
    assert (
        random.random(),
        np.random.rand(),
        torch.rand(1).item(),
        random.gauss(0, 1),
        np.random.randn(),
    ) == first


@pytest.mark.parametrize("damage", [{}, {"python": [3, b"", None]}, {"torch": b"abc"}, {"cuda": [b"abcd"]}])
def test_something_else_than_random_states_is_refused(damage: dict[str, Any]) -> None:
    state = {**get_random_state(), **damage} if damage else {}
    before = get_random_state()
    with pytest.raises(ConfigurationError):
        set_random_state(state)
    assert get_random_state() == before


def counting(rank: int, workers: int, kvstore: str, steps: int, size: int) -> Results:
    """Every push adds one to the weights, exactly; the data cursor is the script's own state."""
    weight = torch.nn.Parameter(torch.zeros(size))
    options = {"learning_rate": 1.0}
    with kvtrainer.Trainer([weight], "sgd", options, kvstore=kvstore) as trainer:
        start = trainer.resume()
        cursor = start.client_state["cursor"] if start.client_state else 0
        while cursor < steps:
            cursor += 1
            weight.grad = torch.full((size,), -1.0)
            trainer.client_state = {"cursor": cursor}
            trainer.step(1)
        store = trainer.kvstore
        assert store is not None
        with contextlib.closing(store.open_agreement()) as agreement:
            agreement.all_gather(b"done")
        found = next(iter(trainer.pull_weights().values()), weight).detach()
    return {"counts": sorted(set(found.tolist())), "start": start.round}


@pytest.mark.parametrize(
    ("kvstore", "point"), one_in(2, ["dist_async", "dist_ssp"], ["committed", "begin", "commit", "end"])
)
def test_pushes_that_count_one_by_one_count_once_over_a_restart(
    kvstore: str, point: str, tmp_path: Path
) -> None:
    job = run_with_deaths(counting, tmp_path, f"worker.round.{point}@1:6", 3, 1, kvstore, 12, 2000)
    assert job["counts"] == [[36.0]] * 3


@pytest.mark.parametrize("point", ["worker.round.next_commit@1:6", "server.update.next_chunk@1:9"])
def test_every_server_counts_every_push_once_whoever_dies(point: str, tmp_path: Path) -> None:
    environ, call = {"KVSTORE_DURABILITY": "process"}, ("dist_async", 8, 600_000)
    job = run_with_deaths(counting, tmp_path, point, 3, 2, *call, environ=environ)
    assert job["counts"] == [[24.0]] * 3
