"""Rows that are read in the memory of two servers are those that index_select finds in one table."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvstore_server.plan import PAGE, Plan, TensorSpec, make_plan
from kvstore_server.shard.storage import Storage
from kvstore_server.transport.arena import Leases, SharedArena
from kvstore_server.transport.exports import WeightExports
from kvtrainer.client.row_reads import MappedRowReads
from tests.support.row_tables import interleaved

_SHAPES = ((200_003, 16), (70_001, 16), (30_000, 64))
"""Slices of the first and the last are whole pages; no key ends where a page does but the last."""


@dataclass
class Job:
    """Servers' memory with tables of other numbers each, and these tables."""

    plan: Plan
    servers: list[Storage]
    shown: dict[int, tuple[SharedArena, int]]
    tables: list[Tensor]

    def rows(self, key: int) -> MappedRowReads:
        return MappedRowReads(self.plan, key, self.shown)

    def write(self, key: int, value: float) -> None:
        """Have the servers write all rows of a key, as they do in a round."""
        for storage in self.servers:
            with storage.borrowed_key(storage.layouts[key]) as weights:
                weights.fill_(value)


def _job(shapes: tuple[tuple[int, ...], ...] = _SHAPES, num_servers: int = 2) -> Job:
    specs = [TensorSpec(f"w{at}", shape, "float32", row_sparse=True) for at, shape in enumerate(shapes)]
    plan, drawn = make_plan(specs, num_servers), torch.Generator().manual_seed(1)
    job = Job(plan, [], {}, [torch.randn(shape, generator=drawn) for shape in shapes])
    laid = [interleaved(table, plan, key).view(-1) for key, table in enumerate(job.tables)]
    for server in plan.servers:
        leases = Leases()
        exports = WeightExports(leases)
        leases.shared, leases.location_of = (
            exports.make,
            lambda weights, exports=exports: exports.find([weights]),
        )
        storage = Storage(leases)
        storage.add(plan, server, None)
        [(number, fd)] = exports.fds.items()
        memory = SharedArena(os.dup(fd), number, is_ours=False)
        job.servers.append(storage)
        for at, slot in enumerate(storage.slots):
            key, _, begin, numel = slot.slice.segments[0]
            storage.visible[at].copy_(laid[key][begin : begin + numel])
            if (place := storage.location(at)) >= 0:
                job.shown[slot.slice.index] = (memory, place & ((1 << 40) - 1))
    return job


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("key", [0, 1, 2])
def test_rows_are_those_of_the_table_in_the_order_of_the_ids(servers: int, key: int) -> None:
    job = _job(num_servers=servers)
    ids = torch.randint(len(job.tables[key]), (5000,), generator=torch.Generator().manual_seed(key))
    ids[:3] = torch.tensor([0, len(job.tables[key]) - 1, 0])
    found = job.rows(key).take(ids)
    assert found is not None
    assert torch.equal(found, job.tables[key].index_select(0, ids))


def test_no_ids_have_no_rows() -> None:
    found = _job().rows(0).take(torch.empty(0, dtype=torch.int64))
    assert found is not None
    assert found.shape == (0, 16)


def test_rows_are_what_servers_wrote_last() -> None:
    job, ids = _job(), torch.arange(0, 200_000, 999)
    rows = job.rows(0)
    for value in (2.5, -1.0):
        job.write(0, value)
        found = rows.take(ids)
        assert found is not None
        assert (found == value).all()


def test_rows_that_a_server_is_writing_or_died_writing_are_not_used() -> None:
    job, ids = _job(), torch.arange(4)
    rows, storage = job.rows(0), job.servers[1]
    with storage.borrowed_key(storage.layouts[0]):
        assert rows.take(ids) is None
    assert rows.take(ids) is not None


def test_writing_another_table_does_not_matter() -> None:
    job = _job()
    rows, storage = job.rows(0), job.servers[0]
    with storage.borrowed_key(storage.layouts[2]):
        assert rows.take(torch.arange(4)) is not None


def test_a_forked_process_reads_no_rows_in_their_place() -> None:
    rows = _job().rows(0)
    child = os.fork()
    if not child:
        os._exit(0 if rows.take(torch.arange(4)) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_slices_that_do_not_end_where_pages_do_are_refused() -> None:
    job = _job(((60_000, 50),))  # as many whole rows of 200 bytes as there are in a slice
    assert any(slot.slice.nbytes % PAGE for slot in job.servers[0].slots[:-1])
    with pytest.raises(OSError, match="cannot be mapped"):
        job.rows(0)


def test_a_slice_that_is_not_shown_is_refused() -> None:
    job = _job()
    del job.shown[job.plan.slices_with(0)[1].index]
    with pytest.raises(OSError, match="cannot be mapped"):
        job.rows(0)
