"""Optimizers of tables without a number of rows: their formulas by hand, and tables that have one of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvstore_server.optimizer import registry
from kvtrainer.errors import ConfigurationError, StateMismatchError, UnknownNameError

Row = list[float]
Step = Callable[[Row, Row, dict[str, Any]], Row]
WIDTH, LR = 3, 0.1


def sgd(w: Row, g: Row, s: dict[str, Any]) -> Row:
    return [a - LR * b for a, b in zip(w, g, strict=True)]


def decayed_sgd(w: Row, g: Row, s: dict[str, Any]) -> Row:
    return [a - LR * (b + 0.2 * a) for a, b in zip(w, g, strict=True)]


def momentum(w: Row, g: Row, s: dict[str, Any]) -> Row:
    s["m"] = [0.9 * m - LR * b for m, b in zip(s.get("m", [0.0] * WIDTH), g, strict=True)]
    return [a + m for a, m in zip(w, s["m"], strict=True)]


def adagrad(w: Row, g: Row, s: dict[str, Any]) -> Row:
    s["h"] = [h + b * b for h, b in zip(s.get("h", [0.0] * WIDTH), g, strict=True)]
    return [a - LR * b / (math.sqrt(h) + 1e-3) for a, b, h in zip(w, g, s["h"], strict=True)]


def rowwise_adagrad(w: Row, g: Row, s: dict[str, Any]) -> Row:
    s["h"] = s.get("h", 0.0) + sum(b * b for b in g) / WIDTH
    return [a - LR * b / (math.sqrt(s["h"]) + 1e-3) for a, b in zip(w, g, strict=True)]


def adam_by_count(w: Row, g: Row, s: dict[str, Any], count: int) -> Row:
    g = [b + s.get("wd", 0.0) * a for a, b in zip(w, g, strict=True)]
    s["m"] = [0.9 * m + 0.1 * b for m, b in zip(s.get("m", [0.0] * WIDTH), g, strict=True)]
    s["v"] = [0.99 * v + 0.01 * b * b for v, b in zip(s.get("v", [0.0] * WIDTH), g, strict=True)]
    rate = LR * math.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    return [a - rate * m / (math.sqrt(v) + 1e-3) for a, m, v in zip(w, s["m"], s["v"], strict=True)]


def rowadam(w: Row, g: Row, s: dict[str, Any]) -> Row:
    s["t"], s["wd"] = s.get("t", 0) + 1, 0.2
    return adam_by_count(w, g, s, s["t"])


def lazy_adam(w: Row, g: Row, s: dict[str, Any]) -> Row:
    return adam_by_count(w, g, s, s["step"])


def ftrl(w: Row, g: Row, s: dict[str, Any]) -> Row:
    """McMahan et al., 2013, algorithm 1, with one learning rate for each element."""
    s.setdefault("z", [0.0] * WIDTH)
    s.setdefault("n", [0.0] * WIDTH)
    found = []
    for at, (a, b) in enumerate(zip(w, g, strict=True)):
        before, after = s["n"][at], s["n"][at] + b * b
        s["z"][at] += b - (math.sqrt(after) - math.sqrt(before)) / LR * a
        s["n"][at], z = after, s["z"][at]
        sign = math.copysign(1.0, z)
        found.append(0.0 if abs(z) <= 0.1 else -(z - sign * 0.1) / ((1.0 + math.sqrt(after)) / LR))
    return found


CASES: dict[str, tuple[str, dict[str, Any], Step]] = {
    "sgd": ("sgd", {}, sgd),
    "sgd with decay of the rows present": ("sgd", {"wd": 0.2, "lazy_update": True}, decayed_sgd),
    "momentum": ("sgd", {"momentum": 0.9, "lazy_update": True}, momentum),
    "adagrad": ("adagrad", {"epsilon": 1e-3}, adagrad),
    "rowwise adagrad": ("rowwise_adagrad", {"epsilon": 1e-3}, rowwise_adagrad),
    "groupadagrad": ("groupadagrad", {"epsilon": 1e-3}, rowwise_adagrad),
    "rowadam": ("rowadam", {"beta2": 0.99, "epsilon": 1e-3, "wd": 0.2}, rowadam),
    "lazy adam": ("adam", {"beta2": 0.99, "epsilon": 1e-3, "lazy_update": True}, lazy_adam),
    "ftrl": ("ftrl", {"lamda1": 0.1, "beta": 1.0}, ftrl),
}


def trained_by_hand(step: Step, initial: dict[int, Row], batches: list[tuple[list[int], Tensor]]) -> Tensor:
    rows, states = dict(initial), {id_: dict[str, Any]() for id_ in initial}
    for number, (ids, grads) in enumerate(batches):
        sums: dict[int, Row] = {}
        for id_, grad in zip(ids, grads.tolist(), strict=True):
            sums[id_] = [a + b for a, b in zip(sums.get(id_, [0.0] * WIDTH), grad, strict=True)]
        for id_, grad in sums.items():
            states[id_]["step"] = number + 1
            rows[id_] = step(rows[id_], grad, states[id_])
    return torch.tensor(list(rows.values()), dtype=torch.float64)


def train(
    trainer: kvtrainer.Trainer, table: kvtrainer.Embedding, batches: list[tuple[list[int], Tensor]]
) -> None:
    for ids, grads in batches:
        table(torch.tensor(ids)).backward(grads)
        trainer.step(1)
        table.weight.grad = None


def drawn_batches(count: int) -> list[tuple[list[int], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, 9, (4 + step,), generator=generator).tolist(),
            torch.randn(4 + step, WIDTH, generator=generator, dtype=torch.float64),
        )
        for step in range(count)
    ]


@pytest.mark.parametrize("is_own", [False, True], ids=["of the trainer", "of the table"])
@pytest.mark.parametrize("label", CASES)
def test_rows_are_updated_as_in_a_loop_over_dictionaries(label: str, is_own: bool) -> None:
    name, options, formula = CASES[label]
    options = {"learning_rate": LR, **options}
    own = {"optimizer": name, "optimizer_params": options} if is_own else {}
    table = kvtrainer.Embedding(WIDTH, dtype=torch.float64, **own)
    of_trainer = ("lamb", {}) if is_own else (name, options)
    with kvtrainer.Trainer({"table": table}, *of_trainer, kvstore="local") as trainer:
        ids, batches = list(range(10)), drawn_batches(7)
        initial = dict(zip(ids, table(torch.tensor(ids)).tolist(), strict=True))
        train(trainer, table, batches)
        expected = trained_by_hand(formula, initial, batches)
        assert torch.allclose(table(torch.tensor(ids)), expected, rtol=1e-12, atol=1e-13)


def test_a_table_of_its_own_optimizer_leaves_the_others_to_the_trainers() -> None:
    torch.manual_seed(0)
    dense, alone = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
    alone.load_state_dict(dense.state_dict())
    table = kvtrainer.Embedding(WIDTH, optimizer="rowwise_adagrad", optimizer_params={"lr": LR})
    plain = torch.optim.Adam(alone.parameters(), lr=0.01)
    with kvtrainer.Trainer(
        [("table", table), *dense.named_parameters()], "torch:Adam", {"lr": 0.01}, kvstore="local"
    ) as trainer:
        assert trainer.param_groups[0]["param_names"] == ["table.weight", "weight", "bias"]
        for step in range(5):
            ids = torch.arange(step, step + 4)
            rows = table(ids)
            for net in (dense, alone):
                net.zero_grad()
                net(rows.detach()).square().sum().backward()
            dense(rows).square().sum().backward()
            for parameter in dense.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2
            trainer.step(1)
            plain.step()
            table.weight.grad = None
        for ours, theirs in zip(dense.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("has_rate", [False, True])
def test_a_table_has_the_learning_rate_of_its_group_unless_it_has_one_of_its_own(has_rate: bool) -> None:
    params = {"learning_rate": 0.5} if has_rate else {}
    table = kvtrainer.Embedding(WIDTH, optimizer="sgd", optimizer_params=params)
    other = nn.Parameter(torch.zeros(1))
    groups = [{"params": [("other", other)]}, {"params": [("table", table)], "lr": 2.0}]
    with kvtrainer.Trainer(groups, "adam", {"learning_rate": 1.0, "wd": 0.1}, kvstore="local") as trainer:
        ids = torch.tensor([3])
        before = table(ids)
        before.sum().backward()
        trainer.step(1, ignore_stale_grad=True)
        after = table(ids)
        assert torch.allclose(before - after, torch.full((1, WIDTH), 0.5 if has_rate else 2.0))
        trainer.set_learning_rate(3.0)
        table.weight.grad = None
        after.sum().backward()
        trainer.step(1, ignore_stale_grad=True)
        assert torch.allclose(after - table(ids), torch.full((1, WIDTH), 0.5 if has_rate else 3.0))


def test_multipliers_of_the_parameter_apply_to_its_own_optimizer() -> None:
    table = kvtrainer.Embedding(
        WIDTH, optimizer="rowadam", optimizer_params={"learning_rate": 0.5, "wd": 1.0}
    )
    twin = kvtrainer.Embedding(WIDTH, optimizer="rowadam", optimizer_params={"learning_rate": 1.0, "wd": 0.5})
    rows = []
    for one, factors in ((table, (2.0, 0.5)), (twin, (1.0, 1.0))):
        one.weight.lr_mult, one.weight.wd_mult = factors
        with kvtrainer.Trainer({"t": one}, "sgd", {"learning_rate": 1.0}, kvstore="local") as trainer:
            train(trainer, one, [(ids, grads.float()) for ids, grads in drawn_batches(3)])
            rows.append(one(torch.arange(9)))
    assert torch.equal(*rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_at_most_the_largest_norm_as_in_torch(dtype: torch.dtype) -> None:
    table = kvtrainer.Embedding(WIDTH, max_norm=1.0, scale=2.0, dtype=dtype)
    ids = torch.arange(20)
    with kvtrainer.Trainer({"t": table}, "sgd", {"learning_rate": 0.5}, kvstore="local") as trainer:
        found = table(ids).detach()
        theirs = nn.Embedding.from_pretrained(found.clone(), freeze=False, max_norm=1.0, sparse=True).to(
            dtype
        )
        plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
        for step in range(4):
            grads = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            some = ids[step : step + 10]
            theirs(some).backward(grads)
            plain.step()
            plain.zero_grad()
            table(some).backward(grads)
            trainer.step(1)
            table.weight.grad = None
        ours, expected = table(ids).detach().float(), theirs(ids).detach().float()
        slack = 1e-5 if dtype is torch.float32 else 0.05
        assert float(ours.norm(dim=1).max()) <= 1 + slack
        assert float(ours.norm(dim=1).min()) < 0.9
        assert torch.allclose(ours, expected, atol=slack)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowadam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_is_that_of_a_dense_parameter(optimizer: str, dtype: torch.dtype) -> None:
    # What these optimizers add to a row does not depend on the row, so a table without decay tells it.
    multi = {"multi_precision": True} if dtype is torch.bfloat16 else {}
    decayed = kvtrainer.Embedding(WIDTH, weight_decay=0.05, dtype=dtype)
    plain = kvtrainer.Embedding(WIDTH, init="constant", scale=0.0, dtype=torch.float64)
    ids, generator = torch.arange(12), torch.Generator().manual_seed(0)
    rates = [0.5, *torch.rand(60, generator=generator).tolist()]
    batches = [ids, *[torch.randperm(12, generator=generator)[:4] for _ in rates[1:]]]
    with (
        kvtrainer.Trainer({"t": decayed}, optimizer, {"learning_rate": 0.5, **multi}, kvstore="local") as one,
        kvtrainer.Trainer({"t": plain}, optimizer, {"learning_rate": 0.5}, kvstore="local") as other,
    ):
        expected, before = decayed(ids).detach().double(), plain(ids).detach()
        for some, rate in zip(batches, rates, strict=True):
            grads = torch.randn(len(some), WIDTH, generator=generator).to(dtype)
            for table, trainer in ((decayed, one), (plain, other)):
                trainer.set_learning_rate(rate)
                table(some).backward(grads.to(table.weight.dtype))
                trainer.step(1)
                table.weight.grad = None
            after = plain(ids).detach()
            expected, before = expected * (1 - rate * 0.05) + (after - before), after
        found = decayed(ids).detach().double()
    slack = 1e-6 if dtype is torch.float32 else 2**-8  # half precision is read rounded
    assert torch.allclose(found, expected, rtol=slack, atol=slack)
    assert not torch.allclose(found, before, rtol=0.1)


MOMENTUM = 0.9


def moved_beside_a_dense_loop(decay: float, rates: list[float], dtype: torch.dtype, path: Path) -> float:
    """The largest difference, relative to the largest weight, between rows that are moved when they are read, and
    a loop over all rows in float64.
    """
    multi = {"multi_precision": True} if dtype is torch.bfloat16 else {}
    table = kvtrainer.Embedding(WIDTH, weight_decay=decay, dtype=dtype)
    ids, generator = torch.arange(12), torch.Generator().manual_seed(0)
    # Rows 10 and 11 have a gradient in the first round alone.
    batches = [ids, *[torch.randperm(10, generator=generator)[:4] for _ in rates[1:]]]
    options, worst = {"learning_rate": 0.5, "momentum": MOMENTUM, **multi}, 0.0
    with kvtrainer.Trainer({"t": table}, "sgd", options, kvstore="local") as trainer:
        weights = table(ids).detach().double()
        momentum = torch.zeros_like(weights)
        for some, rate in zip(batches, rates, strict=True):
            grads = torch.zeros_like(weights)
            grads[some] = torch.randn(len(some), WIDTH, generator=generator).to(dtype).double()
            trainer.set_learning_rate(rate)
            table(some).backward(grads[some].to(dtype))
            trainer.step(1)
            table.weight.grad = None
            momentum = MOMENTUM * momentum - rate * grads
            weights = weights * (1 - rate * decay) + momentum
            found = table(ids).detach().double()
            worst = max(worst, float((found - weights).abs().max() / weights.abs().max()))
        table.export(path)
        assert torch.equal(kvtrainer.lookup(path, ids), table(ids).detach())
    return worst


CONSTANT = [0.5] * 80
RANDOM = torch.rand(80, generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize(
    ("decay", "rates", "dtype", "slack"),
    [
        (0.0, RANDOM, torch.float64, 1e-12),
        (0.05, CONSTANT, torch.float64, 1e-12),
        (0.05, CONSTANT, torch.float32, 1e-6),
        (0.05, CONSTANT, torch.bfloat16, 2**-7),  # weights are rounded, and what is read
        # The part of the momentum follows from the mean learning rate of the rounds without gradient.
        (1e-3, RANDOM, torch.float64, 1e-3),
    ],
)
def test_momentum_moves_rows_without_gradient_as_in_a_dense_loop(
    decay: float, rates: list[float], dtype: torch.dtype, slack: float, tmp_path: Path
) -> None:
    assert moved_beside_a_dense_loop(decay, rates, dtype, tmp_path / "rows") < slack


@pytest.mark.parametrize("rate", [2.0, -0.1])
def test_a_learning_rate_that_does_not_fit_the_weight_decay_is_refused(rate: float) -> None:
    table = kvtrainer.Embedding(WIDTH, weight_decay=0.5)
    with kvtrainer.Trainer({"t": table}, "sgd", {"learning_rate": rate}, kvstore="local") as trainer:
        before = table([1])
        before.sum().backward()
        with pytest.raises(ConfigurationError):
            trainer.step(1)
        assert torch.equal(table([1]), before)


def test_an_optimizer_that_may_raise_is_refused_beside_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(kvtrainer.optimizer.Optimizer):
        def update(self, weight: Tensor, grad: Tensor, state: Any, hyper: Any) -> None:
            weight.sub_(grad)

    monkeypatch.setitem(registry._registry, "picky", Picky)
    table, linear = kvtrainer.Embedding(WIDTH, optimizer="sgd"), nn.Linear(WIDTH, 1)
    with kvtrainer.Trainer({"t": table, "l": linear}, Picky(), kvstore="local") as trainer:
        before = table([1])
        linear(before).sum().backward()
        with pytest.raises(ConfigurationError):
            trainer.step(1)
        assert torch.equal(table([1]), before)


def test_states_of_another_optimizer_are_refused(tmp_path: Any) -> None:
    def make(optimizer: str) -> tuple[kvtrainer.Embedding, kvtrainer.Trainer]:
        table = kvtrainer.Embedding(WIDTH, optimizer=optimizer)
        return table, kvtrainer.Trainer({"t": table}, "sgd", {"learning_rate": 1.0}, kvstore="local")

    table, trainer = make("adagrad")
    with trainer:
        train(trainer, table, [(ids, grads.float()) for ids, grads in drawn_batches(3)])
        trainer.save_states(tmp_path / "states")
    for other in ("rowwise_adagrad", "rowadam", "sgd"):
        table, trainer = make(other)
        with trainer:
            before = table(torch.arange(9))
            with pytest.raises(StateMismatchError):
                trainer.load_states(tmp_path / "states")
            assert torch.equal(table(torch.arange(9)), before)


SAVED: dict[str, Any] = {
    "init": "uniform", "scale": 0.5, "seed": 3, "admit_after": 2, "expire_after": 9, "max_rows": 1000, "evict": "lru",
    "weight_decay": 0.01, "max_norm": 2.0, "optimizer": "sgd",
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"init": "normal"},
        {"scale": 0.25},
        {"seed": 4},
        {"admit_after": 1},
        {"evict": "lfu"},
        {"max_norm": None},
        {"max_norm": 1.0},
        {"optimizer": "adagrad"},
    ],
)
def test_states_of_a_table_with_another_option_name_it_and_both_values(
    change: dict[str, Any], tmp_path: Any
) -> None:
    load_into({}, tmp_path)
    [(option, value)] = change.items()
    with pytest.raises(StateMismatchError) as caught:
        load_into(change, tmp_path)
    values = (0.0 if one is None and option == "max_norm" else one for one in (SAVED[option], value))
    for text in ("'t.weight'", *[f"{option}={one!r}" for one in values]):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"expire_after": 0},
        {"max_rows": 2000},
        {"max_rows": 0, "evict": None},
        {"weight_decay": 0.02},
        {"optimizer_params": {"learning_rate": 0.5}},
        {"optimizer": None},  # the Trainer's, which is sgd, too
    ],
)
def test_an_option_that_saved_rows_do_not_follow_from_may_change(
    change: dict[str, Any], tmp_path: Any
) -> None:
    assert load_into(change, tmp_path) > 0


def load_into(change: dict[str, Any], folder: Any) -> int:
    """Save a table, load it into another one, which stays as it was if that fails, and return how many rows it has."""
    for options in (SAVED, {**SAVED, **change}):
        table = kvtrainer.Embedding(WIDTH, **options)
        with kvtrainer.Trainer({"t": table}, "sgd", {"learning_rate": 1.0}, kvstore="local") as trainer:
            if options is SAVED:
                train(trainer, table, [(ids, grads.float()) for ids, grads in drawn_batches(3)])
                trainer.save_states(folder / "states")
                continue
            before = table(torch.arange(9))
            try:
                trainer.load_states(folder / "states")
            except StateMismatchError:
                assert torch.equal(table(torch.arange(9)), before)
                raise
            return int(table.stats()["rows"])
    raise AssertionError


def test_an_optimizer_that_is_not_known_names_the_similar_one() -> None:
    with pytest.raises(UnknownNameError, match="rowwise_adagrad"):
        kvtrainer.Embedding(WIDTH, optimizer="rowwise_adagard")
