"""Learning rates in proportion to the batch size."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from kvtrainer import Trainer, lr_scheduler
from kvtrainer.errors import ConfigurationError
from kvtrainer.strategy.parts import scale_learning_rates
from tests.support.strategies import SGD, Make, Net, make

__all__ = ["make"]
LOG = logging.getLogger("scaling")


@pytest.mark.parametrize(("workers", "micro", "expected"), [(1, 4, 0.025), (8, 2, 0.1), (8, 4, 0.2)])
def test_rate_grows_with_workers_and_their_batch(workers: int, micro: int, expected: float) -> None:
    trainer = Trainer(Net(), "torch:SGD", {"lr": 0.1})
    scale_learning_rates({"enable": True, "base_batch_size": 16}, {"": trainer}, micro, workers, LOG)
    assert trainer.get_lr()["lr"] == pytest.approx([expected])


def rates(make: Make, cfg: Any, wrapper: Any = SGD, **more: Any) -> list[float]:
    run = {"train_micro_batch_size_per_gpu": 4, "max_iters": 8}
    _, trainer = make(auto_scale_lr=cfg, **more).prepare(Net(), optim_wrapper=wrapper, dispatch_kwargs=run)
    return sorted({round(rate, 9) for its in trainer.get_lr().values() for rate in its})


ON = {"enable": True, "base_batch_size": 16}


def test_nothing_is_scaled_unless_enabled(make: Make) -> None:
    assert (
        rates(make, None) == rates(make, {"base_batch_size": 16}) == rates(make, {"enable": False}) == [0.1]
    )


def test_groups_and_several_trainers_are_scaled_alike(make: Make) -> None:
    by_parameter = {**SGD, "paramwise_cfg": {"bias_lr_mult": 2.0}}
    assert rates(make, ON, by_parameter) == [0.025, 0.05]
    assert rates(make, ON, {"body": SGD, "head": by_parameter}) == [0.025, 0.05]


def test_replicas_count_and_accumulated_passes_only_on_request(make: Make) -> None:
    assert rates(make, ON, device=["cpu", "cpu"]) == [0.05]
    twice = {**SGD, "accumulative_counts": 2}
    assert rates(make, ON, twice) == [0.025]
    assert rates(make, {**ON, "count_accumulation": True}, twice) == [0.05]


def test_schedules_begin_with_the_scaled_rate(make: Make) -> None:
    run = {"train_micro_batch_size_per_gpu": 4, "max_iters": 8}
    strategy = make(auto_scale_lr=ON)
    cfg = {"type": "ConstantLR", "factor": 0.5, "by_epoch": False, "end": 2}
    _, trainer, _ = strategy.prepare(Net(), optim_wrapper=SGD, param_scheduler=cfg, dispatch_kwargs=run)
    assert trainer.get_lr()["lr"] == pytest.approx([0.0125])
    with pytest.raises(RuntimeError, match="before it was scaled"):
        strategy._scale_lr()


def test_scheduler_that_decides_the_rate_alone_is_scaled_too() -> None:
    scheduler = lr_scheduler.FactorScheduler(step=10, base_lr=0.1)
    trainer = Trainer(Net(), "sgd", {"learning_rate": 0.1, "lr_scheduler": scheduler})
    scale_learning_rates(ON, {"": trainer}, 4, 1, LOG)
    assert scheduler.base_lr == pytest.approx(0.025)


def test_rates_that_are_tensors_are_scaled_too(make: Make) -> None:
    net = Net()
    adam = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1))
    run = {"train_micro_batch_size_per_gpu": 4}
    _, trainer = make(auto_scale_lr=ON).prepare(net, optim_wrapper=adam, dispatch_kwargs=run)
    assert trainer.get_lr()["lr"] == pytest.approx([0.025])


def test_a_scheduler_that_trainers_share_is_scaled_once() -> None:
    shared = lr_scheduler.FactorScheduler(step=5, base_lr=0.1)
    both = {n: Trainer(Net(), "sgd", {"learning_rate": 0.1, "lr_scheduler": shared}) for n in "ab"}
    scale_learning_rates(ON, both, 4, 1, LOG)
    assert shared.base_lr == pytest.approx(0.025)
    assert [one.learning_rate for one in both.values()] == pytest.approx([0.025, 0.025])


def test_no_trainer_is_scaled_if_one_cannot_be() -> None:
    free = Trainer(Net(), "torch:SGD", {"lr": 0.1})
    bound = Trainer(Net(), "torch:SGD", {"lr": 0.1}, schedules=[{"policy": "fixed"}])
    with pytest.raises(RuntimeError, match="before it was scaled"):
        scale_learning_rates(ON, {"a": free, "b": bound}, 4, 1, LOG)
    assert free.get_lr()["lr"] == [0.1]


def test_formula_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trainer = Trainer(Net(), "torch:SGD", {"lr": 0.1}, accumulate=3)
    scale_learning_rates({**ON, "count_accumulation": True}, {"d": trainer}, 4, 2, LOG)
    assert "learning rate of d · 1.5: batch size 2 workers · 4 · 3 accumulated = 24, base 16" in caplog.text


@pytest.mark.parametrize(
    ("cfg", "micro", "match"),
    [
        ({"enable": True}, 4, "base_batch_size of auto_scale_lr must be"),
        (ON, None, "train_micro_batch_size_per_gpu of dispatch_kwargs"),
        ({**ON, "base_batch": 3}, 4, "'base_batch'"),
    ],
)
def test_what_is_missing_or_unknown_is_named(cfg: Any, micro: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        scale_learning_rates(cfg, {"": Trainer(Net(), "sgd")}, micro, 1, LOG)
