"""kvtop's command line and its page, over servers that are played."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtrainer.watch import top
from tests.unit.watch.test_job import job, seen, server, worker


def play(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[float]:
    """Have servers give these answers, one after the other; returns the timeouts that they were asked with."""
    left, asked = list(answers), []

    def look(addresses: Sequence[str], timeout: float, keys: Any) -> list[Any]:
        asked.append(timeout)
        return [left.pop(0)] * len(addresses)

    monkeypatch.setattr(top, "probe_servers", look)
    monkeypatch.setenv("KVSTORE_SERVERS", "")
    monkeypatch.setenv("KVSTORE_KEYS", "")
    return asked


def shown(view: Any, width: int = 120) -> str:
    written = io.StringIO()
    pytest.importorskip("rich.console").Console(file=written, width=width).print(top.render_view(view))
    return written.getvalue()


def test_json_is_one_view(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = play(monkeypatch, server(job([worker(0)])), server(job([worker(0)], updates=4)))
    assert top.main(["--json", "--interval", "0.1", "127.0.0.1:9000"]) == 0
    assert json.loads(capsys.readouterr().out)["jobs"][0]["updates"] == 4
    assert asked == [0.1, 0.1]


@pytest.mark.parametrize("is_argument", [True, False])
@pytest.mark.parametrize("said", ["tcp://127.0.0.1:7000,tcp://127.0.0.1:7001", "@servers"])
def test_servers_are_named_as_workers_take_them_in_the_environment_or_on_the_command_line(
    said: str,
    is_argument: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    play(monkeypatch, None, None)
    monkeypatch.chdir(tmp_path)
    Path("servers").write_text("tcp://127.0.0.1:7000\ntcp://127.0.0.1:7001\n")
    monkeypatch.setenv("KVSTORE_SERVERS", "" if is_argument else said)
    arguments = ["--json", "--interval", "0.1", *([said] if is_argument else [])]
    assert top.main(arguments) == 1, "nobody answered"
    told = json.loads(capsys.readouterr().out)
    assert [one["address"] for one in told["servers"]] == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001"]


def test_a_clock_that_is_set_back_delays_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, None, None)
    times, pauses = iter([1000.0, 10.0, 11.0]), []
    next(top.follow_job(["tcp://h:1"], 2.0, lambda: next(times), pauses.append))
    assert pauses == [2.0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "KVSTORE_SERVERS"),
        (["nowhere"], "'nowhere'"),
        (["--interval", "0", "127.0.0.1:9000"], "from 0.1 to 3600"),
        (["--http", "9000", "127.0.0.1:9000"], "is not HOST:PORT"),
        (["--http", "0.0.0.0:0", "127.0.0.1:9000"], "--allow-unauthenticated-bind"),
    ],
)
def test_what_cannot_be_looked_at_is_one_line_which_may_follow_the_usage(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch)
    monkeypatch.delenv("KVSTORE_ALLOW_UNAUTHENTICATED_BIND", raising=False)
    with pytest.raises(SystemExit) as ended:
        top.main(arguments)
    assert ended.value.code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    assert line.startswith("kvtop: ")
    assert told in line


@pytest.mark.parametrize(("arguments", "missing"), [(["--once"], "rich.console"), ([], "rich.live")])
def test_without_rich_it_says_what_to_install(
    arguments: list[str], missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, server(job([worker(0)])), server(job([worker(0)])))
    monkeypatch.setitem(sys.modules, missing, None)
    assert top.main([*arguments, "--interval", "0.1", "127.0.0.1:9000"]) == 1
    [said] = capsys.readouterr().err.splitlines()
    assert "pip install 'kvtrainer[watch]'" in said


def test_the_page_names_the_slow_worker() -> None:
    text = shown(seen([server(job([worker(0), worker(1)]))], [server(job([worker(0), worker(1, 1.0)]))]))
    assert "waits for rank 1 50%" in " ".join(text.split())


def test_in_80_columns_all_is_shown_but_the_ends_of_hosts_names() -> None:
    before, now = server(job([worker(0), worker(1)])), server(job([worker(0), worker(1, 1.5)], rounds=6))
    view = seen([before], [now])
    workers = [
        one._replace(address="a-host-with-a-long-name:12345", steps=123.4, samples=12345.0, loss=0.012345)
        for one in view.jobs[0].workers
    ]
    text = shown(view._replace(jobs=[view.jobs[0]._replace(workers=workers)]), 80)
    for told in ("steps/s", "samples/s", "works", "waits", "late", "loss", "last sign", "12345", "0.01235"):
        assert told in text
    assert "a-hos" in text


def test_the_page_shows_waits_errors_and_servers_that_are_silent() -> None:
    now = job(
        [worker(0)],
        waits=[{"what": "round 7 of 'w'", "seconds": 3.0, "missing": [2]}],
        errors=[{"rounds": 6, "text": "WorkerLostError: gone"}],
    )
    text = shown(seen([server(now), None], [server(now), None]))
    for part in ("round 7 of 'w'", "rank 2", "WorkerLostError: gone", "no answer"):
        assert part in text


def test_a_wait_that_is_part_of_a_round_is_not_shown() -> None:
    waits = [{"what": f"round {at}", "seconds": at / 10, "missing": [0]} for at in (9, 10)]
    facts = server(job([worker(0), worker(1)], waits=waits))
    text = shown(seen([facts], [facts]))
    assert "round 10, for rank 0" in text
    assert "round 9" not in text


def test_who_is_furthest_behind_is_shown_where_workers_have_rounds_of_their_own() -> None:
    facts = server(job([worker(0, round=9), worker(1, round=4)], mode="async"))
    assert "rank 1 is 5 rounds behind the first" in shown(seen([facts], [facts]))


def test_servers_of_which_none_answers_are_not_taken_for_idle_ones() -> None:
    silent, idle = shown(seen([None], [None])), shown(seen([server(), None], [server(), None]))
    assert "no server answers" in silent
    assert "no job is on" not in silent
    assert "no job is on" in idle


def test_what_others_named_is_shown_as_it_is_and_commands_no_terminal() -> None:
    facts = server(job([worker(0, address="[::1]:77"), worker(1, address="\x1b[2Jgone")], "[bold]job[/bold]"))
    text = shown(seen([facts], [facts]))
    assert "\x1b" not in text
    assert "[::1]:77" in text
    assert "[bold]job[/bold]" in text


def test_rates_are_of_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 100, 110, 120, 130, 140, 150]
    answers = [
        server(job([worker(0)], rounds=count), clock=500.0 + at, uptime=90.0 + at)
        for at, count in enumerate(counts)
    ]
    play(monkeypatch, *answers)
    times = iter([moment for at in range(len(counts)) for moment in (float(at), float(at))])
    next(times)
    views = top.follow_job(["tcp://h:1"], 1.0, lambda: next(times), lambda _: None)
    assert [next(views).jobs[0].rounds for _ in counts[1:]] == [100.0, 55.0, 40.0, 32.5, 28.0, 10.0]
