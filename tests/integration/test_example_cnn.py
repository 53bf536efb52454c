"""The example of a convolutional network learns digits; its options do the same from Python and from a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.examples import NEEDS_DIGITS, ROOT, example, run_with_ranks, run_with_servers

pytestmark = NEEDS_DIGITS
CONFIG = ["--config", str(ROOT / "examples" / "cnn.json")]
Weights = Mapping[str, Tensor]


def trained(folder: Path, *options: str) -> Weights:
    """The weights after one epoch in this process."""
    example("cnn").main(["--epochs", "1", "--save", str(folder / "weights.pt"), *options])
    return torch.load(folder / "weights.pt")  # type: ignore[no-any-return]


@functools.cache
def written_out(batches: int = 1) -> Weights:
    """The same epoch in plain PyTorch, with so many batches for an update."""
    cnn, plain = example("cnn"), example("digits_plain")
    net = cnn.build()
    norms = {id(m.weight) for m in net if isinstance(m, nn.GroupNorm)}
    norms |= {id(m.bias) for m in net if isinstance(m, nn.GroupNorm)}
    groups = [
        {
            "params": [p],
            "base": 0.1 * (2 if name.endswith("bias") and id(p) not in norms else 1),
            "weight_decay": 0.0 if id(p) in norms else 1e-3,
        }
        for name, p in net.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    x, y, _, _ = plain.load()
    windows, updates = plain.batches(len(y), 0), 22 // batches
    for step in range(updates):
        warm = min(1.0, 0.1 + 0.9 * step / 20)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * 0.5 * (1 + math.cos(math.pi * step / updates)) * warm
        optimizer.zero_grad()
        for batch in windows[step * batches :][:batches]:
            (nn.functional.cross_entropy(net(x[batch]), y[batch]) / batches).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net.state_dict()


def check_close(found: Weights, expected: Weights, tolerance: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=name)


def test_options_from_a_file_give_the_bits_that_they_give_from_python(tmp_path: Path) -> None:
    expected = trained(tmp_path)
    found = trained(tmp_path, *CONFIG)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    check_close(found, written_out())


@pytest.mark.parametrize("options", [["--replicas", "2"], ["--kvstore", "local"], CONFIG], ids="-".join)
def test_two_batches_for_an_update_are_as_in_plain_pytorch(tmp_path: Path, options: list[str]) -> None:
    check_close(trained(tmp_path, "--accumulate", "2", *options), written_out(batches=2))


def test_bfloat16_stays_close_to_full_precision(tmp_path: Path) -> None:
    found = trained(tmp_path, "--amp", "bfloat16", "--replicas", "2")
    check_close(found, written_out(), tolerance=0.05)


def test_two_workers_and_two_servers_train_what_one_process_trains(tmp_path: Path) -> None:
    run_with_servers("cnn", tmp_path, "--epochs", "1", "--save", str(tmp_path / "weights.pt"), *CONFIG)
    check_close(torch.load(tmp_path / "weights.pt"), written_out())


def test_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    run_with_ranks("cnn", tmp_path, "--epochs", "1", "--save", str(tmp_path / "weights.pt"), *CONFIG)
    check_close(torch.load(tmp_path / "weights.pt"), written_out())


@pytest.mark.full
def test_it_reads_97_of_100_held_out_digits(capsys: pytest.CaptureFixture[str]) -> None:
    example("cnn").main([])
    lines = capsys.readouterr().out.splitlines()
    assert "bias_lr_mult" in "".join(lines)
    assert float(lines[-1].rsplit(maxsplit=1)[-1].rstrip("%")) >= 97.0
