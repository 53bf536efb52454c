"""What each extra is for, in its smallest form; `extras.sh` runs one in an environment that has this extra alone.

python extra_uses.py EXTRA      # without one, lists all
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run(*command: object) -> str:
    """Run a program; gives what it printed, and raises if it fails."""
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return done.stdout


def examples_of_a_line() -> tuple[Any, Any]:
    """32 examples of a linear function."""
    import torch

    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def loss_of(net: Any) -> Any:
    x, y = examples_of_a_line()
    return (net(x) - y).square().mean()


def mmengine() -> None:
    import torch
    from mmengine.registry import OPTIM_WRAPPERS

    import kvtrainer.integrations.mmengine  # noqa: F401

    net = torch.nn.Linear(4, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    wrapper = OPTIM_WRAPPERS.build({"type": "TrainerOptimWrapper", "optimizer": sgd, "model": net})
    before = loss_of(net)
    wrapper.update_params(before)
    assert loss_of(net) < before


def lightning() -> None:
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from kvtrainer.integrations.lightning import LightningStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    before = loss_of(module.net).item()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy=LightningStrategy("local"), accelerator="cpu", max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(*examples_of_a_line()), batch_size=8))
    assert loss_of(module.net) < before


def accelerate() -> None:
    import torch

    from kvtrainer.integrations.accelerate import KVStoreAccelerator

    accelerator = KVStoreAccelerator("local")
    net = torch.nn.Linear(4, 1)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = loss_of(net)
    accelerator.backward(before)
    optimizer.step()
    assert loss_of(net) < before


def transformers() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from kvtrainer.integrations.transformers import KVStoreTrainer, join

    workers = join("local")
    words = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(0))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=5, n_embd=8, n_layer=1, n_head=2))
    args = TrainingArguments("run", num_train_epochs=1, report_to="none", disable_tqdm=True, use_cpu=True)
    data = [{"input_ids": one, "labels": one} for one in words]
    assert KVStoreTrainer(model, args, train_dataset=data, workers=workers).train().training_loss > 0


def skorch() -> None:
    import torch
    from skorch import NeuralNetRegressor

    from kvtrainer.integrations.skorch import KVStoreAccelerator, KVStoreMixin

    class Net(KVStoreMixin, NeuralNetRegressor):
        pass

    accelerator = KVStoreAccelerator("local")
    x, y = examples_of_a_line()
    net = Net(torch.nn.Linear(4, 1), accelerator=accelerator, max_epochs=2, lr=0.1, train_split=None)
    losses = net.fit(x.numpy(), y.numpy()).history[:, "train_loss"]
    assert losses[1] < losses[0]


def examples() -> None:
    said = run(
        sys.executable,
        "-m",
        "kvtrainer.jobs.kvlaunch",
        "-n",
        "1",
        sys.executable,
        ROOT / "examples/digits.py",
    )
    assert "all checks passed" in said


def plots() -> None:
    run(sys.executable, ROOT / "examples/plots.py", ROOT / "examples/results", "figures")
    assert Path("figures/digits.svg").stat().st_size > 1000


def notebook() -> None:
    import kvtrainer

    addend = 3
    with kvtrainer.local_cluster(workers=2, servers=1) as cluster:
        assert cluster.run(lambda x: x + addend, 4) == [7, 7]


def ray() -> None:
    from ray.train import ScalingConfig

    from kvtrainer.integrations.ray import KVStoreConfig, KVTrainer

    def train() -> float:
        import torch

        import kvtrainer

        weight = torch.nn.Parameter(torch.zeros(1))
        trainer = kvtrainer.Trainer({"w": weight}, "sgd", {"learning_rate": 0.5}, kvstore="dist_sync")
        weight.sum().backward()
        trainer.step()
        return float(weight)

    scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 0.5})
    result = KVTrainer(train, backend_config=KVStoreConfig(1, {"CPU": 0.5}), scaling_config=scaling).fit()
    assert result.return_value == -0.5


def watch() -> None:
    import kvtrainer
    from kvtrainer.watch.job import JobView, WatchedJob, WatchedWorker
    from kvtrainer.watch.top import format_metrics

    with kvtrainer.local_cluster(workers=1, servers=1) as cluster:
        assert cluster.servers[0] in run(
            sys.executable,
            "-m",
            "kvtrainer.watch.top",
            "--once",
            *cluster.servers,
        )
    worker = WatchedWorker(0, "here", "", "", 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, -1, False)
    view = JobView(0.0, [], [WatchedJob("job", "sync", 1, 1.0, 1, 1, [worker], [], [])])
    assert b"kvstore_worker_" in format_metrics(view)


def arrow() -> None:
    import pyarrow as pa
    import pyarrow.parquet

    import kvtrainer

    pyarrow.parquet.write_table(pa.table({"ids": [5], "vector": [[1.0, 2.0]]}), "rows.parquet")
    table = kvtrainer.Embedding(2)
    with kvtrainer.Trainer([("table", table.weight)], "sgd", kvstore="local"):
        table.load_rows("rows.parquet")
        assert table([5]).tolist() == [[1.0, 2.0]]


def docs() -> None:
    run(
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        ROOT / "mkdocs.yml",
        "-d",
        Path.cwd() / "site",
    )
    assert Path("site/index.html").exists()


def test() -> None:
    code = "from hypothesis import given, strategies\n@given(strategies.integers())\ndef test_one(number): pass\n"
    Path("test_one.py").write_text(code)
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-n", "1", "--timeout", "60", "test_one.py")


def dev() -> None:
    run("ruff", "check", ROOT / "kvtrainer")
    for command in (["mypy", "--version"], ["lint-imports", "--help"], ["pytest", "--version"]):
        run(*command)
    run(sys.executable, "-m", "build", "--version")


USES: dict[str, Callable[[], None]] = {
    use.__name__: use
    for use in (
        mmengine,
        lightning,
        accelerate,
        transformers,
        skorch,
        examples,
        plots,
        notebook,
        ray,
        watch,
        arrow,
    )
}
USES |= {use.__name__: use for use in (docs, test, dev)}

if __name__ == "__main__":
    if sys.argv[1:]:
        USES[sys.argv[1]]()
    else:
        print(*USES)
