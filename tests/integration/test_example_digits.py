"""The example of digits learns what a plain PyTorch loop learns; `make demo` runs it with servers."""

from __future__ import annotations

import pytest

from tests.support.examples import example


def test_one_process_without_servers_learns_what_a_plain_loop_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["digits.py"])
    example("digits").main()
    assert capsys.readouterr().out.endswith("all checks passed\n")
