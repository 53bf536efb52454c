"""How fast are gradients compressed and decompressed, beside copying them?

    python benchmarks/compression.py --out benchmarks/results/compression

Float32 gradients of one table, slice by slice on one thread: encoded with error feedback as a worker does it, and
checked, decoded and added as a server does it. The limit is a plain copy of the same slices.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness
import suite
from compression_worker import COPY

HERE = Path(__file__).resolve().parent
KINDS = ("fp16", "bf16", "int8", "ternary", "2bit", "1bit", "topk")
BEFORE = "before"
TITLE = "Compression of gradients on one thread"


def main() -> int:
    """Run the comparison and write what is known after every repetition; return 0."""
    options = _options()
    known = dict.fromkeys([suite.OURS, *[BEFORE] * bool(options.before), COPY], "")
    systems = suite.choose(known, options.systems)
    question = suite.Question(TITLE, systems, unit="GB/s", bound=COPY, setting="threads")
    versions = harness.installed_versions(sys.executable, ["kvtrainer", "torch", "numpy"])
    kinds = list(suite.choose(dict.fromkeys(KINDS, ""), options.kinds))
    return suite.run(question, kinds, functools.partial(_measure, options=options), versions, options)


def _measure(system: str, kind: str, options: argparse.Namespace) -> dict[harness.Case, suite.Values]:
    """Measure a codec, or copies, in a fresh process."""
    folder = os.path.abspath(options.before) if system == BEFORE else str(HERE.parent)
    with tempfile.NamedTemporaryFile(prefix="kvtrainer-compression-") as out:
        command = [sys.executable, str(HERE / "compression_worker.py"), "--out", out.name]
        command += ["--kind", COPY if system == COPY else kind, "--rounds", str(options.rounds)]
        command += ["--floats", str(options.mib << 18)]
        environ = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environ, check=True, timeout=options.job_timeout)
        measured = json.loads(Path(out.name).read_text())
    return {harness.Case(f"{name}, {options.mib} MiB", "1", kind): one for name, one in measured.items()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = suite.add_options(parser, repetitions=3).add_argument
    add("--kinds", default="", help=f"of {', '.join(KINDS)}, commas between them")
    add("--mib", type=suite.positive, default=64, help="of gradients")
    add("--rounds", type=suite.positive, default=15, help="timed rounds of a job")
    add("--before", default="", metavar="DIR", help="another checkout, which takes turns with this one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
