"""Steps that return before the new weights are here: who reads a parameter waits for it, and sees the same bits.

Two workers on two servers train with and without the option. Digests cover what the forward passes gave, where nothing
else is read between the steps, and all weights at the end.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import kvtrainer
from kvstore_server.plan import TensorSpec, make_plan
from kvtrainer.errors import (
    KVStoreError,
    PlanMismatchError,
    ServerUnreachableError,
    WeightsWrittenError,
    WorkerLostError,
)
from kvtrainer.kvstore import DistKVStore
from kvtrainer.lr_scheduler import FactorScheduler
from kvtrainer.sync.overlap import Awaited, Coming
from tests.integration import test_overlap
from tests.integration.test_overlap import Case, plain
from tests.support.limits import DEAD_AFTER, LIMIT
from tests.support.processes import WORKER, Call, Members, Processes, new_name
from tests.support.stores import Servers

STEPS = 5
WHOLE, BOTH = "overlap_pull", "overlap and overlap_pull"


class Loop(test_overlap.Loop):
    """One worker's training, in which nothing but the model reads the weights until the end."""

    def __init__(self, kv: DistKVStore, rank: int, mode: str = "", **options: Any) -> None:
        super().__init__(kv, rank, mode == BOTH, overlap_pull=bool(mode), **options)

    def loss(self) -> Tensor:
        found = super().loss()
        self.digest.update(found.detach().numpy().tobytes())
        return found

    def note(self) -> None:
        """Leave the weights alone."""

    def end(self) -> str:
        """The digest of all losses, and of the weights now."""
        super().note()
        return self.digest.hexdigest()


def resumed(loop: Loop, at: int) -> None:
    """States are saved and loaded between two steps."""
    plain(loop, at)
    with io.BytesIO() as file:
        torch.save(loop.trainer.state_dict(), file)
        file.seek(0)
        loop.trainer.load_state_dict(torch.load(file))


def scheduled(loop: Loop, at: int) -> None:
    """The numbers of a step are there as soon as it returns."""
    plain(loop, at)
    numbers = [loop.trainer.optimizer.num_update, loop.trainer.learning_rate, *loop.trainer.get_lr()["lr"]]
    assert loop.trainer.last is not None
    loop.digest.update(repr([*numbers, loop.trainer.last]).encode())


def zeroed(loop: Loop, at: int) -> None:
    """The loop writes to gradients that are still on their way."""
    plain(loop, at)
    for p in loop.net.parameters():
        assert p.grad is not None
        p.grad.fill_(7.0)
    loop.trainer.zero_grad()


def evaluated(loop: Loop, at: int) -> None:
    plain(loop, at)
    with torch.no_grad():
        loop.loss()


def moved(loop: Loop, at: int) -> None:
    """The learning rate is set while weights are on their way."""
    plain(loop, at)
    loop.trainer.set_learning_rate(0.01 / (at + 1))


def halves(loop: Loop, at: int) -> None:
    """Frozen in turn, so that a step depends on what others give."""
    loop.second.requires_grad_(at % 2 == 0)
    plain(loop, at)


MORE: dict[str, tuple[Case, dict[str, Any]]] = {
    "resumed": (resumed, {}),
    "scheduled": (scheduled, {"schedules": [{"policy": "Step", "step": 2, "gamma": 0.5}]}),
    "a lr_scheduler": (
        scheduled,
        {"optimizer": "sgd", "optimizer_params": {"lr_scheduler": FactorScheduler(1, 0.5, base_lr=0.1)}},
    ),
    "zeroed": (zeroed, {}),
    "evaluated": (evaluated, {}),
    "moved": (moved, {}),
    "frozen in turn": (halves, {}),
    "bfloat16 pulls": (plain, {"compression_params": {"pull": "bf16"}}),
    "changes of weights": (plain, {"compression_params": {"pull": "ternary"}}),
    "copied": (plain, {"zero_copy": False}),
}
OF_WEIGHTS = {
    "plain", "clip_grad", "a window of two", "amp", "overflowing", "uneven", "published", "stale", "written",
    "2bit, overflowing", "p3",
}  # fmt: skip
"""Cases of `overlap` in which more than a gradient differs."""
OF_BOTH = OF_WEIGHTS | {
    "one edited",
    "one behind",
    "dropped",
    "clip_grad, dropped",
    "2bit, edited",
    "2bit, dropped",
}
"""And those in which a gradient that went early is not the one that counts."""
CASES = test_overlap.CASES | MORE


def trained(jobs: Servers, name: str, mode: str, servers: int = 2) -> list[str]:
    """The digests of both workers."""
    case, options = CASES[name]

    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, mode, **copy.deepcopy(options))
        for at in range(STEPS):
            case(loop, at)
        return loop.end()

    found: list[str] = jobs.results(2, servers, body, **({"type": "p3"} if name == "p3" else {}))
    return found


@functools.cache
def expected(jobs: Servers, name: str) -> list[str]:
    """The digests of steps that wait; they do not depend on the way to the servers."""
    return trained(jobs, name, "")


@pytest.mark.parametrize("name", sorted(OF_WEIGHTS | MORE.keys()))
def test_the_bits_are_those_of_steps_that_wait(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, WHOLE) == expected(jobs, name)


@pytest.mark.parametrize("name", ["plain", "one edited", "uneven", "2bit, edited"])
def test_so_they_are_where_gradients_go_early_as_well(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, BOTH) == expected(jobs, name)


@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("name", sorted(OF_BOTH | MORE.keys()))
def test_over_a_network_so_they_are_with_both(jobs: Servers, name: str) -> None:
    assert trained(jobs, name, BOTH, servers=1) == expected(jobs, name)


# ---------------------------------------------------------------- ways to read a parameter


class Reader(nn.Module):
    """A model of which some parameters are used by other ways than the forward pass of their module."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16, max_norm=0.9)
        self.attention = nn.MultiheadAttention(16, 2)
        self.memory = nn.LSTM(16, 16)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.scale = nn.Parameter(torch.ones(1, 16))
        self.middle = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        chance = torch.Generator().manual_seed(4)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2, generator=chance)

    def forward(self, ids: Tensor) -> Tensor:
        first = linear(torch.ones(ids.shape[0], 16), self.middle[0].weight)[:, :16]  # before its module
        x = self.table(ids) * self.scale.expand(len(ids), -1) + first
        x = x.unsqueeze(1)
        x = x + self.attention(x, x, x)[0]
        x = x + self.memory(x)[0]
        x = self.normal(x).squeeze(1)
        x = x + checkpoint(self.middle, x, use_reentrant=False)
        return linear(x, self.table.weight)


def read(jobs: Servers, overlap_pull: bool) -> list[list[Tensor]]:
    """The losses and weights of both workers that train a Reader."""

    def body(kv: DistKVStore, rank: int) -> list[Tensor]:
        net = Reader()
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.05}, kv, overlap_pull=overlap_pull)
        chance, seen = torch.Generator().manual_seed(rank), []
        for _ in range(STEPS):
            ids = torch.randint(0, 30, (12,), generator=chance)
            loss = nn.functional.cross_entropy(net(ids), ids)
            loss.backward()
            seen.append(loss.detach())
            trainer.set_data()  # an Embedding with max_norm writes to its weights
            trainer.step(2)
        return [*seen, *net.state_dict().values()]

    found: list[list[Tensor]] = jobs.results(2, 2, body)
    return found


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, *pair)) for pair in zip(found, expected, strict=True))


def test_parameters_that_are_read_past_their_module_are_new_as_well(jobs: Servers) -> None:
    assert same(read(jobs, True), read(jobs, False))


READS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda net: net.state_dict(),
    "named_parameters": lambda net: {name: p.detach().clone() for name, p in net.named_parameters()},
    "deepcopy": lambda net: copy.deepcopy(net).state_dict(),
    "pickle": lambda net: pickle.loads(pickle.dumps(net)).state_dict(),
    "numpy": lambda net: {k: torch.from_numpy(p.data.numpy().copy()) for k, p in net.named_parameters()},
    "inference_mode": lambda net: inferred(net),
    "keep_vars": lambda net: {k: p * 1.0 for k, p in net.state_dict(keep_vars=True).items()},
    "foreach": lambda net: dict(
        zip(net.state_dict(keep_vars=True), torch._foreach_mul(list(net.parameters()), 1.0), strict=True)
    ),
    "functional": lambda net: torch.func.functional_call(
        Dictionary(net), {f"net.{k}": p for k, p in net.named_parameters()}, ()
    ),
}


def inferred(net: nn.Module) -> dict[str, Tensor]:
    """The parameters, each plus nothing."""
    with torch.inference_mode():
        return {name: p + 0.0 for name, p in net.named_parameters()}


class Dictionary(nn.Module):
    """A module whose forward pass gives its parameters, each plus nothing."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self) -> dict[str, Tensor]:
        return {name: p + 0.0 for name, p in self.net.named_parameters()}


def rebuilt(p: Parameter) -> Parameter:
    """What pickle makes of a parameter that was still to come when it was asked."""
    make, given = Coming.__reduce_ex__(p, pickle.HIGHEST_PROTOCOL)  # type: ignore[arg-type]
    made: Parameter = make(*given)
    return made


@pytest.mark.parametrize("copied", [lambda p: Coming.__deepcopy__(p, {}), rebuilt])
def test_a_copy_that_one_thread_has_begun_is_made_though_another_one_ends_the_round(
    copied: Callable[[Parameter], Parameter],
) -> None:
    weight = Parameter(torch.ones(3))  # a plain one by now
    assert torch.equal(copied(weight), weight)


@pytest.mark.parametrize("way", READS)
def test_whoever_reads_the_weights_after_a_step_sees_the_new_ones(jobs: Servers, way: str) -> None:
    def body(kv: DistKVStore, rank: int) -> list[list[Tensor]]:
        net = nn.Linear(3, 5)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.25}, kv, overlap_pull=True)
        seen = []
        for _ in range(3):
            net(torch.ones(1, 3)).sum().backward()
            trainer.step(2)
            seen.append([one.clone() for one in READS[way](net).values()])
        assert all(type(p) is Parameter for p in net.parameters())
        return seen

    for seen in jobs.results(2, 2, body):
        for at, (weight, bias) in enumerate(seen):
            assert torch.equal(weight, torch.full((5, 3), 1.0 - 0.25 * (at + 1)))
            assert torch.equal(bias, torch.full((5,), 1.0 - 0.25 * (at + 1)))


def test_what_is_not_about_values_does_not_wait(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> str:
        loop = Loop(kv, rank, WHOLE)
        plain(loop, 0)
        loop.loss().backward()
        if rank:
            has_looked.wait(LIMIT)
        loop.trainer.step(16)
        if not rank:
            # The other one has not even begun its step.
            for p in loop.net.parameters():
                assert p.requires_grad
                assert p.shape.numel() == p.numel()
                p.grad = None
            has_looked.set()
        return loop.end()

    has_looked = threading.Event()
    first, second = jobs.results(2, 2, body)
    assert first != second  # of losses of their own


def test_a_parameter_is_there_before_others_that_a_server_still_owes(
    processes: Processes, members: Members
) -> None:
    servers = processes.servers(2)
    specs = [TensorSpec(name, (64, 64), "float32", 0) for name in ("a", "b")]
    homes = [piece.server for piece in make_plan(specs, 2).slices]
    assert sorted(homes) == [0, 1]
    kv = members.join(servers, 0, 1, new_name(), dead_after=DEAD_AFTER)
    pair = {name: Parameter(torch.ones(64, 64)) for name in ("a", "b")}
    trainer = kvtrainer.Trainer(pair, "sgd", {"learning_rate": 1.0}, kv, overlap_pull=True)
    late, early = (pair["ab"[at]] for at in (homes.index(0), homes.index(1)))

    def step() -> None:
        for p in pair.values():
            p.grad = torch.full((64, 64), 0.5)
        trainer.step(1)

    step()
    assert torch.equal(late + early, torch.ones(64, 64))
    servers[0].freeze()
    step()
    assert torch.equal(early * 1.0, torch.zeros(64, 64))
    servers[0].signal(signal.SIGCONT)
    assert torch.equal(late * 1.0, torch.zeros(64, 64))
    servers[0].freeze()
    step()
    writing = Call(lambda: early.data.mul_(0.5))  # which leaves no trace, so it waits for all
    servers[0].signal(signal.SIGCONT)
    writing.outcome()
    with pytest.raises(WeightsWrittenError):
        step()
    trainer.set_data({name: torch.zeros(64, 64) for name in pair})
    servers[0].freeze()
    step()
    assert torch.equal(early * 1.0, torch.full((64, 64), -0.5))
    servers[0].signal(signal.SIGKILL)
    names = {id(p): name for name, p in pair.items()}
    with pytest.raises(ServerUnreachableError, match=f"of two rounds.*: {names[id(early)]};"):
        late * 1.0
    assert torch.equal(late, torch.zeros(64, 64))


def test_a_backward_pass_through_former_weights_is_refused(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        loop = Loop(kv, rank, WHOLE)
        plain(loop, 0)
        before = loop.loss()
        loop.loss().backward()
        loop.step()
        loop.loss()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            before.backward()

    jobs.results(2, 2, body)


def test_any_thread_may_be_the_first_to_read(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int, overlap_pull: str) -> list[Tensor]:
        loop = Loop(kv, rank, overlap_pull)
        for at in range(3):
            plain(loop, at)
            calls = [Call(lambda p=p: p * 1.0) for p in loop.net.parameters()]
            found = [call.outcome() for call in calls]
        return found

    found, expected = (jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (WHOLE, ""))
    assert same(found, expected)


@pytest.mark.parametrize("way", ["a module", "its method", "a function"])
def test_what_was_compiled_sees_the_new_ones(jobs: Servers, way: str) -> None:
    def body(kv: DistKVStore, rank: int, overlap_pull: bool) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for p in net.parameters():
            nn.init.constant_(p, 0.5)
        call: Any = torch.compile(net, backend=counter) if way == "a module" else net
        trainer = kvtrainer.Trainer(call, "sgd", {"learning_rate": 0.25}, kv, overlap_pull=overlap_pull)
        if way == "its method":
            net.compile(backend=counter)
        if way == "a function":
            call = torch.compile(lambda x: linear(linear(x, net[0].weight), net[1].weight), backend=counter)
        seen = []
        for at in range(3):
            found = call(torch.full((2, 3), 0.1 * (at + 1)))
            seen.append(found.detach())
            found.sum().backward()
            trainer.step(ignore_stale_grad=True)
        trainer.close()
        return seen

    torch._dynamo.reset()
    counter = CompileCounter()
    found, expected = (jobs.results(1, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False))
    assert same(found, expected)
    if way == "a module":
        assert counter.frame_count == 1


# torch hides this warning, but not from those who want errors: tensors with a graph wait between compiled graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("overlap_pull", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_that_is_compiled_with_its_steps_trains_as_a_plain_one(
    jobs: Servers, overlap: bool, overlap_pull: bool
) -> None:
    def body(kv: DistKVStore, rank: int, is_compiled: bool) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        for p in net.parameters():
            nn.init.constant_(p, 0.5)
        options = {"overlap": overlap, "overlap_pull": overlap_pull}
        trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.25}, kv, **options)

        def run(x: Tensor) -> None:
            net(x).sum().backward()
            trainer.step(2)

        call = torch.compile(run, backend="aot_eager") if is_compiled else run
        for at in range(3):
            call(torch.full((2, 3), 0.1 * (at + 1)))
        trainer.close()
        return [p.detach().clone() for p in net.parameters()]

    torch._dynamo.reset()
    found, expected = (jobs.results(1, 2, lambda kv, rank, on=on: body(kv, rank, on)) for on in (True, False))
    assert same(found, expected)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    "look",
    [
        lambda loop: loop.loss(),
        lambda loop: loop.net.state_dict(),
        lambda loop: loop.trainer.step(16, ignore_stale_grad=True),
        lambda loop: loop.trainer.wait(),
        lambda loop: loop.trainer.state_dict(),
        lambda loop: loop.trainer.set_data(),
        lambda loop: loop.trainer.close(),
    ],
    ids=["forward", "state_dict", "step", "wait", "state_dict of the trainer", "set_data", "close"],
)
def test_an_error_of_the_round_is_raised_where_its_weights_are_needed(
    jobs: Servers, look: Callable[[Loop], Any]
) -> None:
    def body(kv: DistKVStore, rank: int) -> bool:
        loop = Loop(kv, rank, WHOLE)
        plain(loop, 0)
        loop.loss().backward()
        before = [p.detach().clone() for p in loop.net.parameters()]
        if rank:
            has_stepped.wait(LIMIT)
            loop.trainer.__exit__(RuntimeError, RuntimeError("of the script"), None)
            return True
        loop.trainer.step(16)
        has_stepped.set()
        with pytest.raises(WorkerLostError, match="rank 1"):
            look(loop)
        return all(map(torch.equal, before, loop.net.parameters()))

    has_stepped = threading.Event()
    assert jobs.results(2, 2, body) == [True, True]


def test_writes_behind_a_step_are_found_by_the_next_one(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> None:
        loop = Loop(kv, rank, WHOLE)
        for write in (lambda p: p.data.mul_(0.5), lambda p: p.detach().numpy().fill(0.5)):
            plain(loop, 0)
            write(loop.first)
            loop.loss().backward()
            with pytest.raises(WeightsWrittenError, match=r"0\.weight"):
                loop.step()
            loop.trainer.set_data()

    jobs.results(2, 2, body)


def test_a_process_that_is_forked_meanwhile_is_told(processes: Processes) -> None:
    script = """
w = torch.nn.Parameter(torch.ones(4))
trainer = kvtrainer.Trainer({"w": w}, "sgd", {"learning_rate": 1.0}, kv, overlap_pull=True)
for _ in range(2):
    w.grad = torch.ones(4)
    trainer.step(1)
if not os.fork():
    try:
        w + 1
    except kvtrainer.errors.KVStoreError as error:
        print("trainer.wait()" in str(error), flush=True)
    os._exit(0)
os.wait()
print(w.tolist(), flush=True)
"""
    worker = processes.worker(script, processes.servers(1), 0, 1, new_name())
    assert worker.line() == "True"
    assert worker.line() == str([-1.0] * 4)
    assert worker.end()[0] == 0


LAST = """
w = torch.nn.Parameter(torch.ones(200, 1000))
trainer = kvtrainer.Trainer({"w": w}, "sgd", {"learning_rate": 1.0}, kv, overlap_pull=True)
def step():
    w.grad = torch.full((200, 1000), 0.25)
    trainer.step(1)
step()
"""


def test_a_process_does_not_end_before_its_last_round(processes: Processes, members: Members) -> None:
    servers, name = processes.servers(2), new_name()
    worker = processes.worker(LAST + "step()\n", servers, 0, 2, name)
    kv = members.join(servers, 1, 2, name)
    w = Parameter(torch.zeros(200, 1000))
    trainer = kvtrainer.Trainer({"w": w}, "sgd", {"learning_rate": 1.0}, kv)
    for _ in range(2):
        w.grad = torch.full((200, 1000), 0.25)
        trainer.step(1)
    assert torch.equal(w, torch.zeros(200, 1000))
    assert worker.end() == (0, "")


def test_a_process_that_ends_says_that_its_last_round_has_failed(processes: Processes) -> None:
    servers = processes.servers(1)
    worker = processes.worker(LAST + "at('begun')\nstep()\n", servers, 0, 1, new_name(), DEAD_AFTER)
    assert worker.line() == "begun"
    servers[0].freeze()
    worker.go()
    assert "ServerUnreachableError" in worker.end()[1]


def test_the_exit_code_says_so_after_all_exit_handlers_have_run(processes: Processes, jobs: Servers) -> None:
    """Whether standard output is open, as that of rank 0, or closed."""
    last = """
import atexit
if kv.rank:
    atexit.register(os.write, 1, b'handlers have run\\n')
    sys.stdout.close()
else:
    atexit.register(print, 'handlers have run', flush=True)
trainer.param_groups[0]["momentum"] = 0.1 * kv.rank
step()
"""

    servers, name = ",".join(one.address for one in jobs.of(2)), new_name()
    command = [sys.executable, "-s", "-c", WORKER + LAST + last, name, str(LIMIT), str(LIMIT)]
    place = {"KVSTORE_NUM_WORKERS": "2", "KVSTORE_SERVERS": servers}
    # Programs of their own: what Python does at the very end counts.
    workers = [processes.start(command, {**place, "KVSTORE_RANK": str(rank)}) for rank in range(2)]
    for worker in workers:
        assert worker.line() == "handlers have run"
        code, said = worker.end()
        assert code == 120
        assert "ranks disagree on hyper-parameters" in said


@pytest.mark.parametrize("lacks", ["a gradient", "data"])
def test_a_round_that_fails_counts_on_workers_that_wait_for_it_as_well(jobs: Servers, lacks: str) -> None:
    """Or what schedulers make of the counts would differ, and every round after it would fail, too."""

    def body(kv: DistKVStore, rank: int) -> list[float]:
        pair = [Parameter(torch.ones(4)) for _ in range(2)]
        by_count = {"lr_scheduler": FactorScheduler(1, 0.5, base_lr=0.1)}
        trainer = kvtrainer.Trainer(pair, "sgd", by_count, kv, overlap_pull=True)

        def step(given: list[Parameter]) -> float:
            for p in pair:
                p.grad = None
            for p in given:
                p.grad = torch.ones(4)
            trainer.step(2, ignore_stale_grad=True)
            trainer.wait()
            return trainer.learning_rate

        def lacking() -> None:
            with trainer.join():
                if rank < 2:
                    step(pair)
                elif lacks == "a gradient":
                    step(pair[:1])

        found = [step(pair)]
        trainer.param_groups[0]["momentum"] = 0.9 * (rank == 1)
        with pytest.raises(KVStoreError, match="momentum"):
            lacking()
        trainer.param_groups[0]["momentum"] = 0.0
        return [*found, step(pair), step(pair)]

    assert jobs.results(3, 2, body) == [[0.1, 0.025, 0.0125]] * 3


def test_a_round_that_fails_counts_on_a_worker_that_publishes_weights_in_it(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> list[float]:
        p = Parameter(torch.ones(4))
        by_count = {"lr_scheduler": FactorScheduler(1, 0.5, base_lr=0.1)}
        trainer = kvtrainer.Trainer([p], "sgd", by_count, kv, overlap_pull=True)

        def step() -> float:
            p.grad = torch.ones(4)
            trainer.step(2)
            trainer.wait()
            return trainer.learning_rate

        found = [step()]
        with pytest.raises(PlanMismatchError):
            trainer.set_data() if rank else step()
        return [*found, step(), step()]

    assert jobs.results(2, 2, body) == [[0.1, 0.025, 0.0125]] * 2


def test_a_store_that_is_closed_waits_for_the_last_round_of_its_trainer(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> Tensor:
        w = Parameter(torch.ones(3))
        trainer = kvtrainer.Trainer({"w": w}, "sgd", {"learning_rate": 1.0}, kv, overlap_pull=True)
        w.grad = torch.ones(3)
        trainer.step()
        kv.close()
        return w + 1.0

    assert all(torch.equal(w, torch.ones(3)) for w in jobs.results(2, 2, body))


def test_a_trainer_that_was_closed_by_an_error_waits_for_nothing(jobs: Servers) -> None:
    def body(kv: DistKVStore, rank: int) -> bool:
        loop = Loop(kv, rank, WHOLE)
        plain(loop, 0)
        before = [p.detach().clone() for p in loop.net.parameters()]
        loop.loss().backward()
        if not rank:
            loop.trainer.step(16)
            loop.trainer.__exit__(RuntimeError, RuntimeError("of the script"), None)
            has_left.set()
            return all(map(torch.equal, before, loop.net.parameters()))
        has_left.wait(LIMIT)
        loop.trainer.step(16)  # what it had given counts
        loop.trainer.wait()
        return True

    has_left = threading.Event()
    assert jobs.results(2, 2, body) == [True, True]


# ---------------------------------------------------------------- weights that are mapped


@pytest.mark.filterwarnings("ignore::kvtrainer.errors.GradientWriteWarning")
@pytest.mark.parametrize("zero_copy", [True, False])
def test_long_weights_are_whole_before_any_is_read(
    processes: Processes, members: Members, monkeypatch: pytest.MonkeyPatch, zero_copy: bool
) -> None:
    monkeypatch.setenv("KVSTORE_TRANSPORT", "auto" if zero_copy else "tcp")
    servers = processes.servers(2)

    def train(kv: DistKVStore, rank: int, overlap_pull: bool) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(5)
        net = nn.Sequential(*[nn.Linear(500, 500, bias=False) for _ in range(3)])
        for p in net.parameters():
            nn.init.normal_(p, std=0.05, generator=drawn)
        options = {"overlap_pull": overlap_pull, "zero_copy": zero_copy}
        trainer = kvtrainer.Trainer(net, "adam", {"learning_rate": 0.01}, kv, **options)
        drawn.manual_seed(rank)
        seen = []
        for _ in range(4):
            found = net(torch.randn(4, 500, generator=drawn))
            seen.append(found.detach())
            found.square().sum().backward()
            trainer.step(8)
            for p in net.parameters():
                assert p.grad is not None
                p.grad.fill_(7.0)
        is_mapped = "memfd:kvstore-weights" in Path("/proc/self/maps").read_text()
        assert is_mapped or not zero_copy
        return [*seen, *[p.detach().clone() for p in net.parameters()]]

    found = []
    for on in (True, False):
        name = new_name()
        stores = [members.join(servers, rank, 2, name) for rank in range(2)]
        calls = [Call(lambda kv=kv, r=r, on=on: train(kv, r, on)) for r, kv in enumerate(stores)]
        found.append([call.outcome() for call in calls])
    assert same(*found)


class Interrupted(list[Any]):
    """Parameters of which somebody who goes through them the first time sees one."""

    def __iter__(self) -> Iterator[Any]:
        first, *others = list(self[:])
        yield first
        if not hasattr(self, "is_seen"):
            self.is_seen = True
            raise KeyboardInterrupt
        yield from others


def test_parameters_can_be_read_although_a_step_was_interrupted_while_they_became_such_that_wait() -> None:
    parameters = Interrupted([Parameter(torch.ones(2)), Parameter(torch.ones(2))])
    exchange, ends = mock.Mock(), list[Any]()
    exchange.wait_for.return_value = True
    keys = {id(p): key for key, p in enumerate(parameters[:])}
    with pytest.raises(KeyboardInterrupt):
        Awaited(exchange, mock.Mock(), parameters, keys, lambda came, error: ends.append(error))
    assert [p.sum().item() for p in parameters] == [2.0, 2.0]
    assert ends == [None]
    assert all(type(p) is Parameter for p in parameters)
