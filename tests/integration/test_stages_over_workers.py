"""Options of the stages on several workers: what all must agree on, what one of them finds, and who joins early.

A scenario gets `make`, which builds a parameter of two zeros and its Trainer over the store, and the worker's rank.
What it returns has to be equal on all workers, unless it says otherwise.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import kvtrainer
from kvtrainer import Trainer
from kvtrainer.amp import GradScaler
from kvtrainer.errors import KVStoreError, NonFiniteGradientError, PlanMismatchError
from kvtrainer.kvstore import DistKVStore, create
from tests.support.jobs import Job, Results, run_job
from tests.support.limits import LIMIT
from tests.support.stores import Servers


@kvtrainer.kvstore.KVStoreBase.register
class AllReduce(kvtrainer.kvstore.KVStoreBase):
    """Sums over all processes of the group, and over the tensors of a list; known as "allreduce"."""

    capabilities = ("several_workers",)

    @property
    def type(self) -> str:
        return "allreduce"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_workers(self) -> int:
        return dist.get_world_size()

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        shared = _listed(value)[0].clone()
        dist.broadcast(shared, src=0)
        for one in _listed(out):
            one.copy_(shared)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        total = torch.stack(list(_listed(value))).sum(0)
        dist.all_reduce(total)
        for one in _listed(value if out is None else out):
            one.copy_(total)


def _listed(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


Make = Callable[..., tuple[Any, Trainer]]
Scenario = Callable[[Make, int], Any]

NORM: dict[str, Any] = {"clip_grad": {"max_norm": 1.0}}
SCALE = {"init_scale": 8.0, "growth_interval": 3}
HALVES = [lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
"""A scheduler of torch, which goes on from the present rate."""
CLOSED = [{"policy": "poly", "power": 1.0, "max_iters": 16, "by_epoch": False}]
"""A schedule in closed form."""
NUMBERS = {"learning_rate": 1.0, "momentum": 0.5}


def push(trainer: Trainer, p: Any, slope: float = 1.0) -> dict[str, Any]:
    return vars(trainer.update_params((p * slope).sum()))


def state_of(trainer: Trainer, p: Any) -> Any:
    """All that workers have in common."""
    saved = trainer.export_saved_states()
    state = {name: value.tolist() for name, value in saved.parameters["p"].state.items() if name != "step"}
    extra = {name: value for name, value in saved.extra.items() if name != "backward_passes"}
    return p.tolist(), saved.num_update, saved.groups, extra, state


def uneven(batches: tuple[int, ...], schedules: Any) -> Scenario:
    """A block that workers leave at different times, with an overflow near its end, and two steps of all."""

    def run(make: Make, rank: int) -> Any:
        p, trainer = make(amp=SCALE, schedules=schedules, **NORM)
        with trainer.join():
            for at in range(batches[rank]):
                push(trainer, p, math.inf if at == 4 else 1.0)
        after = state_of(trainer, p)
        return after, [push(trainer, p), push(trainer, p)], state_of(trainer, p)

    return run


def bad_loss_of_a_joined_worker(make: Make, rank: int) -> Any:
    """Rank 0 has a loss that is not a number, but never steps."""
    p, trainer = make(on_nonfinite="skip")
    with trainer.join():
        if rank == 0:
            trainer.backward((p * math.nan).sum())
        else:
            push(trainer, p)
    after = p.tolist()
    return after, push(trainer, p)["updated"]


def windows_after_a_block(make: Make, rank: int) -> Any:
    """Rank 1 leaves a block in the middle of a window."""
    p, trainer = make(accumulate=2)
    with trainer.join():
        for _ in range((4, 3)[rank]):
            push(trainer, p)
    after = p.tolist()
    return after, [push(trainer, p)["updated"] for _ in range(4)], p.tolist()


def one_bad_loss(make: Make, rank: int) -> Any:
    """Rank 1 finds a loss that is not a number. The first value is the worker's own: where it raised, and for what."""
    p, trainer = make(on_nonfinite="raise", schedules=HALVES, accumulate=2)
    found = []
    for at in range(6):
        try:
            push(trainer, p, math.nan if (rank, at) == (1, 2) else 1.0)
        except NonFiniteGradientError as error:
            found.append((at, str(error).startswith("Loss is NaN")))
    return found, p.tolist(), trainer.learning_rate, vars(trainer.last)


def halves_of_a_step(make: Make, rank: int) -> Any:
    """Gradients are changed between sum and update; in one step that of rank 1 is infinite. Workers update."""
    p, trainer = make(amp=8, schedules=HALVES, accumulate=2, on_nonfinite="raise", **NORM)
    results: list[Any] = []
    for at in range(6):
        trainer.backward((p * (math.inf if (rank, at) == (1, 3) else 3.0)).sum())
        trainer.allreduce_grads()
        if at % 2 and math.isfinite(p.grad.sum()):
            p.grad.mul_(0.5)
        try:
            results.append(vars(trainer.update()))
        except NonFiniteGradientError:
            results.append("raised")
    return results, state_of(trainer, p)


def gradients_by_turns(make: Make, rank: int) -> Any:
    """One worker has a gradient, and then the other; the last overflows."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    results = []
    for at in range(4):
        if at % 2 == rank:
            trainer.backward((p * (math.inf if at == 3 else 3.0)).sum())
        results.append(vars(trainer.step(ignore_stale_grad=True)))
    return results, state_of(trainer, p)


def scaler_of_the_loop(make: Make, rank: int) -> Any:
    """A scaler that the script drives, and a gradient of rank 1 that overflows."""
    p, trainer = make()
    scaler, skipped = GradScaler("cpu", **SCALE), []  # type: ignore[arg-type]
    for at in range(6):
        scaler.scale((p * (math.inf if (rank, at) == (1, 2) else 1.0)).sum()).backward()
        skipped.append(scaler.step(trainer).skipped)
        scaler.update()
    return skipped, scaler.get_scale(), p.tolist()


def round_that_fails(make: Make, rank: int) -> Any:
    """One worker has another learning rate; then it is put right, and the step is made again."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    push(trainer, p)
    before = state_of(trainer, p)
    if rank == 1:
        trainer.set_learning_rate(7.0)
    with pytest.raises(PlanMismatchError):
        push(trainer, p)
    trainer.set_learning_rate(0.5)
    assert state_of(trainer, p) == before
    return vars(trainer.step()), state_of(trainer, p)


def interrupted_step(make: Make, rank: int) -> Any:
    """Rank 1 is interrupted before its round, and makes the step again while the other waits."""
    p, trainer = make(amp=SCALE, schedules=HALVES, **NORM)
    push(trainer, p)
    before = state_of(trainer, p)
    if rank == 0:
        return push(trainer, p), state_of(trainer, p)
    exchange: Any = trainer._pipeline.binding.exchange
    run, exchange.run = exchange.run, _interrupted
    with pytest.raises(KeyboardInterrupt):
        push(trainer, p)
    exchange.run = run
    assert state_of(trainer, p) == before
    return vars(trainer.step()), state_of(trainer, p)


def different(mine: dict[str, Any], other: dict[str, Any]) -> Scenario:
    """Workers with different options; the text of the error, as each has it."""

    def run(make: Make, rank: int) -> str:
        p, trainer = make(**(mine, other)[rank])
        try:
            for _ in range(4):
                push(trainer, p)
        except PlanMismatchError as error:
            return str(error)
        return "nothing"

    return run


LIMITED = r"checks_finite=(True|None) on rank 0|rank . wants nothing to be checked"
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "norm": (NORM, {"clip_grad": {"max_norm": 2.0}}, "max_norm=1.0 on rank 0 and 2.0 on rank 1"),
    "norm or none": (NORM, {}, LIMITED),
    "none or value": ({}, {"clip_grad": {"type": "value", "clip_value": 1.0}}, LIMITED),
    "amp or none": ({"amp": 8}, {}, rf"{LIMITED}|loss_scale is 8.0 on rank 0 and None on rank 1"),
    "loss scale": (
        {"amp": 8},
        {"amp": SCALE | {"init_scale": 16.0}},
        "loss_scale is 8.0 on rank 0 and 16.0 on rank 1",
    ),
    "growth": ({"amp": 8}, {"amp": SCALE}, "loss_scale is 8.0 on rank 0 and 16.0 on rank 1"),
    "skip or not": ({"on_nonfinite": "skip"}, {}, LIMITED),
    "schedule or none": ({"schedules": HALVES}, {}, "lr=0.5 on rank 0 and 1.0 on rank 1"),
    "accumulate": ({"accumulate": 2}, {}, "accumulate is 2 on rank 0 and None on rank 1"),
}
"""Options of two workers that do not go together, and what the error says."""

SAME: dict[str, Scenario] = {
    "uneven, of torch": uneven((7, 2), HALVES),
    "uneven, in closed form": uneven((2, 7), CLOSED),
    "uneven, one without data": uneven((5, 0), CLOSED),
    "a bad loss of a joined worker": bad_loss_of_a_joined_worker,
    "windows after a block": windows_after_a_block,
    "one bad loss": one_bad_loss,
    "gradients by turns": gradients_by_turns,
    "a scaler of the loop": scaler_of_the_loop,
    "a round that fails": round_that_fails,
    "an interrupted step": interrupted_step,
}

HALF = "halves of a step"
"""A scenario for workers that update."""


def check_same(name: str, first: Any, second: Any) -> None:
    """Raise AssertionError unless two workers ended alike, and as they should."""
    if name == "one bad loss":
        assert (first[0], second[0]) == ([(3, False)], [(3, True)])
        first, second = first[1:], second[1:]
        assert first[0] == [-1.0 - (0.5 + 0.5)] * 2
    assert first == second
    if name == "a bad loss of a joined worker":
        assert first == ([-0.5, -0.5], True)
    if name == "windows after a block":
        assert first[1] == [False, True, False, True]
    if name == HALF:
        ends = [one if one == "raised" else one["updated"] for one in first[0]]
        assert ends == [False, True, False, "raised", False, True]
        assert first[0][1]["grad_norm"] == pytest.approx(1.5 * math.sqrt(2.0))
    if name == "a scaler of the loop":
        assert first[:2] == ([False, False, True, False, False, False], 8.0)
    if name == "gradients by turns":
        assert [one["skipped"] for one in first[0]] == [False, False, False, True]


def _interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def over(store: Any) -> Any:
    def make(**options: Any) -> tuple[Any, Trainer]:
        p = Parameter(torch.zeros(2))
        return p, Trainer({"p": p}, "sgd", NUMBERS, store, None, False, **options)

    return make


def scenarios_in_a_group(rank: int, ranks: int) -> Results:
    """All scenarios on a rank of torch.distributed, some with a plug-in as well."""
    make, plugged = over(create("device")), over(AllReduce())
    found = {name: scenario(make, rank) for name, scenario in SAME.items()}
    found |= {name: different(mine, other)(make, rank) for name, (mine, other, _) in DIFFERENT.items()}
    found |= {HALF: halves_of_a_step(make, rank), f"plug-in: {HALF}": halves_of_a_step(plugged, rank)}
    return found | {
        f"plug-in: {name}": SAME[name](plugged, rank) for name in ("one bad loss", "gradients by turns")
    }


SITES = pytest.mark.parametrize("in_store", [True, False], ids=["in-store", "by-workers"])


def trainer_of(kv: DistKVStore, in_store: bool, **options: Any) -> tuple[Any, Trainer]:
    p = Parameter(torch.zeros(2))
    # Gluon's, because servers need seconds for the first of torch's optimizers.
    return p, Trainer({"p": p}, "sgd", NUMBERS, kv, None, in_store, **options)


def played(jobs: Servers, servers: int, in_store: bool, scenario: Scenario) -> list[Any]:
    def body(kv: DistKVStore, rank: int) -> Any:
        return scenario(lambda **options: trainer_of(kv, in_store, **options), rank)

    return jobs.results(2, servers, body)


@SITES
@pytest.mark.parametrize("name", SAME)
def test_workers_of_servers_go_on_alike(jobs: Servers, name: str, in_store: bool) -> None:
    check_same(name, *played(jobs, 2, in_store, SAME[name]))


def test_halves_of_a_step_end_alike_on_all_workers_of_servers(jobs: Servers) -> None:
    check_same(HALF, *played(jobs, 2, False, halves_of_a_step))


@SITES
@pytest.mark.parametrize("name", DIFFERENT)
def test_workers_of_servers_that_disagree_about_an_option_hear_of_it(
    jobs: Servers, name: str, in_store: bool
) -> None:
    mine, other, message = DIFFERENT[name]
    said = played(jobs, 1, in_store, different(mine, other))
    assert all(re.search(message, one) for one in said), said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("stages")
    return run_job(scenarios_in_a_group, folder, 2, 1, in_group=True)


@pytest.mark.parametrize("name", [*SAME, HALF])
def test_ranks_of_torch_distributed_go_on_alike(ranks: Job, name: str) -> None:
    check_same(name, *ranks[name])


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_of_torch_distributed_that_disagree_hear_of_it(ranks: Job, name: str) -> None:
    assert all(re.search(DIFFERENT[name][2], one) for one in ranks[name]), ranks[name]


@pytest.mark.parametrize("name", ["one bad loss", "gradients by turns", HALF])
def test_workers_of_a_third_party_store_go_on_alike(ranks: Job, name: str) -> None:
    check_same(name, *ranks[f"plug-in: {name}"])


@SITES
@pytest.mark.parametrize("is_own_scaler", [True, False])
def test_joined_workers_skip_what_overflows_in_the_sum_alone(
    jobs: Servers, is_own_scaler: bool, in_store: bool
) -> None:
    """Also where the loop drives a scaler, of which a worker without data says nothing."""

    def body(kv: DistKVStore, rank: int) -> Any:
        p, trainer = trainer_of(kv, in_store, **({} if is_own_scaler else {"on_nonfinite": "skip"}))
        scaler = GradScaler("cpu", init_scale=1.0, enabled=is_own_scaler)
        with trainer.join():
            for _ in range((1, 2, 2)[rank]):
                scaler.scale((p * 3e38).sum()).backward()
                scaler.step(trainer, 1)
                scaler.update()
        return p.tolist(), push(trainer, p)["updated"]

    assert jobs.results(3, 1, body) == [([0.0, 0.0], True)] * 3


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
def test_without_rounds_every_worker_limits_and_skips_for_itself(jobs: Servers, type: str) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p, trainer = trainer_of(kv, True, amp=SCALE, **NORM)
        trainer.set_data()
        result = push(trainer, p, math.inf if rank else 3.0)
        kv.barrier()
        after = push(trainer, p, 0.0)
        return result["skipped"], result["grad_norm"], after["skipped"], trainer.amp_loss_scale

    norm = pytest.approx(3.0 / 2.0 * math.sqrt(2.0))
    assert jobs.results(2, 1, body, type=type) == [(False, norm, False, 8.0), (True, math.inf, False, 4.0)]


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
def test_without_rounds_schedules_go_by_a_workers_own_updates_also_after_a_block(
    jobs: Servers, type: str
) -> None:
    def body(kv: DistKVStore, rank: int) -> float:
        p, trainer = trainer_of(kv, True, schedules=HALVES)
        with trainer.join():
            for _ in range((3, 1)[rank]):
                push(trainer, p)
        return trainer.learning_rate

    assert jobs.results(2, 1, body, type=type) == [0.125, 0.5]


@pytest.mark.parametrize("type", ["dist_async", "dist_ssp"])
@pytest.mark.parametrize(
    ("limit", "first"), [(0.5, -0.5), (64.0, -2.0)], ids=["limited", "65536 when scaled"]
)
def test_values_of_half_precision_are_limited_without_rounds_too_whatever_the_scaled_limit_is(
    jobs: Servers, type: str, limit: float, first: float
) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p: Any = Parameter(torch.zeros(2, dtype=torch.float16))
        clip = {"type": "value", "clip_value": limit}
        trainer = Trainer({"p": p}, "sgd", {"learning_rate": 1.0}, kv, clip_grad=clip, amp=1024)
        trainer.update_params(p.float() @ torch.tensor([2.0, -0.25]))
        return p.tolist()

    assert jobs.results(1, 1, body, type=type) == [[first, 0.25]]


@SITES
def test_small_gradients_in_half_precision_count_in_full_on_all_workers_also_in_a_block(
    jobs: Servers, in_store: bool
) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p: Any = Parameter(torch.zeros(2, dtype=torch.float16))
        numbers = {"learning_rate": 1e6, "multi_precision": True}
        trainer = Trainer({"p": p}, "sgd", numbers, kv, None, in_store, amp=2**16, **NORM)
        with trainer.join():
            for _ in range(1 + rank):
                trainer.update_params(p.float() @ torch.tensor([4e-8, 2.6e-7]))
        return p.tolist()

    first, second = jobs.results(2, 1, body)
    assert first == second == pytest.approx([-0.06, -0.39], rel=1e-3)


def test_a_worker_without_gradients_of_its_own_takes_the_loss_scale_out_of_the_sum_as_others_do(
    jobs: Servers,
) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p, trainer = trainer_of(kv, False, amp=8)
        for turn in range(2):
            if rank == turn:
                trainer.backward(p.sum())
            trainer.allreduce_grads()
            trainer.update(1, ignore_stale_grad=True)
        return p.tolist()

    assert jobs.results(2, 1, body) == [[-2.5, -2.5]] * 2  # with a momentum of a half


def test_two_trainers_with_the_same_names_have_options_of_their_own(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Any:
        p, one = trainer_of(kv, True, amp=SCALE, **NORM)
        q, other = trainer_of(kv, True, on_nonfinite="raise")
        first = push(one, p, math.inf if rank else 3.0)
        with pytest.raises(NonFiniteGradientError):
            push(other, q, math.inf if rank else 3.0)
        return first["skipped"], push(one, p, 3.0), push(other, q, 3.0), p.tolist(), q.tolist()

    first, second = jobs.results(2, 2, body)
    assert first == second
    assert first[-1] == [-3.0, -3.0]
    assert first[-2] == pytest.approx([-math.sqrt(0.5)] * 2, rel=1e-5)


@pytest.mark.parametrize("moment", ["before the sum is here", "while the round ends", "in the update"])
def test_a_worker_that_lacks_an_update_which_the_others_have_made_does_not_go_on(
    jobs: Servers, moment: str
) -> None:
    """Its weights would be others from then on, and nobody would notice."""
    is_updated = threading.Event()

    def scenario(kv: DistKVStore, rank: int) -> None:
        p, trainer = trainer_of(kv, False)
        push(trainer, p)
        if rank == 0:
            push(trainer, p)
            is_updated.set()
            return
        pipeline: Any = trainer._pipeline
        rounds: Any = pipeline.binding.holder._client.rounds
        # The round is a captured one where all servers share memory with the worker.
        requests = [one for captured in rounds._captured.values() for one in captured._requests]
        places = {
            "before the sum is here": [
                (rounds._session, "wait"),
                (rounds._session.transport, "receive_frames"),
            ],
            "while the round ends": [(rounds, "_end"), *[(one, "write") for one in requests]],
            "in the update": [(pipeline.states.here[0], "apply")],
        }[moment]

        def interrupted(*_: Any) -> None:
            for place, name in places:
                delattr(place, name)
            is_updated.wait(LIMIT)
            raise KeyboardInterrupt

        for place, name in places:
            setattr(place, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            push(trainer, p)
        for go_on in (trainer.step, trainer.set_data):
            with pytest.raises(KVStoreError):
                go_on()

    jobs.results(2, 1, scenario)
