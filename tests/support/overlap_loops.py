"""Loops that train with and without `overlap=True`, and do with gradients what loops do, or nothing."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import StaleGradientError, WeightsWrittenError

STEPS = 6
SIZES = (40, 300, 70, 9)
"""Of the layers. The second weight has several slices and shares none; the others share theirs."""


class Loop:
    """One worker's training."""

    def __init__(self, kv: Any, rank: int, overlap: bool, **options: Any) -> None:
        self.net = nn.Sequential(*[nn.Linear(*pair) for pair in itertools.pairwise(SIZES)])
        chance = torch.Generator().manual_seed(3)
        for p in self.net.parameters():
            nn.init.uniform_(p, -0.1, 0.1, generator=chance)
        self.first, self.second, self.last = [self.net[at].weight for at in range(3)]
        self.rank = rank
        self.chance = torch.Generator().manual_seed(rank)
        given = {"optimizer": "adam", "optimizer_params": {"learning_rate": 0.01}, "kvstore": kv, **options}
        self.trainer = kvtrainer.Trainer(self.net, overlap=overlap, **given)
        self.digest = hashlib.sha256()

    def loss(self) -> Tensor:
        """Of a batch of its own."""
        x = torch.randn(8, SIZES[0], generator=self.chance)
        found: Tensor = self.net(x).square().sum()
        return found

    def step(self, *args: Any, **options: Any) -> None:
        self.trainer.step(16, *args, **options)
        self.note()

    def note(self) -> None:
        """Remember the weights after a step."""
        for p in self.net.parameters():
            self.digest.update(p.detach().numpy().tobytes())

    def received(self) -> int:
        """The bytes of gradients that the servers have got so far, of all workers."""
        return sum(row["bytes_in"] for one in self.trainer.server_stats() for row in one["tables"])


Case = Callable[[Loop, int], None]
"""Makes one step, of this number."""


def plain(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.step()


def grown(loop: Loop) -> None:
    """Make a step in which a layer comes, after the backward pass."""
    more = nn.Linear(SIZES[-1], 3)
    nn.init.constant_(more.weight, 0.1)
    nn.init.constant_(more.bias, 0.1)
    loop.loss().backward()
    loop.trainer.add_param_group({"params": more.parameters()})
    loop.net.append(more)
    loop.step(ignore_stale_grad=True)


def two_passes(loop: Loop, at: int) -> None:
    """And three in some steps, so that what came after two was too early."""
    for _ in range(2 + (at % 3 == 2)):
        loop.loss().backward()
    loop.step()


def one_behind(loop: Loop, at: int) -> None:
    """A worker makes fewer passes than in its last step, and waits for more in vain, or more, and was too early."""
    for _ in range(1 + loop.rank * (at % 2)):
        loop.loss().backward()
    loop.step()


def window(loop: Loop, at: int) -> None:
    for _ in range(2):
        loop.trainer.update_params(loop.loss(), 16)
    loop.note()


def clipped_by_the_loop(loop: Loop, at: int) -> None:
    loop.loss().backward()
    if at % 2:
        nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
    loop.step()


def one_edited(loop: Loop, at: int) -> None:
    """In ways that torch knows nothing of."""
    loop.loss().backward()
    for p in (loop.second, loop.last):
        assert p.grad is not None
    if at % 3 == 1:
        loop.second.grad.data[0, :5] *= -1.0
    if at % 3 == 2:
        loop.last.grad.numpy()[:] = 0.5
    loop.step()


def replaced(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.last.grad = torch.full_like(loop.last, 0.25 * (loop.rank + 1))
    loop.step()


def dropped(loop: Loop, at: int) -> None:
    """Gradients that were sent are not given, on one worker or on both, of whole slices and of parts."""
    loop.loss().backward()
    if at % 2 == loop.rank or at == 4:
        loop.second.grad = None
    if at % 3:
        loop.net[2].bias.grad = None
    loop.step(ignore_stale_grad=True)


def second_batch_alone(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.trainer.zero_grad()
    loop.loss().backward()
    loop.step()


def added_up(loop: Loop, at: int) -> None:
    """grad_req changes while training; 'add' never drops."""
    for p in loop.net.parameters():
        p.grad_req = "add" if at < 3 else "write"
    loop.second.grad_req = "null" if at == 4 else "add"
    loop.loss().backward()
    loop.step()


def overflowing(loop: Loop, at: int) -> None:
    loss = loop.loss()
    (loss * float("inf") if at % 3 == 1 and loop.rank else loss).backward()
    loop.step()


def published(loop: Loop, at: int) -> None:
    """New values for everybody come between a backward pass and its step."""
    loop.loss().backward()
    if at % 2:
        loop.trainer.set_data({"0.weight": torch.full_like(loop.first, 0.01 * at)})
    loop.step()


def by_halves(loop: Loop, at: int) -> None:
    loop.loss().backward()
    loop.trainer.allreduce_grads()
    nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
    loop.trainer.update(16)
    loop.note()


def not_reduced(loop: Loop, at: int) -> None:
    """An update that no other worker hears of gathers gradients as well."""
    loop.loss().backward()
    if at == 1:
        loop.trainer.update(16)
    loop.loss().backward()
    loop.step()


def uneven(loop: Loop, at: int) -> None:
    """A worker leaves the block with a gradient that it never gives."""
    with loop.trainer.join():
        for _ in range(1 + loop.rank * (at % 3)):
            plain(loop, at)
        loop.loss().backward()


def stale(loop: Loop, at: int) -> None:
    """A step that is refused has no effect on the next one."""
    loop.loss().backward()
    kept = loop.last.grad
    loop.last.grad = None
    with pytest.raises(StaleGradientError):
        loop.step()
    loop.last.grad = kept
    loop.step()


def written(loop: Loop, at: int) -> None:
    """So has one that finds weights that it would overwrite."""
    loop.loss().backward()
    if at:
        loop.last.data.mul_(0.5)
        with pytest.raises(WeightsWrittenError):
            loop.step()
        loop.trainer.set_data()
    loop.step()


CLIP = {"clip_grad": {"max_norm": 0.3}}
SKIP = {"on_nonfinite": "skip"}
BY_WORKERS = {"update_on_kvstore": False}
CODECS: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.05},
    "1bit": {"type": "1bit", "threshold": 0.05},
    "topk": {"type": "topk", "ratio": 0.1},
    "fp16": {"type": "fp16"},
}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (plain, {}),
    "sgd, averaged": (
        plain,
        {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.1, "momentum": 0.9}},
    ),
    "two passes": (two_passes, {}),
    "one behind": (one_behind, {}),
    "a window of two": (window, {"accumulate": 2}),
    "clip_grad": (plain, CLIP),
    "clip_grad, dropped": (dropped, CLIP),
    "clipped by the loop": (clipped_by_the_loop, {}),
    "one edited": (one_edited, {}),
    "replaced": (replaced, {}),
    "dropped": (dropped, {}),
    "second batch alone": (second_batch_alone, {}),
    "added up": (added_up, {}),
    "overflowing": (overflowing, SKIP),
    "amp": (window, {"amp": {"init_scale": 64.0}}),
    "published": (published, {}),
    "by workers": (plain, BY_WORKERS),
    "by halves": (by_halves, BY_WORKERS),
    "not reduced": (not_reduced, BY_WORKERS),
    "uneven": (uneven, {}),
    "stale": (stale, {}),
    "written": (written, {}),
    "p3": (plain, {}),
    **{f"{name}, edited": (one_edited, {"compression_params": codec}) for name, codec in CODECS.items()},
    "2bit, dropped": (dropped, {"compression_params": CODECS["2bit"]}),
    "2bit, overflowing": (overflowing, {"compression_params": CODECS["2bit"], **SKIP}),
    "2bit, published": (published, {"compression_params": CODECS["2bit"]}),
}
