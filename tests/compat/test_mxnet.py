"""Every one of Gluon's optimizers and schedulers against live MXNet, 2.0.0b1 and 1.9.1, on random runs."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.optimizer import gluon, layerwise
from kvtrainer import Trainer
from tests.compat.conftest import Ask
from tests.compat.random_cases import OWN, OWN_OF_1, STEPS, random_case, random_rows
from tests.support.compat_table import ROWS

pytestmark = pytest.mark.compat

RUNS = 30
OWNS = {"mxnet2": OWN, "mxnet1": OWN_OF_1}
OF_WEIGHT = 2e-5
"""Largest difference after any step, relative to the largest weight of the key."""
OF_CHANGE = 1e-4
"""Largest difference at the end, relative to how far a weight of the key has moved: small steps show, too."""


Run = tuple[dict[str, Any], list[Any]]
"""A case, and where it went in MXNet."""


def our_trajectory(case: dict[str, Any], release: str) -> list[list[np.ndarray]]:
    keys = case["keys"]
    options = {"learning_rate": case["steps"][0]["lr"], "compat": release, **case["options"]}
    dtype = getattr(torch, case["dtype"])
    weights = [torch.nn.Parameter(torch.tensor(key["weight"]).view(key["shape"]).to(dtype)) for key in keys]
    groups = [
        {"params": [p], "param_names": [key["name"]], "weight_decay": options.get("wd", 0.0) * key["wd_mult"]}
        for p, key in zip(weights, keys, strict=True)
    ]
    trainer = Trainer(groups, case["name"], options, kvstore=None)
    after = []
    for step in case["steps"]:
        for group, p, key, grad in zip(trainer.param_groups, weights, keys, step["grads"], strict=True):
            group["lr"] = step["lr"] * key["lr_mult"]
            p.grad = gradient(grad, p, step.get("rows"))
        trainer.step(1 / step["rescale"])
        after.append([p.detach().double().reshape(-1).numpy().copy() for p in weights])
    return after


def gradient(values: list[float], weight: Tensor, rows: list[int] | None) -> Tensor:
    grad = torch.tensor(values).to(weight.dtype)
    if rows is None:
        return grad.view(weight.shape)
    return torch.sparse_coo_tensor([rows], grad.view(len(rows), *weight.shape[1:]), weight.shape)


def our_store_trajectory(case: dict[str, Any]) -> list[list[np.ndarray]]:
    """A store that is told the parameters' names, as MXNet 1.9.1's Module tells them."""
    names = {i: key["name"] for i, key in enumerate(case["keys"])}
    keys = [str(i) for i in names]
    optimizer = kvtrainer.optimizer.create(
        case["name"], compat="mxnet1", param_idx2name=names, **case["options"]
    )
    kv = kvtrainer.kv.create("local")
    kv.init(keys, [torch.tensor(key["weight"]).view(key["shape"]) for key in case["keys"]])
    kv.set_optimizer(optimizer)
    pulled = [torch.empty(key["shape"]) for key in case["keys"]]
    after = []
    for step in case["steps"]:
        optimizer.set_learning_rate(step["lr"])
        optimizer.rescale_grad = step["rescale"]
        kv.push(keys, [torch.tensor(grad).view_as(w) for grad, w in zip(step["grads"], pulled, strict=True)])
        kv.pull(keys, out=pulled)
        after.append([weight.double().reshape(-1).numpy().copy() for weight in pulled])
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
def runs(ask_mxnet: Ask) -> Callable[[str], dict[str, list[Run]]]:
    """By name of a release's optimizers, the random runs and where they went in MXNet."""

    @functools.cache
    def of(release: str) -> dict[str, list[Run]]:
        own = OWNS[release]
        cases = [random_case(name, seed, own) for name in own for seed in range(RUNS)]
        if release == "mxnet1":
            for case in cases:
                # As its Trainer does it, which tells no names.
                case["knows_names"] = False
        answers = iter(ask_mxnet(release, {"optimizers": cases})["optimizers"])
        return {name: [(case, next(answers)) for case in cases if case["name"] == name] for name in own}

    return of


@pytest.mark.parametrize(
    ("release", "name"), [(release, name) for release, own in OWNS.items() for name in own]
)
def test_random_runs_go_where_mxnet_goes(
    release: str, name: str, runs: Callable[[str], dict[str, list[Run]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # SGLD's noise differs, of course; with one standard deviation everywhere there is something to compare.
    monkeypatch.setattr(gluon, "gluon_normal", one_deviation)
    its = runs(release)[name]
    assert len(its) == RUNS
    for case, expected in its:
        assert_same(our_trajectory(case, release), expected, case)


@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "adagrad", "rmsprop", "lars"])
def test_a_store_that_knows_names_decays_what_mxnet_1_decays(name: str, ask_mxnet: Ask) -> None:
    cases = [random_case(name, seed, OWN_OF_1) for seed in range(RUNS)]
    for case in cases:
        case["has_multipliers"] = False
        case["options"]["wd"] = 0.1
        for key, its in zip(case["keys"], ("body_weight", "head_bias", "norm_gamma"), strict=True):
            key["name"] = its
    expected = ask_mxnet("mxnet1", {"optimizers": cases})["optimizers"]
    for case, theirs in zip(cases, expected, strict=True):
        assert_same(our_store_trajectory(case), theirs, case)


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "groupadagrad"])
def test_rows_go_where_mxnet_1_sends_them_by_its_own_defaults(name: str, ask_mxnet: Ask) -> None:
    cases = [random_rows(name, seed, OWN_OF_1) for seed in range(RUNS)]
    for case in cases:
        case["knows_names"] = False
        if name == "adagrad":
            case["options"]["wd"] = 0.0  # its kernel for rows takes no other
    expected = ask_mxnet("mxnet1", {"optimizers": cases})["optimizers"]
    for case, theirs in zip(cases, expected, strict=True):
        assert_same(our_trajectory(case, "mxnet1"), theirs, case)


@pytest.mark.parametrize("name", OWN_OF_1)
def test_half_precision_weights_follow_their_float32_copy_as_in_mxnet_1(
    name: str, ask_mxnet: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon, "gluon_normal", one_deviation)
    cases = [random_case(name, seed, OWN_OF_1) for seed in range(RUNS)]
    for case in cases:
        case.update(knows_names=False, dtype="float16")
        case["options"]["multi_precision"] = True
        for key in case["keys"]:
            key["weight"] = np.array(key["weight"]).astype(np.float16).astype(float).tolist()
    expected = ask_mxnet("mxnet1", {"optimizers": cases})["optimizers"]
    for case, theirs in zip(cases, expected, strict=True):
        for mine, other in zip(our_trajectory(case, "mxnet1"), theirs, strict=True):
            for ours, its in zip(mine, other, strict=True):
                # The copies differ in their last bits, so that a rounding may go the other way.
                np.testing.assert_allclose(ours, its, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("release", OWNS)
def test_the_numbers_of_the_page_are_mxnets(release: str, ask_mxnet: Ask) -> None:
    cases = []
    for row in ROWS:
        options = dict(row.options)
        if release == "mxnet1" and row.name in ("adagrad", "groupadagrad") and "epsilon" in options:
            options["eps"] = options.pop("epsilon")
        key = {"name": "w_weight", "shape": [1, 1], "weight": [1.0]}
        rate = options.pop("learning_rate", None)
        step = {"lr": rate, "rescale": 1.0, "grads": [[row.gradient]]}
        own = {"name": row.name, "options": options, "keys": [key], "steps": [step, step]}
        cases.append({**own, "dtype": "float32", "knows_names": False, "has_multipliers": False})
    for row, after in zip(ROWS, ask_mxnet(release, {"optimizers": cases})["optimizers"], strict=True):
        expected = row.of_1 if release == "mxnet1" else row.of_2
        assert after[-1][0][0] == pytest.approx(expected, abs=1e-5), row


def test_every_optimizer_of_gluon_is_compared() -> None:
    family = (*gluon.FAMILY, *layerwise.FAMILY)
    assert set(OWN) == {cls.name for cls in family}
    assert set(OWN_OF_1) == {cls.name for cls in family if cls.mxnet1 is not None}


NAMES = ["FactorScheduler", "MultiFactorScheduler", "PolyScheduler", "CosineScheduler"]
UPDATES = list(range(60))


def random_arguments(name: str, draw: random.Random) -> dict[str, Any]:
    warmup = draw.choice([0, draw.randint(1, 12)])
    arguments: dict[str, Any] = {
        "base_lr": draw.uniform(0.5, 2),
        "warmup_steps": warmup,
        "warmup_begin_lr": draw.choice([0, draw.uniform(0, 0.5)]),
        "warmup_mode": draw.choice(["linear", "constant"]),
    }
    if name == "FactorScheduler":
        stop = draw.choice([1e-8, draw.uniform(0, 0.4)])
        return {
            **arguments,
            "step": draw.randint(1, 12),
            "factor": draw.uniform(0, 1),
            "stop_factor_lr": stop,
        }
    if name == "MultiFactorScheduler":
        steps = sorted(draw.sample(range(1, 50), draw.randint(1, 8)))
        return {**arguments, "step": steps, "factor": draw.uniform(0, 1)}
    arguments |= {"max_update": warmup + draw.randint(1, 50), "final_lr": draw.uniform(0, 0.5)}
    return {**arguments, "pwr": draw.choice([1, 2, 3])} if name == "PolyScheduler" else arguments


@pytest.mark.parametrize("release", OWNS)
@pytest.mark.parametrize("name", NAMES)
def test_random_schedules_are_those_of_mxnet(name: str, release: str, ask_mxnet: Ask) -> None:
    draw = random.Random(name)
    cases: list[dict[str, Any]] = [
        {"name": name, "arguments": random_arguments(name, draw), "updates": UPDATES} for _ in range(40)
    ]
    theirs = ask_mxnet(release, {"schedulers": cases})["schedulers"]
    for case, expected in zip(cases, theirs, strict=True):
        ours = getattr(kvtrainer.lr_scheduler, name)(**case["arguments"])
        assert [ours(n) for n in UPDATES] == expected, case
