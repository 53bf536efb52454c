"""Weights that are mapped show what a server writes, and tell what a worker has written instead."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from kvstore_server.plan import PAGE, Plan, TensorSpec, make_plan
from kvstore_server.shard.storage import Storage
from kvstore_server.transport import pages
from kvstore_server.transport.arena import Leases, SharedArena
from kvstore_server.transport.exports import WeightExports
from kvtrainer.client.weight_sinks import MappedWeightSink
from kvtrainer.memory.arena import Arena as Parameters
from tests.support.limits import LIMIT

_NUMEL = 3 * 200_063
"""Rows of no whole line, so that slices of servers meet within a page."""


@dataclass
class Job:
    """Two servers' memory, filled with numbers from one on, and a worker that maps it."""

    plan: Plan
    servers: list[Storage]
    weights: Parameters
    mapped: MappedWeightSink
    memories: list[SharedArena]
    leases: list[Leases]

    @property
    def parameter(self) -> Tensor:
        return self.weights._parameters[0]

    def serve(self, values: Tensor) -> None:
        """Have the servers write new weights in place."""
        for storage in self.servers:
            for slot, own in zip(storage.slots, storage.visible, strict=True):
                own.copy_(values[slot.slice.offset : slot.slice.offset + slot.slice.used])

    def show(self) -> None:
        for server, (storage, memory) in enumerate(zip(self.servers, self.memories, strict=True)):
            for at, slot in enumerate(storage.slots):
                if (place := storage.location(at)) >= 0:
                    self.mapped.map(slot.slice, server, place, memory, place & ((1 << 40) - 1))
        self.mapped.commit()


class _Refused:
    def __init__(self, page_map: int) -> None:
        raise PermissionError(page_map)


def _server_memory(plan: Plan, server: int) -> tuple[Storage, SharedArena, Leases]:
    leases = Leases()
    exports = WeightExports(leases)
    leases.shared, leases.location_of = exports.make, lambda weights: exports.find([weights])
    storage = Storage(leases)
    storage.add(plan, server, None)
    [(number, fd)] = exports.fds.items()
    return storage, SharedArena(os.dup(fd), number, is_ours=False), leases


@pytest.fixture(params=["watched", "page map"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    """The same, where the system notes what is written and where its page map alone tells."""
    if request.param == "page map":
        monkeypatch.setattr(pages, "WrittenPages", _Refused)
    parameter = Parameter(torch.zeros(_NUMEL // 3, 3))
    specs = [TensorSpec("w", tuple(parameter.shape), "float32")]
    plan = make_plan(specs, 2)
    servers, memories, leases = zip(*(_server_memory(plan, server) for server in range(2)), strict=True)
    weights = Parameters([parameter], ["w"], make_plan(specs, 1))
    made = Job(plan, list(servers), weights, MappedWeightSink(weights.weights), list(memories), list(leases))
    made.serve(_numbers())
    made.show()
    return made


def _numbers() -> Tensor:
    return torch.arange(1, _NUMEL + 1, dtype=torch.float32)


def test_a_worker_sees_what_servers_write_later(job: Job) -> None:
    job.serve(-_numbers())
    job.mapped.commit()
    assert torch.equal(job.parameter.detach().view(-1), -_numbers())


@pytest.mark.parametrize("at", range(0, _NUMEL, 60_013))
def test_what_a_worker_writes_is_found_wherever_it_is(job: Job, at: int) -> None:
    job.parameter.data.view(-1)[at] = 0.5
    [index] = job.mapped.written()
    slice_ = job.plan.slices[index]
    assert slice_.offset <= at < slice_.offset + slice_.used


def test_a_write_at_the_edge_of_a_slice_is_found(job: Job) -> None:
    for slice_ in job.plan.slices:
        job.parameter.data.view(-1)[slice_.offset] += 0.5
        job.parameter.data.view(-1)[slice_.offset + slice_.used - 1] += 0.5
    assert job.mapped.written() == set(range(8))


def test_pages_with_the_servers_bytes_again_show_the_servers_memory_again(job: Job) -> None:
    before = job.parameter.detach().clone()
    job.parameter.data.zero_()
    job.parameter.data.copy_(before)
    assert not job.mapped.written()
    job.serve(2 * _numbers())
    job.mapped.commit()
    assert torch.equal(job.parameter.detach().view(-1), 2 * _numbers())


def test_pages_that_were_written_stay_until_the_servers_bytes_are_asked_for(job: Job) -> None:
    job.parameter.data.zero_()
    assert job.mapped.written() == set(range(8))
    assert not job.parameter.any()
    job.mapped.attach()
    assert torch.equal(job.parameter.detach().view(-1), _numbers())
    assert not job.mapped.written()


def test_what_a_worker_writes_reaches_no_server(job: Job) -> None:
    job.parameter.data.fill_(0.5)
    assert not any((own == 0.5).any() for storage in job.servers for own in storage.visible)


def test_a_slice_that_was_left_is_not_looked_at_and_can_be_mapped_again(job: Job) -> None:
    slice_ = job.plan.slices[3]
    job.mapped.unmap(slice_)
    job.parameter.data.view(-1)[slice_.offset : slice_.offset + slice_.used] = 0.0
    assert not job.mapped.written()
    assert job.mapped.unwatched()["float32"] == [(4 * slice_.offset, 4 * (slice_.offset + slice_.length))]
    job.show()
    assert torch.equal(job.parameter.detach().view(-1), _numbers())


def test_released_weights_stay_as_they_are(job: Job) -> None:
    job.mapped.release()
    job.serve(-_numbers())
    assert torch.equal(job.parameter.detach().view(-1), _numbers())
    job.parameter.data.zero_()
    assert not job.mapped.written()


@pytest.mark.parametrize("shift", [64, PAGE * 10**6])
def test_a_place_that_does_not_fit_is_refused_and_nothing_is_mapped(job: Job, shift: int) -> None:
    storage, slice_ = job.servers[0], job.servers[0].slots[0].slice
    begin = storage.location(0) & ((1 << 40) - 1)
    with pytest.raises(OSError, match="slice 0 is at"):
        job.mapped.map(slice_, 0, storage.location(0), job.memories[0], begin + shift)
    assert torch.equal(job.parameter.detach().view(-1), _numbers())


def test_slices_that_only_some_servers_have_written_are_told(job: Job) -> None:
    told = [job.mapped.roll_back()]
    for storage in job.servers:
        for at in range(len(storage.slots)):
            with storage.borrowed(at, at + 1) as weights:
                weights.neg_()
        told.append(job.mapped.roll_back())
    assert told == [set(), {slot.slice.index for slot in job.servers[0].slots}, set()]


def test_a_slice_whose_server_has_begun_to_write_it_and_not_ended_is_told(job: Job) -> None:
    with ExitStack() as writing:
        for storage in job.servers:
            writing.enter_context(storage.borrowed(0, len(storage.slots)))
        assert job.mapped.roll_back() == set(range(8))
    assert not job.mapped.roll_back()
    job.mapped.commit()
    assert not job.mapped.roll_back()


def test_weights_that_somebody_reads_have_no_place_as_long_as_that_takes(job: Job) -> None:
    [storage, _], leases = job.servers, job.leases[0]
    read, place = storage.visible[0], storage.location(0)
    leases.hold(read)
    with storage.borrowed(0, 1) as weights:
        weights.fill_(0.5)
    assert storage.location(0) == -1
    assert torch.equal(job.parameter.detach().view(-1), _numbers())
    leases.release(read)
    with storage.borrowed(0, 1) as weights:
        weights.fill_(2.5)
    job.mapped.commit()
    assert storage.location(0) == place
    assert (job.parameter.detach().view(-1)[: storage.slots[0].slice.used] == 2.5).all()


def test_a_fork_keeps_what_it_writes_to_itself(job: Job) -> None:
    child = multiprocessing.get_context("fork").Process(target=job.parameter.data.zero_)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert torch.equal(job.parameter.detach().view(-1), _numbers())
    assert not job.mapped.written()


def test_a_system_that_hides_its_page_map_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "_PAGE_MAP", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        MappedWeightSink({"float32": torch.zeros(16)})


def test_a_page_map_that_does_not_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PAGE_MAP", "/dev/zero")  # says that no page is there
    with pytest.raises(OSError, match="does not tell"):
        MappedWeightSink({"float32": torch.zeros(16)})


def _shapes(seed: int) -> list[tuple[int, ...]]:
    made = np.random.default_rng(seed)
    widths = made.choice([1, 10, 33, 64, 300, 768, 1000, 1024], 6)
    return [(int(made.integers(1, 300_000 // width + 2)), int(width)) for width in widths]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("whole_keys", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_long_slices_begin_in_their_page_where_they_do_on_workers(
    seed: int, whole_keys: bool, servers: int
) -> None:
    specs = [TensorSpec(f"k{at}", shape, "float32") for at, shape in enumerate(_shapes(seed))]
    plan = make_plan(specs, servers, whole_keys)
    for server in plan.servers:
        storage, _, _ = _server_memory(plan, server)
        for at, slot in enumerate(storage.slots):
            is_mapped, is_long = storage.location(at) >= 0, slot.slice.nbytes >= 256 << 10
            assert is_mapped or not is_long
            assert not is_mapped or 4 * (slot.start - slot.slice.offset) % PAGE == 0


def test_a_place_of_a_server_that_was_restarted_is_one_in_the_memory_of_its_next_process(job: Job) -> None:
    job.serve(torch.arange(1.0, 1.0 + _NUMEL))
    job.show()
    memory = job.memories[0]
    slot, place = next(
        (slot.slice, job.servers[0].location(at)) for at, slot in enumerate(job.servers[0].slots)
    )
    assert job.mapped.is_mapped(slot, 0, place, memory)
    assert job.mapped.is_mapped(slot, 0, place, None)  # the channel is lost, what is mapped stays
    again = SharedArena(os.dup(memory.fd), memory.number, is_ours=False)  # as the next process shows it
    assert not job.mapped.is_mapped(slot, 0, place, again)
    job.memories[0] = again
    job.show()
    assert job.mapped.is_mapped(slot, 0, place, again)
    assert memory.data.data_ptr() not in job.mapped._counters
    assert torch.equal(job.parameter.view(-1), torch.arange(1.0, 1.0 + _NUMEL))
