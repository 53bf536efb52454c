"""New weights that come back as bfloat16: their bytes, their rounding, and what is sent while a peer still reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.engine import Engine
from kvstore_server.engine.namespace import EngineConfig
from kvstore_server.optimizer import create
from kvstore_server.plan import TensorSpec, make_plan
from kvstore_server.protocol import messages as m
from kvstore_server.shard.storage import Storage
from kvstore_server.transport.arena import Leases
from kvtrainer.client.contribution import Contribution
from kvtrainer.errors import ProtocolError
from tests.support.scripted import SLOT, Bench
from tests.support.switchboard import connected, play

SPECS = [TensorSpec(dtype, (300, 200), dtype) for dtype in ("float32", "float64", "float16", "bfloat16")]
"""Some slices travel by themselves."""


class Job:
    """One server, and workers with an arena each: new weights are the old ones less a quarter of all gradients."""

    def __init__(self, takes_half: tuple[bool, ...]) -> None:
        self.clients = connected([Engine(EngineConfig())], len(takes_half))
        self.tables = []
        optimizer = create("sgd", learning_rate=0.25)
        for client, takes in zip(self.clients, takes_half, strict=True):
            client.set_optimizer(optimizer.spec())
            [table] = client.register({"t": SPECS}, whole_keys=False)
            table.takes_half = takes
            self.tables.append(table)
        self.hyper = pack_hypers([dict(optimizer.plain_hyper())], {}, {}, True)
        self.arenas = [self.filled(lambda size: torch.zeros(size)) for _ in takes_half]
        self.parts: dict[str, set[tuple[int, int]]] = {}
        """dtype → (kind, bytes for each element) of what the first worker was sent last."""
        self._note_parts()

    def filled(self, make: Any) -> dict[str, Tensor]:
        sizes = self.tables[0].plan.arena_sizes
        return {name: make(size).to(getattr(torch, name)) for name, size in sizes.items()}

    def round(self, values: list[dict[str, Tensor]]) -> None:
        rows = zip(self.tables, values, self.arenas, strict=True)
        play(self.clients, [Contribution([t], [v], [a], 1.0, self.hyper) for t, v, a in rows])

    def _note_parts(self) -> None:
        rounds, slices = self.clients[0].rounds, self.tables[0].plan.slices_of(0)
        receive = rounds._receive

        def note(round_: Any, server_request: Any, server: int, reply: m.ReplyBody) -> None:
            rows = (
                zip(reply.parts.tolist(), reply.payloads, strict=True) if isinstance(reply, m.Weights) else ()
            )
            for (word, _, kind, nbytes), payload in rows:
                dtype = slices[m.unpack_slot(word)[0]].dtype
                self.parts.setdefault(dtype, set()).add((kind, nbytes // len(payload)))
            receive(round_, server_request, server, reply)

        rounds._receive = note  # type: ignore[method-assign]


def sixteenths(seed: int, bits: int) -> Any:
    """Numbers of so many bits, so that sums and differences of few of them are exact."""
    gen = torch.Generator().manual_seed(seed)
    return lambda size: torch.randint(-(2**bits), 2**bits, (size,), generator=gen) / 16


def test_workers_have_the_rounding_of_weights_that_the_server_goes_on_with() -> None:
    job = Job((True, True, False))
    start = job.filled(sixteenths(0, 9))
    job.round([start] * 3)
    master = {name: flat.double() for name, flat in start.items()}
    for round_ in range(3):
        grads = [job.filled(sixteenths(3 * round_ + rank + 1, 3)) for rank in range(3)]
        job.round(grads)
        for name, flat in master.items():
            flat -= sum(one[name].double() for one in grads) / 4
        for arena, table in zip(job.arenas, job.tables, strict=True):
            for name in ("float32", "float64"):
                want = master[name].to(torch.bfloat16).double() if table.takes_half else master[name]
                assert torch.equal(arena[name].double(), want)
    assert not torch.equal(job.arenas[0]["float32"], job.arenas[2]["float32"])


def test_what_is_wider_than_bfloat16_takes_two_bytes_for_each_element_and_nothing_else_changes() -> None:
    job = Job((True,))
    job.round([job.filled(torch.ones)])
    job.parts.clear()
    job.round([job.filled(torch.ones)])
    assert job.parts == {
        "float32": {(m.HALF, 2)}, "float64": {(m.HALF, 2)}, "float16": {(m.WHOLE, 2)}, "bfloat16": {(m.WHOLE, 2)},
    }  # fmt: skip
    assert all(torch.equal(flat, torch.full_like(flat, 0.75)) for flat in job.arenas[0].values())


def test_the_server_counts_the_bytes_that_it_sends() -> None:
    job = Job((True,))
    job.round([job.filled(torch.ones)])
    [before] = job.clients[0].stats()
    job.round([job.filled(torch.ones)])
    [after] = job.clients[0].stats()
    sent = after["tables"][0]["bytes_out"] - before["tables"][0]["bytes_out"]
    assert sent == 2 * sum(slice_.length for slice_ in job.tables[0].plan.slices)


def test_first_values_are_rounded_as_well() -> None:
    job = Job((True,))
    start = job.filled(lambda size: torch.linspace(-1, 1, size, dtype=torch.float64))
    job.round([start])
    for name, flat in start.items():
        assert torch.equal(
            job.arenas[0][name], flat.to(torch.bfloat16).to(flat.dtype) if flat.itemsize > 2 else flat
        )


def test_weights_of_one_version_are_rounded_once_and_in_the_same_memory_again() -> None:
    storage = Storage()
    unit = storage.add(make_plan([TensorSpec("w", (64,), "float32")], 1), 0, None)
    first = storage.half(unit.first, 1)
    storage.padded[unit.first].fill_(1.0)
    assert storage.half(unit.first, 1) is first
    assert not first.any()
    assert storage.half(unit.first, 2) is first
    assert torch.equal(first, torch.ones(64, dtype=torch.bfloat16))


def test_what_a_slow_peer_still_reads_is_not_rounded_anew() -> None:
    leases = Leases()
    storage = Storage(leases)
    unit = storage.add(make_plan([TensorSpec("w", (64,), "float32")], 1), 0, None)
    read = storage.half(unit.first, 1)
    leases.hold(read)
    storage.padded[unit.first].fill_(1.0)
    assert storage.half(unit.first, 2).tolist() == [1.0] * 64
    assert not read.any()


@pytest.mark.parametrize("given", [0, 2, 4])
def test_rounded_weights_of_another_size_are_refused(given: int) -> None:
    numel = 64

    def act(server: int, _: m.Contribute) -> list[m.ReplyBody]:
        sent = torch.zeros(numel * given // 2, dtype=torch.bfloat16)
        return [m.Weights(m.matrix([(SLOT, 3, m.HALF, sent.nbytes)], 4), (sent,))]

    bench = Bench(1, act, numel)
    bench.table.takes_half = True
    if given == 2:
        bench.run()
        return
    with pytest.raises(ProtocolError):
        bench.run()
