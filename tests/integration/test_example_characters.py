"""The example of a transformer learns to guess characters as a plain PyTorch loop does."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.examples import example, run_with_servers

STEPS = 6


@functools.cache
def in_plain_pytorch() -> nn.Module:
    """The network after as many steps of torch's own optimizer, clipping and schedule on whole batches."""
    characters = example("characters")
    text, _ = characters.load()
    net = characters.Transformer()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS, cycle_momentum=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        windows = characters.windows(text, step)
        scores = net(windows[:, :-1])
        nn.functional.cross_entropy(scores.transpose(1, 2), windows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return net


def check(found: dict[str, Any]) -> None:
    """Compare what held-out characters cost: weights of which the loss knows nothing (biases of keys) may differ."""
    characters = example("characters")
    assert len(found["bits"]) == STEPS
    assert found["held_out"] == pytest.approx(
        characters.bits(in_plain_pytorch(), characters.load()[1]), abs=1e-3
    )


@pytest.mark.full
def test_one_process_learns_what_a_plain_loop_learns(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    example("characters").main(["--steps", str(STEPS), "--out", str(out)])
    check(json.loads(out.read_text()))


def test_two_workers_and_two_servers_learn_what_a_plain_loop_learns(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run_with_servers("characters", tmp_path, "--steps", str(STEPS), "--out", str(out))
    check(json.loads(out.read_text()))


def test_counts_of_pairs_guess_a_text_in_which_each_character_follows_one_other_for_nothing() -> None:
    text = torch.arange(3).repeat(4000)
    assert example("characters").counted_bits(text, text) == pytest.approx(0.0, abs=0.01)


def test_counts_of_pairs_guess_random_characters_no_better_than_by_chance() -> None:
    text = torch.randint(4, (40000,), generator=torch.Generator().manual_seed(0))
    assert example("characters").counted_bits(text[:30000], text[30000:]) == pytest.approx(2.0, abs=0.01)
