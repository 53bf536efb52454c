"""What the pages say about speed is what the committed results of the benchmarks say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
SIZING = (ROOT / "docs" / "sizing.md").read_text()
SLOW = (ROOT / "docs" / "slow.md").read_text()


def found(name: str, column: str) -> dict[tuple[str, str, str], float]:
    """The medians of a column of a benchmark's table, by workload, workers x servers and system."""
    lines = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text().splitlines()
    heads, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")
    ]
    records = [dict(zip(heads, row, strict=True)) for row in rows]
    return {
        (one["workload"], one["workers x servers"], one["system"]): float(one[column].split()[0])
        for one in records
        if one[column] and not one[column].startswith("missing")
    }


@pytest.mark.parametrize(
    ("link", "model"),
    [("1000 Mb/s", "24 MiB: 16 x 390,144 floats"), ("100 Mb/s", "2 MiB: 16 x 38,912 floats")],
)
def test_the_page_on_sizing_says_how_long_steps_over_links_took(link: str, model: str) -> None:
    took = found("bandwidth", "ms")
    plain, bf16, ternary = (
        took[f"{link}, {model}", "4 x 4", system] / 1000
        for system in ("kvtrainer", "kvtrainer bf16", "kvtrainer ternary")
    )
    row = f"| {model.partition(':')[0]} | {link} | 0.20 s | {plain:.2f} s | {bf16:.2f} s | {ternary:.2f} s |"
    assert row in SIZING


def test_the_page_on_choosing_says_what_links_cost() -> None:
    ratio = found("bandwidth", "kvtrainer is faster by")
    works = "1000 Mb/s, 24 MiB: 16 x 390,144 floats", "100 Mb/s, 2 MiB: 16 x 38,912 floats"
    for system, said in (
        ("gloo flat", "`dist_sync` compared with gloo"),
        ("kvtrainer bf16", "bf16 push and pull: time relative to uncompressed"),
        ("kvtrainer ternary", "ternary push and pull: time relative to uncompressed"),
        ("kvtrainer 1bit", "1bit push, ternary pull: time relative to uncompressed"),
    ):
        fast, slow = (ratio[work, "4 x 4", system] for work in works)
        assert f"| {said} | {fast:.2f} | {slow:.2f} |" in CHOOSING
        if system != "gloo flat":
            assert f"| {said.partition(':')[0]} | {fast:.2f} | {slow:.2f} |" in SLOW


def test_the_page_on_choosing_and_the_readme_say_what_training_loops_gained() -> None:
    ratio = found("end_to_end", "kvtrainer is faster by")
    names = {
        "MLP 13 M": "MLP of 13 M weights",
        "40 layers of 64 x 64": "40 layers of 64 \N{MULTIPLICATION SIGN} 64",
        "small CNN": "small CNN",
        "char transformer": "transformer over characters",
    }
    for work, said in names.items():
        ddp, device = (ratio[work, "2 x 2", system] for system in ("DDP", "kvtrainer device"))
        assert f"| {said} | {ddp:.2f} | {device:.2f} |" in CHOOSING
    for (work, said), digits in zip(names.items(), (1, 2, 2, 2), strict=True):
        said = said.replace("\N{MULTIPLICATION SIGN}", "x")
        row = rf"\| training (an? )?{said} \| DDP over gloo \| {ratio[work, '2 x 2', 'DDP']:.{digits}f} \|"
        assert re.search(row, README)


def test_the_page_on_choosing_says_what_more_workers_gained() -> None:
    ratio = found("scaling", "kvtrainer is faster by")
    for workers, servers, digits in ((1, 1, 2), (2, 2, 1), (4, 4, 1), (8, 2, 1)):
        gained = ratio["100 MiB: 16 x 1,638,400 floats", f"{workers} x {servers}", "gloo DDP"]
        row = f"{workers} worker{'s' * (workers > 1)}, {servers} server{'s' * (servers > 1)}"
        assert f"| {row} | {gained:.{digits}f} |" in CHOOSING


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("4 MiB: 1,000 x 1,000 floats", "1,000 parameters of 1,000 floats"),
        ("4 MiB: 10,000 x 100 floats", "10,000 of 100"),
        ("1,000 x 100 floats", "1,000 of 100"),
        ("100 x 100 floats", "100 of 100"),
    ],
)
def test_the_page_on_choosing_says_what_many_parameters_cost(work: str, said: str) -> None:
    ratio = found("key_scaling", "kvtrainer is faster by")
    gradients, weights = (ratio[work, "2 x 2", system] for system in ("gloo flat grads", "gloo flat"))
    assert f"| {said} | {gradients:.1f} | {weights:.2f} |" in CHOOSING


def test_the_readme_says_what_large_models_gained() -> None:
    ratio = found("dense_sync", "kvtrainer is faster by")
    work = "100 MiB: 16 x 1,638,400 floats"
    step, from_backward = (ratio[one, "2 x 2", "gloo DDP"] for one in (work, f"{work}, from backward"))
    assert f"Adam | gloo in DDP's buckets, then torch's fused Adam | {step:.1f} |" in README
    assert f"| the same step with its backward pass | the same | {from_backward:.1f} |" in README
