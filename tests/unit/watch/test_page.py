"""The page of a job, and its metrics, without a browser."""

from __future__ import annotations

import itertools
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from kvstore_server.errors import ConfigurationError
from kvstore_server.keys import KeyHolder, Role, make_keys
from kvtrainer.watch import top
from kvtrainer.watch.job import JobView
from kvtrainer.watch.top import HISTORY, Page, format_metrics
from tests.support.browser import WITH_CHROMIUM, in_browser
from tests.support.limits import LIMIT
from tests.support.processes import ROOT
from tests.unit.watch.test_job import job, seen, server, worker


def view() -> JobView:
    before = server(job([worker(0), worker(1)]))
    waits = [{"what": f"round {at}", "seconds": at / 10, "missing": [0]} for at in (9, 10)]
    slow = worker(1, 1.5, says={"seconds": 4.0, "steps": 8, "loss": 0.25})
    now = server(job([worker(0), slow], rounds=6, bytes_in=700, waits=waits))
    return seen([before], [now])


def apart() -> JobView:
    """A job whose workers have rounds of their own."""
    facts = server(job([worker(0, round=9), worker(1, round=4)], mode="async"))
    return seen([facts], [facts])


@contextmanager
def showing(one: JobView) -> Iterator[Page]:
    """A page that has seen one view, and goes on until the block ends."""
    shown, over = Event(), Event()

    def views() -> Iterator[JobView]:
        yield one
        shown.set()
        over.wait(LIMIT)

    served = Page(views(), "127.0.0.1", 0)
    thread = Thread(target=served.run)
    thread.start()
    assert shown.wait(LIMIT)
    yield served
    over.set()
    thread.join(LIMIT)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with showing(view()) as page:
        yield page


def fetch(url: str, **headers: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=LIMIT) as answer:
        body: bytes = answer.read()
        return body


def test_without_prometheus_client_an_error_says_so(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(urllib.error.HTTPError) as caught:
        fetch(f"{page.url}metrics")
    assert caught.value.code == 501
    assert "pip install 'kvtrainer[watch]'" in caught.value.read().decode()


def test_views_come_as_json(page: Page) -> None:
    [seen_now] = json.loads(fetch(f"{page.url}view.json"))
    assert seen_now["jobs"][0]["slowest"] == 1
    assert seen_now["jobs"][0]["rounds"] == 3.0


def test_the_page_names_no_other_host(page: Page) -> None:
    text = fetch(page.url).decode()
    assert "<title>" in text
    assert set(re.findall(r"(?:https?:)?//[\w.]+", text)) <= {"http://www.w3.org"}, "the name space of SVG"


def test_a_request_under_the_name_of_another_host_is_refused(page: Page) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(f"{page.url}view.json", Host="evil.example")
    refused.value.close()
    assert refused.value.code == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:81", "https://localhost:80.evil"]
)
def test_a_request_from_a_page_of_another_site_is_refused(page: Page, origin: str) -> None:
    assert page.answer("/view.json", "localhost:80", origin=origin)[0] == 403
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(f"{page.url}view.json", Origin=origin)
    refused.value.close()
    assert refused.value.code == 403


def test_the_page_itself_may_ask(page: Page) -> None:
    assert page.answer("/view.json", "localhost:80", origin="http://localhost:80")[0] == 200


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "[::1]:9", "10.1.2.3:80"])
def test_a_request_under_an_address_is_answered(page: Page, host: str) -> None:
    assert page.answer("/view.json?x", host)[0] == 200


def test_another_path_is_not_found(page: Page) -> None:
    assert page.answer("/etc/passwd", "localhost")[0] == 404


def test_a_head_request_has_the_headers_of_the_page_without_the_page(page: Page) -> None:
    request = urllib.request.Request(page.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        assert answer.read() == b""
        assert int(answer.headers["Content-Length"]) == len(fetch(page.url))


def test_the_page_is_healthy_while_a_server_answers(page: Page) -> None:
    assert page.answer("/healthz", "localhost")[0] == 200
    unseen = Page(iter(()), "127.0.0.1", 0)
    assert unseen.answer("/healthz", "localhost")[0] == 503
    unseen.run()
    with showing(seen([None], [None])) as silent:
        assert silent.answer("/healthz", "localhost")[0] == 503


def test_a_port_that_is_taken_is_refused(page: Page) -> None:
    port = int(page.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigurationError):
        Page(iter(()), "127.0.0.1", port)


def test_metrics_hold_what_the_view_holds() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(format_metrics(view()).decode())
        for sample in family.samples
    }
    assert found["kvstore_worker_late_ratio", "train", "1"] == 0.75
    assert found["kvstore_worker_loss", "train", "1"] == 0.25
    assert ("kvstore_worker_loss", "train", "0") not in found
    assert found["kvstore_worker_steps_total", "train", "1"] == 8
    assert found["kvstore_job_rounds_total", "train"] == 6
    assert found["kvstore_server_up", "tcp://s:0"] == 1.0
    assert found["kvstore_server_cpu_seconds_total", "tcp://s:0"] == 4.0
    assert found["kvstore_server_received_bytes_total", "train", "tcp://s:0"] == 700


def test_durations_of_rounds_are_a_histogram_with_buckets_that_add_up() -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    times = {"bounds": [0.1, 1.0], "counts": [3, 2, 1], "sum": 7.5}
    facts = server(job([worker(0)], round_seconds=times))
    [family] = [
        one
        for one in text_string_to_metric_families(format_metrics(seen([facts], [facts])).decode())
        if one.name == "kvstore_job_round_duration_seconds"
    ]
    assert family.type == "histogram"
    told = {(one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in family.samples}
    assert told == {
        ("bucket", "0.1"): 3,
        ("bucket", "1.0"): 5,
        ("bucket", "+Inf"): 6,
        ("count", None): 6,
        ("sum", None): 7.5,
    }


def test_every_metric_is_named_by_the_conventions_of_prometheus() -> None:
    kinds = dict(re.findall(r"^# TYPE (kvstore_\w+) (\w+)$", format_metrics(view()).decode(), re.MULTILINE))
    units = ("seconds", "bytes", "ratio", "up", "workers", "loss", "behind")
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter")
        assert kind == "counter" or name.endswith(units)


def test_of_a_server_that_does_not_answer_the_metrics_say_that_alone() -> None:
    pytest.importorskip("prometheus_client")
    facts = server(job([worker(0)]))
    told = format_metrics(seen([facts, None], [facts, None])).decode()
    silent = [line for line in told.splitlines() if 'server="tcp://s:1"' in line]
    assert silent == ['kvstore_server_up{server="tcp://s:1"} 0.0']


def test_metrics_come_once_there_is_a_view() -> None:
    page = Page(iter(()), "127.0.0.1", 0)
    assert page.answer("/metrics", "localhost")[0] == 503
    page.run()


def test_old_views_are_dropped() -> None:
    page = Page(itertools.repeat(view(), HISTORY + 5), "127.0.0.1", 0)
    page.run()
    assert len(json.loads(page.answer("/view.json", "localhost")[2])) == HISTORY


@WITH_CHROMIUM
def test_a_browser_shows_who_is_late(page: Page) -> None:
    text = re.sub(r"<[^>]+>", " ", in_browser(page.url))
    assert "The others wait for rank 1 (host:1) 75 % of the time." in text
    assert "Step 8, 3.0 rounds a second, running for 1:00." in text
    assert re.search(r"rounds a second:\s+3 ", text)
    assert "round 10 waits for rank 0, 1.0 s" in text
    assert "round 9 " not in text, "that is part of a round"


@WITH_CHROMIUM
def test_a_rank_is_red_where_the_others_wait_for_it_often(page: Page) -> None:
    assert '<p id="slowest" class="bad">' in in_browser(page.url)


@WITH_CHROMIUM
def test_a_rank_is_not_red_where_the_others_wait_for_it_now_and_then() -> None:
    before, now = (server(job([worker(0), worker(1, late)])) for late in (0.0, 0.2))
    with showing(seen([before], [now])) as page:
        body = in_browser(page.url)
    assert "10 % of the time." in body
    assert 'class="bad"' not in body


@WITH_CHROMIUM
def test_a_browser_shows_how_far_the_last_worker_is_behind() -> None:
    with showing(apart()) as page:
        text = re.sub(r"<[^>]+>", " ", in_browser(page.url))
    assert re.search(r"last worker behind the first, in rounds:\s+5 ", text)


def test_every_metric_is_on_the_board_and_the_board_asks_for_no_other() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    told = set(re.findall(r"^# TYPE (kvstore_\w+) \w+$", format_metrics(view()).decode(), re.MULTILINE))
    found = {one.removesuffix("_bucket") for one in re.findall(r"kvstore_\w+", " ".join(asked))}
    assert found == told


def test_the_labels_that_the_board_asks_for_are_those_of_the_metrics_and_none_is_prometheus_own() -> None:
    board = (ROOT / "docs" / "grafana.json").read_text()
    asked = re.findall(r"(kvstore_\w+)(?:\{|, )(\w+)(?:=|\))", board.replace("_bucket", "_count"))
    text = "".join(format_metrics(one).decode() for one in (view(), apart()))
    told = set(re.findall(r"(?m)^(kvstore_\w+)\{(\w+)=", text))
    assert len(asked) > 10
    assert set(asked) <= told
    assert {label for _, label in told} & {"job", "instance"} == set()


def test_the_panels_of_the_board_do_not_cover_each_other() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    covered = [
        (x, y)
        for place in [panel["gridPos"] for panel in board["panels"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(covered) == len(set(covered))
    assert max(x for x, _ in covered) == 23


@pytest.mark.parametrize("path", ["/view.json", "/metrics"])
def test_a_page_with_a_token_tells_nobody_else_of_the_job(path: str) -> None:
    page = top.Page(iter(()), "127.0.0.1", 0, "secret")
    try:
        for given in ("", "Bearer", "Bearer other", "Basic secret", "secret", "Bearer sécret"):
            status, _, body = page.answer(path, "127.0.0.1", given)
            assert status == 401
            assert b"secret" not in body
        assert page.answer(path, "127.0.0.1", "Bearer secret")[0] != 401
        assert page.answer("/", "127.0.0.1")[0] == 200
    finally:
        page._server.server_close()


def test_a_page_that_other_hosts_reach_takes_its_token_from_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys", [KeyHolder("observer", b"", Role.OBSERVER)])
    monkeypatch.setenv("KVSTORE_KEYS", str(tmp_path / "keys"))
    given: list[str] = []
    monkeypatch.setattr(top, "_serve_page", lambda *arguments: given.append(arguments[4]) or 0)
    assert top.main(["--http", "0.0.0.0:0", "127.0.0.1:9000"]) == 0
    assert given == [(tmp_path / "keys" / "dashboard.token").read_text().strip()]
    (tmp_path / "keys" / "dashboard.token").chmod(0o644)
    with pytest.raises(SystemExit):
        top.main(["--http", "0.0.0.0:0", "127.0.0.1:9000"])
    assert "dashboard.token" in capsys.readouterr().err
