"""Two epochs, a checkpoint, and a third in new processes with new servers are three epochs in one go, to the bit.

With mixed precision, an overflow before the checkpoint, clipping, options by parameter, schedules of the learning rate
and of momentum, dropout and shuffled data at once. Workers agree on all that they need before the first step, in every
mode; without rounds a checkpoint has the updates of all workers.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kvtrainer import Trainer
from kvtrainer.kvstore import DistKVStore
from kvtrainer.states.format import pack_state_file
from kvtrainer.strategy import Strategy, agreement_of
from tests.support.jobs import Job, Results, own_place, run_job
from tests.support.processes import Members, new_name, together

BATCHES, EPOCHS = 4, 3
BAD_STEP = 5
"""In the second epoch; the loss is infinite on the last worker."""

STORES: dict[str, tuple[Any, bool | None, tuple[str, ...]]] = {
    "none": (None, None, ("pair",)),
    "local in store": ("local", True, ("corrected",)),
    "local by trainer": ("local", False, ("accumulated",)),
    "device": ("device", None, ("momentum",)),
    "dist_sync in store": ("dist_sync", True, ("corrected", "accumulated", "pair", "compressed")),
    "dist_sync by workers": ("dist_sync", False, ("corrected", "pair")),
}
"""The store, whether the optimizer runs in it, and what is trained there."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": {"type": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
    "adam": {"optimizer": {"type": "Adam", "lr": 0.01, "weight_decay": 0.01}},
    "corrected": {
        "optimizer": {
            "type": "gluon:sgd", "learning_rate": 0.05, "momentum": 0.9, "wd": 0.01, "momentum_correction": True
        }
    },
    "accumulated": {"optimizer": {"type": "AdamW", "lr": 0.01, "weight_decay": 0.01}, "accumulative_counts": 2},
}  # fmt: skip
OPTIMIZERS["compressed"] = {**OPTIMIZERS["adam"], "compression_params": {"type": "2bit", "threshold": 0.01}}
OPTIMIZERS["pair"] = {"left": OPTIMIZERS["momentum"], "right": OPTIMIZERS["adam"]}
OPTIONS: dict[str, Any] = {
    "amp": {"init_scale": 16.0, "growth_interval": 3},
    "clip_grad": {"max_norm": 0.5},
    "paramwise_cfg": {"bias_lr_mult": 2.0, "norm_decay_mult": 0.0, "custom_keys": {"head": {"lr_mult": 0.5}}},
}
SCHEDULES: list[Any] = [
    {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 3},
    {"type": "StepLR", "step_size": 1, "gamma": 0.5},
    {"policy": "cyclic", "name": "momentum", "max_iters": 12, "target_ratio": [0.85, 1.0]},
]


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 1)
        self.masks: list[Tensor] = []

    def init_weights(self) -> None:
        for p in self.parameters():
            nn.init.uniform_(p, -0.3, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.body(x))), 0.3)
        self.masks.append(hidden != 0)
        out: Tensor = self.head(hidden)
        return out


class Both(nn.Module):
    """Two models that know each other's output, as those of a GAN do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Half(), Half()

    def init_weights(self) -> None:
        self.left.init_weights()
        self.right.init_weights()


def strategy_of(case: str, folder: Path, seed: int) -> Strategy:
    store = STORES[case.split(", ")[0]][0]
    env: dict[str, Any] = {"randomness": {"seed": seed, "diff_rank_seed": True}}
    if store == "device":
        env |= {"dist_cfg": {"init_method": f"file://{folder}/meeting"}}
    return Strategy(
        kvstore=store,
        work_dir=str(folder / case.replace(" ", "_")),
        experiment_name=f"experiment of rank {own_place()[0]}",
        env_kwargs=env,
        log_kwargs={"log_level": "ERROR", "name": f"{case} {seed}"},
    )


def prepared(case: str, strategy: Strategy) -> tuple[nn.Module, dict[str, tuple[Half, Trainer]]]:
    place, kind = case.split(", ")
    more = {**OPTIONS, "update_on_kvstore": STORES[place][1]}
    one = OPTIMIZERS[kind]
    model, trainer, _ = strategy.prepare(
        Both() if kind == "pair" else Half(),
        optim_wrapper={name: {**own, **more} for name, own in one.items()}
        if kind == "pair"
        else {**one, **more},
        param_scheduler=SCHEDULES,
        dispatch_kwargs={"max_epochs": EPOCHS, "max_iters": EPOCHS * BATCHES, "epoch_length": BATCHES},
    )
    if isinstance(trainer, Trainer):
        return model, {"": (model, trainer)}
    return model, {name: (getattr(model, name), trainer[name]) for name in trainer}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch in random order, with noise of every kind of random numbers; and which samples they are."""
    samples = torch.linspace(-1, 1, 4 * BATCHES * 6).view(-1, 6) + own_place()[0]
    for x, at in DataLoader(TensorDataset(samples, torch.arange(len(samples))), batch_size=4, shuffle=True):
        yield x + torch.randn(4, 6) + random.random() + float(np.random.rand()), at


def train(trained: dict[str, tuple[Half, Trainer]], epoch: int, is_last: bool) -> list[Any]:
    """One epoch; what every step saw and reported."""
    seen: list[Any] = []
    for at, (x, order) in enumerate(batches(), epoch * BATCHES):
        seen.append(order)
        for net, trainer in trained.values():
            with trainer.context():
                others = sum(float(other(x).detach().sum()) for other, _ in trained.values())
                loss = (net(x).float() - 0.1 * others).square().mean()
            result = trainer.update_params(loss * float("inf") if is_last and at == BAD_STEP else loss)
            seen.append((loss.detach(), vars(result)))
    for _, trainer in trained.values():
        trainer.end_epoch()
    return seen


def state_of(model: nn.Module, trained: dict[str, tuple[Half, Trainer]], seen: list[Any]) -> dict[str, Any]:
    """All that the next step depends on, and what the last epoch was like."""
    masks = [mask for net, _ in trained.values() for mask in net.masks[-BATCHES:]]
    # Every rank has batch statistics of its own, of which a checkpoint has the first rank's.
    weights = {
        name: v.clone()
        for name, v in model.state_dict().items()
        if own_place()[0] == 0 or "running" not in name
    }
    return {
        "weights": weights,
        "states": {name: _states(trainer) for name, (_, trainer) in trained.items()},
        "values": {name: (t.get_lr(), t.get_momentum()) for name, (_, t) in trained.items()},
        "epoch": seen,
        "masks": masks,
        "random": [random.getstate(), repr(np.random.get_state()), torch.get_rng_state()],
    }


def _states(trainer: Trainer) -> Any:
    """Options, optimizer state, loss scale, schedules, counts of updates and backward passes."""
    tensors, text = pack_state_file(trainer.export_saved_states())
    return tensors, text["content"]


def whole(case: str, folder: Path) -> dict[str, Any]:
    strategy = strategy_of(case, folder / "whole", 5)
    model, trained = prepared(case, strategy)
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    is_last = strategy.rank == strategy.world_size - 1
    seen = [train(trained, epoch, is_last) for epoch in range(EPOCHS)]
    skipped = any(step[1]["skipped"] for epoch in seen[:-1] for step in epoch if isinstance(step, tuple))
    names = [strategy.timestamp, strategy.experiment_name]
    place = [strategy.rank, strategy.world_size, strategy.launcher, strategy.distributed]
    agreed = {"begun": begun, "names": names, "place": place, "skipped": skipped}
    result = {**state_of(model, trained, seen[-1]), "agreed": agreed}
    strategy.close()
    return result


def begun(case: str, folder: Path) -> None:
    strategy = strategy_of(case, folder, 5)
    _, trained = prepared(case, strategy)
    for epoch in range(EPOCHS - 1):
        train(trained, epoch, strategy.rank == strategy.world_size - 1)
    meta = {"epoch": EPOCHS - 1, "iter": (EPOCHS - 1) * BATCHES}
    strategy.save_checkpoint(f"{strategy.work_dir}/two.pt", extra_ckpt={"meta": meta})
    strategy.close()


def ended(case: str, folder: Path) -> dict[str, Any]:
    strategy = strategy_of(case, folder, 77)
    strategy.logger.setLevel(logging.CRITICAL)
    model, trained = prepared(case, strategy)
    assert strategy.load_or_resume(resume=True) is not None
    result = state_of(model, trained, train(trained, EPOCHS - 1, False))
    result["agreed"] = {"seed": strategy.seed}
    strategy.close()
    return result


def is_mine(case: str) -> bool:
    """Stores of one process are the business of the first worker."""
    return own_place()[0] == 0 or case in COMMON


def run_all(rank: int, workers: int, phase: str, folder: str, *names: str) -> Results:
    cases = [*filter(is_mine, names)]
    torch.use_deterministic_algorithms(True)
    if phase == "again":
        return {case: ended(case, Path(folder)) for case in cases}
    found = {case: whole(case, Path(folder)) for case in cases}
    for case in cases:
        begun(case, Path(folder))
    return found


CASES = [f"{place}, {kind}" for place, (_, _, kinds) in STORES.items() for kind in kinds]
COMMON = [case for case in CASES if case.startswith(("dist", "device"))]
"""Those of several workers."""

Runs = tuple[Job, Job]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Uninterrupted runs, and resumed ones."""
    make, folder = tmp_path_factory.mktemp, tmp_path_factory.mktemp("files")
    first = run_job(run_all, make("first"), 2, 2, "first", str(folder), *CASES)
    (folder / "meeting").unlink(missing_ok=True)
    return first, run_job(run_all, make("again"), 2, 2, "again", str(folder), *CASES)


def differences(mine: Any, other: Any, where: str = "") -> list[str]:
    """The places in which two nested values differ in a bit."""
    if isinstance(mine, torch.Tensor):
        return [] if mine.dtype == other.dtype and torch.equal(mine, other) else [where]
    if isinstance(mine, Mapping):
        if set(mine) != set(other):
            return [where]
        return [one for name in mine for one in differences(mine[name], other[name], f"{where}/{name}")]
    if isinstance(mine, Sequence) and not isinstance(mine, str):
        pairs = enumerate(zip(mine, other, strict=True))
        return [one for at, (a, b) in pairs for one in differences(a, b, f"{where}/{at}")]
    return [] if mine == other else [f"{where}: {mine} and {other}"]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(runs: Runs, case: str) -> None:
    for at, (uninterrupted, resumed) in enumerate(zip(*(job.results for job in runs), strict=True)):
        if case in uninterrupted:
            mine, other = ({**found[case], "agreed": None} for found in (resumed, uninterrupted))
            assert differences(mine, other, f"rank {at}") == []


def agreed(job: Job, case: str, name: str) -> list[Any]:
    """What both workers have under a name."""
    return [found["agreed"][name] for found in job[case]]


def test_a_step_overflowed_before_the_checkpoint(runs: Runs) -> None:
    for result in runs[0].results:
        assert all(found["agreed"]["skipped"] for found in result.values())


@pytest.mark.parametrize("case", COMMON)
def test_workers_agree_on_names_and_begin_with_rank_0s_weights_although_each_draws_its_own(
    runs: Runs, case: str
) -> None:
    mine, other = agreed(runs[0], case, "begun")
    assert differences(mine, other) == []
    first, second = agreed(runs[0], case, "names")
    assert first == second == [first[0], f"experiment of rank 0_{first[0]}"]
    assert agreed(runs[0], case, "place") == [[rank, 2, "kvlaunch", True] for rank in range(2)]


@pytest.mark.parametrize("case", COMMON)
def test_every_rank_has_random_numbers_of_its_own_also_after_resuming(runs: Runs, case: str) -> None:
    assert agreed(runs[1], case, "seed") == [5, 6]
    mine, other = (found["random"] for found in runs[1][case])
    assert [differences(one, another) == [] for one, another in zip(mine, other, strict=True)] == [False] * 3


def on_both(stores: tuple[DistKVStore, DistKVStore], call: Callable[[DistKVStore], Any]) -> list[Any]:
    return together(*(lambda store=store: call(store) for store in stores))


@pytest.mark.parametrize("mode", ["dist_sync", "dist_async", "dist_ssp"])
def test_bytes_of_any_length_reach_all_workers(servers: list[Any], mode: str) -> None:
    long = bytes(range(256)) * 5000

    def talk(store: DistKVStore) -> Any:
        agreement = agreement_of(store)
        mine = [b"", b"short\x00\xff"] if store.rank == 0 else [b"\xff" * 12281, long]
        found = [agreement.broadcast(long if store.rank == 0 else b"?"), *map(agreement.all_gather, mine)]
        found += [agreement.gather(mine[1])]
        agreement.close()
        return found

    with Members() as members:
        first, second = on_both(members.pair(servers, type=mode), talk)
    gathered = [b"short\x00\xff", long]
    assert first == [long, [b"", b"\xff" * 12281], gathered, gathered]
    assert second == [*first[:3], None]


def test_what_is_agreed_on_is_not_among_the_keys_of_the_store(servers: list[Any]) -> None:
    def use(store: DistKVStore) -> Any:
        assert agreement_of(store).broadcast(b"hello") == b"hello"
        store.init(3, torch.ones(2))
        return list(store._entries)

    with Members() as members:
        assert on_both(members.pair(servers), use) == [[3], [3]]


def test_a_checkpoint_without_rounds_has_the_updates_of_all_workers(
    servers: list[Any], tmp_path: Path
) -> None:
    steps = {0: 2, 1: 3}

    def strategy_on(store: DistKVStore) -> Strategy:
        log = {"name": f"{store.rank} {new_name()}", "log_level": "ERROR"}
        return Strategy(
            kvstore=store, work_dir=str(tmp_path), log_kwargs=log, env_kwargs={"randomness": {"seed": 1}}
        )

    def run(store: DistKVStore) -> None:
        strategy = strategy_on(store)
        net = nn.Linear(1, 1, bias=False)
        nn.init.constant_(net.weight, 1.0)
        model, trainer = strategy.prepare(net, optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.125}})
        for _ in range(steps[store.rank]):
            model(torch.ones(1, 1)).sum().backward()
            trainer.step(1)
        strategy.save_checkpoint(str(tmp_path / "a.pt"))
        strategy.close()

    with Members() as members:
        assert on_both(members.pair(servers, type="dist_async"), run) == [None, None]
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    assert saved["state_dict"]["weight"].item() == 1 - 5 * 0.125
