"""What workers of servers agree on, in every mode; several Trainers on one store; checkpoints without rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kvtrainer.kvstore import DistKVStore
from kvtrainer.strategy import Strategy, agreement_of
from tests.support.processes import Members, Processes, new_name, together


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Any]]:
    with Processes() as processes:
        yield processes.servers(2)


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
