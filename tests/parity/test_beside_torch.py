"""Torch's optimizers, clipping and collectives beside a Trainer, where torch's result is a surprise.

These are the rows of docs/torch_optimizers.md. Each test runs both and compares both with a closed form. What a
Trainer does has to hold with every version of torch; what torch does is checked for the version in which it was seen
alone, because a later one may have mended it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn import Conv2d, Embedding, Linear, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from kvtrainer import Trainer
from kvtrainer.amp import GradScaler
from kvtrainer.common.env import TRANSPORT
from tests.support.jobs import Job, Results, begin_group, run_job
from tests.support.scenarios import Pairs, check_every_rank, scenarios_of

PAGE = Path(__file__).parents[2] / "docs/torch_optimizers.md"
SEEN = "2.13.0"
"""The version of torch in which its results below were seen."""
IS_SEEN = torch.__version__.partition("+")[0] == SEEN
WAYS = ("memory", "gloo", "dist_sync")
"""How ranks exchange gradients: in this host's memory, as between hosts, by a server."""


def torch_gives(found: Any, expected: Any) -> None:
    """Check a surprising result of torch's, in the version in which it was seen."""
    assert not IS_SEEN or found == expected


def step_both(
    parameters: Callable[[], Parameter], grad: Callable[[], Tensor], name: str, **options: Any
) -> tuple[Tensor, Tensor]:
    """The weights after one step of torch's optimizer, and after one of a Trainer with the same."""
    theirs, ours = parameters(), parameters()
    theirs.grad, ours.grad = grad(), grad()
    getattr(torch.optim, name)([theirs], **options).step()
    Trainer([ours], f"torch:{name}", options).step()
    return theirs.detach(), ours.detach()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_transposed_gradient_reaches_the_elements_that_it_is_of_with_fused(name: str) -> None:
    grad = torch.arange(6.0).view(3, 2).t()  # 0 2 4 / 1 3 5, in memory 0 1 2 3 4 5
    theirs, ours = step_both(
        lambda: Parameter(torch.zeros(2, 3)), lambda: grad.detach(), name, lr=1.0, fused=True
    )
    # The first step of all but SGD has the length of the rate, and the direction of the gradient.
    expected, as_it_lies = (-grad, -torch.arange(6.0).view(2, 3))
    if name != "SGD":
        expected, as_it_lies = expected.sign(), as_it_lies.sign()
    assert torch.allclose(ours, expected)
    torch_gives(torch.allclose(theirs, as_it_lies), True)


@pytest.mark.filterwarnings("ignore::kvtrainer.errors.MemoryFormatWarning")
def test_a_contiguous_checkpoint_goes_on_in_a_channels_last_model() -> None:
    """One step by a gradient of 0, 1, 2 …, and after resuming one by zeros: half of the first, from the momentum."""
    grad, found = torch.arange(4.0 * 3 * 3 * 3).view(4, 3, 3, 3), {}
    options = {"lr": 1.0, "momentum": 0.5}
    for kind in ("torch", "ours"):

        def optimizer_of(net: Conv2d, kind: str = kind) -> Any:
            if kind == "torch":
                return torch.optim.SGD(net.parameters(), fused=True, **options)
            return Trainer(net, "torch:SGD", {**options, "fused": True})

        first, then = (Conv2d(3, 4, 3, bias=False) for _ in range(2))
        then = then.to(memory_format=torch.channels_last)
        before, after = optimizer_of(first), optimizer_of(then)
        first.weight.grad = grad.clone()
        before.step()
        then.load_state_dict(first.state_dict())
        after.load_state_dict(before.state_dict())
        torch.nn.init.zeros_(then.weight)
        then.weight.grad = torch.zeros_like(then.weight)
        after.step()
        found[kind] = then.weight.detach()
    assert torch.equal(found["ours"], -0.5 * grad)
    in_memory = torch.empty_like(found["torch"])
    torch.as_strided(in_memory, (108,), (1,)).copy_(torch.arange(108.0))
    torch_gives(torch.equal(found["torch"], -0.5 * in_memory), True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_weights_move_with_fused_sgd(dtype: torch.dtype, momentum: float) -> None:
    """Of 100 weights torch moves the 4 behind the last full vector."""
    theirs, ours = step_both(
        lambda: Parameter(torch.ones(100, dtype=dtype)),
        lambda: torch.ones(100, dtype=dtype),
        "SGD",
        lr=0.5,
        momentum=momentum,
        fused=True,
    )
    assert ours.tolist() == [0.5] * 100
    torch_gives(theirs.tolist(), [1.0] * 96 + [0.5] * 4)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has written to holds NaN: torch's own way of finding its use."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, GradScaler], ids=["torchs scaler", "ours"])
def test_momentum_begins_with_the_first_step_that_does_not_overflow(scaler_class: Any) -> None:
    found = {}
    for kind in ("torch", "ours"):
        w = Parameter(torch.zeros(100))
        options = {"lr": 1.0, "momentum": 0.9, "fused": True}
        optimizer: Any = torch.optim.SGD([w], **options)
        if kind == "ours":
            optimizer = Trainer([w], "torch:SGD", options)
        scaler = (torch.amp.GradScaler if kind == "torch" else scaler_class)("cpu", init_scale=8.0)
        for slope in (torch.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale((w * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        found[kind] = w.detach()
    assert found["ours"].tolist() == [-1.0] * 100
    torch_gives(bool(found["torch"].isnan().all()), True)  # whatever was in the momentum's memory


@pytest.mark.parametrize(
    ("dtype", "value", "count"),
    [
        (torch.float16, 400.0, 40_000),  # a norm of 80,000, above float16's 65,504
        (torch.float16, 60_000.0, 4),
        (torch.bfloat16, 1e20, 4),
        (torch.float32, 1e20, 4),
        (torch.float64, 1e200, 4),
    ],
    ids=str,
)
def test_clipping_limits_a_finite_gradient_whose_norm_or_its_square_is_too_large(
    dtype: torch.dtype, value: float, count: int
) -> None:
    theirs = Parameter(torch.zeros(count, dtype=dtype))
    theirs.grad = torch.full_like(theirs, value)
    norm = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    torch_gives((norm.item(), theirs.grad.unique().tolist()), (torch.inf, [0.0]))
    ours = Parameter(torch.zeros(count, dtype=dtype))
    ours.grad = torch.full_like(ours, value)
    result = Trainer([ours], "torch:SGD", {"lr": 1.0}, clip_grad={"max_norm": 1.0}).step()
    # All elements are equal, so the norm is √count times one, and 1 after clipping.
    assert result.grad_norm == pytest.approx(value * count**0.5, rel=1e-2)
    assert torch.allclose(ours, torch.full_like(ours, -(count**-0.5)), rtol=1e-2)


def test_clipping_takes_sparse_gradients() -> None:
    def grad() -> Tensor:
        half = torch.tensor([[1.5, 2.0], [1.5, 2.0]])  # of one row, twice
        return torch.sparse_coo_tensor(torch.tensor([[1, 1]]), half, (3, 2), check_invariants=True)

    theirs, ours = (Parameter(torch.zeros(3, 2)) for _ in range(2))
    theirs.grad, ours.grad = grad(), grad()
    if IS_SEEN:
        with pytest.raises(NotImplementedError):
            torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    result = Trainer([ours], "torch:SGD", {"lr": 1.0}, clip_grad={"max_norm": 1.0}).step()
    assert result.grad_norm == 5.0
    assert torch.allclose(ours, torch.tensor([[0.0, 0.0], [-0.6, -0.8], [0.0, 0.0]]), atol=1e-6)


def test_reading_the_state_before_the_first_step_leaves_that_step_as_it_is() -> None:
    """AdamW's first step is the rate, after a decay of 0.1 · 0.5. Torch has taken a step by zeros before."""
    found, options = {}, {"lr": 0.1, "weight_decay": 0.5}
    for kind in ("torch", "ours"):
        net = Linear(1, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        optimizer: Optimizer = torch.optim.AdamW(net.parameters(), **options)  # type: ignore[arg-type]
        if kind == "ours":
            optimizer = Trainer(net, "torch:AdamW", options)
        get_optimizer_state_dict(net, optimizer)
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
        found[kind] = net.weight.item()
    assert found["ours"] == pytest.approx(1 - 0.05 - 0.1, rel=1e-6)
    mean, square = 0.1 / (1 - 0.9**2), 0.001 / (1 - 0.999**2)
    torch_gives(found["torch"], pytest.approx(1 - 0.05 - 0.1 * mean / square**0.5, rel=1e-6))


@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning"
)  # of torch, without a process group
@pytest.mark.parametrize("is_stateful", [False, True], ids=["dict", "stateful"])
def test_a_distributed_checkpoint_loads_into_an_optimizer_that_has_not_stepped(
    tmp_path: Path, is_stateful: bool
) -> None:
    """A step by ones, and after resuming one by zeros: half of the first, from the momentum."""
    found = {}
    for kind in ("torch", "ours"):

        def optimizer_of(w: Parameter, kind: str = kind) -> Any:
            options = {"lr": 1.0, "momentum": 0.5}
            return torch.optim.SGD([w], **options) if kind == "torch" else Trainer([w], "torch:SGD", options)

        first, then = Parameter(torch.zeros(2)), Parameter(torch.zeros(2))
        before, after = optimizer_of(first), optimizer_of(then)
        first.grad = torch.ones(2)
        before.step()
        saved = {"optimizer": before if is_stateful else before.state_dict()}
        dcp.save(saved, checkpoint_id=tmp_path / kind)
        loaded = {"optimizer": after if is_stateful else after.state_dict()}
        dcp.load(loaded, checkpoint_id=tmp_path / kind)
        if not is_stateful:
            after.load_state_dict(loaded["optimizer"])
        then.grad = torch.zeros(2)
        after.step()
        found[kind] = then.tolist()
    assert found["ours"] == [-0.5, -0.5]
    torch_gives(found["torch"], [0.0, 0.0])


def test_rows_of_bfloat16_that_occur_often_add_up_in_single_precision() -> None:
    """Beside 256 the next number is 258."""
    theirs, ours = (Embedding(3, 2, sparse=True, dtype=torch.bfloat16) for _ in range(2))
    optimizers = (torch.optim.SGD(theirs.parameters(), lr=1.0), Trainer(ours, "torch:SGD", {"lr": 1.0}))
    for table, optimizer in zip((theirs, ours), optimizers, strict=True):
        torch.nn.init.zeros_(table.weight)
        table(torch.ones(300, dtype=torch.int64)).sum().backward()
        optimizer.step()
    assert ours.weight.tolist() == [[0, 0], [-300, -300], [0, 0]]
    torch_gives(theirs.weight.tolist(), [[0, 0], [-256, -256], [0, 0]])


def trainer_by(way: str, w: Parameter, **options: Any) -> Trainer:
    """A Trainer of plain SGD with rate 1 over ranks; `way` of WAYS, of which the first two are one store."""
    store = "dist_sync" if way == "dist_sync" else "device"
    return Trainer([("w", w)], "torch:SGD", {"lr": 1.0}, kvstore=store, **options)


def equal_gradients_have_exactly_themselves_as_mean(rank: int, ranks: int, way: str) -> Pairs:
    """DDP divides each by three first, which rounds."""
    grad = torch.arange(1.0, 101.0)
    net = Linear(100, 1, bias=False)
    ddp = DistributedDataParallel(net)
    ddp(grad.view(1, -1)).sum().backward()
    assert net.weight.grad is not None
    if IS_SEEN:
        yield int((net.weight.grad.view(-1) != grad).sum()), INEXACT
    w = Parameter(torch.zeros(100))
    trainer = trainer_by(way, w)
    (w * grad).sum().backward()
    trainer.step()
    yield int((w.detach() != -grad).sum()), 0
    trainer.close()


def a_nan_of_any_rank_is_seen_by_all(rank: int, ranks: int, way: str) -> Pairs:
    for other in range(ranks):
        mine = torch.full((1,), torch.nan if rank == other else 1.0)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        if IS_SEEN:
            yield bool(mine.isnan()), other == 0
    limits: list[dict[str, Any]] = [{"on_nonfinite": "skip"}, {"clip_grad": {"max_norm": 9.0}}]
    limits.append({"clip_grad": {"max_norm": 9.0, "norm_type": "inf"}})
    for other in range(ranks):
        for options in (*limits, {}):
            w, slopes = Parameter(torch.zeros(100)), torch.ones(100)
            slopes[99] = torch.nan if rank == other else 1.0
            with trainer_by(way, w, **options) as trainer:
                scaler = GradScaler("cpu", init_scale=8.0, enabled=not options)
                scaler.scale((w * slopes).sum()).backward()
                result = scaler.step(trainer)
                scaler.update()
                yield result.skipped, True
                yield w.tolist(), [0.0] * 100
                yield scaler.get_scale(), 1.0 if options else 4.0


def a_sum_does_not_depend_on_where_its_element_lies(rank: int, ranks: int, way: str) -> Pairs:
    """1 + 10⁸ − 10⁸ is 0 from left to right in single precision, and 1 where the last two come first."""
    addend = (1.0, 1e8, -1e8)[rank]
    mine = torch.full((99,), addend)
    dist.all_reduce(mine)
    if IS_SEEN:
        yield mine.unique().tolist(), [0.0, 1.0]
    w = Parameter(torch.zeros(99))
    with trainer_by(way, w) as trainer:
        w.grad = torch.full((99,), addend)
        trainer.step(1)
        yield (len(w.unique()) == 1, w[0].item()), (way != "gloo", w[0].item() if way == "gloo" else 0.0)


INEXACT = 12
SCENARIOS = scenarios_of(globals())


def run(rank: int, ranks: int, place: str) -> Results:
    found = {}
    for way in WAYS:
        os.environ[TRANSPORT] = "tcp" if way == "gloo" else "shm"
        begin_group(rank, ranks, Path(place, f"meeting by {way}"))
        found |= {f"{name} {way}": list(one(rank, ranks, way)) for name, one in SCENARIOS.items()}
        dist.barrier()
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("beside torch")
    return run_job(run, folder, 3, 1, str(folder))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_three_ranks(job: Job, scenario: str, way: str) -> None:
    check_every_rank(job, f"{scenario} {way}")


def test_every_row_of_the_page_has_its_test_here() -> None:
    rows = re.findall(r"^\| \*\*.*\| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    general = {test_on_three_ranks.__name__, test_every_row_of_the_page_has_its_test_here.__name__}
    assert sorted(rows) == sorted(
        {name for name in globals() if name.startswith("test_")} - general | {*SCENARIOS}
    )
