"""Parameter groups that are added while several workers train on real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import ConfigurationError, KVStoreError
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

OPTIONS = {"lr": 0.1, "betas": (0.5, 0.9)}
CLIP = 1.0


def parameters(rank: int) -> list[Parameter]:
    """Rank 0's count, also those of a group that comes later."""
    return [Parameter(torch.full((size,), float(rank + 1))) for size in (3, 40, 2)]


def gradient(size: int, rank: int, at: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * at + 10 * rank + size))


def trainer_over(kv: DistKVStore, given: Any, **options: Any) -> Trainer:
    return Trainer(given, "torch:Adam", OPTIONS, kvstore=kv, clip_grad={"max_norm": CLIP}, **options)


def train(trainer: Trainer, given: list[Parameter], rank: int, steps: range) -> None:
    for at in steps:
        for p in given:
            p.grad = gradient(p.numel(), rank, at)
        trainer.step()


def expected(workers: int) -> list[list[float]]:
    given = parameters(0)
    optimizer = torch.optim.Adam(given[:1], **OPTIONS)  # type: ignore[arg-type]
    for at in range(6):
        if at == 2:
            optimizer.add_param_group({"params": given[1:], "lr": 0.05})
        used = given[:1] if at < 2 else given
        for p in used:
            p.grad = torch.stack([gradient(p.numel(), rank, at) for rank in range(workers)]).mean(0)
        torch.nn.utils.clip_grad_norm_(used, CLIP)
        optimizer.step()
    return [p.tolist() for p in given]


@pytest.mark.parametrize("in_store", [True, False])
def test_a_group_that_all_workers_add_is_trained_and_saved_with_the_others(
    jobs: Servers, in_store: bool, tmp_path: Path
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        given = parameters(rank)
        trainer = trainer_over(kv, given[:1], update_on_kvstore=in_store)
        train(trainer, given[:1], rank, range(2))
        trainer.add_param_group({"params": given[1:], "lr": 0.05})
        train(trainer, given, rank, range(2, 4))
        trainer.save_states(tmp_path / f"{rank}")
        again = [Parameter(p.detach().clone()) for p in given]
        groups = [{"params": again[:1]}, {"params": again[1:]}]
        successor = trainer_over(kv, groups, update_on_kvstore=in_store)
        successor.load_states(tmp_path / "0" if rank == 0 else tmp_path / f"{rank}")
        for one, mine in ((trainer, given), (successor, again)):
            train(one, mine, rank, range(4, 6))
        assert [p.tolist() for p in again] == [p.tolist() for p in given]
        return [p.tolist() for p in given]

    results = jobs.results(2, 2, body)
    assert results[0] == results[1]
    for mine, theirs in zip(results[0], expected(2), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("in_store", [True, False])
def test_a_worker_that_does_not_add_the_group_makes_the_step_fail_on_all_until_it_does(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> tuple[bool, list[list[float]]]:
        given = parameters(rank)
        trainer = trainer_over(kv, given[:1], update_on_kvstore=in_store)
        train(trainer, given[:1], rank, range(2))
        before = given[0].tolist()
        if rank == 0:
            trainer.add_param_group({"params": given[1:], "lr": 0.05})
        with pytest.raises(KVStoreError, match="add_param_group"):
            train(trainer, given if rank == 0 else given[:1], rank, range(2, 3))
        is_same = given[0].tolist() == before
        if rank == 1:
            trainer.add_param_group({"params": given[1:], "lr": 0.05})
        train(trainer, given, rank, range(2, 6))
        return is_same, [p.tolist() for p in given]

    results = jobs.results(2, 2, body)
    assert all(is_same for is_same, _ in results)
    for _, mine in results:
        for one, theirs in zip(mine, expected(2), strict=True):
            assert one == pytest.approx(theirs, abs=1e-5)


def test_without_rounds_groups_come_before_the_first_step(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> int:
        given = parameters(rank)
        trainer = Trainer(given[:1], "sgd", {"lr": 0.1}, kvstore=kv)
        train(trainer, given[:1], rank, range(1))
        with pytest.raises(ConfigurationError):
            trainer.add_param_group({"params": given[1:]})
        train(trainer, given[:1], rank, range(1))
        return len(trainer.param_groups)

    assert jobs.results(2, 1, body, type="dist_async") == [1, 1]
