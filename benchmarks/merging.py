"""How long does it take to merge rows with equal ids by sorting them, beside tables that tell where an id was?

    python benchmarks/merging.py --out benchmarks/results/merging

8,192 ids of 1 M rows of 64 floats, uniform and by Zipf's law, on one thread: as a backward pass leaves them, which a
worker merges; and those of two workers, each distinct and in order, which a server merges. kvtrainer sorts ids. A table
with a place for each row that there could be is kept from call to call; a dict is Python's. The limit is a copy of the
rows that are merged.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import harness
import suite

HERE = Path(__file__).resolve().parent
TITLE = "Merging rows with equal ids on one thread: by sort, table and dict"
COPY = "copy"
SYSTEMS = {suite.OURS: "sort", "table of all rows": "table", "dict": "dict", COPY: "copy"}
_GIVEN = {"1": "as drawn", "2": "of 2 workers, in order"}


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    systems = suite.choose(dict.fromkeys(SYSTEMS, ""), options.systems)
    question = suite.Question(TITLE, systems, unit="µs", bound=COPY, setting="threads")
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "numpy"])
    return suite.run(question, [None], functools.partial(_measure, options=options), versions, options)


def _measure(system: str, job: None, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Measure one way in a fresh process."""
    command = [sys.executable, str(HERE / "merging_worker.py"), "--way", SYSTEMS[system]]
    for name in ("rows", "width", "ids", "rounds"):
        command += [f"--{name}", str(getattr(options, name))]
    found = {}
    for name, values in harness.run_process(command, options.job_timeout).items():
        kind, _, workers = name.partition(", ")
        found[harness.Case(f"{options.ids:,} ids, {kind}, {_GIVEN[workers]}", "1", "-")] = values
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=3).add_argument
    add("--rows", type=suite.positive, default=1_000_000, help="that there could be")
    add("--width", type=suite.positive, default=64, help="floats of a row")
    add("--ids", type=suite.positive, default=8_192, help="of a worker")
    add("--rounds", type=suite.positive, default=30, help="timed merges of a job")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
