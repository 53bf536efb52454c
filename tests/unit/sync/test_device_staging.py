"""Copies between a device, which is simulated, and the host see what they have to, whatever runs early or late."""

from __future__ import annotations

import gc
import mmap
from functools import partial

import numpy as np
import pytest
import torch

from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.transport.arena import SharedArena, make_shared_memory
from kvtrainer.sync.device_staging import Staging, StagingSink
from tests.support.device_streams import CURRENT, SCHEDULES, SIDE, Streams

LONG = 1 << 20
"""Elements of several slices."""


@SCHEDULES
def test_the_host_reads_what_was_computed_before_it_asked(eager: tuple[str, ...]) -> None:
    streams, grads = Streams(eager), {"float32": torch.zeros(4)}
    staging = Staging(streams)
    for step in range(1, 4):
        streams.compute(lambda step=step: grads["float32"].fill_(step))
        places = staging.down(grads)
        assert places["float32"].tolist() == [step] * 4


@SCHEDULES
def test_the_device_computes_with_what_came_back_and_before_with_what_was_there(
    eager: tuple[str, ...],
) -> None:
    streams, weights, seen = Streams(eager), {"float32": torch.zeros(2)}, []
    staging = Staging(streams)
    for step in range(1, 4):
        places = staging.places(weights)
        streams.compute(lambda: seen.append(weights["float32"].tolist()))
        places["float32"].fill_(step)
        staging.up(weights, places)
        streams.compute(lambda: seen.append(weights["float32"].tolist()))
    streams.run(CURRENT)
    assert seen == [[0.0] * 2, [1.0] * 2, [1.0] * 2, [2.0] * 2, [2.0] * 2, [3.0] * 2]


@SCHEDULES
def test_a_place_is_not_given_before_what_it_held_is_on_the_device(eager: tuple[str, ...]) -> None:
    streams, weights = Streams(eager), {"float32": torch.zeros(2)}
    staging = Staging(streams)
    places = staging.places(weights)
    places["float32"].fill_(5)
    staging.up(weights, places)
    staging.places(weights)["float32"].fill_(7)  # by a round that fails
    streams.run(CURRENT)
    assert weights["float32"].tolist() == [5.0] * 2


@SCHEDULES
def test_parts_of_a_tensor_go_to_places_of_their_own(eager: tuple[str, ...]) -> None:
    streams, grads, overrides = Streams(eager), {"float32": torch.arange(64.0)}, torch.zeros(20)
    staging = Staging(streams)
    places = staging.down(grads, {"float32": [(16, overrides)]})
    assert overrides.tolist() == list(range(16, 36))
    assert places["float32"].nan_to_num(-1.0).tolist() == [*range(16), *[-1.0] * 32, *range(48, 64)]


def test_every_tensor_has_one_place_which_is_made_once() -> None:
    streams = Streams(())
    staging = Staging(streams)
    grads = {"float32": torch.ones(4), "float64": torch.ones(4, dtype=torch.float64)}
    weights = {"float32": torch.zeros(4)}
    first, again = [[staging.down(grads), staging.places(weights)] for _ in range(2)]
    assert streams.num_places == 3
    for mine, theirs in zip(first, again, strict=True):
        assert all(mine[dtype] is theirs[dtype] for dtype in mine)
    assert len({id(place) for one in again for place in one.values()}) == 3


@pytest.mark.parametrize("is_closed", [True, False])
def test_memory_is_pinned_until_the_end(is_closed: bool) -> None:
    """Also of a Trainer that nobody closes: other memory will be mapped where this was."""
    streams = Streams(())
    staging = Staging(streams)
    staging.pin(torch.zeros(4))
    staging.pin(torch.zeros(0))
    assert streams.num_pinned == 1
    if is_closed:
        staging.close()
    else:
        del staging
        gc.collect()
    assert streams.num_pinned == 0


def test_all_memory_is_let_go_although_some_of_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, let_go = Streams(()), []

    def unpin(number: int) -> None:
        let_go.append(number)
        raise RuntimeError(f"memory {number} cannot be let go")

    monkeypatch.setattr(streams, "pin", lambda memory, is_read_only: partial(unpin, memory.numel()))
    staging = Staging(streams)
    memories = [torch.zeros(numel) for numel in (1, 2, 3)]
    for memory in memories:
        staging.pin(memory)
    with pytest.raises(RuntimeError):
        staging.close()
    assert sorted(let_go) == [1, 2, 3]


def test_weights_are_read_where_a_server_has_them_and_what_it_shows_later_too() -> None:
    plan = make_plan([TensorSpec("w", (LONG,), "float32")], 1)
    numel = plan.slices[0].used
    assert numel == plan.slices[1].used
    streams, weights = Streams((CURRENT, SIDE)), {"float32": torch.zeros(LONG)}
    staging = Staging(streams)
    sink = StagingSink(staging, maps=True)
    fd = make_shared_memory(4 * 3 * numel)
    torch.from_numpy(np.frombuffer(mmap.mmap(fd, 0), np.float32)).copy_(
        torch.arange(3.0).repeat_interleave(numel)
    )
    memory = SharedArena(fd, is_ours=False)
    for at, slice_ in enumerate(plan.slices[:2]):
        sink.map(slice_, 0, at, memory, (at + 1) * 4 * numel)
        sink.commit()
        assert streams.num_pinned == 1
    staging.up(weights, {"float32": torch.full((LONG,), 7.0)})
    assert weights["float32"][[0, numel - 1, numel, 2 * numel - 1, 2 * numel]].tolist() == [
        1.0,
        1.0,
        2.0,
        2.0,
        7.0,
    ]
    sink.release()
    assert streams.num_pinned == 0
    staging.up(weights, {"float32": torch.full((LONG,), 8.0)})
    assert weights["float32"].unique().tolist() == [8.0]
