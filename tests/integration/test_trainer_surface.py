"""Two workers and two servers: loss scaling, published weights, schedulers and numbers that change while training.

Every test trains a sliced and a small parameter, with equal gradients everywhere, at both sites of the update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer, amp
from kvtrainer.errors import (
    ConfigurationError,
    KVStoreError,
    PlanMismatchError,
    RoundAbortedError,
    StateFileError,
    StateMismatchError,
)
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

SHAPES = (3,), (170, 301)
MOMENTUM = {"learning_rate": 1.0, "momentum": 0.5}
SITES = pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "reduced"])


def made(kv: DistKVStore, in_store: bool, options: dict[str, Any]) -> tuple[list[Parameter], Trainer]:
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    return parameters, Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)


def step(trainer: Trainer, parameters: Sequence[Parameter], batch_size: int = 2) -> list[float]:
    for p in parameters:
        p.sum().backward()
    trainer.step(batch_size)
    return values(parameters)


def values(parameters: Sequence[Parameter]) -> list[float]:
    """The one value of each parameter; NaN where its elements differ."""
    return [p.unique().item() if p.unique().numel() == 1 else math.nan for p in parameters]


@SITES
def test_overflow_on_one_worker_skips_the_step_on_all_and_halves_every_scale_once(
    jobs: Servers, in_store: bool
) -> None:
    """In step 1 one gradient of rank 1, of the small parameter, is infinite."""

    def body(kv: DistKVStore, rank: int) -> Any:
        parameters, trainer = made(kv, in_store, MOMENTUM)
        amp.init_trainer(trainer)
        weights, scales = [], []
        for at in range(4):
            for p in parameters:
                slope = math.inf if (at, rank, p.dim()) == (1, 1, 1) else 1.0
                with amp.scale_loss((p * slope).sum(), trainer) as scaled:
                    scaled.backward()
            scales.append(trainer.amp_loss_scale)
            trainer.step(2)
            weights.append(values(parameters))
        steps = [float(state["step"]) for state in trainer.state_dict()["state"].values()]
        return weights, scales, steps, trainer.optimizer.num_update

    # m = .5 m - 1 in three steps; the second of four is skipped.
    weights = [[-1.0] * 2, [-1.0] * 2, [-2.5] * 2, [-4.25] * 2]
    assert jobs.results(2, 2, body) == [(weights, [65536, 65536, 32768, 32768], [3, 3], 3)] * 2


@SITES
def test_published_weights_are_rank_0s_everywhere_and_momentum_goes_on(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        parameters, trainer = made(kv, in_store, MOMENTUM)
        step(trainer, parameters)
        with torch.no_grad():
            parameters[0].fill_(10.0 + rank)
        trainer.set_data()
        return [values(parameters), step(trainer, parameters)]

    assert jobs.results(2, 2, body) == [[[10.0, -1.0], [8.5, -2.5]]] * 2


@SITES
def test_a_worker_that_steps_while_another_publishes_fails_on_both_and_the_next_step_counts(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        parameters, trainer = made(kv, in_store, {"learning_rate": 1.0})
        step(trainer, parameters)
        with pytest.raises(PlanMismatchError, match=r"rank 1.*'parameters'.*set_data.*add_param_group"):
            step(trainer, parameters) if rank else trainer.set_data()
        if rank:
            trainer.step(2)
            return values(parameters)
        return step(trainer, parameters)

    assert jobs.results(2, 2, body) == [[-2.0, -2.0]] * 2


@SITES
def test_a_parameter_that_is_frozen_on_one_worker_moves_alike_on_all(jobs: Servers, in_store: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        parameters = [Parameter(torch.ones(shape)) for shape in SHAPES]
        parameters[0].requires_grad_(rank == 0)
        options = {"learning_rate": 0.5, "momentum": 0.5, "wd": 0.125}
        trainer = Trainer(parameters, "sgd", options, kvstore=kv, update_on_kvstore=in_store)
        for _ in range(3):
            sum(p.sum() for p in parameters if p.requires_grad).backward()  # type: ignore[union-attr]
            trainer.step(1)
        return values(parameters)

    expected = []
    for gradient in (1.0, 2.0):  # of rank 0 alone, and of both
        weight, momentum = 1.0, 0.0
        for _ in range(3):
            momentum = 0.5 * momentum - 0.5 * (gradient + 0.125 * weight)
            weight += momentum
        expected.append(weight)
    assert jobs.results(2, 2, body) == [expected] * 2


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


@SITES
def test_of_more_groups_the_parameters_that_all_leave_out_stay_as_they_are_and_no_others(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        given = [Parameter(torch.full((size,), 2.0)) for size in (3, 4, 5)]
        trainer = Trainer(given[:2], "sgd", {"learning_rate": 0.5}, kvstore=kv, update_on_kvstore=in_store)
        for used in (given[:2], [given[1], given[2]], [given[0], given[1]]):
            if used[-1] is given[2]:
                trainer.add_param_group({"params": given[2:]})
            for parameter in given:
                parameter.grad = torch.ones_like(parameter) if any(parameter is one for one in used) else None
            trainer.step(1, ignore_stale_grad=True)
        return values(given)

    # Each of the two workers gives 1, so a step takes 1 away: of the three there were 2, 3 and 1.
    assert jobs.results(2, 2, body) == [[0.0, -1.0, 1.0]] * 2


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


@SITES
def test_groups_that_all_workers_edit_are_trained_as_torch_does(jobs: Servers, in_store: bool) -> None:
    def edit(optimizer: Any, given: list[Parameter], at: int) -> None:
        first, second = optimizer.param_groups
        if at == 2:
            second["params"].append(given[2])
        elif at == 3:
            first["params"].append(second["params"].pop(0))
        elif at == 4:
            first["params"][0] = given[3]

    def made_of(rank: int) -> list[Parameter]:
        return [*parameters(rank), Parameter(torch.full((5,), float(rank + 1)))]

    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        given = made_of(rank)
        groups = [{"params": given[:1]}, {"params": given[1:2], "lr": 0.05}]
        trainer = trainer_over(kv, groups, update_on_kvstore=in_store)
        for at in range(6):
            edit(trainer, given, at)
            train(
                trainer,
                [p for group in trainer.param_groups for p in group["params"]],
                rank,
                range(at, at + 1),
            )
        return [p.tolist() for p in given]

    def oracle() -> list[list[float]]:
        given = made_of(0)
        groups = [{"params": given[:1]}, {"params": given[1:2], "lr": 0.05}]
        optimizer = torch.optim.Adam(groups, **OPTIONS)  # type: ignore[arg-type]
        for at in range(6):
            edit(optimizer, given, at)
            used = [p for group in optimizer.param_groups for p in group["params"]]
            for p in used:
                p.grad = torch.stack([gradient(p.numel(), rank, at) for rank in range(2)]).mean(0)
            torch.nn.utils.clip_grad_norm_(used, CLIP)
            optimizer.step()
        return [p.tolist() for p in given]

    results = jobs.results(2, 2, body)
    assert results[0] == results[1]
    for mine, theirs in zip(results[0], oracle(), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


@SITES
def test_an_edit_of_one_worker_makes_the_step_fail_on_all_until_the_others_make_it(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        given, trainer = made(kv, in_store, {"learning_rate": 1.0})
        step(trainer, given)
        if rank == 0:
            trainer.param_groups[0]["params"].pop()
        with pytest.raises(KVStoreError):
            step(trainer, given)
        if rank == 1:
            trainer.param_groups[0]["params"].pop()
        return step(trainer, given)

    # The failed step has used no gradient, so that two backward passes make the last one.
    assert jobs.results(2, 2, body) == [[-3.0, -1.0]] * 2


@pytest.mark.parametrize("is_edit", [True, False], ids=["edit", "add_param_group"])
def test_without_rounds_groups_come_before_the_first_step(jobs: Servers, is_edit: bool) -> None:
    def body(kv: DistKVStore, rank: int) -> int:
        given = parameters(rank)
        trainer = Trainer(given[:1], "sgd", {"lr": 0.1}, kvstore=kv)
        trainer.param_groups[0]["params"].append(given[1])
        train(trainer, given[:2], rank, range(1))
        if is_edit:
            trainer.param_groups[0]["params"].append(given[2])
        with pytest.raises(ConfigurationError):
            train(trainer, given, rank, range(1)) if is_edit else trainer.add_param_group(
                {"params": given[2:]}
            )
        if is_edit:
            trainer.param_groups[0]["params"].pop()
        train(trainer, given[:2], rank, range(1))
        return len(trainer.param_groups)

    assert jobs.results(2, 1, body, type="dist_async") == [1, 1]


@pytest.mark.parametrize("damage", ["damaged", "missing", "another model's"])
@pytest.mark.parametrize("in_store", [True, False])
def test_states_that_one_worker_cannot_read_are_loaded_by_none(
    jobs: Servers, in_store: bool, damage: str, tmp_path: Path
) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[float]]:
        given = parameters(rank)
        trainer = trainer_over(kv, given, update_on_kvstore=in_store)
        train(trainer, given, rank, range(2))
        path = tmp_path / f"{rank}"
        trainer.save_states(path)
        if rank == 1 and damage == "damaged":
            path.write_bytes(path.read_bytes()[:-1])
        elif rank == 1 and damage == "missing":
            path.unlink()
        elif rank == 1:
            Trainer(torch.nn.Linear(1, 1), "sgd").save_states(path)
        train(trainer, given, rank, range(2, 4))
        states = trainer.state_dict()
        own = StateMismatchError if damage == "another model's" else StateFileError
        with pytest.raises(own if rank == 1 else RoundAbortedError, match="rank 1" if rank == 0 else None):
            trainer.load_states(path)
        for at, state in trainer.state_dict()["state"].items():
            assert all(torch.equal(torch.as_tensor(v), states["state"][at][n]) for n, v in state.items())
        train(trainer, given, rank, range(4, 6))  # and all go on
        return [p.tolist() for p in given]

    results = jobs.results(2, 2, body)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("in_store", "options"),
    [(True, {}), (False, {}), (True, {"zero_copy": False}), (True, {"overlap": True})],
)
def test_gradients_are_not_scaled_after_a_step(
    jobs: Servers, in_store: bool, options: dict[str, Any]
) -> None:
    """The large one lies where servers read it."""

    def body(kv: DistKVStore, rank: int) -> list[float]:
        given = [Parameter(torch.zeros(300_000)), Parameter(torch.zeros(3))]
        trainer = Trainer(
            given,
            "sgd",
            {"learning_rate": 1.0},
            kv,
            update_on_kvstore=in_store,
            amp={"init_scale": 1024.0},
            **options,
        )
        for _ in range(3):
            trainer.update_params((given[0].sum() + given[1].sum()) * (rank + 1))
            for p in given:
                assert p.grad is not None
                assert p.grad.unique().tolist() == [rank + 1]
        assert all(bool((p == -4.5).all()) for p in given)
        return []

    jobs.results(2, 2, body)
