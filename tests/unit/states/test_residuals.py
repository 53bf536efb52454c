"""What compression holds back of a worker's gradients, in saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from kvtrainer import Trainer
from kvtrainer.errors import StateMismatchError
from kvtrainer.saving import saved_residuals
from kvtrainer.states.file import SavedStates, read_state_file, write_state_file


def zeros() -> dict[str, Parameter]:
    return {"a": Parameter(torch.zeros(3)), "b": Parameter(torch.zeros(170, 301))}


def trainer_of(parameters: dict[str, Parameter], kind: str | None = "2bit") -> Trainer:
    params = None if kind is None else {"type": kind}
    return Trainer(
        parameters, "sgd", {"lr": 1.0}, "device", compression_params=params, update_on_kvstore=True
    )


def step(trainer: Trainer, parameters: dict[str, Parameter], gradient: float) -> None:
    for p in parameters.values():
        p.grad = torch.full_like(p, gradient)
    trainer.step(1)


def values(parameters: dict[str, Parameter]) -> list[list[float]]:
    return [p.unique().tolist() for p in parameters.values()]


def replaced(path: Path, **changes: Any) -> None:
    saved = read_state_file(path)
    write_state_file(path, SavedStates(**{**vars(saved), **changes}))


@pytest.mark.parametrize("is_new", [True, False])
def test_residual_goes_on_in_the_trainer_that_loads(is_new: bool, tmp_path: Path) -> None:
    """2bit sends .5 of .75 and keeps .25; with .25 more the next round sends .5 again."""
    parameters, others = zeros(), zeros()
    trainer, other = trainer_of(parameters), trainer_of(others)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    if not is_new:
        step(other, others, 0.45)
    other.load_states(tmp_path / "states")
    other.save_states(tmp_path / "again")
    step(other, others, 0.25)
    assert values(others) == [[-0.5], [-0.5]]
    for name in ("states", "again"):
        found = saved_residuals(read_state_file(tmp_path / name), list(parameters))
        assert found is not None
        assert (found.rank, found.num_workers) == (0, 1)
        assert [found.values[0][key].unique().tolist() for key in range(2)] == [[0.25], [0.25]]
        assert [found.values[0][key].shape for key in range(2)] == [p.shape for p in parameters.values()]


@pytest.mark.parametrize("is_new", [True, False])
def test_residual_of_another_rank_is_not_taken_and_the_log_says_so(
    is_new: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parameters, others = zeros(), zeros()
    trainer, other = trainer_of(parameters), trainer_of(others)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    replaced(tmp_path / "states", extra={"residuals": {"rank": 1, "num_workers": 2}})
    if not is_new:
        step(other, others, 0.45)
    other.load_states(tmp_path / "states")
    step(other, others, 0.25)
    assert "on rank 1 of 2; rank 0 of 1 starts with nothing kept back" in caplog.text
    assert values(others) == [[0.0], [0.0]]


def test_states_without_residuals_leave_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parameters, plain = zeros(), zeros()
    trainer, uncompressed = trainer_of(parameters), trainer_of(plain, None)
    step(uncompressed, plain, 1.0)
    uncompressed.save_states(tmp_path / "states")
    step(trainer, parameters, 0.45)
    trainer.load_states(tmp_path / "states")
    step(trainer, parameters, 0.25)
    assert values(parameters) == [[0.0], [0.0]]
    assert "kept back" not in caplog.text


def test_residuals_are_of_no_use_to_a_trainer_that_does_not_compress(tmp_path: Path) -> None:
    parameters, plain = zeros(), zeros()
    trainer, uncompressed = trainer_of(parameters), trainer_of(plain, None)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    uncompressed.load_states(tmp_path / "states")
    step(uncompressed, plain, 0.25)
    assert values(plain) == [[-0.25], [-0.25]]


def test_residual_that_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    parameters = zeros()
    trainer = trainer_of(parameters)
    step(trainer, parameters, 0.75)
    trainer.save_states(tmp_path / "states")
    tensors = {"residuals": {"a": torch.zeros(4), "c": torch.zeros(1)}}
    replaced(tmp_path / "states", tensors=tensors, extra={"residuals": {"rank": 1}})
    with pytest.raises(
        StateMismatchError,
        match=r"has {'rank': 1}.*residual of 'a' has shape \[4\].*\[3\] here.*residual of 'c'",
    ):
        trainer.load_states(tmp_path / "states")
    step(trainer, parameters, 0.25)
    assert values(parameters) == [[-1.0], [-1.0]]
