"""The example of Lightning reads digits as well as a plain loop over the same batches, and as its page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from tests.frameworks.jobs import ROOT, WORKERS, launch, need
from tests.support.examples import example
from tests.support.limits import JOB_LIMIT
from tests.support.pages import link_checkout, shell

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


def test_the_command_of_the_page_ends_at_the_accuracy_that_the_page_says(tmp_path: Path) -> None:
    link_checkout(tmp_path)
    command = "kvlaunch -n 2 -s 2 python examples/lightning_digits.py"
    output = shell(f"{command} 2>&1", tmp_path, JOB_LIMIT, PYTHONPATH=str(ROOT))
    [found] = re.findall(r"^\[w0\] held-out accuracy ([\d.]+)% after 25 epochs$", output, re.MULTILINE)
    [said] = re.findall(r"it\s+ends\s+at\s+([\d.]+)\s+%", (ROOT / "docs/examples.md").read_text())
    assert float(found) == pytest.approx(float(said), abs=1.0)


def test_what_the_page_installs_brings_all_that_the_example_needs(tmp_path: Path) -> None:
    """pip finds all of it in this environment, and so would install nothing but the project."""
    link_checkout(tmp_path)
    command = "pip install '.[lightning,examples]'"
    output = shell(f"python -m {command} --dry-run --no-index --no-build-isolation 2>&1", tmp_path)
    [would] = re.findall(r"^Would install (.*)$", output, re.MULTILINE)
    assert re.fullmatch(r"kvtrainer-[\w.]+", would)
    assert "does not provide the extra" not in output
