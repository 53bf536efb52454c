"""A real browser, without a window, for pages that a test serves."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.limits import LIMIT

WITH_CHROMIUM = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="there is no chromium to open the page"
)


def in_browser(url: str) -> str:
    """The body of a page as HTML, once a browser has run its script."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom"]
    shown = subprocess.run(["chromium", *flags, url], capture_output=True, text=True, timeout=LIMIT)
    return shown.stdout.partition("<body>")[2].partition("<script>")[0]
