"""Rounds whose slices come in parts, in seeded schedules: parts are lost and repeated, ranks give up and are replaced.

Each round adds to the weights what its ranks gave, all of it or nothing, and every rank is told just that.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from kvstore_server.engine.rounds import Mode
from kvstore_server.protocol import messages as m
from tests.sim.test_interleavings import blocks
from tests.support.engines import EngineJob
from tests.support.messages import contribution

SEEDS, BLOCK = 120, 30
RANKS, ROUNDS, PART = 2, 3, 16 << 10
SHAPE = (140_000,)
"""Eight slices, none of which is a whole number of parts."""
EVERYTHING = {
    "applied",
    "given up",
    "replaced",
    "lost",
    "repeated",
    "missing",
    "unannounced",
    "answered in parts",
}


class Schedule:
    """One job and its luck."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.job = EngineJob(RANKS, Mode("sync"), shape=SHAPE)
        self.sizes = [4 * slice_.length for slice_ in self.job.slices]
        self.total = 0.0
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        for round_ in range(1, ROUNDS + 1):
            self._play(round_)
            [body] = self.job.pull(0)
            assert isinstance(body, m.Weights)
            assert (
                {float(one[0]) for one in body.payloads}
                == {float(one[-17]) for one in body.payloads}
                == {self.total}
            )
        return self.seen

    def _play(self, round_: int) -> None:
        values = [float(self.rng.randint(1, 9)) for _ in range(RANKS)]
        queues = {rank: self._messages(rank, round_, values[rank]) for rank in range(RANKS)}
        fate, left = self.rng.random(), sum(map(len, queues.values()))
        stop = self.rng.randrange(left) if fate < 0.4 else -1
        while any(queues.values()):
            rank = self.rng.choice([rank for rank, queue in queues.items() if queue])
            left -= 1
            if left == stop and fate < 0.2:
                self.job.ask(rank, m.Abort(0, round_, "it raised", undo=False))
                self.seen["given up"] += 1
                return
            if left == stop:
                self.job.hello(rank)
                values[rank] = 10.0
                queues[rank] = self._messages(rank, round_, values[rank])
                self.seen["replaced"] += 1
                stop, left = -1, sum(map(len, queues.values())) + 1
                continue
            self.job.ask(rank, queues[rank].pop(0), 100 * round_ + rank)
        for rank in range(RANKS):
            self._commit(rank, round_, values[rank])
        self.total += sum(values)
        for rank in range(RANKS):
            self._check_told(rank, round_)
        self.seen["applied"] += 1

    def _messages(self, rank: int, round_: int, value: float) -> list[m.Contribute]:
        """An announcement and all slices, some of them whole, as they come out of a bad network."""
        flags, out = m.DECLARES_INTENT | m.WANTS_WEIGHTS, list[m.Contribute]()
        if self.rng.random() < 0.9:
            out.append(contribution([], round_, 0, 8, flags=flags))
        else:
            self.seen["unannounced"] += 1
        for slot, size in enumerate(self.sizes):
            most = self.rng.choice([PART, PART, size])
            for begin in range(0, size, most):
                data, luck = torch.full((min(most, size - begin) // 4,), value), self.rng.random()
                word = slot if most == size else slot | (begin + data.nbytes) // 4 << m.PART
                pushes = m.matrix([(word, round_, 0, data.nbytes)], m.PUSH_WORDS)
                body = m.Contribute(pushes, (data,), m.matrix((), m.COMMIT_WORDS))
                out += [body] * (0 if luck < 0.01 else 2 if luck > 0.97 else 1)
                self.seen["lost" if luck < 0.01 else "repeated" if luck > 0.97 else "given"] += 1
        return out

    def _commit(self, rank: int, round_: int, value: float) -> None:
        """Commit, and give again what is missing."""
        commit = contribution([], round_, 0, 8, flags=m.WANTS_WEIGHTS)
        for body in self.job.ask(rank, commit, 100 * round_ + rank):
            if isinstance(body, m.Missing):
                self.seen["missing"] += 1
                whole = [(slot, torch.full((self.sizes[slot] // 4,), value)) for slot in body.slots]
                self.job.ask(rank, contribution(whole, round_))
                self.job.ask(rank, commit, 100 * round_ + rank)

    def _check_told(self, rank: int, round_: int) -> None:
        """What a rank was told of new weights is all of them, and no older ones."""
        came, newest = dict[int, int](), -1
        for body in self.job.replies[rank, 100 * round_ + rank]:
            rows = zip(body.parts.tolist(), body.payloads, strict=True) if isinstance(body, m.Weights) else ()
            for (word, version, _, nbytes), payload in rows:
                if version > newest:
                    came, newest = {}, version
                slot, end = m.unpack_slot(word)
                assert 4 * end in (0, came.get(slot, 0) + nbytes)
                came[slot] = 4 * end or nbytes
                self.seen["answered in parts"] += end > 0
                last = payload
        assert came == dict(enumerate(self.sizes))
        assert float(last[0]) == self.total


@pytest.mark.parametrize(("first", "count"), blocks(SEEDS, BLOCK))
def test_every_round_counts_once_or_not_at_all(first: int, count: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += Schedule(seed).run()
    assert seen.keys() >= EVERYTHING
