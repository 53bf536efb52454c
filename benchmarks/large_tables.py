"""What do the rows of an embedding cost on the wire, and how does a table of 10 million rows grow and get saved?

    python benchmarks/large_tables.py --out benchmarks/results/large_tables

"wire": 2 workers and 2 servers over TCP train a table of 1 M ids x 64 with batches of 8,192 ids by Zipf's law (1.2).
Bytes of rows in a step of a worker, without headers and ids, beside one row for each id that is looked up, after the
warm-up: without a cache, with one that always asks (age 0), and with one that uses rows up to 10 rounds old. A row that
was looked up to be trained has changed when it is read again, so age 0 saves nothing there; in "evaluation" there are 4
lookups without gradient beside each that is trained.

"growth": 1 worker and 2 servers let a table x 16 grow to 10 M rows with Adagrad, 65,536 new ids in each step: the
median step from 1 M rows on, and the longest beside it; bytes beyond weights and optimizer state; a full save beside
writing as many bytes to the same file system (with fsync); and a delta after 1 % of the rows were trained.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import suite

_TITLE = "Rows of a large embedding: on the wire, as it grows, and saved"
_HEAD = ("what", "setting", "figure", "beside")
_LEGEND = "Medians over repetitions (min to max).\n"
_SETTINGS = "one thread in each process"
_READS = {"training": 0, "evaluation": 4}
"""Lookups without gradient in a step."""
_CACHES = {"no cache": (0, 0), "cache, age 0": (200_000, 0), "cache, age 10": (200_000, 10)}
"""Rows that are kept, and how old they may be."""
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Sample:
    """What rank 0 of a job has measured."""

    setting: str
    repetition: int
    values: dict[str, Any]


def main() -> int:
    """Run all, write what is known after every repetition, print the table; return 0."""
    options = _options()
    samples: list[Sample] = []
    for repetition in range(options.repetitions):
        for what, name in itertools.product(_READS, _CACHES):
            samples.append(
                Sample(f"{what}, {name}", repetition, _wire(options, *_CACHES[name], _READS[what]))
            )
        samples.append(Sample("growth", repetition, _growth(options)))
        rows_of_table = _rows(samples, options)
        print("\n".join(rows_of_table), flush=True)
        if options.out:
            table = harness.Table(_TITLE, _LEGEND, _HEAD, rows_of_table)
            harness.write_table(Path(options.out), table, samples, _SETTINGS)
    return 0


def _wire(options: argparse.Namespace, cache_rows: int, cache_age: int, reads: int) -> dict[str, Any]:
    arguments = ["--what", "wire", "--rows", "1000000", "--width", "64", "--ids", "8192", "--warm-up", "60"]
    arguments += [
        "--rounds",
        "60",
        "--cache-rows",
        str(cache_rows),
        "--cache-age",
        str(cache_age),
        "--reads",
        str(reads),
    ]
    return _run(options, 2, arguments, {"KVSTORE_TRANSPORT": "tcp"})


def _growth(options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--what", "growth", "--rows", str(options.rows), "--width", "16"]
    return _run(options, 1, [*arguments, "--folder", options.folder], {})


def _run(
    options: argparse.Namespace, workers: int, arguments: Sequence[str], environ: dict[str, str]
) -> dict[str, Any]:
    command = [sys.executable, str(_HERE / "large_tables_worker.py"), *arguments]
    return harness.run_kvtrainer_job(command, workers, 2, options.job_timeout, environ=environ)


def _rows(samples: Sequence[Sample], options: argparse.Namespace) -> list[str]:
    rows, batch = list[str](), 8192 * 64 * 4
    for what, name in itertools.product(_READS, _CACHES):
        every = batch * (1 + _READS[what])
        found = [one.values["pulled"] for one in samples if one.setting == f"{what}, {name}"]
        plain = [one.values["pulled"] for one in samples if one.setting == f"{what}, no cache"]
        text = f"{harness.spread([every / one for one in found])} times fewer than a row for each id"
        if name != "no cache":
            saved = [100 * (1 - one / other) for one, other in zip(found, plain, strict=True)]
            text += f", {harness.spread(saved)} % fewer than without"
        rows.append(
            _row(
                "wire, pull", f"{what}, {name}", f"{harness.spread([one / 1024 for one in found])} KiB", text
            )
        )
    pushed = [one.values["pushed"] for one in samples if one.setting == "training, no cache"]
    text = f"{harness.spread([batch / one for one in pushed])} times fewer than a row for each id"
    rows.append(_row("wire, push", "training", f"{harness.spread([one / 1024 for one in pushed])} KiB", text))
    grown = [one.values for one in samples if one.setting == "growth"]
    setting = f"{options.rows / 1e6:g} M x 16, Adagrad"
    seconds = harness.spread([1000 * one["seconds"] for one in grown])
    longest = harness.spread([one["longest"] / one["seconds"] for one in grown])
    rows.append(_row("growth, step", setting, f"{seconds} ms", f"longest {longest} x"))
    beyond = harness.spread([100 * one["beyond"] for one in grown])
    rows.append(_row("growth, memory", setting, f"{beyond} %", "beyond weights and state"))
    speed = harness.spread([one["nbytes"] / one["full"] / 2**20 for one in grown])
    raw = harness.spread([one["raw"] / one["full"] for one in grown])
    rows.append(_row("full save", setting, f"{speed} MiB/s", f"{raw} of the speed of the disk"))
    share = harness.spread([100 * one["share"] for one in grown])
    delta = harness.spread([one["delta"] for one in grown])
    rows.append(_row("delta of 1 %", setting, f"{share} % of the bytes", f"{delta} s"))
    return rows


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=suite.positive, default=3)
    parser.add_argument("--rows", type=suite.positive, default=10_000_000, help="of the table that grows")
    parser.add_argument("--folder", default="", help="where to save; default: the folder for temporary files")
    parser.add_argument("--job-timeout", type=suite.positive, default=900, help="seconds of a job")
    parser.add_argument("--out", default="", help="write OUT.json and OUT.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
