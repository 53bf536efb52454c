"""Parameters on a CUDA device whose gradients go to servers through pinned memory and a stream of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import WeightsWrittenError
from kvtrainer.kvstore import DistKVStore
from kvtrainer.sync.device_staging import Staging, StagingStream
from tests.support.stores import Servers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
STEPS = 5
LONG = 50_000_000
"""Cycles that a device is busy before it comes to what it is given."""


@pytest.mark.parametrize("numel", [1, 1000, 3_000_000])
def test_what_a_busy_device_has_yet_to_compute_is_copied_both_ways(numel: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    staging, flat = Staging(StagingStream(device)), {"float32": torch.zeros(numel, device=device)}
    for step in range(1, 4):
        torch.cuda._sleep(LONG)
        flat["float32"].add_(1)
        places = staging.down(flat)
        assert places["float32"].is_pinned()
        assert places["float32"].eq(2 * step - 1).all()
        places["float32"].add_(1)
        staging.up(flat, places)
        assert flat["float32"].clone().eq(2 * step).all()


@pytest.mark.parametrize("in_store", [True, False])
def test_weights_are_those_of_a_model_on_the_cpu(jobs: Servers, in_store: bool) -> None:
    """Gradients are exact in both places, so weights agree to the bit where servers update."""

    def body(kv: DistKVStore, rank: int, device: str) -> list[Tensor]:
        w = [nn.Parameter(torch.full((size,), 0.5, device=device)) for size in (3, 70_000, 500)]
        trainer = kvtrainer.Trainer(w, "adam", {"learning_rate": 0.1}, kv, update_on_kvstore=in_store)
        for at in range(STEPS):
            sum((p * float(rank + at + 1)).sum() for p in w).backward()  # type: ignore[union-attr]
            trainer.step(4)
        return [p.detach().cpu() for p in w]

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on))[0] for on in ("cuda", "cpu")]
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0 if in_store else 1e-6, atol=0 if in_store else 1e-6)


def test_long_weights_and_gradients_go_through_pinned_memory_of_servers(
    jobs: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients are exact in both places; what others than the Trainer did to weights is found, and may be given."""
    monkeypatch.setenv("KVSTORE_TRANSPORT", "auto")

    def body(kv: DistKVStore, rank: int, device: str) -> list[Tensor]:
        w = [nn.Parameter(torch.full((size,), 0.5, device=device)) for size in (3, 999_984, 70_001, 500_000)]
        trainer = kvtrainer.Trainer(w, "adam", {"learning_rate": 0.1}, kv)
        for at in range(3 * STEPS):
            if at == STEPS:
                with torch.no_grad():
                    w[1].mul_(2)
                trainer.set_data()
            if at == 2 * STEPS:
                w[1].data[:1000] += 1
                sum((p * 1.0).sum() for p in w).backward()  # type: ignore[union-attr]
                with pytest.raises(WeightsWrittenError):
                    trainer.step(4)
                trainer.set_data()
            trainer.zero_grad()
            sum((p * float(rank + at + 1)).sum() for p in w).backward()  # type: ignore[union-attr]
            trainer.step(4)
        return [p.detach().cpu() for p in w]

    found = [jobs.results(2, 2, lambda kv, rank, on=on: body(kv, rank, on))[0] for on in ("cuda", "cpu")]
    assert all(map(torch.equal, *found))
    assert "without pinned memory" not in caplog.text
