"""What every combination of store, kind of value, update site, compression and dtype does: tried out, and as a page.

    python -m tests.support.capabilities > docs/capabilities.md

Each combination trains one parameter for two steps, with one worker or two ranks of torch.distributed, and is either
right, or was refused with an error.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvtrainer
from kvtrainer.errors import ConfigurationError, KVStoreError
from kvtrainer.kvstore import DistKVStore, KVStoreBase
from tests.support.jobs import Results, run_job
from tests.support.processes import Process, new_name
from tests.support.stores import servers

KINDS = ("dense", "row-sparse gradient", "row-sparse weight")
SITES = (None, True, False)
COMPRESSIONS = ("none", "1bit", "2bit", "ternary", "int8", "fp16", "bf16", "topk")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DIST = ("dist_sync", "dist_async", "dist_ssp", "p3")
ROWS = (3, 1)
"""The rows that a row-sparse gradient has."""


_INTRODUCTION = """\
# What works with what

`tests/integration/test_capability_table.py` tested every combination of store, kind of value, update site, compression
and dtype for this page: it trains with the correct result, or raises a typed error before anything has changed. The
entries say where the optimizer runs. float16, bfloat16, float32 and float64 behave the same. With several copies of
each parameter (lists of parameters, one per device) gradients are summed over the copies; with `kvstore=None` each copy
is trained separately. Rows of a row-sparse gradient are never compressed.
"""


class SumStore(KVStoreBase):
    """A third-party store for one worker: it offers what the base class asks for, and no more."""

    type = "thirdparty"
    rank = 0
    num_workers = 1

    def broadcast(self, key: Any, value: Tensor, out: Tensor, priority: int = 0) -> None:
        out.copy_(value)

    def pushpull(self, key: Any, value: Tensor, out: Tensor | None = None, priority: int = 0) -> None:
        if out is not None:
            out.copy_(value)


@dataclass(frozen=True)
class Place:
    """A store, and how many copies of each parameter the process has."""

    name: str
    copies: int
    make: Callable[[], Any]
    ranks: int = 1

    @property
    def title(self) -> str:
        if self.ranks > 1:
            return f"{self.name}, {self.ranks} ranks of torch.distributed"
        return self.name if self.copies == 1 else f"{self.name}, {self.copies} copies"


@dataclass(frozen=True)
class Case:
    """One combination."""

    place: Place
    kind: str
    site: bool | None
    compression: str
    dtype: torch.dtype


@dataclass(frozen=True)
class Outcome:
    """What became of it: where the optimizer ran, or the error that refused it and when."""

    where: str
    """Where the optimizer ran, or when the error came."""
    has_store: bool = True
    error: str = ""
    """The type of the error."""
    text: str = ""

    @property
    def works(self) -> bool:
        return not self.error

    @classmethod
    def refused(cls, when: str, error: KVStoreError) -> Outcome:
        return cls(when, error=type(error).__name__, text=str(error))


GROUP = [Place("device", 1, lambda: "device", ranks=2), Place("nccl", 1, lambda: "nccl", ranks=2)]
"""Stores inside a torch.distributed job over gloo on the CPU; `workers.capabilities` tries them out."""


def places(running: Sequence[Process]) -> list[Place]:
    """All stores; those on servers get the running ones."""

    def dist(name: str) -> Callable[[], DistKVStore]:
        addresses = [server.address for server in running]
        return lambda: DistKVStore(name, rank=0, num_workers=1, servers=addresses, namespace=new_name())

    return [
        Place("None", 1, lambda: None),
        Place("local", 1, lambda: "local"),
        Place("device", 1, lambda: "device"),
        Place("None", 2, lambda: None),
        Place("local", 2, lambda: "local"),
        Place("device", 2, lambda: "device"),
        *(Place(name, copies, dist(name)) for name in DIST for copies in (1, 2)),
        Place("a third-party store", 1, SumStore),
        Place("a third-party store", 2, SumStore),
    ]


def cases(places: Sequence[Place], is_whole: bool) -> Iterator[Case]:
    """All combinations; those with a compression have one dtype each, now this and now that, or so have all of them."""
    turns = itertools.cycle(DTYPES)
    for place, kind, compression, site in itertools.product(places, KINDS, COMPRESSIONS, SITES):
        for dtype in DTYPES if is_whole and compression == "none" else [next(turns)]:
            yield Case(place, kind, site, compression, dtype)


def try_all(places: Sequence[Place], is_whole: bool) -> Iterator[tuple[Case, Outcome]]:
    """Try out all combinations, or enough for the page: then each compression has its turn at a site that works."""
    sites: dict[tuple[Place, str], list[bool | None]] = {}
    for case in cases(places, is_whole):
        works = sites.setdefault((case.place, case.kind), [])
        turn = COMPRESSIONS.index(case.compression) % max(len(works), 1)
        if is_whole or case.compression == "none" or case.site in works[turn : turn + 1]:
            outcome = try_out(case)
            yield case, outcome
            if outcome.works and case.site not in works:
                works.append(case.site)


def try_out(case: Case) -> Outcome:
    """Build a Trainer and train; an error of any other kind than the library's is raised.

    Raises:
        AssertionError: the weights are not what two steps of SGD give.
    """
    store = case.place.make()
    compression = None if case.compression == "none" else {"type": case.compression}
    params = _parameters(case)
    try:
        trainer = kvtrainer.Trainer(
            params, "sgd", {"learning_rate": 1.0}, store, compression, update_on_kvstore=case.site
        )
    except KVStoreError as error:
        _close(store)
        return Outcome.refused("at construction", error)
    try:
        with trainer:
            for _ in range(2):
                _backward(case, params)
                trainer.step(1)
            _check(case, params)
            exchange = trainer._pipeline.binding.exchange
            in_store = exchange is not None and exchange.updates_weights
            return Outcome("in the store" if in_store else "in the Trainer", trainer.kvstore is not None)
    except KVStoreError as error:
        return Outcome.refused("at the first step", error)
    finally:
        _close(store)


def _close(store: Any) -> None:
    if isinstance(store, KVStoreBase):
        store.close()


def _parameters(case: Case) -> list[Any]:
    def one() -> Any:
        if case.kind == "row-sparse weight":
            return kvtrainer.RowSparseParameter((4, 2), 0.0, dtype=case.dtype)
        return nn.Parameter(torch.zeros(4, 2, dtype=case.dtype))

    copies = [one() for _ in range(case.place.copies)]
    return copies if len(copies) == 1 else [copies]


def _each(params: list[Any]) -> list[Any]:
    return params[0] if isinstance(params[0], list) else params


def _backward(case: Case, params: list[Any]) -> None:
    for parameter in _each(params):
        if case.kind == "dense":
            parameter.sum().backward()
        elif case.kind == "row-sparse gradient":
            nn.functional.embedding(torch.tensor(ROWS), parameter, sparse=True).sum().backward()
        else:
            parameter.row_sparse_data(torch.tensor(ROWS)).sum().backward()


def _check(case: Case, params: list[Any]) -> None:
    """Two steps of −1 for each copy that is summed; what quantisation makes of them only has to go down."""
    summed = 1 if case.place.name == "None" else case.place.copies * case.place.ranks
    for parameter in _each(params):
        got = parameter.detach()
        if case.kind == "row-sparse weight":
            with torch.no_grad():
                got = parameter.row_sparse_data(torch.arange(4))
        touched = got if case.kind == "dense" else got[list(ROWS)]
        if case.compression in ("1bit", "2bit", "int8") and touched.max() < 0:
            continue
        if case.compression == "topk" and touched.max() <= 0 > touched.min():
            continue
        assert touched.unique().tolist() == [-2.0 * summed], f"{case}: {got}"
        if case.kind != "dense":
            assert got[[0, 2]].unique().tolist() == [0.0], f"{case}: {got}"


def page(outcomes: dict[Case, Outcome]) -> str:
    """The page of the documentation."""
    lines = [_INTRODUCTION]
    by_place: dict[str, list[Case]] = {}
    for case in outcomes:
        by_place.setdefault(case.place.title, []).append(case)
    for kind in KINDS:
        lines += [f"## {kind[0].upper()}{kind[1:]}", ""]
        lines += [
            "| store | `update_on_kvstore=None` | `True` | `False` | compression |",
            "|---|---|---|---|---|",
        ]
        for title, members in by_place.items():
            mine = [case for case in members if case.kind == kind]
            cells = [_cell([c for c in mine if c.site is site], outcomes) for site in SITES]
            lines.append(f"| {title} | {' | '.join(cells)} | {_compressions(mine, outcomes)} |")
        lines.append("")
    lines += ["## The errors", "", "| error | message |", "|---|---|"]
    texts: dict[str, str] = {}
    for case, outcome in outcomes.items():
        if outcome.error and case.compression == "none":
            texts.setdefault(outcome.text.replace("|", "\\|").replace("\n", " "), outcome.error)
    lines += [f"| `{name}` | {text} |" for text, name in sorted(texts.items(), key=lambda item: item[::-1])]
    return "\n".join(lines) + "\n"


def _cell(cases: Sequence[Case], outcomes: dict[Case, Outcome]) -> str:
    said = {_said(outcomes[case]) for case in cases if case.compression == "none"}
    return "; ".join(sorted(said))


def _said(outcome: Outcome) -> str:
    if outcome.error:
        return f"`{outcome.error}` {outcome.where}"
    return outcome.where if outcome.has_store else f"{outcome.where}, no store is made"


def _compressions(cases: Sequence[Case], outcomes: dict[Case, Outcome]) -> str:
    """The compressions that work wherever the same works without."""
    works = [case for case in cases if case.compression == "none" and outcomes[case].works]
    if not works:
        return ""
    if not any(outcomes[case].has_store for case in works):
        return "no effect: nothing is sent"
    sites = {case.site for case in works}
    refused = {case.compression for case in cases if case.site in sites and not outcomes[case].works}
    found = [name for name in COMPRESSIONS[1:] if name not in refused]
    return ", ".join(found) or f"`{ConfigurationError.__name__}` at construction"


def try_out_in_a_group(rank: int, ranks: int, is_whole: bool) -> Results:
    """On a rank of torch.distributed: the cases for stores of such jobs that were tried, by number, and what became."""
    logging.disable(logging.WARNING)
    number = {case: at for at, case in enumerate(cases(GROUP, is_whole))}
    outcomes = []
    for case, outcome in try_all(GROUP, is_whole):
        outcomes.append((number[case], *astuple(outcome)))
        gc.freeze()  # beside a process group every new Trainer looks at all objects that are not frozen
    return {"outcomes": outcomes}


def all_outcomes(is_whole: bool = True) -> dict[Case, Outcome]:
    """Try out the combinations, all or as many as the page needs; starts a server, and a job of two ranks."""
    with servers() as started:
        outcomes = dict(try_all(places(started.of(1)), is_whole))
    with tempfile.TemporaryDirectory() as folder:
        job = run_job(try_out_in_a_group, Path(folder), 2, 0, is_whole, in_group=True)
    known = [*cases(GROUP, is_whole)]
    first, second = job["outcomes"]
    assert first == second, "the ranks differ"
    return outcomes | {known[number]: Outcome(*found) for number, *found in first}


def main() -> int:
    logging.disable(logging.WARNING)
    sys.stdout.write(page(all_outcomes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
