"""Is a step slower than it was at the last tag?

    python benchmarks/regress.py
    python benchmarks/regress.py --revision 1a2b3c4

The wheel of this working tree and that of the last tag, or of another revision, are installed in an environment each,
which uses the torch of this one; nothing is downloaded. Both do a few short cases in turns. A ratio is the former time
divided by today's, so below 1 today's is slower. Ends with 1 if a case takes at least 5 % longer in two of three runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import numpy as np
import sparse
import step_jobs
import suite
import torch
from sparse_steps import Table
from steps import Work

HERE = Path(__file__).resolve().parent
FORMER, TODAY = "former", "today"
SLOWER = 1.05
"""From which multiple of its former time on a case is slower."""


@dataclass(frozen=True)
class Case:
    """Work of `workers` and `servers`, or of one process if there are none, through the store of a worker script."""

    work: Work | Table
    store: str
    workers: int = 1
    servers: int = 0


_SMALL = Work(1, 16, "sgd", warm_up=100, rounds=1000)
CASES = {
    "small-1x1": Case(_SMALL, "trainer", 1, 1),
    "small-2x2": Case(_SMALL, "trainer", 2, 2),
    "keys-2x2": Case(Work(1000, 1000, warm_up=10, rounds=50), "trainer", 2, 2),
    "verbs-2x2": Case(Work(1000, 100, warm_up=10, rounds=50), "pushpull", 2, 2),
    "keys-in-process": Case(Work(1000, 1000, warm_up=10, rounds=100), "none"),
    "rows-in-process": Case(Table(1_000_000, 64, 8_192, rounds=100), "local"),
}


def main() -> int:
    """Compare, and print the table; return 1 if a case is slower, else 0."""
    options = _options()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    chosen = suite.choose(dict.fromkeys(CASES, ""), options.cases)
    repository = Path(harness.FOLDER)
    revision = find_revision(repository, options.revision)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(prefix="kvtrainer-regress-") as folder:
        environments = {name: Path(folder, name) for name in (FORMER, TODAY)}
        for name, environment in environments.items():
            source = Path(folder, f"{name}-source")
            copy_sources(repository, source, revision if name == FORMER else "")
            make_environment(environment, build_wheel(source, Path(folder, f"{name}-wheel")))
        for run in range(options.runs):
            turns = [FORMER, TODAY] if run % 2 == 0 else [TODAY, FORMER]
            for name in chosen:
                seconds = {one: measure(environments[one], CASES[name], options.job_timeout) for one in turns}
                found[name].append(seconds)
                print(f"{run} {name:16} {FORMER} {seconds[FORMER] * 1e3:.3f} ms, ", end="")
                print(f"{TODAY} {seconds[TODAY] * 1e3:.3f} ms", flush=True)
    print(f"\n{FORMER}: {revision}\n\n{table(found)}")
    return int(any(is_slower(ratios(one)) for one in found.values()))


def find_revision(repository: Path, wanted: str) -> str:
    """A revision of the repository as it was asked for, or else its last tag.

    Raises:
        SystemExit: there is no such revision, or no tag.
    """
    git = ["git", "-C", str(repository)]
    if not wanted:
        tag = subprocess.run([*git, "describe", "--tags", "--abbrev=0"], capture_output=True, text=True)
        if tag.returncode:
            raise SystemExit(
                "there is no tag to compare with; name a revision: make bench-regress REVISION=..."
            )
        wanted = tag.stdout.strip()
    known = [*git, "rev-parse", "--quiet", "--verify", "--end-of-options", f"{wanted}^{{commit}}"]
    if subprocess.run(known, capture_output=True).returncode:
        raise SystemExit(f"this repository has no revision {wanted!r}")
    return wanted


def copy_sources(repository: Path, target: Path, revision: str = "") -> None:
    """Copy the files of a revision; by default those of the working tree, with what is not committed yet."""
    git = ["git", "-C", str(repository)]
    target.mkdir()
    if revision:
        packed = subprocess.run(
            [*git, "archive", "--format=tar", revision], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True)
        return
    listed = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (repository / name).is_file():  # a file that was deleted is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, target / name)


def build_wheel(source: Path, target: Path) -> Path:
    """Build the wheel of some sources with the setuptools that is installed here."""
    build = [sys.executable, "-m", "build", "--quiet", "--wheel", "--no-isolation", "--outdir", str(target)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the wheel of {source.name} cannot be built:\n{done.stdout}{done.stderr}")
    [wheel] = target.glob("*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> None:
    """Make an environment that has a wheel, and all other packages from the environment that runs this."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    # After the installation, or pip would find this checkout's kvtrainer in there and try to replace it. Jobs do not
    # find it: .pth files, as of an editable package, have no effect in a folder that another .pth file names.
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch_of_another.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    code = "import kvtrainer, kvstore_server; print(kvtrainer.__file__, kvstore_server.__file__)"
    done = subprocess.run([python, "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    elsewhere = [name for name in done.stdout.split() if not Path(name).is_relative_to(folder)]
    if elsewhere:
        raise SystemExit(f"the environment {folder} has its packages from elsewhere: {', '.join(elsewhere)}")


def measure(environment: Path, case: Case, timeout: float) -> float:
    """Do a case in fresh processes of an environment, and compare the weights with those of torch in this process.

    Returns:
        The median seconds of a step.
    """
    work, binaries = case.work, environment / "bin"
    is_rows = isinstance(work, Table)
    with harness.Processes() as job, tempfile.TemporaryDirectory(prefix="kvtrainer-weights-") as folder:
        command = [
            str(binaries / "python"),
            str(HERE / ("sparse_worker.py" if is_rows else "step_worker.py")),
        ]
        if is_rows:
            command += ["--system", case.store, "--table", json.dumps(asdict(work)), "--optimizers", "sgd"]
            command += ["--workers", str(case.workers)]
        else:
            command += ["--store", case.store, "--works", json.dumps([asdict(work)])]
        command += ["--weights", f"{folder}/weights", "--out", str(job.out)]
        if case.servers:
            launch = [str(binaries / "kvlaunch"), "-n", str(case.workers), "-s", str(case.servers), "--"]
            command = [*launch, *command]
        # Neither this checkout's packages nor those of the working directory come before the wheel's.
        job.start(command, {"PYTHONPATH": ""}, folder)
        [values] = job.wait(timeout).values()
        [weights] = [torch.from_numpy(np.load(path)) for path in Path(folder).glob("weights.*.npy")]
    if isinstance(work, Table):
        expected = sparse.reference(work, "sgd", case.workers)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-4)
    else:
        step_jobs.check(weights, work, case.workers)
    return float(values["median"])


def ratios(runs: Sequence[Mapping[str, float]]) -> list[float]:
    """The former time of each run divided by today's: below 1, today's is slower."""
    return [seconds[FORMER] / seconds[TODAY] for seconds in runs]


def is_slower(found: Sequence[float]) -> bool:
    """Whether today's time is at least 5 % longer in most runs, which is two of three."""
    return 2 * sum(1 / ratio >= SLOWER for ratio in found) > len(found)


def table(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Seconds and ratios of each case in Markdown."""
    runs = max(map(len, found.values()))
    head = ["case", f"{FORMER} ms", f"{TODAY} ms", *[f"ratio {run + 1}" for run in range(runs)], ""]
    lines = [head, ["---"] * len(head)]
    for name, measured in found.items():
        both = [harness.spread([1e3 * seconds[one] for seconds in measured]) for one in (FORMER, TODAY)]
        values = ratios(measured)
        verdict = "slower" if is_slower(values) else ""
        lines.append([name, *both, *[f"{one:.3f}" for one in values], verdict])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--revision", default="", help="what to compare with; by default the last tag")
    add("--cases", default="", help=f"of {', '.join(CASES)}, commas between them; all by default")
    add("--runs", type=suite.positive, default=3, help="fresh jobs of both for each case")
    add("--job-timeout", type=float, default=120.0, help="seconds after which a job is killed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
