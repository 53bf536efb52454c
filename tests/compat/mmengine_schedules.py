"""Random schedules of mmengine, by its classes and by ours, in mmengine's own environment."""

from __future__ import annotations

import copy
import random
from typing import Any

import mmengine.optim  # noqa: F401  # fills the registry
import torch
from mmengine.registry import PARAM_SCHEDULERS

from kvtrainer.schedules import bind_schedules

KINDS = (
    "Constant", "Linear", "Exponential", "Step", "MultiStep", "CosineAnnealing", "Poly", "CosineRestart", "OneCycle",
)  # fmt: skip
FACTORS = KINDS[:5]
"""Of these any may overlap."""
KEYS = {"LR": "lr", "Momentum": "momentum", "ParamScheduler": "weight_decay"}


def random_options(r: random.Random, kind: str) -> dict[str, Any]:
    if kind in ("Constant", "Linear"):
        names = {"Constant": ("factor",), "Linear": ("start_factor", "end_factor")}[kind]
        return {name: r.choice((0.1, 0.5, 1.0)) for name in names}
    if kind in FACTORS:
        every = {
            "Step": {"step_size": r.randint(1, 4)},
            "MultiStep": {"milestones": r.choices(range(9), k=3)},
        }
        return {"gamma": r.choice((0.5, 0.9)), **every.get(kind, {})}
    if kind == "OneCycle":
        peak, start = r.choice((1.0, [0.8, 0.4])), r.choice((0.3, 0.45))
        return {"eta_max": peak, "pct_start": start, "three_phase": r.random() < 0.3}
    low = r.choice(({"eta_min": 0.0}, {"eta_min": 0.003}, {"eta_min_ratio": 0.05}))
    if kind == "CosineAnnealing":
        return {**low, **r.choice(({}, {"T_max": r.randint(1, 6)}))}
    if kind == "Poly":
        return {"eta_min": r.choice((0.0, 0.003)), "power": r.choice((0.9, 2.0))}
    count = r.randint(1, 3)
    return {
        **low,
        "periods": [r.randint(1, 5) for _ in range(count)],
        "restart_weights": r.choices((1, 0.5), k=count),
    }


def random_schedules(r: random.Random, ending: str, epochs: int, length: int) -> list[dict[str, Any]]:
    """One in any window, several one after another, or factors that overlap."""
    way = r.choice(("one", "windows", "factors"))
    cuts = sorted(r.sample(range(2, epochs - 1, 2), 2))
    windows = [(0, cuts[0]), (cuts[0], cuts[1]), (cuts[1], epochs)]
    found = []
    for at in range(1 if way == "one" else 3):
        # A OneCycle of theirs changes what others restart from.
        kind = r.choice(
            FACTORS if way == "factors" else KINDS if way == "one" and ending == "LR" else KINDS[:-1]
        )
        by_epoch = way == "windows" or r.random() < 0.5
        begin, end = windows[at] if way == "windows" else (r.randint(0, 2), r.choice((epochs - 2, epochs)))
        if way == "one" and kind != "OneCycle" and r.random() < 0.3:
            end = 10**9
        one = {
            "type": kind + ending,
            "by_epoch": by_epoch,
            "begin": begin,
            "end": end,
            **random_options(r, kind),
        }
        if way != "windows" and by_epoch and r.random() < 0.5:
            one |= {"convert_to_iter_based": True, "epoch_length": length}
        found.append(one | ({"param_name": KEYS[ending]} if ending == "ParamScheduler" else {}))
    return r.sample(found, len(found)) if way == "windows" else found


def made(is_adam: bool) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.5)]
    if is_adam:
        return torch.optim.Adam(groups, weight_decay=0.02)
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.02)


def values(
    schedules: Any, optimizer: torch.optim.Optimizer, key: str, epochs: int, length: int
) -> list[float]:
    """What the groups have after each step and each epoch."""
    seen: list[float] = []

    def go_on(is_epoch: bool) -> None:
        for one in schedules:
            if getattr(one, "by_epoch", getattr(one, "by", None) == "epoch") == is_epoch:
                one.step()
        has_betas = key == "momentum" and "betas" in optimizer.defaults
        seen.extend(group["betas"][0] if has_betas else group[key] for group in optimizer.param_groups)

    for _ in range(epochs):
        for _ in range(length):
            optimizer.step()
            go_on(is_epoch=False)
        go_on(is_epoch=True)
    return seen


def compare(count: int) -> None:
    """Raise AssertionError with the first configurations whose values differ."""
    for seed in range(count):
        r = random.Random(seed)
        ending, epochs, length = r.choice(list(KEYS)), r.randint(6, 12), r.randint(1, 3)
        cfg, is_adam = random_schedules(r, ending, epochs, length), r.random() < 0.5
        run = (KEYS[ending], epochs, length)
        optimizer = made(is_adam)
        build = [
            PARAM_SCHEDULERS.build(copy.deepcopy(one), default_args={"optimizer": optimizer}) for one in cfg
        ]
        theirs = values(build, optimizer, *run)
        optimizer = made(is_adam)
        ours = values(bind_schedules(cfg, optimizer), optimizer, *run)
        wrong = [
            at
            for at, (a, b) in enumerate(zip(ours, theirs, strict=True))
            if abs(a - b) > 1e-12 + 1e-6 * abs(b)
        ]
        assert not wrong, (seed, cfg, run, wrong[0], ours, theirs)
