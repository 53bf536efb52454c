"""Every optimizer follows its oracle while rates, batch sizes and multipliers change, on any store.

That is Gluon's formula in float64, or one of torch's optimizers for each parameter, in the dtype of the run. The bits
do not depend on the number of servers nor on where the update runs, SGLD's noise included. Every worker has gradients,
and divides them by batch sizes, of its own; there are two groups; the problem is the same for all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtrainer
from kvstore_server.optimizer import gluon, layerwise
from kvstore_server.optimizer.torch_family import ELEMENTWISE
from kvstore_server.plan import Slice, TensorSpec, make_plan
from kvtrainer.kvstore import DistKVStore, KVStoreBase
from tests.support.gluon_cases import CASES, MXNET1, Case
from tests.support.gluon_formulas import Numbers, Reference
from tests.support.scalar_training import set_gradients
from tests.support.stores import Servers

STEPS = 7
SHAPES = {
    "sliced_weight": (131, 107),
    "body_weight": (80, 60),
    "tall_weight": (61, 2),
    "norm_gamma": (1, 37),
    "single": (1, 1),
}
"""Matrices all, for GroupAdaGrad; LARS treats the gamma differently, for its name."""
SLOW, SLOWER = ("norm_gamma", "single"), 0.5
"""The keys of the second group, and its learning rate as a part of the first one's."""
WD = 0.05
RESCALE, BOUND = 0.5, 0.4
"""Of gradients; the bound is Gluon's."""

RATES = (0.05, 0.02, 0.1, 0.3, 0.08, 0.01, 0.06)
BATCHES = (4.0, 3.0, 8.0, 1.0, 5.0)
MULTIPLIERS: dict[int, dict[str, dict[str, float]]] = {
    0: {"lr_mult": {"body_weight": 0.5, "norm_gamma": 2.0}, "wd_mult": {"sliced_weight": 3.0}},
    3: {"lr_mult": {"sliced_weight": 1.5}, "wd_mult": {"body_weight": 0.0, "single": 4.0}},
    5: {"lr_mult": {"body_weight": 1.0, "tall_weight": 0.3}, "wd_mult": {"sliced_weight": 0.5}},
}
"""From which step on which key has which multiplier; others have 1."""

CHANGES = frozenset(["learning rate", "batch sizes", "multipliers"])
"""What changes from step to step."""
TORCHS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": WD},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": WD},
    "Adam": {"betas": (0.8, 0.95), "amsgrad": True, "weight_decay": WD},
    "AdamW": {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": WD},
    "Adagrad": {"lr_decay": 0.01, "initial_accumulator_value": 0.1, "weight_decay": WD},
    "Adadelta": {"rho": 0.8, "eps": 1e-5, "weight_decay": WD},
    "Adamax": {"betas": (0.8, 0.95), "weight_decay": WD},
    "NAdam": {"momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": WD},
    "RAdam": {"betas": (0.8, 0.9), "decoupled_weight_decay": True, "weight_decay": WD},
    "RMSprop": {"alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": WD},
    "Rprop": {"etas": (0.6, 1.3), "step_sizes": (1e-5, 0.05)},
    "ASGD": {"lambd": 0.01, "alpha": 0.7, "t0": 3.0, "weight_decay": WD},
}
FORESEEN = {
    **CASES,
    **{f"torch:{name}": Case(f"torch:{name.split()[0]}", own) for name, own in TORCHS.items()},
}
OPTIMIZERS = {**FORESEEN, "sgld": Case("sgld", {"seed": 3})}


def rate(step: int, changes: frozenset[str] = CHANGES) -> float:
    """The learning rate of a step."""
    return RATES[step if "learning rate" in changes else 0]


def batch_size(step: int, rank: int, changes: frozenset[str] = CHANGES) -> float:
    """What a worker passes to a step."""
    return BATCHES[(step + 2 * rank) % len(BATCHES) if "batch sizes" in changes else 0]


def multipliers(step: int, changes: frozenset[str] = CHANGES) -> dict[str, dict[str, float]]:
    """The multipliers that change before a step: by attribute and key."""
    return MULTIPLIERS.get(step, {}) if "multipliers" in changes else {}


def options_of(label: str) -> dict[str, Any]:
    """A case's options for a Trainer."""
    case = OPTIMIZERS[label]
    common = {"learning_rate": rate(0), "rescale_grad": RESCALE, **case.options}
    return common if is_torchs(label) else {"wd": decay_of(case.name), "clip_gradient": BOUND, **common}


def decay_of(name: str) -> float:
    """The weight decay of an optimizer: GroupAdaGrad has none."""
    return 0.0 if name.endswith("groupadagrad") else WD


def is_torchs(label: str) -> bool:
    return label.startswith("torch:")


@functools.cache
def start_weights() -> dict[str, Numbers]:
    """float32 values; rows of very unequal lengths, so that a norm of a part is not that of the whole."""
    return {key: _drawn(shape, index) for index, (key, shape) in enumerate(SHAPES.items())}


@functools.cache
def gradients(step: int, rank: int) -> dict[str, Numbers]:
    """A worker's gradients, float32 values."""
    rows = enumerate(SHAPES.items())
    return {key: _drawn(shape, index, step + 1, rank) for index, (key, shape) in rows}


@functools.cache
def reference(label: str, workers: int, changes: frozenset[str] = CHANGES) -> dict[str, Numbers]:
    """The weights after STEPS steps."""
    case, weights = FORESEEN[label], dict(start_weights())
    options = {"clip_gradient": BOUND, **case.options}
    oracle = TorchReference(case) if is_torchs(label) else Reference(case.name, options)
    for step in range(STEPS):
        for key, (lr, wd) in numbers(step, decay_of(case.name), changes).items():
            gradient = summed_gradient(step, workers, key, changes)
            weights[key] = oracle.update(key, weights[key], gradient, lr, wd)
    return weights


@functools.cache
def sgld_moments(workers: int) -> dict[str, tuple[Numbers, float]]:
    """By key the means of SGLD's weights after STEPS steps, and the variance that its noise gives to each.

    One step is `w = (1 - lr wd / 2) w - lr / 2 g + N(0, lr)`, linear in w.
    """
    moments = {key: (weight, 0.0) for key, weight in start_weights().items()}
    for step in range(STEPS):
        for key, (lr, wd) in numbers(step, WD).items():
            (mean, variance), decay = moments[key], 1 - lr * wd / 2
            gradient = np.clip(summed_gradient(step, workers, key), -BOUND, BOUND)
            moments[key] = (decay * mean - lr / 2 * gradient, decay**2 * variance + lr)
    return moments


def numbers(step: int, wd: float, changes: frozenset[str] = CHANGES) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of every key in a step."""
    factors: dict[str, dict[str, float]] = {"lr_mult": {}, "wd_mult": {}}
    for earlier in range(step + 1):
        for kind, changed in multipliers(earlier, changes).items():
            factors[kind] |= changed
    return {
        key: (
            rate(step, changes) * (SLOWER if key in SLOW else 1.0) * factors["lr_mult"].get(key, 1.0),
            wd * factors["wd_mult"].get(key, 1.0),
        )
        for key in SHAPES
    }


@functools.cache
def summed_gradient(step: int, workers: int, key: str, changes: frozenset[str] = CHANGES) -> Numbers:
    """The rescaled sum over workers of one key."""
    return sum(
        gradients(step, rank)[key] * RESCALE / batch_size(step, rank, changes) for rank in range(workers)
    )


def distance(weights: dict[str, Numbers], expected: dict[str, Numbers]) -> float:
    """The greatest difference in any key, as a part of the key's greatest weight at the start or the end."""
    start = start_weights()
    scales = {key: max(np.abs(start[key]).max(), np.abs(expected[key]).max()) for key in expected}
    return max(float(np.abs(weights[key] - expected[key]).max() / scales[key]) for key in expected)


def _drawn(shape: tuple[int, int], *seed: int) -> Numbers:
    generator = np.random.default_rng(seed)
    values = generator.normal(size=shape) * 2.0 ** generator.integers(-3, 3, size=(shape[0], 1))
    return values.astype(np.float32).astype(np.float64)


class TorchReference:
    """One of torch's optimizers, with an instance, hence a learning rate and weight decay, for each key."""

    def __init__(self, case: Case) -> None:
        self._make = functools.partial(getattr(torch.optim, case.name.removeprefix("torch:")), **case.options)
        self._kernels: dict[str, tuple[Tensor, torch.optim.Optimizer]] = {}

    def update(self, key: str, w: Numbers, g: Numbers, lr: float, wd: float) -> Numbers:
        """The new weights of one key."""
        if key not in self._kernels:
            weight = torch.from_numpy(w).clone().requires_grad_()
            self._kernels[key] = weight, self._make([weight])
        weight, kernel = self._kernels[key]
        weight.grad, [group] = torch.from_numpy(g), kernel.param_groups
        group["lr"] = lr
        if "weight_decay" in group:
            group["weight_decay"] = wd
        kernel.step()
        return weight.detach().numpy().copy()


def play(
    label: str, rank: int, kvstore: str | KVStoreBase | None, in_store: bool | None
) -> dict[str, Tensor]:
    """The weights at the end of one run: of torch's in float64, and else in float32."""
    dtype = torch.float64 if is_torchs(label) else torch.float32
    parameters = {
        key: torch.from_numpy(weight).to(dtype, copy=True).requires_grad_()
        for key, weight in start_weights().items()
    }
    groups = [
        {"params": {key: p for key, p in parameters.items() if key not in SLOW}},
        {"params": {key: parameters[key] for key in SLOW}, "lr": SLOWER * rate(0)},
    ]
    name, options = OPTIMIZERS[label].name, options_of(label)
    with kvtrainer.Trainer(groups, name, options, kvstore=kvstore, update_on_kvstore=in_store) as trainer:
        schedule = torch.optim.lr_scheduler.LambdaLR(trainer, lambda step: rate(step % STEPS) / rate(0))
        for step in range(STEPS):
            for kind, changed in multipliers(step).items():
                for key, value in changed.items():
                    setattr(parameters[key], kind, value)
            set_gradients(parameters, gradients(step, rank))
            trainer.step(batch_size(step, rank))
            schedule.step()
    return {key: parameter.detach().clone() for key, parameter in parameters.items()}


TOLERANCE, TORCHS_TOLERANCE = 2e-6, 1e-11
SERVERS = (1, 2, 3)
SITES = (True, False)
"""Of update_on_kvstore."""
Sites = Sequence[tuple[int, bool]]
"""Numbers of servers, and where the update runs."""
RUNS = [
    *((1 + at % 2, ((3, SITES[at // 2 % 2]),), label) for at, label in enumerate(OPTIMIZERS)),
    *(
        pytest.param(workers, (*itertools.product(SERVERS, SITES),), label, marks=pytest.mark.full)
        for workers in (1, 2)
        for label in OPTIMIZERS
    ),
]
"""Numbers of workers, and the sites of their runs: one of four for each optimizer, and all in the full run."""

Weights = dict[str, Tensor]


def everywhere(jobs: Servers, workers: int, sites: Sites, label: str) -> dict[str, Weights]:
    """What every worker ended with, whatever the servers and the site of the update; one, also in one process."""
    found: dict[str, Weights] = {}
    for count, in_store in sites:

        def body(kv: DistKVStore, rank: int, in_store: bool = in_store) -> Weights:
            return play(label, rank, kv, in_store)

        for rank, weights in enumerate(jobs.results(workers, count, body)):
            found[f"{count} servers, rank {rank}, in store: {in_store}"] = weights
    if workers == 1:
        found["no store"] = play(label, 0, None, False)
        found |= {f"local, in store: {site}": play(label, 0, "local", site) for site in SITES}
    return found


def pieces_of(key: str, servers: int = 1, whole_keys: bool = False) -> list[Slice]:
    """The slices of a key; a Trainer takes a dict in the order of its names."""
    names = [*sorted(SHAPES.keys() - {*SLOW}), *SLOW]
    specs = [TensorSpec(name, SHAPES[name], "float32", int(name in SLOW)) for name in names]
    plan = make_plan(specs, servers, whole_keys)
    return [slice_ for slice_ in plan.slices if slice_.segments[0].key == names.index(key)]


def in_float64(weights: Weights) -> dict[str, Any]:
    return {key: weight.double().numpy() for key, weight in weights.items()}


@pytest.mark.parametrize(("workers", "sites", "label"), RUNS, ids=str)
def test_every_store_follows_the_formula_with_the_same_bits(
    jobs: Servers, workers: int, sites: Sites, label: str
) -> None:
    runs = everywhere(jobs, workers, sites, label)
    first = next(iter(runs.values()))
    for who, weights in runs.items():
        assert all(torch.equal(weights[key], first[key]) for key in SHAPES), who
    if label != "sgld":
        bound = TORCHS_TOLERANCE if is_torchs(label) else TOLERANCE
        assert distance(in_float64(first), reference(label, workers)) <= bound


@pytest.mark.parametrize("workers", [1, 2])
def test_sglds_noise_has_the_mean_and_the_variance_of_its_formula(jobs: Servers, workers: int) -> None:
    [weights] = map(in_float64, jobs.results(workers, 3, lambda kv, rank: play("sgld", rank, kv, True))[:1])
    moments = sgld_moments(workers)
    for key in ("sliced_weight", "body_weight"):
        mean, variance = moments[key]
        noise = (weights[key] - mean) / np.sqrt(variance)
        assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
        assert abs(noise.var() - 1) < 4 * np.sqrt(2 / noise.size)
        # Nor does a slice repeat the noise of the one before it.
        begin = pieces_of(key)[1].segments[0].key_start
        before, after = noise.reshape(-1)[:-begin], noise.reshape(-1)[begin:]
        assert abs((before * after).mean()) < 4 / np.sqrt(after.size)


@pytest.mark.parametrize("label", ["signum", "lamb", "ftrl", "nadam"])
@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_that_did_not_arrive_would_be_seen(label: str, change: str) -> None:
    assert distance(reference(label, 2, CHANGES - {change}), reference(label, 2)) > 1e4 * TOLERANCE


@pytest.mark.parametrize("label", ["lamb", "lans", "lars"])
def test_the_norm_of_one_servers_part_would_be_seen(label: str) -> None:
    case = OPTIMIZERS[label]
    weight, gradient = start_weights()["sliced_weight"], summed_gradient(0, 1, "sliced_weight")
    ends = []
    for cuts in ([], [len(weight) // 2]):
        parts = zip(np.split(weight, cuts), np.split(gradient, cuts), strict=True)
        oracle = Reference(case.name, case.options)
        ends.append(np.concatenate([oracle.update(str(i), *part, 0.1, 0.05) for i, part in enumerate(parts)]))
    assert np.abs(ends[0] - ends[1]).max() > 1e3 * TOLERANCE


@pytest.mark.parametrize("label", FORESEEN)
def test_the_weights_move_and_stay_bounded(label: str) -> None:
    # A run that blows up would amplify rounding without limit, and prove nothing.
    expected = reference(label, 2)
    start = start_weights()
    for key, weight in expected.items():
        assert 1e3 * TOLERANCE < np.abs(weight - start[key]).max() < 30, key


def test_every_optimizer_of_gluon_and_every_elementwise_one_of_torch_is_played() -> None:
    ours = {cls.name for cls in (*gluon.FAMILY, *layerwise.FAMILY)}
    theirs = {f"torch:{cls.__name__}" for cls in ELEMENTWISE}
    its_own_in_mxnet1 = {case.name for case in MXNET1.values()}
    assert {case.name for case in OPTIMIZERS.values()} == ours | theirs | its_own_in_mxnet1


@pytest.mark.parametrize("servers", SERVERS)
@pytest.mark.parametrize("whole_keys", [False, True])
def test_the_biggest_parameter_lies_on_all_servers_or_whole_on_one(servers: int, whole_keys: bool) -> None:
    slices = pieces_of("sliced_weight", servers, whole_keys)
    assert len(slices) > 3
    assert len({slice_.server for slice_ in slices}) == (1 if whole_keys else servers)
