"""The page of a real job in a real browser, and its metrics in a real Prometheus; one worker of the job is stopped."""

from __future__ import annotations

import json
import re
import shutil
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import WITH_CHROMIUM, in_browser
from tests.support.limits import LIMIT
from tests.support.processes import ROOT, Processes, eventually, held_port

WORKER = """
import os, signal, sys, torch, kvtrainer
net = torch.nn.Linear(4, 1)
store = kvtrainer.kvstore.create("dist_ssp", staleness=2, timeout=float(sys.argv[1]))
trainer = kvtrainer.Trainer(net, "sgd", {"learning_rate": 0.1}, kvstore=store)
while True:
    net(torch.ones(8, 4)).square().mean().backward()
    trainer.step(8)
    trainer.report(samples=8, loss=0.25)
    if trainer.rank == 1 and os.path.exists(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a job of two workers and two servers is shown, of which rank 1 was stopped after it had told its loss."""
    stop = tmp_path_factory.mktemp("page") / "stop"
    flags = ["-n", "2", "-s", "2", "--dashboard", "0"]
    worker = [sys.executable, "-c", WORKER, str(LIMIT), str(stop)]
    launch = [sys.executable, "-m", "kvtrainer.jobs.kvlaunch", *flags, "--", *worker]
    with Processes() as processes:
        job = processes.start(launch, env={"KVSTORE_DEAD_AFTER": str(LIMIT)})
        line = ""
        while "the page is at " not in line:
            line = job.line()
        url = line.rpartition(" ")[2]

        def workers() -> list[dict[str, Any]]:
            views = json.loads(fetch(f"{url}view.json"))
            return [one for job in (views[-1]["jobs"] if views else ()) for one in job["workers"]]

        assert eventually(lambda: [one["loss"] for one in workers()] == [0.25, 0.25])
        stop.touch()
        assert eventually(lambda: [one["late"] > 0.5 for one in workers()] == [False, True])
        yield url


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LIMIT) as answer:
        body: bytes = answer.read()
        return body


@WITH_CHROMIUM
def test_a_browser_names_the_worker_that_was_stopped(page: str) -> None:
    text = re.sub(r"<[^>]+>", " ", in_browser(page))
    assert re.search(r"The others wait for rank 1 \(\S+:\d+\) \d\d+ % of the time\.", text)
    assert re.search(r"last worker behind the first, in rounds:\s+[1-9]", text)
    assert re.search(r"waits for rank 1, \d+\.\d s", text)


@pytest.fixture(scope="module")
def prometheus(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a Prometheus is asked that looks at the page once a second."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus to read the metrics")
    pytest.importorskip("prometheus_client")
    target = urllib.parse.urlsplit(page).netloc
    folder = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    scrape = {"job_name": "training", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config.write_text(json.dumps({"scrape_configs": [scrape]}))  # JSON is YAML
    address = f"127.0.0.1:{held_port()}"
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address={address}"]
    with Processes() as processes:
        processes.start([program, *flags])
        yield f"http://{address}"


def ask(prometheus: str, query: str) -> list[dict[str, Any]]:
    """What Prometheus finds; nothing while it does not listen yet."""
    try:
        told = json.loads(fetch(f"{prometheus}/api/v1/query?query={urllib.parse.quote(query)}"))
    except OSError:
        return []
    found: list[dict[str, Any]] = told["data"]["result"]
    return found


def test_prometheus_finds_something_for_every_panel_of_the_board(prometheus: str) -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    assert eventually(lambda: ask(prometheus, "kvstore_job_workers") != [])
    [job] = {one["metric"]["kvjob"] for one in ask(prometheus, "kvstore_job_workers")}
    board_asks = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = [one.replace("$job", job).replace("$__rate_interval", "1m") for one in board_asks]
    assert len(asked) > 20
    for query in asked:
        assert eventually(lambda query=query: ask(prometheus, query) != []), query


def test_prometheus_finds_who_is_late_and_how_far_behind(prometheus: str) -> None:
    for query in ("kvstore_worker_late_ratio > 0.5", "kvstore_worker_rounds_behind > 0"):
        assert eventually(lambda query=query: ask(prometheus, query) != [])
        assert [one["metric"]["rank"] for one in ask(prometheus, query)] == ["1"]
