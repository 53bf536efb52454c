"""A step that Ctrl-C breaks off anywhere: the loop that calls it again goes on exactly, or is told that it cannot."""

from __future__ import annotations

import linecache
import logging
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import kvtrainer
from kvstore_server.optimizer.apply import apply_update
from kvtrainer.errors import KVStoreError, StaleGradientError
from tests.support.interrupts import Interrupt, Line, lines_of

LR, MOMENTUM = 0.1, 0.9
EVERY = 5
"""Of the lines so many are passed over: a thousand steps take half a minute."""


class Plain(torch.optim.SGD):
    """A class of which nothing is known, so it updates all parameters together."""


def gradients(step: int) -> list[torch.Tensor]:
    """Those of one step, other ones in each."""
    return [torch.full((3, 2), 0.5 + step), torch.arange(4.0) + step]


def give(parameters: list[Parameter], step: int) -> None:
    for parameter, grad in zip(parameters, gradients(step), strict=True):
        parameter.grad = grad


def fresh() -> list[Parameter]:
    return [Parameter(torch.arange(6.0).view(3, 2)), Parameter(torch.ones(4))]


def weights_of_torch() -> list[torch.Tensor]:
    """After three steps."""
    parameters = fresh()
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    for step in range(3):
        give(parameters, step)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def train(optimizer: Any, at: int, **options: Any) -> tuple[list[torch.Tensor] | None, list[Line]]:
    """Make three steps, of which the second is interrupted before line `at` and called once more.

    Returns the weights, or None where the loop was told that they may have a part of it; and the lines of that step.
    """
    parameters, lines, said = fresh(), list[Line](), list[logging.LogRecord]()
    log, listener = logging.getLogger("kvtrainer.sync"), logging.Handler(logging.WARNING)
    listener.emit = said.append  # type: ignore[method-assign]
    log.addHandler(listener)
    params = {"lr": LR, "momentum": MOMENTUM}
    trainer = kvtrainer.Trainer(parameters, optimizer, params, **options)
    give(parameters, 0)
    trainer.step(1)
    give(parameters, 1)
    try:
        try:
            lines = lines_of(lambda: trainer.step(1), at)
        except Interrupt:
            with suppress(StaleGradientError):  # it had been made
                trainer.step(1)
        give(parameters, 2)
        trainer.step(1)
    except KVStoreError:
        return None, lines
    finally:
        trainer.close()
        log.removeHandler(listener)
    return None if said else [parameter.detach() for parameter in parameters], lines


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("torch:SGD", {"kvstore": None}),
        (Plain, {"kvstore": None}),
        ("torch:SGD", {"kvstore": "local", "update_on_kvstore": True}),
        ("torch:SGD", {"kvstore": "local", "update_on_kvstore": False}),
    ],
    ids=["no store", "all together", "in the store", "beside the store"],
)
def test_an_interrupted_step_is_made_once_or_the_loop_told(optimizer: Any, options: dict[str, Any]) -> None:
    wanted = weights_of_torch()
    found, lines = train(optimizer, -1, **options)
    assert found is not None
    assert all(map(torch.allclose, found, wanted))
    firsts = sorted({line: at for at, line in reversed(list(enumerate(lines)))}.values())
    firsts = firsts[::EVERY]
    outcomes = [train(optimizer, at, **options)[0] for at in firsts]
    went_on = [(lines[at], one) for at, one in zip(firsts, outcomes, strict=True) if one is not None]
    assert len(went_on) > len(firsts) // 8
    assert [line for line, one in went_on if not all(map(torch.allclose, one, wanted))] == []


def test_a_trainer_without_a_store_survives_an_interrupt_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    parameters = fresh()
    trainer = kvtrainer.Trainer(parameters, "sgd", {"lr": LR}, kvstore=None)
    give(parameters, 0)
    trainer.step(1)
    give(parameters, 1)
    lines = lines_of(lambda: trainer.step(1))
    updated = max(at for at, (file, _) in enumerate(lines) if file.endswith("apply.py"))
    give(parameters, 2)
    with pytest.raises(Interrupt):
        lines_of(lambda: trainer.step(1), updated)
    for step in range(3, 5):
        before = [parameter.detach().clone() for parameter in parameters]
        give(parameters, step)
        trainer.step(1)
        for parameter, former, grad in zip(parameters, before, gradients(step), strict=True):
            torch.testing.assert_close(parameter.detach(), former - LR * grad)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def interrupted_in_its_end(**options: Any) -> Any:
    """Return a Trainer whose third step was interrupted when weights were new, and counts were not yet."""
    parameters = fresh()
    trainer = kvtrainer.Trainer(parameters, "sgd", {"lr": LR, "momentum": MOMENTUM}, **options)
    give(parameters, 0)
    trainer.step(1)
    give(parameters, 1)
    lines = lines_of(lambda: trainer.step(1))
    updated = [at for at, line in enumerate(lines) if "tracker.consume(" in linecache.getline(*line)]
    give(parameters, 2)
    with pytest.raises(Interrupt):
        lines_of(lambda: trainer.step(1), updated[0])
    return trainer


def save(trainer: Any, folder: Path) -> None:
    trainer.save_states(folder / "x.states")


SAVES = {
    "save_states": save,
    "state_dict": lambda trainer, _: trainer.state_dict(),
    "export_own_states": lambda trainer, _: trainer.export_own_states(),
}


@pytest.mark.parametrize("call", SAVES)
def test_what_an_interrupted_step_has_left_with_a_store_is_not_saved(call: str, tmp_path: Path) -> None:
    """As the next step is not made: what was saved before is whole."""
    with interrupted_in_its_end(kvstore="local", update_on_kvstore=True) as trainer:
        with pytest.raises(KVStoreError) as refused:
            SAVES[call](trainer, tmp_path)
        with pytest.raises(KVStoreError) as next_step:
            trainer.step(1)
        assert str(refused.value) == str(next_step.value)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", SAVES)
def test_an_interrupted_step_without_a_store_is_saved_and_logged(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = interrupted_in_its_end(kvstore=None)
    assert caplog.records == []
    SAVES[call](trainer, tmp_path)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_update_that_fails_midway_is_not_taken_for_one_that_changed_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = fresh()
    groups = [{"params": [p], "lr": LR / (at + 1)} for at, p in enumerate(parameters)]
    trainer = kvtrainer.Trainer(groups, "sgd", kvstore=None)
    numbers = count()

    def fails(*arguments: Any, **options: Any) -> None:
        if next(numbers):
            raise torch.OutOfMemoryError("no memory for the second group")
        apply_update(*arguments, **options)

    give(parameters, 0)
    with monkeypatch.context() as patch:
        patch.setattr("kvstore_server.shard.shard.apply_update", fails)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.step(1)
    give(parameters, 1)
    trainer.step(1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
