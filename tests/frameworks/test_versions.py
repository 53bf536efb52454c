"""Which versions these tests run with: those at one end of what integrations take without a warning."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest

from kvtrainer.integrations import TESTED


@pytest.mark.parametrize("framework", sorted(TESTED.keys() - {"ray"}))
def test_a_framework_is_here_in_the_lowest_or_the_newest_version_that_is_said_to_be_tested(
    framework: str,
) -> None:
    try:
        found = version(framework)
    except PackageNotFoundError:
        pytest.skip(f"needs {framework}; make test-frameworks installs it")
    assert tuple(map(int, re.findall("[0-9]+", found)[:2])) in TESTED[framework]
