"""Every one of Gluon's optimizers against live MXNet, on random runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer.optimizer
from kvstore_server.optimizer import Optimizer, State, apply_update, gluon, layerwise
from kvstore_server.plan import TensorSpec, make_plan
from tests.compat.conftest import Ask
from tests.compat.random_cases import OWN, STEPS, random_case
from tests.support.optimizer_slices import empty, update_slice

pytestmark = pytest.mark.compat

RUNS = 30
OF_WEIGHT = 2e-5
"""Largest difference after any step, relative to the largest weight of the key."""
OF_CHANGE = 1e-4
"""Largest difference at the end, relative to how far a weight of the key has moved: small steps show, too."""


class Model:
    """The keys of a run and their optimizer's state: slices for elementwise optimizers, else whole keys."""

    def __init__(self, optimizer: Optimizer, keys: list[dict[str, Any]]) -> None:
        self.optimizer, self.keys = optimizer, keys
        self.names = [key["name"] for key in keys]
        self.plan = make_plan([TensorSpec(key["name"], tuple(key["shape"]), "float32") for key in keys], 1)
        self.slices = [torch.zeros(piece.length) for piece in self.plan.slices]
        self.slice_states = [empty(piece) for piece in self.plan.slices]
        self.key_states = [State() for _ in keys]
        self.scatter([key["weight"] for key in keys], self.slices)

    def scatter(self, values: list[list[float]], slices: list[Tensor]) -> None:
        for piece, flat in zip(self.plan.slices, slices, strict=True):
            for s in piece.segments:
                part = values[s.key][s.key_start : s.key_start + s.numel]
                flat[s.start : s.start + s.numel] = torch.tensor(part)

    def weights(self) -> list[Tensor]:
        """Views of the keys in their shapes; no key of a run is longer than a slice."""
        found: dict[int, Tensor] = {}
        for piece, flat in zip(self.plan.slices, self.slices, strict=True):
            for s in piece.segments:
                found[s.key] = flat[s.start : s.start + s.numel].view(tuple(self.keys[s.key]["shape"]))
        return [found[i] for i in range(len(self.keys))]

    def step(self, lr: float, rescale: float, grads: list[list[float]]) -> None:
        self.optimizer.set_learning_rate(lr)
        hypers = [
            {
                **self.optimizer.hyper,
                "lr": lr * key["lr_mult"],
                "weight_decay": self.optimizer.hyper["weight_decay"] * key["wd_mult"],
            }
            for key in self.keys
        ]
        if self.optimizer.elementwise:
            self.update_slices(hypers, rescale, grads)
        else:
            self.update_keys(hypers, rescale, grads)

    def update_slices(self, hypers: list[dict[str, Any]], rescale: float, grads: list[list[float]]) -> None:
        changes = [torch.zeros_like(flat) for flat in self.slices]
        self.scatter(grads, changes)
        for i, piece in enumerate(self.plan.slices):
            here = [hypers[s.key] for s in piece.segments]
            names = [self.names[s.key] for s in piece.segments]
            change, state = changes[i].mul_(rescale), self.slice_states[i]
            update_slice(self.optimizer, piece, self.slices[i], change, state, here, names=names)

    def update_keys(self, hypers: list[dict[str, Any]], rescale: float, grads: list[list[float]]) -> None:
        for i, weight in enumerate(self.weights()):
            change = torch.tensor(grads[i]).view(weight.shape) * rescale
            hyper = {**hypers[i], "key": self.names[i]}
            apply_update(self.optimizer, weight, change, self.key_states[i], hyper)


def our_trajectory(case: dict[str, Any]) -> list[list[np.ndarray]]:
    optimizer = kvtrainer.optimizer.create(
        case["name"], learning_rate=case["steps"][0]["lr"], **case["options"]
    )
    model = Model(optimizer, case["keys"])
    after = []
    for step in case["steps"]:
        model.step(**step)
        after.append([weight.reshape(-1).numpy().copy() for weight in model.weights()])
    return after


def assert_same(ours: list[list[np.ndarray]], theirs: list[list[list[float]]], case: dict[str, Any]) -> None:
    assert len(ours) == len(theirs) == STEPS
    for step, (after, expected) in enumerate(zip(ours, theirs, strict=True)):
        for mine, other, key in zip(after, map(np.array, expected), case["keys"], strict=True):
            error, moved = np.abs(mine - other).max(), np.abs(other - key["weight"]).max()
            # Written so that nan fails.
            assert error <= OF_WEIGHT * np.abs(other).max(), (step, key["name"], case["options"])
            assert step < STEPS - 1 or error <= OF_CHANGE * moved, (moved, key["name"], case["options"])


def one_deviation(stream: object, first: int, count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float64, device=device)


@pytest.fixture(scope="module")
def runs(ask_mxnet: Ask) -> dict[str, list[tuple[dict[str, Any], list[Any]]]]:
    """By name of the optimizer, the random runs and where they went in MXNet."""
    cases = [random_case(name, seed) for name in OWN for seed in range(RUNS)]
    answers = iter(ask_mxnet({"optimizers": cases})["optimizers"])
    return {name: [(case, next(answers)) for case in cases if case["name"] == name] for name in OWN}


@pytest.mark.parametrize("name", OWN)
def test_random_runs_go_where_mxnet_goes(
    name: str, runs: dict[str, list[tuple[dict[str, Any], list[Any]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLD's noise differs, of course; with one standard deviation everywhere there is something to compare.
    monkeypatch.setattr(gluon, "normal", one_deviation)
    assert len(runs[name]) == RUNS
    for case, expected in runs[name]:
        assert_same(our_trajectory(case), expected, case)


def test_every_optimizer_of_gluon_is_compared() -> None:
    gluons = {cls.name for cls in (*gluon.FAMILY, *layerwise.FAMILY)}
    assert set(OWN) == gluons
