"""The scripts in docs/frameworks.md run as they stand, as two workers and two servers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.frameworks.jobs import ROOT, launch
from tests.support.jobs import run_program

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL)
FRAMEWORKS = ("lightning", "skorch", "transformers", "accelerate")


PLAIN, INSIDE = BLOCKS[:2], BLOCKS[2:]


def name_of(code: str) -> str:
    return next(
        one
        for one in FRAMEWORKS
        if f"from {one}" in code or f"import {one}" in code or f".{one} import" in code
    )


@pytest.mark.parametrize("code", INSIDE, ids=map(name_of, INSIDE))
def test_a_script_of_the_page_runs_as_a_job(code: str, tmp_path: Path) -> None:
    needed = name_of(code)
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}; make test-frameworks installs it")
    (tmp_path / "train.py").write_text(code)
    done = launch(tmp_path / "train.py", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


def test_of_uneven_examples_a_sampler_repeats_one_and_join_sees_each_once(tmp_path: Path) -> None:
    """As the page says of its first two scripts."""
    told = """
import json, pathlib
pathlib.Path(f"{trainer.rank}.json").write_text(json.dumps(seen))
"""
    for code, interleaved in zip(PLAIN, ([7, 7], [7, 6]), strict=True):
        run_program(["-c", f"import os; os.chdir({str(tmp_path)!r})\n{code}{told}"], tmp_path, 2, 2)
        seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        assert [len(one) for one in seen] == [2 * count for count in interleaved]
        for epoch in range(2):
            parts = [one[epoch * n : (epoch + 1) * n] for one, n in zip(seen, interleaved, strict=True)]
            assert set(parts[0] + parts[1]) == set(range(13))
