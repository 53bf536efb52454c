"""A running job in a browser, and for Prometheus: a small HTTP server, in a process of its own, that only looks.

    /            the page; it asks for nothing but what follows, and no other host
    /view.json   the last views, oldest first
    /metrics     the last one, as Prometheus reads it

A page of another site could have a browser ask for these under a name that it makes point here; so a request must name
an address, `localhost`, or the host that was given.
"""

from __future__ import annotations

import ipaddress
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from kvstore_server.errors import ConfigurationError, KVStoreError
from kvtrainer.watch.job import View, as_values

HISTORY = 300
"""So many views are kept for those who open the page later."""


JOB = "kvjob"
"""The label of a job's name. `job` is Prometheus's own, so what is told under that name becomes exported_job."""


class Page:
    """Serves what is seen of a job until it is stopped.

    Args:
        views: Views, each when it is time for it; taken by a thread of its own.
        host, port: Where to listen; port 0 lets the system choose.

    Raises:
        ConfigurationError: the address is taken, or not one of this machine.
    """

    def __init__(self, views: Iterator[View], host: str, port: int) -> None:
        self._views = views
        self._host = host
        self._seen: deque[View] = deque(maxlen=HISTORY)
        self.problem = ""
        """Why there are no more views."""
        page = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def do_GET(self) -> None:
                status, kind, body = page.answer(self.path, self.headers.get("Host", ""))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.send_header("Content-Security-Policy", _POLICY)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Say nothing: a request each second would fill the terminal."""

        family = ThreadingHTTPServer.address_family
        try:
            is_six = ipaddress.ip_address(host).version == 6
        except ValueError:
            is_six = False
        kind = type("Served", (ThreadingHTTPServer,), {"address_family": 10 if is_six else family})
        try:
            self._server: ThreadingHTTPServer = kind((host, port), Handler)
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve the page at {host}:{port}: {error.strerror}; is another program there? Port 0 takes a "
                "free one"
            ) from None
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}/"

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until there are no more views, or `until` says so after one; blocks. Raises what looking raises."""
        threading.Thread(target=self._server.serve_forever, name="page", daemon=True).start()
        try:
            for view in self._views:
                self._seen.append(view)
                if until():
                    break
        except KVStoreError as error:
            self.problem = str(error)
            raise
        finally:
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str, host: str) -> tuple[int, str, bytes]:
        """Answer a request: the status, the type and the bytes."""
        if not _may_ask(host, self._host):
            return (
                403,
                _TEXT,
                b"this page is served under an address, localhost, or the host that was given\n",
            )
        path = path.partition("?")[0]
        if path == "/":
            return 200, _HTML, resources.files(__package__).joinpath("page.html").read_bytes()
        if path == "/view.json":
            return 200, _JSON, json.dumps([as_values(view) for view in list(self._seen)]).encode()
        if path == "/metrics":
            if not self._seen:
                return 503, _TEXT, b"nothing was seen yet\n"
            try:
                return 200, _METRICS, metrics(self._seen[-1])
            except ImportError as error:
                return 501, _TEXT, f"{error}; pip install 'kvtrainer[watch]' brings it\n".encode()
        return 404, _TEXT, b"there are /, /view.json and /metrics\n"


_TEXT, _HTML, _JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


def _may_ask(host: str, bound: str) -> bool:
    """Tell whether a request for that Host is meant for this page."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", bound.lower()):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def metrics(view: View) -> bytes:
    """Write a view as Prometheus reads it. Raises ImportError without prometheus_client."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Families(view))
    return bytes(generate_latest(registry))


class _Families:
    """The metrics of a view, as prometheus_client collects them."""

    def __init__(self, view: View) -> None:
        self._view = view

    def collect(self) -> Iterator[Any]:
        """Yield a family for each number of servers, jobs and workers."""
        from prometheus_client.core import GaugeMetricFamily

        servers = [([one.address], one) for one in self._view.servers]
        jobs = [([job.name], job) for job in self._view.jobs]
        workers = [([job.name, str(one.rank)], one) for job in self._view.jobs for one in job.workers]
        kinds: Sequence[tuple[str, list[str], Sequence[tuple[list[str], Any]], Mapping[str, str]]] = (
            ("server", ["server"], servers, _OF_SERVERS),
            ("job", [JOB], jobs, _OF_JOBS),
            ("worker", [JOB, "rank"], workers, _OF_WORKERS),
        )
        for kind, labels, rows, numbers in kinds:
            for name, text in numbers.items():
                family = GaugeMetricFamily(f"kvstore_{kind}_{name}", text, labels=labels)
                for values, one in rows:
                    if (number := getattr(one, name)) is not None:
                        family.add_metric(values, float(number))
                yield family


_OF_SERVERS = {
    "is_there": "1: the server has answered",
    "memory": "Bytes that are promised to jobs",
    "max_memory": "The limit of that; 0: none",
    "bytes_in": "Bytes of gradients a second",
    "bytes_out": "Bytes of weights a second, without those that workers map",
}
_OF_JOBS = {
    "rounds": "Rounds a second",
    "updates": "Updates of the weights so far",
    "samples": "Examples a second, where scripts tell",
    "num_workers": "How many ranks the job has",
    "longest_wait_seconds": "How long the oldest wait lasts already",
}
_OF_WORKERS = {
    "is_here": "1: the rank takes part",
    "late": "Share of the time in which the others waited for this rank",
    "waits": "Share of the time in which it waited for servers and other workers",
    "works": "Share of the time between its steps: data, forward and backward",
    "steps": "Steps a second",
    "samples": "Examples a second, where the script tells",
    "loss": "The last loss that the script has told",
    "behind": "Rounds that it has made fewer than the first worker, where rounds are each worker's own",
    "silence": "Seconds since its last sign; -1: it is not there",
}
