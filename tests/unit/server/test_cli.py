"""--ready-fd of a server: what cannot be written to is refused before the server listens."""

from __future__ import annotations

import os

import pytest

from kvstore_server.cli import main


def refusal_of(ready_fd: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--ready-fd", ready_fd])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("ready_fd", ["777", "-1", "9" * 30])
def test_a_descriptor_that_is_not_open_is_wrong_usage(
    ready_fd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = refusal_of(ready_fd, capsys)
    assert (
        f"--ready-fd {ready_fd} is not open in this process; the program that starts the server must pass"
        in text
    )


def test_a_descriptor_that_is_only_read_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    try:
        assert f"--ready-fd {reading} is open for reading only" in refusal_of(str(reading), capsys)
    finally:
        os.close(reading)
        os.close(writing)
