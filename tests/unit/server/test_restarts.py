"""A server that is killed anywhere and restarted with its memory ends like one that was never killed, bit by bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvstore_server.engine import pipelined
from kvstore_server.engine.agreed_options import pack_hypers
from kvstore_server.engine.rounds import Mode
from kvstore_server.failpoints import POINTS
from kvstore_server.plan import TensorSpec
from kvstore_server.protocol import messages as m
from tests.sim.schedule import Cautious
from tests.support.durable import HeldDescriptors, crash_at
from tests.support.restarts import Case, Job

MATRIX = TensorSpec("matrix", (5, 7), "float32")
VECTOR = TensorSpec("vector", (40,), "float32")
TABLE = TensorSpec("table", (20, 4), "float32", 0, True)
HALF = TensorSpec("half", (33,), "float16")
LONG = TensorSpec("long", (70_000,), "float32")


def rates(round_: int) -> bytes:
    return pack_hypers([{"lr": 0.1 if round_ < 3 else 0.05}], {}, {}, True)


def some_rows(round_: int, rank: int) -> Sequence[int]:
    return [row for row in range(20) if (row * 7 + round_ * 3 + rank) % 5 == 0]


CASES = {
    "plain sum": Case([[MATRIX, VECTOR]]),
    "sgd": Case([[MATRIX, VECTOR]], ("sgd", {"learning_rate": 0.1})),
    "momentum": Case([[MATRIX], [VECTOR], [HALF]], ("sgd", {"momentum": 0.9}), hypers=rates),
    "adam": Case([[MATRIX, VECTOR]], ("adam", {"wd": 0.01})),
    "half with masters": Case([[HALF], [MATRIX]], ("sgd", {"momentum": 0.9, "multi_precision": True})),
    "lamb": Case([[MATRIX, VECTOR]], ("lamb", {}), whole_keys=True),
    "adafactor": Case([[MATRIX, VECTOR]], ("torch:adafactor", {}), whole_keys=True),
    "one that may raise": Case([[MATRIX], [VECTOR]], (Cautious.name, {})),
    "rows": Case([[TABLE, VECTOR]], ("adagrad", {}), rows=some_rows),
    "rows of sgd": Case([[TABLE]], ("sgd", {"momentum": 0.9, "lazy_update": True}), rows=some_rows),
    "rows as changes": Case(
        [[TABLE, VECTOR]], ("sgd", {}), rows=some_rows, flags=m.WANTS_WEIGHTS | m.WANTS_DELTA
    ),
    "2bit": Case([[MATRIX, VECTOR]], ("sgd", {}), codec={"type": "2bit", "threshold": 0.5}),
    "encoded weights": Case(
        [[VECTOR], [MATRIX]],
        ("sgd", {}),
        pull_codec={"type": "2bit", "threshold": 0.05},
        flags=m.WANTS_WEIGHTS | m.WANTS_DELTA,
    ),
    "clipped": Case([[MATRIX, VECTOR], [HALF]], ("adam", {}), hold=2.0),
    "slice by slice": Case([[LONG], [VECTOR]], ("adam", {}), is_pipelined=True, rounds=3),
    "async": Case([[MATRIX], [VECTOR]], ("sgd", {"learning_rate": 1.0}), integers=True, mode=Mode("async")),
    "ssp": Case([[VECTOR]], ("sgd", {"learning_rate": 1.0}), integers=True, mode=Mode("ssp", 2)),
    "delay compensation": Case([[VECTOR]], ("dcasgd", {}), mode=Mode("async")),
    "thousand keys": Case([[TensorSpec(f"k{at}", (3,), "float32") for at in range(300)]], ("sgd", {})),
}
SERVER_POINTS = sorted(name for name in POINTS if name.startswith("server."))


@functools.cache
def undisturbed(name: str) -> dict[str, Any]:
    job = Job(CASES[name])
    job.run()
    return job.facts()


@pytest.fixture
def store() -> Iterator[HeldDescriptors]:
    held = HeldDescriptors()
    yield held
    held.close()


@pytest.mark.parametrize("name", CASES)
def test_durability_changes_no_bit(name: str, store: HeldDescriptors) -> None:
    job = Job(CASES[name], store)
    job.run()
    assert job.facts() == undisturbed(name)
    again = Job(CASES[name], store)
    again.engine.tick(200.0)
    assert again.facts() == undisturbed(name)


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("point", [one for one in SERVER_POINTS if "recovery" not in one])
@pytest.mark.parametrize("name", CASES)
def test_a_killed_server_ends_like_one_that_was_not(
    name: str, point: str, nth: int, store: HeldDescriptors
) -> None:
    with crash_at(point, nth):
        job = Job(CASES[name], store)
        job.run()
    assert job.facts() == undisturbed(name)
    assert Job(CASES[name], store).facts() == undisturbed(name)
