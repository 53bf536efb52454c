"""A table in a store, whose rows are interleaved over its slices, trains and is saved as one that every worker has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.kvstore import DistKVStore
from tests.support.stores import Servers

TABLE = (3_001, 24)
"""Eight slices of one length, and a short one."""
STEPS = 3


def batch_of(rank: int, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(TABLE[0], (200, 2), generator=drawn) // 3


def train(
    kv: DistKVStore, rank: int, stored: bool, state: Path, loads: bool = False, **options: Any
) -> tuple[Tensor, dict[str, Any], list[Any]]:
    """The table after some steps, its optimizer's state, and the norms of the gradients."""
    start = torch.rand(TABLE, generator=torch.Generator().manual_seed(1))
    rows_of: Callable[[Tensor], Tensor]
    if stored:
        table = kvtrainer.RowSparseParameter(TABLE, start)
        rows_of = table.row_sparse_data
    else:
        rows_of = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
        table = rows_of.weight
    trainer = kvtrainer.Trainer({"table": table}, "adam", {"lazy_update": True}, kv, **options)
    if loads:
        trainer.load_states(state)
    norms = []
    for step in range(STEPS):
        rows_of(batch_of(rank, step)).square().sum().backward()
        norms.append(trainer.step(2).grad_norm)
    if not rank and not loads:
        trainer.save_states(state)
    kv.barrier()
    return table.detach().clone(), trainer.state_dict()["state"][0], norms


def on(jobs: Servers, servers: int, *given: Any, **options: Any) -> tuple[Tensor, dict[str, Any], list[Any]]:
    """What rank 0 of two has."""
    result: tuple[Tensor, dict[str, Any], list[Any]]
    result, _ = jobs.results(2, servers, lambda kv, rank: train(kv, rank, *given, **options))
    return result


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_stored_table_is_saved_as_a_held_one(jobs: Servers, tmp_path: Path, servers: int) -> None:
    weights, state, _ = on(jobs, 1, False, tmp_path / "held")
    found, kept, _ = on(jobs, servers, True, tmp_path / "stored")
    assert torch.equal(found, weights)
    assert kept.keys() == state.keys()
    assert all(torch.equal(kept[name], value) for name, value in state.items())


@pytest.mark.parametrize("saves_stored", [True, False])
def test_training_resumes_from_the_other_kind(jobs: Servers, tmp_path: Path, saves_stored: bool) -> None:
    on(jobs, 3, saves_stored, tmp_path / "states")
    expected, state, _ = on(jobs, 2, saves_stored, tmp_path / "states", loads=True)
    found, kept, _ = on(jobs, 2, not saves_stored, tmp_path / "states", loads=True)
    assert torch.equal(found, expected)
    assert all(torch.equal(kept[name], value) for name, value in state.items())


def test_norms_have_the_same_bits_for_any_number_of_servers(jobs: Servers, tmp_path: Path) -> None:
    clip = {"clip_grad": {"max_norm": 0.1}}
    _, _, expected = on(jobs, 1, False, tmp_path / "held", **clip)
    first, *others = [on(jobs, servers, True, tmp_path / "stored", **clip) for servers in (1, 2, 3)]
    assert first[2] == pytest.approx(expected, rel=1e-12)
    for weights, _, norms in others:
        assert norms == first[2]
        assert torch.equal(weights, first[0])
