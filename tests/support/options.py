"""What every option of a Trainer does with every store and site of the update: tried out, and as a page.

    python -m tests.support.options > docs/options.md

An option works if a few steps have the result that it is for, and another one without it; else it has to be refused
before there is a Trainer.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtrainer.common.env import TRANSPORT
from kvtrainer.errors import KVStoreError
from kvtrainer.kvstore import DistKVStore
from tests.support.capabilities import SITES, SumStore
from tests.support.jobs import Results, run_job
from tests.support.option_probes import PAIRS, PROBES, Place, Probe, bench_at
from tests.support.processes import Process, new_name
from tests.support.stores import servers

WORKS = "works"
NOTHING_TRAVELS = "no effect: no gradient is sent, and a warning is logged"
NO_STORE = Place("None", lambda: None)
GROUP = Place("device, ranks of torch.distributed", lambda: "device")
"""Tried out by the ranks of a job, see `workers.options`."""

_INTRODUCTION = """\
# Which option works where

`tests/integration/test_option_table.py` tested these options of the Trainer with every store and every update site for
this page. "works" means: a few steps gave exactly the result that the option is for, computed by hand, and the same
steps without the option gave a different one. Unsupported combinations are refused when the Trainer is built or
configured, before anything has changed; no option is silently ignored. Where a cell names no site, the result is the
same with every `update_on_kvstore` that the store accepts (see [What works with what](capabilities.md)).

With `dist_async` and `dist_ssp` each contribution is clipped, checked and scaled separately, with the loss scale of its
worker. With all other stores the sum over all workers is clipped, checked and scaled, so all make the same decision.
`p3` behaves like `dist_sync`. `multi_precision` has an effect for float16 and bfloat16 weights, `momentum_correction`
with momentum.
"""


@dataclass(frozen=True)
class Case:
    """One combination."""

    place: Place
    site: bool | None
    probe: Probe


Outcomes = dict[Case, str]
"""What became of each: WORKS, NOTHING_TRAVELS or an error with its text."""


def places(running: Sequence[Process]) -> list[Place]:
    """All stores of one process; those on servers get the running ones."""
    addresses = [server.address for server in running]

    def dist(name: str) -> Callable[[], DistKVStore]:
        return lambda: DistKVStore(name, rank=0, num_workers=1, servers=addresses, namespace=new_name())

    return [
        NO_STORE,
        Place("local", lambda: "local"),
        Place("device", lambda: "device"),
        Place("device, 2 copies", lambda: "device", copies=2),
        Place("dist_sync", dist("dist_sync")),
        Place("dist_async", dist("dist_async"), is_sync=False),
        Place("dist_ssp", dist("dist_ssp"), is_sync=False),
        Place("a third-party store", SumStore),
    ]


def cases(places: Sequence[Place]) -> Iterator[Case]:
    """All combinations of these places with a site that the store takes."""
    for place in places:
        for site in SITES:
            if _takes(place, site):
                yield from (Case(place, site, probe) for probe in (*PROBES, *PAIRS))


def _takes(place: Place, site: bool | None) -> bool:
    """Whether a Trainer without options can be made so."""
    with bench_at(place, site) as bench:
        try:
            bench.build()
        except KVStoreError:
            return False
        return True


def try_out(case: Case) -> str:
    """What an option does.

    Raises:
        AssertionError: the option does nothing, or something wrong, or is refused too late.
    """
    probe = case.probe
    with bench_at(case.place, case.site) as bench:
        try:
            seen = probe.run(bench, probe.options())
        except KVStoreError as error:
            if bench.is_built:
                raise AssertionError(f"{_name(case)} failed in a step: {error!r}") from error
            return f"{type(error).__name__}: {error}"
        logged = bench.logged
    assert probe.expected is not None, f"{_name(case)} should have been refused, but gave {seen}"
    if any("have no effect" in text for text in logged):
        with bench_at(NO_STORE, None) as bench:
            plain = {k: v for k, v in probe.options().items() if k != "compression_params"}
            _check(case, seen, probe.run(bench, plain))
        return NOTHING_TRAVELS
    is_other = not case.place.is_sync and probe.without_rounds is not None
    _check(case, seen, probe.without_rounds if is_other else probe.expected)
    return WORKS


def _check(case: Case, seen: Any, expected: Any) -> None:
    assert _is_near(seen, expected), f"{_name(case)} gave {seen} instead of {expected}"


def check_probes() -> None:
    """Raise AssertionError unless every probe would notice that its option is ignored."""
    for probe in (*PROBES, *PAIRS):
        if probe.expected is not None:
            with bench_at(NO_STORE, None) as bench:
                seen = probe.run(bench, probe.without)
            assert not _is_near(seen, probe.expected), f"{probe.option}: {seen} also without it"


def _name(case: Case) -> str:
    return f"{case.probe.option} with {case.place.title}, update_on_kvstore={case.site},"


def _is_near(seen: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(seen, list) and len(seen) == len(expected) and all(map(_is_near, seen, expected))
    if isinstance(expected, str | bool) or isinstance(seen, str | bool | None):
        return bool(seen == expected)
    return bool(seen == pytest.approx(expected, rel=1e-6, abs=1e-6))


def try_out_in_a_group(rank: int, ranks: int) -> Results:
    """On a rank of torch.distributed: the outcomes of the cases for stores of such jobs."""
    logging.disable(logging.WARNING)
    os.environ[TRANSPORT] = "tcp"  # in memory there are no buckets
    outcomes = []
    for case in group_cases():
        outcomes.append(try_out(case))
        gc.freeze()  # beside a process group every new Trainer looks at all objects that are not frozen
    return {"outcomes": outcomes}


def all_outcomes() -> Outcomes:
    """Try out every combination; starts a server, and a job of two ranks."""
    with servers() as started:
        outcomes = {case: try_out(case) for case in cases(places(started.of(1)))}
    with tempfile.TemporaryDirectory() as folder:
        job = run_job(try_out_in_a_group, Path(folder), 2, 0, in_group=True)
    first, second = job["outcomes"]
    assert first == second, "the ranks differ"
    outcomes |= dict(zip(group_cases(), first, strict=True))
    return outcomes


def group_cases() -> list[Case]:
    """Those of GROUP, which takes every site."""
    return [Case(GROUP, site, probe) for site in SITES for probe in (*PROBES, *PAIRS)]


def page(outcomes: Outcomes) -> str:
    """The page of the documentation."""
    titles = list(dict.fromkeys(case.place.title for case in outcomes))
    lines = [_INTRODUCTION, "## One option", ""]
    lines += _table(PROBES, titles, outcomes)
    lines += ["", "## Options combined", ""]
    lines += _table([probe for probe in PAIRS if probe.expected is not None], titles, outcomes)
    lines += ["", "## Refused everywhere", "", "| options | message |", "|---|---|"]
    for probe in PAIRS:
        if probe.expected is None:
            said = {_quoted(text) for case, text in outcomes.items() if case.probe is probe}
            lines.append(f"| {probe.option} | {'; '.join(sorted(said))} |")
    lines += ["", "## The errors", "", "| option | where | message |", "|---|---|---|"]
    for probe in (*PROBES, *PAIRS):
        if probe.expected is not None:
            lines += _errors(probe, outcomes)
    return "\n".join(lines) + "\n"


def _table(probes: Sequence[Probe], titles: Sequence[str], outcomes: Outcomes) -> list[str]:
    lines = [f"| option | tested effect | {' | '.join(titles)} |", "|---|---|" + "---|" * len(titles)]
    for probe in probes:
        cells = [_cell(_by_site(probe, title, outcomes)) for title in titles]
        lines.append(f"| {probe.option} | {probe.effect} | {' | '.join(cells)} |")
    return lines


def _by_site(probe: Probe, title: str, outcomes: Outcomes) -> dict[bool | None, str]:
    return {c.site: text for c, text in outcomes.items() if c.probe is probe and c.place.title == title}


def _cell(found: dict[bool | None, str]) -> str:
    short = {site: text if text in (WORKS, NOTHING_TRAVELS) else _kind(text) for site, text in found.items()}
    if len(set(short.values())) == 1:
        return next(iter(short.values()))
    sites = {text: [str(site) for site in short if short[site] == text] for text in short.values()}
    return "; ".join(f"{', '.join(which)}: {text}" for text, which in sites.items())


def _errors(probe: Probe, outcomes: Outcomes) -> list[str]:
    where: dict[str, list[str]] = {}
    for case, text in outcomes.items():
        if case.probe is probe and text not in (WORKS, NOTHING_TRAVELS):
            where.setdefault(_quoted(text), []).append(case.place.title)
    return [f"| {probe.option} | {'; '.join(dict.fromkeys(w))} | {text} |" for text, w in where.items()]


def _kind(text: str) -> str:
    return f"`{text.partition(':')[0]}`"


def _quoted(text: str) -> str:
    """An error without what is another in every place."""
    kind, _, message = text.partition(": ")
    message = re.sub(
        r"(kvstore:?) (None|'\w+')", r"\1 …", re.sub(r"FactorScheduler\(.*?\)", "the scheduler", message)
    )
    return f"`{kind}`: {message}".replace("|", "\\|").replace("\n", " ")


def main() -> int:
    sys.stdout.write(page(all_outcomes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
