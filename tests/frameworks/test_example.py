"""The example of Lightning reads digits as well as a plain loop over the same batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from tests.frameworks.jobs import ROOT, WORKERS, launch, need
from tests.support.examples import example

need("lightning")
pytest.importorskip("sklearn", reason="the data are not installed: pip install scikit-learn")
EPOCHS = 2
RUN = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
sys.argv[1:] = ["--epochs", "{EPOCHS}", "--out", sys.argv[1] + "/found.json"]
runpy.run_module("lightning_digits", run_name="__main__")
"""


def accuracies_of_a_plain_loop() -> list[float]:
    """Of one process, over the batches that both workers have together."""
    plain = example("digits_plain")
    x, y, held_out_x, held_out_y = plain.load()
    net, share, found = plain.build(), plain.BATCH // WORKERS, []
    optimizer = torch.optim.SGD(net.parameters(), lr=plain.LEARNING_RATE, momentum=plain.MOMENTUM)
    samplers = [DistributedSampler(TensorDataset(x, y), WORKERS, rank) for rank in range(WORKERS)]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        orders = [torch.tensor(list(sampler)).split(share) for sampler in samplers]
        for parts in zip(*orders, strict=True):
            optimizer.zero_grad()
            for part in parts:
                (torch.nn.functional.cross_entropy(net(x[part]), y[part]) / WORKERS).backward()
            optimizer.step()
        found.append(plain.accuracy(net, held_out_x, held_out_y))
    return found


def test_it_reads_digits_as_well_as_a_plain_loop_over_the_same_batches(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(RUN)
    done = launch(tmp_path / "run.py", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())["accuracy"]
    assert found == pytest.approx(accuracies_of_a_plain_loop(), abs=2 / 360)
    assert found[-1] > 0.85
